"""The importance map shows the engine's own importance, row by row, and marks what ties."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from course_lib.lab.needle import NeedleOptions, prompt_of
from course_lib.lab.prompt_study import prompt_study
from course_lib.show import ImportanceMapExplorer
from course_lib.show.importance_map import PREFILLS, QUERIES, WINDOWS, letters, rank
from course_lib.show.text import percent
from course_lib.sparse import importance_sums, select_from_scores

TOKENS, BLOCKS = 330, 11


@pytest.fixture(scope="module")
def explorer(engine):
    prompts = [prompt_of(engine, NeedleOptions(tokens=TOKENS), i) for i in range(2)]
    return ImportanceMapExplorer(engine, prompts=prompts)


@pytest.mark.parametrize("prefill", ["exact", "sparse, k = 1"])
@pytest.mark.parametrize("queries", ["all queries", "last 13"])
def test_the_sums_are_the_engines_importance(engine, explorer, queries, prefill):
    options = {"prefill_k": PREFILLS[prefill]}
    if WINDOWS[queries] is not None:
        options |= {"importance": "last_window", "window": WINDOWS[queries]}
    expected = importance_sums(engine.prefill(explorer.prompts[0].ids, **options).importance)
    r = explorer.compute(queries=queries, prefill=prefill)
    np.testing.assert_allclose(r["sums"], expected, rtol=1e-4, atol=1e-4)
    np.testing.assert_allclose(r["total"], expected / expected.sum(), rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize("rows, count", [("layers", 2), ("heads", 8)])
def test_rows_are_shares_and_tokens_are_a_part_of_them(explorer, rows, count):
    blocks = explorer.compute(rows=rows)
    assert blocks["map"].shape == (count, BLOCKS) and len(blocks["names"]) == count
    np.testing.assert_allclose(blocks["map"].sum(axis=1), 1, atol=1e-6)
    tokens = explorer.compute(rows=rows, columns="tokens")
    block = tokens["needle_block"]
    np.testing.assert_allclose(tokens["map"].sum(axis=1), blocks["map"][:, block], rtol=1e-4)
    assert len(tokens["labels"]) == tokens["map"].shape[1]
    first, end = explorer.prompts[0].needle_span
    assert {32 * block + t for t in tokens["marked"]} <= set(range(first, end))
    assert {first // 32, (end - 1) // 32} <= set(blocks["marked"])


def test_the_answers_queries_are_those_of_decode(engine, explorer):
    record = prompt_study(engine, explorer.prompts[0]).record
    mass = sum(record.attention_mass(step, 1, 2)[:BLOCKS] for step in range(record.steps))
    row = explorer.compute(queries=QUERIES[-1])["map"][1 * 4 + 2]
    own = explorer.received(0, QUERIES[-1], "exact")[1, 2]
    np.testing.assert_allclose(row, own.reshape(-1)[: BLOCKS * 32].sum() and
                               importance_sums(own) / own.sum(), rtol=1e-4)
    np.testing.assert_allclose(importance_sums(own)[:-1], mass[:-1], rtol=1e-4)


@settings(max_examples=40, deadline=None)
@given(arrays(np.float32, 9, elements=st.integers(0, 4).map(float)), st.integers(1, 12))
def test_letters_are_the_reservation_where_no_tie_decides(sums, places):
    marks = letters(sums, places)
    sure = {b for b, letter in marks.items() if letter == "I"}
    chosen = select_from_scores(np.zeros(9, np.float32), sums, 2 * places - 1)
    reserved = set(chosen.order[: chosen.num_importance].tolist())
    assert sure <= reserved
    if "?" not in marks.values():
        assert sure == reserved
    else:
        tied = [b for b, letter in marks.items() if letter == "?"]
        assert len(set(sums[tied].tolist())) == 1 and len(sure) < places < len(marks)


def test_a_block_without_weight_has_no_rank():
    assert rank(np.array([3.0, 0, 1], np.float32), 1) is None
    assert rank(np.array([3.0, 3.00001, 1], np.float32), 1) == 2  # equal but for rounding


def test_the_twin_holds_the_numbers(explorer):
    for params in ({}, {"queries": "last 1", "rows": "layers"}, {"columns": "tokens"},
                   {"prefill": "sparse, k = 1", "k": 1}):
        r = explorer.compute(**params)
        text = explorer.describe(r)
        assert explorer.prompts[0].fact.sentence in text and r["verdict"] in text
        for name, share in zip(r["names"], r["needle_share"], strict=True):
            line = next(x for x in text.splitlines() if x.startswith(f"{name} "))
            assert percent(share) in line


def test_under_one_flag_at_k_1_rounding_reserves(explorer):
    r = explorer.compute(prefill="sparse, k = 1", k=1)
    assert set(r["letters"]) <= {7, 10} and r["sums"][7] > 0
    assert not r["sums"][[b for b in range(BLOCKS) if b not in (7, 9, 10)]].any()


def test_pictures_and_controls(explorer):
    shown = [explorer.set(columns="tokens").png(),
             explorer.set(columns="blocks", rows="layers", queries="last 13", prompt=1).png()]
    assert len(set(shown)) == 2
    assert explorer.params["prompt"] == 1
    with pytest.raises(ValueError, match="queries"):
        explorer.set(queries="last 7")
    with pytest.raises(ValueError, match="rows"):
        ImportanceMapExplorer(explorer.engine, prompts=explorer.prompts, rows="tokens")
