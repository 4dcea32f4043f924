"""Antidiagonal scores and the attention mass of blocks: how XAttention estimates attention.

Of every square of ``stride`` queries by ``stride`` keys only the products on the antidiagonal are
taken: each query of the square once and each key once. That is one dot over stride * d products if
the rows of a square are laid behind one another, the queries in reverse order, so it costs
1 / stride of the whole product. Source: XAttention (mit-han-lab/x-attention), whose names these
functions keep.
"""

from typing import Any

import numpy as np

from course_lib import arrays, backend
from course_lib.arrays import F32, NotFiniteError, as_float32, positive_int, whole_number
from course_lib.attention_common import check_query, quiet, some_query, whole_heads


def flat_group_gemm_fuse_reshape(q: Any, k: Any, stride: int) -> np.ndarray:
    """Return the sums of raw scores along the antidiagonals of squares.

    q float32 [H, Lq, d], k float32 [Hkv, Lk, d]; query head h reads KV head h * Hkv // H. Returns
    float32 [H, M, N] with M = ceil(Lq / stride), N = ceil(Lk / stride): out[h, m, n] = sum over
    i < stride of q[h, m*stride + stride-1-i] . k[n*stride + i], not scaled, where rows beyond the
    end count as zeros. Every sum is taken alone: its bits do not depend on what else is computed.
    Raises ValueError for shapes that do not fit and for NaN or infinity.
    """
    q, k = check_shapes(q, k)
    stride = positive_int(stride, "stride")
    kernel = backend.kernel("antidiagonal_scores")
    if kernel is None:
        check_heads(q, k)
    q, k = padded(q, -q.shape[1] % stride), padded(k, -k.shape[1] % stride)
    if kernel is None:
        return _antidiagonal_scores(q, k, stride)
    out = np.empty((len(q), q.shape[1] // stride, k.shape[1] // stride), F32)
    try:
        kernel(whole_heads(q), whole_heads(k), stride, out)
    except ValueError as error:  # a sum: every query and key is in one, so a bad one is found, too
        check_heads(q, k)
        raise NotFiniteError(_NOT_FINITE) from error
    return out


_NOT_FINITE = "an antidiagonal score is not finite; the values of q or k are too large."


@quiet
def _antidiagonal_scores(q: np.ndarray, k: np.ndarray, stride: int) -> np.ndarray:
    """The definition: one dot for every square, by numpy.vecdot, which sums each alone."""
    num_kv_heads, d = len(k), q.shape[2]
    reversed_q = np.ascontiguousarray(q.reshape(len(q), -1, stride, d)[:, :, ::-1])
    long_q = reversed_q.reshape(num_kv_heads, -1, 1, stride * d)  # a group's heads in one row
    long_k = np.ascontiguousarray(k).reshape(num_kv_heads, 1, -1, stride * d)
    out = np.vecdot(long_q, long_k).reshape(len(q), -1, long_k.shape[2])
    if not np.isfinite(out).all():
        raise NotFiniteError(_NOT_FINITE)
    return out


def padded(x: np.ndarray, rows: int, front: int = 0) -> np.ndarray:
    """Return x [heads, n, d] with that many rows of zeros behind it, and ``front`` before it."""
    return np.pad(x, ((0, 0), (front, rows), (0, 0))) if rows or front else x


def check_heads(q: Any, k: Any) -> tuple[np.ndarray, np.ndarray]:
    """Return q [H, Lq, d] and k [Hkv, Lk, d] as finite float32; ValueError if they do not fit."""
    q, k = check_shapes(q, k)
    q = check_query(q, 3)
    require_finite_keys(k)
    return q, k


def check_shapes(q: Any, k: Any) -> tuple[np.ndarray, np.ndarray]:
    """As check_heads, but the numbers are not looked at, and both may be views."""
    q, k = some_query(q, 3), as_float32(k, "k", 3)
    if k.shape[2] != q.shape[2] or k.size == 0:
        raise ValueError(f"k must have shape [num_kv_heads, n, {q.shape[2]}] to fit q, with at "
                         f"least one row, not {k.shape}.")
    if len(q) % len(k):
        raise ValueError(f"{len(q)} query heads do not divide over {len(k)} KV heads.")
    return q, k


def require_finite_keys(k: np.ndarray) -> None:
    """Raise NotFiniteError naming the first row of k [Hkv, Lk, d] that holds NaN or infinity."""
    if not np.isfinite(k).all():
        head, token = np.argwhere(~np.isfinite(k).all(axis=-1))[0].tolist()
        raise NotFiniteError(f"k holds NaN or infinity at head {head}, token {token}; check the "
                             "step that produced it.")


def softmax_fuse_block_sum(
    scores: Any, reshaped_block_size: int, *, scale: float, chunk_start: int = 0,
    real_q_len: int | None = None, is_causal: bool, first_q: int = 0,
    real_k_len: int | None = None,
) -> np.ndarray:
    """Return the attention mass of every block: softmax over the columns, then sums over tiles.

    scores float32 [H, M, N]; tiles are reshaped_block_size rows by as many columns, the last ones
    may be short. The weight of a score is 2 ** (scale * score), so scale is
    log2(e) / (stride * sqrt(d) * norm). Row r stands at position chunk_start + r: with is_causal
    it sees columns up to and including that one. Rows at positions from real_q_len on (upstream's
    name) and, ours, those before first_q are padding and count nothing; ours, too: columns from
    real_k_len on are padding and are not seen. Returns float32 [H, Qb, Kb]; a row of blocks adds
    up to the number of its real rows. The bits of a row depend neither on other rows nor on
    columns that it does not see. Raises ValueError for sizes that do not fit, NaN or infinity.
    """
    scores = as_float32(scores, "scores", 3)
    size, scale = positive_int(reshaped_block_size, "reshaped_block_size"), _positive(scale)
    chunk_start = whole_number(chunk_start, "chunk_start")
    first_q = whole_number(first_q, "first_q")
    heads, rows, columns = scores.shape
    seen = columns if real_k_len is None else min(whole_number(real_k_len, "real_k_len"), columns)
    last_q = chunk_start + rows if real_q_len is None else whole_number(real_q_len, "real_q_len")
    if chunk_start < 0 or seen < 1 or scores.size == 0:
        raise ValueError(f"scores {scores.shape} with chunk_start {chunk_start} and real_k_len "
                         f"{real_k_len} leave a row without a column; each must see at least one.")
    rate = np.float32(scale * np.log(2.0))
    # A block and a start beyond all scores mean the same as the last of them.
    size = min(size, max(rows, columns))
    first, last = (min(max(row - chunk_start, 0), rows) for row in (first_q, last_q))
    start = min(chunk_start, columns) if is_causal else None
    kernel = backend.kernel("block_sums")
    if kernel is not None and np.isfinite(rate) and rate > 0:
        out = np.empty((heads, -(-rows // size), -(-columns // size)), F32)
        try:
            kernel(np.require(scores, requirements=("C", "ALIGNED")), size, rate, seen,
                   -1 if start is None else start, first, last, out)
        except ValueError as error:  # all that is left to find wrong: a score
            raise NotFiniteError(_NOT_FINITE_SCORES) from error
        return out
    if not np.isfinite(scores).all():
        raise NotFiniteError(_NOT_FINITE_SCORES)
    tiles = _tile_weights(scores, size, rate, seen, start)
    # In float64 and one column after the other, so that columns not seen, zeros, change no bit.
    total = np.add.accumulate(tiles, axis=2, dtype=np.float64)[:, :, -1:]
    shares = np.zeros((heads, -(-rows // size) * size, tiles.shape[2]))
    np.divide(tiles, total, out=shares[:, :rows])
    shares[:, :first] = shares[:, last:] = 0.0
    return shares.reshape(heads, -1, size, tiles.shape[2]).sum(axis=2).astype(F32)


_NOT_FINITE_SCORES = "scores hold NaN or infinity; check q and k."


@quiet
def _tile_weights(scores: np.ndarray, size: int, rate: np.float32, seen: int,
                  causal_from: int | None) -> np.ndarray:
    """Weights e ** (rate * (score - the row's largest)), added up over ``size`` columns each."""
    heads, rows, columns = scores.shape
    weights = np.full((heads, rows, -(-columns // size) * size), -np.inf, F32)
    weights[:, :, :seen] = scores[:, :, :seen]
    if causal_from is not None:
        row, column = np.ogrid[:rows, : weights.shape[2]]
        np.copyto(weights, -np.inf, where=column > row + causal_from)
    weights -= weights.max(axis=2, keepdims=True)
    weights *= rate
    np.exp(weights, out=weights)
    return weights.reshape(heads, rows, -1, size).sum(axis=3)


def _positive(scale: Any) -> float:
    if not arrays.real_number(scale, "scale") > 0:
        raise ValueError(f"scale must be above 0, not {scale}.")
    return float(scale)
