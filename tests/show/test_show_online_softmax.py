"""The online-softmax explorer takes the library's own steps, token by token."""

from __future__ import annotations

import re

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from course_lib import attention
from course_lib.lab.online_trace import (
    ORDERS,
    arrange,
    expected_rescales,
    trace_online_softmax,
)
from course_lib.show import OnlineSoftmaxExplorer
from tests.tiny_checkpoint import tiny_engine

F32 = np.float32
SCORES = arrays(F32, st.integers(1, 30), elements=st.sampled_from(
    [-np.inf, -60.0, -1.5, 0.0, 0.25, 3.0, 3.0000002, 70.0]).map(F32))


@pytest.fixture(scope="module")
def engine(tmp_path_factory):
    return tiny_engine(tmp_path_factory, max_position_embeddings=512)


@pytest.fixture(scope="module")
def explorer(engine):
    return OnlineSoftmaxExplorer(engine)


@settings(max_examples=80, deadline=None)
@given(SCORES, st.integers(0, 5))
def test_the_trace_ends_in_the_librarys_bits(scores, seed):
    v = np.random.default_rng(seed).standard_normal((len(scores), 3)).astype(F32)
    trace = trace_online_softmax(scores, v)
    for read in range(1, len(scores) + 1):  # and every state is the result so far
        total, acc = trace.total[read - 1], trace.acc[read - 1]
        so_far = acc / total if total > 0 else acc
        assert so_far.tobytes() == attention.online_softmax(scores[:read], v[:read]).tobytes()
    assert trace.out.tobytes() == attention.online_softmax(scores, v).tobytes()
    best = -np.inf
    for t, score in enumerate(scores):
        assert trace.grew[t] == (score > best)
        best = max(best, score)
        assert trace.max[t] == best
    assert (trace.shrink[~trace.grew] == 1).all() and trace.rescales == trace.grew.sum()


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(0, 9), min_size=1, max_size=40), st.sampled_from(ORDERS),
       st.integers(0, 9))
def test_orders_are_orders(scores, order, seed):
    ids = arrange(scores, order, seed)
    assert sorted(ids) == list(range(len(scores)))
    steps = np.diff(np.array(scores)[ids])
    assert order != "sorted" or (steps >= 0).all()
    assert order != "reversed" or (steps <= 0).all()
    assert order != "as they come" or ids.tolist() == list(range(len(scores)))


def test_rescales_by_order_and_what_chance_gives():
    scores = np.random.default_rng(0).permutation(50).astype(F32)
    v = np.ones((50, 1), F32)
    found = {order: trace_online_softmax(scores[ids], v[ids]).rescales
             for order in ORDERS for ids in [arrange(scores, order)]}
    assert found["sorted"] == 50 and found["reversed"] == 1
    several = [trace_online_softmax(scores[ids], v).rescales
               for seed in range(400) for ids in [arrange(scores, "random", seed)]]
    # The records of 50 numbers have variance H - sum 1/i^2 = 2.87: five standard errors of 400.
    assert abs(np.mean(several) - expected_rescales(50)) < 5 * (2.87 / 400) ** 0.5


def test_the_six_numbers_can_be_checked_by_eye(explorer):
    r = explorer.compute()
    trace = r["trace"]
    assert np.allclose(np.exp(trace.scores), [2, 1, 4, 1, 8, 8])
    assert np.allclose(trace.shrink, [0, 1, 0.5, 1, 0.5, 1])
    assert np.allclose(trace.total, [1, 1.5, 1.75, 2, 2, 3])
    assert np.allclose(trace.out, 45) and r["rescales"] == 3


def test_the_models_stream_is_that_of_exact_attention(engine, explorer):
    study = explorer._study
    layer, head = study.retrieval_head
    rows = study.record.rows(study.value_step, layer, head)
    q = study.record.queries[study.value_step, layer, head]
    exact = attention.two_pass(q[None], rows.k[None], rows.v[None])[0]
    for order in ORDERS:
        r = explorer.compute(source="model", order=order, seed=3)
        assert np.allclose(r["out"], exact, rtol=1e-4, atol=1e-5 * np.abs(rows.v).max())
        assert r["n"] == len(rows.k) == r["trace"].grew.size


def test_the_twin_prints_what_the_picture_shows(explorer):
    explorer.set(source="model", order="random", seed=2, read=7)
    r, text = explorer.result, explorer.summary()
    assert f"read 7 of {r['n']}" in text and "random order, seed 2" in text
    assert f"rescales so far: {r['rescales_so_far']}, in the end {r['rescales']}" in text
    assert f"M = {r['trace'].max[6]:.3g}" in text and f"S = {r['trace'].total[6]:.3g}" in text
    text = explorer.describe(explorer.compute(read=0))
    assert "nothing read yet" in text and "rescales so far: 0," in text
    text = explorer.describe(explorer.compute(read=6))
    assert len(re.findall(r"^ +[-\d.]+ ", text, re.M)) == 6


def test_the_source_brings_its_own_length(engine):
    explorer = OnlineSoftmaxExplorer(engine)
    assert explorer.params["read"] == 6 and explorer.controls["head"].disabled
    explorer.controls["source"].value = "model"
    n = explorer.result["n"]
    assert explorer.params["read"] == n == explorer.controls["read"].max > 6
    assert not explorer.controls["layer"].disabled and explorer.controls["seed"].disabled


def test_a_masked_stream_and_wrong_arguments(engine):
    explorer = OnlineSoftmaxExplorer(engine, scores=(-np.inf, 1.0), values=(5.0, 7.0))
    assert explorer.compute()["out"] == 7 and explorer.png()
    for wrong in ({"order": "up"}, {"source": "text"}, {"read": 7}, {"layer": 9}, {"head": -1},
                  {"scores": (1.0,)}, {"scores": (np.nan,) * 6}):
        with pytest.raises(ValueError):
            OnlineSoftmaxExplorer(engine, **wrong)
    with pytest.raises(ValueError, match="read must lie between 0 and 2"):
        explorer.set(read=3)


def test_a_stream_of_masked_tokens_alone_is_drawn(engine):
    explorer = OnlineSoftmaxExplorer(engine, scores=(-np.inf,) * 2, values=(1, 2))
    assert explorer.png() and explorer.compute()["out"] == 0


@pytest.mark.parametrize("numbers", [(np.nan, 1), (np.inf, 1), (1e39, 1), ("a", 1), (1j, 1), 1,
                                     None, ((1, 2), (3, 4)), ((1,), (2, 3))], ids=repr)
@pytest.mark.parametrize("name", ["scores", "values"])
def test_a_toy_that_is_no_list_of_numbers_is_refused_in_words(engine, name, numbers):
    toy = {"scores": (1, 2), "values": (1, 2), name: numbers}
    with pytest.raises(ValueError, match=f"^{name} must be a list of numbers from"):
        OnlineSoftmaxExplorer(engine, **toy)


def test_masked_is_a_score_not_a_value(engine):
    with pytest.raises(ValueError, match="^values must be a list of numbers"):
        OnlineSoftmaxExplorer(engine, scores=(1, 2), values=(-np.inf, 2))


def test_equal_settings_give_equal_bytes_and_no_new_artists(engine, explorer):
    explorer.set(source="toy", order="reversed", read=4)
    again = OnlineSoftmaxExplorer(engine, order="reversed", read=4)
    assert again.png() == explorer.png()
    results = [explorer.compute("model", "sorted", 9), explorer.compute(read=0)]
    for result in results:  # ticks are made while drawing, and kept
        explorer._publish(result)
    before = len(explorer.figure.findobj())
    for result in results * 3:
        explorer.draw(result)
    assert len(explorer.figure.findobj()) == before
    assert all(c.description and c.tooltip for c in explorer.controls.values())


@pytest.mark.parametrize("wrong", [{"source": "zz"}, {"order": "zz"},
                                   {"source": "model", "layer": 9},
                                   {"source": "model", "head": -1}], ids=repr)
def test_compute_refuses_what_is_not_there(explorer, wrong):
    with pytest.raises(ValueError, match="is unknown; use one of"):
        explorer.compute(**wrong)
    with pytest.raises(ValueError, match="read must be at least 0, not -1"):
        explorer.compute(read=-1)
