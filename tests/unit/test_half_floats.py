"""16-bit floats: all 65,536 of each kind, and float32 against NumPy and exact fractions."""

from fractions import Fraction

import numpy as np
import pytest

from course_lib.half_floats import KINDS, ONE_NAN, f32_to_half, half_to_f32

F32 = np.float32
ALL = np.arange(65536, dtype=np.uint16)


@pytest.mark.parametrize("kind", KINDS)
def test_every_number_comes_back_and_every_nan_is_one(kind):
    values = half_to_f32(ALL, kind)
    bits, lost = f32_to_half(values, kind)
    nan = np.isnan(values)
    assert np.array_equal(bits[~nan], ALL[~nan]) and set(bits[nan].tolist()) == {ONE_NAN[kind]}
    assert lost == {"overflow": 0, "underflow": 0}


@pytest.mark.parametrize("kind", KINDS)
def test_what_lies_between_two_neighbours_goes_to_the_nearer_or_the_even_one(kind):
    infinite = {"f16": 0x7C00, "bf16": 0x7F80}[kind]
    low = np.arange(infinite - 1, dtype=np.uint16)
    down, up = (half_to_f32(b, kind) for b in (low, low + np.uint16(1)))
    middle = ((down.astype(np.float64) + up) / 2).astype(F32)  # exact: one bit more
    for place in (0, 1, 1000, len(low) - 1):
        assert Fraction(float(middle[place])) * 2 == Fraction(float(down[place])) + Fraction(
            float(up[place]))
    for sign in (1, -1):
        signed = np.uint16(0x8000 * (sign < 0))
        even = low + (low & np.uint16(1))
        assert np.array_equal(f32_to_half(sign * middle, kind)[0], even | signed)
        for toward, wanted in ((down, low), (up, low + np.uint16(1))):
            beside = np.nextafter(middle, toward)
            assert np.array_equal(f32_to_half(sign * beside, kind)[0], wanted | signed)


def test_f16_is_numpys():
    bits = np.random.default_rng(0).integers(0, 1 << 32, 100_000, dtype=np.uint32)
    x = bits.view(F32)
    with np.errstate(all="ignore"):
        theirs = x.astype(np.float16)
    ours = f32_to_half(x, "f16")[0].view(np.float16)
    assert np.array_equal(ours, theirs, equal_nan=True)


def test_losses_are_counted_and_infinity_is_none():
    x = np.array([[65519.9, 65520, -1e30, np.inf], [2e-8, -1e-40, 0, -0.0]], F32)
    bits, lost = f32_to_half(x, "f16")
    assert bits.shape == x.shape and lost == {"overflow": 2, "underflow": 2}
    assert bits[1].tolist() == [0, 0x8000, 0, 0x8000]
    assert f32_to_half(x, "bf16")[1] == {"overflow": 0, "underflow": 0}


def test_another_kind_is_refused():
    for convert in (f32_to_half, half_to_f32):
        with pytest.raises(ValueError, match="f16, bf16"):
            convert(np.zeros(2, F32), "f8")
