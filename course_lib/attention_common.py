"""What all attention shares: the head map, the softmax, and the checks of queries and rows."""

from typing import Any

import numpy as np

from course_lib.arrays import F32, LayerRows, NotFiniteError, all_finite, as_float32

# The weight of a far token may underflow to 0: that is its value. Overflow and NaN are looked for
# in the results, so that they are reported as errors and not as warnings.
quiet = np.errstate(under="ignore", over="ignore", invalid="ignore")


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


def some_query(q: Any, ndim: int = 2) -> np.ndarray:
    """Return q as float32 [num_heads, ..., head_dim], perhaps a view, or raise ValueError."""
    q = as_float32(q, "q", ndim)
    if q.size == 0:
        raise ValueError(f"q must hold at least one query, not shape {q.shape}.")
    return q


def as_query(q: Any, ndim: int = 2) -> np.ndarray:
    """As `some_query`, C-contiguous."""
    return np.ascontiguousarray(some_query(q, ndim))


def check_query(q: Any, ndim: int = 2) -> np.ndarray:
    """As `as_query`; NotFiniteError for NaN and infinity."""
    q = as_query(q, ndim)
    if not all_finite(q):
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


def whole_heads(a: np.ndarray) -> np.ndarray:
    """Return ``a`` [num_kv_heads, n, ...] with each head contiguous, as the kernels read it.

    A view of the first n rows of a cache is; only a foreign layout is copied.
    """
    whole = a[0].flags.c_contiguous and a.flags.aligned and a.strides[0] >= a[0].nbytes
    return a if whole else np.ascontiguousarray(a)


def finite_output(out: np.ndarray) -> np.ndarray:
    if not all_finite(out):
        raise NotFiniteError("the output is not finite; a V row or its scale is bad.")
    return out
