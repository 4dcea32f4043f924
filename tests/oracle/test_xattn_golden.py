"""The estimates of prefill policies against stored results of their authors' own functions.

T, E, K, F, S, Q, L: golden/xattn/README.md. Block sums agree within rtol 1e-6 + atol 5e-6 (sums of
up to 128 float32 weights), masks exactly wherever the stored margin says that no rounding decides.
"""

import numpy as np
import pytest

from course_lib.prefill.aggregate import aggregate
from course_lib.prefill.find_blocks import find_blocks_chunked
from course_lib.prefill.lse import merge_attention_outputs, partial_attention
from course_lib.prefill.quest import quest_page_scores, top_pages
from course_lib.prefill.scores import flat_group_gemm_fuse_reshape, softmax_fuse_block_sum
from course_lib.prefill.xattn import base_2_scale, xattn_estimate
from tests.oracle.xattn_golden import block_sums_input, inputs, load, names

MARGIN = 1e-5
WRONG = ("E05_768_3chunks_NOPAD_BUG", "E06_q256_k900_unequal_pad")  # flagged: not to be matched
ESTIMATES = [name for name in names("T") + names("E") if name not in WRONG]


def close_sums(got, expected):
    np.testing.assert_allclose(got, expected, rtol=1e-6, atol=5e-6)


def test_every_file_is_compared():
    counts = {group: len(names(group)) for group in "TEKFSQL"}
    assert counts == {"T": 9, "E": 9, "K": 4, "F": 8, "S": 6, "Q": 3, "L": 2}
    flagged = [name for name in names("E") if load(name).meta["flags"]]
    assert flagged == list(WRONG)


def estimate(name, threshold, compat, **options):
    meta, (q, k, _) = load(name).meta, inputs(name)
    if meta["select_mode"] == "slash":  # along the diagonal: queries of a stride not reversed
        q = q.reshape(len(q), -1, meta["stride"], meta["d"])[:, :, ::-1].reshape(q.shape)
    return xattn_estimate(q, k, stride=meta["stride"], block_size=meta["block"],
                          threshold=threshold, causal=meta["causal"], compat=compat, **options)


@pytest.mark.parametrize("name", ESTIMATES)
def test_estimate(name):
    golden = load(name)
    for threshold in golden.meta["thresholds"]:
        sums, mask = estimate(name, threshold, "upstream", chunk_size=golden.meta["chunk_size"])
        _, rows, columns = mask.shape
        assert (rows, columns) == tuple(-(-golden.meta[n] // golden.meta["block"])
                                        for n in ("Lq", "Lk"))
        close_sums(sums, golden["block_sums"][:, :rows, :columns])
        sure = golden.at("margin", threshold)[:, :rows] > MARGIN
        assert sure.mean() > 0.9
        expected = golden.at("mask", threshold)[:, :rows, :columns]
        assert (mask == expected)[sure].all()
    # The exact rule sees the same masses, whatever the chunks, and never keeps more.
    exact_sums, exact_mask = estimate(name, threshold, "exact")
    close_sums(exact_sums, golden["block_sums"][:, :rows, :columns])
    assert not (exact_mask & ~mask)[sure].any()


def test_the_files_tell_exact_and_upstream_apart():
    name = "T04_causal_2048_b64_2chunks"
    _, upstream = estimate(name, 0.5, "upstream", chunk_size=1024)
    _, exact = estimate(name, 0.5, "exact", chunk_size=1024)
    more = (upstream & ~exact).sum(axis=2)
    # Rows of the first chunk but its first, where block 0 is not forced: it may come on top of
    # the blocks that reach the threshold without it, and of one block more than that.
    assert set(np.unique(more[:, 1:16])) == {0, 1, 2}
    assert not more[:, 0].any() and not more[:, 16:].any()


def test_upstream_without_padding_forgets_all_history():
    """E05: `[-0:]` is everything, so each later chunk sees nothing but itself."""
    golden, (q, k, _) = load(WRONG[0]), inputs(WRONG[0])
    sums, _ = estimate(WRONG[0], 0.9, "upstream", chunk_size=256)
    wrong = golden["block_sums"]
    for chunk in (1, 2):
        rows = slice(4 * chunk, 4 * chunk + 4)
        assert not wrong[:, rows, : 4 * chunk].any()
        assert (sums[:, rows, : 4 * chunk] > 0).all()
        tokens = slice(256 * chunk, 256 * chunk + 256)
        scores = flat_group_gemm_fuse_reshape(q[:, tokens], k[:, tokens], 8)
        alone = softmax_fuse_block_sum(scores, 8, scale=base_2_scale(8, 64), is_causal=True)
        close_sums(alone, wrong[:, rows, rows])
    close_sums(sums[:, :4], wrong[:, :4])


def test_upstream_moves_queries_whose_padding_differs():
    """E06: 256 queries behind 644 keys are taken for the last 256 of 1,024 padded ones."""
    golden, (q, k, _) = load(WRONG[1]), inputs(WRONG[1])
    scores = flat_group_gemm_fuse_reshape(q, k, 8)
    moved = softmax_fuse_block_sum(np.pad(scores, ((0, 0), (0, 0), (0, 15))), 8,
                                   scale=base_2_scale(8, 64), chunk_start=768 // 8, is_causal=True)
    close_sums(moved, golden["block_sums"])  # the keys' padding is seen, too
    # Ours: the queries stand at 644, inside block 10, and see no padding.
    sums, mask = estimate(WRONG[1], 0.9, "exact")
    assert sums.shape == (4, 5, 15)
    assert np.allclose(sums.sum(axis=2), [8, 8, 8, 8, 1], atol=1e-4)
    assert [int(np.flatnonzero(row.any(axis=0))[-1]) for row in mask.transpose(1, 0, 2)] == [
        10, 11, 12, 13, 14]


@pytest.mark.parametrize("name", names("K"))
def test_scores_and_block_sums(name):
    golden, (q, k, _) = load(name), inputs(name)
    meta = golden.meta
    scores = flat_group_gemm_fuse_reshape(q, k, meta["stride"])
    # Sums of 512 to 1,024 products, rounded in another order: some units in the last place.
    np.testing.assert_allclose(scores[:, meta["rows"]], golden["score_rows"], rtol=5e-7, atol=1e-4)
    assert base_2_scale(meta["stride"], meta["d"]) == pytest.approx(meta["scale"], rel=1e-12)
    sums = softmax_fuse_block_sum(
        scores, meta["block"] // meta["stride"], scale=meta["scale"],
        chunk_start=meta["chunk_start"], real_q_len=meta["real_q_len"], is_causal=meta["causal"])
    close_sums(sums, golden["block_sums"])


@pytest.mark.parametrize("accumulate, mask", [("float64", "mask"), ("float32", "mask32")])
@pytest.mark.parametrize("name", names("F"))
def test_find_blocks(name, accumulate, mask):
    golden, sums = load(name), block_sums_input(name)
    meta = golden.meta
    for threshold in meta["thresholds"]:
        got = find_blocks_chunked(
            sums, meta["current_index"], threshold, decoding=meta["decoding"], mode=meta["mode"],
            causal=meta["causal"], compat="upstream", accumulate=accumulate)
        expected, tied = golden.at(mask, threshold), golden["tie_rows"]
        assert np.array_equal(got[~tied], expected[~tied])
        assert np.array_equal(got.sum(axis=2), expected.sum(axis=2))
        np.testing.assert_allclose((sums * got).sum(axis=2), (sums * expected).sum(axis=2))


def test_precision_decides_at_threshold_one():
    name = "F02_causal_cur8"
    golden, sums = load(name), block_sums_input(name)
    assert not np.array_equal(golden.at("mask", 1.0), golden.at("mask32", 1.0))
    exact = find_blocks_chunked(sums, 8, 1.0, causal=True)
    row, column = np.ogrid[:8, :16]
    assert np.array_equal(exact, np.broadcast_to(column <= row + 8, exact.shape))


def history_sums(name, real_q_len=None):
    meta, (q, k, _) = load(name).meta, inputs(name)
    history = k[:, : meta["hist_blocks"] * meta["cpu_block"]]
    scores = flat_group_gemm_fuse_reshape(q, history, meta["stride"])
    return softmax_fuse_block_sum(
        scores, meta["cpu_block"] // meta["stride"], is_causal=False, real_q_len=real_q_len,
        scale=base_2_scale(meta["stride"], meta["d"]))


def history_masks(sums, threshold, **options):
    options = options or {"compat": "upstream", "accumulate": "float32"}
    return find_blocks_chunked(sums, 0, threshold, causal=False, **options)


def thresholds_of(golden):
    return [int(t[1:]) / 100 for t in golden.meta["selected"]]


def lists(masks, name, threshold, rule, **options):
    golden = load(name)
    return aggregate(masks, rule, num_kv_heads=golden.meta["Hk"], threshold=threshold,
                     block_sums=golden["block_sums_fine"], **options)


@pytest.mark.parametrize("name", names("S"))
def test_pipeline(name):
    """The masks of the history, from our sums and from the stored ones, and the lists of blocks."""
    golden, sums = load(name), history_sums(name)
    close_sums(sums, golden["block_sums_seed"])
    for threshold in thresholds_of(golden):
        expected = golden.at("mask_seed", threshold)
        masks = history_masks(golden["block_sums_seed"], threshold)
        assert np.array_equal(masks, expected)
        differs = (history_masks(sums, threshold) != expected).any(axis=2)
        # S08: four blocks of one row are equal up to the last bit of float32, 8.833336.
        assert differs.sum() <= (name[:3] == "S08")
        for head, row in np.argwhere(differs):
            stored = np.sort(golden["block_sums_seed"][head, row])
            assert np.diff(stored[:-1]).max() < 2e-6 * stored[0]
        chosen = golden.meta["selected"][f"t{round(threshold * 100):03d}"]
        vote = lists(masks, name, threshold, "majority")
        assert vote.by_head[0].tolist() == chosen["majority"]
        assert np.array_equal(vote.trace.votes[0].astype(np.float32),
                              golden.at("vote_ratio", threshold))
        union = lists(masks, name, threshold, "any")
        assert np.flatnonzero(union.trace.votes[0]).tolist() == chosen["any_all_heads"]
        score = lists(masks, name, threshold, "mean_score")
        assert score.by_head[0].tolist() == chosen["score_threshold"]
        np.testing.assert_allclose(score.trace.scores[0], golden["score_ratio"], rtol=1e-6,
                                   atol=1e-7)


@pytest.mark.parametrize("name", names("S"))
def test_pipeline_over_the_whole_context(name):
    """Blocks of 128 tokens with the chunk itself among the keys, causal."""
    golden, (q, k, _) = load(name), inputs(name)
    meta = golden.meta
    history = meta["hist_blocks"] * (meta["cpu_block"] // 128)
    for threshold in thresholds_of(golden):
        sums, masks = xattn_estimate(
            q, k, stride=meta["stride"], block_size=128, threshold=threshold, compat="upstream",
            chunk_size=meta["Lq"], accumulate="float32")
        np.testing.assert_allclose(sums, golden["block_sums_head"], rtol=1e-6, atol=1e-5)
        expected = golden.at("mask_head", threshold)
        padded = np.zeros(masks.shape[1], bool)
        if "zero_query_rows_from" in meta:  # query blocks 4 to 7: all masses equal
            padded[4:] = True
        assert np.array_equal(masks[:, ~padded], expected[:, ~padded])
        assert np.array_equal(masks.sum(axis=2), expected.sum(axis=2))
        chosen = meta["selected"][f"t{round(threshold * 100):03d}"]
        visible = np.tril(np.ones(masks.shape[1:], bool), history)
        density = masks.sum() / (len(masks) * visible.sum())
        assert density == pytest.approx(chosen["compute_density_head"])
        union = np.unique(np.flatnonzero(masks[:, :, :history].any(axis=(0, 1))) // 8)
        assert sorted({0, *union.tolist(), meta["hist_blocks"] - 1}) == chosen["union"]


def test_a_needle_of_one_kv_head_of_four_is_outvoted():
    """S03: its block 3 is kept by all query heads of one KV head, and by mean_score."""
    name = "S03_needle_one_kv_head"
    masks = history_masks(history_sums(name), 0.5, compat="exact")
    assert masks[:2, 0, 3].all()
    assert 3 not in lists(masks, name, 0.5, "majority").by_head[0]
    assert 3 in lists(masks, name, 0.5, "mean_score").by_head[0]
    assert 3 in lists(masks, name, 0.5, "any").by_head[0]
    own = lists(masks, name, 0.5, "per_head").by_head
    assert 3 in own[0] and len(own) == 4


@pytest.mark.parametrize("compat", ["exact", "upstream"])
@pytest.mark.parametrize("threshold", [0.5, 0.8, 0.9, 0.95])
def test_needles_in_different_blocks_are_all_outvoted(threshold, compat):
    """S06: KV head h needs block h + 1; a quarter of the votes each."""
    name = "S06_needle_per_kv_head"
    masks = history_masks(history_sums(name), threshold, compat=compat)
    own = lists(masks, name, threshold, "per_head").by_head
    assert all(head + 1 in own[head] for head in range(4))
    assert lists(masks, name, threshold, "majority").by_head[0].tolist() == [0, 5]
    kept = set(lists(masks, name, threshold, "mean_score").by_head[0].tolist())
    assert ({1, 2, 3, 4} <= kept) == (threshold >= 0.8)
    assert {1, 2, 3, 4} <= set(lists(masks, name, threshold, "any").by_head[0].tolist())


@pytest.mark.parametrize("threshold", [0.8, 0.9, 0.95])
def test_padded_query_rows_vote_for_everything_unless_left_out(threshold):
    """S08: 424 of 1,024 query rows are zeros, whose mass is the same everywhere."""
    name = "S08_zero_padded_query_rows"
    padded = history_masks(load(name)["block_sums_seed"], threshold)
    assert {1, 2, 3, 4} <= set(lists(padded, name, threshold, "majority").by_head[0].tolist())
    real = history_sums(name, real_q_len=600 // 8)
    masks = history_masks(real, threshold, compat="exact")
    assert lists(masks, name, threshold, "majority").by_head[0].tolist() == [0, 5]
    q, k, _ = inputs(name)
    alone = softmax_fuse_block_sum(flat_group_gemm_fuse_reshape(q[:, :600], k[:, :6144], 8), 128,
                                   scale=base_2_scale(8, 64), is_causal=False)
    assert np.array_equal(alone, real)


@pytest.mark.parametrize("name", names("Q"))
def test_quest(name):
    golden, (q, k, _) = load(name), inputs(name)
    meta = golden.meta
    scores = quest_page_scores(q[:, 0], k, meta["page"])
    expected = np.column_stack([golden["page_scores"], golden["page_score_last"]])
    np.testing.assert_allclose(scores, expected, rtol=1e-5, atol=1e-3)
    assert (scores >= golden["page_true_max"]).all()
    # The other formula is below the largest real score in most pages.
    wrong = golden["fork_scores_per_q_head"] < golden["page_true_max"]
    assert int(wrong.sum()) == meta["bound_violations_fork"] > 0.5 * wrong.size
    for budget in meta["budgets"]:
        pages = max(3, min(meta["Lk"], budget) // meta["page"])
        tokens = np.repeat(top_pages(scores, pages, keep_last=False), meta["page"], axis=1)
        assert np.array_equal(tokens[:, : meta["Lk"]], golden[f"tokmask_b{budget}"])


@pytest.mark.parametrize("name", names("L"))
def test_parts_and_their_merge(name):
    golden, (q, k, v) = load(name), inputs(name)
    block, parts = golden.meta["block"], golden.meta["hist_blocks"] + 1
    out, lse = np.zeros(q.shape, np.float32), np.full(q.shape[:2], -np.inf)
    for part in range(parts):
        own = part == parts - 1
        keys = slice(part * block, None if own else (part + 1) * block)
        visible = np.arange(1, q.shape[1] + 1) if own else None
        part_out, part_lse = partial_attention(q, k[:, keys], v[:, keys], visible)
        np.testing.assert_allclose(part_out[:, ::8], golden["part_out"][part], rtol=0, atol=2e-5)
        np.testing.assert_allclose(part_lse, golden["part_lse"][part], rtol=0, atol=2e-5)
        out, lse = merge_attention_outputs(out, lse, part_out, part_lse)
    np.testing.assert_allclose(out, golden["full_out"], rtol=0, atol=2e-5)
    np.testing.assert_allclose(lse, golden["full_lse"], rtol=0, atol=2e-5)
