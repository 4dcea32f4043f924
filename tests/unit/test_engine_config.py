"""config.json: what is read, what is refused, and that each refusal names file and remedy."""

import errno
import json
import os
from pathlib import Path
from stat import S_ISDIR, S_ISREG

import pytest

from course_lib.engine import Engine, ModelConfig
from course_lib.errors import CourseError
from tests.tiny_checkpoint import BASE_CONFIG, write_checkpoint


def config_of(folder, changes, drop=()):
    raw = {key: value for key, value in (BASE_CONFIG | changes).items() if key not in drop}
    (folder / "config.json").write_text(json.dumps(raw))
    return ModelConfig.from_folder(folder)


def test_reads_every_field(tmp_path):
    config = config_of(tmp_path, {"eos_token_id": [2, 0], "tie_word_embeddings": False})
    assert config == ModelConfig(
        vocab_size=300,
        hidden_size=24,
        intermediate_size=40,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        max_position_embeddings=512,
        rms_norm_eps=1e-6,
        rope_theta=10000.0,
        tie_word_embeddings=False,
        eos_token_ids=(2, 0),
    )


@pytest.mark.parametrize(
    ("changes", "drop", "theta"),
    [
        ({"rope_theta": 1e6}, (), 1e6),
        ({"rope_theta": 1e6, "rope_scaling": None}, (), 1e6),
        ({"rope_theta": 1e6, "rope_scaling": {"type": "default"}}, (), 1e6),
        ({"rope_parameters": {"rope_theta": 5e5, "rope_type": "default"}}, ("rope_theta",), 5e5),
        ({"rope_parameters": {"rope_theta": 500_000}, "rope_theta": 1e6}, (), 5e5),
        ({"rope_parameters": {"rope_type": "default"}, "rope_theta": 1e6}, (), 1e6),
        ({}, ("rope_theta",), 1e4),
    ],
)
def test_rope_theta_in_old_and_new_style(tmp_path, changes, drop, theta):
    assert config_of(tmp_path, changes, drop).rope_theta == theta


def test_defaults_of_transformers(tmp_path):
    drop = ("head_dim", "rms_norm_eps", "max_position_embeddings", "tie_word_embeddings")
    config = config_of(tmp_path, {}, (*drop, "eos_token_id", "num_key_value_heads"))
    assert (config.head_dim, config.rms_norm_eps) == (128, 1e-6)
    assert (config.max_position_embeddings, config.tie_word_embeddings) == (32768, False)
    assert (config.eos_token_ids, config.num_key_value_heads) == ((), 4)


@pytest.mark.parametrize(
    ("generation", "eos"),
    [({"eos_token_id": [5, 7]}, (5, 7)), ({"eos_token_id": 9}, (9,)), ({"top_k": 1}, (2,))],
)
def test_generation_config_names_the_end_tokens(tmp_path, generation, eos):
    (tmp_path / "generation_config.json").write_text(json.dumps(generation))
    assert config_of(tmp_path, {}).eos_token_ids == eos


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"model_type": "llama"}, ["model_type 'llama'", "qwen3"]),
        ({"model_type": None}, ["model_type None"]),
        ({"model_type": "qwen3_moe"}, ["qwen3_moe"]),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, ["rope_scaling", "'yarn'"]),
        ({"rope_scaling": {"type": "linear", "factor": 2.0}}, ["'linear'"]),
        ({"rope_parameters": {"rope_type": "llama3", "rope_theta": 1.0}}, ["'llama3'"]),
        ({"rope_parameters": "yarn"}, ["rope_parameters", "object"]),
        ({"hidden_act": "gelu"}, ["hidden_act", "'gelu'"]),
        ({"attention_bias": True}, ["attention_bias"]),
        ({"use_sliding_window": True}, ["use_sliding_window"]),
        ({"layer_types": ["full_attention", "sliding_attention"]}, ["layer_types"]),
        ({"layer_types": 5}, ["layer_types = 5"]),
        ({"layer_types": [[1]]}, ["layer_types = [[1]]"]),
        ({"layer_types": [{}]}, ["layer_types = [{}]"]),
        ({"layer_types": "full_attention"}, ["layer_types"]),
        ({"quantization_config": {"bits": 4}}, ["quantization_config"]),
        ({"hidden_size": "24"}, ["hidden_size", "'24'"]),
        ({"hidden_size": 0}, ["hidden_size", "0"]),
        ({"vocab_size": True}, ["vocab_size"]),
        ({"num_attention_heads": None}, ["num_attention_heads is missing"]),
        ({"num_key_value_heads": 3}, ["num_attention_heads 4", "num_key_value_heads 3"]),
        ({"head_dim": 7}, ["head_dim 7"]),
        ({"rms_norm_eps": 0}, ["rms_norm_eps"]),
        ({"rope_theta": "1e6"}, ["rope_theta"]),
        ({"rope_theta": float("inf")}, ["rope_theta"]),
        ({"rope_theta": float("nan")}, ["rope_theta"]),
        ({"rope_theta": True}, ["rope_theta"]),
        ({"rope_theta": 10**400}, ["rope_theta", "range of float32"]),
        ({"rope_theta": 1e300}, ["rope_theta", "range of float32", "1e+300"]),
        ({"rope_theta": 1e-50}, ["rope_theta", "range of float32"]),
        ({"rope_parameters": {"rope_theta": 1e39}}, ["rope_theta", "1e+39"]),
        ({"rms_norm_eps": 10**400}, ["rms_norm_eps", "range of float32"]),
        ({"rms_norm_eps": 1e300}, ["rms_norm_eps", "range of float32"]),
        ({"rms_norm_eps": 1e-50}, ["rms_norm_eps", "1e-50"]),
        ({"tie_word_embeddings": "yes"}, ["tie_word_embeddings"]),
        ({"eos_token_id": "x"}, ["eos_token_id"]),
        ({"eos_token_id": [1, True]}, ["eos_token_id"]),
        ({"eos_token_id": 300}, ["eos_token_id 300", "300"]),
        ({"eos_token_id": -1}, ["eos_token_id -1"]),
    ],
)
def test_refusals_name_file_key_and_remedy(tmp_path, changes, words):
    with pytest.raises(CourseError) as error:
        config_of(tmp_path, changes)
    message = str(error.value)
    assert "\n" not in message and ": " in message
    for word in [str(tmp_path / "config.json"), *words]:
        assert word in message


def test_absent_and_broken_config_files(tmp_path):
    with pytest.raises(CourseError, match="does not exist.*config.json"):
        Engine.load(tmp_path / "nowhere")
    write_checkpoint(tmp_path)
    with pytest.raises(CourseError, match="is a file, not a folder"):
        Engine.load(tmp_path / "config.json")
    for text, words in [
        ("{", "not valid JSON"),
        ("[]", "JSON list, not an object"),
        ("[" * 100_000, "not valid JSON"),
        ('{"model_type": "qwen3", "vocab_size": ' + "9" * 5000 + "}", "config.json"),
    ]:
        (tmp_path / "config.json").write_text(text)
        with pytest.raises(CourseError, match=words):
            Engine.load(tmp_path)
    (tmp_path / "config.json").write_bytes(b"\xff\xfe{")
    with pytest.raises(CourseError, match="config.json is not UTF-8"):
        Engine.load(tmp_path)
    (tmp_path / "config.json").unlink()
    with pytest.raises(CourseError, match="config.json is missing"):
        Engine.load(tmp_path)
    (tmp_path / "config.json").mkdir()
    with pytest.raises(CourseError, match="config.json cannot be read"):
        Engine.load(tmp_path)


@pytest.mark.parametrize(
    "name",
    ["config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json",
     "chat_template.jinja"],
)
def test_a_named_pipe_is_not_waited_for(tmp_path, name):
    write_checkpoint(tmp_path)
    (tmp_path / name).unlink(missing_ok=True)
    os.mkfifo(tmp_path / name)
    with pytest.raises(CourseError, match=f"{name} cannot be read .it is not a regular file"):
        Engine.load(tmp_path)


def test_the_home_folder_of_nobody(tmp_path):
    with pytest.raises(CourseError, match="^~no-such-user/x names the home folder.*give the"):
        Engine.load("~no-such-user/x")


@pytest.mark.parametrize("name", ["", "config.json", "generation_config.json", "tokenizer.json",
                                  "chat_template.jinja", "model.safetensors"])
def test_what_may_not_be_looked_at_is_named(tmp_path, monkeypatch, name):
    write_checkpoint(tmp_path)
    real = Path.stat

    def stat(self, **options):
        if self == tmp_path / name:
            raise PermissionError(errno.EACCES, "Permission denied")
        return real(self, **options)

    for method in ("exists", "is_file", "is_dir"):  # newer Pythons do not call Path.stat in them
        monkeypatch.setattr(Path, method, by_stat(method))
    monkeypatch.setattr(Path, "stat", stat)
    with pytest.raises(CourseError) as error:
        Engine.load(tmp_path)
    assert f"{tmp_path / name} cannot be " in str(error.value)
    assert "(Permission denied): " in str(error.value)


def by_stat(method):
    """Path.exists, is_file or is_dir as Python 3.10 has them: a refusal is an error."""
    kind = {"exists": lambda mode: True, "is_file": S_ISREG, "is_dir": S_ISDIR}[method]

    def answer(self):
        try:
            return kind(self.stat().st_mode)
        except FileNotFoundError:
            return False

    return answer
