"""A quantizer's rounding rule, told from samples: never thrown out, and found where ties decide."""

from __future__ import annotations

import numpy as np
import pytest

from course_lib.lab.rounding_rules import (
    RULES,
    possible_rules,
    rounded,
    scaled_in_each_order,
)
from course_lib.quant import round_to_int

F32 = np.float32


@pytest.mark.parametrize("rule", RULES)
def test_the_true_rule_is_always_possible(rule):
    for seed in range(60):
        rng = np.random.default_rng(seed)
        x = rng.standard_normal((8, 32)).astype(F32) * F32(10.0 ** rng.integers(-3, 4))
        x[:, 1] = np.abs(x).max(axis=1) / 2  # a tie in some orders of operations only
        y = scaled_in_each_order(x)[seed % 3]
        assert rule in possible_rules(x, rounded(y, rule)), seed


@pytest.mark.parametrize("rule", RULES)
def test_ties_of_both_signs_leave_one_rule(rule):
    for seed in range(60):
        rng = np.random.default_rng(seed)
        x = rng.integers(-60, 60, (4, 24)).astype(F32)
        x[:, :7] = 127, 0.5, 1.5, -0.5, -1.5, -3.25, 3.25
        x = x * F32(2.0 ** rng.integers(-8, 8))
        y = scaled_in_each_order(x)[seed % 3]
        assert possible_rules(x, rounded(y, rule)) == [rule], seed


def test_without_ties_the_rules_to_nearest_stay():
    x = np.array([[127, 20.25, -20.25, 0.75]], F32)
    assert possible_rules(x, [[127, 20, -20, 1]]) == ["half_up", "half_even", "half_away"]
    assert possible_rules(x, [[127, 20, -21, 1]]) == []
    assert possible_rules(np.zeros((2, 4), F32), np.zeros((2, 4))) == list(RULES)


def test_plain_truncation_and_the_rules_of_quant():
    y = np.array([-1.5, -0.7, 0.5, 2.9], F32)
    assert rounded(y, "toward_zero").tolist() == [-1, 0, 0, 2]
    for rule in RULES[:-1]:
        assert (rounded(y, rule) == round_to_int(y, rule)).all()
    with pytest.raises(ValueError, match="unknown"):
        rounded(y, "up")


def test_what_cannot_be_compared():
    with pytest.raises(ValueError, match="shape"):
        possible_rules(np.ones((1, 4), F32), np.ones(4))
    with pytest.raises(ValueError, match="NaN"):
        possible_rules(np.array([[np.nan]], F32), [[1]])
