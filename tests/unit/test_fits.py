"""What fits: sizes from a config alone against real arrays, the doctor's table, refusals."""

from __future__ import annotations

import dataclasses
import re

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from course_lib import cli, memory
from course_lib.commands.loading import load_with_bar
from course_lib.engine import Engine, ModelConfig, fits, weight_cache
from course_lib.engine.config import MoEConfig
from course_lib.engine.conversion import load_weights, weight_bytes
from course_lib.engine.fits import (
    cache_bytes,
    longest_context,
    need,
    require_context,
    require_memory,
    scratch_bytes,
    verdict,
)
from course_lib.engine.weights import expected_tensors
from course_lib.errors import CourseError
from course_lib.kvcache import KVCache
from tests.tiny_checkpoint import ArraySource, write_checkpoint

# The config.json that is published with each model; the text part of Qwen3-VL-2B has the shape of
# Qwen3-1.7B.
QWEN3_1_7B = ModelConfig(
    vocab_size=151_936, hidden_size=2048, intermediate_size=6144, num_hidden_layers=28,
    num_attention_heads=16, num_key_value_heads=8, head_dim=128, max_position_embeddings=40_960,
    rms_norm_eps=1e-6, rope_theta=1e6, tie_word_embeddings=True,
)
QWEN3_VL_2B = dataclasses.replace(
    QWEN3_1_7B, max_position_embeddings=262_144, rope_theta=5e6)
QWEN3_30B_A3B = ModelConfig(
    vocab_size=151_936, hidden_size=2048, intermediate_size=6144, num_hidden_layers=48,
    num_attention_heads=32, num_key_value_heads=4, head_dim=128, max_position_embeddings=40_960,
    rms_norm_eps=1e-6, rope_theta=1e6, tie_word_embeddings=False, family="qwen3_moe",
    moe=MoEConfig(num_experts=128, experts_per_token=8, intermediate_size=768, norm_topk_prob=True),
)
SHAPE = dict(hidden_size=64, intermediate_size=96, head_dim=16)


@pytest.mark.parametrize("config", [QWEN3_1_7B, QWEN3_VL_2B])
def test_a_2b_model_with_a_q8_cache_of_4096_tokens_fits_a_board(config):
    q8 = need(config, "q8_0", "q8", 4096)
    q4 = need(config, "q4_0", "q8", 4096)
    assert q8.running + q8.loading < 4e9
    assert q4.running + q4.loading < 2.5e9
    assert need(config, "f32", "q8", 4096).running > 4e9


def test_the_numbers_of_published_shapes():
    assert weight_bytes(QWEN3_1_7B, "f32") == 4 * 1_720_574_976  # parameters, by transformers
    matrices = 1_720_574_976 - (28 * (2 * 2048 + 2 * 128) + 2048)
    norms = 4 * (28 * (2 * 2048 + 2 * 128) + 2048)
    assert weight_bytes(QWEN3_1_7B, "q8_0") == matrices // 32 * 34 + norms
    assert weight_bytes(QWEN3_1_7B, "q4_0") == matrices // 32 * 18 + norms
    assert weight_bytes(QWEN3_30B_A3B, "f32") == 4 * 30_532_122_624
    ok, line = verdict(QWEN3_30B_A3B, 4096, 16_000_000_000)
    assert not ok and "needs 17." in line and "choose a smaller model" in line


@settings(max_examples=25)
@given(st.integers(1, 3), st.integers(1, 3), st.sampled_from([8, 16]), st.integers(17, 70),
       st.booleans(), st.booleans(), st.sampled_from(["f32", "q8_0", "q4_0"]))
def test_weights_take_what_was_said(layers, kv_heads, head_dim, vocab, tied, mixture, kind):
    config = ModelConfig(
        vocab_size=vocab, hidden_size=32, intermediate_size=64, num_hidden_layers=layers,
        num_attention_heads=4 * kv_heads, num_key_value_heads=kv_heads, head_dim=head_dim,
        max_position_embeddings=64, rms_norm_eps=1e-6, rope_theta=1e4, tie_word_embeddings=tied,
        moe=MoEConfig(3, 1, 32, True) if mixture else None, dense_layers=frozenset([0]))
    tensors = {name: np.ones(shape, np.float32) for name, shape in expected_tensors(config).items()}
    weights = load_weights(ArraySource(tensors), config, kind)
    total = weights.final_norm.nbytes + weights.embedding.nbytes
    total += 0 if tied else weights.output.nbytes
    for layer in weights.layers:
        swiglus = getattr(layer.mlp, "experts", (layer.mlp,))
        parts = [getattr(layer.mlp, "router", None), layer.input_norm, layer.qkv_proj, layer.q_norm,
                 layer.k_norm, layer.o_proj, layer.post_attention_norm]
        parts += [part for one in swiglus for part in (one.gate_up_proj, one.down_proj)]
        total += sum(part.nbytes for part in parts if part is not None)
    assert weight_bytes(config, kind) == total


@pytest.mark.parametrize("kv", ["f32", "q8"])
@pytest.mark.parametrize("tokens", [1, 31, 100, 777])
def test_the_cache_takes_no_more_than_was_said(kv, tokens):
    config = dataclasses.replace(QWEN3_1_7B, num_hidden_layers=2, head_dim=16)
    cache = KVCache(2, 8, 16, dtype=kv)
    rows = np.ones((8, 1, 16), np.float32)
    for _ in range(tokens):  # one by one: the most that is allocated in advance
        for layer in range(2):
            cache.append(layer, rows, rows)
    if kv == "q8":
        for layer in range(2):
            cache.probe_keys(layer, 8)
    said = cache_bytes(config, kv, tokens)
    assert cache.nbytes <= said <= cache.nbytes * 1.3 + 2 * 32 * 8 * 160


def test_the_longest_context_is_the_last_that_fits():
    config = QWEN3_1_7B
    free = need(config, "q4_0", "q8", 3000).running
    longest = longest_context(config, "q4_0", "q8", free)
    assert longest >= 3000
    assert need(config, "q4_0", "q8", longest).running <= free
    assert need(config, "q4_0", "q8", longest + 1).running > free
    assert longest_context(config, "q4_0", "q8", 10**12) == 40_960
    assert longest_context(config, "f32", "f32", 10**9) == 0


def test_scratch_grows_with_the_prompt_and_with_q8_rows_read_back():
    assert scratch_bytes(QWEN3_1_7B, "f32", 8192) > 1.8 * scratch_bytes(QWEN3_1_7B, "f32", 4096)
    more = scratch_bytes(QWEN3_1_7B, "q8", 4096) - scratch_bytes(QWEN3_1_7B, "f32", 4096)
    assert more == 4096 * 2 * 8 * 128 * 4


@pytest.mark.parametrize(("free", "ok", "words"), [
    (8e9, True, "fits: take --weights q8_0 --kv q8"),
    (2.0e9, True, "fits: take --weights q4_0 --kv q8"),
    (1.4e9, False, "does not fit: --weights q4_0 --kv q8 needs 1.* take a context of at most"),
    (0.5e9, False, "0.50 GB are free: close other programs, or choose a smaller model"),
    (None, True, "not known here: take --weights q8_0 --kv q8"),
])
def test_the_verdict(free, ok, words):
    found, line = verdict(QWEN3_1_7B, 4096, None if free is None else int(free))
    assert found == ok and re.search(words, line), line
    assert "\n" not in line


def tell(monkeypatch, free):
    monkeypatch.setattr(memory, "available", lambda: free)


def test_weights_that_do_not_fit_are_refused_before_they_are_read(tmp_path, monkeypatch):
    write_checkpoint(tmp_path, **SHAPE)
    config = Engine.load(tmp_path).config
    tell(monkeypatch, fits.loading_bytes(config) + weight_bytes(config, "q4_0"))
    monkeypatch.setattr("course_lib.engine.engine.load_weights", None)
    with pytest.raises(CourseError, match=r"weights as f32 need 0.02 GB of memory, 0.02 GB are "
                                          r"free: load them as q4_0 \(0.00 GB\), or close other"):
        Engine.load(tmp_path)
    tell(monkeypatch, 1000)
    with pytest.raises(CourseError, match="free: choose a smaller model, or close other programs"):
        Engine.load(tmp_path, "q4_0")
    tell(monkeypatch, None)
    require_memory(config, "f32", tmp_path)


def test_a_context_that_does_not_fit(monkeypatch):
    least = cache_bytes(QWEN3_1_7B, "f32", 4096) + scratch_bytes(QWEN3_1_7B, "f32", 4096)
    tell(monkeypatch, least)
    require_context(QWEN3_1_7B, "f32", 4096)
    tell(monkeypatch, least - 1)
    with pytest.raises(CourseError, match="4096 tokens with kv f32 needs 1.* use --kv q8 or a"):
        require_context(QWEN3_1_7B, "f32", 4096)
    tell(monkeypatch, 1)
    with pytest.raises(CourseError, match="kv q8 needs .* free: use a shorter context, or close"):
        require_context(QWEN3_1_7B, "q8", 4096)
    tell(monkeypatch, None)
    require_context(QWEN3_1_7B, "f32", 10**9)


def test_a_prompt_is_refused_before_it_is_read(tmp_path, monkeypatch):
    write_checkpoint(tmp_path, **SHAPE)
    engine = Engine.load(tmp_path)
    tell(monkeypatch, 1000)
    monkeypatch.setattr("course_lib.engine.engine.run_prompt", None)
    with pytest.raises(CourseError, match="a context of 3 tokens with kv q8 needs 0.00 GB"):
        engine.prefill([5, 6, 7], kv="q8")


def test_the_doctor_s_table(tmp_path, monkeypatch, capsys):
    write_checkpoint(tmp_path, **SHAPE)
    tell(monkeypatch, 10**9)
    monkeypatch.setattr(weight_cache, "SMALL", 0)
    monkeypatch.delenv("COURSE_CACHE", raising=False)
    assert cli.main(["doctor", "--model", str(tmp_path)]) == 0
    out = capsys.readouterr().out
    lines = [line.split() for line in out.splitlines()]
    assert [line[:3:2] for line in lines if line[-1:] == ["fits"]] == [
        [kind, kv] for kind in ("f32", "q8_0", "q4_0") for kv in ("f32", "q8")]
    assert "with 512 of at most 512 tokens" in out
    assert out.splitlines()[-1] == "fits: take --weights f32 --kv f32"
    monkeypatch.setattr(fits, "SMALL", 0)
    assert "q4_0: the first start packs 0.00 GB into" in out
    assert cli.main(["doctor", "--model", str(tmp_path)]) == 0
    assert capsys.readouterr().out.splitlines()[-1] == "fits: take --weights q8_0 --kv q8"
    tell(monkeypatch, 1000)
    assert cli.main(["doctor", "--model", str(tmp_path), "--context", "100"]) == 1
    out = capsys.readouterr().out
    assert "with 100 of" in out and out.count("does not fit") == 7
    tell(monkeypatch, None)
    assert cli.main(["doctor", "--model", str(tmp_path)]) == 0
    assert "fit" not in capsys.readouterr().out.splitlines()[4]


@pytest.mark.parametrize(("more", "words"), [
    (["--context", "513"], "--context 513 must be from 1 to the model's 512"),
    (["--context", "0"], "--context 0 must be from 1"),
])
def test_the_doctor_refuses_wrong_contexts(tmp_path, capsys, more, words):
    write_checkpoint(tmp_path, **SHAPE)
    assert cli.main(["doctor", "--model", str(tmp_path), *more]) == 2
    assert words in capsys.readouterr().err
    assert cli.main(["doctor", "--context", "9"]) == 2
    assert "--context belongs to --model" in capsys.readouterr().err


def test_rows_that_are_no_blocks_leave_f32_only(tmp_path, capsys):
    write_checkpoint(tmp_path)
    assert cli.main(["doctor", "--model", str(tmp_path)]) == 0
    out = capsys.readouterr().out
    assert "q8_0" not in out and out.splitlines()[-1] == "fits: take --weights f32 --kv f32"


def test_the_doctor_needs_the_environment_for_a_model_only():
    assert cli.without_environment(["doctor", "--model=x"]) is None
    assert cli.without_environment(["doctor", "--model", "x"]) is None
    assert cli.without_environment(["doctor", "--help"]) == 0


def test_memory_left_is_the_machine_s_or_a_group_s(tmp_path, monkeypatch):
    table, groups, own = tmp_path / "meminfo", tmp_path / "cgroup", tmp_path / "own"
    monkeypatch.setattr(memory, "MEMINFO", table)
    monkeypatch.setattr(memory, "GROUPS", groups)
    monkeypatch.setattr(memory, "OWN_GROUPS", own)
    assert memory.available() is None
    table.write_text("MemTotal:  4000 kB\nMemAvailable:  3000 kB\nHugePages_Total:  0\n")
    assert memory.available() == 3000 * 1024

    def group(path, limit, used, statistics, names=("memory.max", "memory.current")):
        (groups / path).mkdir(parents=True, exist_ok=True)
        (groups / path / names[0]).write_text(f"{limit}\n")
        (groups / path / names[1]).write_text(f"{used}\n")
        (groups / path / "memory.stat").write_text(statistics)

    own.write_text("0::/a/b\n")
    group("a/b", "max", 5, "")
    assert memory.available() == 3000 * 1024
    group("a", 1_000_000, 700_000, "anon 1\ninactive_file 100000\nactive_file 50000\n")
    assert memory.available() == 450_000  # a limit above it holds too; file pages can be dropped
    group("a", 1_000_000, 2_000_000, "")
    assert memory.available() == 0
    own.write_text("4:memory:/c\n0::/\n")
    group("memory/c", 900_000, 500_000, "inactive_file 7\ntotal_inactive_file 100000\n",
          ("memory.limit_in_bytes", "memory.usage_in_bytes"))
    assert memory.available() == 500_000
    own.write_text("4:memory:/somewhere/else\n")
    assert memory.available() == 3000 * 1024


def test_a_context_that_no_float_holds_is_refused(tmp_path, capsys):
    context = 10**320
    write_checkpoint(tmp_path, max_position_embeddings=context)
    assert cli.main(["doctor", "--model", str(tmp_path), "--context", str(context)]) == 2
    error = capsys.readouterr().err
    assert re.search(r"config.json: max_position_embeddings 10{90,}\.\.\. is above 2\^31: ", error)


def test_memory_left_is_no_more_than_addresses_are(tmp_path, monkeypatch):
    monkeypatch.setattr(memory, "STATUS", tmp_path / "status")
    (tmp_path / "status").write_text("VmPeak:\t 900 kB\nVmSize:\t 600 kB\n")
    monkeypatch.setattr(memory.resource, "getrlimit", lambda which: (1000 * 1024, 2000 * 1024))
    assert memory.available() == 400 * 1024


def test_the_bar_is_silent_without_a_terminal_and_notes_are_lines(tmp_path, monkeypatch, capsys):
    write_checkpoint(tmp_path, **SHAPE)
    assert load_with_bar(tmp_path).config.hidden_size == 64
    assert capsys.readouterr() == ("", "")
    monkeypatch.setattr(weight_cache, "SMALL", 0)
    monkeypatch.delenv("COURSE_CACHE", raising=False)
    load_with_bar(tmp_path, "q8_0")
    (tmp_path / "course-cache" / "q8_0.safetensors").write_bytes(b"")
    load_with_bar(tmp_path, "q8_0")
    err = capsys.readouterr().err
    assert err.startswith("course: ") and err.count("\n") == 1
    assert "is truncated or of another model: packing the weights again" in err


def test_the_bar_on_a_terminal_counts_bytes(tmp_path, monkeypatch, capsys):
    write_checkpoint(tmp_path, **SHAPE)
    monkeypatch.setattr("sys.stderr.isatty", lambda: True, raising=False)
    load_with_bar(tmp_path)
    err = capsys.readouterr().err
    assert "loading" in err and "B/s" in err and "\n" not in err
