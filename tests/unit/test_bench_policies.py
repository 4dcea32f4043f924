"""The bench of prefill policies: its rows, what is compared with what, interrupts, errors."""

from __future__ import annotations

import json

import numpy as np
import pytest

from course_lib.bench import policy_cases, policy_report
from course_lib.bench.policy_cases import CURES, POLICIES, STORES, recall, run_way
from course_lib.cli import main
from course_lib.lab.captured import captured
from course_lib.prefill import BlockChoice

ARGS = ["bench", "--prefill", "--quick", "--threads", "1"]


@pytest.fixture(scope="module")
def layers(shipped_engine):
    return captured(shipped_engine, 512)


@pytest.fixture
def short(monkeypatch, shipped_engine):
    monkeypatch.setattr(policy_report, "QUICK_TOKENS", (512,))
    monkeypatch.setattr(policy_report.Engine, "load", lambda path: shipped_engine)


def choice(*lists):
    return BlockChoice(tuple(np.array(ids, np.int64) for ids in lists))


def test_recall_is_of_what_each_head_reads():
    assert recall([choice([0, 1], [0, 2])], [choice([0, 2])], 2) == 3 / 4
    assert recall([choice([0, 1])], [choice([0, 1], [1])], 2) == 3 / 4
    assert recall([choice([0]), choice([0, 1, 2])], [choice([0]), choice([2])], 1) == 2 / 4
    assert recall([choice([])], [choice([])], 1) == 1.0


def test_what_is_captured_is_what_attention_is_given(layers, shipped_engine):
    assert [layer.q.shape for layer in layers] == [(4, 512, 64)] * 3
    assert [layer.k.shape for layer in layers] == [(2, 512, 64)] * 3
    from course_lib.lab.ruler_tasks import build_ruler_prompt

    ids = list(build_ruler_prompt(shipped_engine, "niah_multikey", 512, "bench").ids)
    session = shipped_engine.prefill(ids, importance="none")
    for number, layer in enumerate(layers):
        assert np.array_equal(session.cache.rows(number).k, layer.k)


def test_a_run_counts_what_its_policy_reads(layers):
    full, _ = run_way(layers, "full", POLICIES["full"], "memory", 1, 1.0)
    quest, choices = run_way(layers, "quest", POLICIES["quest"], "file", 1, 1.0)
    majority, _ = run_way(layers, "xattn", POLICIES["xattn majority"], "memory", 1, 1.0)
    assert (full.bytes, full.load_share, full.estimate_share, full.applied) == (1, 1, 0, 1)
    assert (quest.load_share, quest.estimate_share) == (0.5, 0) and quest.load_ms > 0
    assert majority.estimate_share == 0.5 and majority.estimate_ms > 0
    assert len(choices) == 3  # the first chunk of each layer has no history
    int8, _ = run_way(layers, "int8", CURES["int8 in memory"], "memory", 1, 1.0)
    layer0, _ = run_way(layers, "layer0", CURES["reuse layer0"], "memory", 1, 1.0)
    assert int8.estimate_share == 0 and layer0.estimate_share == pytest.approx(0.5 / 3)


def test_a_slow_file_is_one(layers):
    fast, _ = run_way(layers, "full", POLICIES["full"], "file", 1, 1.0)
    read = 3 * 2 * 2 * 4 * 256 * 64 * 2 / 2  # K and V of one chunk, all layers
    slow, _ = run_way(layers, "full", POLICIES["full"], "slow file", 1, read / 0.2)
    assert slow.load_ms >= 200 * 0.95 > 0 and fast.bytes == slow.bytes == 1


def test_the_command_writes_a_row_for_every_way(short, tmp_path, capsys):
    path, table = tmp_path / "rows.json", tmp_path / "rows.csv"
    assert main([*ARGS, "--json", str(path), "--csv", str(table)]) == 0
    rows = json.loads(path.read_text())
    ways = [(row["policy"], row["store"]) for row in rows if row["recall"] is None]
    assert ways == [(name, kind) for kind in STORES for name in POLICIES]
    cures = [row for row in rows if row["recall"] is not None]
    assert [row["policy"] for row in cures] == list(CURES)
    assert cures[0]["recall"] == 1.0 and all(0 < row["recall"] <= 1 for row in cures)
    assert len(table.read_text().splitlines()) == 1 + len(rows)
    out = capsys.readouterr().out
    assert out.count("break-even where reading decides") == len(POLICIES) - 1
    assert "xattn K and V: 1.00 of full's bytes choose, so nothing wins;" in out
    assert "512 tokens, 1 thread; exact in one pass" in out


def test_nothing_is_kept_of_lengths_that_are_interrupted(short, monkeypatch, capsys):
    def interrupted(*args):
        raise KeyboardInterrupt

    monkeypatch.setattr(policy_report, "run_way", interrupted)
    assert main(ARGS) == 130
    out, err = capsys.readouterr()
    assert out == "" and err == "course: interrupted; kept what was finished\n"


@pytest.mark.parametrize("wrong", [["--engine"], ["--grading"], ["--only", "prefill"]])
def test_it_is_a_bench_of_its_own(wrong, capsys):
    assert main([*ARGS, *wrong]) == 2
    assert "--prefill is a bench of its own" in capsys.readouterr().err


def test_chunks_hold_whole_blocks():
    assert policy_cases.CHUNK % policy_cases.BLOCK == 0
