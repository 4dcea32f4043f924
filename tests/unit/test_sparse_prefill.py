"""Sparse prefill: what one selection per mini-batch leaves blind, and its equality with exact."""

import math

import numpy as np
import pytest

from course_lib.attention import causal_attention
from course_lib.sparse import n_blocks, select_blocks
from course_lib.sparse_prefill import (
    PrefillTrace,
    prefill_groups,
    prefill_selection,
    sparse_prefill_attention,
)

F32 = np.float32


def made(num_heads=2, num_kv_heads=1, n=300, d=16, seed=0):
    rng = np.random.default_rng(seed)
    q = rng.standard_normal((num_heads, n, d)).astype(F32)
    k, v = rng.standard_normal((2, num_kv_heads, n, d)).astype(F32)
    return q, k, v


def test_at_k_1_a_2061_token_prompt_is_86_9_percent_blind():
    q, k, v = made(n=2061)
    importance = np.zeros(2061, F32)
    out, trace = sparse_prefill_attention(q, k, v, k_blocks=1, importance=importance)
    assert trace.blind_positions == 1792
    assert round(100 * trace.blind_fraction, 1) == 86.9
    assert not out[~trace.visible].any() and out[trace.visible].any(axis=-1).all()
    sums = np.add.reduceat(importance, np.arange(0, 2061, 32))
    assert np.flatnonzero(sums).tolist() == [*range(7, 64, 8), 64]
    assert np.allclose(sums[7:64:8], 2 * 32, rtol=1e-5), "eight tie, up to rounding"
    assert sums[64] == pytest.approx(2 * 13, rel=1e-5)
    assert all(len(s.ids) == 1 for head in trace.selections for s in head)


def test_a_position_is_blind_where_no_head_sees_anything():
    visible = np.array([[True, False, False, True], [False, False, True, True]])
    trace = PrefillTrace(visible, [(0, 4)], [[None], [None]])
    assert (trace.blind_positions, trace.blind_fraction) == (1, 0.5)


def test_at_k_2_blindness_depends_on_the_data_and_at_k_16_it_is_gone():
    blind = [sparse_prefill_attention(*made(1, 1, 2061, seed=seed), k_blocks=2)[1].blind_fraction
             for seed in range(30)]
    assert 0.06 < np.mean(blind) < 0.18
    assert np.min(blind) < 0.03 and 0.15 < np.max(blind) < 0.4
    assert sparse_prefill_attention(*made(1, 1, 2061), k_blocks=16)[1].blind_fraction == 0


def test_the_last_token_of_a_batch_chooses_and_the_last_block_is_always_in():
    q, k, v = made(n=600)
    _, trace = sparse_prefill_attention(q, k, v, k_blocks=3)
    assert trace.groups == [(0, 256), (256, 512), (512, 600)]
    for h, selections in enumerate(trace.selections):
        for (_, end), chosen in zip(trace.groups, selections, strict=True):
            alone = prefill_selection(q[h, end - 1], k[0, :end], k_blocks=3)
            decode = select_blocks(q[h, end - 1], k[0, :end], k_blocks=3, importance=None)
            assert np.array_equal(chosen.order, alone.order)
            assert np.array_equal(chosen.order, decode.order)
            assert chosen.ids[-1] == n_blocks(end) - 1
            assert chosen.importance is None


def transcribed(q, k, v, k_blocks, groups):
    """Attention of each query over the selected tokens it may see, in float64."""
    out = np.zeros(q.shape)
    importance = np.zeros(k.shape[1])
    for h in range(q.shape[0]):
        kh = h * k.shape[0] // q.shape[0]
        for first, end in groups:
            tokens = np.arange(end)
            if end > 64:
                tokens = prefill_selection(q[h, end - 1], k[kh, :end],
                                           k_blocks=k_blocks).tokens(end)
            for p in range(first, end):
                seen = tokens[tokens <= p]
                if len(seen):
                    scores = k[kh, seen].astype(float) @ q[h, p] / math.sqrt(q.shape[2])
                    weights = np.exp(scores - scores.max())
                    weights /= weights.sum()
                    out[h, p] = weights @ v[kh, seen]
                    importance[seen] += weights
    return out, importance


@pytest.mark.parametrize("k_blocks", [1, 2, 5])
@pytest.mark.parametrize("options", [{}, {"group": 8}, {"group": 7, "minibatch": 100},
                                     {"minibatch": 300}])
def test_equals_its_transcription(k_blocks, options):
    q, k, v = made(4, 2, 330, seed=k_blocks)
    groups = prefill_groups(0, 330, **options)
    importance = np.zeros(330, F32)
    out, trace = sparse_prefill_attention(q, k, v, k_blocks=k_blocks, importance=importance,
                                          **options)
    want, want_importance = transcribed(q, k, v, k_blocks, groups)
    assert out.dtype == F32
    assert np.allclose(out, want, rtol=1e-4, atol=1e-5)
    assert np.allclose(importance, want_importance, rtol=1e-4, atol=1e-4)
    assert np.array_equal(trace.visible, want.any(axis=-1))
    assert importance.sum() == pytest.approx(trace.visible.sum(), rel=1e-5)


def test_groups_split_each_mini_batch():
    assert prefill_groups(0, 600) == [(0, 256), (256, 512), (512, 600)]
    assert prefill_groups(10, 30, minibatch=8, group=3) == [
        (10, 13), (13, 16), (16, 18), (18, 21), (21, 24), (24, 26), (26, 29), (29, 30)]
    assert prefill_groups(0, 4, group=100) == [(0, 4)]
    for bad in ({"minibatch": 0}, {"group": 0}):
        with pytest.raises(ValueError, match="at least 1"):
            prefill_groups(0, 10, **bad)


def test_smaller_groups_leave_fewer_queries_blind():
    q, k, v = made(1, 1, 1024)
    blind = [sparse_prefill_attention(q, k, v, k_blocks=1, group=g)[1].blind_fraction
             for g in (256, 64, 32, 8)]
    assert blind[0] > blind[1] > blind[2] == blind[3] == 0


@pytest.mark.parametrize("n", [40, 256, 300, 700])
def test_all_blocks_are_bit_equal_to_exact_prefill(n):
    q, k, v = made(4, 2, n)
    exact_importance, importance = np.zeros((2, n), F32)
    exact = causal_attention(q, k, v, importance=exact_importance, importance_from=20)
    out, trace = sparse_prefill_attention(q, k, v, k_blocks=n_blocks(n), importance=importance,
                                          importance_from=20)
    assert np.array_equal(out, exact)
    assert np.array_equal(importance, exact_importance)
    assert trace.blind_fraction == 0 and trace.visible.shape == (4, n)


def test_a_context_of_two_blocks_is_dense():
    q, k, v = made(n=64)
    out, trace = sparse_prefill_attention(q, k, v, k_blocks=1)
    assert np.array_equal(out, causal_attention(q, k, v))
    assert trace.selections == [[None], [None]]
    q, k, v = made(n=65)
    _, trace = sparse_prefill_attention(q, k, v, k_blocks=1)
    assert trace.selections[0][0].ids.tolist() == [2]
    assert trace.visible[0].tolist() == [False] * 64 + [True]


def test_a_later_chunk_counts_its_batches_from_its_start():
    q, k, v = made(n=700)
    whole, _ = sparse_prefill_attention(q, k, v, k_blocks=2)
    part, trace = sparse_prefill_attention(q[:, 512:], k, v, start=512, k_blocks=2)
    assert np.allclose(part, whole[:, 512:], atol=1e-6)
    assert trace.groups == [(512, 700)]


def test_importance_from_and_errors():
    q, k, v = made(n=300)
    importance = np.zeros(300, F32)
    _, trace = sparse_prefill_attention(q, k, v, k_blocks=2, importance=importance,
                                        importance_from=290)
    assert importance.sum() == pytest.approx(trace.visible[:, 290:].sum(), rel=1e-5)
    before = importance.copy()
    overflow = q.copy()
    overflow[1, 280] = 3e38
    for arguments, options in (((overflow, k, v), {"k_blocks": 2}),
                               ((q, k, v), {"k_blocks": 0}),
                               ((q, k, v), {"k_blocks": 2, "block_size": 0}),
                               ((q, k, v), {"k_blocks": 2, "n_probe": 0}),
                               ((q, k, v), {"k_blocks": 2, "minibatch": 0}),
                               ((q, k, v), {"k_blocks": 2, "start": 1}),
                               ((q, k[:, :299], v[:, :299]), {"k_blocks": 2}),
                               ((q, k * F32(np.nan), v), {"k_blocks": 2})):
        with pytest.raises(ValueError):
            sparse_prefill_attention(*arguments, importance=importance, **options)
    with pytest.raises(ValueError, match="k_blocks"):
        sparse_prefill_attention(*made(n=10), k_blocks=0)
    assert np.array_equal(importance, before)
