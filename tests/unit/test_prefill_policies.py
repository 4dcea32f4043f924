"""Prefill policies: names, options, what each chooses and why, and a new request after an old."""

from __future__ import annotations

import numpy as np
import pytest

from course_lib import prefill
from course_lib.prefill import (
    POLICIES,
    BlockStore,
    ChunkedPrefill,
    FullAttentionPolicy,
    QuestPolicy,
    XAttentionBSAPolicy,
    make_policy,
    quest_page_scores,
    xattn_estimate,
)

HEADS, KV_HEADS, D, BLOCK = 4, 2, 16, 32
OPTIONS = {"block_size": BLOCK}


def rows(seed: int, heads: int, tokens: int) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal((heads, tokens, D), dtype=np.float32)


def filled(keys: np.ndarray, layers: int = 1, block: int = BLOCK) -> BlockStore:
    store = BlockStore(layers, len(keys), D, block_size=block)
    for layer in range(layers):
        store.append(layer, keys, keys)
    return store


def xattn(**options) -> XAttentionBSAPolicy:
    return XAttentionBSAPolicy(**{"block_size": BLOCK, "stride": 8, "short_query": 8,
                                  "threshold": 0.5, **options})


def per_head_needles() -> tuple[np.ndarray, np.ndarray]:
    """Six blocks of keys: what all queries of KV head 0 look for is in block 1, of head 1 in 3."""
    keys, q = 0.1 * rows(0, KV_HEADS, 6 * BLOCK), 0.1 * rows(1, HEADS, 2 * BLOCK)
    wanted = rows(2, KV_HEADS, 1)
    for head in range(KV_HEADS):
        keys[head, (2 * head + 1) * BLOCK + 8 : (2 * head + 1) * BLOCK + 24] += 2 * wanted[head]
        q[2 * head : 2 * head + 2] += 2 * wanted[head]
    return q, keys


def same(a, b) -> bool:
    return len(a.by_head) == len(b.by_head) and all(map(np.array_equal, a.by_head, b.by_head))


def test_all_public_names_are_there():
    assert all(hasattr(prefill, name) for name in prefill.__all__)
    assert list(POLICIES) == ["full", "quest", "xattn"]
    assert [make_policy(name).name for name in POLICIES] == list(POLICIES)
    assert [POLICIES[name].supports_decode for name in POLICIES] == [True, True, False]
    assert all(POLICIES[name].supports_prefill for name in POLICIES)


def test_an_unknown_policy_is_refused_with_the_names():
    with pytest.raises(ValueError, match="'best'; there are full, quest, xattn"):
        make_policy("best")


@pytest.mark.parametrize("value, meant", [
    (9, "0.9"), (95, "0.95"), (1.5, "0.15"), (0, ""), (-0.1, ""), (101, ""), (float("nan"), ""),
])
def test_a_threshold_outside_its_range_is_refused_with_what_was_meant(value, meant):
    with pytest.raises(ValueError, match="threshold") as error:
        XAttentionBSAPolicy(threshold=value)
    assert (f"did you mean {meant}?" in str(error.value)) == bool(meant)
    assert ("did you mean" in str(error.value)) == bool(meant)


def test_the_defaults_are_those_of_the_design():
    policy = XAttentionBSAPolicy()
    assert (float(policy.threshold), policy.stride, policy.block_size, policy.chunk_size) == (
        0.95, 8, 128, 16384)
    assert (policy.aggregate, policy.compat, policy.short_query) == ("majority", "exact", 1024)
    assert (policy.estimate_reuse, policy.estimate_sample, policy.estimate_from) == (
        "none", 1.0, "f32")


@pytest.mark.parametrize("options, message", [
    ({"stride": 7}, "stride 7 must divide"), ({"chunk_size": 100}, "chunk_size 100"),
    ({"aggregate": "all"}, "aggregate must be one of majority, any"),
    ({"compat": "new"}, "compat"), ({"estimate_reuse": "yes"}, "estimate_reuse"),
    ({"estimate_from": "q4"}, "estimate_from"), ({"sample_of": "heads"}, "sample_of"),
    ({"estimate_sample": 0}, "estimate_sample"), ({"estimate_sample": 1.1}, "estimate_sample"),
    ({"short_query": 0}, "short_query"), ({"stride": 0}, "stride"),
])
def test_wrong_options_are_named(options, message):
    with pytest.raises(ValueError, match=message):
        xattn(**options)


@pytest.mark.parametrize("options, message", [
    ({"share": 0}, "share"), ({"share": 1.5}, "share"), ({"budget": 0}, "budget"),
    ({"page_size": 0}, "page_size"), ({"block_size": 0}, "block_size"),
])
def test_wrong_options_of_quest_are_named(options, message):
    with pytest.raises(ValueError, match=message):
        QuestPolicy(**options)


def test_full_reads_everything_and_says_so():
    choice = FullAttentionPolicy().select_blocks(rows(0, HEADS, 8), filled(rows(1, 2, 70)), 0)
    assert [ids.tolist() for ids in choice.by_head] == [[0, 1, 2]]
    assert [t.reason for t in choice.trace] == ["all"] * 3
    assert [t.block for t in choice.trace] == [0, 1, 2] and len(choice.trace) == 3


def test_no_history_is_no_block():
    store = BlockStore(1, KV_HEADS, D, block_size=BLOCK)
    for policy in (FullAttentionPolicy(**OPTIONS), QuestPolicy(**OPTIONS), xattn()):
        choice = policy.select_blocks(rows(0, HEADS, 64), store, 0)
        assert [len(ids) for ids in choice.by_head] == [0] and len(choice.trace) == 0


def test_quest_ranks_blocks_by_their_best_page_over_queries_and_heads():
    q, keys = rows(3, HEADS, 40), rows(4, KV_HEADS, 5 * BLOCK)
    choice = QuestPolicy(budget=3, **OPTIONS).select_blocks(q, filled(keys), 0)
    bounds = np.max([quest_page_scores(q[:, i], keys) for i in range(40)], axis=0)
    blocks = bounds.reshape(KV_HEADS, 2, 5, 2).max(axis=(1, 3))
    for head in range(KV_HEADS):
        best = np.argsort(-blocks[head, :-1])[:2]
        assert choice.by_head[head].tolist() == [*sorted(best.tolist()), 4]
        trace = [t for t in choice.trace if t.head == head]
        assert [t.reason for t in trace if t.block in best] == ["budget"] * 2
        assert trace[4].reason == "safety_last"
        np.testing.assert_allclose([t.score for t in trace], blocks[head], rtol=1e-5)
        exact = np.einsum("hqd,kd->hqk", q[2 * head : 2 * head + 2], keys[head]).max(axis=(0, 1))
        assert all(t.score >= exact[t.block * BLOCK : (t.block + 1) * BLOCK].max() - 1e-4
                   for t in trace)


def test_quest_takes_a_share_rounded_up_and_a_last_block_that_is_short():
    q = rows(3, HEADS, 40)
    keys = rows(4, KV_HEADS, 4 * BLOCK + 5)
    choice = QuestPolicy(share=0.5, **OPTIONS).select_blocks(q, filled(keys), 0)
    assert [len(ids) for ids in choice.by_head] == [3, 3]
    assert all(ids[-1] == 4 for ids in choice.by_head)
    one = QuestPolicy(budget=1, **OPTIONS).select_blocks(q, filled(keys), 0)
    assert [ids.tolist() for ids in one.by_head] == [[4], [4]]


@pytest.mark.parametrize("policy", [QuestPolicy(**OPTIONS), xattn(estimate_from="int8")])
def test_notes_taken_while_writing_replace_reads(policy):
    q, keys = rows(3, HEADS, 64), rows(4, KV_HEADS, 4 * BLOCK)
    late, store = filled(keys), filled(keys)
    read = policy.select_blocks(q, late, 0)
    assert late.bytes_read > 0
    policy.reset()
    policy.on_block_written(0, 0, keys[:, :7])  # in part first, then whole
    for block in range(4):
        policy.on_block_written(0, block, keys[:, block * BLOCK : (block + 1) * BLOCK])
    near = policy.select_blocks(q, store, 0)
    assert store.bytes_read == 0 and same(near, read)
    with pytest.raises(ValueError, match="block 9 of layer 0 comes before block 4"):
        policy.on_block_written(0, 9, keys[:, :BLOCK])


def test_xattn_estimates_as_the_public_functions_do():
    q, keys = rows(5, HEADS, 3 * BLOCK), rows(6, KV_HEADS, 20 * BLOCK)
    sums, mask = xattn_estimate(q, keys, stride=8, block_size=BLOCK, threshold=0.6, causal=False)
    choice = xattn(threshold=0.6, aggregate="any").select_blocks(q, filled(keys), 0)
    votes = mask.reshape(KV_HEADS, 2, 3, 20).any(axis=1)
    kept = votes.any(axis=(0, 1))
    kept[[0, -1]] = True
    assert choice.by_head[0].tolist() == np.flatnonzero(kept).tolist()
    assert choice.mask_cells == (mask.sum(), mask.size) and mask.sum() < mask.size
    shares = (sums / sums.sum(axis=2, keepdims=True)).mean(axis=(0, 1))
    np.testing.assert_allclose([t.score for t in choice.trace], shares, rtol=1e-5)
    np.testing.assert_allclose([t.votes for t in choice.trace], votes.mean(axis=(0, 1)))
    first = min(choice.trace, key=lambda t: t.rank)
    second = next(t for t in choice.trace if t.rank == 2)
    assert first.mass_before == 0 and second.mass_before == first.score and first.need == 0.6


def test_each_aggregator_is_what_it_says():
    q, keys = per_head_needles()
    store = filled(keys)

    def chosen(rule: str, **options) -> list[list[int]]:
        choice = xattn(aggregate=rule, **options).select_blocks(q, store, 0)
        return [ids.tolist() for ids in choice.by_head]

    own = chosen("per_head")
    assert own[0] == [0, 1, 5] and own[1] == [0, 3, 5]
    assert chosen("any") == [[0, 1, 3, 5]]
    assert chosen("majority") == [[0, 5]]  # half of the votes is no majority: both needles lost
    assert {1, 3} <= set(chosen("mean_score", threshold=0.8)[0])
    assert chosen("per_head", threshold=1) == [list(range(6))] * 2


def test_a_trace_names_the_reason_of_every_block():
    q, keys = per_head_needles()
    choice = xattn(aggregate="majority").select_blocks(q, filled(keys), 0)
    reasons = [t.reason for t in choice.trace]
    assert [t.block for t in choice.trace if t.selected] == choice.by_head[0].tolist()
    assert reasons[1] == "not_selected" and reasons[5] == "safety_last"
    short = xattn(short_query=65).select_blocks(q, filled(keys), 0)
    assert {t.reason for t in short.trace} == {"short_query"} and len(short.by_head[0]) == 6
    assert same(short, xattn().select_blocks(q[:, :7], filled(keys), 0))  # less than a stride


def test_tau_grows_the_list_and_a_threshold_per_head_is_taken():
    q, keys = rows(7, HEADS, 64), rows(8, KV_HEADS, 12 * BLOCK)
    store, before = filled(keys), set()
    for threshold in (0.2, 0.5, 0.8, 1.0):
        kept = set(xattn(threshold=threshold, aggregate="any")
                   .select_blocks(q, store, 0).by_head[0].tolist())
        assert before <= kept
        before = kept
    assert before == set(range(12))
    both = xattn(threshold=np.array([1.0, 1.0, 0.01, 0.01]), aggregate="per_head")
    lists = both.select_blocks(q, store, 0).by_head
    assert len(lists[0]) == 12 and len(lists[1]) < 12
    with pytest.raises(ValueError, match="3 thresholds do not fit 4 heads"):
        xattn(threshold=np.array([0.5, 0.5, 0.5])).select_blocks(q, store, 0)


def test_queries_scored_in_pieces_choose_the_same():
    q, keys = rows(7, HEADS, 131), rows(8, KV_HEADS, 6 * BLOCK + 3)
    choices = [xattn(chunk_size=size, aggregate="per_head").select_blocks(q, filled(keys), 0)
               for size in (BLOCK, 2 * BLOCK, 1024)]
    assert same(choices[0], choices[1]) and same(choices[0], choices[2])


def test_a_store_of_other_blocks_is_refused():
    with pytest.raises(ValueError, match="blocks of 32 tokens and the store keeps blocks of 16"):
        xattn().select_blocks(rows(0, HEADS, 64), filled(rows(1, KV_HEADS, 64), block=16), 0)


def test_layer_0_decides_for_all_only_if_asked_and_only_for_the_same_chunk():
    keys = [rows(seed, KV_HEADS, 10 * BLOCK) for seed in (1, 2)]
    store = BlockStore(2, KV_HEADS, D, block_size=BLOCK)
    for layer in range(2):
        store.append(layer, keys[layer], keys[layer])
    q = [rows(seed, HEADS, 64) for seed in (3, 4)]
    alone = xattn(aggregate="any", threshold=0.2).select_blocks(q[1], store, 1)
    reusing = xattn(aggregate="any", threshold=0.2, estimate_reuse="layer0")
    assert same(reusing.select_blocks(q[1], store, 1), alone)  # nothing of layer 0 yet
    first = reusing.select_blocks(q[0], store, 0)
    assert not same(first, alone)
    read = store.bytes_read
    assert reusing.select_blocks(q[1], store, 1) is first and store.bytes_read == read
    store.append(1, keys[0][:, :BLOCK], keys[0][:, :BLOCK])
    assert len(reusing.select_blocks(q[1], store, 1).trace) == 11


@pytest.mark.parametrize("sample_of, read", [("rows", 1.0), ("blocks", 0.5)])
def test_a_sample_reads_and_scores_less(sample_of, read):
    q, keys = rows(7, HEADS, 128), rows(8, KV_HEADS, 16 * BLOCK)
    store = filled(keys)
    choice = xattn(estimate_sample=0.5, sample_of=sample_of).select_blocks(q, store, 0)
    assert store.bytes_read == read * keys.nbytes
    assert choice.mask_cells[1] == HEADS * 16 * (2 if sample_of == "rows" else 4)
    assert choice.by_head[0][0] == 0 and choice.by_head[0][-1] == 15


def test_sampled_blocks_stand_for_those_behind_them():
    q, keys = per_head_needles()
    choice = xattn(estimate_sample=0.5, sample_of="blocks", aggregate="any").select_blocks(
        q, filled(keys), 0)
    scores = [t.score for t in choice.trace]  # scored: blocks 0, 2 (2.5 to even), 5
    assert scores[0] == scores[1] and scores[2] == scores[3] == scores[4] != scores[5]


@pytest.mark.parametrize("make", [
    lambda: FullAttentionPolicy(**OPTIONS), lambda: QuestPolicy(**OPTIONS), xattn,
    lambda: xattn(estimate_from="int8", aggregate="per_head"),
    lambda: xattn(estimate_reuse="layer0"),
], ids=["full", "quest", "xattn", "int8", "layer0"])
def test_a_request_after_another_is_as_if_alone(make):
    def run(policy, seed: int) -> tuple[list, dict]:
        policy.reset()
        outputs = []
        with BlockStore(2, KV_HEADS, D, block_size=BLOCK) as store, \
                ChunkedPrefill(store, policy) as chunked:
            for chunk in range(4):
                for layer in range(2):
                    at = 100 * seed + 10 * chunk + layer
                    k, v = rows(at, KV_HEADS, 64), rows(at + 1000, KV_HEADS, 64)
                    outputs.append(chunked.attend(layer, rows(at + 2000, HEADS, 64), k, v))
        return outputs, policy.get_density_stats()

    used, new = make(), make()
    run(used, 1)
    again, alone = run(used, 2), run(new, 2)
    assert all(map(np.array_equal, again[0], alone[0])) and again[1] == alone[1]
    assert alone[1]["num_chunks"] == 3 and alone[1]["total_available_blocks"] == 2 + 4 + 6


def test_statistics_are_printed_and_reset_without_forgetting_keys(capsys):
    policy, keys = QuestPolicy(**OPTIONS), rows(1, KV_HEADS, 64)
    with BlockStore(1, KV_HEADS, D, block_size=BLOCK) as store, \
            ChunkedPrefill(store, policy) as chunked:
        for _ in range(2):
            chunked.attend(0, rows(2, HEADS, 64), keys, keys)
        policy.print_density_stats()
        assert "[quest] 1 chunks with a history, layer 0: 1 of 2 blocks" in capsys.readouterr().out
        policy.reset_stats()
        assert policy.get_density_stats()["num_chunks"] == 0
        read = store.bytes_read
        policy.select_blocks(rows(2, HEADS, 64), store, 0)
        assert store.bytes_read == read


def test_an_estimate_that_reads_values_too_chooses_alike_and_reads_twice():
    q, keys = per_head_needles()
    read, choices = {}, {}
    for source in ("f32", "kv", "int8"):
        store = filled(keys)
        choices[source] = xattn(estimate_from=source).select_blocks(q, store, 0)
        read[source] = store.bytes_read
    assert same(choices["f32"], choices["kv"]) and len(choices["f32"].by_head[0]) < 6
    assert read == {"f32": keys.nbytes, "kv": 2 * keys.nbytes, "int8": keys.nbytes}
