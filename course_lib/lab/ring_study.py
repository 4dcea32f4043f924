"""A ring at work on a real chunk: the queries of a prompt's last tokens over its history in a file.

Storage of a chosen speed is a fast file whose reads are slowed down, so that a machine without a
slow disk can show one.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass
from functools import cached_property
from statistics import median

import numpy as np

from course_lib.arrays import LayerRows
from course_lib.lab.captured import Layer
from course_lib.prefill import BlockFile, BlockStore, Slot
from course_lib.prefill.lse import attend_part, empty_part
from course_lib.prefill.ring import Event, Ring
from course_lib.prefill.schedule import Turn


@dataclass(frozen=True)
class RingRun:
    """turns: of each block, in seconds since the first load began; slot 0 throughout for a run
    without a ring, which has one slot too. output: attention over the history, float32
    [num_heads, rows, d]."""

    slots: int
    turns: tuple[Turn, ...]
    output: np.ndarray

    @property
    def seconds(self) -> float:
        """From the first load's start to the last computation's end."""
        return self.turns[-1].compute_end

    @property
    def load_seconds(self) -> float:
        return sum(turn.load_end - turn.load_start for turn in self.turns)

    @property
    def compute_seconds(self) -> float:
        return sum(turn.compute_end - turn.compute_start for turn in self.turns)


class RingStudy:
    """The last ``rows`` queries of a layer, and the whole blocks of keys and values before them."""

    def __init__(self, layer: Layer, rows: int = 256, block_size: int = 64) -> None:
        history = (layer.k.shape[1] - rows) // block_size * block_size
        if rows < 1 or history < 1:
            raise ValueError(f"rows must leave a block of history, not {rows} of "
                             f"{layer.k.shape[1]}.")
        self.q = np.ascontiguousarray(layer.q[:, layer.q.shape[1] - rows :])
        self.k, self.v = layer.k[:, :history], layer.v[:, :history]
        self.block_size, self.blocks = block_size, history // block_size

    @property
    def block_bytes(self) -> int:
        """Bytes of a block, K and V."""
        return 2 * 4 * len(self.k) * self.block_size * self.k.shape[2]

    @cached_property
    def speed_as_computing(self) -> float:
        """Bytes per second at which a block takes as long to load as to compute, by the median."""
        turns = self.run(None, passes=3, seconds=0.1).turns
        return self.block_bytes / median(t.compute_end - t.compute_start for t in turns)

    def run(self, slots: int | None, bytes_per_second: float | None = None,
            passes: int = 2, seconds: float = 0.0) -> RingRun:
        """Attend the history through a ring of ``slots``, or without one and its thread (None).

        bytes_per_second: speed of the storage, None for the file as it is. The history is attended
        ``passes`` times, and again until ``seconds`` are over; the fastest is told, since what
        else a machine does can only make a run slower.
        """
        heads, _, d = self.k.shape
        with BlockFile(1, heads, d, capacity=self.k.shape[1], block_size=self.block_size,
                       throttle=bytes_per_second) as store:
            store.append(0, self.k, self.v)
            if slots is None:
                slot = store.make_slots(1)[0]
                return _fastest(lambda: self._serial(store, slot), passes, seconds)
            with Ring(store, slots, trace=True) as ring:
                return _fastest(lambda: self._ring(ring), passes, seconds)

    def _serial(self, store: BlockStore, slot: Slot) -> RingRun:
        turns = []
        out, lse = empty_part(self.q)
        began = time.perf_counter()
        for block in range(self.blocks):
            start = time.perf_counter()
            tokens = store.load(0, block, slot)
            loaded = time.perf_counter()
            self._attend(slot.rows(tokens), out, lse)
            turns.append(Turn(0, *(t - began for t in (start, loaded, loaded,
                                                       time.perf_counter()))))
        return RingRun(1, tuple(turns), out)

    def _ring(self, ring: Ring) -> RingRun:
        out, lse = empty_part(self.q)
        ring.timeline = []
        with closing(ring.stream(0, [(block, None) for block in range(self.blocks)])) as stream:
            for _, rows in stream:
                self._attend(rows, out, lse)
        return RingRun(len(ring.slots), _turns(ring.timeline, self.blocks), out)

    def _attend(self, rows: LayerRows, out: np.ndarray, lse: np.ndarray) -> None:
        tokens = rows.k.shape[1]
        attend_part(self.q, rows, np.full(self.q.shape[1], tokens, np.int64), tokens, None, out,
                    lse)


def _fastest(run: Callable[[], RingRun], passes: int, seconds: float) -> RingRun:
    began, best, made = time.perf_counter(), run(), 1
    while made < passes or time.perf_counter() - began < seconds:
        best, made = min(best, run(), key=lambda r: r.seconds), made + 1
    return best


def _turns(timeline: list[Event], blocks: int) -> tuple[Turn, ...]:
    began = min(event.start for event in timeline)
    found = {(event.what, event.block): event for event in timeline}
    turns = []
    for block in range(blocks):
        load, compute = found["load", block], found["compute", block]
        turns.append(Turn(load.slot, *(t - began for t in (load.start, load.end, compute.start,
                                                           compute.end))))
    return tuple(turns)
