"""The bench of prefill policies: its rows, what is compared with what, interrupts, errors."""

from __future__ import annotations

import json

import numpy as np
import pytest

from course_lib.bench import policy_cases, policy_report, prefill_speed, prefill_speed_report
from course_lib.bench.policy_cases import CURES, POLICIES, STORES, recall, run_way
from course_lib.bench.prefill_speed import Ran, Speed, SpeedRecord, Turn, small, usual
from course_lib.cli import main
from course_lib.lab.captured import captured
from course_lib.prefill import BlockChoice

ARGS = ["bench", "--prefill", "--quick", "--threads", "1"]


@pytest.fixture(scope="module")
def layers(shipped_engine):
    return captured(shipped_engine, 512)


@pytest.fixture(scope="module")
def speed(layers):
    return Speed(layers, "shipped model", 1)


@pytest.fixture
def short(monkeypatch, shipped_engine):
    monkeypatch.setattr(policy_report, "QUICK_TOKENS", (512,))
    monkeypatch.setattr(prefill_speed_report, "QUICK", (512,))
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
    written = json.loads(path.read_text())
    rows, speed = ([row for row in written if ("policy" in row) == wanted]
                   for wanted in (True, False))
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
    assert "speed on shipped model, 512 tokens, 1 thread: chunks of 256, blocks of 64" in out
    assert all(row["what"] in out and row["tokens"] == 512 for row in speed)


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


# --- the speed to reach --------------------------------------------------------------------------


def turn(**changed):
    ran = {name: Ran(1.0, 0.0, 0.9, 0.1, 1.0, 5) for name in ("full", "file", "slow",
                                                             "full_small")}
    some = {"dense": 1.0, "estimates": [0.1] * 3, **ran, "merging": 0.05,
            "sparse": [Ran(0.4 + at / 10, 0.1, 0.2, 0, share, 0)
                       for at, share in enumerate((0.5, 0.2, 0.3, 0.1))]}
    return Turn(**some | changed)


def test_each_ratio_stands_beside_its_limit(speed):
    turns = [turn(), turn(dense=0.5, slow=Ran(1.2, 0, 0, 1.1, 1, 0)), turn(dense=2.0)]
    estimates = speed._estimates(turns)
    assert [r.value for r in estimates] == [0.1] * 3 and estimates[2].limit == 1.5 / 16
    assert [r.met for r in estimates] == [True, True, False]
    *ratios, faster = speed._sparse(turns)
    assert [r.share for r in ratios] == [0.5, 0.2, 0.3, 0.1]
    assert ratios[0].limit == pytest.approx(0.1 + 1.15 * 0.5) and ratios[0].value == 0.4
    assert faster.share == 0.3 and faster.value == pytest.approx(1 / 0.6)
    assert faster.at_least and faster.limit == 1.85 and not faster.met
    assert len(speed._sparse([turn(sparse=[Ran(1, 0, 1, 0, 0.4, 0)] * 4)])) == 4
    merging, bookkeeping, file, slow, memory, growth = speed._parts(turns)
    assert merging.value == pytest.approx(0.05 * 0.9)
    assert bookkeeping.value == pytest.approx(0.1) and file.value == 1.0
    assert slow.value == 1.0 and memory.value == 5 / (9 * speed._block_bytes(64))
    assert growth.value == 0 and growth.met


def test_what_is_measured_is_what_is_named(speed):
    full, file = speed.full(), speed.offloaded()
    slow = speed.offloaded(speed.slow)
    assert full.applied == file.applied == slow.applied == 1.0
    assert full.loading == 0 < file.loading and full.attention <= full.seconds
    assert slow.loading > 0.3 * full.seconds
    assert file.resident == speed.budget + speed._block_bytes(64)
    assert speed.sparse(prefill_speed.per_head(0.02)).applied < 1
    assert 0 < speed.merging() < 1 and speed.estimate(8) > 0


def test_each_run_has_blocks_and_threads_of_its_own(speed, monkeypatch):
    threads = []
    monkeypatch.setattr(prefill_speed.Kernels, "set_threads", lambda _, n: threads.append(n))
    monkeypatch.setattr(prefill_speed, "run", lambda chunks, make, store: (
        chunks[0][0].q.shape[1], store.block_size))
    assert speed.full() == speed.offloaded() == (256, 64)
    assert speed.sparse(prefill_speed.FullAttentionPolicy) == (64, 16)
    speed.threads = 3
    speed.merging()
    assert threads == [1, 3]


def test_chunks_are_the_engines_and_for_sparse_runs_eighths_of_a_prompt():
    lengths = (200, 1024, 2048, 4096, 8192, 16384)
    assert [usual(n) for n in lengths] == [(100, 25), (512, 128), *[(1024, 128)] * 4]
    assert [small(n) for n in lengths] == [
        (64, 16), (128, 32), (256, 64), (512, 128), (1024, 128), (2048, 128)]


def test_a_merge_takes_as_long_as_more_rows_take_longer(layers, monkeypatch):
    """Calls that cost something for themselves and something for each row."""
    now = [0.0]
    monkeypatch.setattr(prefill_speed.time, "perf_counter", lambda: now[0])
    monkeypatch.setattr(prefill_speed, "merge_part", lambda out, lse, part, part_lse: (
        now.__setitem__(0, now[0] + 5.0 + 0.25 * len(out))))
    speed = Speed.__new__(Speed)
    speed.d = 64
    assert speed._merge_seconds() == 0.25


def test_layers_behind_the_last_one_wanted_are_not_computed(shipped_engine, layers, monkeypatch):
    computed, attention = [], prefill_speed_report.causal_attention
    monkeypatch.setattr(prefill_speed_report, "causal_attention",
                        lambda *rows: computed.append(1) or attention(*rows))
    found = prefill_speed_report.some_layers(shipped_engine, 512, (0, 1))
    assert len(found) == 2 and len(computed) == 1
    assert all(np.array_equal(a.q, b.q) for a, b in zip(found, layers, strict=False))


def test_the_small_model_is_measured_where_it_is_installed(shipped_engine, monkeypatch):
    monkeypatch.setattr(prefill_speed_report, "locate", lambda name: None)
    assert [(p.source, p.tokens) for p in prefill_speed_report.prompts(
        shipped_engine, quick=False)] == [
            ("shipped model", 2048), ("shipped model", 4096), ("synthetic topics", 16384)]
    monkeypatch.setattr(prefill_speed_report, "locate", lambda name: "small.gguf")
    monkeypatch.setattr(prefill_speed_report.Engine, "load", lambda path: shipped_engine)
    some = list(prefill_speed_report.prompts(shipped_engine, quick=False))
    assert [p.tokens for p in some if p.source == "SmolLM2-135M"] == [2048, 4096, 8192]
    assert [p.tokens for p in prefill_speed_report.prompts(shipped_engine, quick=True)] == [1024]


def test_a_limit_that_is_passed_has_a_star(capsys):
    import sys

    prefill_speed_report.report(sys.stdout, [
        SpeedRecord("a / b", "shipped model", 2048, 2, 1.2, 1.0),
        SpeedRecord("b / a", "shipped model", 2048, 2, 1.2, 1.0, at_least=True, share=0.25)])
    lines = capsys.readouterr().out.splitlines()
    assert lines[1:3] == [
        "speed on shipped model, 2048 tokens, 2 threads: chunks of 1024, blocks of 128, 8 slots; "
        "estimates and", "per_head: chunks of 256, blocks of 64"]
    assert lines[4].split() == ["a", "/", "b", "1.200", "<=", "1.000", "*"]
    assert lines[5].split() == ["b", "/", "a", "1.200", ">=", "1.000", "0.25"]
