"""Scores, thresholds, pages and lists of prefill policies: small cases, borders and refusals.

tests/property/test_prefill_properties.py has their definitions, tests/oracle/test_xattn_golden.py
the results of their authors' own functions.
"""

import numpy as np
import pytest

from course_lib import backend
from course_lib.prefill.aggregate import AGGREGATORS, aggregate
from course_lib.prefill.find_blocks import check_threshold, find_blocks_chunked, threshold_blocks
from course_lib.prefill.quest import page_bounds, page_scores, quest_page_scores, top_pages
from course_lib.prefill.scores import flat_group_gemm_fuse_reshape, softmax_fuse_block_sum
from course_lib.prefill.xattn import (
    BAND,
    base_2_scale,
    check_blocks,
    default_chunk_size,
    xattn_estimate,
)

F32 = np.float32


def heads(num_heads=4, num_kv_heads=2, q_rows=64, k_rows=64, d=8, seed=0):
    rng = np.random.default_rng(seed)
    return (rng.standard_normal((num_heads, q_rows, d), dtype=F32),
            rng.standard_normal((num_kv_heads, k_rows, d), dtype=F32))


def estimate(q, k, **options):
    return xattn_estimate(q, k, **{"stride": 4, "block_size": 16, "threshold": 0.9} | options)


both = pytest.mark.parametrize("name", ["numpy", backend.info().variant])


# --- scores --------------------------------------------------------------------------------------


@both
def test_an_antidiagonal_takes_each_query_and_each_key_once(name):
    """Query i and key j of a square of 4 meet where i + j = 3; unit vectors show which."""
    q = np.eye(4, dtype=F32)[None]
    with backend.using(name):
        for i in range(4):
            for j in range(4):
                k = np.zeros((1, 4, 4), F32)
                k[0, j, i] = 1
                assert flat_group_gemm_fuse_reshape(q, k, 4)[0, 0, 0] == (i + j == 3)


@both
def test_a_view_of_a_longer_cache_is_scored_as_a_copy(name):
    q, k = heads(k_rows=96)
    with backend.using(name):
        seen = flat_group_gemm_fuse_reshape(q, k[:, :64], 4)
        assert np.array_equal(seen, flat_group_gemm_fuse_reshape(q, k[:, :64].copy(), 4))
        odd = flat_group_gemm_fuse_reshape(q.transpose(0, 2, 1).copy().transpose(0, 2, 1),
                                           np.asfortranarray(k)[:, :64], 4)
    assert np.array_equal(seen, odd)


@both
@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_scores_refuse_nan_infinity_and_overflow(name, bad):
    q, k = heads()
    spoiled = k.copy()
    spoiled[1, 13, 5] = bad
    with backend.using(name):
        with pytest.raises(ValueError, match="k holds NaN or infinity at head 1, token 13"):
            flat_group_gemm_fuse_reshape(q, spoiled, 4)
        with pytest.raises(ValueError, match="k holds NaN"):
            estimate(q, spoiled)
        with pytest.raises(ValueError, match="q holds NaN"):
            flat_group_gemm_fuse_reshape(np.full_like(q, bad), k, 4)
        with pytest.raises(ValueError, match="too large"):
            flat_group_gemm_fuse_reshape(q * F32(1e30), k * F32(1e30), 4)


def test_scores_refuse_shapes_that_do_not_fit():
    q, k = heads()
    for arguments, message in (((q, k[:, :, :7], 4), "to fit q"), ((q[:3], k, 4), "3 query heads"),
                               ((q, k[:, :0], 4), "at least one"), ((q[:, :0], k, 4), "q must"),
                               ((q, k, 0), "stride"), ((q[0], k, 4), "3 dimensions")):
        with pytest.raises(ValueError, match=message):
            flat_group_gemm_fuse_reshape(*arguments)
    with pytest.raises(TypeError, match="stride"):
        flat_group_gemm_fuse_reshape(q, k, 4.0)


def test_block_sums_refuse_what_leaves_a_row_without_a_column():
    scores = np.zeros((1, 4, 4), F32)
    for options in ({"chunk_start": -1}, {"real_k_len": 0}):
        with pytest.raises(ValueError, match="at least one"):
            softmax_fuse_block_sum(scores, 2, scale=1.0, is_causal=True, **options)
    with pytest.raises(ValueError, match="NaN"):
        softmax_fuse_block_sum(scores * F32(np.nan), 2, scale=1.0, is_causal=True)
    with pytest.raises(ValueError, match="reshaped_block_size"):
        softmax_fuse_block_sum(scores, 0, scale=1.0, is_causal=True)


def test_scores_far_apart_underflow_to_nothing_without_a_warning():
    scores = np.array([[[0, 1e30, -1e30, 3e38]]], F32)
    sums = softmax_fuse_block_sum(scores, 2, scale=1.0, is_causal=False)
    assert sums.tolist() == [[[0.0, 1.0]]]


# --- the whole estimate --------------------------------------------------------------------------


def test_strides_and_chunks_that_do_not_divide_are_refused():
    q, k = heads()
    with pytest.raises(ValueError, match="stride 3 must divide block_size 16"):
        estimate(q, k, stride=3)
    with pytest.raises(ValueError, match="chunk_size 24 must be a multiple of block_size 16"):
        estimate(q, k, chunk_size=24)
    with pytest.raises(ValueError, match="compat"):
        estimate(q, k, compat="exakt")
    with pytest.raises(ValueError, match="64 queries do not fit behind 32 keys"):
        estimate(q, k[:, :32])
    with pytest.raises(ValueError, match="no more chunks of queries than of keys"):
        estimate(q, k[:, :32], causal=False, compat="upstream", chunk_size=32)
    assert check_blocks(8, 128) == (8, 128)


@pytest.mark.parametrize("compat", ["exact", "upstream"])
@pytest.mark.parametrize("rows", [1, 3])
def test_a_query_shorter_than_a_stride_is_one_row(compat, rows):
    """It reads what its one row chooses: the sink, the last block, and what else reaches it."""
    q, k = heads(q_rows=rows, k_rows=rows)
    sums, mask = estimate(q, k, compat=compat)
    assert sums.tolist() == [[[1.0]]] * 4 and mask.all()
    q, k = heads(q_rows=rows, k_rows=64 + rows)
    sums, mask = estimate(q, k, chunk_size=16, compat=compat, threshold=0.5)
    assert sums.shape == mask.shape == (4, 1, 5)
    np.testing.assert_allclose(sums.sum(axis=2), 1, rtol=1e-6)
    assert mask[:, 0, [0, 4]].all() and not mask.all()


def test_more_than_a_band_of_queries_is_cut_into_bands():
    q, k = heads(2, 1, BAND + 300, BAND + 700, 4)
    sums, mask = estimate(q, k, stride=4, block_size=16)
    alone, alone_mask = estimate(q[:, -16 * 3 - 12 :], k, stride=4, block_size=16)
    assert np.array_equal(sums[:, -4:], alone) and np.array_equal(mask[:, -4:], alone_mask)
    np.testing.assert_allclose(sums[:, 1:-1].sum(axis=2), 4, rtol=1e-6)


def test_upstreams_chunk_for_more_and_more_keys():
    assert [default_chunk_size(n) for n in (1, 2048, 2049, 16384, 16385, 32768, 131072, 1 << 20)
            ] == [2048, 2048, 4096, 16384, 8192, 8192, 2048, 2048]


def test_scale_is_of_base_two_with_the_length_of_the_antidiagonal():
    assert base_2_scale(8, 64) == pytest.approx(1.4426950408889634 / 64)
    assert base_2_scale(8, 64, norm=2) == base_2_scale(8, 64) / 2


# --- thresholds ----------------------------------------------------------------------------------


@pytest.mark.parametrize("compat", ["exact", "upstream"])
@pytest.mark.parametrize("threshold", [-0.1, 1.0001, 9, np.nan, np.inf, [0.5, 2.0]])
def test_a_threshold_outside_its_range_is_refused(compat, threshold):
    sums = np.ones((2, 1, 4), F32)
    with pytest.raises(ValueError, match="threshold must be in"):
        find_blocks_chunked(sums, 0, threshold, causal=False, compat=compat)
    q, k = heads()
    with pytest.raises(ValueError, match="threshold must be in"):
        estimate(q, k, threshold=threshold, compat=compat)


def test_zero_is_a_threshold_of_the_original_only():
    sums = np.ones((1, 1, 4), F32)
    with pytest.raises(ValueError, match=r"\(0, 1\]"):
        find_blocks_chunked(sums, 0, 0, causal=False)
    mask = find_blocks_chunked(sums, 0, 0, causal=False, compat="upstream")
    assert mask.tolist() == [[[True, False, False, False]]]


@pytest.mark.parametrize("given, meant", [(9, "0.9"), (95, "0.95"), (9.5, "0.95")])
def test_a_threshold_in_tenths_or_percent_is_recognized(given, meant):
    with pytest.raises(ValueError, match=f"did you mean {meant}\\?"):
        check_threshold(given)
    with pytest.raises(TypeError, match="threshold"):
        check_threshold("0.9")


def test_the_mass_strictly_before_a_block_decides():
    """2 of 4 is reached by the first block alone: the second, before which 2 stand, is not kept."""
    sums = np.array([[[2, 1, 1]]], F32)
    assert find_blocks_chunked(sums, 0, 0.5, causal=False).tolist() == [[[True, False, False]]]
    assert find_blocks_chunked(sums, 0, 0.51, causal=False).tolist() == [[[True, True, False]]]


def test_masses_are_added_in_float64():
    """2^24 + 1 is no float32 number: there, nothing would seem to come before the third block."""
    sums = np.array([[[2**24, 1, 1, 1, 1]]], F32)
    need = (2**24 + 1.5) / (2**24 + 4)
    mask = find_blocks_chunked(sums, 0, need, causal=False)
    assert mask.astype(int).tolist() == [[[1, 1, 1, 0, 0]]]
    listed = aggregate(mask, "mean_score", num_kv_heads=1, block_sums=sums, threshold=need)
    assert listed.by_head[0].tolist() == [0, 1, 2, 4]


def test_a_row_without_mass_keeps_sink_and_diagonal():
    sums = np.zeros((1, 2, 5), F32)
    assert find_blocks_chunked(sums, 2, 0.9, causal=True).astype(int).tolist() == [
        [[1, 0, 1, 0, 0], [1, 0, 0, 1, 0]]]
    assert find_blocks_chunked(sums, 0, 0.9, causal=False).astype(int).tolist() == [
        [[1, 0, 0, 0, 0]] * 2]
    trace = threshold_blocks(sums, 2, 1, causal=True)  # threshold 1: everything that is visible
    assert np.array_equal(trace.mask, trace.visible) and trace.mask[0].sum() == 3 + 4


def test_the_original_keeps_a_block_too_many_in_the_first_chunk():
    """Row 1 of chunk 0: the diagonal alone is forced, but two places are counted for it."""
    sums = np.array([[[8, 0, 0, 0], [1, 8, 0, 0], [2, 1, 8, 0], [1, 2, 3, 10]]], F32)
    exact, upstream = (find_blocks_chunked(sums, 0, 0.5, causal=True, compat=compat)[0]
                       for compat in ("exact", "upstream"))
    assert exact.astype(int).tolist() == [[1, 0, 0, 0], [1, 1, 0, 0], [1, 0, 1, 0], [1, 0, 0, 1]]
    more = (upstream & ~exact).astype(int).tolist()
    assert more == [[0, 1, 0, 0], [0] * 4, [0] * 4, [0, 0, 1, 0]]  # in row 0 one of the future
    # The same rows behind a block of history: block 0 is forced, and the rule is followed.
    behind = np.concatenate([np.zeros((1, 4, 1), F32), sums], axis=2)
    assert np.array_equal(*(find_blocks_chunked(behind, 1, 0.5, causal=True, compat=compat)
                            for compat in ("exact", "upstream")))


def test_dense_modes():
    sums = np.ones((1, 2, 4), F32)
    for mode, decoding, dense in (("prefill", True, True), ("prefill", False, False),
                                  ("decode", False, True), ("decode", True, False),
                                  ("both", True, False), ("both", False, False)):
        for compat in ("exact", "upstream"):
            mask = find_blocks_chunked(sums, 1, 0.25, mode=mode, decoding=decoding, causal=True,
                                       compat=compat)
            row, column = np.ogrid[:2, :4]
            everything = (column <= row + 1) | (compat == "upstream")
            assert np.array_equal(mask[0], everything & np.ones((2, 4), bool)) == dense


def test_arguments_of_the_threshold_that_do_not_fit_are_refused():
    sums = np.ones((2, 2, 4), F32)
    cases = (({"current_index": 3}, "from 0 to 2"), ({"current_index": -1}, "from 0 to 2"),
             ({"threshold": [0.5] * 3}, "one per head"), ({"compat": "mine"}, "compat"),
             ({"mode": "train"}, "mode"), ({"accumulate": "float16"}, "accumulate"),
             ({"accumulate": "float32"}, "upstream"), ({"block_sums": sums[:, :0]}, "at least one"),
             ({"block_sums": -sums}, "negative"), ({"block_sums": sums * np.nan}, "NaN"),
             ({"block_sums": sums[0]}, "3 dimensions"))
    for change, message in cases:
        options = {"block_sums": sums, "current_index": 0, "threshold": 0.5, "causal": True}
        with pytest.raises(ValueError, match=message):
            find_blocks_chunked(**(options | change))


# --- Quest ---------------------------------------------------------------------------------------


def test_a_page_score_takes_the_larger_end_of_each_channel():
    k = np.array([[[1, -2], [-3, 4], [5, 5]]], F32)
    assert quest_page_scores(np.array([[1, 1], [-1, 2]], F32), k, 2).tolist() == [[5, 10], [11, 5]]
    low, high = page_bounds(k, 2)
    assert low.tolist() == [[[-3, -2], [5, 5]]] and high.tolist() == [[[1, 4], [5, 5]]]


def test_a_page_score_is_rounded_up():
    """1 + 2^-30 lies between two float32 numbers: the lower one would be no bound."""
    k = np.array([[[1, 2.0**-30]]], F32)
    score = quest_page_scores(np.ones((1, 2), F32), k)[0, 0]
    assert score == np.nextafter(F32(1), F32(2))
    assert quest_page_scores(-np.ones((1, 2), F32), k)[0, 0] == -1


def test_the_last_page_is_always_read():
    scores = np.array([[3, 1, 2, 0]], F32)
    assert top_pages(scores, 1).astype(int).tolist() == [[0, 0, 0, 1]]
    assert top_pages(scores, 3).astype(int).tolist() == [[1, 0, 1, 1]]
    assert top_pages(scores, 3, keep_last=False).astype(int).tolist() == [[1, 1, 1, 0]]
    assert top_pages(scores, 9).all()


def test_quest_refuses_what_does_not_fit():
    q, k = heads()
    q = q[:, 0]
    nan = k.copy()
    nan[1, 3] = np.nan
    for call, message in ((lambda: quest_page_scores(q[:3], k), "3 query heads"),
                          (lambda: quest_page_scores(q[:, :7], k), "low and high"),
                          (lambda: quest_page_scores(q, k[:, :0]), "at least one token"),
                          (lambda: quest_page_scores(q, nan), "head 1, token 3"),
                          (lambda: quest_page_scores(q, k, 0), "page_size"),
                          (lambda: quest_page_scores(q * np.nan, k), "q holds NaN"),
                          (lambda: quest_page_scores(q * F32(1e30), k * F32(1e30)), "page scores"),
                          (lambda: page_scores(q, k, k[:, :4]), "low and high"),
                          (lambda: top_pages(np.ones((1, 0)), 1), "at least one page"),
                          (lambda: top_pages(np.ones((1, 2)), 0), "budget")):
        with pytest.raises(ValueError, match=message):
            call()


# --- lists ---------------------------------------------------------------------------------------

FOUR = np.eye(4, 6, 1, dtype=bool)[:, None]  # KV head h keeps block h + 1 and nothing else
MASS = (FOUR * F32(3) + F32(1)).astype(F32)


def test_each_rule_on_heads_that_need_different_blocks():
    def ids(rule, threshold=0.8):
        return [b.tolist() for b in aggregate(FOUR, rule, num_kv_heads=4, block_sums=MASS,
                                              threshold=threshold).by_head]

    assert ids("any") == [[0, 1, 2, 3, 4, 5]]
    assert ids("majority") == [[0, 5]]
    assert ids("per_head") == [[0, 1, 5], [0, 2, 5], [0, 3, 5], [0, 4, 5]]
    assert ids("mean_score") == [[0, 1, 2, 3, 4, 5]]
    assert ids("mean_score", 0.5) == [[0, 1, 2, 3, 5]]
    assert ids("mean_score", [0.4, 0.6, 0.5, 0.5]) == [[0, 1, 2, 3, 5]]


def test_mean_score_stops_where_the_threshold_is_reached():
    masks = np.ones((1, 1, 5), bool)

    def ids(masses, threshold):
        sums = np.array([[masses]], F32)
        return aggregate(masks, "mean_score", num_kv_heads=1, block_sums=sums,
                         threshold=threshold).by_head[0].tolist()

    assert ids([1, 4, 2, 1, 0], 0.5) == [0, 1, 4]  # 4 of 8: block 2 is not needed
    assert ids([1, 4, 2, 1, 0], 0.75) == [0, 1, 2, 4]
    assert ids([1, 4, 0, 0, 0], 0.99) == [0, 1, 4]
    assert ids([1, 4, 0, 0, 0], 1) == [0, 1, 2, 3, 4]


def test_half_of_the_votes_is_no_majority():
    masks = np.zeros((2, 2, 3), bool)
    masks[0, :, 1] = True
    assert aggregate(masks, "majority", num_kv_heads=2).by_head[0].tolist() == [0, 2]
    masks[1, 0, 1] = True
    assert aggregate(masks, "majority", num_kv_heads=2).by_head[0].tolist() == [0, 1, 2]
    # One query head of a group is enough for its KV head.
    assert aggregate(masks, "majority", num_kv_heads=1).trace.votes.tolist() == [[0, 1, 0]]


def test_reasons_of_the_first_and_the_last_block():
    masks = np.zeros((1, 1, 3), bool)
    reasons = [one.reason for one in aggregate(masks, "any", num_kv_heads=1).trace]
    assert reasons == ["safety_first", "not_selected", "safety_last"]
    masks[:, :, [0, 2]] = True
    for sink, first in ((False, "vote"), (True, "sink")):
        trace = aggregate(masks, "any", num_kv_heads=1, sink=sink).trace
        assert [one.reason for one in trace] == [first, "not_selected", "vote"]
    only = aggregate(masks[:, :, 1:2], "any", num_kv_heads=1, sink=True)
    assert only.by_head[0].tolist() == [0] and only.trace[0].reason == "safety_first"
    assert np.isnan(only.trace.scores).all() and np.isnan(only.trace[0].need)


def test_padded_query_blocks_do_not_vote():
    masks = np.zeros((1, 3, 3), bool)
    masks[0, 1:, 1] = True
    real = np.array([True, False, False])
    assert aggregate(masks, "majority", num_kv_heads=1).by_head[0].tolist() == [0, 1, 2]
    for rule in ("majority", "any", "per_head"):
        assert aggregate(masks, rule, num_kv_heads=1, real_rows=real).by_head[0].tolist() == [0, 2]


def test_a_rule_of_ones_own_is_a_plug_in(monkeypatch):
    def everyone(ballot):
        return (ballot.votes == ballot.rows).all(axis=0, keepdims=True), "vote"

    monkeypatch.setitem(AGGREGATORS, "everyone", everyone)
    masks = np.ones((2, 2, 4), bool)
    masks[1, 1, 2] = False
    assert aggregate(masks, "everyone", num_kv_heads=2).by_head[0].tolist() == [0, 1, 3]


def test_lists_refuse_what_does_not_fit():
    masks = np.ones((4, 2, 3), bool)
    for arguments, message in (
            ({"rule": "most"}, "majority, any, mean_score, per_head"),
            ({"masks": masks.astype(int)}, "bool"), ({"masks": masks[:, :0]}, "not empty"),
            ({"num_kv_heads": 3}, "4 query heads"), ({"rule": "mean_score"}, "needs block_sums"),
            ({"block_sums": np.ones((4, 2, 2))}, "shape of masks"), ({"threshold": 2}, "threshold"),
            ({"real_rows": np.zeros(2, bool)}, "at least one"),
            ({"real_rows": np.ones(3, bool)}, "real_rows")):
        options = {"masks": masks, "rule": "any", "num_kv_heads": 2} | arguments
        with pytest.raises(ValueError, match=message):
            aggregate(**options)


@pytest.mark.parametrize("size", [2, 4, 9, 10**18])
@pytest.mark.parametrize("start", [0, 3, 9, 2**63 - 6, 10**30])
def test_scores_of_any_layout_and_sizes_beyond_them(size, start):
    """What is no bad score is not called one."""
    scores = np.linspace(-3, 3, 90, dtype=np.float32).reshape(2, 5, 9)
    memory = np.zeros(scores.nbytes + 1, np.uint8)
    memory[1:] = scores.view(np.uint8).ravel()
    misaligned = np.frombuffer(memory, np.float32, scores.size, offset=1).reshape(scores.shape)
    got = softmax_fuse_block_sum(misaligned, size, scale=0.1, is_causal=True, chunk_start=start)
    want = softmax_fuse_block_sum(scores, min(size, 9), scale=0.1, is_causal=True,
                                  chunk_start=min(start, 9))
    assert np.array_equal(got, want) and got.sum() == pytest.approx(10, rel=1e-5)
