"""What the subject modules share at their border: array checks and the rows of a layer."""

import math
import operator
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from course_lib import backend

F32 = np.float32


class LayerRows(NamedTuple):
    """KV rows, head-major: k, v [num_kv_heads, n, head_dim], float32 with scales None, or int8
    with float32 scales [num_kv_heads, n]."""

    k: np.ndarray
    v: np.ndarray
    k_scale: np.ndarray | None = None
    v_scale: np.ndarray | None = None

    def map(self, change: Callable[[np.ndarray], np.ndarray]) -> "LayerRows":
        """Return the rows with ``change`` applied to each array that is there."""
        k, v, k_scale, v_scale = self
        return LayerRows(change(k), change(v), None if k_scale is None else change(k_scale),
                         None if v_scale is None else change(v_scale))

    def upto(self, n: int) -> "LayerRows":
        """Return the rows of the first n tokens of every KV head."""
        return self.map(lambda a: a[:, :n])

    def head(self, kh: int) -> "LayerRows":
        """Return the rows of one KV head: k, v [n, head_dim], scales [n]."""
        return self.map(lambda a: a[kh])


def as_float32(x: Any, name: str, ndim: int | None = None) -> np.ndarray:
    """Return ``x`` as a float32 array, without a copy where it already is one.

    Other real dtypes are converted; a float64 value beyond float32 becomes inf, which the
    finiteness checks then report. Raises TypeError for what is not numbers and ValueError
    for a wrong number of dimensions.
    """
    array = np.asarray(x)
    if array.dtype != F32:
        if array.dtype.kind not in "fiu":
            raise TypeError(f"{name} must hold real numbers, not {array.dtype}; pass float32.")
        with np.errstate(over="ignore", under="ignore"):
            array = array.astype(F32)
    if ndim is not None and array.ndim != ndim:
        raise ValueError(f"{name} must have {ndim} dimensions, not shape {array.shape}.")
    return array


def whole_number(value: Any, name: str) -> int:
    """Return ``value`` as an int, which does not wrap as NumPy's do; TypeError if it is none."""
    try:
        return operator.index(value)
    except TypeError:
        raise TypeError(f"{name} must be an integer, not {type(value).__name__}.") from None


def positive_int(value: Any, name: str) -> int:
    """Return ``value`` as an int; TypeError if it is no integer, ValueError if below 1."""
    number = whole_number(value, name)
    if number < 1:
        raise ValueError(f"{name} must be at least 1, not {number}.")
    return number


class NotFiniteError(ValueError):
    """Numbers that are NaN or infinite, in an argument or in what was computed from it."""


def all_finite(x: np.ndarray) -> bool:
    """Return whether no value of ``x``, an array of any shape, is NaN or infinite."""
    compiled = backend.kernel("all_finite")
    if compiled is None or x.dtype != F32 or not x.flags.aligned:
        return bool(np.isfinite(x).all())
    return compiled(np.ascontiguousarray(x).reshape(-1))


def require_finite(x: np.ndarray, name: str, first_token: int = 0) -> None:
    """Raise NotFiniteError naming the first row of ``x[..., d]`` that holds NaN or infinity.

    A row of [heads, tokens, d] is named by head and token, one of [tokens, d] by token.
    """
    if all_finite(x):
        return
    finite = np.isfinite(x)
    index = [int(i) for i in np.argwhere(~finite.all(axis=-1))[0]]
    if index:
        index[-1] += first_token
    where = {0: "", 1: " at token {}", 2: " at head {}, token {}"}.get(len(index), f" at {index}")
    raise NotFiniteError(
        f"{name} holds NaN or infinity{where.format(*index)}; check the step that produced it."
    )


def real_number(value: Any, name: str) -> float:
    """Return ``value`` as a float; TypeError if it is no number, ValueError if it is not finite."""
    try:
        array = np.asarray(value)
        if array.ndim or array.dtype.kind not in "iufO":  # O: a large int
            raise TypeError
        number = float(value)
    except (TypeError, ValueError):
        raise TypeError(f"{name} must be a number, not {type(value).__name__}.") from None
    except OverflowError:  # an int without end
        number = math.inf
    if not math.isfinite(number):
        raise ValueError(f"{name} must be finite, not {value}.")
    return number
