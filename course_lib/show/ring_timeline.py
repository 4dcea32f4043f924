"""The timeline of a ring: what each slot loads and computes when, planned or really run."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

from course_lib.engine import Engine
from course_lib.lab.captured import captured
from course_lib.lab.ring_study import RingRun, RingStudy
from course_lib.prefill.schedule import Turn, overlap, ring_schedule
from course_lib.show.controls import dropdown, steps
from course_lib.show.explorer import Explorer
from course_lib.show.models import shipped_engine
from course_lib.show.ring_timeline_picture import RingTimelinePicture
from course_lib.show.text import fmt, plural

SOURCES = {"planned": "planned", "run on this machine": "run"}
SLOTS = (1, 2, 3, 4)
TIMES = (1, 2, 3, 4, 6)
LOADS = {"all alike": "even", "every fourth is slow": "uneven"}
STORAGE = {"a file in memory": "fast", "as slow as computing": "slow"}
HANDOFFS = (0, 0.5, 1)
BLOCKS = 8  # of a planned ring
UNEVEN = (0.5, 0.5, 0.5, 2.5)  # on average 1
TOKENS, ROWS, LAYER = 1024, 256, 1


class RingTimelineExplorer(Explorer):
    """Loading and computing of a ring of 1 to 4 slots, beside the same without a ring.

    source: "planned", by `ring_schedule`: eight blocks that take `load` and `compute` units;
    loads "even", or "uneven": every fourth block takes 2.5 times as long and the others half;
    handoff: units to take a block over from the reading thread. Or "run": the last 256 queries of
    a prompt of 1,024 tokens over their history in a file, with storage "fast" (the file, which the
    system holds in memory) or "slow" (slowed down until loading takes as long as computing).
    engine: default the shipped model.
    """

    alt = ("one lane per slot of the ring: bars of loading and computing, with block numbers; "
           "below them the same blocks without a ring")
    drawing = RingTimelinePicture
    question = ("What does a second slot save, what does a third, and when is the ring no "
                "better than loading and computing in turns?")

    def __init__(self, engine: Engine | None = None, *, source: str = "planned", slots: int = 2,
                 load: int = 2, compute: int = 3, loads: str = "even", handoff: float = 0,
                 storage: str = "slow") -> None:
        self._engine = engine
        super().__init__({
            "source": dropdown("source", SOURCES, source, "by the rule, or measured"),
            "slots": steps("slots", SLOTS, slots, "how many blocks the ring holds"),
            "load": steps("load", TIMES, load, "units to load a block"),
            "compute": steps("compute", TIMES, compute, "units to compute on a block"),
            "loads": dropdown("loads", LOADS, loads, "whether all blocks load alike"),
            "handoff": steps("hand over", HANDOFFS, handoff,
                             "units to take a block over from the reader"),
            "storage": dropdown("storage", STORAGE, storage, "how fast the file is read"),
        })
        self._fit()

    def adjust(self, name: str) -> None:
        self._fit()

    def react(self) -> None:
        if self.params["source"] == "run":
            self._busy("a run of the ring")
        self._refresh()

    def _fit(self) -> None:
        planned = self.controls["source"].value == "planned"
        for name in ("load", "compute", "loads", "handoff"):
            self.controls[name].disabled = not planned
        self.controls["storage"].disabled = planned

    def compute(self, source: str = "planned", slots: int = 2, load: int = 2, compute: int = 3,
                loads: str = "even", handoff: float = 0, storage: str = "slow") -> dict[str, Any]:
        """Turns with and without a ring, and sums, in units or in milliseconds."""
        self.check_choices(source=source, loads=loads, storage=storage)
        if source == "planned":
            if not load and not compute:
                raise ValueError("load and compute must not both be 0.")
            times = [load * (UNEVEN[i % len(UNEVEN)] if loads == "uneven" else 1)
                     for i in range(BLOCKS)]
            turns = ring_schedule(times, [compute] * BLOCKS, slots, handoff)
            serial = ring_schedule(times, [compute] * BLOCKS, 1)
            unit = "units"
        else:
            study = _study(self._engine or shipped_engine())
            turns, serial = (_milliseconds(run) for run in study.runs(slots, storage))
            unit = "ms"
        spent = {"load": sum(t.load_end - t.load_start for t in turns),
                 "compute": sum(t.compute_end - t.compute_start for t in turns)}
        total, alone = turns[-1].compute_end, serial[-1].compute_end
        return {
            "source": source, "slots": slots, "load": load, "compute": compute, "loads": loads,
            "handoff": handoff if source == "planned" else 0, "storage": storage, "unit": unit,
            "turns": turns, "serial": serial, "total": total, "serial_total": alone,
            "ratio": total / alone, "spent": spent, "overlap": overlap(turns),
            "reader_waits": turns[-1].load_end - spent["load"],
            "computer_waits": total - spent["compute"],
        }

    def describe(self, result: dict[str, Any]) -> str:
        return describe(result)

    def describe_stored(self, result: dict[str, Any]) -> str:
        if result["source"] == "planned":
            return describe(result)
        return (f"run on this machine: {len(result['turns'])} blocks, storage "
                f"{result['storage']}, {plural(result['slots'], 'slot')}; loading and "
                f"computing at once: {result['overlap'] > 0} (the times are in the picture)")


class _Study:
    """Runs of one engine's ring, each made when it is first asked for."""

    def __init__(self, engine: Engine) -> None:
        self._ring = RingStudy(captured(engine, TOKENS)[LAYER], ROWS)
        self._runs: dict[tuple[int | None, str], RingRun] = {}

    def runs(self, slots: int, storage: str) -> tuple[RingRun, RingRun]:
        """With so many slots, and without a ring."""
        return self._run(slots, storage), self._run(None, storage)

    def _run(self, slots: int | None, storage: str) -> RingRun:
        if (slots, storage) not in self._runs:
            speed = None if storage == "fast" else self._ring.speed_as_computing
            self._runs[slots, storage] = self._ring.run(slots, speed, seconds=0.05)
        return self._runs[slots, storage]


@lru_cache(maxsize=2)
def _study(engine: Engine) -> _Study:
    return _Study(engine)


def _milliseconds(run: RingRun) -> list[Turn]:
    return [Turn(turn.slot, *(1e3 * t for t in turn[1:])) for turn in run.turns]


def describe(r: dict[str, Any]) -> str:
    """The text twin of one `compute` result; of a run it holds times of this machine."""
    unit, turns = r["unit"], r["turns"]
    if r["source"] == "planned":
        how = "every fourth load is slow" if r["loads"] == "uneven" else "all loads alike"
        what = (f"planned: {len(turns)} blocks, load {r['load']}, compute {r['compute']}, "
                f"hand over {fmt(r['handoff'])}; {how}")
    else:
        what = (f"run on this machine: {len(turns)} blocks, storage {r['storage']}; load "
                f"{fmt(r['spent']['load'] / len(turns))} ms, compute "
                f"{fmt(r['spent']['compute'] / len(turns))} ms a block")
    lines = [f"{what}; {plural(r['slots'], 'slot')}",
             f"{'block':>5}{'slot':>6}{'load':>16}{'compute':>16}   {unit}"]
    for block, t in enumerate(turns):
        load, compute = (f"{fmt(a)}-{fmt(b)}" for a, b in ((t.load_start, t.load_end),
                                                           (t.compute_start, t.compute_end)))
        lines.append(f"{block:>5}{t.slot + 1:>6}{load:>16}{compute:>16}")
    lines += [f"the ring takes {fmt(r['total'])} {unit}, without it {fmt(r['serial_total'])}: "
              f"{fmt(r['ratio'])} of that",
              f"loading and computing at once for {fmt(r['overlap'])} {unit}; the reader waits "
              f"{fmt(r['reader_waits'])}, the computer {fmt(r['computer_waits'])}"]
    return "\n".join(lines)
