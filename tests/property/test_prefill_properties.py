"""Estimates, thresholds and lists of prefill policies against slow, literal transcriptions.

Masses are small whole numbers, full of ties, and thresholds multiples of 1/16, so that every sum
and product is exact and the transcriptions, in Python numbers, see the same numbers.
"""

import math
from contextlib import nullcontext

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from course_lib import backend
from course_lib.prefill.aggregate import AGGREGATORS, aggregate
from course_lib.prefill.find_blocks import REASONS, find_blocks_chunked, threshold_blocks
from course_lib.prefill.quest import page_bounds, quest_page_scores, top_pages
from course_lib.prefill.scores import flat_group_gemm_fuse_reshape, softmax_fuse_block_sum
from course_lib.prefill.xattn import base_2_scale, xattn_estimate

F32 = np.float32
SIXTEENTHS = st.integers(1, 16).map(lambda n: n / 16)
few = settings(max_examples=25)
some = settings(max_examples=70)


def heads(seed, num_heads, num_kv_heads, q_rows, k_rows, d):
    rng = np.random.default_rng(seed)
    q = rng.standard_normal((num_heads, q_rows, d), dtype=F32) * 2
    return q, rng.standard_normal((num_kv_heads, k_rows, d), dtype=F32)


def naive_scores(q, k, stride):
    """Loops over squares and over the antidiagonal of each, in float64; also sums of sizes."""
    rows, columns = -(-q.shape[1] // stride), -(-k.shape[1] // stride)
    out, size = np.zeros((2, len(q), rows, columns))
    for h in range(len(q)):
        keys = k[h * len(k) // len(q)].astype(float)
        for m in range(rows):
            for n in range(columns):
                for i in range(stride):
                    query, key = m * stride + stride - 1 - i, n * stride + i
                    if query < q.shape[1] and key < k.shape[1]:
                        out[h, m, n] += q[h, query].astype(float) @ keys[key]
                        size[h, m, n] += np.abs(q[h, query]).astype(float) @ np.abs(keys[key])
    return out, size


@few
@given(seed=st.integers(0, 99), group=st.integers(1, 3), kv=st.integers(1, 2),
       q_rows=st.integers(1, 20), k_rows=st.integers(1, 30), d=st.integers(1, 9),
       stride=st.integers(1, 6), compiled=st.booleans())
def test_antidiagonal_product_is_the_naive_loops(seed, group, kv, q_rows, k_rows, d, stride,
                                                 compiled):
    q, k = heads(seed, group * kv, kv, q_rows, k_rows, d)
    with nullcontext() if compiled else backend.using("numpy"):
        got = flat_group_gemm_fuse_reshape(q, k, stride)
        last = flat_group_gemm_fuse_reshape(q[:, -(-q_rows // stride) // 2 * stride :],
                                            k[:, : k_rows // stride // 2 * stride or stride],
                                            stride) if q_rows > stride else None
    expected, size = naive_scores(q, k, stride)
    assert got.dtype == F32 and got.shape == expected.shape
    assert (np.abs(got - expected) <= stride * d * 2.0**-23 * size).all()
    if last is not None:  # the bits of a sum do not depend on its neighbours
        assert np.array_equal(last, got[:, -last.shape[1] :, : last.shape[2]])


@some
@given(seed=st.integers(0, 999), rows=st.integers(1, 14), columns=st.integers(1, 20),
       size=st.integers(1, 5), start=st.integers(0, 12), causal=st.booleans(), data=st.data())
def test_block_sums_are_the_softmax_and_rows_add_up(seed, rows, columns, size, start, causal,
                                                    data):
    scores = np.random.default_rng(seed).standard_normal((2, rows, columns), dtype=F32) * 30
    last_q = data.draw(st.none() | st.integers(0, start + rows + 3))
    first_q = data.draw(st.integers(0, start + rows))
    seen = data.draw(st.none() | st.integers(1, columns + 2))
    got = softmax_fuse_block_sum(scores, size, scale=0.1, chunk_start=start, is_causal=causal,
                                 real_q_len=last_q, first_q=first_q, real_k_len=seen)
    expected = np.zeros((2, -(-rows // size), -(-columns // size)))
    valid = np.zeros(expected.shape[1])
    for r in range(rows):
        if not first_q <= start + r < (start + rows if last_q is None else last_q):
            continue
        valid[r // size] += 1
        for h in range(2):
            shown = [c for c in range(columns)
                     if c < (columns if seen is None else seen) and (not causal or c <= start + r)]
            weights = [2.0 ** (0.1 * float(scores[h, r, c])) for c in shown]
            for c, weight in zip(shown, weights, strict=True):
                expected[h, r // size, c // size] += weight / sum(weights)
    assert got.dtype == F32 and got.shape == expected.shape
    # float32 exponents of up to 20 are off by 20 * 2^-24; a tile adds `size` such weights.
    np.testing.assert_allclose(got, expected, rtol=5e-6, atol=1e-30)
    np.testing.assert_allclose(got.sum(axis=2), np.broadcast_to(valid, got.shape[:2]), rtol=1e-6)


def masses(draw, causal):
    h, q_blocks, more = draw(st.integers(1, 2)), draw(st.integers(1, 4)), draw(st.integers(0, 9))
    k_blocks = q_blocks + more
    sums = draw(arrays(F32, (h, q_blocks, k_blocks), elements=st.integers(0, 4).map(float)))
    start = draw(st.integers(0, more)) if causal else 0
    return sums, start


def literal_exact(row, diagonal, threshold):
    """One row by the rule: sink and diagonal, then the largest until the share is reached."""
    visible = list(range(len(row) if diagonal is None else diagonal + 1))
    forced = {0} if diagonal is None else {0, diagonal}
    order = sorted(visible, key=lambda b: (b not in forced, -row[b], b))
    need = threshold * sum(float(row[b]) for b in visible)
    kept, before, mass = set(), {}, 0.0
    for block in order:
        before[block] = mass
        if block in forced or mass < need or threshold == 1:
            kept.add(block)
        mass += float(row[block])
    return kept, order, before, need


@some
@given(data=st.data(), causal=st.booleans(), threshold=SIXTEENTHS)
def test_exact_threshold_is_the_rule_with_its_trace(data, causal, threshold):
    sums, start = masses(data.draw, causal)
    trace = threshold_blocks(sums, start, threshold, causal=causal)
    mask = find_blocks_chunked(sums, start, threshold, causal=causal)
    assert np.array_equal(trace.mask, mask) and mask.dtype == bool
    for h, r in np.ndindex(sums.shape[:2]):
        diagonal = start + r if causal else None
        kept, order, before, need = literal_exact(sums[h, r], diagonal, threshold)
        assert set(np.flatnonzero(mask[h, r]).tolist()) == kept
        assert trace.need[h, r, 0] == need
        for rank, block in enumerate(order, 1):
            assert trace.rank[h, r, block] == rank
            assert trace.mass_before[h, r, block] == before[block]
            assert trace.score[h, r, block] == sums[h, r, block]
            assert trace.visible[h, r, block]
        assert trace.visible[h, r].sum() == len(order)
        names = [REASONS[code] for code in trace.reason[h, r]]
        for block in range(sums.shape[2]):
            why = ("sink" if block == 0 else "diagonal" if block == diagonal else
                   "threshold" if block in kept else "not_selected")
            assert names[block] == why


def literal_upstream(row, start, rows, r, threshold, causal):
    """One row of the original, with lists only; a float stands for its float64 tensors."""
    n = len(row)
    forced = set()
    if causal:
        forced = {start + r} if start == 0 else {0, start + r}
        if r == 0:
            forced.add(0)
    need = threshold * sum(float(x) for x in row)
    others = sorted((float(x) for b, x in enumerate(row) if b not in forced), reverse=True)
    places = [0.0, 0.0, sum(float(row[b]) for b in forced), *others] if causal else [0.0, *others]
    order = sorted(range(n), key=lambda b: (b not in forced, -row[b], b))
    kept, before = set(forced), 0.0
    for block, more in zip(order, [*places, *[0.0] * n], strict=False):
        before += more
        kept.add(block if before < need else 0)
    return {b for b in kept if not causal or b < start + rows}


@some
@given(data=st.data(), causal=st.booleans(), threshold=st.integers(0, 16).map(lambda n: n / 16),
       accumulate=st.sampled_from(["float64", "float32"]))
def test_upstream_threshold_is_its_steps(data, causal, threshold, accumulate):
    sums, start = masses(data.draw, causal)
    mask = find_blocks_chunked(sums, start, threshold, causal=causal, compat="upstream",
                               accumulate=accumulate)
    for h, r in np.ndindex(sums.shape[:2]):
        kept = literal_upstream(sums[h, r], start, sums.shape[1], r, threshold, causal)
        assert set(np.flatnonzero(mask[h, r]).tolist()) == kept


@some
@given(data=st.data(), causal=st.booleans(), low=SIXTEENTHS, high=SIXTEENTHS)
def test_masks_are_nested_and_reach_the_threshold(data, causal, low, high):
    sums, start = masses(data.draw, causal)
    sums *= data.draw(st.sampled_from([1.0, 1 / 3, 1e-30, 1e30]))
    row, column = np.ogrid[: sums.shape[1], : sums.shape[2]]
    visible = np.broadcast_to(column <= row + start if causal else column >= 0, sums.shape)
    small, large, everything, each = (
        find_blocks_chunked(sums, start, t, causal=causal)
        for t in (min(low, high), max(low, high), 1, np.full(len(sums), low)))
    assert not (small & ~large).any() and not (large & ~everything).any()
    assert np.array_equal(everything, visible)
    seen = np.where(visible, sums, 0).astype(float)
    assert ((seen * large).sum(axis=2) >= max(low, high) * seen.sum(axis=2) * (1 - 1e-12)).all()
    assert np.array_equal(each, small if low <= high else large)
    # What lies in the future decides nothing.
    assert np.array_equal(find_blocks_chunked(np.where(visible, sums, 7).astype(F32), start, low,
                                              causal=causal), each)
    # The original never keeps less.
    upstream = find_blocks_chunked(np.where(visible, sums, 0).astype(F32), start, low,
                                   causal=causal, compat="upstream")
    assert not (each & ~upstream & (low < 1)).any()


@few
@given(seed=st.integers(0, 99), group=st.integers(1, 2), kv=st.integers(1, 2),
       q_rows=st.integers(1, 70), history=st.integers(0, 40), stride=st.sampled_from([1, 2, 4]),
       blocks=st.integers(1, 3), causal=st.booleans(), compiled=st.booleans())
def test_estimate_is_its_definition_for_any_length_and_chunk(
        seed, group, kv, q_rows, history, stride, blocks, causal, compiled):
    block = stride * 2 * blocks
    q, k = heads(seed, group * kv, kv, q_rows, q_rows + history, 8)
    with nullcontext() if compiled else backend.using("numpy"):
        sums, mask = xattn_estimate(q, k, stride=stride, block_size=block, threshold=0.75,
                                    causal=causal)
        for chunk in (block, 3 * block):
            again = xattn_estimate(q, k, stride=stride, block_size=block, threshold=0.75,
                                   causal=causal, chunk_size=chunk)
            assert np.array_equal(again[0], sums) and np.array_equal(again[1], mask)
    # Queries on the grid of the keys' blocks; rows before the first are not there.
    front = history % block if causal else 0
    first = history // block if causal else 0
    placed = np.concatenate([np.zeros((len(q), front, 8), F32), q], axis=1)
    scores, _ = naive_scores(placed, k, stride)
    rows, columns = scores.shape[1:]
    expected = np.zeros((len(q), -(-placed.shape[1] // block), -(-k.shape[1] // block)))
    valid = np.zeros(expected.shape[1])
    rate = math.log(2) * base_2_scale(stride, 8)
    assert rate == pytest.approx(1 / (stride * math.sqrt(8)))
    for r in range(front // stride, rows):
        here = first * block // stride + r
        weights = np.exp(rate * (scores[:, r] - scores[:, r].max(axis=1, keepdims=True)))
        if causal:
            weights[:, here + 1 :] = 0
        weights /= weights.sum(axis=1, keepdims=True)
        valid[r * stride // block] += 1
        for c in range(columns):
            expected[:, r * stride // block, c * stride // block] += weights[:, c]
    np.testing.assert_allclose(sums, expected, rtol=2e-5, atol=1e-7)
    np.testing.assert_allclose(sums.sum(axis=2), np.broadcast_to(valid, sums.shape[:2]),
                               rtol=1e-6)
    assert np.array_equal(mask, find_blocks_chunked(sums, first, 0.75, causal=causal))


@few
@given(seed=st.integers(0, 99), n=st.integers(1, 5), more=st.integers(1, 30))
def test_a_later_token_changes_no_earlier_row(seed, n, more):
    q, k = heads(seed, 2, 1, 8 * n + more, 8 * n + more, 8)
    options = {"stride": 4, "block_size": 8, "threshold": 0.75}
    sums, mask = xattn_estimate(q[:, : 8 * n], k[:, : 8 * n], **options)
    longer, longer_mask = xattn_estimate(q, k, **options)
    assert np.array_equal(longer[:, :n, :n], sums) and not longer[:, :n, n:].any()
    assert np.array_equal(longer_mask[:, :n, :n], mask) and not longer_mask[:, :n, n:].any()


@few
@given(seed=st.integers(0, 99), real=st.integers(1, 24), zeros=st.integers(1, 24))
def test_padding_of_queries_and_keys_counts_nothing(seed, real, zeros):
    """The scores of padded rows are there, but they neither vote nor are seen."""
    q, k = heads(seed, 2, 1, real, 4 * real, 8)
    alone = flat_group_gemm_fuse_reshape(q, k, 4)
    scores = flat_group_gemm_fuse_reshape(np.pad(q, ((0, 0), (0, zeros), (0, 0))),
                                          np.pad(k, ((0, 0), (0, 4 * zeros), (0, 0))), 4)
    options = {"scale": base_2_scale(4, 8), "is_causal": False}
    expected = softmax_fuse_block_sum(alone, 2, **options)
    got = softmax_fuse_block_sum(scores, 2, real_q_len=-(-real // 4), real_k_len=real, **options)
    rows, columns = expected.shape[1:]
    assert np.array_equal(got[:, :rows, :columns], expected)
    assert not got[:, rows:].any() and not got[:, :, columns:].any()
    masks = find_blocks_chunked(got, 0, 0.9, causal=False)
    lists = [aggregate(masks, "majority", num_kv_heads=1,
                       real_rows=np.arange(masks.shape[1]) < rows),
             aggregate(masks[:, :rows], "majority", num_kv_heads=1)]
    assert np.array_equal(lists[0].by_head[0], lists[1].by_head[0])
    assert np.array_equal(lists[0].trace.votes, lists[1].trace.votes)


def literal_list(masks, sums, num_kv_heads, rule, threshold):
    """Lists of blocks before the first and the last are put in, by loops."""
    num_heads, rows, blocks = masks.shape
    group = num_heads // num_kv_heads
    voted = [[[any(masks[kv * group + g, r, b] for g in range(group)) for b in range(blocks)]
              for r in range(rows)] for kv in range(num_kv_heads)]
    if rule == "per_head":
        return [{b for b in range(blocks) if any(voted[kv][r][b] for r in range(rows))}
                for kv in range(num_kv_heads)]
    count = [sum(voted[kv][r][b] for kv in range(num_kv_heads) for r in range(rows))
             for b in range(blocks)]
    if rule == "any":
        return [{b for b in range(blocks) if count[b]}]
    if rule == "majority":
        return [{b for b in range(blocks) if count[b] / (num_kv_heads * rows) > 0.5}]
    mass = [float(sums[:, :, b].sum(dtype=float)) for b in range(blocks)]
    kept, before = set(), 0.0
    for block in sorted(range(blocks), key=lambda b: (-mass[b], b)):
        if before < threshold * sum(mass) or threshold == 1:
            kept.add(block)
        before += mass[block]
    return [kept]


@some
@given(data=st.data(), kv=st.integers(1, 3), group=st.integers(1, 2), rows=st.integers(1, 3),
       blocks=st.integers(1, 6), rule=st.sampled_from(sorted(AGGREGATORS)), threshold=SIXTEENTHS)
def test_lists_are_the_rule(data, kv, group, rows, blocks, rule, threshold):
    shape = (kv * group, rows, blocks)
    masks = data.draw(arrays(bool, shape))
    sums = data.draw(arrays(F32, shape, elements=st.integers(0, 4).map(float)))
    got = aggregate(masks, rule, num_kv_heads=kv, block_sums=sums, threshold=threshold)
    expected = literal_list(masks, sums, kv, rule, threshold)
    assert len(got.by_head) == len(expected)
    trace = list(got.trace)
    assert len(trace) == len(expected) * blocks
    for i, kept in enumerate(expected):
        ids = got.by_head[i]
        assert ids.dtype == np.int64 and ids.tolist() == sorted(kept | {0, blocks - 1})
        for block in range(blocks):
            one = trace[i * blocks + block]
            assert one.block == block and one.head == (i if len(expected) > 1 else None)
            assert one.selected == (block in ids) and one.need == threshold
            why = "threshold" if rule == "mean_score" else "vote"
            assert one.reason == (why if block in kept else "safety_first" if block == 0 else
                                  "safety_last" if block == blocks - 1 else "not_selected")
            own = slice(i * group, (i + 1) * group) if len(expected) > 1 else slice(None)
            voted = masks[own].reshape(-1, group, rows, blocks).any(axis=1)
            assert one.votes == voted[:, :, block].mean()
            total = sums[own].sum()
            assert one.score == (sums[own][:, :, block].sum() / total if total else 0)


@some
@given(data=st.data(), group=st.integers(1, 3), kv=st.integers(1, 2), n=st.integers(1, 40),
       d=st.integers(1, 6), page=st.integers(1, 17))
def test_quest_bounds_every_key_of_a_page(data, group, kv, n, d, page):
    values = st.floats(-1e3, 1e3, width=32)
    q = data.draw(arrays(F32, (group * kv, d), elements=values))
    k = data.draw(arrays(F32, (kv, n, d), elements=values))
    scores = quest_page_scores(q, k, page)
    low, high = page_bounds(k, page)
    assert scores.shape == (group * kv, -(-n // page)) and scores.dtype == F32
    for h in range(group * kv):
        for p in range(scores.shape[1]):
            keys = k[h // group, p * page : (p + 1) * page].astype(float)
            products = q[h].astype(float) * keys
            size = np.abs(products).sum(axis=1).max()
            assert scores[h, p] >= products.sum(axis=1).max() - 1e-14 * size
            assert np.array_equal(low[h // group, p], keys.min(axis=0))
            assert np.array_equal(high[h // group, p], keys.max(axis=0))
            bound = np.maximum(q[h] * keys.min(axis=0), q[h] * keys.max(axis=0)).sum()
            assert scores[h, p] == pytest.approx(bound, rel=2e-7, abs=1e-12 * (1 + size))


@few
@given(scores=arrays(F32, st.tuples(st.integers(1, 3), st.integers(1, 9)),
                     elements=st.integers(0, 4).map(float)), budget=st.integers(1, 12),
       keep_last=st.booleans())
def test_top_pages_are_the_best_and_the_last(scores, budget, keep_last):
    chosen = top_pages(scores, budget, keep_last=keep_last)
    for row, kept in zip(scores, chosen, strict=True):
        last = len(row) - 1
        order = sorted(range(len(row)), key=lambda p: (keep_last and p != last, -row[p], p))
        assert set(np.flatnonzero(kept).tolist()) == set(order[:budget])


@pytest.mark.parametrize("d", [64, 128])
def test_the_other_formula_is_no_bound(d):
    """max(q . kmin, q . kmax) is below the largest product of most pages."""
    q, k = heads(d, 256, 2, 1, 128, d)
    low, high = page_bounds(k)
    wrong = np.maximum(*(np.vecdot(q.reshape(2, 128, 1, d), side[:, None])
                         for side in (low, high)))
    true = (q.reshape(2, 128, d) @ k.transpose(0, 2, 1)).reshape(2, 128, 8, 16).max(axis=3)
    assert (wrong < true).mean() > 0.5
    assert (quest_page_scores(q[:, 0], k) >= true.reshape(256, 8) - 1e-3).all()


@few
@given(seed=st.integers(0, 999), threshold=SIXTEENTHS)
def test_a_head_alone_is_the_head_among_others(seed, threshold):
    """One query head, one KV head; and several query heads that read the same KV head."""
    assume(threshold < 1)
    q, k = heads(seed, 4, 2, 40, 40, 8)
    options = {"stride": 4, "block_size": 8, "threshold": threshold}
    sums, mask = xattn_estimate(q, k, **options)
    for h in range(4):
        own = xattn_estimate(q[h : h + 1], k[h // 2 : h // 2 + 1], **options)
        assert np.array_equal(own[0][0], sums[h]) and np.array_equal(own[1][0], mask[h])
    one = aggregate(mask[:1], "per_head", num_kv_heads=1)
    assert np.array_equal(one.by_head[0], aggregate(mask[:1], "any", num_kv_heads=1).by_head[0])
