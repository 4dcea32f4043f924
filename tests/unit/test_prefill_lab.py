"""What the lessons on prefill policies measure with: block masses, masks, planted data, needles."""

from __future__ import annotations

import json

import numpy as np
import pytest

from course_lib.lab.block_mass import LayerMasses, causal_block_mass
from course_lib.lab.captured import Layer
from course_lib.lab.planted import CHUNK, PADDED_FROM, PLANTED, planted
from course_lib.lab.policy_masks import full_mask, quest_masks, xattn_masks
from course_lib.lab.policy_needle import (
    PolicyArm,
    PolicyNeedleOptions,
    Watched,
    answer_begun,
    place_of,
    policy_needle_records,
    policy_needle_summary,
    policy_prompt,
)
from course_lib.lab.ruler_run import RulerRunOptions, ruler_records, ruler_summary
from course_lib.prefill import BlockStore, QuestPolicy, make_policy, xattn_estimate
from tests.tiny_checkpoint import tiny_engine


@pytest.fixture(scope="module")
def engine(tmp_path_factory):
    return tiny_engine(tmp_path_factory)


@pytest.fixture(scope="module")
def layer():
    rng = np.random.default_rng(3)
    q, k, v = (rng.standard_normal((h, 83, 16), dtype=np.float32) for h in (4, 2, 2))
    return Layer(q * 3, k, v)


def test_block_mass_is_softmax_added_up(layer):
    q, k = layer.q[1], layer.k[0]
    scores = (q @ k.T / 4).astype(np.float64)
    scores[np.triu_indices(83, 1)] = -np.inf
    weights = np.exp(scores - scores.max(axis=1, keepdims=True))
    weights /= weights.sum(axis=1, keepdims=True)
    got = causal_block_mass(q, k, 32)
    for r in range(3):
        for c in range(3):
            want = weights[32 * r : 32 * r + 32, 32 * c : 32 * c + 32].sum()
            assert got[r, c] == pytest.approx(want, abs=1e-5)
    assert got.sum(axis=1) == pytest.approx([32, 32, 19], abs=1e-4)


def test_masses_of_a_prompt_are_those_of_its_layers_and_the_asking_head_asks_most(engine):
    ids = engine.encode("a needle in the hay, and nothing else to be found " * 3)
    record = LayerMasses(engine, ids)
    mass = record.block_mass(1, 32)
    assert record.block_mass(1, 32) is mass
    assert mass.sum(axis=2)[:, 0] == pytest.approx(32, abs=1e-3)
    asked, found = record.asking_head(40, 32)
    best = max(record.last_query_mass(at, 32)[h, 1] for at in range(2) for h in range(4))
    assert record.last_query_mass(asked, 32)[found, 1] == best
    assert record.last_query_mass(0, 32).sum(axis=1) == pytest.approx(1)


@pytest.mark.parametrize("compat", ["exact", "upstream"])
@pytest.mark.parametrize("threshold", [0.5, 0.9, 1.0])
def test_xattn_masks_are_the_estimates_with_a_word_for_each_cell(layer, compat, threshold):
    made = xattn_masks(layer, block_size=16, threshold=threshold, compat=compat)
    _, mask = xattn_estimate(layer.q, layer.k, stride=8, block_size=16, threshold=threshold,
                             compat=compat)
    for head, shown in enumerate(made):
        assert np.array_equal(shown.mask, mask[head])
        words = shown.reason
        assert np.array_equal(shown.mask, (words != "") & (words != "not_selected"))
        assert (words[np.triu_indices(6, 1)] == "").all() and (words[:, 0] == "sink").all()
        assert [words[i, i] for i in range(1, 6)] == ["diagonal"] * 5
        assert compat == "upstream" or "extra" not in words
        assert shown.estimate.sum(axis=1) == pytest.approx(1)
    ones = np.ones((6, 6))
    assert made[0].density == pytest.approx(mask[0].sum() / 21)
    assert made[0].kept(ones * mask[0]) == 1 and full_mask(6).density == 1


def test_upstream_keeps_blocks_that_the_rule_does_not(layer):
    extra = [(m.reason == "extra").sum() for m in
             xattn_masks(layer, block_size=16, threshold=0.5, compat="upstream")]
    assert sum(extra) > 0


def test_int8_keys_change_the_estimate_little(layer):
    one, other = (xattn_masks(layer, block_size=16, threshold=0.9, keys=keys)
                  for keys in ("f32", "int8"))
    apart = max(np.abs(a.estimate - b.estimate).max() for a, b in zip(one, other, strict=True))
    assert 0 < apart < 0.02


def test_quest_masks_are_the_policys_own_choices(layer):
    made = quest_masks(layer, block_size=16, share=0.5)
    policy = QuestPolicy(share=0.5, block_size=16)
    with BlockStore(1, 2, 16, block_size=16) as store:
        store.append(0, layer.k[:, :64], layer.v[:, :64])
        choice = policy.select_blocks(layer.q[:, 64:80], store, 0)
    for head, shown in enumerate(made):
        assert np.flatnonzero(shown.mask[4]).tolist() == [*choice.of_head(head // 2), 4]
        assert shown.reason[4, 3] == "safety_last" and shown.reason[4, 4] == "diagonal"


def test_planted_data_are_the_cases_that_the_lesson_names():
    shapes = {name: planted(name) for name in PLANTED}
    for case in shapes.values():
        assert case.q.shape == (8, CHUNK, 64) and case.k.shape == (4, 6 * CHUNK, 64)
    assert shapes["each KV head its own"].needles == (1, 2, 3, 4)
    assert not shapes["padded chunk"].q[:, PADDED_FROM:].any()
    assert shapes["padded chunk"].q[:, PADDED_FROM - 1].any()
    with pytest.raises(ValueError, match="must be one of one KV head"):
        planted("S03")


def test_a_prompt_ends_with_the_beginning_of_its_answer(shipped_engine):
    prompt = answer_begun(shipped_engine, "1-3", 320, 0.3)
    assert len(prompt.ids) == 320
    assert shipped_engine.decode(prompt.ids).endswith("\n" + prompt.fact.beginning)
    value = shipped_engine.decode(prompt.ids[slice(*prompt.value_span)])
    assert value.strip() == prompt.fact.value
    assert len({place_of(i) for i in range(8)}) == 8 and place_of(8) == place_of(0)


def test_records_of_a_needle_that_prefill_must_find(shipped_engine):
    options = PolicyNeedleOptions(prompts=1, tokens=384, chunk=64, rules=("majority", "any"),
                                  thresholds=(0.5, 1.0), one_row_thresholds=(0.5,))
    rows = policy_needle_records(shipped_engine, options, 0)
    assert [r["arm"] for r in rows] == [arm.name for arm in options.arms()] == [
        "full", "quest", "majority 0.5", "majority 1", "any 0.5", "any 1", "majority 0.5"]
    by = dict(zip((*"fqabcd",), rows, strict=False))
    assert by["f"]["recalled"] and by["f"]["readers"] == [1, 1, 1]
    assert by["b"]["recalled"] and by["b"]["applied_density"] == by["f"]["applied_density"] == 1
    assert by["a"]["applied_density"] < 1 and all(0 <= v <= 1 for v in by["a"]["votes"])
    assert json.loads(json.dumps(rows)) == rows
    summary = policy_needle_summary(rows)
    assert summary[0] == {"arm": "full", "prompts": 1, "recall": 1, "mask_density": 1.0,
                          "applied_density": 1.0, "read_nowhere": 0}
    prompt = policy_prompt(shipped_engine, options, 0)
    assert prompt.fact.value == rows[0]["value"]


def test_a_watched_policy_chooses_as_if_nobody_watched(shipped_engine):
    ids = answer_begun(shipped_engine, "1-0", 256).ids
    arm = PolicyArm("xattn", "majority", 0.5, 32)
    plain, watched = arm.make(64), Watched(arm.make(64))
    sessions = [shipped_engine.prefill(ids, policy=p, chunk=64) for p in (plain, watched)]
    assert np.array_equal(sessions[0].logits, sessions[1].logits)
    assert plain.get_density_stats() == watched.get_density_stats()
    assert sorted(watched.choices) == [0, 1, 2]
    assert PolicyArm("xattn", "any", 0.9, 128).name == "any 0.9 block 128"
    assert make_policy("quest").name == PolicyArm("quest").make(64).name


def test_ruler_records_are_one_for_each_cell(shipped_engine):
    options = RulerRunOptions(prompts=1, tasks=("niah_single",), lengths=(200,), chunk=64,
                              block_size=32, max_new_tokens=10)
    rows = ruler_records(shipped_engine, options, 0)
    assert [(r["policy"], r["threshold"]) for r in rows] == [
        ("full", None), ("quest", None), ("xattn", 0.9), ("xattn", 0.5)]
    assert rows[0]["score"] == 1 and rows[0]["references"][0] in rows[0]["text"]
    assert [row["all"] for row in ruler_summary(rows)] == [r["score"] for r in rows]
