"""Sampling: what each filter keeps, how often a token is drawn, and that a seed fixes the draw."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from course_lib import backend
from course_lib.engine.sampling import Sampler, greedy, margin
from course_lib.errors import CourseError


def by_hand(logits, temperature, top_k=None, top_p=1.0, min_p=0.0):
    """(token -> probability of what stays, how close a filter's border was), in float64."""
    top = max(logits)
    weight = [math.exp(max((float(x) - float(top)) / temperature, -200.0)) for x in logits]
    ranked = sorted(range(len(logits)), key=lambda i: (-float(logits[i]), i))[:top_k]
    total, before, closest, stay = sum(weight[i] for i in ranked), 0.0, 1.0, []
    for i in ranked:
        closest = min(closest, abs(before / total - top_p)) if top_p < 1 else closest
        if top_p == 1 or before < top_p * total or not stay:
            stay.append(i)
        before += weight[i]
    closest = min([closest, *(abs(weight[i] - min_p) for i in stay)]) if min_p else closest
    stay = [i for i in stay if weight[i] >= min_p]
    total = sum(weight[i] for i in stay)
    return {i: weight[i] / total for i in stay}, closest


few_values = st.sampled_from([-2.0, -1.0, 0.0, 0.5, 1.0, 3.0])  # many ties
logit_lists = st.lists(
    st.one_of(st.floats(-20, 20, width=32), few_values), min_size=1, max_size=40
).map(lambda values: np.array(values, dtype=np.float32))
options = st.fixed_dictionaries({
    "temperature": st.sampled_from([0.05, 0.7, 1.0, 2.5, 1e6]),
    "top_k": st.one_of(st.none(), st.integers(1, 50)),
    "top_p": st.one_of(st.just(1.0), st.floats(0.01, 0.999)),
    "min_p": st.one_of(st.just(0.0), st.floats(0.01, 1.0)),
})


@given(logit_lists, options)
def test_kept_tokens_and_their_weights_are_those_of_the_definition(logits, options):
    expected, closest = by_hand(logits, **options)
    ids, weights = Sampler(**options).kept(logits)
    assert weights.dtype == np.float32 and len(ids) == len(weights) >= 1
    assert ids.tolist() == sorted(ids.tolist())
    if closest > 1e-5:  # 40 roundings of float32 weights and of their sum
        assert ids.tolist() == sorted(expected)
        got = weights / weights.sum(dtype=np.float64)
        # float32 rounds the exponent, up to 87, once, and exp to 3 ulp.
        np.testing.assert_allclose(got, [expected[i] for i in ids], rtol=2e-5, atol=1e-37)


@given(logit_lists, options, st.integers(0, 2**64 - 1), st.integers(0, 2**40))
def test_a_draw_is_kept_and_repeats(logits, options, seed, position):
    sampler = Sampler(**options, seed=seed)
    token = sampler(logits, position)
    ids, weights = sampler.kept(logits)
    assert weights[ids.tolist().index(token)] > 0
    assert token == sampler(logits.copy(), position) == Sampler(**options, seed=seed)(
        logits, position
    )
    assert isinstance(token, int)


@pytest.mark.parametrize("filters", [{}, {"top_k": 5}, {"top_p": 0.8}, {"min_p": 0.1},
                                     {"top_k": 7, "top_p": 0.9, "min_p": 0.02}])
def test_tokens_are_drawn_as_often_as_they_weigh(filters):
    """Chi-square over 4,000 positions of one seed; 99.99 % of right samplers stay below."""
    logits = np.random.default_rng(4).standard_normal(12).astype(np.float32) * 1.5
    expected, _ = by_hand(logits, 0.8, **filters)
    sampler = Sampler(temperature=0.8, seed=11, **filters)
    draws = 4_000
    counts = np.bincount([sampler(logits, at) for at in range(draws)], minlength=12)
    assert set(np.flatnonzero(counts)) <= set(expected)
    if not filters:
        assert counts.min() > 0
    statistic = sum((counts[i] - draws * p) ** 2 / (draws * p) for i, p in expected.items())
    freedom = max(len(expected) - 1, 1)
    # Wilson and Hilferty's approximation of the quantile, 3.719 standard deviations up.
    limit = freedom * (1 - 2 / (9 * freedom) + 3.719 * math.sqrt(2 / (9 * freedom))) ** 3
    assert statistic < limit


def test_seeds_and_positions_give_draws_of_their_own():
    logits = np.zeros(1000, dtype=np.float32)
    by_position = [Sampler(1.0, seed=3)(logits, at) for at in range(50)]
    by_seed = [Sampler(1.0, seed=seed)(logits, 3) for seed in range(50)]
    assert len(set(by_position)) > 40 and len(set(by_seed)) > 40
    # Pinned: Philox's words are the same in every NumPy, and so is what is made of them.
    assert by_position[:4] == [934, 758, 332, 932]


def test_equal_logits_share_evenly_and_the_border_goes_to_lower_ids():
    logits = np.zeros(10, dtype=np.float32)
    assert Sampler(1.0, top_k=3).kept(logits)[0].tolist() == [0, 1, 2]
    assert Sampler(1.0, top_p=0.35).kept(logits)[0].tolist() == [0, 1, 2, 3]
    assert Sampler(1.0, top_p=0.3).kept(logits)[0].tolist() == [0, 1, 2]  # their sum reaches it
    assert Sampler(1.0, min_p=1.0).kept(logits)[0].tolist() == list(range(10))
    logits[[7, 4]] = 2
    assert Sampler(1.0, top_k=3).kept(logits)[0].tolist() == [0, 4, 7]
    assert Sampler(1.0, top_k=1).kept(logits)[0].tolist() == [4]


def test_borders_of_each_parameter():
    logits = np.array([1.0, 3.0, 2.0, -50.0, 3.0], dtype=np.float32)
    everything = [0, 1, 2, 3, 4]
    for same in ({}, {"top_p": 1.0}, {"top_k": 5}, {"top_k": 10**9}, {"min_p": 0.0}):
        assert Sampler(1.0, **same).kept(logits)[0].tolist() == everything
    for one in ({"top_k": 1}, {"top_p": 1e-300}, {"top_k": 4, "top_p": 0.2}):
        assert Sampler(1.0, **one).kept(logits)[0].tolist() == [1]
    assert Sampler(1.0, min_p=1.0).kept(logits)[0].tolist() == [1, 4]
    for tiny in (1e-5, 1e-30):  # only what is equal to the best keeps any weight
        ids, weights = Sampler(tiny).kept(logits)
        assert ids.tolist() == everything and weights.tolist() == [0, 1, 0, 0, 1]
        assert {Sampler(tiny, seed=s)(logits, 0) for s in range(30)} == {1, 4}
    assert {Sampler(1e30, seed=s)(logits, 0) for s in range(60)} == set(everything)
    # A temperature so high that float32 quotients are equal: ranks are those of the logits.
    assert Sampler(1e30, top_k=2).kept(logits)[0].tolist() == [1, 4]
    assert Sampler(1.0)(np.array([7], dtype=np.float32), 5) == 0


def test_masked_tokens_are_never_drawn():
    logits = np.array([-np.inf, 0.0, -np.inf, 0.0], dtype=np.float32)
    assert {Sampler(1.0, seed=s)(logits, 0) for s in range(30)} == {1, 3}
    assert Sampler(1.0, top_k=3).kept(logits)[1].tolist() == [0, 1, 1]
    assert Sampler()(logits, 0) == 1


def test_the_largest_number_that_can_be_drawn_is_still_some_token(monkeypatch):
    monkeypatch.setattr(Sampler, "_uniform", lambda self, position: 1 - 2.0**-53)
    for n in (1, 3, 1000):
        logits = np.linspace(0, -200, n).astype(np.float32)
        token = Sampler(1.0)(logits, 0)
        assert 0 <= token < n and logits[token] > -90
    monkeypatch.setattr(Sampler, "_uniform", lambda self, position: 0.0)
    assert Sampler(1.0)(np.array([-200, 0, 0], dtype=np.float32), 0) == 1


@given(logit_lists)
def test_greedy_ignores_filters_and_takes_the_lowest_id_on_ties(logits):
    best = int(np.argmax(logits))
    for sampler in (Sampler(), Sampler(seed=5, top_k=3, top_p=0.5, min_p=0.9)):
        assert sampler(logits, 3) == best == greedy(logits)[0]
        assert sampler.kept(logits)[0].tolist() == [best]
    rest = np.delete(logits, best)
    expected = float(logits[best] - rest.max()) if len(rest) else math.inf
    assert margin(logits, best) == greedy(logits)[1] == expected


def compiled_variants():
    try:
        with backend.using("portable"):
            import kernels_pyx

            return list(kernels_pyx.VARIANTS)
    except CourseError:
        return []


def test_every_compiled_variant_draws_the_same_tokens():
    variants = compiled_variants()
    if not variants:
        pytest.skip("kernels are not compiled")
    logits = np.random.default_rng(0).standard_normal(5000).astype(np.float32) * 4
    seen = set()
    for variant in variants:
        with backend.using(variant):
            draws = [
                Sampler(0.9, top_p=0.97, seed=seed)(logits, at)
                for seed in range(3) for at in range(40)
            ]
            seen.add((tuple(draws), Sampler(1.3, min_p=0.001).kept(logits)[1].tobytes()))
    assert len(seen) == 1
    with backend.using("numpy"):  # rounds exp otherwise; a draw would have to hit a border
        assert [Sampler(0.9, top_p=0.97, seed=s)(logits, a) for s in range(3) for a in range(40)
                ] == draws


@pytest.mark.parametrize(("wrong", "words"), [
    ({"temperature": -0.1}, "temperature must be 0 (greedy) or from 1e-30 to 1e30, not -0.1"),
    ({"temperature": 1e-31}, "temperature must be 0 (greedy) or from 1e-30 to 1e30, not 1e-31"),
    ({"temperature": 10**400}, "temperature must be 0 (greedy) or from"),
    ({"temperature": 1e31}, "temperature must be 0 (greedy) or from"),
    ({"temperature": math.nan}, "temperature must be a finite number, not nan"),
    ({"temperature": math.inf}, "temperature must be a finite number, not inf"),
    ({"temperature": "1"}, "temperature must be a finite number, not '1'"),
    ({"temperature": True}, "temperature must be a finite number, not True"),
    ({"top_k": 0}, "top_k must be an integer of at least 1 or None, not 0"),
    ({"top_k": 2.0}, "top_k must be an integer"),
    ({"top_p": 0}, "top_p must be above 0 and at most 1, not 0"),
    ({"top_p": 1.01}, "top_p must be above 0 and at most 1, not 1.01"),
    ({"top_p": None}, "top_p must be a finite number, not None"),
    ({"min_p": -0.1}, "min_p must be from 0 to 1, not -0.1"),
    ({"min_p": 1.1}, "min_p must be from 0 to 1, not 1.1"),
    ({"min_p": math.nan}, "min_p must be a finite number"),
    ({"seed": -1}, "seed must be an integer from 0 to 2^64 - 1, not -1"),
    ({"seed": 2**64}, "seed must be an integer from 0"),
    ({"seed": True}, "seed must be an integer from 0"),
])
def test_wrong_parameters_are_refused(wrong, words):
    with pytest.raises(ValueError) as error:
        Sampler(**wrong)
    assert words in str(error.value) and "\n" not in str(error.value)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize(("bad", "words"), [
    ([1, math.nan, 2], "logits hold NaN"), ([1, math.inf], "logits hold infinity"),
    ([-math.inf, -math.inf], "nothing but -infinity"), ([], "at least one number"),
    ([[1.0]], "logits must have 1 dimensions"),
])
def test_logits_that_mean_nothing_are_refused(temperature, bad, words):
    sampler = Sampler(temperature)
    for call in (lambda x: sampler(x, 0), sampler.kept):
        with pytest.raises(ValueError, match=words):
            call(np.array(bad, dtype=np.float32))
    with pytest.raises(TypeError):
        sampler.kept(np.array(["a"]))
    if temperature:
        with pytest.raises(TypeError, match="position must be an integer"):
            sampler(np.zeros(3, np.float32), 1.5)
