"""Damaged checkpoint files: a CourseError of one line or a right load, never anything else."""

import json
import math
import struct
import tempfile
import tracemalloc
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from course_lib.engine import safetensors_file
from course_lib.engine.config import ModelConfig
from course_lib.engine.safetensors_source import SafetensorsSource
from course_lib.engine.tokenizer import Tokenizer
from course_lib.errors import CourseError
from tests.tiny_checkpoint import BASE_CONFIG, random_tensors, write_checkpoint

INDEX = "model.safetensors.index.json"
VALUES = np.arange(6, dtype=np.float32)


def one_line_or(folder, load):
    """What `load` returns, or None after a CourseError that one line says."""
    try:
        return load(folder)
    except CourseError as error:
        message = str(error)
        assert message and "\n" not in message and len(message) < 1500 + len(str(folder))
        return None


def read_all(folder):
    source = SafetensorsSource(folder)
    source.fingerprint()
    tensors = {}
    for name, stored in source.stored.items():
        tensor = one_line_or(folder, lambda _, name=name: source.read(name))
        if tensor is not None:
            assert tensor.dtype == np.float32 and tensor.shape == stored.shape
            assert np.isfinite(tensor).all()
        tensors[name] = tensor
    return tensors


def safetensors_bytes(header, data):
    return struct.pack("<Q", len(header)) + header + data


# Damage: (where, what to do there, bytes). Places are shares of the length, so that they shrink.
damage = st.lists(
    st.tuples(st.floats(0, 1), st.sampled_from(["flip", "insert", "delete", "cut", "repeat"]),
              st.binary(min_size=1, max_size=4)),
    min_size=1, max_size=3)


def damaged(data, edits):
    for where, kind, new in edits:
        at = int(where * len(data))
        if kind == "flip":
            data = data[:at] + bytes(b ^ n for b, n in zip(data[at:], new, strict=False)) + \
                data[at + len(new):]
        elif kind == "insert":
            data = data[:at] + new + data[at:]
        elif kind == "delete":
            data = data[:at] + data[at + len(new):]
        elif kind == "cut":
            data = data[:at]
        else:
            data = data[:at] + data[max(at - 40, 0) : at] + data[at:]
    return data


GOOD = safetensors_bytes(json.dumps({
    "__metadata__": {"format": "pt"},
    "a": {"dtype": "F32", "shape": [2, 3], "data_offsets": [0, 24]},
    "model.b": {"dtype": "BF16", "shape": [4], "data_offsets": [24, 32]},
    "c": {"dtype": "F16", "shape": [], "data_offsets": [32, 34]},
}).encode(), VALUES.tobytes() + bytes([0, 63] * 5))


@settings(max_examples=120, deadline=None)
@given(damage)
def test_a_damaged_file(edits):
    with tempfile.TemporaryDirectory() as name:
        (Path(name) / "model.safetensors").write_bytes(damaged(GOOD, edits))
        one_line_or(Path(name), read_all)


numbers = st.sampled_from(
    [0, 1, 2, 3, 4, 6, 8, 12, 24, 25, 2**31, 2**32 + 1, 2**62, 2**63, 2**64, -1, 0.5, True, None])
names = st.sampled_from(["a", "b", "__metadata__", "", "\n", "model.language_model.a", "model.a",
                         "x" * 300, "\ud800"])
entries = st.fixed_dictionaries({
    "dtype": st.sampled_from(["F32", "F16", "BF16", "F64", "I8", "F4", "BOOL", "f32", "", None, 4]),
    "shape": st.one_of(st.lists(numbers, max_size=4), st.just([2, 3]), numbers),
    "data_offsets": st.one_of(st.lists(numbers, max_size=3), st.just([0, 24]), numbers),
})
whole = st.just({"dtype": "F32", "shape": [2, 3], "data_offsets": [0, 24]})


@settings(max_examples=120, deadline=None)
@given(st.lists(st.tuples(names, st.one_of(entries, whole, numbers)), max_size=3))
def test_a_lying_header(pairs):
    """Shapes that overflow, offsets outside the file, overlaps, gaps, keys that come twice."""
    header = "{" + ", ".join(f"{json.dumps(k)}: {json.dumps(v)}" for k, v in pairs) + "}"
    with tempfile.TemporaryDirectory() as name:
        (Path(name) / "model.safetensors").write_bytes(
            safetensors_bytes(header.encode(), VALUES.tobytes()))
        tensors = one_line_or(Path(name), read_all)
    for key, tensor in (tensors or {}).items():
        if tensor is None:
            continue
        possible = [
            entry for name, entry in pairs
            if name.replace("language_model.", "") == key and isinstance(entry, dict)
            and entry["dtype"] in ("F32", "F16", "BF16")
            and list(tensor.shape) == entry["shape"]]
        assert possible
        if any(entry["dtype"] == "F32" and tensor.size == 6 for entry in possible):
            np.testing.assert_array_equal(tensor.ravel(), VALUES)


@pytest.mark.parametrize("size", [0, 1, 2**20, 2**25, 2**25 + 1, 2**31, 2**63 - 1, 2**64 - 1])
def test_a_header_size_that_cannot_be(tmp_path, size):
    (tmp_path / "model.safetensors").write_bytes(struct.pack("<Q", size) + b"{}" + b"x" * 100)
    tracemalloc.start()
    with pytest.raises(CourseError, match="is damaged (or truncated|.its header would have )"):
        SafetensorsSource(tmp_path)
    assert tracemalloc.get_traced_memory()[1] < 1 << 20
    tracemalloc.stop()


def test_a_header_larger_than_any(tmp_path, monkeypatch):
    monkeypatch.setattr(safetensors_file, "LARGEST_HEADER", 40)
    for padding, fits in [(38, True), (39, False)]:
        (tmp_path / "model.safetensors").write_bytes(safetensors_bytes(b"{}" + b" " * padding, b""))
        if fits:
            assert SafetensorsSource(tmp_path).stored == {}
        else:
            with pytest.raises(CourseError, match=r"damaged .its header would have 41 bytes"):
                SafetensorsSource(tmp_path)


GOOD_INDEX = json.dumps({"metadata": {"total_size": 34}, "weight_map": {
    "a": "one.safetensors", "model.b": "one.safetensors", "c": "one.safetensors",
    "d": "two.safetensors"}}).encode()


@settings(max_examples=100, deadline=None)
@given(damage)
def test_a_damaged_index(edits):
    """Nothing outside the folder is opened; what loads is what the shards hold."""
    with tempfile.TemporaryDirectory() as name:
        outside, folder = Path(name) / "two.safetensors", Path(name) / "model"
        folder.mkdir()
        (folder / "one.safetensors").write_bytes(GOOD)
        other = json.dumps({"d": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}}).encode()
        (folder / "two.safetensors").write_bytes(safetensors_bytes(other, bytes(4)))
        outside.write_bytes(b"")
        (folder / INDEX).write_bytes(damaged(GOOD_INDEX, edits))
        tensors = one_line_or(folder, read_all)
    if tensors is not None:
        assert tensors.keys() in ({"a", "model.b", "c", "d"}, {"a", "model.b", "c"}, {"d"})
        np.testing.assert_array_equal(tensors.get("a", VALUES).ravel(), VALUES)


json_values = st.recursive(
    st.one_of(st.none(), st.booleans(), numbers, st.floats(), st.text(max_size=6)),
    lambda inner: st.one_of(st.lists(inner, max_size=3),
                            st.dictionaries(st.text(max_size=6), inner, max_size=3)),
    max_leaves=4)
CONFIG_KEYS = [*BASE_CONFIG, "rope_scaling", "rope_parameters", "text_config", "num_experts",
               "num_experts_per_tok", "moe_intermediate_size", "norm_topk_prob", "mlp_only_layers",
               "decoder_sparse_step", "layer_types", "sliding_window", "use_sliding_window",
               "quantization_config", "attention_bias", "partial_rotary_factor"]
rope = st.dictionaries(
    st.sampled_from(["rope_type", "type", "factor", "rope_theta", "beta_fast", "beta_slow",
                     "low_freq_factor", "high_freq_factor", "original_max_position_embeddings",
                     "attention_factor", "mscale", "mscale_all_dim", "truncate"]),
    st.one_of(numbers, st.floats(), st.sampled_from(["yarn", "llama3", "linear", "default"])))


@settings(max_examples=120, deadline=None)
@given(st.sampled_from(["qwen3", "qwen3_moe", "qwen3_vl", "qwen3_vl_moe", "llama"]),
       st.dictionaries(st.sampled_from(CONFIG_KEYS), json_values, max_size=3), st.booleans(), rope)
def test_a_config_of_anything(model_type, changes, nested, scaling):
    raw = BASE_CONFIG | {"model_type": model_type, "num_experts": 4, "num_experts_per_tok": 2,
                         "moe_intermediate_size": 8, "rope_parameters": scaling} | changes
    if nested:
        raw |= {"text_config": {**raw, "model_type": model_type + "_text"} | changes}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "config.json").write_text(json.dumps(raw))
        config = one_line_or(folder, ModelConfig.from_folder)
    if config is not None:
        assert config.num_attention_heads % config.num_key_value_heads == 0
        assert config.head_dim % 2 == 0 and math.isfinite(config.rope_theta)
        assert config.rope_theta > 0 and config.rms_norm_eps > 0


@pytest.fixture(scope="module")
def small_files(tmp_path_factory):
    folder = tmp_path_factory.mktemp("good")
    write_checkpoint(folder, random_tensors(BASE_CONFIG | {"num_hidden_layers": 1}))
    (folder / "generation_config.json").write_text('{"eos_token_id": [2, 0]}')
    return {path.name: path.read_bytes() for path in folder.glob("*.json")}


@settings(max_examples=100, deadline=None)
@given(file=st.sampled_from(["config.json", "generation_config.json", "tokenizer.json",
                             "tokenizer_config.json"]), edits=damage)
def test_damaged_small_files(small_files, file, edits):
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for other, data in small_files.items():
            (folder / other).write_bytes(damaged(data, edits) if other == file else data)
        config = one_line_or(folder, ModelConfig.from_folder)
        tokenizer = one_line_or(folder, Tokenizer.from_folder)
        assert file.startswith("tokenizer") or tokenizer is not None
        assert not file.startswith("tokenizer") or config is not None
        if tokenizer is not None:
            assert tokenizer.decode(tokenizer.encode("Hello <|im_end|>")) == "Hello <|im_end|>"
