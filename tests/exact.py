"""Float32 arithmetic by exact fractions, for tests that know the right bits."""

from __future__ import annotations

from fractions import Fraction

import numpy as np

F32 = np.float32


def fused(a, b, c):
    """a * b + c, rounded once, by exact arithmetic."""
    exact = Fraction(float(a)) * Fraction(float(b)) + Fraction(float(c))
    near = F32(float(exact))  # within an ulp or two
    around = [near, np.nextafter(near, F32(np.inf)), np.nextafter(near, F32(-np.inf))]
    distance = [abs(Fraction(float(v)) - exact) for v in around]
    best = [v for v, d in zip(around, distance, strict=True) if d == min(distance)]
    return min(best, key=lambda v: int(v.view(np.uint32)) & 1)  # of two as near, the even one
