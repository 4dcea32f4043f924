"""Attention in NumPy: one query over the KV rows (three kernels), and exact prefill.

Arrays are head-major: q [num_heads, head_dim], k and v [num_kv_heads, n, head_dim], float32 rows
or int8 rows with a float32 scale per row [num_kv_heads, n]. Query head h reads KV head
h * num_kv_heads // num_heads. Score = (q . k) / sqrt(head_dim). A NaN or infinity in a row
that is read is a ValueError.
"""

import math
from collections.abc import Callable
from typing import Any

import numpy as np

from course_lib.arrays import F32, LayerRows, NotFiniteError, as_float32, require_finite
from course_lib.quant import quantize_blocks

Q_BLOCK = 32  # query values that share a scale in the single pass
TOKEN_BLOCK = 32  # tokens per rescale in the single pass
QUERY_TILE = 128  # query rows per tile of prefill scores: 1 MB at 2K tokens

# The weight of a far token may underflow to 0: that is its value. Overflow and NaN are looked for
# in the results, so that they are reported as errors and not as warnings.
quiet = np.errstate(under="ignore", over="ignore", invalid="ignore")

HeadKernel = Callable[[np.ndarray, LayerRows], np.ndarray]


def kv_head(head: int, num_heads: int, num_kv_heads: int) -> int:
    """Return the KV head that a query head reads: h * num_kv_heads // num_heads."""
    return head * num_kv_heads // num_heads


@quiet
def softmax(scores: np.ndarray, out: np.ndarray | None = None) -> np.ndarray:
    """Softmax over the last axis, the maximum subtracted first.

    scores: float32 [..., n], n >= 1; -inf marks a masked token, at least one per row is finite.
    Returns float32 of the same shape, written into ``out`` if given (it may be ``scores``).
    """
    weights = np.subtract(scores, scores.max(axis=-1, keepdims=True), out=out)
    np.exp(weights, out=weights)
    weights /= weights.sum(axis=-1, keepdims=True)
    return weights


def check_query(q: Any, ndim: int = 2) -> np.ndarray:
    """Return q as finite C-contiguous float32 [num_heads, ..., head_dim] or raise ValueError."""
    q = np.ascontiguousarray(as_float32(q, "q", ndim))
    if q.size == 0:
        raise ValueError(f"q must hold at least one query, not shape {q.shape}.")
    if not np.isfinite(q).all():
        raise NotFiniteError("q holds NaN or infinity; check the step that produced it.")
    return q


def check_rows(q: np.ndarray, k: Any, v: Any, k_scale: Any = None,
               v_scale: Any = None) -> LayerRows:
    """Check KV rows against each other and against q [num_heads, ..., head_dim].

    Raises ValueError for an empty context, shapes or head counts that do not fit, and scales
    that are missing (int8 rows) or not wanted (float rows).
    """
    k, v = np.asarray(k), np.asarray(v)
    if k.ndim != 3 or v.shape != k.shape or k.shape[2] != q.shape[-1]:
        raise ValueError(f"k and v must both have shape [num_kv_heads, n, {q.shape[-1]}] to fit q, "
                         f"not {k.shape} and {v.shape}.")
    if k.size == 0:
        raise ValueError("k and v must hold at least one token; the context is empty.")
    if q.shape[0] % k.shape[0]:
        raise ValueError(f"{q.shape[0]} query heads do not divide over {k.shape[0]} KV heads.")
    if (k.dtype == np.int8) != (v.dtype == np.int8):
        raise ValueError("k and v must both be int8 rows or both float32 rows.")
    if k.dtype != np.int8:
        if k_scale is not None or v_scale is not None:
            raise ValueError("k_scale and v_scale belong to int8 rows; leave them out for float32.")
        return LayerRows(as_float32(k, "k"), as_float32(v, "v"))
    if k_scale is None or v_scale is None:
        raise ValueError("int8 rows need k_scale and v_scale; quantize_rows returns them.")
    k_scale, v_scale = as_float32(k_scale, "k_scale"), as_float32(v_scale, "v_scale")
    if k_scale.shape != k.shape[:2] or v_scale.shape != k.shape[:2]:
        raise ValueError(f"k_scale and v_scale must have shape {k.shape[:2]}, "
                         f"not {k_scale.shape} and {v_scale.shape}.")
    return LayerRows(k, v, k_scale, v_scale)


def widen(rows: LayerRows) -> LayerRows:
    """Return rows with k and v as C-contiguous float32; int8 keeps its integer values."""
    return rows._replace(k=np.ascontiguousarray(rows.k, F32), v=np.ascontiguousarray(rows.v, F32))


def head_scores(q: np.ndarray, rows: LayerRows) -> np.ndarray:
    """Return the scores float32 [n] of one query [d] over the widened rows of its KV head.

    Raises ValueError if a score is not finite: a K row or its scale is bad, or q . k overflows.
    """
    scores = rows.k @ q
    if rows.k_scale is not None:
        scores *= rows.k_scale
    scores *= F32(1 / math.sqrt(q.shape[0]))
    return _finite_scores(scores)


def _finite_scores(scores: np.ndarray) -> np.ndarray:
    finite = np.isfinite(scores)
    if not finite.all():
        raise NotFiniteError(f"the score of K row {int(np.argmin(finite))} is not finite; "
                             "the row or its scale is bad.")
    return scores


def _finite_output(out: np.ndarray) -> np.ndarray:
    if not np.isfinite(out).all():
        raise NotFiniteError("the output is not finite; a V row or its scale is bad.")
    return out


@quiet
def attend(q: np.ndarray, rows: LayerRows) -> np.ndarray:
    """Two-pass attention of one query head: the one kernel of the exact and the sparse arms.

    q float32 [d]; widened rows of its KV head. Returns float32 [d]. Equal arguments give equal
    bits within one process. Raises ValueError for a row that is not finite.
    """
    scores = head_scores(q, rows)
    weights = softmax(scores, out=scores)
    if rows.v_scale is not None:
        weights *= rows.v_scale
    return _finite_output(weights @ rows.v)


def _per_head(kernel: HeadKernel, q: Any, *arrays: Any) -> np.ndarray:
    q = check_query(q)
    rows = check_rows(q, *arrays)
    out = np.empty_like(q)
    group = q.shape[0] // rows.k.shape[0]
    for kh in range(rows.k.shape[0]):
        wide = widen(rows.head(kh))
        for h in range(kh * group, (kh + 1) * group):
            out[h] = kernel(q[h], wide)
    return out


def two_pass(q: Any, k: Any, v: Any, k_scale: Any = None, v_scale: Any = None) -> np.ndarray:
    """Exact attention of one query: maximum, weights, division by their sum, then V.

    q float32 [num_heads, head_dim]; k, v float32 or int8 [num_kv_heads, n, head_dim]; scales
    float32 [num_kv_heads, n] with int8 rows (K is widened, q stays float). Returns float32
    [num_heads, head_dim]. Raises ValueError for an empty context, shapes that do not fit, NaN or
    infinity. Source: engine rule; the kernel of every exact and sparse arm.
    """
    return _per_head(attend, q, k, v, k_scale, v_scale)


def online(q: Any, k: Any, v: Any, k_scale: Any = None, v_scale: Any = None) -> np.ndarray:
    """Attention of one query in a single pass over the tokens (online softmax).

    Arguments, result and errors as for two_pass, equal to it up to float32 rounding.
    Source: engine rule, with the running maximum started at -inf (ours).
    """
    return _per_head(_online_head, q, k, v, k_scale, v_scale)


@quiet
def _online_head(q: np.ndarray, rows: LayerRows) -> np.ndarray:
    return _finite_output(online_softmax(head_scores(q, rows), rows.v, rows.v_scale))


@quiet
def online_softmax(scores: np.ndarray, v: np.ndarray,
                   v_scale: np.ndarray | None = None) -> np.ndarray:
    """Weighted mean of V rows by online softmax: running maximum, sum and accumulator.

    scores float32 [n] (-inf = masked token), v float32 [n, d], v_scale float32 [n] or None.
    Returns float32 [d]; zeros if every token is masked. The sum and the accumulator are rescaled
    only when a strictly larger score arrives. Source: engine rule.
    """
    running_max, total = F32(-np.inf), F32(0)
    acc = np.zeros(v.shape[1], F32)
    for t, score in enumerate(scores):
        if score == -np.inf:
            continue
        if score > running_max:
            shrink = np.exp(running_max - score)
            total *= shrink
            acc *= shrink
            running_max = score
        weight = np.exp(score - running_max)
        total += weight
        acc += (weight if v_scale is None else weight * v_scale[t]) * v[t]
    return acc / total if total > 0 else acc


def single_pass_q8(q: Any, kq: Any, k_scale: Any, vq: Any, v_scale: Any) -> np.ndarray:
    """Attention of one query over q8 rows with an int8 query, 32 tokens at a time.

    q float32 [num_heads, head_dim], head_dim a multiple of 32, quantized per 32 values; kq, vq
    int8 [num_kv_heads, n, head_dim]; scales float32 [num_kv_heads, n]. Returns float32
    [num_heads, head_dim]. Integer dots per 32 are exact; one rescale per 32-token block.
    Raises TypeError for rows that are not int8, ValueError as two_pass does and for a head_dim
    that 32 does not divide. Source: article 9-2.
    """
    for name, rows in (("kq", kq), ("vq", vq)):
        if np.asarray(rows).dtype != np.int8:
            raise TypeError(f"{name} must be int8, not {np.asarray(rows).dtype}; "
                            "quantize_rows returns such rows.")
    return _per_head(_single_pass_head, q, kq, vq, k_scale, v_scale)


@quiet
def _single_pass_head(q: np.ndarray, rows: LayerRows) -> np.ndarray:
    assert rows.k_scale is not None and rows.v_scale is not None  # int8 rows, checked above
    q_int, q_scale = quantize_blocks(q, Q_BLOCK)
    scores = np.zeros(rows.k.shape[0], F32)
    for g, scale in enumerate(q_scale):
        part = slice(g * Q_BLOCK, (g + 1) * Q_BLOCK)
        # An exact integer in float32 whatever the order: |sum| <= 32 * 127 * 128 < 2**24.
        scores += (rows.k[:, part] @ q_int[part].astype(F32)) * scale
    scores *= rows.k_scale
    scores *= F32(1 / math.sqrt(q.shape[0]))
    _finite_scores(scores)
    running_max, total = F32(-np.inf), F32(0)
    acc = np.zeros(rows.v.shape[1], F32)
    for first in range(0, len(scores), TOKEN_BLOCK):
        block = slice(first, first + TOKEN_BLOCK)
        block_max = scores[block].max()
        if block_max > running_max:
            shrink = np.exp(running_max - block_max)
            total *= shrink
            acc *= shrink
            running_max = block_max
        weights = np.exp(scores[block] - running_max)
        total += weights.sum()
        acc += (weights * rows.v_scale[block]) @ rows.v[block]
    return _finite_output(acc / total)


@quiet
def causal_attention(q: Any, k: Any, v: Any, *, start: int = 0,
                     importance: np.ndarray | None = None, importance_from: int = 0) -> np.ndarray:
    """Exact prefill attention: query row i is position start + i and sees tokens up to itself.

    q float32 [num_heads, Lq, head_dim]; k, v float32 [num_kv_heads, n, head_dim] with
    n >= start + Lq (later rows are not read). Returns float32 [num_heads, Lq, head_dim]. If
    ``importance`` (float32 [>= start + Lq]) is given, the softmax weights of query positions >=
    importance_from are added to it in place, in the order head, query. Works in tiles of 128
    queries, so the extra memory is about 1 kB per context token. Raises ValueError for shapes
    that do not fit, NaN or infinity; importance is then as before.
    """
    q, rows, added = check_prefill(q, k, v, start, importance)
    out = np.empty_like(q)
    tokens = np.arange(start + q.shape[1])
    for h in range(q.shape[0]):
        head = rows.head(kv_head(h, q.shape[0], rows.k.shape[0]))
        for first in range(0, q.shape[1], QUERY_TILE):
            part = slice(first, first + QUERY_TILE)
            out[h, part] = attend_tile(q[h, part], start + first, head, tokens, added,
                                       importance_from)
    if importance is not None:
        importance[:] = added
    return out


def attend_tile(q: np.ndarray, first: int, rows: LayerRows, tokens: np.ndarray,
                importance: np.ndarray | None, importance_from: int) -> np.ndarray:
    """Attention of query rows [t, d] at positions first, first + 1, ... over rows of one KV head.

    Row j of ``rows`` is token tokens[j] (ascending, tokens[0] <= first); each query sees the
    tokens up to its own position. Returns float32 [t, d] and adds the weights to ``importance``.
    """
    positions = np.arange(first, first + len(q))
    visible = int(np.searchsorted(tokens, first + len(q)))
    scores = q @ rows.k[:visible].T
    scores *= F32(1 / math.sqrt(q.shape[1]))
    own = int(np.searchsorted(tokens, first))  # tokens before it are seen by every row
    scores[:, own:][tokens[own:visible] > positions[:, None]] = -np.inf
    weights = softmax(scores, out=scores)
    if importance is not None:
        counted = weights[max(0, importance_from - first):]
        everything = int(tokens[visible - 1]) == visible - 1  # ascending, so no token is left out
        seen = importance[:visible] if everything else importance[tokens[:visible]]
        for row in counted:  # one query after the other: the order is part of the definition
            seen += row
        if not everything:
            importance[tokens[:visible]] = seen
    return _finite_output(weights @ rows.v[:visible])


def check_prefill(q: Any, k: Any, v: Any, start: int,
                  importance: np.ndarray | None) -> tuple[np.ndarray, LayerRows, np.ndarray | None]:
    """Check the arguments of causal_attention; returns q, rows and a copy of importance."""
    q = check_query(q, ndim=3)
    end = start + q.shape[1]
    rows = check_rows(q, k, v)
    if start < 0 or rows.k.shape[1] < end:
        raise ValueError(f"k and v hold {rows.k.shape[1]} tokens, but the queries are positions "
                         f"{start} to {end - 1}.")
    rows = rows.upto(end)
    require_finite(rows.k, "k")
    require_finite(rows.v, "v")
    if importance is None:
        return q, rows, None
    if not isinstance(importance, np.ndarray) or importance.dtype != F32 \
            or importance.ndim != 1 or len(importance) < end:
        raise ValueError(f"importance must be a float32 array of at least {end} tokens.")
    if not np.isfinite(importance).all():
        raise ValueError("importance holds NaN or infinity; start from zeros.")
    return q, rows, importance.copy()
