"""The exponential function of the kernels, in NumPy: its bits, its error, and the walk over all."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import kernels_pyx
from course_lib.exponential import HIGHEST, LN2_HIGH, LN2_LOW, LOWEST, exp_poly, ulp_error
from course_lib.lab import exp_walk
from course_lib.lab.exp_recipes import exp_recipe
from course_lib.lab.runs import load_run

F32 = np.float32
WALK = exp_walk.ExpWalk()
EDGES = np.array([0, -0.0, LOWEST, HIGHEST, 1e-45, -1e-45, np.nextafter(F32(LOWEST), F32(-88)),
                  -1e30, -np.inf], F32)


def sample(every=90_001):
    return np.concatenate([exp_walk.floats(0, exp_walk.bits(end) + 1, end < 0, every)
                           for end in (LOWEST, HIGHEST)] + [EDGES])


@pytest.mark.parametrize("variant", kernels_pyx.VARIANTS)
def test_the_definition_has_the_bits_of_every_kernel(variant):
    x = sample(900_001 if variant == "portable-baseline" else 90_001)
    assert exp_poly(x).tobytes() == exp_walk.compute(variant, x).tobytes()


def test_within_one_ulp_on_a_sample_and_exact_at_the_edges():
    x = sample()
    inside = x[x >= LOWEST]
    assert np.abs(ulp_error(exp_poly(inside), inside)).max() < 1
    assert exp_poly(EDGES[:2]).tolist() == [1, 1] and not exp_poly(EDGES[6:]).any()
    for bad in (np.nextafter(F32(HIGHEST), F32(99)), np.nan, np.inf):
        with pytest.raises(ValueError, match="up to 88"):
            exp_poly([0.0, bad])
    assert exp_poly([[0.0], [-1.0]]).shape == (2, 1)


@given(st.floats(LOWEST, HIGHEST, width=32))
def test_an_ulp_is_the_distance_of_the_floats_around_the_exact_value(x):
    exact = math.exp(x)
    below = F32(exact)
    below = below if float(below) <= exact else np.nextafter(below, F32(0))
    above = np.nextafter(below, F32(np.inf))
    errors = ulp_error(np.array([below, above]), np.array([x, x]))
    assert errors[0] <= 0 < errors[1] and math.isclose(errors[1] - errors[0], 1, rel_tol=1e-9)


def test_ln_2_in_two_parts():
    high, low = float(LN2_HIGH), float(LN2_LOW)
    assert high * 512 == 355 and abs(high + low - math.log(2)) < 1e-11


def test_recipes_show_what_each_choice_is_worth():
    x = np.linspace(LOWEST, 0, 20_001, dtype=F32)

    def worst(**choice):
        return np.abs(ulp_error(exp_recipe(x, **choice), x)).max()

    assert worst() < 1.5 and worst(degree=8) > 0.9 * worst()
    assert worst(degree=5) > 10 and worst(parts=1) > 30 and worst(nearest=False) > 5
    assert exp_recipe([-20.0], reduce=False)[0] < 0
    for wrong in ({"parts": 3}, {"degree": 0}):
        with pytest.raises(ValueError):
            exp_recipe(x, **wrong)


def test_the_stretches_are_every_float_of_the_range_once():
    parts = [exp_walk.stretch(WALK, i) for i in range(WALK.prompts)]
    for end, negative in ((LOWEST, True), (HIGHEST, False)):
        mine = [(first, count) for first, count, sign in parts if sign == negative]
        assert mine[0][0] == 0 and sum(mine[-1]) == exp_walk.bits(end) + 1
        assert all(a + n == b for (a, n), (b, _) in zip(mine, mine[1:], strict=False))
        assert exp_walk.floats(mine[-1][0] + mine[-1][1] - 1, 1, negative)[0] == end
    for x in (-87.0, -1.5, -1e-45, 1e-45, 0.1, 88.0):
        first, count, negative = exp_walk.stretch(WALK, exp_walk.stretch_of(WALK, x))
        assert first <= exp_walk.bits(x) < first + count and negative == (x < 0)
    with pytest.raises(ValueError, match="not in the range"):
        exp_walk.stretch_of(WALK, 89.0)


def test_the_record_is_the_whole_range_and_a_sample_agrees():
    run = load_run("exp_all_floats")
    expected = exp_walk.bits(LOWEST) + 1 + exp_walk.bits(HIGHEST) + 1
    assert run["summary"]["all"]["floats"] == expected == sum(r["floats"] for r in run["records"])
    assert run["summary"]["up_to_0"]["floats"] == exp_walk.bits(LOWEST) + 1
    assert run["summary"]["all"]["max_ulp"] < 1
    record = run["records"][exp_walk.stretch_of(WALK, -0.4)]
    again = exp_walk.exp_records(None, WALK, record["index"], every=9001)[0]
    assert (again["from"], again["to"]) == (record["from"], record["to"])
    assert again["max_ulp"] <= record["max_ulp"] and again["floats"] == -(-record["floats"] // 9001)
