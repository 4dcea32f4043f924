"""Two runs compared bit by bit; day 5's builds keep their promises, all but the planted one."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from course_lib import backend, linear
from course_lib.lab import builds, differential
from course_lib.lab.stages import run_stages

F32 = np.float32


@settings(max_examples=30)
@given(st.integers(0, 23), st.integers(0, 31))
def test_one_bit_anywhere_is_found(place, bit):
    a = np.arange(24, dtype=F32).reshape(2, 3, 4)
    b = a.copy()
    b.reshape(-1).view(np.uint32)[place] ^= np.uint32(1) << np.uint32(bit)
    where = differential.different_bits(a, b)
    assert where.sum() == 1 and where.reshape(-1)[place]
    index = tuple(int(i) for i in np.unravel_index(place, a.shape))
    runs = [("x", a), ("y", a)], [("x", a), ("y", b)]
    assert differential.first_difference(*runs) == ("y", index)


def test_bits_and_not_values():
    nan, zero = F32([np.nan]), F32([0.0])
    assert differential.first_difference([("a", nan)], [("a", nan.copy())]) is None
    assert differential.first_difference([("a", zero)], [("a", -zero)]) == ("a", (0,))
    assert differential.first_difference([("a", zero)], [("a", zero[None])]) == ("a", None)
    with pytest.raises(ValueError, match="same stages"):
        differential.first_difference([("a", zero)], [("b", zero)])


@pytest.fixture(scope="module")
def matrix():
    rng = np.random.default_rng(3)
    return rng.standard_normal((40, 256)).astype(F32), rng.standard_normal((24, 256)).astype(F32)


def test_q8_build_is_the_engines_own_product(matrix):
    x, w = matrix
    build = builds.Build("q8 weights", "q8 activations")
    wanted = linear.linear(x, linear.PackedMatrix.quantize(w))
    np.testing.assert_array_equal(build(x, w).view(np.int32), wanted.view(np.int32))


def test_tiles_change_no_bit_and_backwards_only_last_ones(matrix):
    x, w = matrix
    plain = builds.Build(*builds.SWITCHES[:2])(x, w)
    back = builds.Build(*builds.SWITCHES[:3])(x, w)
    tiles = builds.Build(*builds.SWITCHES[:4])(x, w)
    np.testing.assert_array_equal(back.view(np.int32), tiles.view(np.int32))
    assert (plain != back).any()
    np.testing.assert_allclose(plain, back, rtol=1e-4, atol=1e-4)
    with pytest.raises(ValueError, match="no switch 'fast'"):
        builds.Build("fast")


def test_the_planted_bug_wraps_in_16_bits_and_only_there():
    rng = np.random.default_rng(4)
    small = rng.integers(-60, 61, (2, 9, 32)).astype(np.int8)
    np.testing.assert_array_equal(builds.unrolled_sum_of_products(*small),
                                  builds.sum_of_products(*small))
    x, w = np.full((1, 32), 127, np.int8), np.full((1, 32), 127, np.int8)
    off = builds.unrolled_sum_of_products(x, w) - builds.sum_of_products(x, w)
    assert off[0, 0] == -8 * 65536


def test_the_stages_are_the_engines_own(shipped_engine):
    ids = shipped_engine.encode("Zara's favorite food is ramen.")
    with backend.using("numpy"):
        run = run_stages(shipped_engine.model, ids)
        wanted = shipped_engine.forward(ids)[-1]
    np.testing.assert_allclose(run[-1][1], wanted, rtol=1e-4, atol=1e-4)
    names = [name for name, _ in run]
    assert len(set(names)) == len(names) == 2 + 11 * 3
    moved = run_stages(shipped_engine.model, ids, positions=np.arange(len(ids)) + 7)
    np.testing.assert_allclose(moved[-1][1], wanted, rtol=1e-2, atol=1e-2)
