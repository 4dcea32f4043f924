"""Decode block selection: which blocks of the KV cache one query head reads, and why.

Per layer and query head; nothing is shared inside a GQA group. Source: article 10-2 and the
public engine's rule; the order of tokens in the softmax is ours (ascending, so that selecting
every block is bit-equal to dense attention).
"""

from typing import Any

import numpy as np

from course_lib import backend, sparse_kernels
from course_lib.arrays import (
    F32,
    LayerRows,
    NotFiniteError,
    as_float32,
    positive_int,
    require_finite,
    whole_number,
)
from course_lib.attention import attend
from course_lib.attention_common import check_query, check_rows, kv_head, quiet, widen
from course_lib.gather import gather_blocks as gather_blocks
from course_lib.gather import gather_rows
from course_lib.probe_keys import ProbeKeys
from course_lib.selection import REASONS as REASONS
from course_lib.selection import Selection


def _descending(scores: np.ndarray) -> np.ndarray:
    return np.argsort(-scores, axis=-1, kind="stable")  # stable: ties to the lower index


def n_blocks(n: int, block_size: int = 32) -> int:
    """Return ceil(n / block_size): the last block may be short."""
    return -(-whole_number(n, "n") // positive_int(block_size, "block_size"))


def probe_positions(block: int, n: int, block_size: int = 32, n_probe: int = 8) -> np.ndarray:
    """Return the token positions of one block whose K the probe reads, int64 ascending.

    From the block's start in steps of max(1, length // n_probe): offsets 0, 4, ..., 28 of a full
    block of 32; a short last block can take more than n_probe samples (15 of 15, 11 of 31).
    Raises ValueError for a block that n tokens do not have.
    """
    block, n = whole_number(block, "block"), whole_number(n, "n")
    block_size = positive_int(block_size, "block_size")
    if not 0 <= block < n_blocks(n, block_size):
        raise ValueError(f"block {block} does not exist in a context of {n} tokens.")
    start = block * block_size
    end = min(start + block_size, n)
    return np.arange(start, end, _probe_step(end - start, n_probe))


def _probe_step(length: int, n_probe: int) -> int:
    return max(1, length // positive_int(n_probe, "n_probe"))


def probe_scores(q: Any, k: Any, *, block_size: int = 32, n_probe: int = 8,
                 k_scale: Any = None) -> np.ndarray:
    """Score every block by the largest raw q . k over its sampled tokens.

    q float32 [d]; k float32 or int8 [n, d] of its KV head, with k_scale float32 [n] for int8
    (widened; q stays float). Returns float32 [n_blocks], not scaled by 1/sqrt(d). Only sampled
    rows are read. Raises ValueError for an empty context, shapes that do not fit, NaN or infinity
    in what is read.
    """
    return probe_heads(*_one_head(q, k, k_scale), block_size, n_probe)[0]


def _one_head(q: Any, k: Any, k_scale: Any) -> tuple[np.ndarray, LayerRows]:
    q = check_query(np.asarray(q)[None])
    k = np.asarray(k)[None]
    scale = None if k_scale is None else np.asarray(k_scale)[None]
    return q, check_rows(q, k, k, scale, scale)


def probe_heads(q: np.ndarray, rows: LayerRows, block_size: int, n_probe: int) -> np.ndarray:
    """Return probe_scores of all query heads [num_heads, n_blocks]; checked arguments."""
    n, block_size = rows.k.shape[1], positive_int(block_size, "block_size")
    full = n // block_size * block_size
    scores = np.empty((len(q), n_blocks(n, block_size)), F32)
    if backend.kernel("probe_scores") is not None:
        return sparse_kernels.probe_scores(q, rows, block_size, positive_int(n_probe, "n_probe"),
                                           scores)
    if full:
        scores[:, : full // block_size] = _block_maxima(q, rows.upto(full), block_size, n_probe)
    if full < n:
        tail = rows.map(lambda a: a[:, full:])
        scores[:, -1:] = _block_maxima(q, tail, n - full, n_probe)
    finite = np.isfinite(scores)
    if not finite.all():
        block = int(np.argwhere(~finite)[0, 1])
        raise NotFiniteError(f"the probe score of block {block} is not finite; "
                             "a K row of it is bad.")
    return scores


@quiet
def _block_maxima(q: np.ndarray, rows: LayerRows, length: int, n_probe: int) -> np.ndarray:
    """Largest sampled q . k of every query head in every block of exactly ``length`` rows."""
    num_kv_heads, n, d = rows.k.shape
    step = _probe_step(length, n_probe)
    sampled = rows.k.reshape(num_kv_heads, 1, n // length, length, d)[..., ::step, :]
    # vecdot sums every row alone: equal rows tie exactly, wherever in the cache they lie.
    # (A matrix product rounds a row differently by its place in the matrix.)
    dots = np.vecdot(sampled.astype(F32, copy=False), q.reshape(num_kv_heads, -1, 1, 1, d))
    if rows.k_scale is not None:
        dots *= rows.k_scale.reshape(num_kv_heads, 1, n // length, length)[..., ::step]
    by_sample = np.ascontiguousarray(dots.reshape(-1, dots.shape[-1]).T)  # faster to reduce
    best = by_sample.max(axis=0)
    best[~np.isfinite(by_sample).all(axis=0)] = np.nan  # also where only a smaller score is bad
    return best.reshape(len(q), -1)


def importance_sums(importance: Any, block_size: int = 32) -> np.ndarray:
    """Sum an importance array over each block, in float32, token after token.

    importance float32 [n]; returns float32 [n_blocks]. Raises ValueError for an empty array, NaN
    or infinity.
    """
    importance = as_float32(importance, "importance", 1)
    if importance.size == 0:
        raise ValueError("importance must hold at least one token.")
    block_size = min(positive_int(block_size, "block_size"), len(importance))
    if backend.kernel("importance_sums") is not None:
        return sparse_kernels.importance_sums(
            importance, block_size, np.empty(n_blocks(len(importance), block_size), F32))
    padded = np.zeros((n_blocks(len(importance), block_size), block_size), F32)
    padded.ravel()[: len(importance)] = importance
    with np.errstate(over="ignore", invalid="ignore"):
        sums = np.add.accumulate(padded, axis=1)[:, -1].copy()
    if not np.isfinite(sums).all():
        raise NotFiniteError("importance holds NaN or infinity; check the prefill that recorded "
                             "it.")
    return sums


def _checked_sums(importance: Any, n: int, block_size: int) -> np.ndarray | None:
    if importance is None:
        return None
    if np.shape(importance) != (n,):
        raise ValueError(f"importance must hold one value for each of the {n} tokens, "
                         f"not shape {np.shape(importance)}.")
    return importance_sums(importance, block_size)


def select_from_scores(probe: Any, importance_sum: Any, k_blocks: int) -> Selection:
    """Choose blocks from their scores alone: importance reservation, probe fill, recency.

    probe float32 [n_blocks]; importance_sum float32 [n_blocks] or None (no reservation; an
    all-zero array does reserve). (k + 1) // 2 blocks go by importance, the rest of k by probe
    score, ties to the lower index. If the last block is then not chosen it replaces the probe
    block with the lowest score (on equal scores the earliest chosen); importance blocks are never
    displaced. Raises ValueError for k_blocks < 1, no block, lengths that differ, NaN or infinity.
    Source: article 10-2.
    """
    probe = as_float32(probe, "probe", 1)
    if probe.size == 0 or not np.isfinite(probe).all():
        raise ValueError("probe must hold a finite score for at least one block.")
    if importance_sum is not None:
        importance_sum = as_float32(importance_sum, "importance_sum", 1)
        if importance_sum.shape != probe.shape or not np.isfinite(importance_sum).all():
            raise ValueError(f"importance_sum must hold {probe.size} finite sums, one per block.")
    return choose_heads(probe[None], importance_sum, k_blocks)[0]


def choose_heads(probe: np.ndarray, importance: np.ndarray | None,
                 k_blocks: int) -> list[Selection]:
    """Return what select_heads returns, from the compiled kernel where there is one."""
    if backend.kernel("select_blocks") is None:
        return select_heads(probe, importance, k_blocks)
    chosen = sparse_kernels.Chosen(len(probe), probe.shape[1], positive_int(k_blocks, "k_blocks"))
    chosen.select(probe, importance)
    return selections_of(probe, importance, chosen)


def selections_of(probe: np.ndarray, importance: np.ndarray | None,
                  chosen: sparse_kernels.Chosen) -> list[Selection]:
    """Return what a kernel has chosen by these scores, one Selection per head."""
    reserved = 0 if importance is None else chosen.reserved
    return [Selection(ids, order, scores, importance, reserved,
                      *((None, None) if recency < 0 else (recency, evicted)))
            for ids, order, scores, recency, evicted in zip(
                chosen.ids.astype(np.int64), chosen.order.astype(np.int64), probe,
                chosen.recency.tolist(), chosen.evicted.tolist(), strict=True)]


def select_heads(probe: np.ndarray, importance: np.ndarray | None,
                 k_blocks: int) -> list[Selection]:
    """Apply select_from_scores to probe scores [num_heads, n_blocks] that share importance sums."""
    k_blocks = positive_int(k_blocks, "k_blocks")
    num_heads, count = probe.shape
    if importance is None:
        reserved = 0
        order = _descending(probe)[:, :k_blocks]
    else:
        first = _descending(importance)[: (k_blocks + 1) // 2]
        reserved = len(first)
        free = np.ones(count, bool)
        free[first] = False
        rest = np.flatnonzero(free)
        fill = rest[_descending(probe[:, rest])[:, : k_blocks - reserved]]
        order = np.concatenate((np.broadcast_to(first, (num_heads, reserved)), fill), axis=1)
    last = count - 1
    recency: list[int | None] = [None] * num_heads
    evicted: list[int | None] = [None] * num_heads
    if reserved < order.shape[1] < count:
        for h in np.flatnonzero((order != last).all(axis=1)).tolist():
            chosen = order[h, reserved:]
            slot = reserved + int(np.argmin(probe[h, chosen]))  # of equals the earliest chosen
            recency[h], evicted[h] = last, int(order[h, slot])
            order[h, slot] = last
    ids = np.sort(order, axis=1)
    return [Selection(ids[h], order[h], probe[h], importance, reserved, recency[h], evicted[h])
            for h in range(num_heads)]


def select_blocks(q: Any, k: Any, *, k_blocks: int = 32, block_size: int = 32, n_probe: int = 8,
                  importance: Any = None, k_scale: Any = None) -> Selection:
    """Choose the blocks that one query head reads.

    q float32 [d]; k float32 or int8 [n, d] of its KV head, k_scale float32 [n] with int8;
    importance float32 [n] or None. Returns a Selection: see select_from_scores for the rule.
    Raises ValueError for k_blocks, block_size or n_probe below 1, an empty context, shapes that
    do not fit, NaN or infinity anywhere. Source: article 10-2, engine rule.
    """
    query, rows = _one_head(q, k, k_scale)
    require_finite(rows.k[0], "k")
    sums = _checked_sums(importance, rows.k.shape[1], block_size)
    return choose_heads(probe_heads(query, rows, block_size, n_probe), sums, k_blocks)[0]


def sparse_decode_gate(n: int, k_blocks: int, block_size: int = 32) -> bool:
    """Return whether sparse decode is worth running at n tokens.

    The engine's gate (n > 2 * block_size), and some block to prune (n > k_blocks * block_size);
    without it dense attention gives the same bits.
    """
    return n > 2 * block_size and n > k_blocks * block_size


def sparse_attention(q: Any, k: Any, v: Any, k_scale: Any = None, v_scale: Any = None, *,
                     k_blocks: int = 32, block_size: int = 32, n_probe: int = 8,
                     importance: Any = None,
                     shared_selection: bool = False,
                     probe_keys: ProbeKeys | None = None) -> tuple[np.ndarray, list[Selection]]:
    """Attention of one query over selected blocks only, each query head with its own selection.

    q float32 [num_heads, head_dim]; k, v, scales as for attention.two_pass; importance float32
    [n] or None. Returns (out float32 [num_heads, head_dim], one Selection per head). With
    shared_selection the query heads of a KV head share one (ours, not the article's): a block's
    probe score is the largest of theirs. probe_keys: samples of these rows, which the compiled
    kernel reads in place of k's; the result is the same. With k_blocks >= n_blocks the output is
    bit-equal to two_pass. Only sampled and selected rows are read and checked for NaN. Raises
    ValueError as two_pass and select_blocks do, and for probe_keys of other rows; TypeError for a
    shared_selection or probe_keys of another type.
    """
    k_blocks, n_probe = positive_int(k_blocks, "k_blocks"), positive_int(n_probe, "n_probe")
    block_size = positive_int(block_size, "block_size")
    if not isinstance(shared_selection, bool | np.bool_):
        raise TypeError("shared_selection must be True or False, not "
                        f"{type(shared_selection).__name__}.")
    if not isinstance(probe_keys, ProbeKeys | None):
        raise TypeError(f"probe_keys must be ProbeKeys or None, not {type(probe_keys).__name__}.")
    q = check_query(q)
    rows = check_rows(q, k, v, k_scale, v_scale)
    sums = _checked_sums(importance, rows.k.shape[1], block_size)
    if probe_keys is not None:
        probe_keys.require_fit(rows, block_size, n_probe)
    if backend.kernel("sparse_attention") is not None:
        count = n_blocks(rows.k.shape[1], block_size)
        chosen = sparse_kernels.Chosen(len(q), count, k_blocks)
        out, probe = chosen.attend(q, rows, sums, block_size, n_probe, bool(shared_selection),
                                   probe_keys)
        return out, selections_of(probe, sums, chosen)
    probe = probe_heads(q, rows, block_size, n_probe)
    if shared_selection:
        by_group = probe.reshape(len(rows.k), -1, probe.shape[1])
        probe = np.broadcast_to(by_group.max(axis=1, keepdims=True), by_group.shape).reshape(
            probe.shape)
    selections = select_heads(probe, sums, k_blocks)
    out = np.empty_like(q)
    for h, selection in enumerate(selections):
        head = rows.head(kv_head(h, len(q), len(rows.k)))
        out[h] = attend(q[h], widen(gather_rows(head, selection.ids, block_size)))
    return out, selections
