"""Attention of one query over the KV rows: three kernels.

The NumPy code is their readable definition; where compiled kernels are there, they do the work.

Arrays are head-major: q [num_heads, head_dim], k and v [num_kv_heads, n, head_dim], float32 rows
or int8 rows with a float32 scale per row [num_kv_heads, n]. Query head h reads KV head
h * num_kv_heads // num_heads. Score = (q . k) / sqrt(head_dim). A NaN or infinity in a row
that is read is a ValueError.
"""

import math
from collections.abc import Callable
from functools import partial
from typing import Any, Literal

import numpy as np

from course_lib import backend
from course_lib.arrays import F32, LayerRows, NotFiniteError
from course_lib.attention_common import (
    check_query,
    check_rows,
    finite_output,
    kv_head,
    quiet,
    softmax,
    whole_heads,
    widen,
)
from course_lib.prefill_attention import causal_attention
from course_lib.quant import quantize_blocks

__all__ = ["attend", "causal_attention", "check_query", "check_rows", "head_scores", "kv_head",
           "online", "online_softmax", "quiet", "single_pass_q8", "softmax", "two_pass",
           "two_pass_rows", "widen"]

Q_BLOCK = 32  # query values that share a scale in the single pass
MAX_ROW_SCALE_DIM = (2**31 - 1) // (127 * 128) // 32 * 32  # one scale a row: int32 sums still fit
TOKEN_BLOCK = 32  # tokens per rescale in the single pass

HeadKernel = Callable[[np.ndarray, LayerRows], np.ndarray]


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
    return finite_output(weights @ rows.v)


def _all_heads(name: str, kernel: HeadKernel, q: np.ndarray, rows: LayerRows) -> np.ndarray:
    """Attention of all heads by the compiled kernel of that name, or by `kernel` head by head."""
    out = np.empty_like(q)
    compiled = backend.kernel(name)
    if compiled is not None:
        every_block = None
        try:
            compiled(q, *rows.map(whole_heads), every_block, TOKEN_BLOCK, out)
        except ValueError as error:  # the arguments fit, so it is the numbers
            raise NotFiniteError(f"{error}.") from None
        return out
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
    q = check_query(q)
    return two_pass_rows(q, check_rows(q, k, v, k_scale, v_scale))


def two_pass_rows(q: np.ndarray, rows: LayerRows) -> np.ndarray:
    """two_pass of a query and rows that fit each other, as those of a KVCache do.

    q float32 [num_heads, head_dim], C-contiguous. Raises NotFiniteError for NaN or infinity.
    """
    return _all_heads("two_pass", attend, q, rows)


def online(q: Any, k: Any, v: Any, k_scale: Any = None, v_scale: Any = None) -> np.ndarray:
    """Attention of one query in a single pass over the tokens (online softmax).

    Arguments, result and errors as for two_pass, equal to it up to float32 rounding.
    Source: engine rule, with the running maximum started at -inf (ours).
    """
    q = check_query(q)
    return _all_heads("single_pass", _online_head, q, check_rows(q, k, v, k_scale, v_scale))


@quiet
def _online_head(q: np.ndarray, rows: LayerRows) -> np.ndarray:
    return finite_output(online_softmax(head_scores(q, rows), rows.v, rows.v_scale))


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


def single_pass_q8(q: Any, kq: Any, k_scale: Any, vq: Any, v_scale: Any, *,
                   query_scales: Literal["group", "row"] = "group") -> np.ndarray:
    """Attention of one query over q8 rows with an int8 query, 32 tokens at a time.

    q float32 [num_heads, head_dim], head_dim a multiple of 32; kq, vq int8
    [num_kv_heads, n, head_dim]; scales float32 [num_kv_heads, n]. query_scales: "group" quantizes
    the query with a scale per 32 values, "row" with one per head, which is less exact and less
    work (docs/kernels.md). Returns float32 [num_heads, head_dim]. Integer dots of values that
    share a scale are exact; one rescale per 32-token block.
    Raises TypeError for rows that are not int8, ValueError as two_pass does, for a head_dim
    that 32 does not divide, for other query_scales, and with "row" for a head_dim above
    MAX_ROW_SCALE_DIM. Source: article 9-2 for "group", ours for "row".
    """
    if query_scales not in ("group", "row"):
        raise ValueError(f'query_scales must be "group" or "row", not {query_scales!r}.')
    for name, rows in (("kq", kq), ("vq", vq)):
        if np.asarray(rows).dtype != np.int8:
            raise TypeError(f"{name} must be int8, not {np.asarray(rows).dtype}; "
                            "quantize_rows returns such rows.")
    q = check_query(q)
    all_rows = check_rows(q, kq, vq, k_scale, v_scale)
    if q.shape[1] % Q_BLOCK:
        raise ValueError(f"q must have a multiple of {Q_BLOCK} values a row, not {q.shape[1]}.")
    if query_scales == "group":
        return _all_heads("single_pass_q8", _single_pass_head, q, all_rows)
    if q.shape[1] > MAX_ROW_SCALE_DIM:
        raise ValueError(f"q must have at most {MAX_ROW_SCALE_DIM} values a row, not "
                         f"{q.shape[1]}: the int32 sum of a row's products could overflow.")
    return _all_heads("single_pass_q8_row", partial(_single_pass_head, group=q.shape[1]), q,
                      all_rows)


@quiet
def _single_pass_head(q: np.ndarray, rows: LayerRows, group: int = Q_BLOCK) -> np.ndarray:
    assert rows.k_scale is not None and rows.v_scale is not None  # int8 rows, checked above
    q_int, q_scale = quantize_blocks(q, group)
    # Exact integers whatever the order: |sum| <= 32 * 127 * 128 < 2**24, and of any row < 2**31.
    exact = F32 if group * 127 * 128 < 2**24 else np.float64
    scores = np.zeros(rows.k.shape[0], F32)
    for g, scale in enumerate(q_scale):
        part = slice(g * group, (g + 1) * group)
        dots = rows.k[:, part].astype(exact, copy=False) @ q_int[part].astype(exact)
        scores += dots.astype(F32, copy=False) * scale
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
    return finite_output(acc / total)
