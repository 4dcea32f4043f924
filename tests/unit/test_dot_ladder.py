"""The rungs of the dot product agree, and SDOT is what the instruction set's manual says."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from course_lib import linear, weight_blocks
from course_lib.lab import dot_ladder

F32 = np.float32


@pytest.fixture(scope="module")
def product():
    rng = np.random.default_rng(5)
    x, w = rng.standard_normal((1, 160)).astype(F32), rng.standard_normal((20, 160)).astype(F32)
    packed = linear.PackedMatrix.quantize(w)
    scales, codes = weight_blocks.split_blocks(packed.to_blocks(), "q8_0")
    x_codes, x_scales = weight_blocks.quantize_activations(x)
    parts = x_codes[0], x_scales[0], codes.view(np.int8).reshape(w.shape), scales
    return parts, linear.linear(x, packed)[0]


def test_python_and_numpy_are_close_to_the_kernel(product):
    parts, wanted = product
    lists = [a.tolist() for a in parts]
    np.testing.assert_allclose(dot_ladder.python_product(*lists), wanted, rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(dot_ladder.numpy_product(*parts), wanted, rtol=1e-5, atol=1e-5)


def test_one_row_has_the_bits_of_the_kernel(product):
    (x, x_scales, w, w_scales), wanted = product
    rows = [dot_ladder.q8_dot(x, x_scales, w[r], w_scales[r]) for r in range(len(w))]
    np.testing.assert_array_equal(np.array(rows).view(np.int32), wanted.view(np.int32))


int8 = arrays(np.int8, 16, elements=st.integers(-128, 127))


@settings(max_examples=25)
@given(arrays(np.int32, 4, elements=st.integers(-2**31, 2**31 - 1)), int8, int8)
def test_sdot_adds_four_neighbours_and_wraps(acc, a, b):
    before = acc.copy()
    found = dot_ladder.sdot(acc, a, b)
    for lane in range(4):
        exact = int(acc[lane]) + sum(int(a[i]) * int(b[i]) for i in range(4 * lane, 4 * lane + 4))
        assert (int(found[lane]) - exact) % 2**32 == 0
    assert found.dtype == np.int32 and (acc == before).all()


def test_every_rung_is_recorded_with_its_command():
    table = dot_ladder.recorded_counts()
    assert table["command"] == "python tools/arm64/ladder.py" and table["cols"] == 160
    rungs = [record["rung"] for record in table["records"]]
    assert rungs == ["python", "numpy", "portable", "neon", "dotprod"]
    instructions = [r["instructions"] for r in table["records"]]
    assert instructions == sorted(instructions, reverse=True)
