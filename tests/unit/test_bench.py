"""`./course bench`: what it writes and compares, what an interrupt keeps. No time is asserted."""

from __future__ import annotations

import csv
import io
import json
import math
import os
import re
from functools import partial

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import kernels_pyx
from course_lib import backend, cli, sparse
from course_lib.bench import (
    attention_cases,
    linear_cases,
    machine,
    memory,
    model_cases,
    prefill_cases,
    records,
    report,
    run,
    table,
    timing,
)
from course_lib.bench.groups import Bench, Group, Plan, Work, chosen
from course_lib.bench.machine import Peaks
from course_lib.bench.records import Record
from course_lib.bench.run import Measured
from course_lib.errors import CourseError
from course_lib.kvcache import KVCache
from course_lib.paths import DATA, ROOT

COLUMNS = ["kernel", "variant", "kv", "context", "threads", "ms", "gb_per_s", "bandwidth_fraction",
           "vs_numpy", "vs_portable"]
ARENA = 4 * 2**20

needs_kernels = pytest.mark.skipif(
    not kernels_pyx.VARIANTS and os.environ.get("COURSE_REQUIRE_KERNELS") != "1",
    reason="the kernels are not compiled here",
)
each_backend = pytest.mark.parametrize("name", [
    "numpy", *(pytest.param(v, marks=needs_kernels) for v in kernels_pyx.VARIANTS or ("portable",))
])


@pytest.fixture(autouse=True)
def short_and_restored(monkeypatch):
    monkeypatch.setattr(run, "SECONDS", 0.0)
    monkeypatch.setattr(machine, "ROUNDS_OF_ARITHMETIC", 16)
    monkeypatch.setattr(timing, "ROUNDS", 2)
    yield
    if kernels_pyx.VARIANTS:
        kernels_pyx.set_num_threads(1)


def tiny_plans():
    return [Plan("attention", f"attention {kv}", partial(attention_cases.build, kv, 80), quick=True)
            for kv in ("q8", "f32")] + [
            Plan("linear", f"{form} {batch}", partial(linear_cases.build, form, 64, 32, batch),
                 all_threads=False)
            for form in linear_cases.FORMATS for batch in (1, 5)] + [
            Plan("prefill", "prefill", partial(prefill_cases.build_attention, 40)),
            Plan("prefill", "antidiagonal", prefill_cases.build_antidiagonal),
            Plan("prefill", "mass", prefill_cases.build_block_sums),
            Plan("prefill", "merge", prefill_cases.build_merge),
            Plan("prefill", "rows", prefill_cases.build_quantize),
            Plan("prefill", "layers", prefill_cases.build_layers)]


def bench(name, **options):
    out = io.StringIO()
    with backend.using(name):
        code = report.bench(out, plans=options.pop("plans", tiny_plans()), arena_size=ARENA,
                            **options)
    return code, out.getvalue()


# ---- Rows and files ----

SAMPLE = [
    Record("two_pass", "avx2", "q8", 512, 1, 0.123456, 20.55555, 0.81, 12.0, 3.5),
    Record("gemv_q8_0 64x32", "avx2", None, None, 2, 1.0),
]


def test_the_json_file_holds_the_stated_columns_and_no_more():
    rows = json.loads(records.json_text(SAMPLE))
    assert [list(row) for row in rows] == [COLUMNS, COLUMNS]
    assert rows[0]["ms"] == 0.1235 and rows[0]["gb_per_s"] == 20.56 and rows[0]["context"] == 512
    assert rows[1]["kv"] is None and rows[1]["vs_numpy"] is None
    assert json.loads(records.json_text([])) == []


def test_the_csv_file_says_the_same_with_empty_cells():
    rows = list(csv.DictReader(io.StringIO(records.csv_text(SAMPLE))))
    assert [list(row) for row in rows] == [COLUMNS, COLUMNS]
    for row, expected in zip(rows, json.loads(records.json_text(SAMPLE)), strict=True):
        assert row == {k: "" if v is None else str(v) for k, v in expected.items()}
    assert records.csv_text([]) == ",".join(COLUMNS) + "\n"


def test_an_old_file_stays_whole_when_writing_fails(tmp_path, monkeypatch):
    path = tmp_path / "rows.json"
    path.write_text("old")

    def full(*args):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "replace", full)
    with pytest.raises(CourseError, match="rows.json was not written: No space left"):
        records.write(str(path), "new")
    assert path.read_text() == "old" and list(tmp_path.iterdir()) == [path]


# ---- Times ----

def test_medians_of_interleaved_calls():
    times = {"a": [9, 1, 2, 3], "b": [9, 10, 40, 20]}  # the first of each does not count
    now, order = [0.0], []

    def call(name):
        order.append(name)
        now[0] += times[name].pop(0)

    clock = lambda: now[0]  # noqa: E731
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(timing, "ROUNDS", 3)
        found = timing.interleaved({n: partial(call, n) for n in times}, clock=clock)
    assert found == {"a": 2, "b": 20}
    assert order == ["a", "b"] * 4


def test_a_settled_call_is_made_twice_and_timed_once():
    now, made = [0.0], []

    def call(name, seconds):
        made.append(name)
        now[0] += seconds if made[-2:] == [name, name] else 10 * seconds

    found = timing.interleaved({"a": partial(call, "a", 1.0), "b": partial(call, "b", 2.0)},
                               clock=lambda: now[0], settled=["a"])
    assert found == {"a": 1.0, "b": 20.0}
    assert made == ["a", "b"] + timing.ROUNDS * ["a", "a", "b"]


@pytest.mark.parametrize(("seconds", "rounds"), [(0, 7), (9.5, 10), (1000, 41)])
def test_more_rounds_while_there_is_time(seconds, rounds, monkeypatch):
    monkeypatch.setattr(timing, "ROUNDS", 7)
    now = [0.0]

    def call():
        now[0] += 1.0

    timing.interleaved({"a": call}, seconds, clock=lambda: now[0])
    assert now[0] == 1 + rounds


def test_crossing_between_two_contexts():
    dense = {1024: 1.0, 2048: 2.0, 4096: 4.0}
    assert timing.crossing(dense, {1024: 2.0, 2048: 2.5, 4096: 3.2}) == (2048, 4096, 2896)
    assert timing.crossing(dense, {1024: 0.5, 2048: 0.5, 4096: 0.5}) == (None, 1024, None)
    assert timing.crossing(dense, {1024: 1.0, 2048: 2.0, 4096: 4.0}) == (4096, None, None)
    # Faster once and slower again: what counts is from where on it stays faster.
    assert timing.crossing(dense, {1024: 0.5, 2048: 3.0, 4096: 2.0})[:2] == (2048, 4096)
    for bad in ({}, {1024: 1.0}):
        with pytest.raises(ValueError, match="same contexts"):
            timing.crossing(dense, bad)
    with pytest.raises(ValueError, match="same contexts"):
        timing.crossing({}, {})


@given(st.floats(0.5, 50), st.floats(1, 30), st.floats(0.001, 0.1))
def test_crossing_finds_where_two_lines_meet(fixed, dense_slope, sparse_slope):
    contexts = [512 * 2**i for i in range(6)]
    dense = {n: dense_slope * n / 1024 for n in contexts}
    pruned = {n: fixed + sparse_slope * n / 1024 for n in contexts}
    meeting = 1024 * fixed / (dense_slope - sparse_slope)
    slower, faster, estimate = timing.crossing(dense, pruned)
    if faster is None:
        assert meeting >= contexts[-1] * (1 - 1e-9)
    elif slower is None:
        assert meeting <= contexts[0] * (1 + 1e-9)
    else:
        assert slower <= meeting * (1 + 1e-9) and meeting <= faster * (1 + 1e-9)
        assert slower <= estimate <= faster


# ---- Memory ----

def test_the_rotation_shows_all_memory_before_any_of_it_again():
    arena = memory.Arena(1000)
    arena.fill("int8", lambda count: np.arange(300) % 100)
    assert arena.bytes.view(np.int8).tolist() == [i % 300 % 100 for i in range(1000)]
    sets = arena.sets(lambda at: arena.array(at, (5, 12), "float32"), 240)
    assert len(sets.all) == 4
    seen = [sets.next() for _ in range(8)]
    assert [id(a) for a in seen[:4]] == [id(a) for a in seen[4:]]
    places = sorted(a.ctypes.data - arena.bytes.ctypes.data for a in seen[:4])
    assert places == [0, 240, 480, 720]
    with pytest.raises(MemoryError, match="1001 bytes does not fit 1000"):
        arena.sets(lambda at: at, 1001)


def test_a_small_machine_rotates_a_third_of_its_free_memory():
    assert memory.arena_bytes(None) == memory.arena_bytes(8 * 2**30) == 512 * 2**20
    assert memory.arena_bytes(600 * 2**20) == 200 * 2**20
    assert memory.arena_bytes(0) == 2 * 2**20
    text = report.about(machine.Kernels(), 200 * 2**20)
    assert "200 MB" in text and "not 512: a third of the free memory" in text


@needs_kernels
@pytest.mark.parametrize("variant", kernels_pyx.VARIANTS or ("portable",))
@pytest.mark.parametrize("threads", [1, 3])
def test_the_probe_reads_every_word(variant, threads):
    operations = kernels_pyx.kernels(variant)
    kernels_pyx.set_num_threads(threads)
    rng = np.random.default_rng(3)
    for count in (0, 1, 7, 31, 32, 33, 64, 1000, 12345):
        words = rng.integers(-(2**31), 2**31, count, np.int32)
        assert operations["read_words"](words) == int(words.sum(dtype=np.int64)) % 2**32
    words = rng.integers(-(2**31), 2**31, 1000, np.int32)
    first = rng.integers(0, 900, 37)
    total = sum(int(words[f : f + 100].sum(dtype=np.int64)) for f in first)
    assert operations["read_blocks"](words, first, 100) == total % 2**32
    assert operations["read_blocks"](words, first[:0], 100) == 0
    for bad in (-1, 901):
        with pytest.raises(ValueError, match=r"first\[1\]"):
            operations["read_blocks"](words, np.array([0, bad]), 100)
    with pytest.raises(ValueError, match="size must be 0 to 1000"):
        operations["read_blocks"](words, first, 1001)


@needs_kernels
@pytest.mark.parametrize("variant", kernels_pyx.VARIANTS or ("portable",))
def test_operations_are_counted_by_rounds_and_threads(variant):
    operations = kernels_pyx.kernels(variant)
    for name in ("compute_float", "compute_int8"):
        kernels_pyx.set_num_threads(1)
        one = operations[name](10)
        assert one >= 10 * 2 * 16 and operations[name](20) == 2 * one and operations[name](0) == 0
        kernels_pyx.set_num_threads(2)
        assert operations[name](10) == one * kernels_pyx.compiled.get_num_threads()
        for bad in (-1, 2**24 + 1):
            with pytest.raises(ValueError, match="rounds must be 0 to"):
                operations[name](bad)


# ---- Runs ----

@each_backend
def test_a_run_measures_every_kernel(name, tmp_path):
    files = tmp_path / "rows.csv", tmp_path / "rows.json"
    code, text = bench(name, csv_path=str(files[0]), json_path=str(files[1]), threads=[1])
    assert code == 0
    rows = json.loads(files[1].read_text())
    assert files[0].read_text().count("\n") == len(rows) + 1
    kinds = {(row["kernel"], row["kv"]) for row in rows}
    both = ["two_pass", "single_pass", "sparse_attention", "sparse_attention_packed",
            "sparse_attention_shared", "sparse_attention_shared_packed", "probe_scores",
            "select_blocks", "two_pass_blocks"]
    assert kinds == {(kernel, kv) for kernel in both for kv in ("q8", "f32")} | {
        ("single_pass_q8", "q8"), ("single_pass_q8_row", "q8"),
        ("prefill_attention 4/2 heads", "f32"),
        ("antidiagonal_scores stride 16", "f32"), ("block_sums stride 16", "f32"),
        ("merge_parts 2048x128", None), ("quantize_rows 4096x128", None),
        ("rms_norm 256x2048", None), ("rope 256x2048", None), ("silu_mul 256x6144", None),
    } | {(f"{kind}_{form} 64x32", None) for kind in ("gemv", "gemm5")
         for form in linear_cases.FORMATS}
    assert len(rows) == len(kinds)
    for row in rows:
        assert list(row) == COLUMNS
        assert row["variant"] == name and row["threads"] == 1 and row["ms"] > 0
        assert (row["context"] is None) == (row["kv"] is None)
        assert (row["vs_numpy"] is None) == (name == "numpy")
        assert (row["vs_portable"] is None) == (name in ("numpy", "portable"))
        assert (row["gb_per_s"] is None) == (row["bandwidth_fraction"] is None)
        assert (row["gb_per_s"] is None) == row["kernel"].startswith(
            ("gemm", "select", "prefill", "antidiagonal", "block_sums", "merge", "r", "silu"))
        assert row["kernel"] in text
    assert "faster than dense" in text and "not in this build" not in text
    assert ("only NumPy is measured" in text) == (name == "numpy")


@needs_kernels
def test_more_threads_are_compared_with_one_and_not_with_numpy(tmp_path):
    path = tmp_path / "rows.json"
    code, text = bench("portable", threads=[2, 1], json_path=str(path), parts={"attention"})
    assert code == 0
    rows = json.loads(path.read_text())
    assert [r["threads"] for r in rows].count(2) == len(rows) / 2
    assert all((r["vs_numpy"] is None) == (r["threads"] == 2) for r in rows)
    assert "1 thread: reads" in text and "2 threads: reads" in text
    assert backend.threads() >= 1


def test_parts_and_quick_leave_groups_out_and_quick_says_so():
    code, text = bench("numpy", quick=True)
    assert code == 0 and "gemv" not in text
    assert "--quick left out 12 of 14 groups: q8_0 1, q8_0 5, q4_0 1" in text
    code, text = bench("numpy", parts={"linear"})
    assert code == 0 and "gemv_q4_0 64x32" in text and "two_pass" not in text.split("ms: ")[0]


def test_quick_begins_nothing_late_and_says_so(monkeypatch):
    now = [0.0]
    monkeypatch.setattr(run.time, "monotonic", lambda: now[0])

    def slow(bench):
        now[0] += 20
        return attention_cases.build("q8", 80, bench)

    plans = [Plan("attention", f"plan {i}", slow, quick=True) for i in range(4)]
    code, text = bench("numpy", plans=plans, quick=True)
    assert code == 0 and "left out 2 of 4 groups: plan 2, plan 3 (the last 2 because" in text


def test_the_real_plans_have_every_context_and_a_quick_part():
    plans = run.all_plans()
    titles = [plan.title for plan in plans]
    assert len(set(titles)) == len(titles)
    for n in (512, 1024, 2048, 4096, 8192, 16384):
        assert {f"attention q8 {n}", f"attention f32 {n}"} <= set(titles)
    quick = chosen(plans, set(), quick=True)
    assert {plan.part for plan in quick} == {"attention", "linear", "prefill", "model"}
    assert len(quick) < len(plans) / 2


def test_an_interrupt_keeps_what_was_measured(tmp_path, capsys):
    def interrupted(bench):
        raise KeyboardInterrupt

    path = tmp_path / "rows.json"
    plans = [*tiny_plans()[:1], Plan("linear", "never", interrupted), *tiny_plans()[1:]]
    code, text = bench("numpy", plans=plans, json_path=str(path))
    rows = json.loads(path.read_text())
    assert code == 130 and {row["kv"] for row in rows} == {"q8"} and "single_pass_q8" in text
    assert capsys.readouterr().err == f"course: interrupted; kept {len(rows)} rows\n"


def test_an_interrupt_before_the_first_row_leaves_the_files_alone(tmp_path, monkeypatch, capsys):
    def interrupted(*args):
        raise KeyboardInterrupt

    monkeypatch.setattr(report, "peaks", interrupted)
    path = tmp_path / "rows.json"
    path.write_text("of the run before")
    code, text = bench("numpy", json_path=str(path), csv_path=str(tmp_path / "rows.csv"))
    assert code == 130 and "two_pass" not in text
    assert path.read_text() == "of the run before" and list(tmp_path.iterdir()) == [path]
    assert capsys.readouterr().err == (
        "course: interrupted; nothing was measured, so no file is written\n")


def whole_range(then=None):
    """Attention at stand-in contexts up to a long one, then what `then` does."""
    def named(n, b):
        group = attention_cases.build("q8", 80, b)
        return Group(group.works, group.numpy, group.kv, n)

    plans = [Plan("attention", f"attention {n}", partial(named, n)) for n in (512, 2048, 8192)]
    return plans + ([Plan("linear", "then", then)] if then else [])


@pytest.fixture
def remembered(monkeypatch):
    """What a run hands to the memory of crossovers."""
    kept = []
    monkeypatch.setattr(report.sys, "prefix", "an environment")
    monkeypatch.setattr(report.decode_gate, "remember", lambda *words: kept.append(words))
    return kept


@needs_kernels
def test_only_a_run_that_was_not_interrupted_is_remembered(remembered, monkeypatch):
    def interrupted(b):
        raise KeyboardInterrupt

    monkeypatch.setattr(report, "all_plans", lambda: whole_range(interrupted))
    code, text = bench("portable", plans=None, threads=[1])
    assert code == 130 and "faster than dense" in text
    assert remembered == [] and "remembered" not in text
    monkeypatch.setattr(report, "all_plans", whole_range)
    # NumPy always reads all rows, so it has nothing to remember.
    code, text = bench("numpy", plans=None)
    assert code == 0 and remembered == [] and "remembered" not in text
    code, text = bench("portable", plans=None, threads=[1])
    assert code == 0 and 'remembered for decode_k="auto"' in text
    ((variant, threads, by_kv),) = remembered
    assert (variant, threads, set(by_kv)) == ("portable", 1, {"q8"})


def test_too_little_memory_for_a_group_keeps_the_others(tmp_path, capsys):
    def too_large(b):
        b.arena.sets(lambda at: at, 2 * ARENA)

    plans = [*tiny_plans()[:1], Plan("linear", "huge", too_large), *tiny_plans()[1:2]]
    path = tmp_path / "rows.json"
    code, _ = bench("numpy", plans=plans, json_path=str(path))
    rows = json.loads(path.read_text())
    assert code == 1 and {row["kv"] for row in rows} == {"q8", "f32"}
    assert capsys.readouterr().err == (
        f"course: bench: not enough memory for huge; kept {len(rows)} rows\n")
    with pytest.raises(CourseError, match="not enough memory for huge; nothing was measured"):
        bench("numpy", plans=plans[1:2], json_path=str(path))
    assert json.loads(path.read_text()) == rows


@pytest.mark.parametrize("place", ["Arena", "Reader", "peaks"])
def test_too_little_memory_to_begin_is_one_sentence(place, monkeypatch):
    def full(*args):
        raise MemoryError

    monkeypatch.setattr(report, place, full)
    with pytest.raises(CourseError, match="memory"):
        bench("numpy")


def test_the_probe_takes_no_more_memory_than_the_rotation_and_blas_comes_first(monkeypatch):
    order, sizes = [], []
    monkeypatch.setattr(report, "take_room_of_blas", lambda: order.append("blas"))
    monkeypatch.setattr(report, "available_bytes", lambda: order.append("count") or 36 * 2**20)

    class Stop(Exception):
        pass

    def reader(kernels, nbytes):
        sizes.append(nbytes * machine.WINDOWS)
        raise Stop

    monkeypatch.setattr(report, "Reader", reader)
    with backend.using("numpy"), pytest.raises(Stop):
        report.bench(io.StringIO())
    assert order == ["blas", "count"] and sizes == [12 * 2**20]


def test_nothing_to_measure_writes_no_file(tmp_path):
    with pytest.raises(CourseError, match="there is nothing of these parts here; nothing was mea"):
        bench("numpy", plans=[], json_path=str(tmp_path / "rows.json"))
    assert list(tmp_path.iterdir()) == []


def test_a_limit_of_the_shell_counts_as_memory(monkeypatch):
    files = {"/proc/meminfo": "MemFree: 1 kB\nMemAvailable: 3000000 kB\n",
             "/proc/self/statm": "1000 9 9\n"}
    monkeypatch.setattr(memory, "read", lambda path: files.get(path, ""))
    limits = {"soft": memory.resource.RLIM_INFINITY}
    monkeypatch.setattr(memory.resource, "getrlimit", lambda what: (limits["soft"], -1))
    assert memory.available_bytes() == 3_000_000 * 1024
    limits["soft"] = 600 * 2**20
    assert memory.available_bytes() == 600 * 2**20 - 1000 * memory.resource.getpagesize()
    limits["soft"] = 100
    assert memory.available_bytes() == 0
    files.clear()
    assert memory.available_bytes() == 100
    limits["soft"] = memory.resource.RLIM_INFINITY
    assert memory.available_bytes() is None


@pytest.mark.parametrize(("argv", "message"), [
    (["--qiuck"], "bench: unknown option --qiuck; did you mean --quick?"),
    (["--threads", "0"], "bench: argument --threads: must be a number from 1 to 1024, not '0'"),
    (["--threads", "two"], "bench: argument --threads: must be a number from 1 to 1024, not 'two'"),
    (["--variant", "sse9"], "COURSE_KERNEL=sse9 is not a kernel name"),
    (["--only", "atention"], "bench: argument --only: invalid choice: 'atention'"),
    (["--json", "no/such/folder/x.json"],
     "bench: --json no/such/folder/x.json cannot be written (No such file or directory); name a "
     "file in a folder"),
    (["--csv", "."], "bench: --csv . cannot be written (not a regular file)"),
    (["--csv", "/dev/full"], "bench: --csv /dev/full cannot be written (not a regular file)"),
    (["--json", "/dev/null"], "bench: --json /dev/null cannot be written (not a regular file)"),
    (["--json", ""], "bench: --json '' cannot be written (an empty name)"),
    (["--json", "new.json/"], "bench: --json new.json/ cannot be written (names a folder)"),
    (["--json", "n" * 256], f"bench: --json {'n' * 256} cannot be written (File name too long)"),
    (["--json", "same", "--csv", "./same"], "bench: --csv and --json both name ./same;"),
    (["--json", "same", "--csv", "link"], "bench: --csv and --json both name link;"),
    (["--threads", "1", "--threads", "1024"],
     "bench: --threads 1024 is more than 4 threads for each core that may be used here; name at"),
])
@pytest.mark.parametrize("kernel", ["numpy", None])
def test_a_mistake_is_one_line_before_anything_is_measured(
        argv, message, kernel, capsys, tmp_path, monkeypatch):
    if kernel:
        monkeypatch.setenv("COURSE_KERNEL", kernel)
    monkeypatch.setattr(report, "bench", lambda *args, **options: pytest.fail("it measures"))
    monkeypatch.chdir(tmp_path)
    os.symlink("same", "link")
    assert cli.main(["bench", *argv]) == 2
    captured = capsys.readouterr()
    assert captured.out == "" and captured.err.startswith(f"course: {message}")
    assert captured.err.count("\n") == 1 and os.listdir() == ["link"]


@each_backend
def test_threads_that_are_no_number_are_refused_before_anything_is_measured(
        name, capsys, monkeypatch):
    monkeypatch.setenv("COURSE_THREADS", "abc")
    monkeypatch.setattr(report, "bench", lambda *args, **options: pytest.fail("it measures"))
    assert cli.main(["bench", "--variant", name]) == 2
    captured = capsys.readouterr()
    assert captured.out == "" and captured.err.startswith("course: COURSE_THREADS=abc must be")


def test_the_command_hands_on_its_options(monkeypatch, tmp_path):
    given_options = {}

    def fake(out, **options):
        given_options.update(options, variant=backend.info().variant)
        return 0

    monkeypatch.setattr(report, "bench", fake)
    path = str(tmp_path / "x.csv")
    assert cli.main(["bench", "--quick", "--threads", "2", "--threads", "1", "--only", "linear",
                     "--variant", "numpy", "--csv", path]) == 0
    assert given_options == {"quick": True, "parts": {"linear"}, "threads": [2, 1],
                             "csv_path": path, "json_path": None, "variant": "numpy"}


# ---- What a row is made of ----

@needs_kernels
def test_ratios_are_those_of_the_medians(monkeypatch):
    medians = {("read", ""): 0.001, ("chosen", "w"): 0.002, ("portable", "w"): 0.006,
               ("numpy", "dense"): 0.02, ("numpy", "dequantized"): 0.05}
    settle = []
    monkeypatch.setattr(run, "interleaved", lambda calls, seconds, settled: (
        settle.append(settled), dict(medians))[1])
    with backend.using("portable"):
        kernels = machine.Kernels()
    state = run.Run(kernels, memory.Arena(64), machine.Reader(kernels, 2**20),
                    {1: Peaks(1, 9.0, 100.0, 400.0)})
    work = Work("w", lambda kernel: None, "read_words", read_bytes=10**6, operations=4e7,
                numpy="dense")
    run.measure(state, Group([work], {}, "q8", 64), 1)
    assert settle == [[("read", ""), ("chosen", "w")]]  # what is beside the bandwidth
    (one,) = state.measured
    read = 2**20 / 0.001 / 1e9
    assert one.record == Record("w", "portable", "q8", 64, 1, 2.0, 0.5, 0.5 / read, 10.0, 3.0)
    assert one.vs_dequantized == 25.0 and one.vs_one_thread is None
    assert math.isclose(one.peak_fraction, 4e7 / 0.002 / 1e9 / 100)
    state.peaks[2] = Peaks(2, 9.0, 100.0, 400.0)
    medians["chosen", "w"] = 0.001
    run.measure(state, Group([work], {}, "q8", 64), 2)
    assert state.measured[1].vs_one_thread == 2.0


def test_bytes_of_chosen_blocks_count_shared_ones_once():
    ids = np.array([[0, 1], [1, 2], [5, 6], [5, 6]], np.int32)
    assert attention_cases.distinct_tokens(ids, 2) == (3 + 2) * 32
    assert attention_cases.distinct_tokens(ids, 4) == 8 * 32


def test_every_operation_that_a_build_lacks_is_named_once(monkeypatch):
    with backend.using("numpy"):
        kernels = machine.Kernels()
    state = run.Run(kernels, memory.Arena(64), machine.Reader(kernels, 64))
    monkeypatch.setattr(kernels, "chosen", {"there": None})
    works = [Work("there", print), Work("gone", print), Work("also gone", print, "gone"),
             Work("model", print, whole_model=True)]
    assert [work.kernel for work in works if run.there(state, work)] == ["there", "model"]
    assert state.missing == ["gone"]


def row(kernel, context, ms, threads=1):
    return Measured(Record(kernel, "x", "q8", context, threads, ms))


def test_the_crossover_is_printed_for_both_kinds_of_selection():
    measured = [row("two_pass", n, n / 1024) for n in (1024, 2048, 4096)]
    measured += [row("sparse_attention", n, 3.0) for n in (1024, 2048, 4096)]
    measured += [row("sparse_attention_shared", n, 0.5) for n in (1024, 2048, 4096)]
    text = table.crossings_text(measured)
    assert "one selection per query head: from about 3,072 tokens on (slower at 2,048" in text
    assert "one selection per KV head: from 1,024 tokens on or fewer; 8.00x at 4,096" in text
    never = [row("two_pass", 1024, 1.0), row("sparse_attention", 1024, 2.0)]
    assert "at none of these contexts, up to 1,024 tokens; 0.50x" in table.crossings_text(never)
    assert table.crossings_text(measured[3:]) == ""


def test_the_table_leaves_empty_columns_out_and_aligns_the_rest():
    text = table.table([row("two_pass", 16384, 1.25), row("a", 512, 10.0)])
    assert text.splitlines() == [
        "kernel    kv  context  thr      ms",
        "two_pass  q8   16,384    1   1.250",
        "a         q8      512    1  10.000"]


def test_the_machine_line_names_cpu_and_cores(monkeypatch):
    files = {"/proc/cpuinfo": "model name: Cortex\ncpu MHz : 1800.4\n",
             "/sys/devices/system/cpu/cpu0/cpufreq/scaling_governor": "ondemand\n",
             "/sys/devices/system/cpu/cpu1/cpufreq/scaling_governor": "performance\n",
             "/sys/devices/system/cpu/cpu1/cpufreq/scaling_cur_freq": "2400000\n"}
    monkeypatch.setattr(machine, "read", lambda path: files.get(path, ""))
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0, 1, 2}, raising=False)
    assert machine.cores_text() == "1 core at 1800 MHz ondemand, 1 core at 2400 MHz performance, " \
                                   "1 core"


def test_a_board_with_two_kinds_of_cores_measures_on_the_fast_ones(monkeypatch):
    affinity = [{0, 1, 2, 3}]
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: affinity[-1], raising=False)
    monkeypatch.setattr(os, "sched_setaffinity", lambda pid, cores: affinity.append(set(cores)),
                        raising=False)
    monkeypatch.setattr(backend, "performance_cores", lambda: [2, 3])
    with machine.on_fast_cores(2) as remark:
        assert affinity[-1] == {2, 3} and "2 fast cores, number 2, 3" in remark
    assert affinity[-1] == {0, 1, 2, 3}
    with machine.on_fast_cores(4) as remark:
        assert remark == "" and len(affinity) == 3


def test_numpy_alone_is_probed_without_kernels():
    with backend.using("numpy"):
        kernels = machine.Kernels()
        found = machine.peaks(kernels, machine.Reader(kernels, 2**14), 1)
    assert kernels.thread_counts([3]) == [1] and found.gb_per_s > 0
    assert found.float_operations is None and found.int8_operations is None
    assert "GFLOP" not in table.peaks_text({1: found})


def test_tokens_of_the_model_follow_each_other_and_keep_their_samples(monkeypatch):
    if not model_cases.MODEL.is_dir():
        pytest.skip("the shipped model is not here")
    made = []
    real = model_cases.Engine.prefill
    monkeypatch.setattr(model_cases.Engine, "prefill",
                        lambda *args: made.append(real(*args)) or made[-1])
    fork = model_cases.Session.fork
    monkeypatch.setattr(model_cases.Session, "fork",
                        lambda session: made.append(fork(session)) or made[-1])
    monkeypatch.setattr(KVCache, "truncate",
                        lambda *args: pytest.fail("its samples are thrown away"))
    group = model_cases.build(1100, Bench(memory.Arena(64)))
    for _ in range(3):
        group.numpy["token"]()
        group.numpy["token k=32"]()
    assert [len(session) for session in made] == [1103, 1103]
    assert made[0].last_step.blocks_read == 35 and made[1].last_step.blocks_read == 32
    # With 1,024 tokens or fewer, 32 blocks are all rows: that would be the same row twice.
    assert set(model_cases.build(100, Bench(memory.Arena(64))).numpy) == {"prefill", "token"}


def test_groups_need_no_kernels_to_be_built():
    b = Bench(memory.Arena(ARENA))
    group = attention_cases.build("q8", 100, b)
    assert group.context == 100 and set(group.numpy) >= {work.numpy for work in group.works}
    assert sparse.n_blocks(100) == 4


def test_the_recorded_bench_reads_as_the_records_of_today():
    """A column, or a kernel that has got another name, asks for a new recording."""
    rows = json.loads((DATA / "bench" / "x86_server.json").read_text(encoding="utf-8"))
    records = [Record(**row) for row in rows]
    assert {(r.variant, r.threads) for r in records} == {("avx512", 1)}
    known = set(compiled_names())
    for record in records:
        assert record.ms > 0 and (record.kv is None or record.kv in ("f32", "q8"))
        if record.context and " " not in record.kernel:
            name = record.kernel.removesuffix("_packed").removesuffix("_shared")
            assert {name, name.removesuffix("_blocks")} & known, record.kernel


def compiled_names():
    """The operations, from the wrappers' sources: also where nothing is compiled."""
    for path in (ROOT / "kernels_pyx" / "wrappers").glob("*.pxi"):
        yield from re.findall(r"@operation\ndef (\w+)", path.read_text(encoding="utf-8"))
