"""a · b + c rounded once: what a fused multiply-add instruction does, in NumPy."""

from __future__ import annotations

import numpy as np


def fused_multiply_add(a: np.ndarray, b: np.ndarray | np.floating,
                       c: np.ndarray | np.floating) -> np.ndarray:
    """Return a · b + c rounded once to float32, for float32 a and c, and b float32 or whole
    numbers below 2**24.

    The product is exact in float64; the sum may not be, and rounding it twice could be wrong. So
    where something is lost the last bit is made odd (in the direction of what was lost): then a
    value is never halfway between two float32 unless it is exactly so.
    """
    product, c = a.astype(np.float64) * b, c.astype(np.float64)
    total = product + c
    part = total - product
    lost = (product - (total - part)) + (c - part)  # exact: Knuth's two-sum
    even = (total.view(np.int64) & 1) == 0
    toward = np.where(lost > 0, np.inf, -np.inf)
    inexact = np.isfinite(total) & (lost != 0) & even
    return np.where(inexact, np.nextafter(total, toward), total).astype(np.float32)
