"""q8 rows: one float32 scale and int8 values, with the rounding rule as a parameter.

Source: article 9-1/9-3 (one scale per token and KV head, max-abs/127); the engine's KV rule is
``half_up``. ``trunc`` is the biased rule of its older weight and activation quantizers.
"""

from typing import Any

import numpy as np

from course_lib import backend
from course_lib.arrays import F32, as_float32, positive_int, require_finite

ROUNDING_RULES = ("half_up", "half_even", "half_away", "trunc")
"""The position of a rule in this tuple is its code in the compiled kernels."""

Q_MAX = 127
F32_MAX = np.finfo(F32).max
TINY = F32(1e-6)  # a row whose largest magnitude is below this becomes zeros with scale 1/127


def _check_rule(rule: str) -> None:
    if rule not in ROUNDING_RULES:
        raise ValueError(f"rule {rule!r} is unknown; use one of {', '.join(ROUNDING_RULES)}.")


def round_to_int(y: Any, rule: str = "half_up") -> np.ndarray:
    """Round to whole numbers by one of ROUNDING_RULES.

    y: real numbers of any shape, computed in float32. Returns int32 of the same shape.
    ``half_up`` is floor(y + 0.5) in float32, ``half_even`` ties to even, ``half_away`` ties away
    from zero, ``trunc`` is trunc(y + 0.5), which is one too high on most negatives.
    Raises ValueError for an unknown rule, and for NaN or |y| >= 2**31. Source: engine rule.
    """
    _check_rule(rule)
    y = as_float32(y, "y")
    if not (np.abs(y) < F32(2**31)).all():
        raise ValueError("y must be finite and below 2**31 in magnitude to be rounded to int32.")
    return _round(y, rule).astype(np.int32)


def _round(y: np.ndarray, rule: str) -> np.ndarray:
    half = F32(0.5)
    if rule == "half_up":
        return np.floor(y + half)
    if rule == "half_even":
        return np.rint(y)
    if rule == "trunc":
        return np.trunc(y + half)
    whole = np.trunc(y)
    # y - whole is exact, so unlike trunc(|y| + 0.5) this is right for the float below one half.
    return whole + np.copysign(np.abs(y - whole) >= half, y).astype(F32)


def _scales(magnitude: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return (scale, 127/m) for max-abs magnitudes m, with tiny rows treated as m = 1."""
    m = np.where(magnitude < TINY, F32(1), magnitude)
    return m / F32(Q_MAX), F32(Q_MAX) / m


def quantize_rows(x: Any, rule: str = "half_up") -> tuple[np.ndarray, np.ndarray]:
    """Quantize each row to int8 with one scale: q = round(x * (127/m)), scale = m/127.

    x: real numbers [..., d], taken as float32; m is the row's largest magnitude (1 where that is
    below 1e-6). Returns q int8 [..., d] in [-127, 127] and scale float32 [...]. The value is
    q * scale; its error is at most scale/2 for every rule but ``trunc``, whose error on
    negatives reaches 1.5 scales. Raises ValueError for NaN or infinity (naming head and token of
    [heads, tokens, d] input), for d = 0, and for an unknown rule. Source: article 9-1, engine.
    """
    _check_rule(rule)
    x = as_float32(x, "x")
    if x.ndim == 0 or x.shape[-1] == 0:
        raise ValueError(f"x must have rows of at least one value, not shape {x.shape}.")
    compiled = backend.kernel("quantize_rows")
    if compiled is not None:
        rows = np.ascontiguousarray(x).reshape(-1, x.shape[-1])
        q = np.empty(rows.shape, np.int8)
        scale = np.empty(rows.shape[0], F32)
        try:
            compiled(rows, ROUNDING_RULES.index(rule), q, scale)
        except ValueError:
            require_finite(x, "x")
            raise
        return q.reshape(x.shape), scale.reshape(x.shape[:-1])
    require_finite(x, "x")
    scale, inverse = _scales(np.abs(x).max(axis=-1))
    rounded = _round(x * inverse[..., None], rule)
    return np.clip(rounded, -Q_MAX, Q_MAX).astype(np.int8), scale


def dequantize_rows(q: Any, scale: Any) -> np.ndarray:
    """Return the float32 values q * scale of q8 rows.

    q: int8 [..., d]; scale: float32 [...]. Returns float32 [..., d].
    Raises TypeError if q is not int8, ValueError if the shapes do not belong together or a scale
    is not finite.
    """
    q = np.asarray(q)
    if q.dtype != np.int8:
        raise TypeError(f"q must be int8, not {q.dtype}; quantize_rows returns it.")
    scale = as_float32(scale, "scale")
    if q.ndim == 0 or scale.shape != q.shape[:-1]:
        raise ValueError(f"scale must have the shape of q without its last axis, {q.shape[:-1]}, "
                         f"not {scale.shape}.")
    if not np.isfinite(scale).all():
        raise ValueError("scale holds NaN or infinity; the rows were not made by quantize_rows.")
    with np.errstate(over="ignore"):
        values = q.astype(F32) * scale[..., None]
    # 127 * (m/127) can round past the largest float32 when m is that number.
    return np.clip(values, -F32_MAX, F32_MAX, out=values)


def quantize_blocks(x: Any, block: int = 32) -> tuple[np.ndarray, np.ndarray]:
    """Quantize a query to int8 with one scale per ``block`` values, ties away from zero.

    x: real numbers [..., d] with d a multiple of block. Returns int8 [..., d] and scale float32
    [..., d/block]. Same scale rule as quantize_rows (m/127, m = 1 below 1e-6).
    Raises ValueError for a d that does not divide, NaN or infinity. Source: article 9-2.
    """
    block = positive_int(block, "block")
    x = as_float32(x, "x")
    if x.ndim == 0 or x.shape[-1] == 0 or x.shape[-1] % block:
        raise ValueError(f"x must have rows of a multiple of {block} values, not shape {x.shape}.")
    require_finite(x, "x")
    groups = x.reshape(*x.shape[:-1], x.shape[-1] // block, block)
    scale, inverse = _scales(np.abs(groups).max(axis=-1))
    rounded = _round(groups * inverse[..., None], "half_away")
    return np.clip(rounded, -Q_MAX, Q_MAX).astype(np.int8).reshape(x.shape), scale
