"""The k sweep shows what the recorded runs hold, and a live answer is the engine's own."""

from __future__ import annotations

import pytest

from course_lib.engine import generate_from
from course_lib.lab.intervals import wilson
from course_lib.lab.needle import MAX_NEW_TOKENS, NeedleOptions, prompt_of
from course_lib.lab.prompt_study import prompt_study
from course_lib.lab.runs import load_run
from course_lib.show import KSweepExplorer
from course_lib.show.k_sweep import KS, SETUPS, TILES
from course_lib.show.text import percent


@pytest.fixture(scope="module")
def explorer(shipped_engine):
    return KSweepExplorer(shipped_engine)


@pytest.mark.parametrize("setup", SETUPS)
def test_the_curves_and_tiles_are_the_recorded_ones(explorer, setup):
    records = load_run(SETUPS[setup][0])["records"]
    for k in (32, 2):
        r = explorer.compute(setup=setup, k=k, prompt=5)
        arm = [x for x in records if x["k"] == k]
        hits, n, low, high, _ = r["curves"][setup][k]
        assert (hits, n) == (sum(x["recalled"] for x in arm), len(arm))
        assert (low, high) == wilson(hits, n)
        assert r["tiles"] == [x["recalled"] for x in sorted(arm, key=lambda x: x["index"])][:TILES]
        assert r["text"] == next(x["text"] for x in arm if x["index"] == 5)
        text = explorer.describe(r)
        assert f"{hits}/{n}" in text and percent(hits / n) in text and repr(r["text"]) in text


def test_a_live_answer_is_a_run_of_the_engine(shipped_engine, explorer):
    prompt = prompt_of(shipped_engine, NeedleOptions(seed=1), 2)
    session = prompt_study(shipped_engine, prompt).session
    r = explorer.compute(k=2, prompt=2, text="live")
    assert list(r["live"].ids) == generate_from(session, MAX_NEW_TOKENS, 2).ids
    assert r["live"].recalled == r["recalled"] and "live:" in explorer.describe(r)
    session = prompt_study(shipped_engine, prompt, prefill_k=1).session
    said = generate_from(session, MAX_NEW_TOKENS, 1)
    assert list(explorer.live("one flag", 1, 2).ids) == said.ids


def test_pictures_and_controls(explorer):
    pictures = {explorer.set(k=KS[-1]).png(), explorer.set(setup="one flag").png()}
    assert len(pictures) == 2
    with pytest.raises(ValueError, match="k"):
        KSweepExplorer(explorer.engine, k=3)
    with pytest.raises(ValueError, match="prompt must lie between"):
        explorer.set(prompt=60)
    assert explorer.params["setup"] == "one flag"
