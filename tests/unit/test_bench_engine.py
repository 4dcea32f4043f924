"""`./course bench --engine`: what is timed, in whose turn, what a row says; no time is asserted."""

from __future__ import annotations

import csv
import errno
import io
import json
import os
import signal
import tempfile
from contextlib import contextmanager
from dataclasses import replace

import numpy as np
import pytest

import kernels_pyx
from course_lib import backend, cli
from course_lib.bench import (
    engine_cases,
    engine_llama,
    engine_peer,
    engine_report,
    engine_run,
    engine_table,
    machine,
)
from course_lib.bench.engine_cases import Arm, Ids, Peer, Task
from course_lib.bench.engine_profile import Profile, Timed, cost_of_a_clock, profiled
from course_lib.bench.engine_records import COLUMNS, EngineRecord
from course_lib.bench.engine_weights import QWEN3_0_6B, RandomSource, token_bytes
from course_lib.engine.conversion import load_weights
from course_lib.engine.model import Model
from course_lib.engine.prefill import run_prompt
from course_lib.errors import CourseError
from course_lib.kvcache import kv_bytes_per_token

KEYS = ["engine", "phase", "n", "depth", "kv", "sparse_k", "threads", "tokens_per_s",
        "bandwidth_fraction", "python_fraction"]
TINY = replace(QWEN3_0_6B, vocab_size=96, hidden_size=64, intermediate_size=96,
               num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, head_dim=64,
               max_position_embeddings=4096)
TASKS = (Task("pp", 40, 0), Task("tg", 1, 0), Task("tg", 1, 1100))

needs_kernels = pytest.mark.skipif(
    not kernels_pyx.VARIANTS and os.environ.get("COURSE_REQUIRE_KERNELS") != "1",
    reason="the kernels are not compiled here",
)


@pytest.fixture(autouse=True)
def short_and_restored(monkeypatch):
    monkeypatch.setattr(engine_run, "READS", 1)
    monkeypatch.setattr(engine_report, "Reader",
                        lambda kernels: machine.Reader(kernels, 2**16))
    yield
    if kernels_pyx.VARIANTS:
        kernels_pyx.set_num_threads(1)


@pytest.fixture(scope="module")
def tiny():
    source = RandomSource(TINY)
    return Model(TINY, load_weights(source, TINY, "q8_0"))


def bench(**options):
    out = io.StringIO()
    with backend.using(kernels_pyx.VARIANTS[0]):
        code = engine_report.bench_engine(
            out, config=TINY, tasks=options.pop("tasks", TASKS),
            threads=options.pop("threads", [1]), **options)
    return code, out.getvalue()


# ---- The model ----

def test_the_shape_is_that_of_the_published_model():
    assert QWEN3_0_6B.family == "qwen3" and QWEN3_0_6B.qk_norm and QWEN3_0_6B.moe is None
    layer = 1024 * (4096 + 2048 + 3 * 3072)  # q, k, v; o; gate, up, down
    matrices = 28 * layer + 151_936 * 1024
    norms = 28 * (2 * 1024 + 2 * 128) + 1024
    assert token_bytes(QWEN3_0_6B) == matrices // 32 * 34 + 4 * norms


def test_an_output_matrix_of_its_own_is_read_beside_an_embedding_that_is_not():
    untied = replace(TINY, tie_word_embeddings=False)
    assert token_bytes(untied) == token_bytes(TINY)


def test_random_weights_are_the_same_at_every_reading_and_of_the_stated_size():
    source = RandomSource(TINY)
    name = "model.layers.1.mlp.down_proj.weight"
    blocks = source.blocks(name, "q8_0")
    assert np.array_equal(blocks, RandomSource(TINY).blocks(name, "q8_0"))
    assert not np.array_equal(blocks, RandomSource(TINY, seed=1).blocks(name, "q8_0"))
    assert source.fingerprint() != RandomSource(TINY, seed=1).fingerprint()
    other = source.blocks("model.layers.0.mlp.down_proj.weight", "q8_0")
    assert blocks.shape == other.shape == (64, 96 // 32 * 34) and not np.array_equal(blocks, other)
    codes = blocks.reshape(64, 3, 34)[..., 2:].view(np.int8)
    assert codes.min() == -127 and codes.max() == 127
    values = source.read_rows(name, 0, 64)
    assert np.array_equal(source.read_rows(name, 5, 9), values[5:9])
    assert abs(values.std() * np.sqrt(96) - 1) < 0.05 and abs(values.mean()) < 0.01
    assert source.blocks(name, "q4_0") is None
    assert np.array_equal(source.read("model.norm.weight"), np.ones(64, np.float32))


def test_activations_keep_their_size(tiny):
    session, hidden = run_prompt(tiny, Ids(TINY).prompt(30))
    logits = tiny.logits(hidden)
    assert np.isfinite(logits).all() and 0.3 < logits.std() < 3


def test_the_gguf_file_holds_the_same_blocks_under_the_names_of_its_format(tmp_path):
    pytest.importorskip("gguf")
    from course_lib.bench.engine_gguf import write_gguf
    from course_lib.engine.gguf_source import GgufSource

    for config in (TINY, replace(TINY, tie_word_embeddings=False)):
        source, seen = RandomSource(config), []
        path = tmp_path / f"{config.tie_word_embeddings}.gguf"
        write_gguf(path, source, config, lambda done, total, seen=seen: seen.append((done, total)))
        found = GgufSource(path)
        assert {name: s.shape for name, s in found.stored.items()} == {
            name: s.shape for name, s in source.stored.items()}
        for name, stored in source.stored.items():
            if len(stored.shape) == 1:
                assert np.array_equal(found.read(name), source.read(name))
            else:
                assert np.array_equal(found.blocks(name, "q8_0"), source.blocks(name, "q8_0")), name
        count = len(source.stored)
        assert seen == [(i, count) for i in range(1, count + 1)]
        for key, value in {"attention.head_count": 4, "attention.head_count_kv": 2,
                           "attention.key_length": 64, "attention.value_length": 64,
                           "block_count": 2, "feed_forward_length": 96, "embedding_length": 64,
                           "rope.freq_base": 1e6, "vocab_size": 96,
                           "attention.layer_norm_rms_epsilon": np.float32(1e-6)}.items():
            assert found.metadata[f"qwen3.{key}"] == pytest.approx(value), key


# ---- A run ----

@needs_kernels
def test_a_run_measures_every_way(tmp_path):
    files = tmp_path / "rows.csv", tmp_path / "rows.json"
    code, text = bench(csv_path=str(files[0]), json_path=str(files[1]), threads=[2, 1, 2])
    assert code == 0
    rows = json.loads(files[1].read_text())
    assert [list(row) for row in rows] == [KEYS] * len(rows) and list(COLUMNS) == KEYS
    with open(files[0], newline="") as file:
        assert list(csv.DictReader(file)) == [
            {k: "" if v is None else str(v) for k, v in row.items()} for row in rows]
    ways = [("pp", 40, 0, kv, None) for kv in ("f32", "q8")]
    ways += [("tg", 1, 0, kv, None) for kv in ("f32", "q8")]
    ways += [("tg", 1, 1100, kv, k) for kv in ("f32", "q8") for k in (None, 32, "auto")]
    found = [(row["phase"], row["n"], row["depth"], row["kv"], row["sparse_k"], row["threads"])
             for row in rows]
    assert sorted(found, key=str) == sorted(((*way, t) for way in ways for t in (1, 2)), key=str)
    for row in rows:
        assert row["engine"] == "course" and row["tokens_per_s"] > 0
        assert row["python_fraction"] < 1  # below 0 where the machine was busy in between
        assert (row["bandwidth_fraction"] is None) == (row["phase"] == "pp")
        assert row["phase"] == "pp" or row["bandwidth_fraction"] > 0
    assert "token at 1,100" in text and "prompt 40" in text and "llama" not in text
    assert "1 thread: reads" in text and "2 threads: reads" in text
    assert "linear_q8_0" in text and "Where the time goes" in text


class FakeContext:
    """Answers as llama.cpp would, with what it was asked."""

    def __init__(self):
        self.asked = []
        self.tokens = 0

    def set_threads(self, count):
        self.asked.append(("threads", count))

    def clear(self):
        self.tokens = 0

    def fill(self, depth):
        self.tokens = depth

    def decode(self, ids):
        self.tokens += len(ids)
        self.asked.append((len(ids), self.tokens))

    def logits(self):
        self.asked.append("logits")
        return np.zeros(TINY.vocab_size, np.float32)


@pytest.fixture
def fake_peer(monkeypatch):
    made = Peer({"f16": FakeContext(), "q8_0": FakeContext()})

    @contextmanager
    def peer(*arguments):
        yield made, 0.999

    monkeypatch.setattr(engine_report, "llama_peer", peer)
    return made


@needs_kernels
def test_the_peer_takes_turns_at_the_same_tasks(fake_peer, tmp_path):
    path = tmp_path / "rows.json"
    code, text = bench(peer=True, json_path=str(path), threads=[2])
    assert code == 0 and "the same model: logits correlate 0.9990" in text
    rows = [row for row in json.loads(path.read_text()) if row["engine"] == "llama"]
    assert [(row["phase"], row["n"], row["depth"], row["kv"]) for row in rows] == [
        (task.phase, task.n, task.depth, kv) for task in TASKS for kv in ("f16", "q8_0")]
    for row in rows:
        assert row["tokens_per_s"] > 0 and row["threads"] == 2
        assert row["sparse_k"] is None and row["python_fraction"] is None
    rounds = engine_run.TOKEN_ROUNDS * (1 + engine_run.TOKENS)
    for context in fake_peer.contexts.values():
        assert context.asked.count(("threads", 2)) == len(TASKS)
        assert context.asked.count((40, 40)) == engine_run.ROUNDS
        for depth in (0, 1100):
            assert [a for a in context.asked if a[0] == 1 and depth < a[1] <= depth + 50] == [
                (1, depth + i) for i in range(1, rounds + 1)]
        assert context.asked.count("logits") == engine_run.ROUNDS + 2 * rounds
    table = text.partition("\n\n")[2].partition("\n\n")[0].splitlines()
    assert table[0].endswith("llama f16  llama q8_0")
    assert all(line.endswith("x") == (" course " in line) for line in table[1:])


def test_rounds_interleave_and_a_row_is_the_median(monkeypatch, tiny):
    order, now = [], [0.0]
    durations = {"a": iter([9, 1, 2, 3] * 3), "b": iter([9, 4, 40, 50] * 3),
                 "read": iter([7, 1] * 3)}

    def call(name):
        order.append(name)
        now[0] += next(durations[name])

    arms = [Arm("course", "f32", None, lambda: call("a"), 100.0),
            Arm("llama", "f16", None, lambda: call("b"), 200.0)]
    monkeypatch.setattr(engine_run, "arms_of", lambda task, model, peer: arms)
    monkeypatch.setattr(engine_run, "profile_of", lambda arm, count, **how: None)
    monkeypatch.setattr(engine_run.time, "perf_counter", lambda: now[0])

    def read():
        call("read")

    read.nbytes = 50
    threads = []
    monkeypatch.setattr(machine.Kernels, "set_threads", lambda kernels, n: threads.append(n))
    run = engine_run.EngineRun(machine.Kernels(), read, tiny)
    engine_run.measure(run, Task("tg", 1, 5), 3)
    assert threads == [3] and run.records[0].threads == 3
    assert order == (["read"] * 2 + ["a"] * 4 + ["b"] * 4) * 3
    a, b = run.records
    assert (a.tokens_per_s, b.tokens_per_s) == (1 / 2, 1 / 40)
    assert a.bandwidth_fraction == pytest.approx(100 / 2 / 50)
    assert b.bandwidth_fraction == pytest.approx(200 / 40 / 50)


def test_a_prompt_counts_all_its_tokens():
    arm = Arm("course", "q8", None, print)
    row = engine_run.record_of(Task("pp", 8, 0), arm, 1, 2.0, 50.0, None)
    assert row == EngineRecord("course", "pp", 8, 0, "q8", None, 1, 4.0)


def test_ways_differ_in_the_rows_and_blocks_that_the_engine_is_asked_for(monkeypatch, tiny):
    asked = []
    real = engine_cases.run_prompt
    monkeypatch.setattr(engine_cases, "run_prompt", lambda model, ids, kv: asked.append(
        (len(ids), kv)) or real(model, ids, kv=kv))
    for arm in engine_cases.arms_of(Task("pp", 9, 0), tiny, None):
        arm.call()
        assert asked[-1] == (9, arm.kv)
    ways = engine_cases.token_arms(1100, tiny, "q8", Ids(TINY))
    step = engine_cases.Session.step
    monkeypatch.setattr(engine_cases.Session, "step", lambda session, token, decode_k: asked.append(
        (decode_k, len(session.importance), session.cache.dtype)) or step(
            session, token, decode_k=decode_k))
    for arm in ways:
        arm.call()
        assert asked[-1] == (arm.sparse_k, 1100, "q8")
    assert [arm.sparse_k for arm in ways] == [None, 32, "auto"]


@pytest.mark.parametrize(("task", "quick", "calls", "profiled"), [
    (Task("pp", 9, 0), False, engine_run.ROUNDS, 1), (Task("pp", 9, 0), True, 1, 0),
    (Task("tg", 1, 0), True, engine_run.TOKEN_ROUNDS * (1 + engine_run.TOKENS),
     2 * engine_run.PROFILED_TOKENS)])
def test_how_often_an_arm_is_called(task, quick, calls, profiled, monkeypatch, tiny):
    done, steps = [], []
    arms = [Arm("course", "f32", None, lambda: done.append("timed"))]
    monkeypatch.setattr(engine_run, "arms_of", lambda task, model, peer: arms)
    kernels = machine.Kernels()
    run = engine_run.EngineRun(kernels, machine.Reader(kernels, 2**14), tiny, quick=quick)
    engine_run.measure(run, task, 1, lambda: steps.append(1))
    assert len(done) == calls + profiled and len(steps) == engine_run.rounds_of(task, quick)
    assert len(run.profiles) == bool(profiled)
    assert run.records[0].tokens_per_s > 0


@needs_kernels
def test_quick_asks_a_prompt_once_and_begins_nothing_late_but_the_first(monkeypatch):
    now = [0.0]
    counts = []

    def slow(run, task, threads, finished):
        now[0] += 100
        counts.append((task.title, run.quick))
        run.records.append(EngineRecord("course", task.phase, task.n, task.depth, "f32", None,
                                        threads, 1.0))

    monkeypatch.setattr(engine_report.time, "monotonic", lambda: now[0])
    monkeypatch.setattr(engine_report, "measure", slow)
    code, text = bench(quick=True)
    assert code == 0 and counts == [("prompt 40", True)]
    real = engine_report.load_weights

    def late(*arguments):
        now[0] += 100
        return real(*arguments)

    with monkeypatch.context() as patch:
        patch.setattr(engine_report, "load_weights", late)
        assert bench(quick=True)[0] == 0 and counts == [("prompt 40", True)] * 2
    assert "--quick left out token at 0, token at 1,100: this machine is slow" in text
    counts.clear()
    bench()
    assert [title for title, _ in counts] == ["prompt 40", "token at 0", "token at 1,100"]


def test_the_tasks_are_those_that_are_promised_and_quick_has_some_of_each_phase():
    assert [(t.phase, t.n, t.depth) for t in engine_report.TASKS] == [
        ("pp", 512, 0), ("pp", 2048, 0), ("tg", 1, 0), ("tg", 1, 2048), ("tg", 1, 4096)]
    assert [(t.phase, t.n, t.depth) for t in engine_report.QUICK_TASKS] == [
        ("pp", 512, 0), ("tg", 1, 0), ("tg", 1, 4096)]


@needs_kernels
def test_the_gate_is_asked_for_the_threads_that_are_measured(monkeypatch):
    asked = []

    def measure(run, task, threads, finished):
        run.kernels.set_threads(threads)
        asked.append((threads, backend.threads()))

    monkeypatch.setattr(engine_report, "measure", measure)
    monkeypatch.setenv("COURSE_THREADS", "1")
    bench(threads=[2], tasks=TASKS[:1])
    assert asked == [(2, 2)] and os.environ["COURSE_THREADS"] == "1"
    assert kernels_pyx.compiled.get_num_threads() == 1


# ---- Interrupts and what is refused ----

@needs_kernels
def test_an_interrupt_keeps_the_tasks_that_were_measured(monkeypatch, tmp_path, capsys):
    real = engine_run.arms_of

    def interrupted(task, model, peer):
        if task.depth:
            raise KeyboardInterrupt
        return real(task, model, peer)

    monkeypatch.setattr(engine_run, "arms_of", interrupted)
    path = tmp_path / "rows.json"
    code, text = bench(json_path=str(path))
    assert code == 130 and [row["n"] for row in json.loads(path.read_text())] == [40, 40, 1, 1]
    assert "token at 0" in text and "token at 1,100" not in text
    assert capsys.readouterr().err == "course: interrupted; kept 4 rows\n"


@needs_kernels
def test_an_interrupt_before_the_first_row_leaves_the_files_alone(monkeypatch, tmp_path, capsys):
    def interrupted(*arguments):
        raise KeyboardInterrupt

    monkeypatch.setattr(engine_report, "load_weights", interrupted)
    path = tmp_path / "rows.json"
    path.write_text("of the run before")
    assert bench(json_path=str(path))[0] == 130
    assert path.read_text() == "of the run before"
    assert capsys.readouterr().err == (
        "course: interrupted; nothing was measured, so no file is written\n")


@pytest.fixture
def temporary(monkeypatch, tmp_path):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return tmp_path


def peer_of(model):
    return engine_peer.llama_peer(RandomSource(TINY), model, 64, 1, lambda done, total: None)


@pytest.mark.parametrize(("error", "expected", "message"), [
    (KeyboardInterrupt(), KeyboardInterrupt, None),
    (signal.SIGTERM, SystemExit, "143"),
    (OSError(errno.ENOSPC, "No space left on device"), CourseError,
     r"random.gguf was not written \(No space left on device\); name another folder in TMPDIR"),
])
def test_the_temporary_file_is_removed_when_writing_it_ends_early(
        error, expected, message, monkeypatch, temporary, tiny):
    def write(path, *arguments):
        path.write_bytes(b"the first part")
        if isinstance(error, signal.Signals):
            signal.raise_signal(error)
        raise error

    monkeypatch.setattr(engine_peer, "write_gguf", write)
    with pytest.raises(expected, match=message), peer_of(tiny):
        pytest.fail("there is no peer")
    assert list(temporary.iterdir()) == []
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL


def test_a_disk_that_is_too_small_is_refused_before_it_is_full(monkeypatch, temporary, tiny):
    monkeypatch.setattr(engine_peer, "write_gguf", lambda *arguments: pytest.fail("it writes"))
    free = token_bytes(TINY)  # a file has a header too
    monkeypatch.setattr(engine_peer.shutil, "disk_usage",
                        lambda folder: type("Usage", (), {"free": free}))
    with pytest.raises(CourseError, match="--peer needs 1 MB in .*, 0 are free"), peer_of(tiny):
        pytest.fail("there is no peer")
    assert list(temporary.iterdir()) == []


def test_too_little_memory_is_refused_and_a_peer_needs_more(monkeypatch):
    alone = engine_report.needed_bytes(QWEN3_0_6B, 4096, False)
    both = engine_report.needed_bytes(QWEN3_0_6B, 4096, True)
    kept = token_bytes(QWEN3_0_6B) + 28 * 4096 * sum(
        kv_bytes_per_token(8, 128, kv) for kv in ("f32", "q8"))
    assert kept < alone < 1.6 * kept
    theirs = token_bytes(QWEN3_0_6B) + 28 * 4096 * 2 * 8 * 128 * (2 + 34 / 32)
    assert theirs < both - alone < 1.5 * theirs
    engine_report.check_memory(alone, alone)
    engine_report.check_memory(alone, None)
    with pytest.raises(CourseError, match=r"--engine needs 2\.\d GB of memory here, 2\.\d GB are"):
        engine_report.check_memory(alone, alone - 1)


@needs_kernels
def test_memory_is_asked_for_before_anything_is_made(monkeypatch):
    monkeypatch.setattr(engine_report, "available_bytes", lambda: 1000)
    monkeypatch.setattr(engine_report, "load_weights", lambda *a: pytest.fail("it makes weights"))
    with pytest.raises(CourseError, match="GB of memory here, 0.0 GB are free; close"):
        bench()


@pytest.mark.parametrize(("argv", "message"), [
    (["--peer", "llama"], "bench: --peer stands beside the engine as a whole; add --engine."),
    (["--engine", "--peer", "lama"], "bench: argument --peer: invalid choice: 'lama'"),
    (["--engine", "--only", "model"], "bench: --only names a part of the kernels' bench, which"),
    (["--engine", "--threads", "0"],
     "bench: argument --threads: must be a number from 1 to 1024, not '0'"),
    (["--engine", "--threads", "1024"], "bench: --threads 1024 is more than 4 threads"),
    (["--engine", "--variant", "numpy"], "bench: --engine needs the compiled kernels, which are"),
    (["--engine", "--json", "no/such/folder/x.json"], "bench: --json no/such/folder/x.json cannot"),
    (["--engine", "--peer", "llama"],
     "llama_cpp is not installed; in the course's folder: pip install '.[peer]'"),
])
def test_a_mistake_is_one_line_before_anything_is_measured(argv, message, monkeypatch, capsys):
    monkeypatch.setattr(engine_report, "load_weights", lambda *a: pytest.fail("it makes weights"))
    monkeypatch.setattr("course_lib.launcher.extras.find_spec",
                        lambda name: None if name == "llama_cpp" else object())
    try:
        code = cli.main(["bench", *argv])
    except SystemExit as error:
        code = error.code
    captured = capsys.readouterr()
    assert code == 2 and captured.out == "" and captured.err.count("\n") == 1
    assert captured.err.startswith(f"course: {message}")


def test_the_command_hands_on_its_options(monkeypatch, tmp_path):
    given = {}

    def fake(out, **options):
        given.update(options, variant=backend.info().variant)
        return 0

    monkeypatch.setattr(engine_report, "bench_engine", fake)
    monkeypatch.setattr("course_lib.launcher.extras.find_spec", lambda name: object())
    path = str(tmp_path / "x.json")
    assert cli.main(["bench", "--engine", "--quick", "--peer", "llama", "--threads", "2",
                     "--variant", "numpy", "--json", path]) == 0
    assert given == {"quick": True, "peer": True, "threads": [2], "csv_path": None,
                     "json_path": path, "variant": "numpy"}


# ---- What a row is made of ----

@needs_kernels
def test_the_profile_counts_kernels_and_gives_them_back(monkeypatch):
    now = [0.0]
    monkeypatch.setattr("course_lib.bench.engine_profile.time.perf_counter", lambda: now[0])

    def slow(value):
        now[0] += 3.0
        if value < 0:
            raise ValueError("negative")
        return value

    real = lambda name: slow if name == "slow" else None  # noqa: E731
    monkeypatch.setattr(backend, "kernel", real)
    with profiled() as profile:
        assert backend.kernel("slow")(5) == 5 and backend.kernel("other") is None
        now[0] += 4.0
        with pytest.raises(ValueError, match="negative"):
            backend.kernel("slow")(-1)
    assert backend.kernel is real
    assert profile.seconds == 10 and profile.kernels == {"slow": Timed(slow, 6.0, 2)}
    assert profile.outside == pytest.approx(0.4) and profile.shares() == [("slow", 0.6)]
    ticks = iter(range(10**6))
    monkeypatch.setattr("course_lib.bench.engine_profile.time.perf_counter", lambda: next(ticks))
    assert cost_of_a_clock(10) == 1.1  # a tick a call, and one of the loop
    monkeypatch.setattr(backend, "kernel", lambda name: abs)
    with profiled() as profile:
        backend.kernel("abs")(1)
    assert profile.seconds == pytest.approx(3 - 1.001)
    with profiled(layer_by_layer=True) as profile:
        assert backend.kernel("decoder_layers") is None and backend.kernel("abs")(-1) == 1
    assert list(profile.kernels) == ["abs"]
    assert Profile().outside is None and Profile(1.0).outside is None


@needs_kernels
@pytest.mark.parametrize("kv", ["f32", "q8"])
def test_bytes_of_kv_rows_are_those_that_the_token_reads(kv, tiny):
    session = engine_cases.random_session(1100, tiny, kv)
    assert len(session) == 1100 and session.cache.dtype == kv
    row = kv_bytes_per_token(2, 64, kv)
    assert engine_cases.kv_bytes_read(session, None, 3) == 2 * 1101 * row
    assert len(session) == 1101
    trace = []
    session.fork().step(4, decode_k=10, trace=trace)
    blocks = 0
    for layer in trace[0]:
        blocks += sum(len(set(layer[h].ids.tolist()) | set(layer[h + 1].ids.tolist()))
                      for h in (0, 2))
    probed = 2 * (1102 // 32) * 8 * row / 2
    assert engine_cases.kv_bytes_read(session, 10, 4) == probed + blocks * 32 * row / 2


def test_an_arm_of_the_peer_reads_its_own_rows():
    for kv, per_value in (("f16", 2), ("q8_0", 34 / 32)):
        context = FakeContext()
        arm = engine_cases.llama_token(64, TINY, kv, context, Ids(TINY))
        assert arm.read_bytes == token_bytes(TINY) + 64 * 2 * 2 * 2 * 64 * per_value
        assert context.tokens == 64 and (arm.engine, arm.kv) == ("llama", kv)


def record(engine, kv, tokens_per_s, depth=0, threads=2):
    return EngineRecord(engine, "tg", 1, depth, kv, None, threads, tokens_per_s)


def test_ratios_are_to_the_peer_at_the_same_task_and_threads():
    records = [record("course", "q8", 30.0), record("llama", "f16", 20.0),
               record("llama", "q8_0", 15.0), record("llama", "f16", 1.0, depth=9),
               record("llama", "f16", 1.0, threads=1), record("course", "q8", 30.0, depth=7),
               record("course", "q8", 3.0, threads=1)]
    assert engine_table.ratio_cells(records[6], records) == ("3.00x", "")
    assert engine_table.ratio_cells(records[0], records) == ("1.50x", "2.00x")
    assert engine_table.ratio_cells(records[1], records) == ("", "")
    assert engine_table.ratio_cells(records[5], records) == ("", "")
    text = engine_table.table(records).splitlines()
    assert text[1].split() == ["token", "at", "0", "course", "q8", "all", "2", "30.0", "1.50x",
                               "2.00x"]
    assert len({len(line) for line in text[:2]}) == 1 and text[2] == text[2].rstrip()


def test_where_the_time_goes_adds_up():
    seconds = {"a": 4.0, "b": 2.0, "c": 1.0, "d": 0.5, "e": 0.4, "f": 0.1}
    profile = Profile(10.0, {name: Timed(print, value, 1) for name, value in seconds.items()})
    text = engine_table.shares_text([(replace(record("course", "q8", 1.0), sparse_k=32), profile)])
    assert text.splitlines()[1] == (
        "  token at 0, q8, blocks 32, 2 threads: a 40 %, b 20 %, c 10 %, d 5 %, other kernels 5 %; "
        "outside 20 %")


@pytest.mark.parametrize(("load", "threads", "warned"), [
    (0.4, 2, False), (1.5, 2, True), (1.6, 1, True), (0.9, 1, False)])
def test_a_busy_machine_is_named(load, threads, warned, monkeypatch):
    monkeypatch.setattr(os, "getloadavg", lambda: (load, 0.0, 0.0))
    monkeypatch.setattr(backend, "usable_cores", lambda: [0, 1])
    text = engine_report.busy_text(threads)
    assert bool(text) == warned and (not warned or f"load average {load} on 2 cores" in text)


# ---- llama.cpp itself, where it is installed ----

def test_llama_computes_the_same_model_at_any_depth(tiny, temporary):
    """A cache that `fill` has filled answers as one that was fed the same tokens does."""
    pytest.importorskip("llama_cpp")
    pytest.importorskip("gguf")
    with peer_of(tiny) as (peer, alike):
        assert alike > engine_peer.SAME_MODEL and list(temporary.iterdir()) == []
        prompt = Ids(TINY).prompt(64)
        for context in peer.contexts.values():
            context.fill(64)
            context.decode([5])
            filled = context.logits()
            context.clear()
            context.decode([*prompt, 5])
            assert np.corrcoef(filled, context.logits())[0, 1] > 0.99
            context.fill(150)
            context.decode([5])
            assert np.isfinite(context.logits()).all()


def test_a_peer_that_computes_something_else_is_refused(tiny, monkeypatch):
    contexts = {kv: FakeContext() for kv in engine_llama.KV_TYPES}
    for context in contexts.values():
        monkeypatch.setattr(context, "logits", lambda: np.arange(96.0))
    with pytest.raises(CourseError, match="llama.cpp does not compute the same model"):
        engine_peer.agreement(Peer(contexts), tiny)


def test_each_kind_of_rows_is_compared_with_its_like(tiny, monkeypatch):
    contexts = {kv: FakeContext() for kv in engine_llama.KV_TYPES}
    for context, kv in zip(contexts.values(), ("f32", "q8"), strict=True):
        _, hidden = run_prompt(tiny, Ids(TINY).prompt(8), kv=kv)
        monkeypatch.setattr(context, "logits", lambda hidden=hidden: tiny.logits(hidden[-1]))
    assert engine_peer.agreement(Peer(contexts), tiny) > 1 - 1e-12
