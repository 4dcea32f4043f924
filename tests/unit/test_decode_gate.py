"""The engine's own choice between all rows and 32 blocks: remembered, damaged, never on NumPy."""

import json
import math

import numpy as np
import pytest

from course_lib import backend, decode_gate
from course_lib.bench import table
from course_lib.decode_gate import automatic_blocks, crossover, remember
from course_lib.engine import Engine
from tests.tiny_checkpoint import write_checkpoint


@pytest.fixture(autouse=True)
def place(monkeypatch, tmp_path):
    monkeypatch.setattr(decode_gate, "REMEMBERED", tmp_path / "cache" / "crossover.json")
    monkeypatch.setattr(backend, "info", lambda: backend.BackendInfo("kernels_pyx", "neon", ""))
    monkeypatch.setattr(backend, "threads", lambda: 4)
    crossover.cache_clear()
    yield
    crossover.cache_clear()


def test_before_a_bench_the_numbers_of_another_machine_stand_in():
    for kv, tokens in decode_gate.ELSEWHERE.items():
        assert crossover("neon", 4, kv) == (math.inf if tokens is None else tokens)


def test_what_a_bench_found_decides_for_its_variant_and_threads():
    remember("neon", 4, {"q8": 3000, "f32": None})
    remember("dotprod", 4, {"q8": 50})
    assert automatic_blocks(2999, "q8") is None
    assert automatic_blocks(3000, "q8") == 32
    assert automatic_blocks(10**9, "f32") is None
    assert crossover("dotprod", 4, "q8") == 50
    assert crossover("neon", 1, "q8") == decode_gate.ELSEWHERE["q8"]
    remember("neon", 4, {"q8": 7})
    assert automatic_blocks(7, "q8") == 32 and crossover("neon", 4, "f32") == math.inf


def test_numpy_reads_all_rows(monkeypatch):
    remember("numpy", 4, {"q8": 1})
    monkeypatch.setattr(backend, "info", lambda: backend.BackendInfo("numpy", "numpy", ""))
    assert automatic_blocks(10**9, "q8") is None


@pytest.mark.parametrize("name", ["numpy", "neon"])
def test_rows_of_no_known_kind_are_refused_on_every_backend(name, monkeypatch):
    monkeypatch.setattr(backend, "info", lambda: backend.BackendInfo("a backend", name, ""))
    with pytest.raises(ValueError, match="kv must be 'f32' or 'q8', not 'q5'"):
        automatic_blocks(5000, "q5")


@pytest.mark.parametrize("content", ["", "[1]", "{", pytest.param("[" * 100_000, id="nested"),
                                     json.dumps({"neon, 4 threads, q8": "soon"}),
                                     json.dumps({"neon, 4 threads, q8": -1}),
                                     json.dumps({"neon, 4 threads, q8": True})])
def test_a_damaged_file_is_as_good_as_none(content):
    decode_gate.REMEMBERED.parent.mkdir()
    decode_gate.REMEMBERED.write_text(content, encoding="utf-8")
    assert crossover("neon", 4, "q8") == decode_gate.ELSEWHERE["q8"]
    remember("neon", 4, {"f32": 5})
    assert json.loads(decode_gate.REMEMBERED.read_text()) == {"neon, 4 threads, f32": 5}


class One:
    def __init__(self, kernel, context, ms, threads=2, kv="q8"):
        self.record = type("Record", (), dict(kernel=kernel, context=context, ms=ms,
                                              threads=threads, kv=kv))


def test_the_bench_reads_the_crossover_off_its_own_rows():
    contexts = (1024, 2048, 8192)
    dense = [One("two_pass", n, n / 1000) for n in contexts]
    rows = [*dense, *(One("sparse_attention_packed", n, 2.048) for n in contexts),
            One("gemv", None, 1.0), One("two_pass", 512, 1.0, threads=1)]
    (found,) = table.automatic_crossings(rows).values()
    assert 2048 <= found["q8"] <= 2050
    always = [*dense, *(One("sparse_attention_packed", n, 1e-3) for n in contexts)]
    assert table.automatic_crossings(always) == {2: {"q8": 1024}}
    never = [*dense, *(One("sparse_attention_packed", n, 9.0) for n in contexts)]
    assert table.automatic_crossings(never) == {2: {"q8": None}}
    assert table.automatic_crossings(dense) == {}


@pytest.mark.parametrize("contexts", [(512,), (2048, 16384), (512, 1024, 2048, 4096)])
@pytest.mark.parametrize("ms", [1e-3, 1.5, 99.0])
def test_few_or_short_contexts_say_nothing_of_all_others(contexts, ms):
    rows = [One("two_pass", n, n / 1000) for n in contexts]
    rows += [One("sparse_attention_packed", n, ms) for n in contexts]
    assert table.automatic_crossings(rows) == {}
    # Nor do dense rows alone fill the range up.
    assert table.automatic_crossings([*rows, One("two_pass", 8192, 9.0)]) == {}


def test_a_session_asks_the_gate(monkeypatch, tmp_path):
    write_checkpoint(tmp_path / "tiny", eos_token_id=None)
    engine = Engine.load(tmp_path / "tiny")
    session = engine.prefill(np.arange(100) % 50, block_size=2, importance="none")
    monkeypatch.setattr("course_lib.engine.decode.automatic_blocks",
                        lambda n, kv: 32 if (n, kv) == (101, "f32") else None)
    exact, chosen = session.fork(), session.fork()
    exact.step(3)
    chosen.step(3, decode_k="auto")
    assert exact.last_step.blocks_read == 51 and chosen.last_step.blocks_read == 32
    chosen.step(4, decode_k="auto")
    assert chosen.last_step.blocks_read == 51
    with pytest.raises(ValueError, match='None or "auto"'):
        session.step(3, decode_k="always")
