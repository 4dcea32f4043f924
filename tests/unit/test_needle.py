"""The needle experiment and its command: arms, counting, JSON, errors."""

from __future__ import annotations

import json
from dataclasses import replace
from itertools import islice

import numpy as np
import pytest

from course_lib.cli import main
from course_lib.engine import Engine, Generation
from course_lib.lab.needle import (
    Arm,
    NeedleOptions,
    holds_value,
    prefilled,
    prompt_of,
    run_prompt,
    run_trials,
    trial_of,
)
from course_lib.lab.needle_results import run_needle, summarize
from course_lib.lab.policy_options import PolicyOptions
from course_lib.lab.prompts import ARTICLE_FACT

SHORT = {"tokens": 320, "max_new_tokens": 12}


@pytest.mark.parametrize("text, held", [
    ("It is ramen.", True), ("ramen", True), ("It is ramens.", False), ("a ramen-bowl", True),
    ("karamen", False), ("", False), ("RAMEN", False),
])
def test_a_value_is_held_as_a_whole_word(text, held):
    assert holds_value(text, "ramen") is held


def test_a_value_with_pattern_characters_is_taken_literally():
    assert not holds_value("axb", "a.b")


def test_the_first_prompt_of_seed_0_hides_the_articles_needle(shipped_engine):
    assert prompt_of(shipped_engine, NeedleOptions(**SHORT), 0).fact == ARTICLE_FACT
    assert prompt_of(shipped_engine, NeedleOptions(seed=1, **SHORT), 0).fact != ARTICLE_FACT


def test_exact_runs_first_and_arms_follow_the_flags():
    def phases(**options):
        return [(a.k, a.decode_k, a.prefill_k) for a in NeedleOptions(**options).arms()]

    assert phases(ks=(8, 1)) == [("exact", None, None), (8, 8, None), (1, 1, None)]
    assert phases(ks=(8, 1), prefill_k=4) == [("exact", None, None), (8, 8, 4), (1, 1, 4)]
    assert phases(ks=(8, 1), one_flag=True) == [("exact", None, None), (8, 8, 8), (1, 1, 1)]


def test_shares_blocks_and_identity(shipped_engine):
    options = NeedleOptions(prompts=3, ks=(99, 1), **SHORT)
    exact, everything, one = run_needle(shipped_engine, options)
    assert exact.identical_to_exact == 1.0
    assert everything.texts == exact.texts and everything.identical_to_exact == 1.0
    assert everything.blocks_read_per_token == exact.blocks_read_per_token > 10
    assert one.blocks_read_per_token == 1.0
    assert one.recall < exact.recall == 1.0
    assert all(arm.attn_ms_per_token > 0 for arm in (exact, everything, one))


def test_the_first_token_does_not_count_as_recall(shipped_engine):
    """It comes from prefill, so a sparse decode cannot take credit for it."""
    options = NeedleOptions(prompts=1, ks=(), tokens=320, max_new_tokens=1)
    (exact,) = run_needle(shipped_engine, options)
    assert exact.recall == 0.0 and exact.texts[0]


def test_recall_reads_what_decode_wrote_and_identity_every_token(shipped_engine):
    prompt = prompt_of(shipped_engine, NeedleOptions(**SHORT), 0)
    value = shipped_engine.encode(" ramen", allow_special=False)
    others = shipped_engine.encode(" is tea.", allow_special=False)

    def trial(ids, exact):
        return trial_of(shipped_engine, prompt, Generation(ids=ids), Generation(ids=exact))

    assert not trial([*value, *others], others).recalled
    assert trial([*others, *value], others).recalled
    exact = [*others, *value, *others]
    assert trial(exact, exact).identical
    assert not trial([*exact[:-1], *value], exact).identical
    assert not trial(exact[:-1], exact).identical


def test_an_arm_is_summed_up_by_shares_and_the_median_time(shipped_engine):
    prompt = prompt_of(shipped_engine, NeedleOptions(**SHORT), 0)
    ids = shipped_engine.encode("is ramen", allow_special=False)
    made = [Generation(ids=ids, attn_ms=[1.0, 2.0], blocks_read=[4.0, 2.0]),
            Generation(ids=ids[:1], attn_ms=[9.0], blocks_read=[1.0])]
    trials = [trial_of(shipped_engine, prompt, m, made[0]) for m in made]
    result = summarize(Arm(4, 4, None), trials)
    assert (result.recall, result.identical_to_exact) == (0.5, 0.5)
    assert (result.attn_ms_per_token, result.blocks_read_per_token) == (2.0, 2.0)


@pytest.mark.parametrize("finished, arms, kept, prompts, names", [
    (0, 0, "0 of 3 prompts", 0, []),
    (0, 1, "1 of 2 arms of one prompt", 1, ["exact"]),
    (1, 0, "1 of 3 prompts", 1, ["exact", 1]),
    (1, 1, "1 of 3 prompts", 1, ["exact", 1]),
])
def test_ctrl_c_keeps_finished_prompts_or_the_first_one_s_arms(
    monkeypatch, capsys, finished, arms, kept, prompts, names
):
    from course_lib.lab import needle

    def run_prompt(engine, prompt, options, run=needle.run_prompt, **more):
        if len(seen) == finished:
            yield from islice(run(engine, prompt, options), arms)
            raise KeyboardInterrupt
        seen.append(prompt)
        yield from run(engine, prompt, options)

    seen: list = []
    monkeypatch.setattr(needle, "run_prompt", run_prompt)
    argv = ["needle", "--tokens", "320", "--k", "1", "--prompts", "3", "--max-new-tokens", "4"]
    assert main([*argv, "--json"]) == 130
    captured = capsys.readouterr()
    assert f"course: interrupted; kept {kept}\n" in captured.err
    result = json.loads(captured.out) if captured.out else {"prompts": 0, "arms": []}
    assert result["prompts"] == prompts and [arm["k"] for arm in result["arms"]] == names


def test_auto_is_an_arm(shipped_engine):
    options = NeedleOptions(ks=("auto", 4), **SHORT)
    assert [(a.k, a.decode_k) for a in options.arms()][1] == ("auto", "auto")
    exact, auto, _ = run_needle(shipped_engine, options)
    assert auto.k == "auto" and auto.texts == exact.texts  # 10 blocks are too few to choose from
    with pytest.raises(ValueError, match="one_flag needs a number"):
        NeedleOptions(ks=("auto",), one_flag=True).arms()


def test_every_option_of_prefill_reaches_it(shipped_engine, monkeypatch):
    calls: list[dict] = []

    def prefill(self, ids, *, prefill_group=None, on_progress=None, prefill=Engine.prefill, **kw):
        calls.append({**kw, "prefill_group": prefill_group})
        return prefill(self, ids, **kw)

    monkeypatch.setattr(Engine, "prefill", prefill)
    monkeypatch.setattr("course_lib.commands.needle_local.load_with_bar",
                        lambda *args: loaded.append(args) or shipped_engine)
    loaded: list = []
    argv = ["needle", "--tokens", "320", "--k", "9", "auto", "--max-new-tokens", "2", "--json",
            "--importance", "last_window", "--window", "13", "--kv", "q8", "--prefill-k", "5",
            "--prefill-group", "8", "--weights", "q8_0", "--model", "some-model"]
    assert main(argv) == 0
    same = {"kv": "q8", "importance": "last_window", "window": 13}
    assert calls == [{**same, "prefill_k": None, "prefill_group": None},
                     {**same, "prefill_k": 5, "prefill_group": 8}]
    assert loaded == [("some-model", "q8_0")]


def test_a_session_that_no_later_arm_needs_is_dropped(shipped_engine):
    options = NeedleOptions(ks=(8, 4), one_flag=True, **SHORT)
    sessions: dict = {}
    held = [set(sessions) for _ in run_prompt(
        shipped_engine, prompt_of(shipped_engine, options, 0), options, sessions)]
    assert held == [{None}, {8}, {4}] and not sessions


def test_progress_is_told_by_phase(shipped_engine):
    seen: list = []
    options = NeedleOptions(ks=(), **SHORT)
    (trials,) = run_trials(shipped_engine, options, on_progress=lambda *told: seen.append(told))
    decode = [told for told in seen if told[0] == "decode"]
    assert decode == [("decode", n + 1, 12) for n in range(len(trials[0].attn_ms))]
    prefill = [told[1:] for told in seen if told[0] == "prefill"]
    assert seen[: len(prefill)] == [("prefill", *told) for told in prefill]
    (total,) = {total for _, total in prefill}
    done = [done for done, _ in prefill]
    assert done == sorted(done) and done[-1] == total


def test_groups_of_sparse_prefill_change_what_is_cached(shipped_engine):
    options = NeedleOptions(ks=(8,), prefill_k=2, **SHORT)
    prompt = prompt_of(shipped_engine, options, 0)

    def values(**more):
        session = prefilled(shipped_engine, prompt, replace(options, **more), 2)
        return session.cache.rows(1).v.copy()

    batch, four = values(), values(prefill_group=4)
    assert not np.array_equal(batch, four)
    assert np.array_equal(values(prefill_group=256), batch)
    exact = prefilled(shipped_engine, prompt, replace(options, prefill_group=4), None)
    assert not np.array_equal(exact.cache.rows(1).v, four)


def test_a_wrong_backend_is_said_before_the_work(monkeypatch, capsys):
    def load(*args):
        raise AssertionError("the model was loaded first")

    monkeypatch.setenv("COURSE_KERNEL", "zz")
    monkeypatch.setattr(Engine, "load", load)
    assert main(["needle"]) == 2
    assert "COURSE_KERNEL=zz" in capsys.readouterr().err


def test_json_is_the_only_thing_on_stdout(capsys):
    code = main(["needle", "--tokens", "320", "--k", "8,2", "--k", "1", "--json",
                 "--prompts", "2", "--max-new-tokens", "10"])
    captured = capsys.readouterr()
    assert code == 0
    result = json.loads(captured.out)
    assert {"model", "backend", "tokens", "prompts", "seed", "kv", "importance", "arms"} <= set(
        result
    )
    assert [arm["k"] for arm in result["arms"]] == ["exact", 1]
    assert set(result["arms"][0]) == {
        "k", "decode_k", "prefill_k", "recall", "identical_to_exact", "attn_ms_per_token",
        "blocks_read_per_token", "texts", "policy", "applied_density", "bytes_density",
    }
    assert result["prompts"] == len(result["arms"][0]["texts"]) == 2
    assert not result["model"].startswith("/")


@pytest.mark.parametrize("argv, words", [
    (["--tokens", "5000"], "do not fit the model's context of 4096"),
    (["--tokens", "12"], "needs at least"),
    (["--k", "0"], "at least 1"),
    (["--k", "2,x"], "at least 1"),
    (["--position", "2"], "from 0 to 1"),
    (["--importance", "tail"], "all_queries"),
    (["--kv", "q3"], "q8"),
    (["--template", "raw"], "bare"),
    (["--one-flag", "--prefill-k", "4"], "not allowed with"),
    (["--model", "no-such-folder"], "no-such-folder"),
    (["--promts", "3"], "did you mean --prompts"),
    (["--weights", "q2"], "q4_0"),
    (["--k", "8,audo"], "at least 1"),
    (["--one-flag", "--k", "auto"], "--one-flag needs a number"),
    (["--window", "13"], "--window needs --importance last_window"),
    (["--prefill-group", "4"], "give --prefill-k too"),
    (["--served-model", "x"], "--served-model is about a server: give its --url"),
    (["--timeout", "3"], "--timeout is about a server: give its --url"),
    (["--policy", "best"], "unknown prefill policy 'best'; there are full, quest, xattn"),
    (["--policy", "xattn", "--sparse-threshold", "9"], "not 9; did you mean 0.9?"),
    (["--policy", "xattn", "--chunk", "1000"], "give 1024"),
    (["--policy", "xattn", "--prefill-k", "3"], "not allowed with"),
    (["--policy", "quest", "--sparse-threshold", "0.5"], "is about --policy xattn: leave it out"),
    (["--policy", "full", "--aggregate", "any"], "--aggregate is about --policy xattn"),
    (["--sparse-threshold", "0.5"], "--sparse-threshold is about --policy: give one"),
    (["--offload"], "--offload is about --policy"),
    (["--policy", "full", "--ram-budget", "4"], "--ram-budget needs --offload"),
    (["--policy", "full", "--importance", "last_window"], "--importance last_window needs the"),
    (["--policy", "xattn", "--importance", "all_queries"], "leave one of them out"),
    (["--policy", "full", "--offload", "--ram-budget", "0"], "a number of megabytes above 0"),
    (["--policy", "full", "--offload", "--ram-budget", "0.001"], "smaller than one block"),
    (["--policy", "full", "--url", "http://127.0.0.1:9"], "--policy is for an engine here"),
])
def test_wrong_values_are_one_sentence_and_exit_2(capsys, argv, words):
    assert main(["needle", *argv]) == 2
    error = capsys.readouterr().err.strip()
    assert words in error and "\n" not in error and error.startswith("course: ")


def test_the_report_shows_every_arm(capsys):
    assert main(["needle", "--tokens", "320", "--k", "1", "--max-new-tokens", "8"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert any(line.split()[:2] == ["exact", "exact"] for line in lines)
    assert any(line.split()[:2] == ["1", "exact"] for line in lines)
    assert "Zara's favorite food is ramen." in lines[1]


def test_a_policy_prefills_every_arm_but_exact(capsys):
    args = ["needle", "--tokens", "320", "--policy", "xattn", "--sparse-threshold", "1",
            "--aggregate", "per_head", "--chunk", "128", "--offload", "--ram-budget", "0.5"]
    assert main([*args, "--k", "1", "--max-new-tokens", "9", "--json"]) == 0
    record = json.loads(capsys.readouterr().out)
    exact, all_read, one = record["arms"]
    assert [(a["k"], a["policy"]) for a in record["arms"]] == [
        ("exact", None), ("exact", "xattn"), (1, "xattn")]
    assert exact["applied_density"] is None and all_read["applied_density"] == 1.0
    assert 1.0 < all_read["bytes_density"] < 1.5  # K is read once more, not by a short last chunk
    assert all_read["texts"] == exact["texts"] and one["blocks_read_per_token"] == 1.0
    assert record["policy"] == {
        "name": "xattn", "threshold": 1.0, "aggregate": "per_head", "chunk": 128,
        "block_size": 128, "offload": True, "ram_budget": 500_000}


def test_a_policy_alone_compares_two_prefills(capsys):
    assert main(["needle", "--tokens", "320", "--policy", "full", "--chunk", "128",
                 "--max-new-tokens", "9"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[:4] for line in lines if line.lstrip().startswith("exact")] == [
        ["exact", "exact", "1.000", "1.000"], ["exact", "full", "1.000", "1.000"]]
    assert lines[-1].startswith("full: chunks of 128, rows in memory; attention computed 1.000")


def test_arms_share_the_session_of_their_policy(shipped_engine):
    options = NeedleOptions(ks=(4,), policy=PolicyOptions("full", chunk=128), **SHORT)
    prompt, sessions = prompt_of(shipped_engine, options, 0), {}
    held = [set(sessions) for _ in run_prompt(shipped_engine, prompt, options, sessions)]
    assert held == [{None}, {"full"}, {"full"}] and not sessions
    with pytest.raises(ValueError, match="the options name no policy 'quest'"):
        prefilled(shipped_engine, prompt, options, "quest")
