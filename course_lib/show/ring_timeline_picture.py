"""The picture of the ring-timeline explorer: a lane per slot, and one without a ring."""

from __future__ import annotations

from typing import Any

import numpy as np

from course_lib.prefill.schedule import Turn
from course_lib.show.artists import Bars, Segments
from course_lib.show.style import INK, RING, new_figure
from course_lib.show.text import fmt, plural

_LANES = 5  # four slots and the lane without a ring
_NUMBERS = 48  # block numbers in bars
_NARROW = 0.016  # of the axis: a bar below it has no room for its number


class RingTimelinePicture:
    """Lanes whose bars are moved by `draw(result)`."""

    def __init__(self) -> None:
        self.figure = new_figure(3.9)
        self._heads = [self.figure.text(0.012, y, "", fontsize=size, va="center", weight=weight)
                       for y, size, weight in ((0.955, 12, "normal"), (0.885, 11, "bold"))]
        self._ax = ax = self.figure.add_axes((0.1, 0.21, 0.88, 0.61))
        self._bars = {name: Bars(ax, RING[name], label=RING[name].label)
                      for name in ("load", "handoff", "compute")}
        self._ends = Segments(ax, INK, 1.2, "dashed")
        self._numbers = [ax.text(0, 0, "", ha="center", va="center", fontsize=9, clip_on=True)
                         for _ in range(_NUMBERS)]
        ax.spines["left"].set_visible(False)
        ax.tick_params(axis="y", length=0)
        ax.grid(axis="x")
        ax.legend(loc="upper left", bbox_to_anchor=(0.0, -0.19), ncols=3, borderaxespad=0.0)
        self._waits = self.figure.text(0.98, 0.035, "", ha="right", va="center", fontsize=9)

    def draw(self, r: dict[str, Any]) -> None:
        unit, turns, serial, slots = r["unit"], r["turns"], r["serial"], r["slots"]
        where = "planned" if r["source"] == "planned" else \
            f"run on this machine, storage {r['storage']}"
        self._heads[0].set_text(f"{where} · {plural(slots, 'slot')} · {len(turns)} blocks")
        self._heads[1].set_text(f"the ring takes {fmt(r['total'])} {unit}, without it "
                                f"{fmt(r['serial_total'])}: {fmt(r['ratio'])} of that")
        self._waits.set_text(f"the reader waits {fmt(r['reader_waits'])} {unit}, the computer "
                             f"{fmt(r['computer_waits'])}")
        end = 1.02 * max(r["total"], r["serial_total"])
        lanes = [_spans(turns, r["handoff"], [slots - t.slot for t in turns]),
                 _spans(serial, 0, [0] * len(serial))]
        for name, bars in self._bars.items():
            spans = np.array([s for lane in lanes for s in lane[name]]).reshape(-1, 4)
            start, stop, lane, _ = spans.T
            bars.move((start + stop) / 2, lane + 0.36, stop - start, lane - 0.36)
        self._ends.move([r["total"], r["serial_total"]], [-0.5, -0.5],
                        [r["total"], r["serial_total"]], [slots + 0.5, 0.5])
        self._number([s for lane in lanes for name in ("load", "compute")
                      for s in ((*span, name) for span in lane[name])], end)
        names = ["no ring", *(f"slot {s}" for s in range(slots, 0, -1))]
        self._ax.set(xlim=(0, end), ylim=(-0.55, slots + 0.55), xlabel=unit)
        self._ax.set_yticks(range(slots + 1), names)

    def _number(self, spans: list[tuple[float, float, float, float, str]], end: float) -> None:
        wide = [s for s in spans if s[1] - s[0] >= _NARROW * end][:_NUMBERS]
        for text, span in zip(self._numbers, wide, strict=False):
            start, stop, lane, block, name = span
            text.set_position(((start + stop) / 2, lane))
            text.set_text(f"{block:.0f}")
            text.set_color(RING[name].ink)
            text.set_bbox({"boxstyle": "square,pad=0.1", "fc": RING[name].color, "ec": "none"})
        for text in self._numbers[len(wide) :]:
            text.set_text("")
            text.set_bbox(None)


def _spans(turns: list[Turn], handoff: float, lanes: list[int]) -> dict[str, list[tuple]]:
    """(start, end, lane, block) of every bar."""
    found: dict[str, list[tuple]] = {"load": [], "handoff": [], "compute": []}
    for block, (turn, lane) in enumerate(zip(turns, lanes, strict=True)):
        found["load"].append((turn.load_start, turn.load_end, lane, block))
        found["compute"].append((turn.compute_start, turn.compute_end, lane, block))
        if handoff:
            found["handoff"].append((turn.compute_start - handoff, turn.compute_start, lane,
                                     block))
    return found
