"""Attention over a part of the context, and the merge of two parts: chunked prefill is both.

A part is two things: the output over its tokens, and the natural logarithm of the sum of their
exponentiated scores (LSE), which says how much that output weighs beside another part's.

The LSE is float64: rounded to float32, one of 100 would be off by 4e-6, and so would every weight
that a merge makes of it. Its exp and log are polynomials of our own. They use + - * / alone, which
every machine rounds alike, so merges have the same bits everywhere; no libm promises that.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from course_lib import backend
from course_lib.arrays import F32, LayerRows, NotFiniteError, as_float32, positive_int
from course_lib.attention_common import (
    check_query,
    check_rows,
    finite_output,
    kv_head,
    quiet,
    whole_heads,
)

QUERY_TILE = 128  # query rows whose scores NumPy holds together
LN2_HIGH, LN2_LOW = float.fromhex("0x1.62e42fee00000p-1"), float.fromhex("0x1.a39ef35793c76p-33")
LN2, LOG2_E = 0.6931471805599453, 1.4426950408889634
ROUNDER = 6755399441055744.0  # 1.5 * 2^52: added to a double, it leaves a whole number


def partial_attention(q: Any, k: Any, v: Any, visible: Any = None, *,
                      block_lists: Sequence[Any] | None = None,
                      block_size: int | None = None) -> tuple[np.ndarray, np.ndarray]:
    """Attention of query rows over a part of the context, with its natural-log LSE.

    q float32 [num_heads, Lq, d]; k, v float32 [num_kv_heads, n, d]. Row i reads the first
    ``visible[i]`` tokens (int [Lq], 0 to n; None: all n); ``np.arange(1, Lq + 1)`` is the causal
    mask of a chunk over itself. ``block_lists`` are the block ids, ascending, that each KV head
    reads of k and v, or one array for all KV heads: what is not named is not computed. Blocks of
    ``block_size`` tokens are attended one by one and merged in ascending order.

    Returns (out float32 [num_heads, Lq, d], lse float64 [num_heads, Lq]); a row that sees nothing
    gives zeros and -inf. On compiled kernels both have the same bits on every machine, for any
    number of threads. Raises ValueError for shapes and ids that do not fit, NaN or infinity.
    """
    q = check_query(q, ndim=3)
    rows = check_rows(q, k, v)
    n = rows.k.shape[1]
    seen = check_visible(visible, q.shape[1], n)
    out, lse = empty_part(q)
    if block_lists is None:
        attend_part(q, rows, seen, n, None, out, lse)
        return out, lse
    size = positive_int(block_size, "block_size")
    blocks = -(-n // size)
    lists = check_block_lists(block_lists, len(rows.k), blocks)
    attend_part(q, rows, seen, size, readers(lists, len(rows.k), blocks), out, lse)
    return out, lse


def merge_attention_outputs(o1: Any, lse1: Any, o2: Any,
                            lse2: Any) -> tuple[np.ndarray, np.ndarray]:
    """Merge the attention of two disjoint parts of the context into that of both.

    o1, o2 float32 [..., d] with lse1, lse2 [...], natural logarithms; an LSE of -inf is a part
    without tokens. With M = max(lse1, lse2) and w = e^(lse - M): o = (w1 o1 + w2 o2) / (w1 + w2),
    lse = M + ln(w1 + w2); of two empty parts zeros and -inf. Returns (o float32, lse, float32 if
    both were, else float64). Raises ValueError for shapes that do not fit, NaN or +inf.
    """
    o1, o2 = as_float32(o1, "o1"), as_float32(o2, "o2")
    lse1, lse2 = np.asarray(lse1), np.asarray(lse2)
    if o1.ndim < 1 or o1.shape != o2.shape:
        raise ValueError(f"o1 and o2 must have one shape [..., d], not {o1.shape} and {o2.shape}.")
    for name, lse in (("lse1", lse1), ("lse2", lse2)):
        if lse.shape != o1.shape[:-1]:
            raise ValueError(f"{name} must have shape {o1.shape[:-1]}, one number for each row of "
                             f"o1, not {lse.shape}.")
        if lse.dtype.kind != "f" or np.isnan(lse).any() or (lse == np.inf).any():
            raise ValueError(f"{name} must be floats without NaN and +inf; -inf marks a part "
                             "without tokens.")
    dtype = F32 if lse1.dtype == lse2.dtype == F32 else np.float64
    out, lse = o1.copy(), lse1.astype(np.float64)
    merge_into(out, lse, o2, lse2.astype(np.float64))
    return finite_output(out), lse.astype(dtype)


def empty_part(q: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """What attention over no token gives: outputs of 0, shaped like q [num_heads, Lq, d], and
    LSEs of -inf. The parts of a context are merged into them."""
    return np.zeros_like(q), np.full(q.shape[:2], -np.inf)


def attend_part(q: np.ndarray, rows: LayerRows, visible: np.ndarray, block_size: int,
                reads: np.ndarray | None, out: np.ndarray, lse: np.ndarray) -> None:
    """Attend a part of the context block by block, each merged into ``out`` and ``lse``, which
    hold what came before.

    Checked arrays as of partial_attention. ``reads``, bool [blocks, num_kv_heads] or None for all,
    says which KV heads' query heads read a block. Raises NotFiniteError; out and lse hold nothing
    of use then.
    """
    compiled = backend.kernel("partial_attention")
    if compiled is not None:
        k, v = whole_heads(rows.k), whole_heads(rows.v)
        flags = None if reads is None else reads.view(np.uint8)
        try:
            compiled(q, k, v, visible, block_size, flags, out, lse)
        except ValueError as error:  # the arguments fit, so it is the numbers
            raise NotFiniteError(f"{error}.") from None
        return
    for h in range(len(q)):
        kh = kv_head(h, len(q), len(rows.k))
        for block, first in enumerate(range(0, rows.k.shape[1], block_size)):
            if reads is None or reads[block, kh]:
                part = rows.head(kh).map(lambda a, at=first: a[at : at + block_size])  # type: ignore[misc]
                seen = np.clip(visible - first, 0, len(part.k))
                for row in range(0, q.shape[1], QUERY_TILE):
                    tile = slice(row, row + QUERY_TILE)
                    merge_into(out[h, tile], lse[h, tile], *_attend_tile(q[h, tile], part,
                                                                         seen[tile]))
    finite_output(out)


@quiet
def _attend_tile(q: np.ndarray, rows: LayerRows,
                 visible: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The definition of attention with LSE, for query rows [t, d] of one head."""
    out, lse = np.zeros_like(q), np.full(len(q), -np.inf)
    seeing = np.flatnonzero(visible)
    if not len(seeing):
        return out, lse
    width = int(visible.max())
    scores = q[seeing] @ rows.k[:width].T
    scores *= F32(1 / math.sqrt(q.shape[1]))
    scores[np.arange(width) >= visible[seeing, None]] = -np.inf
    largest = scores.max(axis=1)
    weights = np.exp(scores - largest[:, None])
    total = weights.sum(axis=1)
    if not np.isfinite(largest).all() or not np.isfinite(total).all():
        raise NotFiniteError("a score is not finite; a K row is bad.")
    weights /= total[:, None]
    out[seeing] = finite_output(weights @ rows.v[:width])
    lse[seeing] = largest.astype(np.float64) + ln(total.astype(np.float64))
    return out, lse


def merge_into(out: np.ndarray, lse: np.ndarray, part: np.ndarray, part_lse: np.ndarray) -> None:
    """Merge a part into ``out`` float32 [..., d] and ``lse`` float64 [...], in place.

    The compiled kernel does the same to the bit. A part without tokens changes nothing, and what
    is merged into nothing is copied.
    """
    larger = np.maximum(lse, part_lse)
    with np.errstate(invalid="ignore"):  # -inf - -inf: both empty, set aside below
        first, second = exp(lse - larger), exp(part_lse - larger)
    total = first + second
    with np.errstate(invalid="ignore", over="ignore", under="ignore"):
        merged = ((first / total).astype(F32)[..., None] * out
                  + (second / total).astype(F32)[..., None] * part)
        merged_lse = larger + ln(total)
    fresh, absent = lse == -np.inf, part_lse == -np.inf
    both = ~fresh & ~absent
    out[...] = np.where(both[..., None], merged, np.where(fresh[..., None], part, out))
    lse[...] = np.where(both, merged_lse, np.where(fresh, part_lse, lse))


def merge_part(out: np.ndarray, lse: np.ndarray, part: np.ndarray, part_lse: np.ndarray) -> None:
    """As `merge_into`, by the compiled kernel where there is one."""
    compiled = backend.kernel("merge_parts")
    if compiled is None:
        merge_into(out, lse, part, part_lse)
    else:
        d = out.shape[-1]
        compiled(part.reshape(-1, d), part_lse.reshape(-1), out.reshape(-1, d), lse.reshape(-1))


def exp(x: np.ndarray) -> np.ndarray:
    """e^x for float64 x <= 0, within 3e-16 of it relatively; 0 below -700 and for NaN.

    x = n ln 2 + r with a whole n and |r| <= ln 2 / 2: 2^n times the Taylor polynomial of r.
    """
    x = np.where(x >= -700.0, x, -701.0)
    n = (x * LOG2_E + ROUNDER) - ROUNDER
    r = (x - n * LN2_HIGH) - n * LN2_LOW
    total = np.ones_like(x)
    for i in range(13, 0, -1):
        total = total * (r * (1.0 / i)) + 1.0
    return np.where(x >= -700.0, np.ldexp(total, n.astype(np.int64)), 0.0)


def ln(x: np.ndarray) -> np.ndarray:
    """Natural logarithm of float64 x >= 1, within 4e-16 of max(1, itself); NaN stays NaN.

    x = 2^e m with m from sqrt(1/2) to sqrt(2); ln m = 2 (s + s^3/3 + s^5/5 + ...) in
    s = (m - 1) / (m + 1).
    """
    m, exponent = np.frexp(x)  # 1/2 <= m < 1
    small = m < 0.7071067811865476
    m, exponent = np.where(small, m * 2.0, m), np.where(small, exponent - 1, exponent)
    s = (m - 1.0) / (m + 1.0)
    square, total = s * s, np.zeros_like(m)
    for i in range(19, 0, -2):
        total = total * square + 1.0 / i
    return exponent * LN2 + 2.0 * s * total


def check_visible(visible: Any, rows: int, n: int) -> np.ndarray:
    """Return ``visible`` as int64 [rows], all n where it is None; ValueError unless 0 to n."""
    if visible is None:
        return np.full(rows, n, np.int64)
    seen = np.asarray(visible)
    if seen.dtype.kind not in "iu" or seen.shape != (rows,):
        raise ValueError(f"visible must hold {rows} whole numbers, one for each query row, not "
                         f"{seen.dtype} {seen.shape}.")
    if seen.min() < 0 or seen.max() > n:
        raise ValueError(f"visible must be 0 to {n}, the tokens of k, not {seen.min()} to "
                         f"{seen.max()}.")
    return np.ascontiguousarray(seen, np.int64)


def check_block_lists(lists: Sequence[Any], num_kv_heads: int,
                      blocks: int) -> tuple[np.ndarray, ...]:
    """Return block lists as int64 arrays, one for all KV heads or one each; ValueError unless
    every list ascends without repeats and names blocks 0 to blocks - 1."""
    if len(lists) not in (1, num_kv_heads):
        raise ValueError(f"block lists must be one for all KV heads or one for each of the "
                         f"{num_kv_heads}, not {len(lists)}.")
    checked = []
    for ids in lists:
        ids = np.asarray(ids)
        if ids.ndim != 1 or (ids.size and ids.dtype.kind not in "iu"):
            raise ValueError(f"a block list must hold whole numbers, not {ids.dtype} {ids.shape}.")
        ids = ids.astype(np.int64)
        if ids.size and (ids[0] < 0 or ids[-1] >= blocks or (np.diff(ids) <= 0).any()):
            raise ValueError(f"a block list must name blocks 0 to {blocks - 1} in ascending order, "
                             f"each once, not {ids.tolist()[:20]}.")
        checked.append(ids)
    return tuple(checked)


def readers(lists: Sequence[np.ndarray], num_kv_heads: int, blocks: int) -> np.ndarray:
    """Turn checked block lists into bool [blocks, num_kv_heads]: who reads what."""
    reads = np.zeros((blocks, num_kv_heads), bool)
    if len(lists) == 1:
        reads[lists[0]] = True
    else:
        for kh, ids in enumerate(lists):
            reads[ids, kh] = True
    return reads
