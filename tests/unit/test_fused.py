"""The fused multiply-add in NumPy rounds once: against exact fractions."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from course_lib.fused import fused_multiply_add
from tests.exact import fused

F32 = np.float32
SIGNED_24_BITS = st.integers(-2**24, 2**24)
EXPONENT = st.integers(-60, 60)


@given(SIGNED_24_BITS, st.integers(-2**20, 2**20), SIGNED_24_BITS, EXPONENT, EXPONENT)
def test_whole_factors_are_rounded_once(a, b, c, a_exponent, c_exponent):
    a, c = F32(a * 2.0**a_exponent), F32(c * 2.0**c_exponent)
    found = fused_multiply_add(np.array([a]), np.array([b]), np.array([c]))
    assert found[0] == fused(a, b, c)


@given(SIGNED_24_BITS, SIGNED_24_BITS, SIGNED_24_BITS, EXPONENT, EXPONENT)
def test_float_factors_are_rounded_once(a, b, c, ab_exponent, c_exponent):
    a, b = F32(a * 2.0**ab_exponent), F32(b * 2.0**-24)
    c = F32(c * 2.0 ** (c_exponent // 2))
    found = fused_multiply_add(np.array([a]), np.array([b]), np.array([c]))
    assert found.dtype == F32 and found[0] == fused(a, b, c)


def test_rounding_twice_would_be_wrong_there():
    # c is odd in its last bit, a * b a little less than half of that bit: c is nearest. Float64
    # takes the sum for the exact half, which then goes to the even neighbour.
    a, b, c = F32((2**20 + 1) * 2.0**-64), 2**20 - 1, np.nextafter(F32(1), F32(2))
    found = fused_multiply_add(np.array([a]), np.array([b]), np.array([c]))
    assert found[0] == fused(a, b, c) == c
    assert F32(float(a) * b + float(c)) == np.nextafter(c, F32(2))
