"""Prefill, decode, forks, importance, scores and generation of one engine."""

import itertools
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from course_lib import sparse
from course_lib.attention import causal_attention, two_pass
from course_lib.engine import Engine, generate_from
from course_lib.engine.generate import greedy
from course_lib.engine.layers import linear, rms_norm
from course_lib.engine.session import log_softmax
from course_lib.errors import CourseError
from course_lib.kvcache import KVCache
from course_lib.quant import dequantize_rows, quantize_rows
from tests.tiny_checkpoint import logit_tolerance, write_checkpoint

LAYERS, HEADS = 2, 4


@pytest.fixture(scope="module")
def config():
    return {}


@pytest.fixture(scope="module")
def engine(tmp_path_factory, config):
    folder = tmp_path_factory.mktemp("tiny")
    config.update(write_checkpoint(folder, eos_token_id=None))
    return Engine.load(folder)


def random_ids(n, seed=0):
    return np.random.default_rng(seed).integers(3, 266, n).tolist()


def same_logits(got, expected, config):
    np.testing.assert_allclose(got, expected, rtol=0, atol=2 * logit_tolerance(config, expected))


# Prefill and decode


@settings(max_examples=25, deadline=None)
@given(st.data())
def test_prefill_then_steps_equals_forward_at_every_position(engine, config, data):
    n = data.draw(st.integers(2, 140))
    m = data.draw(st.integers(1, n - 1))
    ids = random_ids(n, seed=data.draw(st.integers(0, 99)))
    whole = engine.forward(ids)
    session = engine.prefill(ids[:m])
    same_logits(session.logits, whole[m - 1], config)
    for i in range(m, n):
        assert len(session) == i
        same_logits(session.step(ids[i]), whole[i], config)


def test_decode_rows_equal_prefill_rows(engine):
    """The caches of "prefill all" and "prefill one, step the rest" hold the same keys, so each
    token was rotated to its own position."""
    ids = random_ids(70)
    by_prefill, by_steps = engine.prefill(ids).cache, engine.prefill(ids[:1])
    for token in ids[1:]:
        by_steps.step(token)
    for layer in range(LAYERS):
        for a, b in zip(by_prefill.rows(layer), by_steps.cache.rows(layer), strict=True):
            if a is not None:
                np.testing.assert_allclose(a, b, rtol=0, atol=2e-5 * np.abs(a).max())


def test_position_zero_is_not_rotated(engine):
    """RoPE sees differences of positions only, so logits cannot tell where counting starts; the
    first row of the cache can: it is the normed key itself."""
    weights = engine.model.weights
    x = weights.embedding[[77]]
    eps = engine.config.rms_norm_eps
    qkv = linear(rms_norm(x, weights.layers[0].input_norm, eps), weights.layers[0].qkv_proj)
    key = qkv[0, 32:48]
    key = rms_norm(key.reshape(2, 8), weights.layers[0].k_norm, eps)
    row = engine.prefill([77, 5]).cache.rows(0).k[:, 0]
    np.testing.assert_allclose(row, key, rtol=1e-5, atol=1e-6)


def test_same_call_same_bits(engine):
    ids = random_ids(200)
    for kv in ("f32", "q8"):
        runs = []
        for _ in range(2):
            session = engine.prefill(ids, kv=kv)
            runs.append([session.logits, *(session.step(t, decode_k=2).copy() for t in ids[:40])])
        for a, b in zip(*runs, strict=True):
            assert a.tobytes() == b.tobytes()


@pytest.mark.parametrize("kv", ["f32", "q8"])
def test_decode_k_of_all_blocks_has_the_bits_of_exact(engine, kv):
    session = engine.prefill(random_ids(170), kv=kv)
    n_blocks = math.ceil(171 / 32)
    exact = session.fork().step(9)
    for k in (n_blocks, n_blocks + 1, 1000):
        arm = session.fork()
        assert arm.step(9, decode_k=k).tobytes() == exact.tobytes()
        assert arm.last_step.blocks_read == n_blocks
    assert session.fork().step(9, decode_k=n_blocks - 1).tobytes() != exact.tobytes()


def test_short_contexts_are_dense_whatever_k(engine):
    """The engine's gate: sparse only above two blocks."""
    session = engine.prefill(random_ids(63))
    trace = []
    dense = session.fork().step(5)
    assert session.step(5, decode_k=1, trace=trace).tobytes() == dense.tobytes()  # 64 tokens
    session.step(5, decode_k=1, trace=trace)  # 65 tokens
    assert trace[0] == [[], []]
    assert [len(heads) for heads in trace[1]] == [HEADS, HEADS]
    assert session.last_step.blocks_read == 1


def test_sparse_step_is_selection_plus_two_pass(engine):
    """Every layer and head of a sparse step, recomputed from the cache it left behind."""
    ids = random_ids(190)
    session = engine.prefill(ids)
    for token in ids[:10]:
        session.step(token)
    trace, seen = [], []
    model = engine.model

    def attend(layer, q, k, v):
        cache.append(layer, k, v)
        rows = cache.rows(layer)
        padded = np.concatenate([session.importance, np.zeros(11, np.float32)])
        out = []
        for head in range(HEADS):
            kh = head // 2
            chosen = sparse.select_blocks(
                q[head, 0], rows.k[kh], k_blocks=3, n_probe=4, importance=padded
            )
            seen.append(chosen)
            tokens = chosen.tokens(201)
            out.append(two_pass(q[head], rows.k[kh, tokens][None], rows.v[kh, tokens][None]))
        return np.stack(out)

    cache = session.cache.copy()
    expected = model.logits(model.hidden([7], 200, attend)[-1])
    got = session.step(7, decode_k=3, n_probe=4, trace=trace)
    np.testing.assert_allclose(got, expected, rtol=1e-5, atol=1e-4)
    traced = list(itertools.chain(*trace[0]))
    assert len(traced) == len(seen) == LAYERS * HEADS
    for a, b in zip(traced, seen, strict=True):
        np.testing.assert_array_equal(a.ids, b.ids)
        np.testing.assert_array_equal(a.importance, b.importance)
        assert a.reason == b.reason
    assert session.last_step.blocks_read == 3


def test_block_size_is_a_parameter(engine):
    session = engine.prefill(random_ids(100), block_size=8)
    trace = []
    session.step(5, decode_k=4, trace=trace)
    assert session.cache.block_size == 8
    assert all(len(s.probe) == 13 and len(s.ids) == 4 for s in itertools.chain(*trace[0]))


def test_forced_blocks_are_read_as_well(engine):
    ids = random_ids(200)
    session = engine.prefill(ids)
    exact = session.fork().step(9)
    trace = []
    everything = session.fork()
    logits = everything.step(9, decode_k=1, force_blocks=range(7), trace=trace)
    np.testing.assert_allclose(logits, exact, rtol=1e-5, atol=1e-4)
    assert everything.last_step.blocks_read == 7
    assert all(len(s.ids) == 1 for s in itertools.chain(*trace[0]))  # the choice itself stays
    plain, one = session.fork(), session.fork()
    plain.step(9, decode_k=2)
    one.step(9, decode_k=2, force_blocks=[3, 3])
    assert plain.last_step.blocks_read == 2 < one.last_step.blocks_read <= 3
    with pytest.raises(ValueError, match="force_blocks must be block numbers 0 … 6, not \\[7\\]"):
        session.step(9, decode_k=1, force_blocks=[7])
    for bad in ([-1], [1.5], [1.0], ["1"], [True], [[1]], [2**70], 3, None):
        with pytest.raises(ValueError, match="force_blocks must be block numbers"):
            session.step(9, decode_k=1, force_blocks=bad)
    assert len(session) == 200


# Forks


@pytest.mark.parametrize("kv", ["f32", "q8"])
def test_fork_shares_nothing_that_changes(engine, kv):
    session = engine.prefill(random_ids(64), kv=kv)
    before = (
        session.logits.copy(),
        session.importance.copy(),
        [[None if a is None else a.copy() for a in session.cache.rows(i)] for i in range(LAYERS)],
    )
    fork = session.fork()
    assert fork.logits.tobytes() == session.logits.tobytes()
    fork.logits = fork.logits + 1
    first = [fork.step(t).copy() for t in (5, 6, 7)]
    fork.importance += 1
    assert len(session) == 64
    assert session.logits.tobytes() == before[0].tobytes()
    assert session.importance.tobytes() == before[1].tobytes()
    for layer in range(LAYERS):
        for a, b in zip(session.cache.rows(layer), before[2][layer], strict=True):
            assert (a is None and b is None) or a.tobytes() == b.tobytes()
    for token in (50, 51, 52):  # the other way round: the original goes another way
        session.step(token)
    again = engine.prefill(random_ids(64), kv=kv)
    assert [again.step(t).tobytes() for t in (5, 6, 7)] == [x.tobytes() for x in first]
    assert fork.model is session.model


@pytest.mark.parametrize("kv", ["f32", "q8"])
def test_forks_that_go_different_ways_share_no_spare_memory(engine, kv):
    """Both write their next rows where the block of 32 has room for them."""
    session = engine.prefill(random_ids(40), kv=kv)
    fork = session.fork()
    alone = [session.fork(), session.fork()]
    for token, other in ((5, 50), (6, 51), (7, 52)):
        session.step(token)
        fork.step(other)
    for arm, tokens, got in ((alone[0], (5, 6, 7), session), (alone[1], (50, 51, 52), fork)):
        for token in tokens:
            arm.step(token)
        assert got.logits.tobytes() == arm.logits.tobytes()
        for layer in range(LAYERS):
            for a, b in zip(got.cache.rows(layer), arm.cache.rows(layer), strict=True):
                assert (a is None and b is None) or a.tobytes() == b.tobytes()


def test_logits_are_read_only(engine):
    session = engine.prefill(random_ids(40))
    for logits in (session.logits, session.step(5), session.fork().logits):
        with pytest.raises(ValueError, match="read-only"):
            logits[0] = 1e9
    own = np.zeros(300, np.float32)
    session.logits = own
    own[7] = 1  # the caller's array stays the caller's


# q8


def test_q8_prefill_attends_to_the_rows_that_the_cache_keeps(engine, config):
    ids = random_ids(90)

    def attend(layer, q, k, v):
        k, v = (dequantize_rows(*quantize_rows(x)) for x in (k, v))
        return causal_attention(q, k, v)

    expected = engine.model.logits(engine.model.hidden(ids, 0, attend)[-1])
    session = engine.prefill(ids, kv="q8")
    assert session.logits.tobytes() == expected.tobytes()
    assert session.cache.rows(0).k.dtype == np.int8
    exact = engine.prefill(ids).logits
    assert 20 * logit_tolerance(config, exact) < np.abs(exact - expected).max() < 3
    # Decode meets the same rows: one more token by prefill or by a step.
    same_logits(session.step(9), engine.prefill([*ids, 9], kv="q8").logits, config)


# Importance


def test_importance_is_the_weight_each_position_received(engine):
    ids = random_ids(300)
    n = len(ids)
    for rule, window, queries in [
        ("all_queries", None, 300),
        ("last_window", None, 44),
        ("last_window", 10, 10),
        ("last_window", 1, 1),
        ("last_window", 1000, 300),
    ]:
        got = engine.prefill(ids, importance=rule, window=window).importance
        assert got.dtype == np.float32 and got.shape == (n,)
        # Every counted query spreads a weight of 1 in each layer and head.
        assert got.sum(dtype=np.float64) == pytest.approx(LAYERS * HEADS * queries, rel=1e-5)
        assert got[-1] > 0 and (got >= 0).all()
    assert engine.prefill(ids, importance="none").importance is None


@pytest.mark.parametrize(("n", "queries"), [(255, 255), (256, 256), (257, 1), (512 - 13, 243)])
def test_default_window_is_the_last_minibatch(engine, n, queries):
    got = engine.prefill(random_ids(n), importance="last_window").importance
    assert got.sum(dtype=np.float64) == pytest.approx(LAYERS * HEADS * queries, rel=1e-5)


def test_importance_adds_up_layer_by_layer_in_float32(engine, monkeypatch):
    """Bit for bit: layer 0 first, on one array; another order rounds differently."""
    calls = []

    def record(q, k, v, **options):
        calls.append((q, k, v))
        return causal_attention(q, k, v, **options)

    monkeypatch.setattr("course_lib.engine.prefill.causal_attention", record)
    got = engine.prefill(random_ids(200)).importance
    in_order, reversed_order = np.zeros((2, 200), np.float32)
    for q, k, v in calls:
        causal_attention(q, k, v, importance=in_order)
    for q, k, v in reversed(calls):
        causal_attention(q, k, v, importance=reversed_order)
    assert got.tobytes() == in_order.tobytes() != reversed_order.tobytes()


def test_generated_tokens_hold_no_importance(engine):
    session = engine.prefill(random_ids(100))
    trace = []
    for token in random_ids(40, seed=1):
        session.step(token, decode_k=2, trace=trace)
    assert len(session.importance) == 100
    for heads in trace[-1]:
        for selection in heads:
            assert len(selection.importance) == 5  # 140 tokens
            padded = np.concatenate([session.importance, np.zeros(40, np.float32)])
            np.testing.assert_array_equal(selection.importance, sparse.importance_sums(padded))
            assert selection.importance[4] == 0
    without = []
    session = engine.prefill(random_ids(100), importance="none")
    session.step(5, decode_k=2, trace=without)
    assert all(s.importance is None for s in itertools.chain(*without[0]))


# Sparse prefill


def test_sparse_prefill_of_all_blocks_is_exact_and_of_one_is_not(engine, config):
    ids = random_ids(400)
    exact = engine.prefill(ids)
    full = engine.prefill(ids, prefill_k=13)
    same_logits(full.logits, exact.logits, config)
    np.testing.assert_allclose(full.importance, exact.importance, rtol=1e-4)
    one = engine.prefill(ids, prefill_k=1)
    assert np.abs(one.logits - exact.logits).max() > 0.1
    # k = 1: a mini-batch sees its own last block alone, so no other block receives weight.
    sums = sparse.importance_sums(one.importance)
    assert np.flatnonzero(sums).tolist() == [7, 12]


def test_sparse_prefill_uses_the_sessions_block_size(engine):
    importance = engine.prefill(random_ids(300), prefill_k=1, block_size=8).importance
    # The last blocks of the mini-batches 0 … 255 and 256 … 299.
    sums = sparse.importance_sums(importance, 8)
    assert np.flatnonzero(sums).tolist() == [31, 37]


def test_sparse_prefill_gate(engine):
    for n, differs in ((64, False), (65, True)):
        ids = random_ids(n)
        sparse_logits = engine.prefill(ids, prefill_k=1).logits
        assert (sparse_logits.tobytes() != engine.prefill(ids).logits.tobytes()) is differs


# Scores


@pytest.mark.parametrize("kv", ["f32", "q8"])
def test_score_is_the_log_probability_under_teacher_forcing(engine, config, kv):
    ids = random_ids(120)
    session = engine.prefill(ids[:80], kv=kv)
    before = session.logits.tobytes()
    scores = session.score(ids[80:])
    assert scores.dtype == np.float32 and scores.shape == (40,)
    if kv == "f32":
        logits = engine.forward(ids).astype(np.float64)
        for i, got in enumerate(scores):
            row = logits[79 + i]
            expected = row[ids[80 + i]] - row.max() - math.log(np.exp(row - row.max()).sum())
            assert abs(got - expected) <= 4 * logit_tolerance(config, row)
    assert (len(session), session.logits.tobytes()) == (80, before)
    sparse_scores = session.score(ids[80:], decode_k=1)
    assert np.abs(sparse_scores - scores).max() > 0.1
    assert sparse_scores[0] == scores[0]  # the first id is judged by prefill


def test_log_softmax_survives_large_logits():
    got = log_softmax(np.array([1e4, 0.0, 1e4], dtype=np.float32))
    np.testing.assert_allclose(got, [-math.log(2), -1e4 - math.log(2), -math.log(2)], rtol=1e-6)
    assert got.dtype == np.float32


# Generation


def naive_greedy(engine, ids, count):
    out = []
    for _ in range(count):
        out.append(int(np.argmax(engine.forward([*ids, *out])[-1])))
    return out


def test_generate_is_greedy(engine):
    for seed in range(3):
        ids = random_ids(60, seed)
        assert engine.generate(ids, 12) == naive_greedy(engine, ids, 12)


def test_generation_record(engine):
    session = engine.prefill(random_ids(100))
    steps = []
    result = generate_from(
        session, 6, decode_k=2, trace=True, on_step=lambda token, s: steps.append((token, len(s)))
    )
    assert len(result.ids) == 6 and result.stopped == "length"
    assert len(result.logits_margin) == 6 and min(result.logits_margin) >= 0
    assert len(result.attn_ms) == len(result.blocks_read) == len(result.selections) == 5
    assert result.blocks_read == [2.0] * 5 and min(result.attn_ms) > 0
    assert steps == [(token, 101 + i) for i, token in enumerate(result.ids[:5])]
    assert len(session) == 100  # a fork was fed
    exact = engine.generate_from(session, 6)
    assert exact.blocks_read == [4.0] * 5 and exact.selections is None
    best, second = np.sort(session.logits)[[-1, -2]]
    assert exact.logits_margin[0] == pytest.approx(float(best - second))
    assert engine.generate(random_ids(100), 6, decode_k=2) == result.ids


def test_generation_passes_its_options_to_every_step(engine):
    session = engine.prefill(random_ids(200))
    plain = generate_from(session, 5, decode_k=2, trace=True)
    probed = generate_from(session, 5, decode_k=2, n_probe=1, trace=True)
    assert not np.array_equal(plain.selections[0][0][0].probe, probed.selections[0][0][0].probe)
    trace = []
    session.fork().step(plain.ids[0], decode_k=2, n_probe=1, trace=trace)
    np.testing.assert_array_equal(trace[0][0][0].probe, probed.selections[0][0][0].probe)
    forced = generate_from(session, 5, decode_k=1, force_blocks=(0, 1, 2, 3, 4, 5, 6))
    assert forced.blocks_read == [7.0] * 4
    assert forced.ids == generate_from(session, 5).ids


def test_generate_passes_its_options_on(engine, monkeypatch):
    seen = {}

    def record(session, count, decode_k, **options):
        seen.update(options, count=count, decode_k=decode_k, kv=session.cache.dtype)
        return generate_from(session, count, decode_k, **options)

    monkeypatch.setattr("course_lib.engine.engine.generate_from", record)
    engine.generate(random_ids(80), 2, decode_k=1, n_probe=3, kv="q8")
    assert seen == {"sampler": None, "n_probe": 3, "count": 2, "decode_k": 1, "kv": "q8"}
    # A request that cannot fit fails before any work is done.
    monkeypatch.setattr("course_lib.engine.engine.run_prompt", None)
    with pytest.raises(CourseError, match="do not fit"):
        engine.generate(random_ids(80), 500)


def test_attention_time_is_the_sum_over_layers_in_milliseconds(engine, monkeypatch):
    ticks = itertools.count()
    monkeypatch.setattr("course_lib.engine.decode.time.perf_counter", lambda: next(ticks) * 0.002)
    for k in (None, 1):
        result = generate_from(engine.prefill(random_ids(100)), 4, decode_k=k)
        assert result.attn_ms == pytest.approx([2.0 * LAYERS] * 3)


def test_one_new_token_needs_no_decode(engine, monkeypatch):
    session = engine.prefill(random_ids(10))
    monkeypatch.setattr("course_lib.engine.session.Session.step", None)
    assert generate_from(session, 1).ids == [int(np.argmax(session.logits))]


def test_stops_before_the_end_token(tmp_path, engine):
    ids = random_ids(30)
    free = engine.generate(ids, 10)
    known = engine.tokenizer.vocab_size  # the model knows more tokens than the tokenizer
    stop = next(t for i, t in enumerate(free) if i >= 3 and t not in free[:i] and t < known)
    at = free.index(stop)
    for several in ([stop, 0], [0, stop]):
        write_checkpoint(tmp_path, eos_token_id=several)
        stopping = Engine.load(tmp_path)
        assert stopping.generate(ids, 10) == free[:at]
    result = stopping.generate_from(stopping.prefill(ids), 10)
    assert (result.ids, result.stopped) == (free[:at], "eos")
    assert len(result.logits_margin) == at + 1 and len(result.attn_ms) == at
    write_checkpoint(tmp_path, eos_token_id=free[0])
    assert Engine.load(tmp_path).generate(ids, 10) == []


def test_ties_go_to_the_lowest_id():
    assert greedy(np.array([1, 7, 7, 7], dtype=np.float32)) == (1, 0.0)
    assert greedy(np.array([-1, -3], dtype=np.float32)) == (0, 2.0)
    assert greedy(np.array([4], dtype=np.float32)) == (0, math.inf)


def test_text_in_text_out(engine):
    ids = engine.encode("hello<|im_end|>")
    assert ids[-1] == 2 and engine.decode(ids) == "hello<|im_end|>"
    assert 2 not in engine.encode("hello<|im_end|>", allow_special=False)
    assert engine.apply_chat_template([{"role": "user", "content": "hello"}])[0] == 1


# Errors


def test_context_overflow_names_both_numbers(engine):
    limit = engine.config.max_position_embeddings
    assert len(engine.prefill(random_ids(limit))) == limit
    for call in (
        lambda: engine.prefill(random_ids(limit + 1)),
        lambda: engine.forward(random_ids(limit + 1)),
        lambda: engine.generate(random_ids(limit), 1),
        lambda: engine.generate_from(engine.prefill(random_ids(limit)), 1),
        lambda: engine.prefill(random_ids(limit)).step(5),
    ):
        with pytest.raises(CourseError, match="513 tokens do not fit the model's context of 512"):
            call()
    assert len(engine.generate(random_ids(limit - 2), 2)) == 2


@pytest.mark.parametrize(
    ("ids", "words"),
    [
        ([], "non-empty"),
        ([[1, 2]], "non-empty"),
        (7, "non-empty"),
        ([1, 300], "token id 300 is outside the vocabulary 0 … 299"),
        ([1, -1], "token id -1"),
        ([1.0, 2.0], "must be integers, not float64"),
        (["a"], "must be integers"),
        ([True], "must be integers, not bool"),
    ],
)
def test_bad_ids(engine, ids, words):
    session = engine.prefill([5])
    for call in (
        engine.forward,
        engine.prefill,
        session.score,
        lambda ids: engine.generate(ids, 3),
    ):
        with pytest.raises(ValueError, match=words):
            call(ids)


@pytest.mark.parametrize("token", [-1, 300, 1.5, None, "a", [3]])
def test_bad_token(engine, token):
    session = engine.prefill([5])
    with pytest.raises(ValueError):
        session.step(token)
    assert len(session) == 1


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"kv": "f16"}, "kv must be one of f32, q8, not 'f16'"),
        ({"importance": "last"}, "importance must be one of all_queries, last_window, none"),
        ({"importance": 3}, "importance must be one of"),
        ({"window": 5}, 'window needs importance="last_window"'),
        ({"importance": "last_window", "window": 0}, "window must be an integer of at least 1"),
        ({"prefill_k": 0}, "prefill_k must be an integer of at least 1 or None, not 0"),
        ({"block_size": 0}, "block_size must be an integer of at least 1, not 0"),
    ],
)
def test_bad_prefill_options(engine, options, words):
    for call in (engine.prefill, lambda ids, **o: engine.generate(ids, 3, **o)):
        with pytest.raises(ValueError, match=words):
            call([5, 6], **options)


@pytest.mark.parametrize("k", [0, -1, 2.5, True, "4"])
def test_bad_counts(engine, k):
    session = engine.prefill(random_ids(80))
    for call in (
        lambda: session.step(5, decode_k=k),
        lambda: session.step(5, n_probe=k),
        lambda: session.score([5, 6], decode_k=k),
        lambda: engine.generate([5], 2, decode_k=k),
        lambda: engine.generate([5], k),
        lambda: generate_from(session, 2, decode_k=k),
    ):
        with pytest.raises(ValueError, match="must be an integer of at least 1"):
            call()
    assert len(session) == 80


@pytest.mark.parametrize("error", [KeyboardInterrupt, ValueError])
def test_a_step_that_fails_half_way_leaves_the_session_as_it_was(engine, monkeypatch, error):
    session = engine.prefill(random_ids(50))
    expected = session.fork().step(9).tobytes()
    real = KVCache.append

    def fail_in_layer_one(self, layer, k, v):
        if layer == 1:
            raise error
        real(self, layer, k, v)

    with monkeypatch.context() as patch:
        patch.setattr(KVCache, "append", fail_in_layer_one)
        with pytest.raises(error):
            session.step(9)
    assert [session.cache.layer_length(layer) for layer in range(LAYERS)] == [50, 50]
    assert session.step(9).tobytes() == expected


@pytest.mark.parametrize("place", ["model.Model.logits", "decode.DecodeAttention.stats"])
def test_a_step_interrupted_after_its_last_layer_leaves_the_session_as_it_was(
    engine, monkeypatch, place
):
    session = engine.prefill(random_ids(50))
    session.step(8)
    before = session.logits.tobytes(), session.last_step
    expected = session.fork().step(9).tobytes()
    trace = []

    def interrupt(self, *arguments):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(f"course_lib.engine.{place}", interrupt)
        with pytest.raises(KeyboardInterrupt):
            session.step(9, trace=trace)
    assert [session.cache.layer_length(layer) for layer in range(LAYERS)] == [51, 51]
    assert (session.logits.tobytes(), session.last_step) == before and not trace
    assert session.step(9).tobytes() == expected


def test_a_selection_for_every_few_tokens_of_sparse_prefill(engine):
    """With one for each token every query sees its own last block; with larger groups many do not
    (they look at the last block of the group, which lies behind them)."""
    ids = np.random.default_rng(8).integers(3, 300, 200).tolist()
    dense = engine.prefill(ids)
    grouped = [engine.prefill(ids, prefill_k=1, prefill_group=group) for group in (None, 64, 1)]
    weights = [session.importance.sum() for session in grouped]
    assert weights[0] < weights[1] < weights[2]
    np.testing.assert_allclose(weights[2], dense.importance.sum(), rtol=1e-5)
    same = engine.prefill(ids, prefill_k=1, prefill_group=256)
    assert np.array_equal(same.importance, grouped[0].importance)
    with pytest.raises(ValueError, match="prefill_group needs prefill_k"):
        engine.prefill(ids, prefill_group=4)
    for name in ("prefill_group", "tile"):
        for wrong in (0, -1, 1.5, True):
            with pytest.raises(ValueError, match=name):
                engine.prefill(ids, prefill_k=1, **{name: wrong})
