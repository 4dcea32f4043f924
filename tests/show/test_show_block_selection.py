"""The block-selection explorer says what the engine does, in letters, bars and words."""

from __future__ import annotations

import re
import warnings

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from ipywidgets import Button, HBox

from course_lib.engine.generate import generate_from
from course_lib.lab.needle import MAX_NEW_TOKENS, NeedleOptions, prompt_of
from course_lib.show import BlockSelectionExplorer
from course_lib.show.block_selection import BLOCK_SIZES, KS, N_PROBES, PREFILL_KS, SAFE_MARGIN
from course_lib.show.style import REASON
from course_lib.show.why import why_block
from course_lib.sparse import REASONS, select_blocks, select_from_scores

HEADS, TOKENS = 4, 330


@pytest.fixture(scope="module")
def explorer(engine):
    return BlockSelectionExplorer(engine, tokens=TOKENS, k=4)


def test_every_reason_has_its_own_letter():
    assert tuple(REASON) == REASONS
    assert len({meaning.letter for meaning in REASON.values()}) == len(REASONS)


@pytest.mark.parametrize("importance", ["all_queries", "last_window", "none"])
@pytest.mark.parametrize("k", [1, 2, 4, 8])
def test_the_letters_are_those_of_the_running_engine(engine, explorer, importance, k):
    """Layer 0 asks the same query whatever decode read before, so the engine's own trace at k
    must hold exactly the selection that the explorer shows for the exact run's query."""
    prompt = explorer.prompts[0]
    session = engine.prefill(prompt.ids, importance=importance)
    ids = explorer.compute()["exact_answer"].ids
    trace: list = []
    for step in range(4):
        session.step(ids[step], decode_k=k, n_probe=4, trace=trace)
        for head in range(HEADS):
            shown = explorer.compute(layer=0, head=head, step=step, k=k, n_probe=4,
                                     importance=importance, answer=False)
            chosen = trace[step][0][head]
            assert shown["reason"] == chosen.reason
            assert np.flatnonzero(shown["read"]).tolist() == chosen.ids.tolist()


@pytest.mark.parametrize("block_size", [16, 64])
@pytest.mark.parametrize("prefill_k", ["exact", 1, 4])
def test_other_blocks_and_a_sparse_prefill_are_those_of_the_engine(engine, explorer, prefill_k,
                                                                    block_size):
    """As above, with an engine that is told both: its letters, its importance and its answer."""
    prompt = explorer.prompts[0]
    session = engine.prefill(prompt.ids, block_size=block_size,
                             prefill_k=None if prefill_k == "exact" else prefill_k)
    shown = explorer.compute(prefill_k=prefill_k, block_size=block_size, k=2)
    said = generate_from(session, MAX_NEW_TOKENS, 2)
    assert list(shown["answer"].ids) == said.ids
    assert shown["answer"].identical == (tuple(said.ids) == shown["exact_answer"].ids)
    assert shown["exact_answer"].ids == explorer.compute()["exact_answer"].ids
    study = explorer.study(0, prefill_k, block_size)
    np.testing.assert_array_equal(study.importance("all_queries"), session.importance)
    ids, trace = shown["exact_answer"].ids, []
    for step in range(3):
        session.step(ids[step], decode_k=2, trace=trace)
        for head in range(HEADS):
            r = explorer.compute(prefill_k=prefill_k, block_size=block_size, layer=0, head=head,
                                 step=step, k=2, answer=False)
            assert r["reason"] == trace[step][0][head].reason
            assert r["block_size"] == block_size and r["n_blocks"] == -(-r["n"] // block_size)


def test_block_sizes_share_one_exact_prefill(engine, explorer, monkeypatch):
    explorer.compute()
    monkeypatch.setattr(engine, "prefill", None)
    for size in BLOCK_SIZES:
        r = explorer.compute(block_size=size, step=2, answer=False)
        assert r["needle_block"] == explorer.prompts[0].value_span[0] // size
        whole = explorer.compute(step=2, answer=False)["mass"]
        if size >= 32:
            sums = np.add.reduceat(whole, np.arange(0, len(whole), size // 32))
            np.testing.assert_allclose(r["mass"], sums, atol=1e-12)


@pytest.mark.parametrize("by_hand", [True, False])
def test_other_blocks_bring_the_needle_back_into_view(engine, by_hand):
    explorer = BlockSelectionExplorer(engine, tokens=TOKENS, k=4)
    explorer.png()
    if by_hand:
        explorer.controls["block_size"].value = 128
    else:
        explorer.set(block_size=128)
    assert explorer.params["block"] == explorer.result["needle_block"]
    assert explorer.controls["block"].max == -(-(TOKENS + MAX_NEW_TOKENS - 1) // 128) - 1
    assert "blocks of 128" in explorer.summary()
    assert explorer.set(block=20, block_size=16).params["block"] == 20  # in either order
    with pytest.raises(ValueError, match="block must lie between"):
        explorer.set(block=20, block_size=128)
    assert explorer.params["block_size"] == 16 and explorer.params["block"] == 20


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 1), st.integers(0, 3), st.integers(0, 30), st.sampled_from(KS),
       st.sampled_from(N_PROBES), st.sampled_from(["all_queries", "last_window", "none"]),
       st.integers(0, 11))
def test_numbers_agree_with_select_blocks(explorer, layer, head, step, k, n_probe, importance,
                                          block):
    r = explorer.compute(layer=layer, head=head, step=step, k=k, n_probe=n_probe,
                         importance=importance, block=block, answer=False)
    record = explorer.study(0).record
    n = TOKENS + step + 1
    weights = explorer.study(0).importance(importance)
    if weights is not None:
        weights = np.pad(weights, (0, n - TOKENS))
    rows = record.session.cache.rows(layer)
    expected = select_blocks(record.queries[step, layer, head], rows.k[head // 2, :n],
                             k_blocks=r["n_blocks"] if k == "all" else k, n_probe=n_probe,
                             importance=weights)
    assert r["reason"] == expected.reason and r["n"] == n
    assert r["n_blocks"] == -(-n // 32) == len(r["mass"]) == len(r["read"])
    assert abs(r["mass"].sum() - 1) < 1e-5 and (r["mass"] >= 0).all()
    assert r["read"].sum() == min(r["n_blocks"], r["n_blocks"] if k == "all" else k)
    assert r["block"] == min(block, r["n_blocks"] - 1)


def test_all_blocks_say_what_exact_says(explorer):
    for step in (0, 30):  # a block begins between them
        r = explorer.compute(k="all", step=step)
        assert r["read"].all() and r["answer"].identical
        assert r["answer"].text == r["exact_answer"].text


def test_the_start_is_the_needle(engine, explorer):
    study = explorer.study(0)
    assert explorer.params["block"] == study.needle_block == study.prompt.value_span[0] // 32
    assert (explorer.params["layer"], explorer.params["head"]) == study.retrieval_head
    assert explorer.params["step"] == study.value_step


def test_the_twin_prints_what_the_picture_shows(explorer):
    explorer.set(k=4, layer=1, head=2, step=3)
    text, r = explorer.summary(), explorer.result
    for name, meaning in REASON.items():
        assert f"{meaning.letter} {meaning.label} {r['reason'].count(name)}" in text
    assert f"blocks read: {100 * r['mass'][r['read']].sum():.1f} %" in text
    assert r["why"] in text and "k = 4 says:" in text and "exact says:" in text


def test_equal_settings_give_equal_bytes_and_text(engine, explorer):
    again = BlockSelectionExplorer(engine, tokens=TOKENS, k=8, n_probe=2, layer=1, head=3, step=2)
    explorer.set(k=8, n_probe=2, layer=1, head=3, step=2, block=again.params["block"])
    assert explorer.png() == again.png() and explorer.summary() == again.summary()


def test_a_live_change_shows_the_blocks_before_the_text(explorer, monkeypatch):
    explorer.set(k=4, n_probe=8)
    seen = []
    publish = explorer._publish
    monkeypatch.setattr(explorer, "_publish", lambda r: (seen.append(r["answer"]), publish(r)))
    explorer.controls["n_probe"].value = 16
    assert seen[0] is None and seen[-1] is explorer.result["answer"] is not None
    seen.clear()
    explorer.controls["block"].value = 1
    assert len(seen) == 1 and seen[0] is not None
    seen.clear()
    explorer.controls["prefill_k"].value = 2
    assert seen[0] is None and seen[-1] is explorer.result["answer"] is not None
    explorer.set(prefill_k="exact")


@pytest.mark.parametrize("by_hand", [True, False])
def test_another_prompt_brings_its_own_steps_and_needle(shipped_engine, by_hand):
    explorer = BlockSelectionExplorer(shipped_engine, tokens=400, k=2)
    explorer.png()
    study = explorer.study(2)
    assert study.value_step > 0
    if by_hand:
        explorer.controls["prompt"].value = 2
    else:
        explorer.set(prompt=2)
    assert explorer.params["step"] == study.value_step
    assert explorer.params["block"] == study.needle_block
    assert explorer.result["question"] == study.prompt.question
    assert len(explorer.controls["step"].options) == study.record.steps
    assert explorer.set(prompt=0, step=1).params["step"] == 1


def test_buttons_go_to_blocks(explorer):
    explorer.set(block=0)
    buttons = {b.description: b for row in explorer.children if isinstance(row, HBox)
               for b in row.children if isinstance(b, Button)}
    buttons["most attention"].click()
    assert explorer.params["block"] == int(np.argmax(explorer.result["mass"]))
    buttons["last block"].click()
    assert explorer.params["block"] == explorer.result["n_blocks"] - 1
    buttons["needle's block"].click()
    assert explorer.params["block"] == explorer.result["needle_block"]
    assert all(b.tooltip for b in buttons.values())


def test_every_control_is_described(explorer):
    assert all(c.description and c.tooltip for c in explorer.controls.values())


def test_own_prompts_and_wrong_arguments(engine):
    prompts = [prompt_of(engine, NeedleOptions(tokens=TOKENS, position=p), 0) for p in (0.1, 0.9)]
    explorer = BlockSelectionExplorer(engine, prompts=prompts, prompt=1, k=1)
    assert explorer.result is None
    assert explorer.compute(prompt=0)["needle_block"] < explorer.compute(prompt=1)["needle_block"]
    for wrong in ({"k": 3}, {"importance": "first"}, {"layer": 9}, {"step": 99}, {"prompt": 7},
                  {"block": 99}, {"prefill_k": 3}, {"prefill_k": None}, {"block_size": 24}):
        with pytest.raises(ValueError):
            BlockSelectionExplorer(engine, prompts=prompts, **wrong)


def test_drawing_again_and_again_makes_no_artists(explorer):
    results = [explorer.compute(k=k, layer=layer, importance=importance, answer=False)
               for k in KS for layer in (0, 1) for importance in ("all_queries", "none")]
    results += [explorer.compute(prefill_k=k, block_size=size, answer=False)
                for k in PREFILL_KS[-3:] for size in BLOCK_SIZES]

    def artists() -> int:
        for result in results[::7]:  # ticks are made while drawing, and kept
            explorer._publish(result)
        return len(explorer.figure.findobj())

    before = artists()
    for result in results:
        explorer.draw(result)
    assert artists() == before


def test_odd_generated_text_is_drawn_without_warning(explorer):
    result = explorer.compute()
    answer = result["answer"]
    odd = type(answer)(**{**answer.__dict__, "text": "costs $5 and $6\x00 针 \x1b " + "x" * 300})
    every = "".join(map(chr, range(1, 0x600)))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        explorer._publish({**result, "answer": odd, "fed": "$", "next": "\t"})
        explorer._publish({**result, "question": every[::2], "fed": every[::3]})


def test_text_stops_where_rounding_could_change_it(explorer):
    result = explorer.compute()
    answer = result["exact_answer"]
    close = {**answer.__dict__, "margins": (1.0,) * 5 + (SAFE_MARGIN / 2,) + answer.margins[6:]}
    text = explorer.describe({**result, "exact_answer": type(answer)(**close)})
    assert repr(explorer.engine.decode(answer.ids[:5])) + "…" in text
    assert repr(answer.text) + ", " not in text.split("k = 32 says")[0]


def test_the_shipped_models_needle(shipped_engine):
    explorer = BlockSelectionExplorer(shipped_engine, tokens=700, k="all")
    r = explorer.compute(k="all")
    assert r["exact_answer"].recalled and r["answer"].recalled
    assert r["next"] == " ramen" and r["mass"][r["needle_block"]] == r["mass"].max()


# Why, in words.

def random_selections(count: int):
    """Scores from few values, so that ties are everywhere."""
    rng = np.random.default_rng(5)
    for _ in range(count):
        n = int(rng.integers(1, 14))
        probe = rng.integers(-3, 4, n).astype(np.float32)
        sums = rng.integers(0, 4, n).astype(np.float32) if rng.random() < 0.7 else None
        k = int(rng.integers(1, n + 3))
        yield select_from_scores(probe, sums, k), k


def test_why_tells_the_outcome_and_the_true_ranks():
    for selection, k in random_selections(300):
        for block, reason in enumerate(selection.reason):
            text = why_block(selection, block, k)
            last = text.splitlines()[-1]
            assert f"({REASON[reason].label})" in last
            assert ("not read" in last) == (block not in selection.ids)
            if reason != "importance":
                assert f"rank {selection.probe_rank[block]} of {len(selection.probe)}" in text
            if selection.importance_rank is not None:
                assert f"rank {selection.importance_rank[block]} of" in text
                assert f"= ({k}+1)//2 = {(k + 1) // 2} place" in text
            else:
                assert "Importance: off" in text


def test_why_names_the_block_that_got_the_place():
    """Whoever is named as last in beat the block: a higher score, or an equal one further left."""
    for selection, k in random_selections(300):
        for block in range(len(selection.probe)):
            text = why_block(selection, block, k)
            for line, scores in (("Importance", selection.importance), ("Probe", selection.probe)):
                found = re.search(rf"{line}: .*last one in is block (\d+)", text)
                if not found:
                    continue
                winner = int(found.group(1))
                assert winner in selection.ids or winner == selection.evicted
                assert (scores[winner], -winner) > (scores[block], -block)
                tie = "on equal" in re.search(rf"^{line}.*$", text, re.M).group(0)
                assert tie == (scores[winner] == scores[block])


def test_why_explains_recency():
    for selection, k in random_selections(300):
        last = len(selection.probe) - 1
        for block in range(last + 1):
            told = "Recency" in why_block(selection, block, k)
            lost = block == last and block not in selection.ids
            assert told == (block in (selection.recency, selection.evicted) or lost)


def test_why_at_k_1_leaves_the_probe_nothing():
    selection = select_from_scores(np.float32([1, 5, 2]), np.float32([9, 0, 1]), 1)
    text = why_block(selection, 1, 1)
    assert "(k+1)//2 = (1+1)//2 = 1 place" in text and "1 − 1 = 0 places are left" in text
    assert "importance blocks are never displaced" in why_block(selection, 2, 1)
    assert "k ≥ 3 leaves nothing out" in why_block(
        select_from_scores(np.float32([1, 5, 2]), None, 3), 0, 3)
    with pytest.raises(ValueError, match="block 3 does not exist"):
        why_block(selection, 3, 1)
