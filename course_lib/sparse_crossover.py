"""From which context length on block-sparse decode is faster than dense, on this machine.

Dense attention takes a time per token; sparse attention takes a smaller one (the probe) on top of
what the chosen blocks cost, whatever the length. Where the two lines meet, sparsity begins to pay.
That length belongs to a machine and a shape: it is for an automatic choice only, never for an
experiment that asked for a number of blocks.
"""

import itertools
import statistics
import time
from collections.abc import Callable, Mapping

import numpy as np

from course_lib import sparse
from course_lib.arrays import F32, LayerRows
from course_lib.attention import two_pass
from course_lib.probe_keys import ProbeKeys
from course_lib.quant import quantize_rows

# Found by measure_crossover at (16 query heads, 8 KV heads, head_dim 128), k = 32, one thread of a
# two-core x86 server (AVX-512): (kv, packed samples, shared selection) -> tokens.
MEASURED = {
    ("q8", False, False): 9996, ("q8", False, True): 6062,
    ("q8", True, False): 5330, ("q8", True, True): 3709,
    ("f32", False, False): 4801, ("f32", False, True): 3661,
    ("f32", True, False): 4541, ("f32", True, True): 3661,
}

LENGTHS = (2048, 4096, 8192)
ROUNDS = 7
COLD_BYTES = 128 << 20  # distinct rows read in turn, so that no cache of the CPU holds them


def crossover_tokens(dense_ms: Mapping[int, float], sparse_ms: Mapping[int, float]) -> int | None:
    """Return the context length at which sparse decode becomes faster than dense decode.

    Both map context lengths (at least two, the same) to the time of a token and layer. Straight
    lines are laid through the times (least squares); None if they never meet: then each further
    token costs the sparse kernel as much as the dense one. Raises ValueError for other lengths.
    """
    lengths = sorted(dense_ms)
    if len(lengths) < 2 or lengths != sorted(sparse_ms):
        raise ValueError("dense_ms and sparse_ms must hold the same lengths, at least two.")
    dense_slope, dense_start = np.polyfit(lengths, [dense_ms[n] for n in lengths], 1)
    sparse_slope, sparse_start = np.polyfit(lengths, [sparse_ms[n] for n in lengths], 1)
    gain = dense_slope - sparse_slope
    if gain <= 1e-9 * abs(dense_slope):  # parallel lines, up to rounding, meet nowhere
        return None
    return max(0, round((sparse_start - dense_start) / gain))


def measure_crossover(
    num_heads: int, num_kv_heads: int, head_dim: int, *, kv: str = "q8", k_blocks: int = 32,
    block_size: int = 32, n_probe: int = 8, shared_selection: bool = False,
    packed: bool = False, lengths: tuple[int, ...] = LENGTHS,
) -> int | None:
    """Time dense and sparse attention of random rows, and return crossover_tokens of the times.

    kv "f32" or "q8"; packed: with ProbeKeys. Takes some seconds and 128 MB for each length in turn.
    Lengths should all exceed k_blocks * block_size. ValueError for another kv.
    """
    if kv not in ("f32", "q8"):
        raise ValueError(f"kv {kv!r} is unknown; use f32 or q8.")
    rng = np.random.default_rng(0)
    q = rng.standard_normal((num_heads, head_dim), F32)
    dense_ms, sparse_ms = {}, {}
    for n in lengths:
        caches = _caches(rng, (num_kv_heads, n, head_dim), kv)
        keys = [ProbeKeys(block_size, n_probe) if packed else None for _ in caches]
        for rows, samples in zip(caches, keys, strict=True):
            if samples is not None:
                samples.update(rows)
        importance = rng.random(n, F32)
        turns = itertools.cycle(zip(caches, keys, strict=True))

        def dense(turns=turns) -> None:
            two_pass(q, *next(turns)[0])

        def pruned(turns=turns, importance=importance) -> None:
            rows, samples = next(turns)
            sparse.sparse_attention(
                q, *rows, k_blocks=k_blocks, block_size=block_size, n_probe=n_probe,
                importance=importance, shared_selection=shared_selection, probe_keys=samples)

        dense_ms[n], sparse_ms[n] = _medians(dense, pruned)
    return crossover_tokens(dense_ms, sparse_ms)


def _caches(rng: np.random.Generator, shape: tuple[int, int, int], kv: str) -> list[LayerRows]:
    k, v = rng.standard_normal((2, *shape), F32)
    rows = LayerRows(k, v)
    if kv == "q8":
        (k_int, k_scale), (v_int, v_scale) = quantize_rows(k), quantize_rows(v)
        rows = LayerRows(k_int, v_int, k_scale, v_scale)
    size = sum(a.nbytes for a in rows if a is not None)
    return [rows, *(rows.map(np.copy) for _ in range(COLD_BYTES // size))]


def _medians(*calls: Callable[[], None]) -> list[float]:
    """Median milliseconds of each call, the calls taking turns."""
    times: list[list[float]] = [[] for _ in calls]
    for _ in range(ROUNDS):
        for call, taken in zip(calls, times, strict=True):
            begin = time.perf_counter()
            call()
            taken.append(1e3 * (time.perf_counter() - begin))
    return [statistics.median(taken) for taken in times]
