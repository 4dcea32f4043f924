"""The prefill-mask and vote explorers say what the policies do, in pictures and in words."""

from __future__ import annotations

import numpy as np
import pytest

from course_lib.lab.planted import PLANTED
from course_lib.lab.policy_masks import full_mask, quest_masks, xattn_masks
from course_lib.prefill import AGGREGATORS, BlockStore, XAttentionBSAPolicy
from course_lib.show import PrefillMaskExplorer, VoteExplorer
from course_lib.show import prefill_mask as mask_module
from course_lib.show.prefill_mask import counts, policy_words
from course_lib.show.style import PREFILL
from course_lib.show.text import percent
from course_lib.show.vote import MODEL, SOURCES

TOKENS = 384


@pytest.fixture(scope="module")
def masks(engine):
    return PrefillMaskExplorer(engine, tokens=TOKENS, block_size=32)


@pytest.fixture(scope="module")
def votes(engine):
    return VoteExplorer(engine, tokens=TOKENS)


@pytest.mark.parametrize("layer, head", [(0, 0), (1, 3)])
def test_masks_are_those_of_the_library(masks, layer, head):
    record = masks.record(0)
    rows = record.layers[layer]
    want = {
        "full": full_mask(12),
        "quest": quest_masks(rows, block_size=32, share=0.25)[head],
        "xattn": xattn_masks(rows, block_size=32, threshold=0.7, stride=4, keys="int8")[head],
    }
    for policy, mask in want.items():
        r = masks.compute(layer=layer, head=head, policy=policy, threshold=0.7, share=0.25,
                          stride=4, block_size=32, keys="int8")
        assert np.array_equal(r["mask"], mask.mask) and (r["reason"] == mask.reason).all()
        mass = record.block_mass(layer, 32)[head]
        assert r["kept"] == pytest.approx((mass * mask.mask).sum() / TOKENS)
        assert r["density"] == pytest.approx(mask.mask.sum() / 78)
        assert r["needle_kept"] == mask.mask[-1, r["needle_block"]]
        assert sum(counts(r).values()) == 78


def test_it_opens_at_the_head_that_looks_for_the_needle(masks):
    layer, head = masks.params["layer"], masks.params["head"]
    asking = max((masks.compute(layer=a, head=h)["asking"], a, h)
                 for a in range(2) for h in range(4))
    assert masks.compute(layer=layer, head=head)["asking"] == asking[0]


def test_the_text_twin_holds_the_numbers(masks):
    for policy in ("full", "quest", "xattn"):
        r = masks.compute(policy=policy, threshold=0.5, compat="upstream", block_size=32)
        text = masks.describe(r)
        for number in (r["density"], r["kept"], 1 - r["kept"], r["needle_mass"], r["asking"],
                       r["last_row_kept"]):
            assert percent(number) in text
        for name, count in counts(r).items():
            assert f"{PREFILL[name].letter} {PREFILL[name].label} {count}" in text
        assert policy_words(r) in text
        assert ("LOST" in text) == (not r["needle_kept"])


@pytest.mark.parametrize("wrong", [
    {"policy": "best"}, {"threshold": 0.6}, {"stride": 5}, {"share": 0.9}, {"layer": 9},
    {"head": -1}, {"prompt": 7}, {"compat": "mine"}, {"keys": "q4"}, {"block_size": 48}])
def test_wrong_starts_of_the_mask_explorer(engine, wrong):
    with pytest.raises(ValueError):
        PrefillMaskExplorer(engine, tokens=TOKENS, **wrong)


@pytest.mark.parametrize("wrong", [
    {"source": "S06"}, {"rule": "all"}, {"threshold": 0.6}, {"padding": "no"}, {"prompt": 9},
    {"layer": 9}, {"chunk": 100}])
def test_wrong_starts_of_the_vote_explorer(engine, wrong):
    with pytest.raises(ValueError):
        VoteExplorer(engine, tokens=TOKENS, **wrong)


def test_drawing_again_and_again_makes_no_artists(masks, votes):
    for explorer, settings in (
        (masks, [{"policy": "quest", "block_size": 64}, {"policy": "xattn", "block_size": 32}]),
        (votes, [{"source": SOURCES[1], "rule": "per_head"},
                 {"source": MODEL, "rule": "majority"}]),
    ):
        for some in settings:
            explorer.set(**some)
        before = len(explorer.figure.findobj())
        for some in settings:
            explorer.draw(explorer.compute(**some))
        assert len(explorer.figure.findobj()) <= before
        assert all(c.description and c.tooltip for c in explorer.controls.values())


def test_equal_settings_give_equal_bytes(engine, masks):
    again = PrefillMaskExplorer(engine, tokens=TOKENS, block_size=64, policy="quest", prompt=1)
    masks.set(block_size=64, policy="quest", prompt=1, layer=again.params["layer"],
              head=again.params["head"], threshold=0.9, share=0.5, stride=8, compat="exact",
              keys="f32")
    assert masks.png() == again.png() and masks.summary() == again.summary()


@pytest.mark.parametrize("rule", AGGREGATORS)
@pytest.mark.parametrize("chunk", [64, 128])
def test_the_models_votes_are_the_policys(engine, votes, rule, chunk):
    """What a policy in the engine would choose for the chunk, were its history the exact one."""
    prompt = votes.prompts[1]
    layer = mask_module.layer_masses(engine, prompt).layers[1]
    policy = XAttentionBSAPolicy(threshold=0.7, block_size=64, aggregate=rule, short_query=chunk)
    with BlockStore(1, len(layer.k), layer.k.shape[2], block_size=64) as store:
        store.append(0, layer.k[:, :-chunk], layer.v[:, :-chunk])
        choice = policy.select_blocks(layer.q[:, -chunk:], store, 0)
    r = votes.compute(source=MODEL, rule=rule, threshold=0.7, prompt=1, layer=1, chunk=chunk)
    assert [ids.tolist() for ids in r["lists"]] == [ids.tolist() for ids in choice.by_head]
    assert r["mask_density"] == pytest.approx(choice.mask_cells[0] / choice.mask_cells[1])


def test_a_majority_loses_what_each_kv_head_needs_alone(votes):
    for threshold in (0.5, 0.8, 0.9, 0.95):
        r = votes.compute(rule="majority", threshold=threshold)
        assert r["lost"] == r["sought"] and r["kept_mass"] < 0.01
        assert [r["votes"][b] for b in (1, 2, 3, 4)] == [0.25] * 4
        own = votes.compute(rule="per_head", threshold=threshold)
        assert not own["lost"] and own["read_density"] == 0.5 and own["kept_mass"] > 0.99
        mean = votes.compute(rule="mean_score", threshold=threshold)
        assert bool(mean["lost"]) == (threshold == 0.5)
    assert votes.compute(source="one KV head", threshold=0.5)["lost"] == [(0, 3)]
    padded = votes.compute(source="padded chunk", threshold=0.95)
    assert not padded["lost"] and padded["read_density"] == 1
    real = votes.compute(source="padded chunk", threshold=0.95, padding="left out")
    assert real["lost"] == real["sought"]


@pytest.mark.parametrize("source", PLANTED)
@pytest.mark.parametrize("rule", AGGREGATORS)
def test_the_vote_twin_holds_the_numbers(votes, source, rule):
    r = votes.compute(source=source, rule=rule, threshold=0.8)
    text = votes.describe(r)
    for number in (r["read_density"], r["kept_mass"], r["mask_density"]):
        assert percent(number) in text
    assert text.count("LOST") == len(r["lost"]) and text.count("looks for") == len(r["sought"])
    for block, cast in enumerate(r["ballots"].sum(axis=(0, 1)).tolist()):
        assert f"{block}:{cast}" in text
