"""Perplexity: held-out windows, arms, counting, the command and its errors."""

from __future__ import annotations

import json
import math

import numpy as np
import pytest

from course_lib.cli import dispatch, main
from course_lib.engine import Engine
from course_lib.engine.session import log_softmax
from course_lib.errors import CourseError
from course_lib.lab import held_out, perplexity
from course_lib.lab.experiments import packed_engine, perplexity_records, perplexity_summary
from course_lib.lab.held_out import Cost, Window, cost_of, text_windows, total, world_window
from course_lib.lab.perplexity import Arm, PerplexityOptions, measure, results_of, window_costs
from tests.other_tokenizers import other_tokenizer

SMALL = PerplexityOptions(window=128, windows=1)


@pytest.mark.parametrize("tokens", [96, 128, 512])
@pytest.mark.parametrize("kind", ["shipped", "qwen"])
def test_a_window_is_a_conversation_whose_answers_are_marked(shipped_engine, kind, tokens):
    tokenizer = shipped_engine.tokenizer if kind == "shipped" else other_tokenizer(kind)
    tokens = tokens if kind == "shipped" else 3 * tokens
    made = world_window(tokenizer, "a", tokens)
    text = tokenizer.decode(made.ids)
    assert len(made.ids) <= tokens and made == world_window(tokenizer, "a", tokens)
    assert made != world_window(tokenizer, "b", tokens)
    assert made.answers and made.answers[0] >= made.cut == len(made.ids) // 2
    answers = tokenizer.decode([made.ids[p] for p in made.answers]).replace(".", ".\n").split("\n")
    for answer in filter(str.strip, (a.replace("<|im_end|>", "").strip() for a in answers)):
        asked = "What is " + answer.rsplit(" is ", 1)[0] + "?"
        assert text.count(answer) == 2 and text.count(asked) == 1, answer
        assert text.index(answer) < text.index(asked) < text.rindex(answer)


def test_a_window_too_small_for_an_answer_is_refused(shipped_engine):
    with pytest.raises(CourseError, match="larger --window"):
        world_window(shipped_engine, "a", 24)


def test_text_is_cut_into_whole_windows(shipped_engine):
    text = "The old bridge faces the quiet river.\n" * 12
    ids = shipped_engine.encode(text, allow_special=False)
    windows = text_windows(shipped_engine, text + "<|im_end|>", 16, 3)
    assert [w.ids for w in windows] == [tuple(ids[i : i + 16]) for i in (0, 16, 32)]
    assert all(w.cut == 8 and not w.answers for w in windows)
    assert len(text_windows(shipped_engine, text, 16, 99)) == len(ids) // 16
    with pytest.raises(CourseError, match=rf"has {len(ids)} tokens, fewer than one window"):
        text_windows(shipped_engine, text, len(ids) + 1, 1)


def test_costs_are_of_the_second_half_and_of_answers_in_it():
    made = Window(tuple(range(7)), answers=(4, 6))
    assert made.cut == 3
    cost = cost_of(made, [-1.0, -2.0, -4.0, -8.0])
    assert cost == Cost(4, 15.0, 2, 10.0)
    assert total([cost, cost]) == Cost(8, 30.0, 4, 20.0)


def test_a_cost_is_what_the_logits_of_a_forward_pass_say(shipped_engine):
    made = world_window(shipped_engine, "a", 128)
    (cost,) = window_costs(shipped_engine, made, ("f32",), (None,))
    logits = shipped_engine.forward(made.ids)[made.cut - 1 : -1]
    scores = log_softmax(logits)[np.arange(len(logits)), made.ids[made.cut :]]
    assert cost.tokens == len(scores) == len(made.ids) - made.cut
    assert cost.nll == pytest.approx(-scores.sum(dtype=float), abs=1e-3)


def test_arms_are_all_combinations_and_do_what_they_say(shipped_engine):
    options = PerplexityOptions(kvs=("f32", "q8"), ks=(None, 1), window=192, windows=1)
    arms = options.arms()
    assert len(arms) == len(set(arms)) == 3 * 2 * 2
    assert [arm.weights for arm in arms] == ["f32"] * 4 + ["q8_0"] * 4 + ["q4_0"] * 4
    made = perplexity.windows_of(shipped_engine, options)
    found: dict = {}
    asked: list = []

    def engine_of(weights):
        asked.append(weights)
        return shipped_engine if weights == "f32" else packed_engine(weights)

    measure(engine_of, options, made, lambda arm, cost: found.setdefault(arm, []).append(cost))
    assert asked == ["f32", "q8_0", "q4_0"] and list(found) == arms
    results = {r.arm: r for r in results_of(found)}
    assert len({r.perplexity for r in results.values()}) == len(arms)  # no arm is another
    base = results[arms[0]]
    assert base.ratio == 1.0 and base.answer_ratio == 1.0 and 1.0 < base.answer_perplexity < 1.05
    for arm, result in results.items():
        if arm.k is None:
            assert result.ratio == pytest.approx(1, abs=0.03)
            assert result.answer_ratio == pytest.approx(1, abs=0.01)
        else:
            assert result.answer_ratio > 1.5  # one block of eight is too few


def test_selection_has_importance_and_exact_decode_needs_none(shipped_engine, monkeypatch):
    asked: list = []
    prefill = Engine.prefill
    monkeypatch.setattr(Engine, "prefill", lambda self, ids, *, kv, importance: (
        asked.append((len(ids), kv, importance)) or prefill(self, ids, kv=kv)))
    made = world_window(shipped_engine, "a", 96)
    list(window_costs(shipped_engine, made, ("q8",), (None,)))
    list(window_costs(shipped_engine, made, ("f32",), (None, "auto")))
    assert asked == [(made.cut, "q8", "none"), (made.cut, "f32", "all_queries")]


def test_ratios_are_over_the_same_windows_and_sums_are_exponentiated():
    first, second = Arm("f32", "f32", None), Arm("q4_0", "f32", None)
    results = results_of({first: [Cost(2, 2.0, 1, 1.0), Cost(2, 6.0, 1, 3.0)],
                          second: [Cost(2, 4.0, 1, 2.0)], Arm("q8_0", "q8", 4): []})
    assert [r.windows for r in results] == [2, 1]
    assert results[0].perplexity == pytest.approx(math.exp(2))
    assert results[1].perplexity == pytest.approx(math.exp(2))
    assert results[1].ratio == pytest.approx(math.exp(2 - 1))
    assert results[1].answer_ratio == pytest.approx(math.exp(2 - 1))
    (alone,) = results_of({first: [Cost(1, 9999.0, 0, 0.0)]})
    assert alone.perplexity == math.inf and alone.answer_perplexity is None


def test_records_and_their_summary(shipped_engine):
    records = perplexity_records(shipped_engine, SMALL, 0)
    assert [(r["index"], r["weights"], r["kv"], r["k"]) for r in records] == [
        (0, a.weights, a.kv, a.k) for a in SMALL.arms()]
    rows = perplexity_summary(records)
    assert [row["weights"] for row in rows] == [r["weights"] for r in records]
    for row, record in zip(rows, records, strict=True):
        mean = record["nll"] / record["tokens"]
        assert row["perplexity"] == pytest.approx(math.exp(mean), abs=1e-5)
        assert row["tokens"] == record["tokens"]


def test_the_command_prints_a_table_and_json(capsys):
    argv = ["perplexity", "--window", "96", "--windows", "2", "--weights", "q8_0,f32",
            "--kv", "q8", "--decode-k", "exact,auto"]
    assert dispatch(argv) == 0
    rows = [line.split() for line in capsys.readouterr().out.splitlines()[3:]]
    assert [row[:4] for row in rows] == [
        ["q8_0", "q8", "exact", "2"], ["q8_0", "q8", "auto", "2"],
        ["f32", "q8", "exact", "2"], ["f32", "q8", "auto", "2"]]
    assert rows[0][6] == "1.00000" and rows[0][5] == rows[1][5] != rows[2][5]
    assert dispatch([*argv, "--json"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert result["model"] == "data/models/needle-qwen3" and result["window"] == 96
    assert [arm["perplexity"] for arm in result["arms"]] == [
        pytest.approx(float(row[5]), abs=1e-4) for row in rows]


def test_a_text_of_ones_own(tmp_path, capsys):
    path = tmp_path / "notes.txt"
    path.write_bytes("\ufeffThe old bridge faces the quiet river.\r\n".encode() * 9)
    argv = ["perplexity", "--text", str(path), "--window", "32", "--weights", "f32", "--json"]
    assert dispatch(argv) == 0
    result = json.loads(capsys.readouterr().out)
    assert result["text"] == "notes.txt"
    assert [arm["kv"] for arm in result["arms"]] == ["f32", "q8"]
    assert "answer_ratio" not in result["arms"][0] and result["arms"][0]["tokens"] >= 32


@pytest.mark.parametrize("finished, kept", [(0, 0), (2, 2)])
def test_ctrl_c_keeps_finished_windows(monkeypatch, capsys, finished, kept):
    def window_costs(*args, run=perplexity.window_costs):
        for cost in run(*args):
            if len(seen) == finished:
                raise KeyboardInterrupt
            seen.append(cost)
            yield cost

    seen: list = []
    monkeypatch.setattr(perplexity, "window_costs", window_costs)
    assert main(["perplexity", "--window", "96", "--windows", "2", "--weights", "f32",
                 "--json"]) == 130
    captured = capsys.readouterr()
    assert f"course: interrupted; kept {kept} of 4 windows" in captured.err
    arms = json.loads(captured.out)["arms"] if captured.out else []
    assert [(arm["kv"], arm["windows"]) for arm in arms] == [("f32", 1), ("q8", 1)][:kept]


@pytest.mark.parametrize("fails, code, arms", [("q8_0", 1, ["f32"]), ("f32", 2, [])])
def test_weights_that_cannot_be_loaded_cost_only_themselves(
    monkeypatch, capsys, shipped_engine, fails, code, arms
):
    def load(path, weights):
        if weights == fails:
            raise CourseError("too little memory")
        return shipped_engine

    monkeypatch.setattr("course_lib.commands.perplexity.load_with_bar", load)
    assert main(["perplexity", "--window", "96", "--windows", "1", "--weights", "f32,q8_0",
                 "--kv", "q8", "--json"]) == code
    captured = capsys.readouterr()
    assert captured.err.startswith("course: too little memory") and captured.err.count("\n") == 1
    assert ("kept 1 of 2 windows" in captured.err) is bool(arms)
    found = json.loads(captured.out)["arms"] if captured.out else []
    assert [arm["weights"] for arm in found] == arms


@pytest.mark.parametrize("argv, words", [
    (["--weights", "f32,q5"], "must be some of f32, q8_0, q4_0"),
    (["--kv", ""], "must be some of f32, q8"),
    (["--decode-k", "0"], "at least 1"),
    (["--window", "1"], "at least 2"),
    (["--window", "30"], "larger --window"),
    (["--window", "5000"], "context of 4096"),
    (["--model", "no-such-folder"], "no-such-folder"),
    (["--text", "no-such-file"], "no-such-file cannot be read (No such file or directory)"),
    (["--text", "course_lib"], "course_lib cannot be read (Is a directory)"),
    (["--text", "LATIN"], "latin.txt is not UTF-8 at byte 1"),
    (["--text", "SHORT"], "fewer than one window of 512"),
    (["--text", "LONG"], "is longer than 16 MB"),
    (["--text", "/dev/zero"], "/dev/zero is longer than 16 MB"),
])
def test_wrong_values_are_one_sentence(tmp_path, capsys, argv, words):
    for name, content in (("latin.txt", b"a\xff"), ("short.txt", b"Zara")):
        (tmp_path / name).write_bytes(content)
    with (tmp_path / "long.txt").open("wb") as file:
        file.truncate((16 << 20) + 1)
    argv = [str(tmp_path / f"{a.lower()}.txt") if a in ("LATIN", "SHORT", "LONG") else a
            for a in argv]
    assert main(["perplexity", *argv]) == 2
    error = capsys.readouterr().err.strip()
    assert words in error and "\n" not in error and error.startswith("course: ")


def test_a_seed_of_held_out_text_is_no_number(shipped_engine, monkeypatch):
    """Training draws its documents from integers; random.Random treats a text as another seed."""
    seeds: list = []
    real = held_out.random.Random
    monkeypatch.setattr(held_out.random, "Random", lambda seed: seeds.append(seed) or real(seed))
    world_window(shipped_engine, "0-0", 128)
    assert seeds == ["held-out-0-0"]
