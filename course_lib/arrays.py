"""Border checks shared by the subject modules: one clear sentence for a bad array or count."""

import operator
from typing import Any

import numpy as np

F32 = np.float32


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


def positive_int(value: Any, name: str) -> int:
    """Return ``value`` as an int; TypeError if it is no integer, ValueError if below 1."""
    try:
        number = operator.index(value)
    except TypeError:
        raise TypeError(f"{name} must be an integer, not {type(value).__name__}.") from None
    if number < 1:
        raise ValueError(f"{name} must be at least 1, not {number}.")
    return number


def describe_row(index: tuple[int, ...], first_token: int = 0) -> str:
    """Name a row of a head-major array: [heads, tokens] by head and token, else by index."""
    if len(index) == 2:
        return f"head {index[0]}, token {first_token + index[1]}"
    if len(index) == 1:
        return f"token {first_token + index[0]}"
    return f"row {tuple(int(i) for i in index)}" if index else "the row"


def require_finite_rows(x: np.ndarray, name: str, first_token: int = 0) -> None:
    """Raise ValueError naming the first row of ``x[..., d]`` that holds NaN or infinity."""
    finite = np.isfinite(x)
    if finite.all():
        return
    bad = np.argwhere(~finite.all(axis=-1))[0]
    where = describe_row(tuple(int(i) for i in bad), first_token)
    raise ValueError(f"{name} holds NaN or infinity at {where}; check the step that produced it.")
