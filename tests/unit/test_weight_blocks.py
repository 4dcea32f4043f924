"""Q8_0 and Q4_0: against the gguf package's bytes, by hand, at borders, and the exact products."""

from __future__ import annotations

import math
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from course_lib.paths import ROOT
from course_lib.weight_blocks import (
    BLOCK_BYTES,
    dequantize_q4_0,
    dequantize_q8_0,
    linear_q4_0_reference,
    linear_q8_0_reference,
    quantize_activations,
    quantize_q4_0,
    quantize_q8_0,
    split_blocks,
)
from tests.exact import fused

F32 = np.float32
F32_MAX = np.finfo(F32).max
KINDS = {"q8_0": (quantize_q8_0, dequantize_q8_0), "q4_0": (quantize_q4_0, dequantize_q4_0)}
each_kind = pytest.mark.parametrize("kind", KINDS)
BELOW_HALF = np.nextafter(F32(0.5), F32(0))


@each_kind
def test_the_bytes_and_values_of_the_gguf_package(kind):
    quantize, dequantize = KINDS[kind]
    with np.load(ROOT / "tests" / "oracle" / "golden" / "weight_blocks.npz") as golden:
        np.testing.assert_array_equal(quantize(golden["w"]), golden[kind])
        values = dequantize(golden[kind])
        np.testing.assert_array_equal(values.view(np.uint32),
                                      golden[f"{kind}_values"].view(np.uint32))


def literal_q8_0(block):
    """One block by the words of the definition."""
    d = F32(max(abs(v) for v in block)) / F32(127)
    inverse = F32(1) / d if d else F32(0)
    codes = []
    for v in block:
        y = F32(v * inverse)
        codes.append(int(math.copysign(math.floor(Fraction(abs(float(y))) + Fraction(1, 2)), y)))
    return np.float16(d).tobytes() + np.array(codes, np.int8).tobytes()


def literal_q4_0(block):
    largest = next(v for v in block if abs(v) == max(abs(u) for u in block))
    d = F32(largest) / F32(-8)
    inverse = F32(1) / d if d else F32(0)
    codes = [min(int(F32(F32(v * inverse) + F32(8.5))), 15) for v in block]
    return np.float16(d).tobytes() + bytes(codes[j] | codes[j + 16] << 4 for j in range(16))


normal = st.floats(-2**18, 2**18, width=32).filter(lambda v: v == 0 or abs(v) > 1e-30)


@settings(max_examples=30)
@given(arrays(F32, (2, 64), elements=normal))
def test_every_block_is_what_the_definition_says(w):
    for quantize, literal in ((quantize_q8_0, literal_q8_0), (quantize_q4_0, literal_q4_0)):
        expected = b"".join(literal(block) for block in w.reshape(-1, 32))
        assert quantize(w).tobytes() == expected


def test_a_q8_0_block_by_hand():
    # max 127 makes d = 1: the values are what is rounded, ties away from zero.
    block = np.zeros((1, 32), F32)
    block[0, :8] = [127, 0.5, -0.5, 1.5, -2.5, BELOW_HALF, -BELOW_HALF, -126.4]
    blocks = quantize_q8_0(block)
    assert blocks.shape == (1, 34)
    assert blocks[0, :2].tobytes() == np.float16(1).tobytes()
    assert blocks[0, 2:10].view(np.int8).tolist() == [127, 1, -1, 2, -3, 0, 0, -126]


def test_a_q4_0_block_by_hand():
    # The value of largest magnitude is 8: d = -1 and its code is 0; -8 would be 16 and is 15.
    block = np.zeros((1, 32), F32)
    block[0, [0, 1, 2, 16, 17, 31]] = [8, -8, -3, 7, 3.5, -0.5]
    blocks = quantize_q4_0(block)
    assert blocks.shape == (1, 18)
    assert blocks[0, :2].tobytes() == np.float16(-1).tobytes()
    # Element j in the low half of byte j, j + 16 in the high half.
    assert [blocks[0, 2] & 15, blocks[0, 3] & 15, blocks[0, 4] & 15] == [0, 15, 11]
    assert [blocks[0, 2] >> 4, blocks[0, 3] >> 4, blocks[0, 17] >> 4] == [1, 5, 9]
    values = dequantize_q4_0(blocks)[0]
    assert values[[0, 1, 2, 16, 17, 31]].tolist() == [8, -7, -3, 7, 3, -1]


@each_kind
def test_zeros_and_blocks_too_small_for_float16_have_the_value_zero(kind):
    quantize, dequantize = KINDS[kind]
    w = np.zeros((3, 32), F32)
    w[1], w[2, 0] = 1e-45, 1e-39
    assert not dequantize(quantize(w)).any()


@each_kind
def test_the_error_is_at_most_half_a_step(kind):
    quantize, dequantize = KINDS[kind]
    w = np.random.default_rng(1).standard_normal((40, 64), F32)
    blocks = quantize(w)
    step = np.abs(split_blocks(blocks, kind)[0].astype(F32)).repeat(32, axis=1)
    error = np.abs(dequantize(blocks) - w)
    # float16's rounding of d adds 2**-11 of the value; Q4_0 has no code for +8 steps.
    limit = 0.5 * step + np.abs(w) * 2**-10
    if kind == "q4_0":
        limit = np.where(np.abs(w) > 7.4 * step, 1.01 * step, limit)
    assert (error <= limit).all()
    assert error.max() > 0.4 * step.min()


@each_kind
def test_what_float16_cannot_scale_is_refused_and_the_row_named(kind):
    quantize, _ = KINDS[kind]
    limit = 65_519 * (127 if kind == "q8_0" else 8)  # what rounds to float16's largest number
    w = np.zeros((300, 32), F32)
    w[299, 3] = limit
    assert np.isfinite(KINDS[kind][1](quantize(w))).all()
    w[299, 3] = limit * 1.001
    with pytest.raises(ValueError, match=f"row 299 of w is too large for {kind}"):
        quantize(w)


@each_kind
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_numbers_that_are_not_finite_are_refused(kind, bad):
    w = np.ones((3, 64), F32)
    w[2, 40] = bad
    with pytest.raises(ValueError, match="w holds NaN or infinity at token 2"):
        KINDS[kind][0](w)


@each_kind
@pytest.mark.parametrize("shape", [(2, 31), (2, 0), (32,), (1, 2, 32), ()])
def test_rows_must_be_whole_blocks(kind, shape):
    with pytest.raises(ValueError, match="w must"):
        KINDS[kind][0](np.ones(shape, F32))


@each_kind
def test_blocks_must_be_bytes_of_whole_blocks_with_finite_scales(kind):
    _, dequantize = KINDS[kind]
    size = BLOCK_BYTES[kind]
    with pytest.raises(TypeError, match="must be uint8"):
        dequantize(np.zeros((1, size), np.int8))
    for shape in ((1, size - 1), (size,), (1, 0)):
        with pytest.raises(ValueError, match="must have shape"):
            dequantize(np.zeros(shape, np.uint8))
    blocks = np.zeros((4, 2 * size), np.uint8)
    for bad in (np.nan, np.inf, -np.inf):
        blocks[2, size : size + 2] = np.array([bad], "<f2").view(np.uint8)
        with pytest.raises(ValueError, match="row 2 of the .* blocks has a scale"):
            dequantize(blocks)


@each_kind
def test_no_rows_is_no_error(kind):
    quantize, dequantize = KINDS[kind]
    assert dequantize(quantize(np.zeros((0, 64), F32))).shape == (0, 64)


def test_activations_round_ties_to_even():
    x = np.zeros((1, 64), F32)
    x[0, :6] = [127, 0.5, 1.5, -2.5, BELOW_HALF, 3.5]
    x[0, 32:34] = [np.nextafter(F32(1e-6), F32(0)), 0]  # tiny: treated as if the largest were 1
    q, scale = quantize_activations(x)
    assert q[0, :6].tolist() == [127, 0, 2, -2, 0, 4]
    assert not q[0, 32:].any()
    assert scale.tolist() == [[1.0, float(F32(1) / F32(127))]]


@given(arrays(F32, (1, 32), elements=st.floats(width=32, allow_nan=False, allow_infinity=False)))
def test_activations_never_leave_127(x):
    q, scale = quantize_activations(x)
    assert q.min() >= -127 and np.isfinite(scale).all() and (scale > 0).all()


@pytest.mark.parametrize("kind", KINDS)
def test_the_reference_product_is_the_definition_value_by_value(kind):
    rng = np.random.default_rng(6)
    x, w = rng.standard_normal((3, 96), F32), rng.standard_normal((5, 96), F32)
    blocks = KINDS[kind][0](w)
    product = {"q8_0": linear_q8_0_reference, "q4_0": linear_q4_0_reference}[kind](x, blocks)
    q, x_scale = quantize_activations(x)
    d = split_blocks(blocks, kind)[0].astype(F32)
    codes = KINDS[kind][1](blocks).reshape(5, 3, 32) / d[..., None]
    for t in range(3):
        for r in range(5):
            acc = F32(0)
            for b in range(3):
                total = sum(int(a) * int(c) for a, c in
                            zip(q[t, 32 * b : 32 * b + 32], np.rint(codes[r, b]), strict=True))
                acc = fused(d[r, b] * x_scale[t, b], total, acc)
            assert product[t, r].view(np.uint32) == acc.view(np.uint32)


def test_the_reference_product_is_near_the_exact_one():
    rng = np.random.default_rng(7)
    x, w = rng.standard_normal((4, 256), F32), rng.standard_normal((6, 256), F32)
    exact = x.astype(np.float64) @ w.T.astype(np.float64)
    size = np.abs(x).astype(np.float64) @ np.abs(w).T
    # Each factor is off by at most half a step, a 254th of its block's largest value (here < 4.5).
    assert (np.abs(linear_q8_0_reference(x, quantize_q8_0(w)) - exact) < 0.03 * size).all()


def test_columns_must_agree():
    with pytest.raises(ValueError, match="x has 64 columns, the weights have 32"):
        linear_q8_0_reference(np.ones((1, 64), F32), np.zeros((1, 34), np.uint8))
