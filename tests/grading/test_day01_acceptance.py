"""What day 1-3 says about the self-tests that it hands out for reading."""

import numpy as np
import pytest

from course_lib import attention
from course_lib.engine.layers import rms_norm, rope
from course_lib.kvcache import KVCache
from course_lib.lab import acceptance


class Cache:
    """Returns the first rows that it was given, whatever else was written."""

    def __init__(self, *shape):
        self.rows_ = None

    def append(self, layer, k, v):
        self.rows_ = self.rows_ or KVCache(1, 2, 64).rows(0)

    def rows(self, layer):
        return self.rows_


def zeros(q, k, v):
    return np.zeros_like(q)


def nan(q, k, v):
    return np.full_like(q, np.nan)


# The weak ones with a wrong part that they accept, the others with wrong parts that they notice.
ACCEPTED = [
    ("norm_forgets_the_size_of_a_row", lambda x, gain, eps: x * gain),
    ("attention_is_a_mean_of_values", zeros),
    ("attention_is_a_mean_of_values", nan),
    ("attention_with_recorded_rows", None),
    ("cache_returns_what_was_written", Cache),
]
NOTICED = [
    ("norm_of_a_known_row", lambda x, gain, eps: x * gain),
    ("norm_of_a_known_row", lambda x, gain, eps: rms_norm(x, gain[::-1].copy(), eps)),
    ("rotation_keeps_the_length", lambda x, cos, sin: x * cos.mean()),
    ("rotation_knows_only_the_distance", lambda x, cos, sin: x),
    ("rotation_knows_only_the_distance", lambda x, cos, sin: rope(x, cos, np.abs(sin))),
    ("attention_with_one_token", zeros),
    ("attention_with_one_token", lambda q, k, v: attention.two_pass(q, k, v[::-1].copy())),
    ("argmax_takes_the_first_of_equals", lambda x: len(x) - 1 - int(np.argmax(x[::-1]))),
]
ALL = [name.removeprefix("test_") for name in vars(acceptance) if name.startswith("test_")]


@pytest.mark.parametrize("name", ALL)
def test_all_pass_on_the_engine(name):
    getattr(acceptance, f"test_{name}")()


@pytest.mark.parametrize("name, part", ACCEPTED)
def test_a_weak_one_accepts_what_is_wrong(name, part):
    getattr(acceptance, f"test_{name}")(part)


@pytest.mark.parametrize("name, part", NOTICED)
def test_the_others_notice(name, part):
    with pytest.raises(AssertionError):
        getattr(acceptance, f"test_{name}")(part)


def test_four_are_weak_and_five_are_not():
    assert len(ALL) == 9
    weak, strong = ({name for name, _ in pairs} for pairs in (ACCEPTED, NOTICED))
    assert len(weak) == 4 and weak | strong == set(ALL) and not weak & strong
