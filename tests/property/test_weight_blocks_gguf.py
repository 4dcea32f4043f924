"""Q8_0 and Q4_0 blocks against the gguf package, byte for byte."""

from __future__ import annotations

import numpy as np
import pytest

gguf = pytest.importorskip("gguf", reason="compares with the gguf package")

from hypothesis import given, settings  # noqa: E402
from hypothesis import strategies as st  # noqa: E402
from hypothesis.extra.numpy import arrays  # noqa: E402

from course_lib.weight_blocks import (  # noqa: E402
    dequantize_q4_0,
    dequantize_q8_0,
    quantize_q4_0,
    quantize_q8_0,
)

KINDS = {"Q8_0": (quantize_q8_0, dequantize_q8_0), "Q4_0": (quantize_q4_0, dequantize_q4_0)}
LARGEST = 65_504 * 8
"""What the scale of a Q4_0 block can still be in float16."""
# Below, 1 / d is infinite in float32; the value of such a block is 0 whatever its codes.
SMALLEST = 1e-36
each_kind = pytest.mark.parametrize("kind", KINDS)

half_steps = st.integers(-254, 254).map(lambda n: n / 2)
magnitudes = st.floats(-LARGEST, LARGEST, width=32).filter(lambda v: v == 0 or abs(v) > SMALLEST)


def same_blocks(kind, w):
    quantize, dequantize = KINDS[kind]
    qtype = gguf.GGMLQuantizationType[kind]
    with np.errstate(all="ignore"):
        expected = gguf.quantize(w, qtype)
    found = quantize(w)
    np.testing.assert_array_equal(found, expected)
    np.testing.assert_array_equal(dequantize(found).view(np.uint32),
                                  gguf.dequantize(expected, qtype).view(np.uint32))


@each_kind
@settings(max_examples=60)
@given(w=arrays(np.float32, (2, 64), elements=st.one_of(magnitudes, half_steps)))
def test_any_block(kind, w):
    same_blocks(kind, w)


@each_kind
@settings(max_examples=60)
@given(w=arrays(np.float32, (3, 32), elements=half_steps), exponent=st.integers(-30, 12))
def test_blocks_full_of_ties(kind, w, exponent):
    same_blocks(kind, w * np.float32(2.0**exponent))


@each_kind
@settings(max_examples=60)
@given(seed=st.integers(0, 2**32 - 1), exponent=st.integers(-100, 15))
def test_blocks_as_weights_have_them(kind, seed, exponent):
    w = np.random.default_rng(seed).standard_normal((8, 96)).astype(np.float32)
    same_blocks(kind, w * np.float32(2.0**exponent))


@each_kind
def test_borders(kind):
    w = np.zeros((9, 32), np.float32)
    w[1] = 1.0
    w[2] = -1.0
    w[3, ::2], w[3, 1::2] = 1.0, -1.0  # of equal magnitudes the first decides Q4_0's sign
    w[4, ::2], w[4, 1::2] = -1.0, 1.0
    w[5, 31] = LARGEST
    w[6, 0] = -LARGEST
    w[7] = np.nextafter(np.float32(0.5), np.float32(0))
    w[8] = -0.0
    same_blocks(kind, w)
