"""On compiled kernels a token's logits do not depend on how its prompt was fed: whole, in tiles of
any size, token by token, by one thread or several, whatever the weights and the cache hold."""

from __future__ import annotations

import os

import numpy as np
import pytest

import kernels_pyx
from course_lib import backend
from course_lib.engine import Engine
from course_lib.paths import MODELS
from tests.sharing import shared_among
from tests.tiny_checkpoint import write_checkpoint

pytestmark = pytest.mark.skipif(
    not kernels_pyx.VARIANTS and os.environ.get("COURSE_REQUIRE_KERNELS") != "1",
    reason="the kernels are not compiled here",
)
FAST = tuple(v for v in kernels_pyx.VARIANTS if v != "portable-baseline") or ("portable",)


def prompt(engine, n, seed=0):
    return np.random.default_rng(seed).integers(3, engine.config.vocab_size, n).tolist()


def same(a, b):
    return np.array_equal(a.view(np.uint32), b.view(np.uint32))


def assert_any_cut_gives_the_same_logits(engine, ids, cuts):
    """Prefill of all tokens, against prefill of some and a decode step for each of the others."""
    whole = engine.forward(ids)
    for cut in cuts:
        session = engine.prefill(ids[:cut], importance="none")
        assert same(session.logits, whole[cut - 1])
        for position in range(cut, len(ids)):
            assert same(session.step(ids[position]), whole[position]), (cut, position)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tiny")
    write_checkpoint(folder, seed=3)
    return Engine.load(folder)


@pytest.mark.parametrize("variant", FAST)
def test_prefill_and_decode_of_a_small_model_have_the_same_bits(tiny, variant):
    with backend.using(variant):
        assert_any_cut_gives_the_same_logits(tiny, prompt(tiny, 75), (1, 25, 64))


def test_prefill_and_decode_of_the_shipped_model_have_the_same_bits():
    engine = Engine.load(MODELS / "needle-qwen3")
    with backend.using(FAST[0]):
        assert_any_cut_gives_the_same_logits(engine, prompt(engine, 132), (90, 128))


def test_every_variant_has_the_same_logits(tiny):
    ids = prompt(tiny, 70, seed=1)
    results = []
    for variant in FAST:
        with backend.using(variant):
            session = tiny.prefill(ids)
            results.append((session.importance, tiny.forward(ids), session.step(5, decode_k=1)))
    for result in results:
        assert all(same(a, b) for a, b in zip(result, results[0], strict=True))


@pytest.fixture(scope="module")
def packed(tmp_path_factory):
    """Engines on blocks of 8 and 4 bits: rows of these widths are made of whole blocks."""
    folder = tmp_path_factory.mktemp("packed")
    write_checkpoint(folder, seed=4, hidden_size=64, intermediate_size=96)
    return {kind: Engine.load(folder, kind) for kind in ("f32", "q8_0", "q4_0")}


@pytest.mark.parametrize("kind", ["f32", "q8_0", "q4_0"])
@pytest.mark.parametrize("variant", FAST)
def test_packed_weights_and_a_q8_cache_give_the_same_bits_in_any_chunk(packed, variant, kind):
    """Tiles of prefill, a prompt fed token by token, and three threads."""
    engine = packed[kind]
    ids = prompt(engine, 70, seed=2)
    with backend.using(variant):
        whole = engine.forward(ids)
        for cut in (1, 40):
            session = engine.prefill(ids[:cut], importance="none")
            assert same(session.logits, whole[cut - 1])
            for position in range(cut, len(ids)):
                assert same(session.step(ids[position]), whole[position]), (cut, position)
        expected = engine.prefill(ids, kv="q8")
        steps = [expected.fork().step(9, decode_k=k) for k in (None, 1)]
        for tile in (1, 7, 64):
            for threads in (1, 3):
                with shared_among(threads):
                    session = engine.prefill(ids, kv="q8", tile=tile)
                    assert same(session.logits, expected.logits)
                    assert same(session.importance, expected.importance)
                    for step, k in zip(steps, (None, 1), strict=True):
                        assert same(session.fork().step(9, decode_k=k), step)


def test_progress_counts_the_tiles_of_all_layers(tiny):
    seen = []
    tiny.prefill(prompt(tiny, 70), tile=32, on_progress=lambda *counts: seen.append(counts))
    assert seen == [(done, 6) for done in range(1, 7)]
