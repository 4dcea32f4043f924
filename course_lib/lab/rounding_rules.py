"""Which rounding rule made these codes? A quantizer told from samples of its input and output.

Codes of 8 bits with one scale a row: y = 127 · x / max|x|, made a whole number by some rule. Nobody
says in which order y was computed, and in float32 the orders differ in the last bit, which matters
where y is near a tie. So a rule stays possible as long as one of the orders explains each code.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from course_lib.arrays import F32, as_float32, require_finite
from course_lib.quant import ROUNDING_RULES, TINY, round_to_int

RULES = (*ROUNDING_RULES, "toward_zero")
"""Those of course_lib.quant, and plain truncation, trunc(y)."""


def rounded(y: Any, rule: str) -> np.ndarray:
    """y made whole by one of RULES, int32; ValueError as quant.round_to_int."""
    if rule == "toward_zero":
        return np.trunc(as_float32(y, "y")).astype(np.int32)
    return round_to_int(y, rule)


def scaled_in_each_order(x: Any) -> list[np.ndarray]:
    """127 · x / m of every row in float32, by three orders of operations: x · (127 / m),
    x / (m / 127) and x · (1 / (m / 127)), with m = max|x|, 1 where that is below 1e-6.

    x: real numbers [..., d]. ValueError for NaN or infinity.
    """
    x = as_float32(x, "x")
    require_finite(x, "x")
    m = np.abs(x).max(axis=-1, keepdims=True)
    m = np.where(m < TINY, F32(1), m)
    scale = m / F32(127)
    return [x * (F32(127) / m), x / scale, x * (F32(1) / scale)]


def possible_rules(x: Any, codes: Any) -> list[str]:
    """The rules that can have made `codes` of `x`, in the order of RULES.

    x: real numbers [rows, d]; codes: whole numbers of that shape. A rule is possible if every code
    is what it makes of y in at least one order of operations. Several are left where the samples
    hold no tie that tells them apart; none where another kind of quantizer made the codes.
    ValueError for shapes that differ.
    """
    orders, codes = scaled_in_each_order(x), np.asarray(codes)
    if codes.shape != orders[0].shape:
        raise ValueError(f"codes must have the shape of x, {orders[0].shape}, not {codes.shape}.")
    return [rule for rule in RULES
            if np.logical_or.reduce([rounded(y, rule) == codes for y in orders]).all()]
