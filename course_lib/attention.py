"""Attention in NumPy: one query over the KV rows (three kernels) and causal prefill.

Arrays are head-major: q [num_heads, head_dim], k and v [num_kv_heads, n, head_dim], float32 rows
or int8 rows with a float32 scale per row [num_kv_heads, n]. Query head h reads KV head
h * num_kv_heads // num_heads. Score = (q . k) / sqrt(head_dim).
"""

import math
from typing import Any, NamedTuple

import numpy as np

from course_lib.arrays import F32, as_float32, require_finite_rows
from course_lib.quant import quantize_blocks

Q_BLOCK = 32  # query values that share a scale in the single pass
TOKEN_BLOCK = 32  # tokens per rescale in the single pass
QUERY_TILE = 128  # query rows per score tile in prefill: 1 MB of scores at 2K tokens

quiet = np.errstate(under="ignore")  # a far token's weight may underflow to 0: that is its value


class Rows(NamedTuple):
    """Checked KV rows: float32 with scales None, or int8 with float32 scales."""

    k: np.ndarray
    v: np.ndarray
    k_scale: np.ndarray | None
    v_scale: np.ndarray | None


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


def check_rows(k: Any, v: Any, k_scale: Any, v_scale: Any, head_dim: int) -> Rows:
    """Check KV rows against each other and head_dim; see the module for shapes.

    Raises ValueError for an empty context, a shape that does not fit or a scale that is missing
    or not wanted.
    """
    k, v = np.asarray(k), np.asarray(v)
    if k.ndim != 3 or v.shape != k.shape or k.shape[2] != head_dim:
        raise ValueError(
            f"k and v must both have shape [num_kv_heads, n, {head_dim}], not {k.shape}, {v.shape}."
        )
    if k.shape[0] == 0 or k.shape[1] == 0:
        raise ValueError("k and v must hold at least one token; the context is empty.")
    if (k.dtype == np.int8) != (v.dtype == np.int8):
        raise ValueError("k and v must both be int8 rows or both float32 rows.")
    if k.dtype != np.int8:
        if k_scale is not None or v_scale is not None:
            raise ValueError("k_scale and v_scale belong to int8 rows; leave them out for float32.")
        return Rows(as_float32(k, "k"), as_float32(v, "v"), None, None)
    if k_scale is None or v_scale is None:
        raise ValueError("int8 rows need k_scale and v_scale; quantize_rows returns them.")
    k_scale, v_scale = as_float32(k_scale, "k_scale"), as_float32(v_scale, "v_scale")
    if k_scale.shape != k.shape[:2] or v_scale.shape != k.shape[:2]:
        raise ValueError(
            f"k_scale and v_scale must have shape {k.shape[:2]}, "
            f"not {k_scale.shape}, {v_scale.shape}."
        )
    return Rows(k, v, k_scale, v_scale)


def check_query(q: Any, ndim: int = 2) -> np.ndarray:
    """Return q as finite C-contiguous float32 [num_heads, ..., head_dim] or raise ValueError."""
    q = np.ascontiguousarray(as_float32(q, "q", ndim))
    if 0 in q.shape:
        raise ValueError(f"q must hold at least one query, not shape {q.shape}.")
    if not np.isfinite(q).all():
        raise ValueError("q holds NaN or infinity; check the step that produced it.")
    return q


def check_heads(num_heads: int, num_kv_heads: int) -> None:
    """Raise ValueError unless the query heads divide evenly over the KV heads."""
    if num_heads % num_kv_heads:
        raise ValueError(f"{num_heads} query heads do not divide over {num_kv_heads} KV heads.")


def widen(rows: np.ndarray) -> np.ndarray:
    """Return rows as C-contiguous float32; int8 values keep their integer value."""
    return np.ascontiguousarray(rows, dtype=F32)


def head_scores(q: np.ndarray, k: np.ndarray, k_scale: np.ndarray | None) -> np.ndarray:
    """Return the scores float32 [n] of one query [d] over widened rows [n, d].

    Raises ValueError if a score is not finite: a K row or its scale is bad, or q . k overflows.
    """
    with np.errstate(over="ignore", invalid="ignore"):
        scores = k @ q
        if k_scale is not None:
            scores *= k_scale
    scores *= F32(1 / math.sqrt(q.shape[-1]))
    finite = np.isfinite(scores)
    if not finite.all():
        token = int(np.argmin(finite))
        raise ValueError(f"the score of K row {token} is not finite; the row or its scale is bad.")
    return scores


@quiet
def attend(q: np.ndarray, k: np.ndarray, v: np.ndarray, k_scale: np.ndarray | None,
           v_scale: np.ndarray | None) -> np.ndarray:
    """Two-pass attention of one query head: the one kernel of the exact and sparse arms.

    q [d], k and v widened float32 [n, d] C-contiguous, scales [n] or None. Returns float32 [d].
    Equal arguments give equal bits within one process. Raises ValueError for non-finite rows.
    """
    scores = head_scores(q, k, k_scale)
    weights = softmax(scores, out=scores)
    with np.errstate(over="ignore", invalid="ignore"):
        if v_scale is not None:
            weights *= v_scale
        out = weights @ v
    return _finite_output(out)


def _finite_output(out: np.ndarray) -> np.ndarray:
    if not np.isfinite(out).all():
        raise ValueError("the output is not finite; a V row or its scale holds NaN or infinity.")
    return out


def _per_head(q: Any, k: Any, v: Any, k_scale: Any, v_scale: Any, kernel: Any) -> np.ndarray:
    q = check_query(q)
    rows = check_rows(k, v, k_scale, v_scale, q.shape[1])
    num_heads, num_kv_heads = q.shape[0], rows.k.shape[0]
    check_heads(num_heads, num_kv_heads)
    out = np.empty_like(q)
    group = num_heads // num_kv_heads
    for kh in range(num_kv_heads):
        wide_k, wide_v = widen(rows.k[kh]), widen(rows.v[kh])
        scales = (None, None) if rows.k_scale is None else (rows.k_scale[kh], rows.v_scale[kh])
        for h in range(kh * group, (kh + 1) * group):
            out[h] = kernel(q[h], wide_k, wide_v, *scales)
    return out


def two_pass(q: Any, k: Any, v: Any, k_scale: Any = None, v_scale: Any = None) -> np.ndarray:
    """Exact attention of one query: maximum, weights, division by their sum, then V.

    q float32 [num_heads, head_dim]; k, v float32 or int8 [num_kv_heads, n, head_dim]; scales
    float32 [num_kv_heads, n] with int8 rows (K is widened, q stays float). Returns float32
    [num_heads, head_dim]. Raises ValueError for an empty context, shapes that do not fit, NaN or
    infinity. Source: engine rule; the kernel of every exact and sparse arm.
    """
    return _per_head(q, k, v, k_scale, v_scale, attend)


def online(q: Any, k: Any, v: Any, k_scale: Any = None, v_scale: Any = None) -> np.ndarray:
    """Attention of one query in a single pass over the tokens (online softmax).

    Arguments, result and errors as for two_pass, equal to it up to float32 rounding.
    Source: engine rule, with the running maximum started at -inf (ours).
    """

    def one_head(q: np.ndarray, k: np.ndarray, v: np.ndarray, k_scale: Any, v_scale: Any) -> Any:
        return _finite_output(online_softmax(head_scores(q, k, k_scale), v, v_scale))

    return _per_head(q, k, v, k_scale, v_scale, one_head)


@quiet
def online_softmax(scores: np.ndarray, v: np.ndarray, v_scale: Any = None) -> np.ndarray:
    """Weighted mean of V rows by online softmax: running maximum, sum and accumulator.

    scores float32 [n] (-inf = masked token), v float32 [n, d], v_scale [n] or None. Returns
    float32 [d]; zeros if every token is masked. The sum and the accumulator are rescaled only
    when a strictly larger score arrives. Source: engine rule.
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
    return acc / total if total > 0 else np.zeros_like(acc)


@quiet
def single_pass_q8(q: Any, kq: Any, k_scale: Any, vq: Any, v_scale: Any) -> np.ndarray:
    """Attention of one query over q8 rows with an int8 query, 32 tokens at a time.

    q float32 [num_heads, head_dim], head_dim a multiple of 32, quantized per 32 values; kq, vq
    int8 [num_kv_heads, n, head_dim]; scales float32 [num_kv_heads, n]. Returns float32
    [num_heads, head_dim]. Integer dots per 32 are exact; one rescale per 32-token block.
    Errors as for two_pass, and ValueError for a head_dim that 32 does not divide.
    Source: article 9-2.
    """
    if np.asarray(kq).dtype != np.int8:
        raise TypeError(f"kq must be int8, not {np.asarray(kq).dtype}; use quantize_rows.")
    return _per_head(q, kq, vq, k_scale, v_scale, _single_pass_head)


def _single_pass_head(q: np.ndarray, k: np.ndarray, v: np.ndarray, k_scale: np.ndarray,
                      v_scale: np.ndarray) -> np.ndarray:
    q_int, q_scale = quantize_blocks(q, Q_BLOCK)
    dots = np.zeros(k.shape[0], F32)
    for g, scale in enumerate(q_scale):
        part = slice(g * Q_BLOCK, (g + 1) * Q_BLOCK)
        # Exact integers in float32: |sum| <= 32 * 127 * 128 < 2**24, whatever the order.
        dots += (k[:, part] @ q_int[part].astype(F32)) * scale
    scores = dots * k_scale * F32(1 / math.sqrt(q.shape[0]))
    if not np.isfinite(scores).all():
        raise ValueError("k_scale holds NaN or infinity; check the cache rows.")
    running_max, total = F32(-np.inf), F32(0)
    acc = np.zeros(v.shape[1], F32)
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
        acc += (weights * v_scale[block]) @ v[block]
    return _finite_output(acc / total)


@quiet
def causal_attention(q: Any, k: Any, v: Any, *, start: int = 0,
                     importance: np.ndarray | None = None, importance_from: int = 0) -> np.ndarray:
    """Exact prefill attention: query row i is position start + i and sees tokens up to itself.

    q float32 [num_heads, Lq, head_dim]; k, v float32 [num_kv_heads, n, head_dim] with
    n >= start + Lq (later rows are not read). Returns float32 [num_heads, Lq, head_dim]. If
    ``importance`` (float32 [>= start + Lq]) is given, the softmax weights of query positions >=
    importance_from are added to it in place, in the order head, query. Works in tiles of 128
    queries, so the extra memory is about 0.5 kB per context token. Raises ValueError for shapes
    that do not fit, NaN or infinity.
    """
    q, rows, importance = check_prefill(q, k, v, start, importance)
    num_heads, num_queries, head_dim = q.shape
    out = np.empty_like(q)
    inv_sqrt_d = F32(1 / math.sqrt(head_dim))
    future = np.triu(np.full((QUERY_TILE, QUERY_TILE), -np.inf, F32), 1)
    for h in range(num_heads):
        kh = kv_head(h, num_heads, rows.k.shape[0])
        for first in range(0, num_queries, QUERY_TILE):
            last = min(first + QUERY_TILE, num_queries)
            begin, end = start + first, start + last
            scores = (q[h, first:last] * inv_sqrt_d) @ rows.k[kh, :end].T
            scores[:, begin:] += future[: last - first, : last - first]
            weights = softmax(scores, out=scores)
            out[h, first:last] = weights @ rows.v[kh, :end]
            if importance is not None:
                add_importance(importance[:end], weights[max(0, importance_from - begin):])
    return out


def add_importance(importance: np.ndarray, weights: np.ndarray) -> None:
    """Add weight rows [queries, n] to importance [n] one query after the other, in float32."""
    for row in weights:
        importance += row


def check_prefill(q: Any, k: Any, v: Any, start: int,
                  importance: np.ndarray | None) -> tuple[np.ndarray, Rows, np.ndarray | None]:
    """Check prefill arguments; see causal_attention."""
    q = check_query(q, ndim=3)
    rows = check_rows(k, v, None, None, q.shape[2])
    check_heads(q.shape[0], rows.k.shape[0])
    end = start + q.shape[1]
    if start < 0 or rows.k.shape[1] < end:
        raise ValueError(
            f"k and v hold {rows.k.shape[1]} tokens, but the queries are positions {start} to {end - 1}."
        )
    require_finite_rows(rows.k[:, :end], "k")
    require_finite_rows(rows.v[:, :end], "v")
    if importance is not None and (
        not isinstance(importance, np.ndarray) or importance.dtype != F32
        or importance.ndim != 1 or importance.shape[0] < end
    ):
        raise ValueError(f"importance must be a float32 array of at least {end} tokens.")
    return q, rows, importance
