"""The spelled-out path of a token is what the engine computes."""

import numpy as np
import pytest

from course_lib import attention
from course_lib.attention_common import softmax
from course_lib.lab.softmax_check import softmax_test
from course_lib.lab.token_path import (
    ENDS,
    LAYER_STAGES,
    answer_with,
    best_token,
    ordered_path,
    token_path,
    with_value_of,
)


@pytest.fixture(scope="module")
def engine(shipped_engine):
    return shipped_engine


def test_a_path_is_what_a_step_computes(engine):
    session = engine.prefill(engine.encode("Zara's favorite food is"))
    cache, token = session.cache.copy(), engine.encode(" ramen")[0]
    path = token_path(engine.model, cache, token)
    logits = session.step(token)
    # Float32 rounding of some hundred sums of products; the logits reach 20.
    assert np.abs(path[-1].values - logits).max() < 1e-4
    assert best_token(path) == int(np.argmax(logits))
    assert cache.length == session.cache.length
    for layer in range(3):
        for ours, theirs in zip(cache.rows(layer), session.cache.rows(layer), strict=True):
            assert ours is theirs is None or np.abs(ours - theirs).max() < 1e-5


def test_weights_are_the_softmax_of_scores_and_give_the_context(engine):
    session = engine.prefill(engine.encode("Zara's favorite"))
    path = token_path(engine.model, session.cache, 5)
    stages = {s.name: s.values for s in path if s.layer == 1}
    values = session.cache.rows(1).v
    for head in range(4):
        wanted = softmax(stages["scores"][head])
        assert np.array_equal(stages["weights"][head], wanted)
        assert np.allclose(stages["context"][head], wanted @ values[head // 2], atol=1e-5)


def test_every_stage_stands_in_order_with_its_shape(engine):
    config = engine.config
    sizes = {"hidden": config.hidden_size, "heads": config.num_attention_heads,
             "kv_heads": config.num_key_value_heads, "head_dim": config.head_dim,
             "inner": config.intermediate_size, "vocab": config.vocab_size}
    session = engine.prefill(engine.encode("Zara met"))
    cached = len(session)
    path = token_path(engine.model, session.cache, 3)
    stages = [(s.name, s.layer) for s in path]
    assert len(path) == len(ENDS) + 3 * len(LAYER_STAGES)
    backwards = ordered_path(reversed(stages), sizes, cached)
    assert backwards == [(s.name, s.layer, s.values.shape) for s in path]
    with pytest.raises(ValueError, match="no stage"):
        ordered_path([("sauce", 0)], sizes, cached)


def test_an_answer_is_the_engines_and_a_wrong_softmax_is_used(engine):
    ids = engine.apply_chat_template([{"role": "user", "content":
                                       "Zara's favorite food is ramen.\nWhat is Zara's favorite "
                                       "food?"}])
    assert answer_with(engine.model, ids, attention.softmax, 5) == engine.generate(ids, 5)
    uniform = answer_with(engine.model, ids, lambda s: np.full_like(s, 1 / len(s)), 5)
    assert uniform != engine.generate(ids, 5)


def test_exactly_one_value_row_of_each_head_is_exchanged(engine):
    mine, other = (engine.prefill(engine.encode(text)).cache
                   for text in ("Zara met Olive", "Olive met Zara"))
    made = with_value_of(mine, other, layer=1, token=2)
    for layer in range(3):
        assert np.array_equal(made.rows(layer).k, mine.rows(layer).k)
        same = (made.rows(layer).v == mine.rows(layer).v).all(axis=-1)
        assert same.sum() == same.size - (2 if layer == 1 else 0)
    assert np.array_equal(made.rows(1).v[:, 2], other.rows(1).v[:, 2])


def test_the_course_softmax_passes_its_test_and_mutants_do_not():
    softmax_test(attention.softmax)
    for mutant in (lambda s: s, lambda s: np.full(len(s), np.nan), lambda s: softmax(s)[::-1],
                   lambda s: softmax(s / 2), lambda s: softmax(np.clip(s, -80, 80))):
        with pytest.raises(AssertionError):
            softmax_test(mutant)
