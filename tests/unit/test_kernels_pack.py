"""Weights quantized into panels: every variant writes the bytes of the NumPy definition."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import kernels_pyx
from course_lib import backend
from course_lib.linear import PackedMatrix, empty_panels
from course_lib.weight_blocks import quantize_q4_0, quantize_q8_0
from tests.sharing import shared_among

F32 = np.float32
QUANTIZE = {"q8_0": quantize_q8_0, "q4_0": quantize_q4_0}
needs_kernels = pytest.mark.skipif(not kernels_pyx.VARIANTS,
                                   reason="the kernels are not compiled here")
variants = pytest.mark.parametrize("variant", kernels_pyx.VARIANTS or ("portable",))
each_kind = pytest.mark.parametrize("kind", QUANTIZE)


def run(variant, kind, w):
    """Codes and scales as the kernel leaves them in memory full of other bytes."""
    codes, scales = empty_panels(w.shape, kind)
    codes.view(np.uint8)[...] = scales.view(np.uint8)[...] = 0x5A
    kernels_pyx.kernels(variant)[f"pack_{kind}"](w, codes, scales)
    return codes, scales


def assert_the_definition(variant, kind, w):
    expected = PackedMatrix.from_blocks(QUANTIZE[kind](w), kind)
    codes, scales = run(variant, kind, w)
    np.testing.assert_array_equal(codes, expected.codes)
    np.testing.assert_array_equal(scales.view(np.uint16), expected.scales.view(np.uint16))


def weights(rows, cols, seed, mixture):
    """Values of one size, of all sizes, or few ones, so that magnitudes tie."""
    rng = np.random.default_rng(seed)
    values = rng.standard_normal((rows, cols))
    if mixture == "ties":
        return rng.choice([-2.0, -1.5, -0.0, 0.0, 1.5, 2.0], (rows, cols)).astype(F32)
    if mixture == "halves":  # code + 1/2 of a block whose scale is 1: what rounding decides
        w = (rng.integers(-254, 255, (rows, cols)) / 2).astype(F32)
        w[:, ::32] = 127
        return w
    shape = (rows, 1) if mixture == "rows" else (rows, cols)
    with np.errstate(under="ignore"):
        return np.ldexp(values, rng.integers(-150, 14, shape)).astype(F32)


@needs_kernels
@variants
@each_kind
@settings(max_examples=20)
@given(st.integers(1, 40), st.integers(1, 4), st.integers(0, 999),
       st.sampled_from(["ties", "halves", "rows", "all"]))
def test_bytes_of_the_definition(variant, kind, rows, blocks, seed, mixture):
    assert_the_definition(variant, kind, weights(rows, 32 * blocks, seed, mixture))


@needs_kernels
@variants
@each_kind
def test_scales_where_their_inverse_begins_to_overflow_and_float16_ends(variant, kind):
    # d = 2^-128 is the largest whose inverse is infinite; 2^-25 the half of float16's smallest.
    steps = np.arange(-40, 41)
    near = np.float64(2.0) ** -128 + steps * 2.0**-149
    tiny = np.float64(2.0) ** -25 + steps * 2.0**-48
    normal = np.float64(2.0) ** -14 + steps * 2.0**-37
    d = np.concatenate((near, tiny, normal))
    w = np.repeat((d * (127 if kind == "q8_0" else -8))[:, None], 32, axis=1).astype(F32)
    assert_the_definition(variant, kind, w)
    assert_the_definition(variant, kind, -w)


@needs_kernels
@variants
@each_kind
def test_every_float16_scale(variant, kind):
    d = np.arange(0, 0x7C00, dtype=np.uint16).view(np.float16).astype(np.float64)
    between = (d[1:] + d[:-1]) / 2  # ties to even
    w = np.zeros((len(d) + len(between), 32), F32)
    w[:, 3] = np.concatenate((d, between)) * (127 if kind == "q8_0" else 8)
    assert_the_definition(variant, kind, w)


@needs_kernels
@variants
@each_kind
def test_what_cannot_be_packed_names_the_row_and_writes_nothing(variant, kind):
    limit = 65_519 * (127 if kind == "q8_0" else 8)
    w = np.ones((20, 64), F32)
    w[18, 40] = limit
    assert_the_definition(variant, kind, w)
    for value, words in ((limit * 1.001, "too large for a float16 scale in row 18"),
                         (np.nan, "holds NaN or infinity in row 18"), (-np.inf, "NaN or infinity")):
        w[18, 40] = value
        codes, scales = empty_panels(w.shape, kind)
        codes.view(np.uint8)[...] = scales.view(np.uint8)[...] = 0x5A
        with pytest.raises(ValueError, match=words):
            kernels_pyx.kernels(variant)[f"pack_{kind}"](w, codes, scales)
        assert (codes.view(np.uint8) == 0x5A).all() and (scales.view(np.uint8) == 0x5A).all()


@needs_kernels
@variants
@each_kind
@pytest.mark.parametrize("rows", [5, 80, 600])
def test_threads_share_panels(variant, kind, rows):
    w = weights(rows, 64, 3, "rows")
    with shared_among(3, started=rows > 16):
        assert_the_definition(variant, kind, w)


@needs_kernels
@each_kind
def test_wrong_shapes_are_refused(kind):
    pack = kernels_pyx.kernels(kernels_pyx.VARIANTS[0])[f"pack_{kind}"]
    w = np.ones((17, 64), F32)
    codes, scales = empty_panels(w.shape, kind)
    for arguments, words in (
        ((w[:16], codes, scales), "out_codes must have shape"),
        ((w[:, :32].copy(), codes, scales), "out_codes must have shape"),
        ((w, codes, scales[:1]), "out_scales must have shape"),
        ((np.ones((17, 40), F32), codes, scales), "multiple of 32"),
    ):
        with pytest.raises(ValueError, match=words):
            pack(*arguments)


@each_kind
def test_quantize_is_the_same_without_kernels(kind):
    w = weights(37, 96, 1, "rows")
    found = PackedMatrix.quantize(w, kind)
    with backend.using("numpy"):
        expected = PackedMatrix.quantize(w, kind)
    assert found.codes.tobytes() == expected.codes.tobytes()
    assert found.scales.tobytes() == expected.scales.tobytes()


@each_kind
def test_quantize_says_what_is_wrong_in_the_words_of_the_definition(kind):
    w = np.ones((20, 64), F32)
    for value, words in ((9e7, f"row 18 of w is too large for {kind}"), (np.nan, "w holds NaN")):
        w[18, 40] = value
        with pytest.raises(ValueError, match=words):
            PackedMatrix.quantize(w, kind)
    for shape in ((3, 40), (3, 0)):
        with pytest.raises(ValueError, match="multiple of 32"):
            PackedMatrix.quantize(np.ones(shape), kind)
