"""Bounds of the q8 quantizer for every rounding rule, and a scalar transcription of it."""

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from course_lib.attention import two_pass
from course_lib.quant import ROUNDING_RULES, dequantize_rows, quantize_rows

F32 = np.float32
U = 2.0**-24  # unit roundoff of float32
F32_MAX = float(np.finfo(F32).max)
# Rounding besides the rule's own, in steps: 127/m and its product with x (2 units in 127), the
# sum with one half (1), the scale and its product with q (2); doubled for second-order terms.
FLOAT_SLACK = 2 * 5 * 127.5 * U


def floats(low: float, high: float) -> st.SearchStrategy[float]:
    return st.floats(float(F32(low)), float(F32(high)), width=32)


ordinary = floats(-10, 10)
subnormal = st.integers(-(2**23) + 1, 2**23 - 1).map(lambda i: math.ldexp(i, -149))
huge = floats(-F32_MAX, F32_MAX)
around_tiny = floats(-2e-6, 2e-6)
halves = st.integers(-254, 254).map(lambda i: i / 2)


def rows_of(values: st.SearchStrategy[float]) -> st.SearchStrategy[list[float]]:
    return st.lists(values, min_size=1, max_size=40)


outlier = st.tuples(rows_of(ordinary), st.sampled_from([1e3, -1e6, 3e38])).map(
    lambda pair: [*pair[0], pair[1]])
tied = rows_of(halves).map(lambda row: [127.0, *row])  # 127/m = 1: exact ties
row = st.one_of(*map(rows_of, (ordinary, subnormal, huge, around_tiny)), outlier, tied,
                rows_of(st.just(0.0)), rows_of(st.one_of(ordinary, subnormal, huge)))


@settings(max_examples=400, deadline=None)
@given(row, st.sampled_from(ROUNDING_RULES))
def test_the_error_stays_in_the_bound_of_the_rule(values, rule):
    x = np.array(values, F32)
    q, scale = quantize_rows(x, rule)
    assert np.abs(q.astype(int)).max() <= 127
    assert scale > 0 and np.isfinite(scale)
    exact = x.astype(np.float64)
    error = q.astype(np.float64) * float(scale) - exact
    reach = np.full(len(x), 0.5)
    if rule == "trunc":
        reach[x < 0] = 1.5
        assert (error[x < 0] >= -(0.5 + FLOAT_SLACK) * float(scale)).all()
    if np.abs(x).max() >= F32(1e-6):
        assert (np.abs(error) <= (reach + FLOAT_SLACK) * float(scale)).all()
        if rule != "trunc" or x.max() >= -x.min():
            assert 127 in np.abs(q)
    else:
        assert not q.any() and scale == F32(1) / F32(127)
    read = dequantize_rows(q, scale)
    assert read.dtype == F32 and np.isfinite(read).all()
    assert (np.abs(read - q * float(scale)) <= U * np.abs(q * float(scale)) + 1e-45).all()


@settings(max_examples=300, deadline=None)
@given(row, st.sampled_from(ROUNDING_RULES))
def test_the_quantizer_equals_its_scalar_transcription(values, rule):
    x = [F32(v) for v in values]
    m = max(abs(v) for v in x)
    if m < F32(1e-6):
        m = F32(1)
    inverse = F32(127) / m
    expected = []
    for v in x:
        y = v * inverse
        if rule == "half_up":
            r = math.floor(y + F32(0.5))
        elif rule == "half_even":
            r = round(float(y))
        elif rule == "half_away":
            r = int(math.copysign(math.floor(abs(float(y)) + 0.5), y))
        else:
            r = math.trunc(float(y + F32(0.5)))
        expected.append(max(-127, min(127, r)))
    q, scale = quantize_rows(np.array(values, F32), rule)
    assert q.tolist() == expected
    assert scale == m / F32(127)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.lists(ordinary, min_size=8, max_size=8), min_size=1, max_size=12),
       st.sampled_from(ROUNDING_RULES))
def test_a_row_does_not_see_its_neighbours(rows, rule):
    x = np.array(rows, F32)
    q, scale = quantize_rows(x, rule)
    for i, one in enumerate(x):
        alone = quantize_rows(one, rule)
        assert np.array_equal(q[i], alone[0]) and scale[i] == alone[1]


@settings(max_examples=60, deadline=None)
@given(rows_of(ordinary), st.integers(-60, 60), st.sampled_from(ROUNDING_RULES))
def test_a_power_of_two_changes_the_scale_only(values, power, rule):
    x = np.array([1.0, *values], F32)
    scaled = np.ldexp(x, power)
    if np.abs(scaled).max() < F32(1e-6):
        return
    q, scale = quantize_rows(x, rule)
    q2, scale2 = quantize_rows(scaled, rule)
    assert np.array_equal(q, q2)
    assert scale2 == np.ldexp(scale, power)


def experiment(seed: int, rule: str, parts: str = "kv") -> np.ndarray:
    """Output differences of article 9-3's experiment: one head, 256 tokens of N(0, 1), d = 128."""
    rng = np.random.default_rng(seed)
    q, k, v = (rng.standard_normal((1, n, 128)).astype(F32) for n in (1, 256, 256))
    read_k = dequantize_rows(*quantize_rows(k, rule)) if "k" in parts else k
    read_v = dequantize_rows(*quantize_rows(v, rule)) if "v" in parts else v
    return two_pass(q[0], read_k, read_v) - two_pass(q[0], k, v)


@pytest.mark.parametrize(("rule", "mean", "positive"),
                         [("half_up", 0.00072, (0.4, 0.6)), ("trunc", 0.0111, (1, 1))])
def test_rounding_rules_in_the_published_experiment(rule, mean, positive):
    """A loose oracle: values that an independent implementation measured over 50 seeds."""
    deltas = [experiment(seed, rule) for seed in range(12)]
    assert np.mean([np.abs(d).mean() for d in deltas]) == pytest.approx(mean, rel=0.15)
    share = np.mean([(d > 0).mean() for d in deltas])
    assert positive[0] <= share <= positive[1]


def test_v_alone_carries_the_bias_of_trunc():
    k_only = np.mean([experiment(s, "trunc", "k") for s in range(12)])
    v_only = np.mean([experiment(s, "trunc", "v") for s in range(12)])
    assert v_only == pytest.approx(0.0111, rel=0.15)
    assert abs(k_only) < 0.05 * v_only
