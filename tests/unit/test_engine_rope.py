"""Scaled RoPE: what config.json may ask for, and what comes of it."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from course_lib import backend
from course_lib.engine.layers import rope_powers, rope_tables
from course_lib.engine.rope import RopeScaling, natural_log
from course_lib.errors import CourseError

F32 = np.float32
CONFIG = Path("model") / "config.json"
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
          "original_max_position_embeddings": 8192}


def read(raw):
    return RopeScaling.from_parameters(raw, CONFIG, max_position_embeddings=40960)


@pytest.mark.parametrize("raw", [
    {}, {"rope_type": "default"}, {"type": "default", "rope_theta": 1e6},
    {"rope_type": "default", "mrope_section": [24, 20, 20], "mrope_interleaved": True},
])
def test_nothing_is_scaled(raw):
    assert read(raw) is None


def test_numbers_are_read_under_their_published_names():
    assert read({"type": "linear", "factor": 2}) == RopeScaling("linear", 2.0)
    assert read(LLAMA3) == RopeScaling("llama3", 8.0, 8192, low_freq_factor=1, high_freq_factor=4)
    yarn = read(YARN | {"beta_fast": 16.0, "beta_slow": 2, "truncate": False})
    assert yarn == RopeScaling("yarn", 4.0, 32768, yarn.attention_factor, 16.0, 2.0, False)
    assert yarn.attention_factor == pytest.approx(0.1 * math.log(4) + 1, rel=1e-15)
    assert read(YARN | {"attention_factor": 2}).attention_factor == 2
    assert read({"type": "yarn", "factor": 2.0}).original_max_position_embeddings == 40960
    quotient = read(YARN | {"mscale": 1.0, "mscale_all_dim": 0.5}).attention_factor
    assert quotient == pytest.approx((0.1 * math.log(4) + 1) / (0.05 * math.log(4) + 1), rel=1e-15)


@pytest.mark.parametrize(("raw", "message"), [
    ({"rope_type": "dynamic", "factor": 2.0}, "RoPE scaling 'dynamic' is not supported"),
    ({"type": "longrope"}, "'longrope' is not supported"),
    ({"rope_type": ["yarn"]}, "is not supported"),
    ({"rope_type": "linear"}, "lacks factor"),
    (YARN | {"factor": "4"}, "factor of its RoPE scaling must be a number of at least 1, got '4'"),
    (YARN | {"factor": 0.5}, "factor"), (YARN | {"factor": True}, "factor"),
    (YARN | {"factor": float("nan")}, "factor"), (YARN | {"factor": float("inf")}, "factor"),
    (YARN | {"original_max_position_embeddings": 0}, "original_max_position_embeddings"),
    (YARN | {"original_max_position_embeddings": 8.5}, "original_max_position_embeddings"),
    (YARN | {"beta_fast": 1, "beta_slow": 2}, "beta_slow 2 of its RoPE scaling must be below"),
    (YARN | {"truncate": 1}, "truncate of its RoPE scaling must be true or false"),
    (YARN | {"attention_factor": -1}, "attention_factor"),
    (YARN | {"mscale": "x", "mscale_all_dim": 1}, "mscale"),
    (LLAMA3 | {"low_freq_factor": 4.0}, "low_freq_factor 4 of its RoPE scaling must be below"),
    ({**LLAMA3, "high_freq_factor": None}, "lacks high_freq_factor"),
    (YARN | {"partial_rotary_factor": 0.5}, "partial_rotary_factor 0.5 is not supported"),
])
def test_what_would_be_computed_wrongly_is_refused(raw, message):
    with pytest.raises(CourseError, match=message) as error:
        read(raw)
    assert str(error.value).startswith(f"{CONFIG}: ") and "\n" not in str(error.value)


@pytest.mark.parametrize("raw", [YARN, LLAMA3])
def test_fast_frequencies_stay_and_slow_ones_are_divided(raw):
    scaling, powers = read(raw), rope_powers(128, 1e6)
    before, after = F32(1) / powers, scaling.stretched(powers, 1e6)
    turns = scaling.original_max_position_embeddings * before / (2 * np.pi)
    ratio = before / after
    assert (ratio[turns > 40] == 1).all()
    np.testing.assert_allclose(ratio[turns < 0.7], scaling.factor, rtol=4 * 2.0**-24)
    assert (np.diff(ratio) > -1e-6).all()
    between = ratio[(ratio > 1.01) & (ratio < scaling.factor - 0.01)]
    assert len(between) > 3


def test_the_published_yarn_of_qwen3():
    """Worked by hand: 32 turns within 32,768 at index 23.6, one turn at 39.6, so 23 … 40."""
    powers = rope_powers(128, 1e6)
    ratio = (F32(1) / powers) / read(YARN).stretched(powers, 1e6)
    assert (ratio[:24] == 1).all() and ratio[24] > 1
    assert ratio[39] < 4 - 1e-3
    np.testing.assert_allclose(ratio[40:], 4, rtol=1e-6)


@pytest.mark.parametrize("raw", [YARN, LLAMA3, {"type": "linear", "factor": 3.0}])
def test_tables_are_the_same_on_every_kernel_within_roundings(raw):
    scaling, positions = read(raw), np.array([0, 1, 1000, 131_071])
    with backend.using("numpy"):
        expected = rope_tables(positions, 64, 1e6, scaling)
    got = rope_tables(positions, 64, 1e6, scaling)
    for a, b in zip(got, expected, strict=True):
        assert a.dtype == b.dtype == F32
        # Another last bit of a frequency turns the angle of position 131,071 by up to 2^-7.
        np.testing.assert_allclose(a, b, rtol=0, atol=131_071 * 2.0**-24)
    np.testing.assert_allclose(got[0] ** 2 + got[1] ** 2, scaling.attention_factor**2, rtol=1e-6)


def test_a_yarn_table_is_not_that_of_the_plain_model():
    positions = np.arange(100)
    cos, _ = rope_tables(positions, 64, 1e6, read(YARN))
    assert np.abs(cos - rope_tables(positions, 64, 1e6)[0]).max() > 0.1


@given(st.floats(1e-300, 1e300))
def test_natural_log(x):
    assert natural_log(x) == pytest.approx(math.log(x), rel=4e-16, abs=4e-16)
