"""The sign test of day 9: counted splits against the literal definition, and its edges."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest

from course_lib.lab.bias import bias_test


@pytest.mark.parametrize("n", range(1, 11))
def test_p_is_the_share_of_all_sign_patterns_that_split_as_unevenly(n):
    patterns = [sum(pattern) for pattern in product((0, 1), repeat=n)]
    for positive in range(n + 1):
        errors = [1.0] * positive + [-1.0] * (n - positive)
        as_uneven = sum(abs(2 * heads - n) >= abs(2 * positive - n) for heads in patterns)
        assert bias_test(errors) == {"n": n, "positive": positive, "p": as_uneven / 2**n}


def test_only_signs_count_and_zeros_do_not():
    assert bias_test([3e-9, -5.0, 0.0, -0.0, 7.0]) == {"n": 3, "positive": 2, "p": 1.0}
    assert bias_test(np.zeros((4, 4), np.float32)) == {"n": 0, "positive": 0, "p": 1.0}
    assert bias_test([]) == {"n": 0, "positive": 0, "p": 1.0}


def test_negating_the_errors_keeps_p():
    errors = np.random.default_rng(0).standard_normal(301) + 0.1
    up, down = bias_test(errors), bias_test(-errors)
    assert up["p"] == down["p"] and up["positive"] == 301 - down["positive"]


def test_many_errors_neither_overflow_nor_lose_the_tail():
    assert bias_test(np.ones(128))["p"] == 2.0**-127
    assert bias_test(np.tile([1.0, -1.0], 1000))["p"] == 1.0
    assert bias_test(np.ones(6400))["p"] == 0.0  # 2**-6399 is below the smallest float


def test_nan_is_refused():
    with pytest.raises(ValueError, match="NaN"):
        bias_test([1.0, float("nan")])
