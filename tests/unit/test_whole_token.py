"""A token through all layers in one call: bits, cost and errors of the calls one by one."""

from __future__ import annotations

import os
from contextlib import contextmanager
from dataclasses import replace
from unittest.mock import patch

import numpy as np
import pytest

import kernels_pyx
from course_lib import backend
from course_lib.bench.engine_weights import QWEN3_0_6B, RandomSource
from course_lib.engine.conversion import load_weights
from course_lib.engine.decode import DecodeAttention
from course_lib.engine.model import Model
from course_lib.engine.session import Session
from course_lib.engine.weights import DenseMLP, MoELayer
from course_lib.engine.whole_token import whole_token
from course_lib.errors import CourseError
from course_lib.kvcache import KVCache
from tests.sharing import shared_among

pytestmark = pytest.mark.skipif(
    not kernels_pyx.VARIANTS and os.environ.get("COURSE_REQUIRE_KERNELS") != "1",
    reason="the kernels are not compiled here",
)
variants = pytest.mark.parametrize("variant", kernels_pyx.VARIANTS or ("portable",))
CONFIG = replace(QWEN3_0_6B, vocab_size=96, hidden_size=64, intermediate_size=96,
                 num_hidden_layers=3, num_attention_heads=4, num_key_value_heads=2, head_dim=32)


def model_of(kind="q8_0", **sizes):
    config = replace(CONFIG, **sizes)
    return Model(config, load_weights(RandomSource(config), config, kind, None))


def session_of(model, kv="q8", tokens=200, importance=True, block_size=8, rule="half_up"):
    config, rng = model.config, np.random.default_rng(1)
    cache = KVCache(config.num_hidden_layers, config.num_key_value_heads, config.head_dim, dtype=kv,
                    block_size=block_size, rule=rule)
    for layer in range(config.num_hidden_layers):
        cache.append(layer, *rng.standard_normal(
            (2, config.num_key_value_heads, tokens, config.head_dim)).astype(np.float32))
    session = Session(model, cache, block_size)
    if importance:
        session.importance = rng.uniform(0, 1, tokens).astype(np.float32)
    return session


@contextmanager
def calls(layer_by_layer=False):
    """Count what is asked of the kernel of all layers; or hide it."""
    real, seen = backend.kernel, []

    def kernel(name):
        found = real(name)
        if name != "decoder_layers" or found is None:
            return found
        if layer_by_layer:
            return None
        return lambda *arguments: seen.append(found(*arguments)) or seen[-1]

    with patch.object(backend, "kernel", kernel):
        yield seen


def everything(session, tokens, **options):
    """What steps leave behind: logits, cost, choices, and the cache to the last byte."""
    found = []
    for token in tokens:
        trace = []
        logits = session.step(token, trace=trace, **options)
        assert session.last_step.attn_ms > 0
        (layers,) = trace
        found += [logits.tobytes(), session.last_step.blocks_read, len(layers)]
        found += [(s.ids.tolist(), s.order.tolist(), s.probe.tobytes(), s.num_importance, s.recency,
                   s.evicted, None if s.importance is None else s.importance.tobytes())
                  for heads in layers for s in heads]
    rows = [session.cache.rows(layer) for layer in range(session.cache.num_layers)]
    return found + [a.tobytes() for layer in rows for a in layer if a is not None]


@variants
@pytest.mark.parametrize("kind", ["f32", "q8_0", "q4_0"])
@pytest.mark.parametrize(("kv", "decode_k"), [("f32", None), ("q8", None), ("f32", 5), ("q8", 5)])
def test_the_bits_are_those_of_the_layers_one_by_one(variant, kind, kv, decode_k, monkeypatch):
    monkeypatch.setenv("COURSE_KERNEL", variant)
    model, tokens = model_of(kind), np.random.default_rng(2).integers(0, 96, 11).tolist()
    with calls() as seen:  # across the end of a block, and of the cache's room
        whole = everything(session_of(model, kv), tokens, decode_k=decode_k)
    assert len(seen) == len(tokens) and all(finite for finite, _ in seen)
    with calls(layer_by_layer=True):
        assert everything(session_of(model, kv), tokens, decode_k=decode_k) == whole


@pytest.mark.parametrize("options", [
    {"importance": False}, {"tokens": 3}, {"tokens": 31, "block_size": 32}, {"rule": "trunc"},
    {"kv": "f32", "rule": "half_even"}])
@pytest.mark.parametrize("step", [{}, {"decode_k": 2}, {"decode_k": 2, "n_probe": 8},
                                  {"decode_k": 10**30, "n_probe": 10**30}, {"decode_k": "auto"}])
def test_options_of_a_session_and_a_step(options, step):
    model = model_of()
    with calls() as seen:
        whole = everything(session_of(model, **options), [1, 2, 3], **step)
    assert len(seen) == 3
    with calls(layer_by_layer=True):
        assert everything(session_of(model, **options), [1, 2, 3], **step) == whole


def test_a_model_without_norms_of_heads_and_with_another_shape():
    model = model_of(num_attention_heads=6, num_key_value_heads=2, head_dim=16)
    layers = tuple(replace(layer, q_norm=None, k_norm=None) for layer in model.weights.layers)
    model = Model(model.config, replace(model.weights, layers=layers))
    with calls() as seen:
        whole = everything(session_of(model), [4, 5], decode_k=3)
    assert len(seen) == 2
    with calls(layer_by_layer=True):
        assert everything(session_of(model), [4, 5], decode_k=3) == whole


@pytest.mark.parametrize("threads", [1, 2, 3])
def test_threads_change_no_bit(threads):
    whole = everything(session_of(model_of()), [7, 8], decode_k=4)
    with shared_among(threads, started=threads > 1):
        assert everything(session_of(model_of()), [7, 8], decode_k=4) == whole


class Recording(Model):
    """A model whose layers somebody may look at."""


class Watched(DecodeAttention):
    """An attention that may do something else."""


def attention(session, **options):
    chosen = {"decode_k": None, "block_size": 8, "n_probe": 8, "force_blocks": ()} | options
    return DecodeAttention(session.cache, session.importance, **chosen)


def test_where_the_layers_are_called_one_by_one():
    model = model_of()
    session = session_of(model)
    before = session.cache.length
    assert whole_token(Recording(model.config, model.weights), 1, attention(session)) is None
    watched = Watched(session.cache, None, decode_k=None, block_size=8, n_probe=8, force_blocks=())
    assert whole_token(model, 1, watched) is None
    assert whole_token(model, 1, attention(session, decode_k=3, force_blocks=(0,))) is None
    mixed = tuple(replace(layer, mlp=MoELayer(np.zeros((1, 64), np.float32), ()))
                  for layer in model.weights.layers)
    experts = Model(model.config, replace(model.weights, layers=mixed))
    assert whole_token(experts, 1, attention(session)) is None
    with backend.using("numpy"):
        assert whole_token(model, 1, attention(session)) is None
    for sizes in ({"hidden_size": 48}, {"head_dim": 24},
                  {"num_attention_heads": 3, "num_key_value_heads": 1, "head_dim": 16}):
        odd = Model(replace(model.config, **sizes), model.weights)
        assert whole_token(odd, 1, attention(session)) is None, sizes
    narrow = tuple(replace(layer, mlp=DenseMLP(np.zeros((160, 64), np.float32),
                                               np.zeros((64, 80), np.float32)))
                   for layer in model.weights.layers)
    odd = Model(model.config, replace(model.weights, layers=narrow))
    assert whole_token(odd, 1, attention(session)) is None
    assert session.cache.length == before
    assert whole_token(model, 1, attention(session)) is not None
    assert session.cache.length == before + 1


@pytest.mark.parametrize("place", ["input_norm", "post_attention_norm", "q_norm", "k_norm"])
@pytest.mark.parametrize("value", [3e38, np.nan, np.inf])
@pytest.mark.parametrize("decode_k", [None, 3])
def test_what_is_not_finite_is_named_as_layer_by_layer(place, value, decode_k):
    model = model_of()
    layers = list(model.weights.layers)
    gain = np.full_like(getattr(layers[1], place), value)
    layers[1] = replace(layers[1], **{place: gain})
    model = Model(model.config, replace(model.weights, layers=tuple(layers)))
    messages = []
    for hidden in (False, True):
        session = session_of(model)
        rows = [a.tobytes() for a in session.cache.rows(0) if a is not None]
        with calls(layer_by_layer=hidden) as seen, pytest.raises(CourseError) as caught:
            session.step(1, decode_k=decode_k)
        assert hidden or all(not finite for finite, _ in seen)
        messages.append(str(caught.value))
        assert len(session) == 200
        assert rows == [a.tobytes() for a in session.cache.rows(0) if a is not None]
    assert messages[0] == messages[1]


def test_weights_that_do_not_fit_are_refused_as_layer_by_layer():
    model = model_of()
    short = replace(model.weights.layers[2], input_norm=np.ones(32, np.float32))
    model = Model(model.config, replace(model.weights, layers=(*model.weights.layers[:2], short)))
    messages = []
    for hidden in (False, True):
        with calls(layer_by_layer=hidden), pytest.raises(CourseError) as caught:
            session_of(model).step(1)
        messages.append(str(caught.value))
    assert messages[0] == messages[1]


def test_a_cache_of_unequal_layers_is_filled_layer_by_layer():
    """Nobody feeds such a cache on purpose; the rows must still go where they belong."""
    whole = []
    for hidden in (False, True):
        session = session_of(model_of(), kv="f32")
        session.cache.append(0, *np.ones((2, 2, 1, 32), np.float32))
        assert not session.cache.holds_whole_tokens
        with calls(layer_by_layer=hidden) as seen:
            whole.append(session.step(1).tobytes())
        assert not seen
    assert whole[0] == whole[1]


def test_an_importance_that_is_not_finite_is_named_too():
    session = session_of(model_of())
    session.importance[3] = np.nan
    with calls() as seen, pytest.raises(CourseError, match="importance"):
        session.step(1, decode_k=3)
    assert not seen


def test_seconds_of_attention_are_a_part_of_the_call():
    session = session_of(model_of(), tokens=500)
    attend = attention(session)
    with calls() as seen:
        assert whole_token(session.model, 1, attend) is not None
    assert 0 < attend.seconds == seen[0][1] < 1
