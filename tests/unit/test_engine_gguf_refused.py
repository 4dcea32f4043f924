"""GGUF files that are damaged, lie or ask for what the engine does not compute: one sentence."""

from __future__ import annotations

import struct

import numpy as np
import pytest

gguf = pytest.importorskip("gguf", reason="the gguf package writes the files of these tests")

from course_lib.engine import Engine, gguf_header  # noqa: E402
from course_lib.engine.checkpoint import open_checkpoint  # noqa: E402
from course_lib.errors import CourseError  # noqa: E402
from tests.tiny_gguf import CONFIG, LLAMA, MOE, tensors_of, write_gguf  # noqa: E402


def refusal(path):
    """The error of loading `path`, one sentence that names it; what it says without the name."""
    with pytest.raises(CourseError) as error:
        Engine.load(path)
    message = str(error.value)
    assert "\n" not in message and str(path) in message and ": " in message, message
    return message.replace(str(path), "")


@pytest.fixture
def path(tmp_path):
    write_gguf(tmp_path / "model.gguf", LLAMA)
    return tmp_path / "model.gguf"


def patch(path, offset, data):
    with open(path, "r+b") as file:
        file.seek(offset)
        file.write(data)


def offset_of(path, text):
    """Where `text` stands in the file."""
    return path.read_bytes().index(text)


def test_files_that_are_no_gguf(path, tmp_path):
    for data in (b"", b"GG", b"\x80\x00\x00\x00\x00\x00\x00\x00{}", b"ggml" + bytes(100)):
        path.write_bytes(data)
        assert "is not a GGUF file" in refusal(path)
    assert "is missing" in refusal(tmp_path / "none.gguf")
    (tmp_path / "folder.gguf").mkdir()
    assert "config.json is missing" in refusal(tmp_path / "folder.gguf")


def test_other_versions_and_byte_orders(path):
    patch(path, 4, struct.pack("<I", 1))
    assert "has GGUF version 1" in refusal(path)
    patch(path, 4, struct.pack(">I", 3))
    assert "is in big-endian byte order" in refusal(path)


@pytest.mark.parametrize("share", [0.0005, 0.01, 0.1, 0.5, 0.999])
def test_truncated_anywhere(path, share):
    with open(path, "r+b") as file:
        file.truncate(int(path.stat().st_size * share) + 8)
    assert "truncated" in refusal(path)


def test_lengths_that_lie(path):
    """The package's reader would go round 2^60 times."""
    for offset, what in ((8, "tensors"), (16, "fields of metadata")):
        original = path.read_bytes()
        for count in (2**63, 2**31, 10**6):
            patch(path, offset, struct.pack("<Q", count))
            assert f"{count} {what} do not fit in it" in refusal(path)
        path.write_bytes(original)
    original = path.read_bytes()
    key = b"tokenizer.ggml.token_type"
    begin = offset_of(path, key) + len(key) + 8
    patch(path, begin, struct.pack("<Q", 2**60))
    assert f"{2**60} numbers in tokenizer.ggml.token_type do not fit" in refusal(path)
    path.write_bytes(original)
    begin = offset_of(path, b"tokenizer.ggml.tokens") + len("tokenizer.ggml.tokens") + 8
    patch(path, begin, struct.pack("<Q", 2**60))
    assert f"{2**60} strings in tokenizer.ggml.tokens do not fit" in refusal(path)
    path.write_bytes(original)
    patch(path, 24, struct.pack("<Q", 2**40))  # the first key's length
    assert f"a string of {2**40} bytes" in refusal(path)
    patch(path, 24, struct.pack("<Q", 2**25))
    assert "it ends inside its header" in refusal(path)


def test_lists_longer_than_any_model_s_are_refused_before_they_fill_memory(path, monkeypatch):
    monkeypatch.setattr(gguf_header, "MAX_ITEMS", 200)
    assert "266 strings in tokenizer.ggml.tokens do not fit" in refusal(path)


def tensor_info(path, name):
    """Where a tensor's dimensions are counted; sizes, type and offset follow the count."""
    return offset_of(path, struct.pack("<Q", len(name)) + name.encode()) + 8 + len(name)


def test_tensor_tables_that_lie(path):
    info = tensor_info(path, "blk.1.ffn_up.weight")
    dimensions = struct.unpack_from("<IQQIQ", path.read_bytes(), info)
    assert dimensions[:4] == (2, 64, 96, 0)
    original = path.read_bytes()
    for change, words in (
        (struct.pack("<I", 0), "has 0 dimensions"),
        (struct.pack("<I", 2**31), "dimensions"),
        (struct.pack("<IQQ", 2, 0, 96), r"has shape [96, 0]"),
        (struct.pack("<IQQ", 2, 2**62, 96), "is truncated: tensor blk.1.ffn_up.weight ends at"),
        (struct.pack("<IQQ", 2, 2**63, 2**63), "is truncated"),
        (struct.pack("<IQQIQ", 2, 64, 96, 0, 2**63), "is truncated"),
        (struct.pack("<IQQI", 2, 33, 96, 8), "of Q8_0 has shape [96, 33]"),
        (struct.pack("<IQQI", 2, 64, 96, 12), "is stored as Q4_K, readable are F32, F16, Q4_0"),
        (struct.pack("<IQQI", 2, 64, 96, 77), "is stored as type 77"),
        (struct.pack("<IQQ", 2, 96, 64), "has shape [64, 96]"),
    ):
        patch(path, info, change)
        assert words in refusal(path)
        path.write_bytes(original)


def test_a_tensor_lies_where_the_one_before_ends(path):
    """One flipped bit of an offset would have it read the numbers of another tensor."""
    with open(path, "rb") as file:
        first, second, *_ = gguf_header.read_header(path, file).tensors.values()
    name = b"blk.0.attn_norm.weight"
    begin = offset_of(path, name) + len(name) + 4 + 8 + 4  # behind dimensions, one size, type
    assert struct.unpack_from("<Q", path.read_bytes(), begin)[0] == second.offset - first.offset
    for offset in (0, second.offset - first.offset + 32):
        patch(path, begin, struct.pack("<Q", offset))
        assert "tensor blk.0.attn_norm.weight does not begin where the one before ends" in refusal(
            path)


def test_names_that_are_there_twice_or_no_text(path):
    original = path.read_bytes()
    patch(path, offset_of(path, b"blk.1.attn_norm.weight"), b"blk.0.attn_norm.weight")
    assert "tensor blk.0.attn_norm.weight is there twice" in refusal(path)
    path.write_bytes(original)
    patch(path, offset_of(path, b"tokenizer.ggml.model"), b"llama.context_length")
    assert "llama.context_length is there twice" in refusal(path)
    path.write_bytes(original)
    patch(path, offset_of(path, b"llama.block_count"), b"llama.vocab_sizeX")
    assert "llama.block_count is missing" in refusal(path)
    path.write_bytes(original)
    patch(path, offset_of(path, b"tokenizer.ggml.pre"), b"tokenizer.ggml.\xff\xfe\xfd")
    assert "a string is not UTF-8" in refusal(path)
    path.write_bytes(original)
    patch(path, offset_of(path, b"blk.1.attn_norm.weight"), b"blk.1\nattn")
    assert r"a key or tensor is named 'blk.1\nattn_norm.weight'" in refusal(path)
    path.write_bytes(original)
    key = b"tokenizer.ggml.model"
    patch(path, offset_of(path, key) + len(key), struct.pack("<I", 99))
    assert "tokenizer.ggml.model has the unknown type 99" in refusal(path)
    path.write_bytes(original)
    patch(path, offset_of(path, b"blk.1.attn_norm.weight"), b"blk.01.attn_nor.weight")
    assert "unknown tensor blk.01.attn_nor.weight" in refusal(path) or "lacks" in refusal(path)


def test_two_names_of_one_tensor(tmp_path):
    x = np.ones(64, np.float32)
    write_gguf(tmp_path / "m.gguf", LLAMA, extra={"blk.01.attn_norm.weight": x})
    assert "holds the tensor model.layers.1.input_layernorm.weight twice" in refusal(
        tmp_path / "m.gguf")


def test_alignments(tmp_path):
    path = tmp_path / "m.gguf"
    write_gguf(path, LLAMA, tokenizer={"general.alignment": 32})
    Engine.load(path)
    for bad in (0, 33):
        at = offset_of(path, b"general.alignment") + len("general.alignment") + 4
        patch(path, at, struct.pack("<I", bad))
        assert f"general.alignment is {bad}, not a power of two" in refusal(path)


def test_a_head_that_lies_takes_no_memory(tmp_path):
    lying = dict.fromkeys(
        ("attention__key_length", "attention__value_length", "rope__dimension_count"), 2**32 - 2)
    write_gguf(tmp_path / "m.gguf", LLAMA, extra={"rope_freqs.weight": np.ones(8, np.float32)},
               **lying)
    assert "rope_freqs.weight scales RoPE in a way that is not known" in refusal(
        tmp_path / "m.gguf")


@pytest.mark.parametrize(("metadata", "words"), [
    ({"attention__head_count": 0}, "llama.attention.head_count must be a positive integer"),
    ({"attention__head_count": [4, 4]}, "llama.attention.head_count must be a positive integer"),
    ({"attention__head_count": 3}, "3 is not a multiple of num_key_value_heads 2"),
    ({"attention__key_length": 24}, "attention.value_length is 16, not the head's 24"),
    ({"attention__key_length": 24, "attention__value_length": 24}, "dimension_count is 16, not"),
    ({"attention__layer_norm_rms_epsilon": None}, "layer_norm_rms_epsilon must be a positive"),
    ({"attention__layer_norm_rms_epsilon": float("nan")}, "must be a positive number"),
    ({"rope__freq_base": -1.0}, "rope.freq_base must be a positive number"),
    ({"rope__freq_base": 1.0, "rope__scaling__type": "yarn", "rope__scaling__factor": 2.0},
     "rope_theta must be above 1 where RoPE is scaled"),
    ({"context_length": None}, "llama.context_length is missing"),
    ({"block_count": 2**31}, "too few"),
    ({"block_count": 3}, "lacks tensor model.layers.2."),
    ({"block_count": 1}, "holds the unknown tensor model.layers.1."),
    ({"embedding_length": 128}, "has shape"),
    ({"vocab_size": 200}, "token ids up to 265, the model knows 200"),
    ({"vocab_size": 301}, "has shape"),
    ({"expert_count": 8}, "llama.expert_count is 8"),
    ({"rope__scaling__type": "longrope", "rope__scaling__factor": 4.0}, "'longrope'"),
    ({"rope__scaling__type": "yarn"}, "lacks factor"),
    ({"rope__scaling__attn_factor": 0.5}, "rope.scaling.attn_factor is 0.5"),
    ({"rope__scaling__surprise": 1}, "rope.scaling.surprise is 1"),
])
def test_metadata_that_lies(tmp_path, metadata, words):
    write_gguf(tmp_path / "m.gguf", LLAMA, **metadata)
    assert words in refusal(tmp_path / "m.gguf")


def test_other_architectures_are_refused_by_name(path):
    patch(path, offset_of(path, b"llama"), b"gemma")  # the value of general.architecture
    assert "architecture 'gemma' is not supported: choose a model of llama" in refusal(path)


@pytest.mark.parametrize("config", [CONFIG, LLAMA, MOE], ids=["qwen3", "llama", "qwen3_moe"])
def test_missing_and_unknown_tensors(tmp_path, config):
    tensors = tensors_of(config)
    path = tmp_path / "m.gguf"
    del tensors["model.norm.weight"]
    write_gguf(path, config, tensors)
    assert "lacks tensor model.norm.weight" in refusal(path)
    write_gguf(path, config, extra={"blk.0.attn_q.bias": np.zeros(64, np.float32)})
    assert "holds the unknown tensor blk.0.attn_q.bias" in refusal(path)


def test_experts_of_a_wrong_number(tmp_path):
    write_gguf(tmp_path / "m.gguf", MOE, expert_count=3)
    assert "tensor" in refusal(tmp_path / "m.gguf")
    write_gguf(tmp_path / "m.gguf", MOE, expert_used_count=5)
    assert "num_experts_per_tok 5 is more than num_experts 4" in refusal(tmp_path / "m.gguf")


@pytest.mark.parametrize("kind", ["F32", "F16", "BF16", "Q8_0", "Q4_0", "Q4_1"])
def test_numbers_that_are_not_finite(tmp_path, monkeypatch, kind):
    """NaN in a tensor, or as the scale of a block, however the weights are loaded."""
    monkeypatch.setenv("COURSE_CACHE", "off")
    path = tmp_path / "m.gguf"
    write_gguf(path, LLAMA, kind=kind)
    name = "blk.1.ffn_up.weight"
    reader = gguf.GGUFReader(path)
    tensor = next(tensor for tensor in reader.tensors if tensor.name == name)
    for bad in (np.nan, -np.inf):
        data = {"F32": np.float32([bad]).tobytes(),
                "BF16": np.float32([bad]).tobytes()[2:]}.get(kind, np.float16([bad]).tobytes())
        patch(path, int(tensor.data_offset) + tensor.n_bytes // 2, data)
        for weights in ("f32", "q8_0", "q4_0"):
            with pytest.raises(CourseError, match="layers.1.mlp.up_proj.weight holds NaN"):
                Engine.load(path, weights=weights)


@pytest.mark.parametrize(("changes", "words"), [
    ({"tokenizer.ggml.model": "llama"}, "of the kind 'llama', only 'gpt2'"),
    ({"tokenizer.ggml.model": None}, "of the kind None"),
    ({"tokenizer.ggml.pre": "deepseek-llm"}, "cuts text as 'deepseek-llm', known are gpt-2"),
    ({"tokenizer.ggml.pre": 7}, "cuts text as 7"),
    ({"tokenizer.ggml.tokens": None}, "tokenizer.ggml.tokens is missing"),
    ({"tokenizer.ggml.merges": None}, "tokenizer.ggml.merges is missing"),
    ({"tokenizer.ggml.merges": ["no-such pair"]}, "not a usable tokenizer"),
    ({"tokenizer.ggml.merges": ["h"]}, "not a usable tokenizer"),
    ({"tokenizer.ggml.tokens": ["a", "a", "b"]}, "does not fit 3 tokens"),
    ({"tokenizer.ggml.tokens": ["a", "a"], "tokenizer.ggml.token_type": [1, 1]}, "a token twice"),
    ({"tokenizer.ggml.tokens": ["a", "b"], "tokenizer.ggml.token_type": [1, 1],
      "tokenizer.ggml.merges": ["a b"]}, "not a usable tokenizer"),
    ({"tokenizer.ggml.tokens": ["a", "b"], "tokenizer.ggml.token_type": [1, 1],
      "tokenizer.ggml.merges": None}, "missing"),
    ({"tokenizer.ggml.token_type": [1] * 3}, "does not fit"),
    ({"tokenizer.ggml.token_type": "x"}, "does not fit"),
    ({"tokenizer.ggml.eos_token_id": 5000}, "eos_token_id 5000 is outside the vocabulary of 300"),
    ({"tokenizer.ggml.eos_token_id": "end"}, "must be a token id, got 'end'"),
    ({"tokenizer.chat_template": "{% if %}"}, "the chat template is not valid"),
    ({"tokenizer.chat_template": 5}, "the chat template is not valid"),
])
def test_tokenizers(tmp_path, changes, words):
    write_gguf(tmp_path / "m.gguf", LLAMA, tokenizer=changes)
    assert words in refusal(tmp_path / "m.gguf")


def test_a_split_model_is_told_apart_from_a_damaged_one(tmp_path):
    write_gguf(tmp_path / "m.gguf", LLAMA, tokenizer={"split.count": 3, "split.no": 0})
    assert "is one of 3 parts" in refusal(tmp_path / "m.gguf")


def test_which_file_of_a_folder(tmp_path):
    write_gguf(tmp_path / "one.gguf", LLAMA)
    assert open_checkpoint(tmp_path).source.path.name == "one.gguf"
    write_gguf(tmp_path / "two.gguf", LLAMA)
    with pytest.raises(CourseError, match=r"several models \(one.gguf, two.gguf\): give one"):
        open_checkpoint(tmp_path)
    assert open_checkpoint(tmp_path / "two.gguf").source.path.name == "two.gguf"
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(CourseError, match="config.json: model_type"):
        open_checkpoint(tmp_path)
