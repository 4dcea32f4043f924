"""The roofline: what a kernel can reach at most, from its operations, its bytes and two numbers of
the machine; and the same kernels measured here, with the probes of `./course bench`.

Source: Williams, Waterman, Patterson, "Roofline: an insightful visual performance model",
Communications of the ACM 52(4), 2009.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache

from course_lib import backend
from course_lib.bench import attention_cases, linear_cases
from course_lib.bench.attention_cases import (
    BLOCK_SIZE,
    HEAD_DIM,
    K_BLOCKS,
    N_PROBE,
    NUM_HEADS,
    NUM_KV_HEADS,
)
from course_lib.bench.groups import Bench, Group
from course_lib.bench.machine import Kernels, Reader, on_fast_cores, peaks
from course_lib.bench.memory import Arena, arena_bytes, available_bytes
from course_lib.bench.run import compiled_call, numpy_call
from course_lib.bench.timing import interleaved
from course_lib.kvcache import kv_bytes_per_token
from course_lib.weight_blocks import BLOCK, BLOCK_BYTES

COLS, ROWS = 1024, 2048
"""Inputs and outputs of the product with weights."""

BYTES_PER_WEIGHT = {"f32": 4.0} | {kind: size / BLOCK for kind, size in BLOCK_BYTES.items()}
ARENA, READ_BYTES = 144 * 2**20, 16 * 2**20


@dataclass(frozen=True)
class Machine:
    """10⁹ bytes read a second, and 10⁹ operations a second of each kind (None: not known)."""

    name: str
    gb_per_s: float
    peaks: dict[str, float | None]

    def ridge(self, kind: str) -> float | None:
        """Operations per byte from which on arithmetic is the limit."""
        peak = self.peaks[kind]
        return None if peak is None else peak / self.gb_per_s

    def roof(self, intensity: float, kind: str) -> float:
        """The most 10⁹ operations a second at so many operations per byte."""
        peak, slope = self.peaks[kind], self.gb_per_s * intensity
        return slope if peak is None else min(slope, peak)


TOY = Machine("round numbers", 10.0, {"float": 100.0, "int8": 400.0})
"""A machine to calculate in one's head: its ridges are at 10 and at 40 operations per byte."""


@dataclass(frozen=True)
class Work:
    """One call of a kernel: multiplications and additions of one kind, and bytes that it must move
    at least, each once."""

    kind: str
    operations: float
    nbytes: float

    @property
    def intensity(self) -> float:
        """Operations per byte."""
        return self.operations / self.nbytes


def works(batch: int = 1, tokens: int = 4096) -> dict[str, Work]:
    """The kernels of decode: products of `batch` rows with weights in three formats, and attention
    of one new token over `tokens` of cache (the shape of `./course bench`)."""
    found = {f"weights {form}": linear(form, batch) for form in BYTES_PER_WEIGHT}
    found |= {f"attention {kv}": dense(kv, tokens) for kv in ("f32", "q8")}
    return found | {"sparse q8": sparse(tokens), "probe q8": probe(tokens)}


def linear(form: str, batch: int) -> Work:
    """A product with weights: every weight is read once, whatever the number of rows."""
    nbytes = COLS * ROWS * BYTES_PER_WEIGHT[form] + 4 * batch * (COLS + ROWS)
    return Work("float" if form == "f32" else "int8", 2.0 * batch * COLS * ROWS, nbytes)


def dense(kv: str, tokens: int) -> Work:
    """Exact attention: QK and PV of every head over every row."""
    return Work("float", 4.0 * NUM_HEADS * tokens * HEAD_DIM, tokens * _token(kv))


def probe(tokens: int) -> Work:
    """The scores of the sampled keys; the query heads of a KV head share them."""
    sampled = tokens * N_PROBE // BLOCK_SIZE
    return Work("float", 2.0 * NUM_HEADS * sampled * HEAD_DIM, sampled * _token("q8") / 2)


def sparse(tokens: int) -> Work:
    """Probe, then attention over chosen blocks. Of a KV head's query heads each reads its own
    blocks by probe, and all the same blocks by importance: at most so many rows."""
    reserved, group = (K_BLOCKS + 1) // 2, NUM_HEADS // NUM_KV_HEADS
    rows = min(tokens, (reserved + group * (K_BLOCKS - reserved)) * BLOCK_SIZE)
    search = probe(tokens)
    read = min(tokens, K_BLOCKS * BLOCK_SIZE)
    return Work("float", search.operations + 4.0 * NUM_HEADS * read * HEAD_DIM,
                search.nbytes + rows * _token("q8"))


def _token(kv: str) -> int:
    return kv_bytes_per_token(NUM_KV_HEADS, HEAD_DIM, kv)


def this_machine() -> Machine:
    """One thread of this machine, measured once; peaks None on NumPy."""
    return _machine(backend.info().variant)


def seconds(batch: int, tokens: int) -> dict[str, float]:
    """The median time of one call of every kernel in `works`, on one thread, memory cold."""
    variant = backend.info().variant
    return {**_linear_seconds(variant, batch), **_attention_seconds(variant, tokens)}


def measured(batch: int, tokens: int) -> bool:
    """Whether `seconds` has these numbers already."""
    return (batch, tokens) in _known.get(backend.info().variant, set())


def forget() -> None:
    """Measure anew when asked next."""
    for cache in (_machine, _linear_seconds, _attention_seconds):
        cache.cache_clear()
    _known.clear()


_known: dict[str, set[tuple[int, int]]] = {}


def measure(batch: int, tokens: int) -> tuple[Machine, dict[str, float]]:
    """`this_machine()` and `seconds(batch, tokens)`; new numbers take about a second."""
    both = this_machine(), seconds(batch, tokens)
    _known.setdefault(backend.info().variant, set()).add((batch, tokens))
    return both


@lru_cache(maxsize=4)
def _machine(variant: str) -> Machine:
    kernels = Kernels()
    with _one_thread(kernels):
        found = peaks(kernels, Reader(kernels, READ_BYTES), 1)
    return Machine(f"this machine, one thread, {variant}", found.gb_per_s,
                   {"float": found.float_operations, "int8": found.int8_operations})


@lru_cache(maxsize=16)
def _linear_seconds(variant: str, batch: int) -> dict[str, float]:
    kernels, bench = Kernels(), _bench()
    times: dict[str, float] = {}
    for form in BYTES_PER_WEIGHT:
        group = linear_cases.build(form, COLS, ROWS, batch, bench)
        times |= _timed(kernels, group, {f"weights {form}": 0})
    return times


@lru_cache(maxsize=16)
def _attention_seconds(variant: str, tokens: int) -> dict[str, float]:
    kernels, bench = Kernels(), _bench()
    times: dict[str, float] = {}
    for kv in ("f32", "q8"):
        group = attention_cases.build(kv, tokens, bench)
        place = {work.kernel: i for i, work in enumerate(group.works)}
        wanted = {f"attention {kv}": place["two_pass"]}
        if kv == "q8":
            wanted |= {"sparse q8": place["sparse_attention"], "probe q8": place["probe_scores"]}
        times |= _timed(kernels, group, wanted)
    return times


def _bench() -> Bench:
    return Bench(Arena(min(ARENA, arena_bytes(available_bytes()))))


def _timed(kernels: Kernels, group: Group, wanted: dict[str, int]) -> dict[str, float]:
    """Median times of some works of a group: compiled, or NumPy's where that is all there is."""
    calls: dict[str, Callable[[], object]] = {}
    for name, at in wanted.items():
        work = group.works[at]
        if kernels.chosen is None:
            calls[name] = numpy_call(group.numpy[work.numpy or ""])
        elif work.name in kernels.chosen:
            calls[name] = compiled_call(work, kernels.info.variant, kernels.chosen)
    with _one_thread(kernels):
        return interleaved(calls)


@contextmanager
def _one_thread(kernels: Kernels) -> Iterator[None]:
    """One thread on a fast core inside the block; the reader's number of threads after it."""
    kernels.set_threads(1)
    try:
        with on_fast_cores(1):
            yield
    finally:
        kernels.set_threads(backend.threads())
