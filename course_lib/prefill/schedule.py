"""When a ring of slots loads and computes, without running it: the model of `Ring`.

One reader and one computer, each with one block at a time, in order. Block i goes to slot i mod
slots, and is loaded when the reader is done with block i - 1 and the slot is free: when block
i - slots has been computed.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from course_lib.arrays import positive_int, real_number


class Turn(NamedTuple):
    """One block's way through the ring; times in the unit of the arguments."""

    slot: int
    load_start: float
    load_end: float
    compute_start: float
    compute_end: float


def ring_schedule(loads: Sequence[float], computes: Sequence[float], slots: int,
                  handoff: float = 0) -> list[Turn]:
    """The turns of blocks that take so long to load and to compute.

    handoff: what it costs the computer to take a block over from the reader. Raises ValueError
    for lists of two lengths, a negative or infinite time, and slots below 1.
    """
    slots = positive_int(slots, "slots")
    if len(loads) != len(computes):
        raise ValueError(f"loads and computes must have one time for each block, not "
                         f"{len(loads)} and {len(computes)}.")
    if any(real_number(t, "a time") < 0 for t in (*loads, *computes, handoff)):
        raise ValueError("a time must be at least 0.")
    turns: list[Turn] = []
    for block, (load, compute) in enumerate(zip(loads, computes, strict=True)):
        reader = turns[-1].load_end if turns else 0
        computer = turns[-1].compute_end if turns else 0
        free = turns[block - slots].compute_end if block >= slots else 0
        start = max(reader, free)
        begin = max(start + load, computer) + handoff
        turns.append(Turn(block % slots, start, start + load, begin, begin + compute))
    return turns


def serial_time(loads: Sequence[float], computes: Sequence[float]) -> float:
    """What the same blocks take without a ring: load, compute, load, compute."""
    return sum(loads) + sum(computes)


def overlap(turns: Sequence[Turn]) -> float:
    """How long something was loaded while something was computed."""
    return sum(max(0, min(a.load_end, b.compute_end) - max(a.load_start, b.compute_start))
               for a in turns for b in turns)
