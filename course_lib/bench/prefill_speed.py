"""What prefill policies may cost, and what they do: ratios of one run, each beside its limit."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from statistics import median
from typing import NamedTuple

import numpy as np

from course_lib.arrays import F32, LayerRows
from course_lib.bench.machine import Kernels
from course_lib.bench.policy_cases import Watched, one_pass
from course_lib.engine.chunked_prefill import CHUNK, SLOTS
from course_lib.lab.captured import Layer
from course_lib.prefill import (
    BlockFile,
    BlockStore,
    ChunkedPrefill,
    FullAttentionPolicy,
    PrefillPolicy,
    XAttentionBSAPolicy,
    xattn_estimate,
)
from course_lib.prefill.chunked import TOGETHER
from course_lib.prefill.lse import attend_part, empty_part, merge_part

STRIDES = (4, 8, 16)
THRESHOLDS = (0.9, 0.3, 0.1, 0.02)
CHUNKS, BLOCK = 8, 128
LITTLE = 0.30  # applied density at which a sparse prefill has to be clearly faster
PAIRS = 5
FEW_ROWS, MORE_ROWS, MERGES = 64, 256, 300
MANY, SETTLED = 200, 40  # chunks of the run that shows whether memory grows, and from which one on


@dataclass(frozen=True)
class SpeedRecord:
    """One measured ratio and what it must not pass; ``at_least`` where it must reach it.

    source: whose queries and keys; share: the applied density, or None.
    """

    what: str
    source: str
    tokens: int
    threads: int
    value: float
    limit: float
    at_least: bool = False
    share: float | None = None

    @property
    def met(self) -> bool:
        return self.value >= self.limit if self.at_least else self.value <= self.limit


class Ran(NamedTuple):
    """Seconds of a prefill of all layers: all of it, choosing, attention, reading; and the applied
    density and the most bytes of K and V in memory."""

    seconds: float
    choosing: float
    attention: float
    loading: float
    applied: float
    resident: int


class Turn(NamedTuple):
    """What was measured once, in this order: seconds, but a share for merging. full_small: all
    blocks again, in the small chunks of the sparse runs."""

    dense: float
    estimates: list[float]
    full: Ran
    file: Ran
    slow: Ran
    full_small: Ran
    sparse: list[Ran]
    merging: float


class Sizes(NamedTuple):
    """Tokens of a chunk and of a block."""

    chunk: int
    block: int


def usual(tokens: int) -> Sizes:
    """The defaults of Engine.prefill, where the prompt has two such chunks."""
    chunk = min(CHUNK, max(tokens // 2, 64))
    return Sizes(chunk, min(chunk // 4, BLOCK))


def small(tokens: int) -> Sizes:
    """Eight chunks, and blocks small enough to leave some out: a chunk itself is always read, so
    larger ones leave little to choose from."""
    chunk = max(tokens // CHUNKS, 64)
    return Sizes(chunk, min(chunk // 4, BLOCK))


def cut(layers: Sequence[Layer], chunk: int) -> list[list[Layer]]:
    """Chunk after chunk the rows of every layer, each array by itself, as a model computes them."""
    return [[Layer(*(np.ascontiguousarray(rows[:, first : first + chunk]) for rows in layer))
             for layer in layers] for first in range(0, layers[0].q.shape[1], chunk)]


def run(chunks: Sequence[Sequence[Layer]], make: Callable[[int], PrefillPolicy],
        store: BlockStore) -> Ran:
    """A prefill of these chunks by a policy; the store is closed then."""
    policy = Watched(make(store.block_size))
    start = time.perf_counter()
    with store, ChunkedPrefill(store, policy, slots=SLOTS) as prefill:
        for chunk in chunks:
            for number, layer in enumerate(chunk):
                prefill.attend(number, *layer)
        seconds = time.perf_counter() - start
        resident = getattr(store, "peak_resident_bytes", store.resident_bytes)
    return Ran(seconds, policy.seconds, prefill.attend_seconds, prefill.ring.load_seconds,
               policy.get_density_stats()["applied_density"], resident)


def per_head(threshold: float) -> Callable[[int], PrefillPolicy]:
    return lambda block: XAttentionBSAPolicy(threshold, block_size=block, short_query=block,
                                             aggregate="per_head")


class Speed:
    """The layers of one prompt, and what is measured of them, in turns."""

    def __init__(self, layers: Sequence[Layer], source: str, threads: int) -> None:
        self.layers, self.source, self.threads = layers, source, threads
        self.kv_heads, self.tokens, self.d = layers[0].k.shape
        self.usual, self.small = usual(self.tokens), small(self.tokens)
        self.chunks, self.small_chunks = (cut(layers, c) for c, _ in (self.usual, self.small))
        self.budget = SLOTS * self._block_bytes(self.usual.block)
        full = [self.full() for _ in range(2)][-1]  # the first one is slower
        chunk, n = self.usual.chunk, len(self.chunks)
        history, own = chunk * chunk * n * (n - 1) // 2, chunk * (chunk + 1) // 2 * n  # of a head
        seconds = full.attention * history / (history + own)
        self.slow = history // chunk * len(layers) * self._block_bytes(1) / seconds

    def _block_bytes(self, block: int) -> int:
        return 2 * 4 * self.kv_heads * block * self.d

    def _memory(self, block: int) -> BlockStore:
        return BlockStore(len(self.layers), self.kv_heads, self.d, block_size=block,
                          capacity=self.tokens)

    def full(self) -> Ran:
        """All blocks, in memory."""
        return run(self.chunks, FullAttentionPolicy, self._memory(self.usual.block))

    def sparse(self, make: Callable[[int], PrefillPolicy]) -> Ran:
        """By a policy, in memory, in small chunks."""
        return run(self.small_chunks, make, self._memory(self.small.block))

    def offloaded(self, throttle: float | None = None) -> Ran:
        """All blocks, each read from a file, at so many bytes a second."""
        store = BlockFile(len(self.layers), self.kv_heads, self.d, capacity=self.tokens,
                          block_size=self.usual.block, ram_budget=self.budget, throttle=throttle)
        return run(self.chunks, FullAttentionPolicy, store)

    def estimate(self, stride: int) -> float:
        """Seconds of the estimate for the whole prompt."""
        start = time.perf_counter()
        for layer in self.layers:
            xattn_estimate(layer.q, layer.k, stride=stride, block_size=self.small.block,
                           threshold=0.9)
        return time.perf_counter() - start

    def merging(self) -> float:
        """Share of attention that merging takes, on one thread: of the last chunk's attention to
        what is before it, as many merges of its rows as there are blocks; the median of pairs."""
        layer, (chunk, block) = self.layers[0], self.usual
        history, size = self.tokens - chunk, block * TOGETHER
        q = self.chunks[-1][0].q
        parts = [LayerRows(layer.k[:, at : at + size], layer.v[:, at : at + size]).upto(
            min(size, history - at)) for at in range(0, history, size)]
        out, lse = empty_part(q)

        def attend() -> float:
            start = time.perf_counter()
            for part in parts:
                seen = np.full(q.shape[1], part.k.shape[1], np.int64)
                attend_part(q, part, seen, block, None, out, lse)
            return time.perf_counter() - start

        kernels = Kernels()
        kernels.set_threads(1)
        try:
            attend()  # the first one is slower
            merges = q.shape[0] * q.shape[1] * -(-history // block)
            return median(self._merge_seconds() * merges / attend() for _ in range(PAIRS))
        finally:
            kernels.set_threads(self.threads)

    def _merge_seconds(self) -> float:
        """Seconds to merge a row that is in the nearest cache, as the rows are that the kernel has
        just computed: what more rows take in one call, so that the call does not count."""

        def merge(rows: int) -> float:
            part, lse = np.ones((rows, self.d), F32), np.zeros(rows)
            out, all_lse, seconds = part.copy(), lse.copy(), []
            for _ in range(MERGES):
                start = time.perf_counter()
                merge_part(out, all_lse, part, lse)
                seconds.append(time.perf_counter() - start)
            return median(seconds)

        return (merge(MORE_ROWS) - merge(FEW_ROWS)) / (MORE_ROWS - FEW_ROWS)

    def growth(self) -> int:
        """How many bytes of K and V are added to memory from one chunk to the last of many, of a
        prompt that is offloaded."""
        size, found = self.tokens // MANY, []
        store = BlockFile(len(self.layers), self.kv_heads, self.d, capacity=MANY * size,
                          block_size=size, ram_budget=SLOTS * self._block_bytes(size))
        with store, ChunkedPrefill(store, FullAttentionPolicy(size), slots=SLOTS) as prefill:
            for place, chunk in enumerate(cut(self.layers, size)[:MANY]):
                for number, layer in enumerate(chunk):
                    prefill.attend(number, *layer)
                if place in (SETTLED, MANY - 1):
                    found.append(store.resident_bytes)
        return found[1] - found[0]

    def records(self, rounds: int, done: Callable[[], object]) -> list[SpeedRecord]:
        """Measure everything so many times, in turns; the medians of the turns' ratios."""
        turns = [self._turn(done) for _ in range(rounds)]
        return [*self._estimates(turns), *self._sparse(turns), *self._parts(turns)]

    def _told(self, turns: Sequence[Turn], what: str, of: Callable[[Turn], float], limit: float,
              share: float | None = None) -> SpeedRecord:
        return SpeedRecord(what, self.source, self.tokens, self.threads, median(map(of, turns)),
                           limit, share=share)

    def _estimates(self, turns: Sequence[Turn]) -> list[SpeedRecord]:
        return [self._told(turns, f"estimate, stride {stride} / dense attention",
                           lambda t, at=at: t.estimates[at] / t.dense, 1.5 / stride)  # type: ignore[misc]
                for at, stride in enumerate(STRIDES)]

    def _sparse(self, turns: Sequence[Turn]) -> list[SpeedRecord]:
        """per_head with its mask applied; of those that read little the one that reads most."""
        records: list[SpeedRecord] = []
        little: SpeedRecord | None = None
        for at, threshold in enumerate(THRESHOLDS):
            share = turns[0].sparse[at].applied
            choosing = median(t.sparse[at].choosing / t.full_small.seconds for t in turns)
            records.append(self._told(
                turns, f"per_head, threshold {threshold} / full",
                lambda t, at=at: t.sparse[at].seconds / t.full_small.seconds,  # type: ignore[misc]
                choosing + 1.15 * share, share))
            if share <= LITTLE and (little is None or share > (little.share or 0)):
                little = records[-1]
        if little is not None:
            records.append(replace(little, what=f"full / {little.what.removesuffix(' / full')}",
                                   value=1 / little.value, limit=1.85, at_least=True))
        return records

    def _parts(self, turns: Sequence[Turn]) -> list[SpeedRecord]:
        """What a chunk spends beside attention, what reading adds, and what lies in memory."""
        slot = self._block_bytes(self.usual.block)
        records = [
            self._told(turns, "merging / chunk", lambda t: (
                t.merging * t.full.attention / t.full.seconds), 0.03),
            self._told(turns, "bookkeeping / chunk", lambda t: 1 - (
                t.full.attention + t.full.choosing) / t.full.seconds, 0.03),
            self._told(turns, "file in page cache / memory",
                       lambda t: t.file.seconds / t.full.seconds, 1.15),
            self._told(turns, "slow file / max(load, compute)", lambda t: t.slow.seconds / max(
                t.slow.loading, t.full.seconds), 1.10),
            self._told(turns, "K and V in memory / (budget + slot)",
                       lambda t: t.file.resident / (self.budget + slot), 1.0)]
        if self.tokens >= MANY:
            records.append(SpeedRecord(f"K and V, bytes more from chunk {SETTLED} to {MANY}",
                                       self.source, self.tokens, self.threads,
                                       float(self.growth()), 0.0))
        return records

    def _turn(self, done: Callable[[], object]) -> Turn:
        turn = Turn(one_pass(self.layers), [self.estimate(stride) for stride in STRIDES],
                    self.full(), self.offloaded(), self.offloaded(self.slow),
                    self.sparse(FullAttentionPolicy),
                    [self.sparse(per_head(threshold)) for threshold in THRESHOLDS],
                    self.merging())
        done()
        return turn
