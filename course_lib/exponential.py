"""The kernels' exponential function in NumPy, to the bit, and how far it is from exact.

exp(x) = 2^n · exp(r) with a whole number n and |r| <= ln 2 / 2: exp(r) is a polynomial, 2^n is
written into the exponent bits. Only float32 additions and multiplications, each rounded as IEEE 754
says, so every machine gives the same bits; no libm promises that.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from course_lib.arrays import F32, as_float32
from course_lib.fused import fused_multiply_add

LOWEST, HIGHEST = -87.0, 88.0
"""Where exp_poly is the exponential function: below it is 0, above it is not defined."""

COEFFICIENTS = tuple(F32(c) for c in (
    1.98412698e-4, 1.38888889e-3, 8.33333333e-3, 4.16666667e-2, 1.66666667e-1, 0.5, 1.0, 1.0))
"""1/7!, 1/6! … 1/1!, 1/0!: the Taylor series of exp to degree 7, highest power first."""

LN2_HIGH, LN2_LOW = F32(0.693359375), F32(-2.12194440e-4)
"""ln 2 in two parts; the first has 9 bits, so that n times it is exact."""

_MAGIC = F32(12582912.0)  # 1.5 * 2^23: there the floats are the whole numbers


def exp_poly(x: Any) -> np.ndarray:
    """exp of float32 x up to 88, within 3 ulp; 0 below -87. The bits of every compiled kernel.

    Returns float32 of x's shape. Raises ValueError for NaN and for x above 88, where the result
    would leave the range of float32. Source: kernels_pyx/c/v16.h, v16_exp.
    """
    x = as_float32(x, "x")
    if not (x <= F32(HIGHEST)).all():
        raise ValueError("x must hold numbers up to 88; subtract the maximum first.")
    used = np.maximum(x, F32(LOWEST))
    n = fused_multiply_add(used, F32(1.44269504), _MAGIC) - _MAGIC  # rounds to a whole number
    r = fused_multiply_add(n, -LN2_HIGH, used)
    r = fused_multiply_add(n, -LN2_LOW, r)
    p = np.full_like(r, COEFFICIENTS[0])
    for c in COEFFICIENTS[1:]:
        p = fused_multiply_add(p, r, c)
    power = ((n.astype(np.int32) + 127) << 23).view(F32)  # 2^n: n + 127 in the exponent's place
    return np.where(x >= F32(LOWEST), p * power, F32(0))


def ulp_error(got: Any, x: Any) -> np.ndarray:
    """How far float32 results are from exp(x), in ulp: float64 [n], signed.

    One ulp is the distance of the two float32 around the exact value. Exact means float64's exp,
    whose own error is below a millionth of that.
    """
    exact = np.exp(np.asarray(x, np.float64))
    _, exponent = np.frexp(exact)
    return (np.asarray(got, np.float64) - exact) / np.ldexp(1.0, np.maximum(exponent, -125) - 24)
