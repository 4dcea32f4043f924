"""Decode block selection: which blocks of the KV cache one query head reads, and why.

Per layer and query head; nothing is shared inside a GQA group. Source: article 10-2 and the
public engine's rule; order of tokens in the softmax is ours (ascending, so that selecting every
block is bit-equal to dense attention).
"""

import functools
from dataclasses import dataclass
from typing import Any

import numpy as np

from course_lib.arrays import F32, as_float32, positive_int, require_finite_rows
from course_lib.attention import attend, check_heads, check_query, check_rows, widen

REASONS = ("importance", "probe", "recency", "evicted_by_recency", "not_selected")


def n_blocks(n: int, block_size: int = 32) -> int:
    """Return ceil(n / block_size): the last block may be short."""
    return -(-n // block_size)


def probe_positions(block: int, n: int, block_size: int = 32, n_probe: int = 8) -> np.ndarray:
    """Return the token positions of one block whose K the probe reads, int64 ascending.

    From the block's start in steps of max(1, length // n_probe): offsets 0, 4, ..., 28 of a full
    block of 32; a short last block can take more than n_probe samples (15 of 15, 11 of 31).
    """
    block_size, n_probe = positive_int(block_size, "block_size"), positive_int(n_probe, "n_probe")
    if not 0 <= block < n_blocks(n, block_size):
        raise ValueError(f"block {block} does not exist; {n} tokens make {n_blocks(n, block_size)}.")
    start = block * block_size
    end = min(start + block_size, n)
    return np.arange(start, end, max(1, (end - start) // n_probe))


def probe_scores(q: Any, k: Any, *, block_size: int = 32, n_probe: int = 8,
                 k_scale: Any = None) -> np.ndarray:
    """Score every block by the largest raw q . k over its sampled tokens.

    q float32 [d]; k float32 or int8 [n, d], with k_scale float32 [n] for int8. Returns float32
    [n_blocks], unscaled by 1/sqrt(d). Reads the sampled rows only, and raises ValueError if one
    of their scores is not finite, for shapes that do not fit and for an empty context.
    """
    q, k, k_scale = _check_head(q, k, k_scale)
    return _probe(q, k, k_scale, positive_int(block_size, "block_size"),
                  positive_int(n_probe, "n_probe"))


def _check_head(q: Any, k: Any, k_scale: Any) -> tuple[np.ndarray, np.ndarray, np.ndarray | None]:
    q = as_float32(q, "q", 1)
    k = np.asarray(k)
    if k.ndim != 2 or q.size == 0 or k.shape[1] != q.shape[0]:
        raise ValueError(f"k must have shape [n, {q.shape[0]}] to fit q, not {k.shape}.")
    check_rows(k[None], k[None], None if k_scale is None else np.asarray(k_scale)[None],
               None if k_scale is None else np.asarray(k_scale)[None], q.shape[0])
    if not np.isfinite(q).all():
        raise ValueError("q holds NaN or infinity; check the step that produced it.")
    if k.dtype == np.int8:
        return q, k, as_float32(k_scale, "k_scale", 1)
    return q, as_float32(k, "k"), None


def _probe(q: np.ndarray, k: np.ndarray, k_scale: np.ndarray | None, bs: int,
           n_probe: int) -> np.ndarray:
    n, d = k.shape
    full = n // bs
    scores = np.empty(n_blocks(n, bs), F32)
    for first, count, size in ((0, full, bs), (full * bs, 1, n - full * bs)):
        if count and size:
            step = max(1, size // n_probe)
            rows = k[first : first + count * size].reshape(count, size, d)[:, ::step]
            # einsum sums each row alone, so equal rows tie exactly wherever they lie.
            dots = np.einsum("btd,d->bt", rows.astype(F32, copy=False), q)
            if k_scale is not None:
                dots *= k_scale[first : first + count * size].reshape(count, size)[:, ::step]
            scores[first // bs : first // bs + count] = dots.max(axis=1)
    if not np.isfinite(scores).all():
        block = int(np.argmin(np.isfinite(scores)))
        raise ValueError(f"the probe score of block {block} is not finite; a K row is bad.")
    return scores


def importance_sums(importance: Any, block_size: int = 32) -> np.ndarray:
    """Sum an importance array over each block, in float32, token after token.

    importance float32 [n]; returns float32 [n_blocks]. Raises ValueError for an empty array,
    NaN or infinity.
    """
    importance = as_float32(importance, "importance", 1)
    bs = positive_int(block_size, "block_size")
    if importance.size == 0:
        raise ValueError("importance must hold at least one token.")
    padded = np.zeros((n_blocks(importance.size, bs), bs), F32)
    padded.ravel()[: importance.size] = importance
    sums = np.add.accumulate(padded, axis=1)[:, -1].copy()
    if not np.isfinite(sums).all():
        raise ValueError("importance holds NaN or infinity; check the prefill that recorded it.")
    return sums


@dataclass(frozen=True, eq=False)
class Selection:
    """The chosen blocks of one query head, with the trace of reasons.

    ids: chosen blocks ascending, int64. order: the same blocks in order of choice (a recency
    block stands where the block it replaced stood). probe, importance: float32 [n_blocks] scores
    that decided (importance None if none was given). num_importance: how many lead ``order`` by
    importance. recency, evicted: the block that recency put in and the one it threw out, or None.
    """

    ids: np.ndarray
    order: np.ndarray
    probe: np.ndarray
    importance: np.ndarray | None
    num_importance: int
    recency: int | None
    evicted: int | None

    @functools.cached_property
    def probe_rank(self) -> np.ndarray:
        """Rank of every block by probe score: 1 = highest, ties to the lower index."""
        return _ranks(self.probe)

    @functools.cached_property
    def importance_rank(self) -> np.ndarray | None:
        """Rank of every block by importance sum: 1 = highest; None without importance."""
        return None if self.importance is None else _ranks(self.importance)

    @functools.cached_property
    def reason(self) -> tuple[str, ...]:
        """For every block one of REASONS."""
        reasons = ["not_selected"] * len(self.probe)
        for place, block in enumerate(self.order.tolist()):
            reasons[block] = "importance" if place < self.num_importance else "probe"
        if self.recency is not None and self.evicted is not None:
            reasons[self.recency] = "recency"
            reasons[self.evicted] = "evicted_by_recency"
        return tuple(reasons)

    def tokens(self, n: int, block_size: int = 32) -> np.ndarray:
        """Return the token positions of the chosen blocks, int64 ascending."""
        tokens = (self.ids[:, None] * block_size + np.arange(block_size)).ravel()
        return tokens[tokens < n]


def _descending(scores: np.ndarray) -> np.ndarray:
    return np.argsort(-scores, kind="stable")


def _ranks(scores: np.ndarray) -> np.ndarray:
    ranks = np.empty(len(scores), np.int64)
    ranks[_descending(scores)] = np.arange(1, len(scores) + 1)
    return ranks


def select_from_scores(probe: Any, importance_sum: Any, k_blocks: int) -> Selection:
    """Choose blocks from their scores alone: importance reservation, probe fill, recency.

    probe float32 [n_blocks]; importance_sum float32 [n_blocks] or None (reservation skipped; an
    all-zero array is not skipped). (k + 1) // 2 blocks are reserved by importance, the rest of k
    filled by probe score, ties to the lower index. If the last block is then not chosen it
    replaces the probe block with the lowest score (on equal scores the earliest chosen);
    importance blocks are never displaced. Raises ValueError for k_blocks < 1, an empty probe,
    NaN, or lengths that differ. Source: article 10-2.
    """
    probe = as_float32(probe, "probe", 1)
    k_blocks = positive_int(k_blocks, "k_blocks")
    if probe.size == 0 or not np.isfinite(probe).all():
        raise ValueError("probe must hold a finite score for at least one block.")
    if importance_sum is not None:
        importance_sum = as_float32(importance_sum, "importance_sum", 1)
        if importance_sum.shape != probe.shape or not np.isfinite(importance_sum).all():
            raise ValueError(f"importance_sum must hold {probe.size} finite sums, one per block.")
    return _select(probe, importance_sum, k_blocks)


def _select(probe: np.ndarray, importance: np.ndarray | None, k_blocks: int) -> Selection:
    by_probe = _descending(probe)
    if importance is None:
        order, reserved = by_probe[:k_blocks].copy(), 0
    else:
        first = _descending(importance)[: (k_blocks + 1) // 2]
        free = np.ones(len(probe), bool)
        free[first] = False
        reserved = len(first)
        order = np.concatenate((first, by_probe[free[by_probe]][: k_blocks - reserved]))
    recency = evicted = None
    last = len(probe) - 1
    if reserved < len(order) < len(probe) and not (order == last).any():
        slot = reserved + int(np.argmin(probe[order[reserved:]]))  # first of equals: the earliest
        recency, evicted = last, int(order[slot])
        order[slot] = last
    return Selection(np.sort(order), order, probe, importance, reserved, recency, evicted)


def select_blocks(q: Any, k: Any, *, k_blocks: int = 32, block_size: int = 32, n_probe: int = 8,
                  importance: Any = None, k_scale: Any = None) -> Selection:
    """Choose the blocks that one query head reads.

    q float32 [d]; k float32 or int8 [n, d] of its KV head, k_scale float32 [n] with int8;
    importance float32 [n] or None. Returns a Selection. Raises ValueError for k_blocks,
    block_size or n_probe below 1, an empty context, shapes that do not fit, NaN or infinity.
    Source: article 10-2, engine rule; see select_from_scores for the rule itself.
    """
    k_blocks = positive_int(k_blocks, "k_blocks")
    block_size, n_probe = positive_int(block_size, "block_size"), positive_int(n_probe, "n_probe")
    q, k, k_scale = _check_head(q, k, k_scale)
    require_finite_rows(k, "k")
    sums = _check_importance(importance, k.shape[0], block_size)
    return _select(_probe(q, k, k_scale, block_size, n_probe), sums, k_blocks)


def _check_importance(importance: Any, n: int, block_size: int) -> np.ndarray | None:
    if importance is None:
        return None
    importance = as_float32(importance, "importance", 1)
    if importance.shape[0] != n:
        raise ValueError(f"importance must hold one value for each of {n} tokens, "
                         f"not {importance.shape[0]}.")
    return importance_sums(importance, block_size)


def sparse_decode_gate(n: int, k_blocks: int, block_size: int = 32) -> bool:
    """Return whether sparse decode prunes anything: n > 2 blocks (the engine's gate) and n > k."""
    return n > 2 * block_size and n > k_blocks * block_size


def sparse_attention(q: Any, k: Any, v: Any, k_scale: Any = None, v_scale: Any = None, *,
                     k_blocks: int = 32, block_size: int = 32, n_probe: int = 8,
                     importance: Any = None) -> tuple[np.ndarray, list[Selection]]:
    """Attention of one query over selected blocks only, each query head with its own selection.

    q float32 [num_heads, head_dim]; k, v, scales as for attention.two_pass; importance float32
    [n] or None. Returns (out float32 [num_heads, head_dim], one Selection per head). With
    k_blocks >= n_blocks the output is bit-equal to two_pass. Only sampled and selected rows are
    read, so only those are checked for NaN. Raises ValueError as two_pass and select_blocks do.
    """
    k_blocks = positive_int(k_blocks, "k_blocks")
    block_size, n_probe = positive_int(block_size, "block_size"), positive_int(n_probe, "n_probe")
    q = check_query(q)
    rows = check_rows(k, v, k_scale, v_scale, q.shape[1])
    num_heads, (num_kv_heads, n, _) = q.shape[0], rows.k.shape
    check_heads(num_heads, num_kv_heads)
    sums = _check_importance(importance, n, block_size)
    out = np.empty_like(q)
    selections = []
    for h in range(num_heads):
        kh = h * num_kv_heads // num_heads
        head = [None if a is None else a[kh] for a in rows]
        chosen = _select(_probe(q[h], head[0], head[2], block_size, n_probe), sums, k_blocks)
        picked = head
        if len(chosen.ids) < len(chosen.probe):
            picked = [None if a is None else gather_blocks(a, chosen.ids, block_size) for a in head]
        out[h] = attend(q[h], widen(picked[0]), widen(picked[1]), picked[2], picked[3])
        selections.append(chosen)
    return out, selections


def gather_blocks(rows: np.ndarray, ids: np.ndarray, block_size: int) -> np.ndarray:
    """Copy the rows [n, ...] of the given blocks (ascending ids) into one contiguous array."""
    full = len(rows) // block_size
    tail = int(ids[-1]) == full  # the short last block, if chosen, comes last
    whole = ids[:-1] if tail else ids
    size = len(whole) * block_size
    out = np.empty((size + (len(rows) - full * block_size if tail else 0), *rows.shape[1:]),
                   rows.dtype)
    blocks = rows[: full * block_size].reshape(full, block_size, *rows.shape[1:])
    np.take(blocks, whole, axis=0, out=out[:size].reshape(len(whole), block_size, *rows.shape[1:]),
            mode="clip")  # ids are in range; clip spares a bounce buffer
    if tail:
        out[size:] = rows[full * block_size :]
    return out
