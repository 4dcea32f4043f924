"""GGUF files: the same model as the Hugging Face folder, values and blocks bit for bit."""

from __future__ import annotations

import json

import numpy as np
import pytest

gguf = pytest.importorskip("gguf", reason="the gguf package writes the files of these tests")

from course_lib.engine import Engine  # noqa: E402
from course_lib.engine.checkpoint import open_checkpoint  # noqa: E402
from course_lib.engine.gguf_source import GgufSource  # noqa: E402
from course_lib.engine.rope import RopeScaling  # noqa: E402
from course_lib.errors import CourseError  # noqa: E402
from course_lib.linear import PackedMatrix  # noqa: E402
from tests.tiny_checkpoint import write_checkpoint  # noqa: E402
from tests.tiny_gguf import (  # noqa: E402
    CONFIG,
    KINDS,
    LLAMA,
    MOE,
    add_tensor,
    neighbour_pairs,
    write_gguf,
)

FAMILIES = {"qwen3": CONFIG, "llama": LLAMA, "qwen3_moe": MOE}
UNTIED = {"tie_word_embeddings": False, "num_key_value_heads": 4}
IDS = [5, 90, 7, 7, 263, 14, 30, 2, 66]
Q = "model.layers.1.self_attn.q_proj.weight"


@pytest.mark.parametrize("changes", [{}, UNTIED], ids=["tied, 4:2", "untied, 4:4"])
@pytest.mark.parametrize("family", FAMILIES)
def test_the_same_bits_as_the_folder_with_the_same_weights(tmp_path, family, changes):
    config = FAMILIES[family] | changes
    tensors = write_gguf(tmp_path / "model.gguf", config)
    write_checkpoint(tmp_path / "folder", tensors, **config)
    ours, folder = Engine.load(tmp_path / "model.gguf"), Engine.load(tmp_path / "folder")
    assert {**vars(ours.config), "rms_norm_eps": 1e-6} == vars(folder.config)
    np.testing.assert_array_equal(ours.forward(IDS), folder.forward(IDS))
    text = "hello <|im_end|> im 12\n\n a"
    for allow_special in (True, False):
        assert ours.encode(text, allow_special) == folder.encode(text, allow_special)
    messages = [{"role": "user", "content": "hello <|im_end|>"}]
    assert ours.apply_chat_template(messages) == folder.apply_chat_template(messages)


def edge_rows(kind, rng):
    """Rows of blocks with codes and scales of every sort, uint8 `[rows, bytes]`."""
    items, nbytes = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[kind]]
    if items == 1:
        x = np.r_[rng.standard_normal(90), 0.0, -0.0, 1e-40, 6e-8, 65504, -1.0].astype(np.float32)
        qtype = gguf.GGMLQuantizationType[kind]
        return np.ascontiguousarray(gguf.quantize(x.reshape(3, 32), qtype)).view(np.uint8)
    raw = rng.integers(0, 256, (300, nbytes), np.uint8)
    scales = np.array([0.0, -0.0, 6e-8, -6e-8, 65504, -65504, 1.0, -0.37], np.float16)
    floats = 4 if kind == "Q4_1" else 2
    raw[:, :floats] = rng.choice(scales, (300, floats // 2)).view(np.uint8)
    return raw.reshape(100, -1)


@pytest.mark.parametrize("kind", KINDS)
def test_values_are_those_of_the_gguf_package(tmp_path, kind):
    raw = edge_rows(kind, np.random.default_rng(3))
    qtype = gguf.GGMLQuantizationType[kind]
    typed = raw.view({"F32": np.float32, "F16": np.float16}.get(kind, np.uint8))
    expected = gguf.dequantize(typed, qtype)
    writer = gguf.GGUFWriter(tmp_path / "x.gguf", "qwen3")
    writer.add_tensor("blk.0.ffn_up.weight", typed, raw_dtype=qtype)
    for write in (writer.write_header_to_file, writer.write_kv_data_to_file,
                  writer.write_tensors_to_file, writer.close):
        write()
    source = GgufSource(tmp_path / "x.gguf")
    name = "model.layers.0.mlp.up_proj.weight"
    assert source.stored[name] == (kind, expected.shape)
    for found in (source.read(name), source.read_rows(name, 0, len(expected))):
        assert found.dtype == np.float32
        np.testing.assert_array_equal(found.view(np.uint32), expected.view(np.uint32))
    np.testing.assert_array_equal(source.read_rows(name, 1, 3), expected[1:3])
    assert source.read_rows(name, 2, 2).shape == (0, expected.shape[1])
    for blocks in ("q8_0", "q4_0"):
        found = source.blocks(name, blocks)
        assert (found is None) == (kind.lower() != blocks)
        if found is not None:
            np.testing.assert_array_equal(found, raw)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("kind", KINDS)
def test_every_tensor_in_hugging_face_s_order(tmp_path, family, kind):
    config = FAMILIES[family]
    tensors = write_gguf(tmp_path / "model.gguf", config, kind=kind)
    source = GgufSource(tmp_path / "model.gguf")
    assert set(source.stored) == set(tensors)
    qtype = gguf.GGMLQuantizationType[kind]
    for name, x in tensors.items():
        plain = x.ndim == 1 or name.endswith("mlp.gate.weight")
        expected = x if plain else gguf.dequantize(gguf.quantize(x, qtype), qtype)
        np.testing.assert_array_equal(source.read(name), expected, err_msg=name)
        assert source.stored[name].shape == x.shape


def test_rows_of_llama_s_heads_can_be_read_from_anywhere(tmp_path):
    tensors = write_gguf(tmp_path / "model.gguf", LLAMA)
    source = GgufSource(tmp_path / "model.gguf")
    assert not np.array_equal(neighbour_pairs(tensors[Q], 4), tensors[Q])
    for first, last in ((0, 64), (3, 9), (15, 17), (40, 41), (16, 48), (63, 64), (5, 5)):
        np.testing.assert_array_equal(source.read_rows(Q, first, last), tensors[Q][first:last])
    with pytest.raises(ValueError, match="rows"):
        source.read_rows(Q, 0, 65)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("kind", ["q8_0", "q4_0"])
def test_stored_blocks_are_kept_as_they_are(tmp_path, monkeypatch, family, kind):
    monkeypatch.setenv("COURSE_CACHE", "off")
    tensors = write_gguf(tmp_path / "model.gguf", FAMILIES[family], kind=kind.upper())
    qtype = gguf.GGMLQuantizationType[kind.upper()]
    weights = Engine.load(tmp_path / "model.gguf", weights=kind).model.weights
    qkv = weights.layers[1].qkv_proj
    assert isinstance(qkv, PackedMatrix)
    parts = [tensors[f"model.layers.1.self_attn.{p}_proj.weight"] for p in "qkv"]
    np.testing.assert_array_equal(qkv.to_blocks(), gguf.quantize(np.concatenate(parts), qtype))
    embedding = gguf.quantize(tensors["model.embed_tokens.weight"], qtype)
    np.testing.assert_array_equal(weights.embedding.to_blocks(), embedding)


def test_blocks_that_no_quantizer_makes_come_through(tmp_path, monkeypatch):
    """A scale of 1 and codes of 1 … 3: quantizing the values again would use codes up to 127."""
    monkeypatch.setenv("COURSE_CACHE", "off")
    block = np.r_[np.float16([1.0]).view(np.uint8), np.tile(np.uint8([1, 2, 3, 255]), 8)]
    up = np.tile(block, (96, 2))
    tensors = write_gguf(tmp_path / "plain.gguf")
    assert tensors["model.layers.0.mlp.up_proj.weight"].shape == (96, 64)
    quantized = gguf.GGMLQuantizationType.Q8_0

    def add(writer, name, x, kind, original=add_tensor):
        if name == "blk.0.ffn_up.weight":
            writer.add_tensor(name, up, raw_dtype=quantized)
        else:
            original(writer, name, x, "Q8_0" if x.ndim > 1 else kind)

    monkeypatch.setattr("tests.tiny_gguf.add_tensor", add)
    write_gguf(tmp_path / "model.gguf")
    gate_up = Engine.load(tmp_path / "model.gguf", "q8_0").model.weights.layers[0].mlp.gate_up_proj
    np.testing.assert_array_equal(gate_up.to_blocks()[96:], up)


def test_a_file_of_mixed_types(tmp_path, monkeypatch):
    """q in Q8_0 and k in F16 in one matrix: what is stored in blocks keeps them."""
    monkeypatch.setenv("COURSE_CACHE", "off")

    def add(writer, name, x, kind, original=add_tensor):
        mixed = {"attn_q": "Q8_0", "attn_k": "F16", "attn_v": "Q4_1"}
        original(writer, name, x, mixed.get(name.split(".")[-2], kind))

    monkeypatch.setattr("tests.tiny_gguf.add_tensor", add)
    tensors = write_gguf(tmp_path / "model.gguf", LLAMA)
    blocks = Engine.load(tmp_path / "model.gguf", "q8_0").model.weights.layers[1].qkv_proj
    q8 = gguf.GGMLQuantizationType.Q8_0
    np.testing.assert_array_equal(blocks.to_blocks()[:64], gguf.quantize(tensors[Q], q8))
    source = GgufSource(tmp_path / "model.gguf")
    k, v = (source.read(Q.replace("q_proj", f"{p}_proj")) for p in "kv")
    np.testing.assert_array_equal(blocks.to_blocks()[64:96], gguf.quantize(k, q8))
    np.testing.assert_array_equal(blocks.to_blocks()[96:], gguf.quantize(v, q8))


SCALINGS = {
    "none": ({"rope__scaling__type": "none", "rope__scaling__factor": 8.0}, None),
    "linear": ({"rope__scaling__type": "linear", "rope__scaling__factor": 4.0},
               {"rope_type": "linear", "factor": 4.0}),
    "yarn": ({"rope__scaling__type": "yarn", "rope__scaling__factor": 4.0,
              "rope__scaling__original_context_length": 128, "rope__scaling__finetuned": True,
              "rope__scaling__yarn_beta_fast": 16.0, "rope__scaling__attn_factor": 1.0},
             {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128,
              "beta_fast": 16.0}),
}


@pytest.mark.parametrize("name", SCALINGS)
def test_scaled_rope_means_what_it_means_in_config_json(tmp_path, name):
    metadata, parameters = SCALINGS[name]
    tensors = write_gguf(tmp_path / "model.gguf", **metadata)
    write_checkpoint(tmp_path / "folder", tensors, **CONFIG, rope_scaling=parameters)
    ours, folder = Engine.load(tmp_path / "model.gguf"), Engine.load(tmp_path / "folder")
    assert ours.config.rope == folder.config.rope
    assert (ours.config.rope is None) == (parameters is None)
    np.testing.assert_array_equal(ours.forward(IDS), folder.forward(IDS))


def llama3_divisors(factor, d=16, theta=10_000.0):
    """rope_freqs.weight by the words of the definition, with the numbers of Llama 3.1."""
    divisors = []
    for i in range(d // 2):
        turns = 8192 * theta ** (-2 * i / d) / (2 * np.pi)
        smooth = (turns - 1.0) / (4.0 - 1.0)
        kept = min(max(smooth, 0.0), 1.0)
        divisors.append(1.0 / ((1.0 - kept) / factor + kept))
    return np.array(divisors, np.float32)


@pytest.mark.parametrize("factor", [8.0, 32.0])
def test_llama_3_s_frequencies(tmp_path, factor):
    divisors = llama3_divisors(factor)
    assert divisors[0] == 1 and divisors[-1] == factor and len(set(divisors)) == 3
    tensors = write_gguf(tmp_path / "model.gguf", LLAMA, extra={"rope_freqs.weight": divisors})
    scaling = {"rope_type": "llama3", "factor": factor, "low_freq_factor": 1.0,
               "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
    write_checkpoint(tmp_path / "folder", tensors, **LLAMA, rope_scaling=scaling)
    ours, folder = Engine.load(tmp_path / "model.gguf"), Engine.load(tmp_path / "folder")
    assert ours.config.rope == folder.config.rope
    assert isinstance(ours.config.rope, RopeScaling)
    np.testing.assert_array_equal(ours.forward(IDS), folder.forward(IDS))


def test_frequencies_of_another_rule_are_refused(tmp_path):
    for divisors in (llama3_divisors(8.0)[::-1].copy(), llama3_divisors(8.0)[:4],
                     np.linspace(1, 8, 8, dtype=np.float32)):
        write_gguf(tmp_path / "model.gguf", LLAMA, extra={"rope_freqs.weight": divisors})
        with pytest.raises(CourseError, match="rope_freqs.weight scales RoPE in a way"):
            open_checkpoint(tmp_path / "model.gguf")


def test_what_metadata_may_leave_out(tmp_path):
    """llama.cpp's defaults: as many KV heads as heads, heads of hidden / heads, base 10,000."""
    config = LLAMA | {"num_key_value_heads": 4}
    left_out = dict.fromkeys(("vocab_size", "attention__head_count_kv", "attention__key_length",
                              "attention__value_length", "rope__freq_base",
                              "rope__dimension_count"))
    write_gguf(tmp_path / "model.gguf", config, **left_out)
    found = open_checkpoint(tmp_path / "model.gguf").config
    assert (found.vocab_size, found.num_key_value_heads, found.head_dim, found.rope_theta) == (
        300, 4, 16, 10_000.0)


def test_tokens_that_end_a_turn_end_a_generation_too(tmp_path):
    write_gguf(tmp_path / "model.gguf", tokenizer={"tokenizer.ggml.eot_token_id": 0})
    assert open_checkpoint(tmp_path / "model.gguf").config.eos_token_ids == (2, 0)


def test_the_fingerprint_follows_the_file(tmp_path):
    path = tmp_path / "model.gguf"
    write_gguf(path, LLAMA)
    first = GgufSource(path).fingerprint()
    assert first == GgufSource(path).fingerprint() and int(first, 16) >= 0
    write_gguf(path, LLAMA, rope__freq_base=500.0)
    assert GgufSource(path).fingerprint() != first


def test_a_file_that_is_cut_short_while_open_is_an_error_not_a_crash(tmp_path):
    path = tmp_path / "model.gguf"
    write_gguf(path, LLAMA)
    source = GgufSource(path)
    with open(path, "r+b") as file:
        file.truncate(path.stat().st_size // 2)
    with pytest.raises(CourseError, match="became shorter while it was read"):
        for name in source.stored:
            source.read(name)


def test_the_header_agrees_with_the_package_s_reader(tmp_path):
    path = tmp_path / "model.gguf"
    write_gguf(path, MOE, kind="Q4_1")
    reader, metadata = gguf.GGUFReader(path), GgufSource(path).metadata
    theirs = {key: field.contents() for key, field in reader.fields.items()
              if not key.startswith("GGUF.")}
    assert json.dumps(theirs) == json.dumps(metadata)
