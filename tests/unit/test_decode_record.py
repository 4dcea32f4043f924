"""What a record of decode holds is what the engine itself saw, chose and said."""

from __future__ import annotations

import numpy as np
import pytest

from course_lib.attention import kv_head, two_pass
from course_lib.engine import generate_from
from course_lib.lab.decode_record import record_decode
from course_lib.lab.needle import NeedleOptions, prompt_of
from course_lib.lab.needle_results import run_needle
from course_lib.lab.prompt_study import PromptStudy, prompt_study
from tests.tiny_checkpoint import tiny_engine

LAYERS, HEADS, TOKENS, STEPS = 2, 4, 330, 20


@pytest.fixture(scope="module")
def engine(tmp_path_factory):
    return tiny_engine(tmp_path_factory)


@pytest.fixture(scope="module")
def study(engine):
    return PromptStudy(engine, prompt_of(engine, NeedleOptions(tokens=TOKENS), 0))


def same_selection(a, b) -> bool:
    return (a.order.tolist() == b.order.tolist() and a.reason == b.reason
            and np.array_equal(a.probe, b.probe))


@pytest.mark.parametrize("kv", ["f32", "q8"])
@pytest.mark.parametrize("k, n_probe", [(1, 8), (3, 2), (4, 32)])
def test_the_recorded_queries_select_what_the_engine_selected(engine, study, kv, k, n_probe):
    session = engine.prefill(study.prompt.ids, kv=kv)
    record = record_decode(session, STEPS, decode_k=k, n_probe=n_probe, trace=True)
    assert record.steps == len(record.generation.selections) == STEPS - 1
    for step, layers in enumerate(record.generation.selections):
        for layer, heads in enumerate(layers):
            for head, chosen in enumerate(heads):
                again = record.selection(step, layer, head, k_blocks=k, n_probe=n_probe,
                                         importance=session.importance)
                assert same_selection(again, chosen)


def test_recording_changes_nothing(engine, study):
    session = engine.prefill(study.prompt.ids)
    record = record_decode(session, STEPS)
    plain = generate_from(session, STEPS)
    assert record.generation.ids == plain.ids
    assert record.generation.logits_margin == plain.logits_margin
    assert len(session) == TOKENS and type(session.model) is type(engine.model)


def test_attention_mass_is_the_softmax_of_the_recorded_query(study):
    record = study.record
    scale = 1 / np.sqrt(study.engine.config.head_dim)
    for step, layer, head in [(0, 0, 0), (7, 1, 3), (record.steps - 1, 1, 2)]:
        n = record.context(step)
        rows = study.record.session.cache.rows(layer)
        k = rows.k[kv_head(head, HEADS, 2), :n].astype(np.float64)
        scores = k @ record.queries[step, layer, head].astype(np.float64) * scale
        weights = np.exp(scores - scores.max())
        weights /= weights.sum()
        mass = record.attention_mass(step, layer, head)
        expected = [weights[b : b + 32].sum() for b in range(0, n, 32)]
        # float32 scores below 2**6: an error of a few 2**-18 in the exponent.
        np.testing.assert_allclose(mass, expected, rtol=1e-4)
        assert abs(mass.sum() - 1) < 1e-5


def test_the_rows_of_a_step_end_with_the_token_it_feeds(engine, study):
    """The last step's query over its rows gives the context that the model itself computed."""
    session, record = study.session, study.record
    ids = record.generation.ids
    seen = {}
    fork = session.fork()
    for token in ids[:3]:
        fork.step(token)
    original = fork.model.hidden

    def spy(tokens, start, attend):
        def watched(layer, q, k, v):
            seen[layer] = attend(layer, q, k, v)
            return seen[layer]
        return original(tokens, start, watched)

    fork.model = type("Spy", (), {"hidden": staticmethod(spy), "config": fork.model.config,
                                  "logits": fork.model.logits})()
    fork.step(ids[3])
    for layer in range(LAYERS):
        for head in range(HEADS):
            rows = record.rows(3, layer, head)
            out = two_pass(record.queries[3, layer, head][None], rows.k[None], rows.v[None])[0]
            assert np.array_equal(out, seen[layer][head, 0])


def test_an_answer_without_decode_cannot_be_recorded(engine, study):
    with pytest.raises(ValueError, match="ended before decode"):
        record_decode(study.session, 1)


def test_answers_are_the_needle_experiments_own(shipped_engine):
    options = NeedleOptions(tokens=320, prompts=1, ks=(1, 4))
    study = PromptStudy(shipped_engine, prompt_of(shipped_engine, options, 0))
    exact, one, four = run_needle(shipped_engine, options)
    for k, arm in ((None, exact), (1, one), (4, four)):
        answer = study.answer(k)
        assert answer.text == arm.texts[0]
        assert answer.recalled == arm.recall and answer.identical == arm.identical_to_exact


def test_importance_is_what_prefill_records(engine, study):
    for rule in ("all_queries", "last_window"):
        expected = engine.prefill(study.prompt.ids, importance=rule).importance
        assert np.array_equal(study.importance(rule), expected)
    assert study.importance("none") is None
    with pytest.raises(ValueError, match="importance must be one of"):
        study.importance("first_window")


def test_an_answer_uses_the_importance_asked_for(engine, study):
    for rule in ("all_queries", "last_window", "none"):
        session = engine.prefill(study.prompt.ids, importance=rule)
        expected = generate_from(session, 32, 2, n_probe=4).ids
        assert list(study.answer(2, 4, rule).ids) == expected
    assert study.has_answer(2, 4, "none") and not study.has_answer(2, 5, "none")


def test_the_needles_block_and_the_query_that_reads_it(shipped_engine):
    study = PromptStudy(shipped_engine, prompt_of(shipped_engine, NeedleOptions(tokens=700), 2))
    fact, ids = study.prompt.fact, study.prompt.ids
    block = study.needle_block
    assert fact.value.split()[0][:3] in shipped_engine.decode(list(ids[block * 32:block * 32 + 40]))
    assert block in study.needle_blocks
    said = study.record.generation.ids
    value = ids[slice(*study.prompt.value_span)]
    at = study.value_step + 1
    assert tuple(said[at : at + len(value)]) == value
    layer, head = study.retrieval_head
    mass = study.record.attention_mass(study.value_step, layer, head)[block]
    assert all(study.record.attention_mass(study.value_step, la, he)[block] <= mass
               for la in range(study.record.queries.shape[1])
               for he in range(study.record.queries.shape[2]))


def test_a_study_is_shared_by_engine_and_prompt(engine, study):
    assert prompt_study(engine, study.prompt) is prompt_study(engine, study.prompt)
