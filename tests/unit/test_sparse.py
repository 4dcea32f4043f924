"""Decode block selection and sparse attention: worked cases, bit equality, borders."""

import math

import numpy as np
import pytest

from course_lib.attention import two_pass
from course_lib.quant import quantize_rows
from course_lib.sparse import (
    REASONS,
    gather_blocks,
    importance_sums,
    n_blocks,
    probe_positions,
    probe_scores,
    select_blocks,
    select_from_scores,
    sparse_attention,
    sparse_decode_gate,
)

F32 = np.float32


def made(num_heads=4, num_kv_heads=2, n=300, d=32, seed=0):
    rng = np.random.default_rng(seed)
    q = rng.standard_normal((num_heads, d)).astype(F32)
    k, v = rng.standard_normal((2, num_kv_heads, n, d)).astype(F32)
    return q, k, v, rng.uniform(0, 1, n).astype(F32)


def test_blocks_and_probe_positions():
    assert [n_blocks(n) for n in (0, 1, 32, 33, 2061)] == [0, 1, 1, 2, 65]
    assert probe_positions(2, 100).tolist() == [64, 68, 72, 76, 80, 84, 88, 92]
    assert probe_positions(64, 2061).tolist() == list(range(2048, 2061))
    assert len(probe_positions(1, 32 + 15)) == 15
    assert probe_positions(0, 31).tolist() == list(range(0, 31, 3)) and len(range(0, 31, 3)) == 11
    assert probe_positions(0, 32, n_probe=5).tolist() == [0, 6, 12, 18, 24, 30]
    assert probe_positions(0, 32, n_probe=100).tolist() == list(range(32))
    for block in (-1, 4):
        with pytest.raises(ValueError, match="block"):
            probe_positions(block, 100)
    for bad in ({"block_size": 0}, {"n_probe": 0}):
        with pytest.raises(ValueError, match="at least 1"):
            probe_positions(0, 100, **bad)


@pytest.mark.parametrize("n_probe", [1, 5, 8, 32, 40])
@pytest.mark.parametrize("n", [1, 31, 32, 33, 95, 100])
def test_a_block_score_is_the_largest_dot_over_exactly_the_probed_rows(n, n_probe):
    q, k, _, _ = made(1, 1, n)
    scores = probe_scores(q[0], k[0], n_probe=n_probe)
    assert scores.dtype == F32 and scores.shape == (n_blocks(n),)
    for b in range(n_blocks(n)):
        rows = k[0, probe_positions(b, n, n_probe=n_probe)].astype(float)
        assert scores[b] == pytest.approx((rows @ q[0]).max(), rel=1e-5, abs=1e-5)
    unread = np.ones(n, bool)
    for b in range(n_blocks(n)):
        unread[probe_positions(b, n, n_probe=n_probe)] = False
    spoiled = k.copy()
    spoiled[0, unread] = np.nan
    assert np.array_equal(probe_scores(q[0], spoiled[0], n_probe=n_probe), scores)


def test_equal_rows_tie_exactly_wherever_they_lie():
    """A matrix product would round a row by its place, and break ties that should hold."""
    for seed in range(40):
        q, row, _, _ = made(1, 1, 1, d=48, seed=seed)
        n = 97 + seed
        for k in (np.repeat(row[0], n, axis=0), np.repeat(row[0], 2 * n, axis=0)[::2]):
            assert len(set(probe_scores(q[0], k).tolist())) == 1
            assert select_blocks(q[0], k, k_blocks=3).order.tolist() == [n_blocks(n) - 1, 1, 2]


def test_importance_sums_add_token_after_token_in_float32():
    rng = np.random.default_rng(3)
    importance = np.exp(rng.uniform(-8, 8, 2061)).astype(F32)
    want = []
    for first in range(0, 2061, 32):
        total = F32(0)
        for value in importance[first : first + 32]:
            total = F32(total + value)
        want.append(total)
    got = importance_sums(importance)
    assert got.dtype == F32 and np.array_equal(got, want)
    other_order = [importance[i : i + 32].sum() for i in range(0, 2061, 32)]
    assert not np.array_equal(other_order, want), "the sample must tell the orders apart"
    assert importance_sums([1.0, 2.0, 4.0], 2).tolist() == [3, 4]


def test_half_the_budget_rounded_up_goes_by_importance():
    probe = np.arange(40, dtype=F32)
    sums = np.arange(40, dtype=F32)[::-1]
    for k, reserved in ((1, 1), (2, 1), (3, 2), (4, 2), (31, 16), (32, 16)):
        reason = select_from_scores(probe, sums, k).reason
        assert [i for i, why in enumerate(reason) if why == "importance"] == list(range(reserved))
        assert reason.count("probe") == k - reserved


def test_at_k_1_importance_takes_the_only_slot_and_recency_never_acts():
    probe, sums = [0, 9, 0, 0], [0, 0, 5, 0]
    selection = select_from_scores(probe, sums, 1)
    assert selection.ids.tolist() == [2]
    assert selection.reason == ("not_selected", "not_selected", "importance", "not_selected")
    assert selection.recency is None and selection.evicted is None
    alone = select_from_scores(probe, None, 1)
    assert alone.ids.tolist() == [3]
    assert alone.reason == ("not_selected", "evicted_by_recency", "not_selected", "recency")


def test_k_4_is_the_first_with_a_sure_probe_slot():
    probe, sums = [0, 9, 8, 0, 0, 0, 0], [7, 0, 0, 6, 0, 0, 0]
    assert select_from_scores(probe, sums, 2).ids.tolist() == [0, 6]
    assert select_from_scores(probe, sums, 3).ids.tolist() == [0, 3, 6]
    four = select_from_scores(probe, sums, 4)
    assert four.ids.tolist() == [0, 1, 3, 6]
    assert four.order.tolist() == [0, 3, 1, 6]
    assert four.reason == ("importance", "probe", "evicted_by_recency", "importance",
                           "not_selected", "not_selected", "recency")
    assert set(four.reason) == set(REASONS)
    # The last block chosen by importance or by probe leaves the probe slot alone.
    assert select_from_scores(probe, [7, 0, 0, 0, 0, 0, 9], 2).ids.tolist() == [1, 6]
    assert select_from_scores([0, 8, 9], None, 1).reason[2] == "probe"


def test_ties_go_to_the_lower_index_and_recency_evicts_the_earliest_of_equals():
    assert select_from_scores([1, 1, 1, 1, 1], [2, 2, 2, 2, 2], 1).ids.tolist() == [0]
    selection = select_from_scores([5, 1, 5, 1, 1, 0], None, 4)  # chosen: 0, 2, 1, 3
    assert selection.order.tolist() == [0, 2, 5, 3]
    assert selection.evicted == 1 and selection.recency == 5
    # A block's low probe score does not endanger it when importance reserved it.
    kept = select_from_scores([-9, 3, 2, 0], [1, 0, 0, 0], 2)
    assert kept.reason == ("importance", "evicted_by_recency", "not_selected", "recency")


def test_an_all_zero_importance_reserves_the_first_blocks_and_none_reserves_nothing():
    probe = [0, 0, 0, 7, 6, 5, 1]
    assert select_from_scores(probe, np.zeros(7), 4).ids.tolist() == [0, 1, 3, 6]
    assert select_from_scores(probe, None, 4).ids.tolist() == [3, 4, 5, 6]


def test_ranks_start_at_one():
    selection = select_from_scores([3, 7, 7, -1], [0.5, 0, 0.5, 1], 2)
    assert selection.probe_rank.tolist() == [3, 1, 2, 4]
    assert selection.importance_rank.tolist() == [2, 4, 3, 1]


def test_tokens_of_a_selection_are_clipped_to_the_context():
    selection = select_from_scores([9, 0, 0], None, 2)
    assert selection.tokens(70, 32).tolist() == [*range(32), *range(64, 70)]
    assert selection.tokens(5, 2).tolist() == [0, 1, 4]


def test_the_gate():
    assert not sparse_decode_gate(64, 1)
    assert sparse_decode_gate(65, 1) and sparse_decode_gate(65, 2)
    assert not sparse_decode_gate(96, 3) and sparse_decode_gate(97, 3)
    assert sparse_decode_gate(9, 1, block_size=4) and not sparse_decode_gate(8, 1, block_size=4)


def test_gather_blocks_equals_fancy_indexing():
    rng = np.random.default_rng(5)
    for n in (1, 7, 8, 9, 64, 61):
        rows = rng.standard_normal((n, 3)).astype(F32)
        for _ in range(20):
            count = n_blocks(n, 8)
            ids = np.sort(rng.choice(count, rng.integers(1, count + 1), replace=False))
            tokens = [t for b in ids for t in range(b * 8, min(b * 8 + 8, n))]
            for source in (rows, rows[:, 0]):
                got = gather_blocks(source, ids, 8)
                assert np.array_equal(got, source[tokens])
            assert gather_blocks(rows, ids, 8).flags.c_contiguous


@pytest.mark.parametrize("n", [1, 5, 32, 33, 64, 65, 97, 300, 2061])
@pytest.mark.parametrize("dtype", ["f32", "q8"])
def test_all_blocks_are_bit_equal_to_dense(n, dtype):
    for seed in range(4):
        q, k, v, importance = made(n=n, d=64, seed=seed)
        rows = (k, v)
        if dtype == "q8":
            (kq, ks), (vq, vs) = quantize_rows(k), quantize_rows(v)
            rows = (kq, vq, ks, vs)
        dense = two_pass(q, *rows)
        count = n_blocks(n)
        for k_blocks in {count, count + 1, 10 * count}:
            for given in (importance, None):
                out, selections = sparse_attention(q, *rows, k_blocks=k_blocks, importance=given)
                assert out.dtype == F32
                assert np.array_equal(out.view(np.uint32), dense.view(np.uint32))
                assert all(s.ids.tolist() == list(range(count)) for s in selections)
        # Equal contiguous arrays at other addresses: what a gather would hand over.
        moved = [np.concatenate((a, a), axis=1)[:, n:] for a in rows]
        assert np.array_equal(two_pass(q, *moved), dense)


@pytest.mark.parametrize("dtype", ["f32", "q8"])
@pytest.mark.parametrize("k_blocks", [1, 2, 3, 4, 7])
def test_attention_is_exact_over_the_selected_tokens_of_each_head(dtype, k_blocks):
    q, k, v, importance = made(n=301, seed=k_blocks)
    rows, values = (k, v), (k.astype(float), v.astype(float))
    if dtype == "q8":
        (kq, ks), (vq, vs) = quantize_rows(k), quantize_rows(v)
        rows = (kq, vq, ks, vs)
        values = (kq * ks[..., None].astype(float), vq * vs[..., None].astype(float))
    out, selections = sparse_attention(q, *rows, k_blocks=k_blocks, importance=importance)
    assert len(selections) == 4
    for h, selection in enumerate(selections):
        head = rows[0][h // 2], None if dtype == "f32" else rows[2][h // 2]
        alone = select_blocks(q[h], head[0], k_scale=head[1], k_blocks=k_blocks,
                              importance=importance)
        assert np.array_equal(alone.order, selection.order)
        assert np.array_equal(alone.probe, selection.probe) and alone.reason == selection.reason
        tokens = selection.tokens(301)
        scores = values[0][h // 2, tokens] @ q[h].astype(float) / math.sqrt(32)
        weights = np.exp(scores - scores.max())
        want = weights / weights.sum() @ values[1][h // 2, tokens]
        assert np.allclose(out[h], want, rtol=1e-4, atol=1e-5)
    if k_blocks >= 4:  # below, importance and recency leave the heads no choice of their own
        assert len({tuple(s.ids.tolist()) for s in selections}) > 1


def test_selection_is_deterministic_and_leaves_its_inputs_alone():
    q, k, v, importance = made(n=2061, d=64, seed=8)
    for a in (q, k, v, importance):
        a.flags.writeable = False
    first_out, first = sparse_attention(q, k, v, k_blocks=9, importance=importance)
    shifted = np.concatenate((np.zeros((2, 1, 64), F32), k), axis=1)[:, 1:]  # other addresses
    for _ in range(5):
        for keys in (k, shifted):
            out, selections = sparse_attention(q, keys, v, k_blocks=9, importance=importance)
            assert np.array_equal(out, first_out)
            for a, b in zip(first, selections, strict=True):
                assert np.array_equal(a.order, b.order) and np.array_equal(a.probe, b.probe)


def test_a_needle_at_a_probed_offset_is_found_and_between_probes_is_missed():
    q, k, _, _ = made(1, 1, 640, seed=2)
    for offset, found in ((0, True), (4, True), (28, True), (1, False), (31, False)):
        keys = k[0] * F32(0.01)
        keys[7 * 32 + offset] = q[0]
        selection = select_blocks(q[0], keys, k_blocks=2)
        assert (selection.reason[7] == "probe") == found


def test_float_q_is_not_quantized_on_the_int8_path():
    q, k, _, _ = made(1, 1, 64)
    kq, ks = quantize_rows(k[0])
    got = probe_scores(q[0], kq, k_scale=ks)
    want = [max(float(ks[p]) * (kq[p].astype(float) @ q[0]) for p in probe_positions(b, 64))
            for b in range(2)]
    assert got.tolist() == pytest.approx(want, rel=1e-6)


def test_bad_arguments_of_selection():
    q, k, _, importance = made(1, 1, 100)
    q, k = q[0], k[0]
    kq, ks = quantize_rows(k)
    bad_q, bad_k, bad_importance = q.copy(), k.copy(), importance.copy()
    bad_q[3], bad_k[33, 1], bad_importance[50] = np.nan, np.inf, np.nan  # row 33 is not probed
    cases = [
        ("k_blocks must be at least 1", (q, k), {"k_blocks": 0}),
        ("block_size must be at least 1", (q, k), {"block_size": 0}),
        ("n_probe must be at least 1", (q, k), {"n_probe": -1}),
        ("empty", (q, k[:0]), {}),
        ("at least one query", (q[:0], k[:, :0]), {}),
        ("k and v must both have shape", (q[:5], k), {}),
        ("k and v must both have shape", (q, k[0]), {}),
        ("2 dimensions", (q[None], k), {}),
        ("q holds NaN", (bad_q, k), {}),
        ("k holds NaN or infinity at token 33", (q, bad_k), {}),
        ("each of the 100 tokens", (q, k), {"importance": importance[:99]}),
        ("each of the 100 tokens", (q, k), {"importance": importance[None]}),
        ("importance holds NaN", (q, k), {"importance": bad_importance}),
        ("need k_scale", (q, kq), {}),
        ("must have shape", (q, kq), {"k_scale": ks[:99]}),
        ("leave them out", (q, k), {"k_scale": ks}),
        ("not finite", (q, kq), {"k_scale": np.full(100, np.nan, F32)}),
    ]
    for message, arguments, options in cases:
        with pytest.raises(ValueError, match=message):
            select_blocks(*arguments, **options)
    for options in ({"k_blocks": 1.5}, {"k_blocks": None}, {"block_size": "32"}):
        with pytest.raises(TypeError, match="must be an integer"):
            select_blocks(q, k, **options)


def test_bad_arguments_of_the_pure_rule():
    cases = [([], None, 1), ([1, np.nan], None, 1), ([1, np.inf], None, 1), ([1, 2], [1], 1),
             ([1, 2], [1, np.nan], 1), ([[1, 2]], None, 1), ([1, 2], None, 0)]
    for probe, sums, k_blocks in cases:
        with pytest.raises(ValueError):
            select_from_scores(np.array(probe, F32), sums, k_blocks)
    with pytest.raises(ValueError, match="at least one token"):
        importance_sums([])
    for bad in (np.nan, np.inf, 3e38):
        with pytest.raises(ValueError, match="importance holds NaN or infinity"):
            importance_sums(np.full(40, bad, F32))


def test_bad_arguments_of_sparse_attention(recwarn):
    q, k, v, importance = made()
    for options in ({"k_blocks": 0}, {"block_size": 0}, {"n_probe": 0},
                    {"importance": importance[1:]}):
        with pytest.raises(ValueError):
            sparse_attention(q, k, v, **options)
    for spoiled in (0, 1):
        rows = [k.copy(), v.copy()]
        rows[spoiled][1, -1] = np.nan  # the last block is always read
        with pytest.raises(ValueError, match="not finite"):
            sparse_attention(q, *rows, k_blocks=2)
    with pytest.raises(ValueError, match="empty"):
        sparse_attention(q, k[:, :0], v[:, :0])
    assert not recwarn.list
