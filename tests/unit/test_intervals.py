"""Wilson's interval is what the score test keeps; a critical k needs all larger ones too."""

from __future__ import annotations

from math import sqrt

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from course_lib.lab.intervals import critical_k, wilson


@settings(max_examples=25)
@given(st.integers(1, 400).flatmap(lambda n: st.tuples(st.integers(0, n), st.just(n))),
       st.floats(0.5, 4))
def test_the_ends_are_z_standard_deviations_from_the_share(count, z):
    hits, n = count
    low, high = wilson(hits, n, z)
    assert 0 <= low <= hits / n <= high <= 1
    for end in (low, high):
        if 0 < end < 1:
            assert abs(hits / n - end) == pytest.approx(z * sqrt(end * (1 - end) / n), rel=1e-6,
                                                        abs=1e-9)
    assert (low == 0) == (hits == 0) and (high == 1) == (hits == n)


@pytest.mark.parametrize("hits, n, low, high", [
    (0, 200, 0.0, 0.01884), (200, 200, 0.98116, 1.0), (9, 10, 0.59585, 0.98212),
    (0, 10, 0.0, 0.27754), (59, 60, 0.91143, 0.99705),
])
def test_known_intervals(hits, n, low, high):
    """As scipy.stats.binomtest(hits, n).proportion_ci(method="wilson") gives them."""
    assert wilson(hits, n) == pytest.approx((low, high), abs=2e-5)


@settings(max_examples=25)
@given(st.integers(1, 200).flatmap(lambda n: st.tuples(st.integers(0, n), st.just(n))))
def test_hits_and_misses_mirror_and_more_trials_narrow(count):
    hits, n = count
    low, high = wilson(hits, n)
    assert wilson(n - hits, n) == pytest.approx((1 - high, 1 - low))
    more = wilson(4 * hits, 4 * n)
    assert more[1] - more[0] < high - low


@pytest.mark.parametrize("args", [(0, 0), (3, 2), (-1, 2), (1, 2, 0), (1, 2, float("nan"))])
def test_no_interval_without_sense(args):
    with pytest.raises(ValueError):
        wilson(*args)


def sweep(**counts):
    return [{"k": "exact" if k == "exact" else int(k[1:]), "recalled": i < hits}
            for k, (hits, n) in counts.items() for i in range(n)]


@pytest.mark.parametrize("records, floor, found", [
    (sweep(k8=(100, 100), k4=(99, 100), k2=(10, 100)), 0.9, 4),
    (sweep(k8=(80, 100), k4=(100, 100)), 0.9, None),  # a better small k does not count
    (sweep(k8=(9, 9), k4=(9, 9)), 0.9, None),  # nine of nine do not show 90 %
    (sweep(exact=(0, 50), k4=(50, 50)), 0.9, 4),
    (sweep(k1=(0, 3), k2=(3, 3)), 0.0, 1),
])
def test_critical_k(records, floor, found):
    assert critical_k(records, floor) == found
    assert critical_k(reversed(records), floor) == found


def test_a_critical_k_needs_a_k_and_a_floor_that_is_a_share():
    with pytest.raises(ValueError, match="no k"):
        critical_k(sweep(exact=(1, 1)))
    with pytest.raises(ValueError, match="floor"):
        critical_k(sweep(k1=(1, 1)), 90)
