"""A recorded prefill holds what the engine's own prefill counted and chose."""

from __future__ import annotations

import numpy as np
import pytest

from course_lib.lab.importance_map import importance_map
from course_lib.lab.prefill_record import prefill_record, record_prefill
from course_lib.sparse import importance_sums
from tests.tiny_checkpoint import tiny_engine

TOKENS = 300


@pytest.fixture(scope="module")
def engine(tmp_path_factory):
    return tiny_engine(tmp_path_factory)


@pytest.fixture(scope="module")
def ids(engine):
    return np.random.default_rng(3).integers(0, engine.config.vocab_size, TOKENS).tolist()


@pytest.fixture(scope="module")
def record(engine, ids):
    return record_prefill(engine, ids)


def test_recording_changes_nothing(engine, ids, record):
    plain = engine.prefill(ids)
    np.testing.assert_array_equal(record.session.logits, plain.logits)
    np.testing.assert_array_equal(record.session.importance, plain.importance)
    assert record.session.model is engine.model and record.tokens == TOKENS


@pytest.mark.parametrize("window", [None, 1, 44, TOKENS, 5000])
def test_received_sums_to_the_engines_importance(engine, ids, record, window):
    options = {} if window is None else {"importance": "last_window", "window": window}
    expected = engine.prefill(ids, **options).importance
    np.testing.assert_allclose(record.received(window).sum(axis=(0, 1)), expected, rtol=1e-5)
    assert record.received(window) is record.received(window)


@pytest.mark.parametrize("window", [None, 1, 44, 5000])
def test_the_map_of_the_weights_is_what_was_received(record, window):
    weights = record.weights(window)
    counted = TOKENS if window is None else min(window, TOKENS)
    np.testing.assert_allclose(weights.sum(axis=-1)[..., -counted:], 1, rtol=1e-5)
    assert not weights[..., : TOKENS - counted, :].any()
    blocks = importance_map(record.weights(), window)
    by_layer = record.received(window).sum(axis=1)
    np.testing.assert_allclose(blocks, [importance_sums(row) for row in by_layer], rtol=1e-5)


@pytest.mark.parametrize("window", [None, 44])
def test_what_sparse_prefill_received_is_what_it_computed(engine, ids, window):
    how = {} if window is None else {"importance": "last_window", "window": window}
    for options in ({"prefill_k": 2}, {"prefill_k": 3, "prefill_group": 32}):
        record = record_prefill(engine, ids, **options)
        expected = engine.prefill(ids, **options, **how).importance
        np.testing.assert_allclose(record.received(window).sum(axis=(0, 1)), expected, rtol=1e-5,
                                   atol=1e-6)


def test_the_trace_is_that_of_sparse_prefill(engine, ids, record):
    sparse = prefill_record(engine, tuple(ids), 1)
    assert prefill_record(engine, tuple(ids), 1) is sparse
    for layer in range(2):
        trace = sparse.trace(layer)
        assert [[s.ids.tolist() for s in head] for head in trace.selections] == [[[7], [9]]] * 4
        assert trace.blind_positions == 224 + (288 - 256)
    assert record_prefill(engine, ids, prefill_k=20).trace(0).blind_fraction == 0
    with pytest.raises(ValueError, match="exact prefill"):
        record.trace(0)


def test_a_window_of_nothing(record):
    with pytest.raises(ValueError, match="window"):
        record.received(0)


@pytest.mark.parametrize("shape, options, words", [
    ((1, 1, 2, 3), {}, "one row for each"), ((1, 1, 0, 0), {}, "one row for each"),
    ((2, 2, 2), {}, "dimension"), ((1, 1, 2, 2), {"window": 0}, "window"),
    ((1, 1, 2, 2), {"block_size": 0}, "block_size"),
])
def test_a_map_needs_square_weights(shape, options, words):
    with pytest.raises(ValueError, match=words):
        importance_map(np.zeros(shape, np.float32), **options)
