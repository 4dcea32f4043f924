"""Plain values: nothing foreign gets through, and comparison says what differs."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from course_lib.classroom.values import ForeignValue, difference, plain, short


class AlwaysEqual:
    def __eq__(self, other):
        return True

    __hash__ = None


class LyingInt(int):
    def __eq__(self, other):
        return True

    def __int__(self):
        return 42

    __index__ = __int__
    __hash__ = int.__hash__


class LyingFloat(float):
    def __eq__(self, other):
        return True

    def __float__(self):
        return 42.0

    __hash__ = float.__hash__


class LyingStr(str):
    def __eq__(self, other):
        return True

    def __str__(self):
        return "right"

    __hash__ = str.__hash__


class LyingList(list):
    def __iter__(self):
        return iter([42])

    def __eq__(self, other):
        return True


class LyingArray(np.ndarray):
    def __eq__(self, other):
        return np.True_

    def __array__(self, *args, **kwargs):
        return np.array([42])


class Disguised:
    @property
    def __class__(self):
        return int

    def __eq__(self, other):
        return True


class LyingScalar(np.float32):
    def __eq__(self, other):
        return True

    __hash__ = np.float32.__hash__


@pytest.mark.parametrize("foreign", [
    AlwaysEqual(), [1, AlwaysEqual()], {"a": AlwaysEqual()}, np.array([AlwaysEqual()]),
    Disguised(), LyingScalar(1), len, int, iter([1]), (i for i in [1]), np.datetime64("2020-01-01"),
    np.zeros(2, dtype=[("a", "i4")]),
], ids=lambda value: type(value).__name__)
def test_foreign_values_are_refused(foreign):
    with pytest.raises(ForeignValue):
        plain(foreign)


@pytest.mark.parametrize("value, expect", [
    (LyingInt(5), 5), (LyingFloat(2.5), 2.5), (LyingStr("wrong"), "wrong"),
    (LyingList([1, 2]), [1, 2]), (np.int64(3), 3), (np.bool_(True), True), (range(3), [0, 1, 2]),
    (np.float32(0.5), 0.5), (np.array([1, None], dtype=object), [1, None]),
])
def test_subclasses_and_scalars_become_the_base_type(value, expect):
    made = plain(value)
    assert type(made) is type(expect) and made == expect


def test_array_subclass_becomes_a_plain_copy():
    original = np.array([1, 2, 3])
    made = plain(original.view(LyingArray))
    assert type(made) is np.ndarray and made.tolist() == [1, 2, 3]
    original[0] = 9
    assert made.tolist() == [1, 2, 3]


def test_endless_nesting_is_refused():
    nested: list = []
    nested.append(nested)
    with pytest.raises(ForeignValue):
        plain(nested)


PLAIN = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=3), inner,
                                                                 max_size=3),
    max_leaves=12,
)


@given(PLAIN)
def test_every_plain_value_equals_its_own_copy(value):
    assert difference(value, plain(value)) is None


@given(st.lists(st.integers(-9, 9), min_size=1, max_size=40), st.data())
def test_one_changed_item_is_found_in_lists_and_arrays(items, data):
    index = data.draw(st.integers(0, len(items) - 1))
    changed = list(items)
    changed[index] += 1
    assert difference(items, changed) is not None
    assert difference(np.array(items), np.array(changed)) is not None
    assert difference(np.array(items), items) is None
    assert difference(items, np.array(items)) is None


@pytest.mark.parametrize("expect, got, text", [
    ([1, 4], [4, 1], "expected [1, 4], got [4, 1]"),
    (64, 64.0, "expected 64, got 64.0 (an integer is wanted)"),
    (64, 65, "expected 64, got 65"),
    (1048576, 1048576.0, "expected 1048576, got 1048576.0 (an integer is wanted)"),
    (1234567.5, 1234567.25, "expected 1234567.5, got 1234567.25"),
    (1.5e300, 1, "expected 1.5e+300, got 1"),
    ([1, 2], [1.0, 2.0], "expected [1, 2], got [1.0, 2.0] (an integer is wanted)"),
    ([[7] * 30], [[7.0] * 30], "at [0] at [0] expected 7, got 7.0 (an integer is wanted)"),
    ({"a": 1}, {"a": 1.0}, "at 'a' expected 1, got 1.0 (an integer is wanted)"),
    (1, True, "expected 1, got True"),
    (True, 1, "expected True, got 1"),
    (2.0, 2.5, "expected 2.0, got 2.5"),
    (0.1, float(np.float32(0.1)), "expected 0.1, got 0.10000000149011612"),
    ("a", "b", "expected 'a', got 'b'"),
    (None, 0, "expected None, got 0"),
    ([1, 2], 3, "expected [1, 2], got 3"),
    ([1, [2, 3]], [1, [2, 4]], "expected [1, [2, 3]], got [1, [2, 4]]"),
    ({"a": 1}, {"a": 2}, "at 'a' expected 1, got 2"),
    ({"a": 1}, {"b": 1}, "expected keys ['a'], got ['b']"),
    ({1, 2}, [1, 2], "expected {1, 2}, got [1, 2]"),
    (np.zeros(3), np.zeros(4), "expected shape (3,), got (4,)"),
    (np.zeros(2), [[0.0], [0.0, 1.0]], "expected an array of shape (2,), got a ragged list"),
    (np.zeros(2), "no", "expected an array of shape (2,), got 'no'"),
    (np.array([1, 2]), np.array([1.0, 2.0]), "expected dtype int64, got float64"),
    (np.array([1, 2]), np.array([1, 3]), "expected [1, 2], got [1, 3]"),
    (np.array([True]), np.array([1]), "expected dtype bool, got int64"),
    (np.arange(20), np.arange(20) + (np.arange(20) > 17),
     "at [18] expected 18, got 19 (2 of 20 differ)"),
    (list(range(30)), [*range(29), 0], "at [29] expected 29, got 0"),
    ([1] * 60, [1] * 59, "expected 60 items, got 59"),
])
def test_differences_are_told_in_one_line(expect, got, text):
    assert difference(expect, got) == text


def test_dtype_is_compared_only_when_asked():
    expect, got = np.zeros(2, np.float32), np.zeros(2, np.float64)
    assert difference(expect, got) is None
    assert difference(expect, got, dtype=True) == "expected dtype float32, got float64"
    assert "got [0.0, 0.0]" in difference(expect, [0.0, 0.0], dtype=True)


def test_tolerance_is_absolute_plus_relative():
    expect = np.array([100.0, 0.0])
    assert difference(expect, np.array([101.0, 0.0]), rtol=0.01) is None
    assert difference(expect, np.array([101.1, 0.0]), rtol=0.01) is not None
    assert difference(expect, np.array([100.0, 0.5]), rtol=0.01) is not None
    assert difference(expect, np.array([100.0, 0.5]), atol=0.5) is None
    assert difference(1.0, 1.5, atol=0.4) is not None
    assert difference(10, 11, atol=1) is None


@pytest.mark.parametrize("tolerance", [0.0, 1e9])
def test_nan_and_inf_equal_only_themselves(tolerance):
    nan, inf = float("nan"), float("inf")
    for expect in (nan, inf, -inf, 0.0):
        for got in (nan, inf, -inf, 0.0):
            same = repr(expect) == repr(got)
            assert (difference(expect, got, atol=tolerance) is None) == same
            pair = np.array([expect]), np.array([got])
            assert (difference(*pair, atol=tolerance) is None) == same


def test_big_integers_are_exact():
    assert difference(np.array([2**53]), np.array([2**53 + 1])) is not None
    assert difference(np.array([-1]), np.array([2**64 - 1], np.uint64)) is not None


@given(PLAIN)
def test_short_text_is_short(value):
    assert len(short(value)) <= 60 and "\n" not in short(value)


@pytest.mark.parametrize("expect", [[1, 2], 1.0, np.zeros((2, 2))])
@pytest.mark.parametrize("shape", [(10**12, 0), (2, 10**12, 0)])
def test_an_array_of_no_bytes_is_never_made_into_lists(expect, shape):
    assert "expected" in difference(expect, np.zeros(shape))


def test_one_long_text_among_many_does_not_become_an_array():
    assert "got text" in difference(np.zeros(2), ["x" * 10**6, *[""] * 10**5])
