"""The roofline: which kernels of decode wait for memory, and what would have to change."""

from __future__ import annotations

from typing import Any

from ipywidgets import Button, Layout

from course_lib.lab import roofline
from course_lib.lab.roofline import Machine, Work
from course_lib.show.controls import dropdown, steps
from course_lib.show.explorer import Explorer
from course_lib.show.roofline_picture import RooflinePicture
from course_lib.show.text import fmt, percent

BATCHES = (1, 2, 4, 8, 16, 32, 64, 128, 256)
TOKENS = (2048, 4096, 8192)
MACHINES = {"round numbers": "toy", "this machine": "measured"}
KERNELS = tuple(roofline.works())
LETTERS = dict(zip(KERNELS, "FQ4AaSP", strict=True))


class RooflineExplorer(Explorer):
    """Operations per byte of the course's kernels under the roof of a machine.

    machine: "toy", 10 GB/s and 100 · 10⁹ float operations a second (400 of int8), or "measured",
    this machine with the kernels' own times, taken when first asked for. batch: rows that go
    through a weight matrix at once, one of BATCHES; tokens: cache that attention reads, one of
    TOKENS; kernel: the one to explain, one of KERNELS.
    """

    question = ("A product with weights does two operations with every weight that it reads. For "
                "one token, is that much or little? For how many tokens at once does memory stop "
                "being the limit, and which kernel never gets there?")
    alt = ("operations per second over operations per byte, both on log scales: the roof of the "
           "machine, and one letter for each kernel")
    drawing = RooflinePicture

    def __init__(self, *, machine: str = "toy", batch: int = 1, tokens: int = 4096,
                 kernel: str = "weights q8_0") -> None:
        again = Button(description="measure again", layout=Layout(width="12em"),
                       tooltip="time this machine and its kernels anew")
        again.on_click(lambda _: self._measure_again())
        super().__init__({
            "machine": dropdown("machine", MACHINES, machine, "whose roof and times are shown"),
            "batch": steps("tokens at once", BATCHES, batch,
                           "rows that one pass over the weights serves"),
            "tokens": steps("tokens in cache", TOKENS, tokens, "what attention reads"),
            "kernel": dropdown("kernel", KERNELS, kernel, "the one to explain"),
        }, extras=[again])

    def compute(self, machine: str = "toy", batch: int = 1, tokens: int = 4096,
                kernel: str = "weights q8_0") -> dict[str, Any]:
        """machine: its roof; works: {kernel: Work}; reached: {kernel: 10⁹ operations a second},
        measured, or those of the roof; measured: whether they are."""
        found = roofline.works(batch, tokens)
        is_measured = machine == "measured"
        if is_measured:
            roof, times = roofline.measure(batch, tokens)
            reached = {name: found[name].operations / t / 1e9 for name, t in times.items()}
        else:
            roof = roofline.TOY
            reached = {name: roof.roof(w.intensity, w.kind) for name, w in found.items()}
        return {"machine": roof, "measured": is_measured, "batch": batch, "tokens": tokens,
                "kernel": kernel, "works": found, "reached": reached,
                "limit": {name: limit(roof, w) for name, w in found.items()}}

    def react(self) -> None:
        params = self.params
        if params["machine"] == "measured" and not roofline.measured(params["batch"],
                                                                     params["tokens"]):
            self._busy("times on this machine")
        super().react()

    def _measure_again(self) -> None:
        with self._errors_in_view():
            roofline.forget()
            self.react()

    def describe(self, result: dict[str, Any]) -> str:
        return describe(result)

    def describe_stored(self, result: dict[str, Any]) -> str:
        """Without what differs from machine to machine."""
        if not result["measured"]:
            return describe(result)
        return "\n".join([*_head(result), *_table(result, timed=False),
                          "what this machine reaches stands in the live picture"])


def limit(machine: Machine, work: Work) -> str:
    """What sets the time of a kernel at best: "memory", "arithmetic", or "not known"."""
    ridge = machine.ridge(work.kind)
    if ridge is None:
        return "not known"
    return "memory" if work.intensity < ridge else "arithmetic"


def describe(r: dict[str, Any]) -> str:
    """The text twin of one `compute` result."""
    machine, name = r["machine"], r["kernel"]
    work, kind = r["works"][name], r["works"][name].kind
    roofs = [f"{_peak(machine, kind)} {kind} operations" for kind in machine.peaks]
    ridges = [f"{fmt(ridge)} ({kind})" for kind in machine.peaks
              if (ridge := machine.ridge(kind)) is not None]
    at_best = work.operations / machine.roof(work.intensity, kind) / 1e6
    lines = [*_head(r), f"{machine.name}: {fmt(machine.gb_per_s)} GB/s, {', '.join(roofs)} a second"
             + (f"; ridges at {', '.join(ridges)} operations per byte" if ridges else ""),
             *_table(r, timed=True),
             f"{name}: {fmt(work.operations / 1e6)} M operations, {fmt(work.nbytes / 1e6)} MB, so "
             f"{fmt(work.intensity)} per byte; limit: {r['limit'][name]}; at best {fmt(at_best)} "
             "ms"]
    if r["measured"] and name in r["reached"]:
        took = work.operations / r["reached"][name] / 1e6
        lines[-1] += f", measured {fmt(took)} ms = {percent(at_best / took)} of the roof"
    return "\n".join(lines)


def _head(r: dict[str, Any]) -> list[str]:
    return [f"products with weights {roofline.COLS} → {roofline.ROWS}, {r['batch']} at once; "
            f"attention of one token over {r['tokens']}"]


def _table(r: dict[str, Any], timed: bool) -> list[str]:
    reached = "reached" if r["measured"] else "at most"
    lines = [f"{'':3}{'kernel':<14}{'M operations':>13}{'MB':>9}{'per byte':>10}"
             + (f"{'limit':>12}{reached:>9} · 10⁹/s" if timed else "")]
    for name, work in r["works"].items():
        line = (f"{LETTERS[name]:3}{name:<14}{fmt(work.operations / 1e6):>13}"
                f"{fmt(work.nbytes / 1e6):>9}{fmt(work.intensity):>10}")
        if timed:
            speed = fmt(r["reached"][name]) if name in r["reached"] else "no kernel"
            line += f"{r['limit'][name]:>12}{speed:>9}"
        lines.append(line)
    return lines


def _peak(machine: Machine, kind: str) -> str:
    peak = machine.peaks[kind]
    return "unknown" if peak is None else f"{fmt(peak)} · 10⁹"
