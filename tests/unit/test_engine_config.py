"""config.json: what is read, what is refused, and that each refusal names file and remedy."""

import errno
import json
import os
from dataclasses import replace
from pathlib import Path
from stat import S_ISDIR, S_ISREG
from types import MappingProxyType

import pytest

from course_lib.engine import Engine, ModelConfig, files
from course_lib.engine.config import MoEConfig
from course_lib.engine.families import FAMILIES
from course_lib.errors import CourseError
from tests.tiny_checkpoint import BASE_CONFIG, write_checkpoint


def config_of(folder, changes, drop=()):
    return read(folder, without(BASE_CONFIG | changes, *drop))


def read(folder, raw):
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


def without(raw, *keys):
    return {key: value for key, value in raw.items() if key not in keys}


LEFT_OUT = ("head_dim", "rms_norm_eps", "rope_theta", "max_position_embeddings", "eos_token_id",
            "tie_word_embeddings", "num_key_value_heads", "hidden_act")
MOE = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}


def of_family(model_type, changes=MappingProxyType({}), drop=()):
    """A config.json of a family, nested where that family nests it."""
    raw = BASE_CONFIG | {"num_attention_heads": 64, "hidden_size": 128}
    if "moe" in model_type:
        raw = raw | MOE
    raw = without(raw | dict(changes), "architectures", "model_type", *drop)
    if "_vl" not in model_type:
        return raw | {"model_type": model_type}
    raw["model_type"] = model_type + "_text"
    return {"model_type": model_type, "vision_config": {"depth": 2}, "text_config": raw}


@pytest.mark.parametrize(
    ("model_type", "head_dim", "kv_heads", "theta", "context", "eos"),
    [
        ("qwen3", 128, 32, 1e4, 32_768, ()),
        ("qwen3_moe", 2, 4, 1e4, 32_768, ()),
        ("qwen3_vl", 128, 32, 5e5, 128_000, ()),
        ("qwen3_vl_moe", 2, 16, 5e5, 128_000, ()),
        ("llama", 2, 64, 1e4, 2048, (2,)),
    ],
)
def test_defaults_of_transformers(tmp_path, model_type, head_dim, kv_heads, theta, context, eos):
    config = read(tmp_path, of_family(model_type, drop=LEFT_OUT))
    assert (config.head_dim, config.num_key_value_heads) == (head_dim, kv_heads)
    assert (config.rope_theta, config.max_position_embeddings) == (theta, context)
    assert (config.eos_token_ids, config.rms_norm_eps) == (eos, 1e-6)
    assert (config.tie_word_embeddings, config.rope) == (False, None)
    assert (config.family, config.qk_norm) == (model_type, model_type != "llama")
    assert (config.moe is not None) == ("moe" in model_type)
    null = dict.fromkeys(LEFT_OUT)
    assert read(tmp_path, of_family(model_type, null)) == replace(config, num_key_value_heads=64)


def test_experts(tmp_path):
    config = read(tmp_path, of_family("qwen3_moe", {"norm_topk_prob": True}))
    assert config.moe == MoEConfig(4, 2, 16, True) and config.dense_layers == frozenset()
    all_of_them = {"num_experts_per_tok": 4}
    assert read(tmp_path, of_family("qwen3_moe", all_of_them)).moe.experts_per_token == 4
    raw = of_family("qwen3_moe", {"num_local_experts": 3}, drop=("num_experts",))
    assert read(tmp_path, raw).moe == MoEConfig(3, 2, 16, False)
    raw = of_family("qwen3_moe", drop=("num_experts_per_tok",))
    with pytest.raises(CourseError, match="num_experts_per_tok 8 is more than num_experts 4"):
        read(tmp_path, raw)
    for model_type, chosen in [("qwen3_moe", 8), ("qwen3_vl_moe", 4)]:
        raw = of_family(model_type, {"num_experts": 8}, drop=("num_experts_per_tok",))
        assert read(tmp_path, raw).moe.experts_per_token == chosen
    assert read(tmp_path, of_family("qwen3_vl_moe")).moe.norm_topk_prob
    with pytest.raises(CourseError, match="text_config.norm_topk_prob must be true"):
        read(tmp_path, of_family("qwen3_vl_moe", {"norm_topk_prob": False}))
    assert read(tmp_path, of_family("qwen3", MOE)).moe is None


@pytest.mark.parametrize(
    ("step", "only", "dense"),
    [(1, [], ()), (1, None, ()), (1, [2, 9], (2,)), (2, [], (0, 2, 4)), (2, [1], (0, 1, 2, 4)),
     (3, None, (0, 1, 3, 4)), (7, [], (0, 1, 2, 3, 4))],
)
def test_layers_without_experts(tmp_path, step, only, dense):
    changes = {"decoder_sparse_step": step, "mlp_only_layers": only, "num_hidden_layers": 5}
    config = read(tmp_path, of_family("qwen3_moe", changes))
    assert config.dense_layers == frozenset(dense)
    assert [config.moe_of(layer) is None for layer in range(5)] == [
        layer in dense for layer in range(5)]


def test_text_of_a_vision_model(tmp_path):
    """Whether it is tied the whole model says first, where it ends the text does."""
    raw = of_family("qwen3_vl", {"eos_token_id": 5, "tie_word_embeddings": True})
    assert read(tmp_path, raw).tie_word_embeddings
    assert not read(tmp_path, raw | {"tie_word_embeddings": False}).tie_word_embeddings
    assert read(tmp_path, raw | {"eos_token_id": 7}).eos_token_ids == (5,)
    raw["text_config"]["eos_token_id"] = None
    assert read(tmp_path, raw | {"eos_token_id": 7}).eos_token_ids == (7,)
    mrope = {"rope_type": "default", "mrope_section": [24, 20, 20], "mrope_interleaved": True}
    raw["text_config"] |= {"rope_scaling": mrope, "rope_theta": 5_000_000}
    config = read(tmp_path, raw)
    assert (config.rope, config.rope_theta) == (None, 5e6)
    del raw["text_config"]["model_type"]
    assert read(tmp_path, raw) == config


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"text_config": None}, ["text_config must be an object, got None"]),
        ({"text_config": {"model_type": "qwen3"}}, ["text_config.model_type is 'qwen3'"]),
        ({"text_config": {"hidden_size": 0}}, ["text_config."]),
        ({"text_config": {"attention_bias": True}}, ["text_config.attention_bias = True"]),
        ({"quantization_config": {}}, ["quantization_config = {}"]),
        ({"architectures": ["Qwen3VLVisionModel"]}, ["architectures = ['Qwen3VLVisionModel']"]),
        ({"tie_word_embeddings": 1}, ["tie_word_embeddings must be true or false"]),
    ],
)
def test_refusals_of_a_vision_model(tmp_path, change, words):
    with pytest.raises(CourseError) as error:
        read(tmp_path, of_family("qwen3_vl") | change)
    for word in [str(tmp_path / "config.json"), *words]:
        assert word in str(error.value)


# What these checkpoints' config.json say that bears on the model, and a little that does not.
QWEN3_0_6B = {
    "architectures": ["Qwen3ForCausalLM"], "attention_bias": False, "attention_dropout": 0.0,
    "bos_token_id": 151643, "eos_token_id": 151645, "head_dim": 128, "hidden_act": "silu",
    "hidden_size": 1024, "intermediate_size": 3072, "max_position_embeddings": 40960,
    "max_window_layers": 28, "model_type": "qwen3", "num_attention_heads": 16,
    "num_hidden_layers": 28, "num_key_value_heads": 8, "rms_norm_eps": 1e-06, "rope_scaling": None,
    "rope_theta": 1000000, "sliding_window": None, "tie_word_embeddings": True,
    "torch_dtype": "bfloat16", "use_sliding_window": False, "vocab_size": 151936,
}
QWEN3_30B_A3B = QWEN3_0_6B | {
    "architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "decoder_sparse_step": 1,
    "hidden_size": 2048, "intermediate_size": 6144, "mlp_only_layers": [], "num_experts": 128,
    "moe_intermediate_size": 768, "norm_topk_prob": True, "num_attention_heads": 32,
    "num_experts_per_tok": 8, "num_hidden_layers": 48, "num_key_value_heads": 4,
    "output_router_logits": False, "router_aux_loss_coef": 0.001, "tie_word_embeddings": False,
}
QWEN3_VL_2B = {
    "architectures": ["Qwen3VLForConditionalGeneration"], "image_token_id": 151655,
    "model_type": "qwen3_vl", "tie_word_embeddings": True,
    "text_config": without(QWEN3_0_6B, "architectures") | {
        "model_type": "qwen3_vl_text", "hidden_size": 2048, "intermediate_size": 6144,
        "max_position_embeddings": 262144, "rope_theta": 5000000, "rope_scaling": {
            "mrope_interleaved": True, "mrope_section": [24, 20, 20], "rope_type": "default"}},
    "vision_config": {"depth": 24, "model_type": "qwen3_vl", "hidden_act": "gelu_pytorch_tanh"},
    "vision_start_token_id": 151652,
}
LLAMA_3_2_1B = {
    "architectures": ["LlamaForCausalLM"], "attention_bias": False, "bos_token_id": 128000,
    "eos_token_id": [128001, 128008, 128009], "head_dim": 64, "hidden_act": "silu",
    "hidden_size": 2048, "intermediate_size": 8192, "max_position_embeddings": 131072,
    "mlp_bias": False, "model_type": "llama", "num_attention_heads": 32, "num_hidden_layers": 16,
    "num_key_value_heads": 8, "pretraining_tp": 1, "rms_norm_eps": 1e-05, "rope_scaling": {
        "factor": 32.0, "high_freq_factor": 4.0, "low_freq_factor": 1.0,
        "original_max_position_embeddings": 8192, "rope_type": "llama3"},
    "rope_theta": 500000.0, "tie_word_embeddings": True, "vocab_size": 128256,
}
SMOLLM2_135M = {
    "architectures": ["LlamaForCausalLM"], "bos_token_id": 1, "eos_token_id": 2,
    "hidden_act": "silu", "hidden_size": 576, "intermediate_size": 1536, "is_llama_config": True,
    "max_position_embeddings": 8192, "model_type": "llama", "num_attention_heads": 9,
    "num_hidden_layers": 30, "num_key_value_heads": 3, "rms_norm_eps": 1e-05,
    "rope_interleaved": False, "rope_scaling": None, "rope_theta": 100000, "vocab_size": 49152,
    "tie_word_embeddings": True,
}


@pytest.mark.parametrize(
    ("raw", "head_dim", "theta", "context", "scaling", "experts", "tied"),
    [
        (QWEN3_0_6B, 128, 1e6, 40_960, None, None, True),
        (QWEN3_0_6B | {"rope_scaling": {"rope_type": "yarn", "factor": 4.0,
                                        "original_max_position_embeddings": 32768}},
         128, 1e6, 40_960, "yarn", None, True),
        (QWEN3_30B_A3B, 128, 1e6, 40_960, None, 128, False),
        (QWEN3_VL_2B, 128, 5e6, 262_144, None, None, True),
        (LLAMA_3_2_1B, 64, 5e5, 131_072, "llama3", None, True),
        (SMOLLM2_135M, 64, 1e5, 8192, None, None, True),
    ],
)
def test_published_checkpoints(tmp_path, raw, head_dim, theta, context, scaling, experts, tied):
    config = read(tmp_path, raw)
    assert (config.head_dim, config.rope_theta) == (head_dim, theta)
    assert (config.max_position_embeddings, config.tie_word_embeddings) == (context, tied)
    assert (config.rope and config.rope.kind, config.moe and config.moe.num_experts) == (
        scaling, experts)
    text = raw.get("text_config", raw)
    assert config.hidden_size == text["hidden_size"] and config.vocab_size == text["vocab_size"]
    assert config.num_key_value_heads == text["num_key_value_heads"]


def test_a_window_that_is_not_used_is_ignored(tmp_path):
    config = config_of(tmp_path, {})
    assert config_of(tmp_path, {"use_sliding_window": False, "sliding_window": 8}) == config
    assert config_of(tmp_path, {"use_sliding_window": True, "sliding_window": None}) == config
    with pytest.raises(CourseError, match="use_sliding_window = True"):
        config_of(tmp_path, {"use_sliding_window": True, "sliding_window": 8})


def test_scaled_rope(tmp_path):
    """In both styles; `rope_scaling` is preferred, as transformers does."""
    yarn = {"rope_type": "yarn", "factor": 4.0}
    config = config_of(tmp_path, {"rope_scaling": yarn})
    assert (config.rope.kind, config.rope.factor) == ("yarn", 4.0)
    assert config.rope.original_max_position_embeddings == config.max_position_embeddings == 512
    linear = {"rope_type": "linear", "factor": 2.0, "rope_theta": 7.0}
    both = config_of(tmp_path, {"rope_scaling": yarn, "rope_parameters": linear})
    assert (both.rope, both.rope_theta) == (config.rope, 1e4)
    null = {"rope_type": None, "type": "linear", "factor": 2.0, "rope_theta": None}
    old = config_of(tmp_path, {"rope_scaling": null})
    assert (old.rope.kind, old.rope_theta) == ("linear", 1e4)
    both = config_of(tmp_path, {"rope_scaling": {}, "rope_parameters": linear})
    assert (both.rope.kind, both.rope_theta) == ("linear", 7.0)


@pytest.mark.parametrize(
    ("model_type", "nearest"),
    [("qwen2", "qwen3"), ("qwen3_next", "qwen3"), ("qwen3_vl_text", "qwen3_vl"),
     ("qwen2_5_vl", "qwen3_vl"), ("qwen2_moe", "qwen3_moe"), ("mistral", "llama"),
     ("llama4", "llama"), ("mixtral", "qwen3_moe"), ("smollm3", "llama")],
)
def test_other_model_types_are_told_the_nearest(tmp_path, model_type, nearest):
    with pytest.raises(CourseError) as error:
        config_of(tmp_path, {"model_type": model_type})
    assert f"model_type '{model_type}' is not supported: choose a checkpoint" in str(error.value)
    assert f"model_type is '{nearest}' (the nearest to it), " in str(error.value)
    for name in FAMILIES:
        assert str(error.value).count(f"'{name}'") == 1


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
        ({"model_type": None}, ["model_type None", "'qwen3', 'qwen3_moe'", " or 'llama'"]),
        ({"model_type": ["qwen3"]}, ["model_type ['qwen3']"]),
        ({"model_type": "x\n" * 9999}, ["model_type 'x\\nx"]),
        ({"rope_scaling": {"rope_type": "longrope", "factor": 4.0}}, ["'longrope'"]),
        ({"rope_scaling": {"type": "dynamic", "factor": 2.0}}, ["'dynamic'"]),
        ({"rope_parameters": {"rope_type": "yarn", "factor": 4, "rope_theta": 1.0}},
         ["rope_theta must be above 1"]),
        ({"rope_parameters": "yarn"}, ["rope_parameters", "object"]),
        ({"rope_scaling": [1]}, ["rope_scaling", "object", "[1]"]),
        ({"rope_parameters": {"full_attention": {}}}, ["rope_parameters.full_attention"]),
        ({"rope_parameters": {"partial_rotary_factor": 0.5}}, ["partial_rotary_factor 0.5"]),
        ({"partial_rotary_factor": 0.5}, ["partial_rotary_factor = 0.5"]),
        ({"model_type": "llama", "mlp_bias": True}, ["mlp_bias = True"]),
        ({"architectures": ["Qwen3ForSequenceClassification"]}, ["architectures"]),
        ({"architectures": "Qwen3ForCausalLM"}, ["architectures"]),
        ({"per_layer_config": {"1": {}}}, ["per_layer_config"]),
        ({"model_type": "llama", "head_dim": None, "hidden_size": 26},
         ["hidden_size 26 is not a multiple of num_attention_heads 4"]),
        ({"model_type": "qwen3_moe"}, ["num_experts is missing"]),
        ({"model_type": "qwen3_moe", **MOE, "mlp_only_layers": ["1"]}, ["mlp_only_layers must"]),
        ({"model_type": "qwen3_moe", **MOE, "decoder_sparse_step": 0}, ["decoder_sparse_step"]),
        ({"model_type": "qwen3_moe", **MOE, "num_experts": 1}, ["num_experts 1"]),
        ({"model_type": "qwen3_moe", **MOE, "decoder_sparse_step": 2,
          "num_hidden_layers": 10**12}, ["num_hidden_layers 1000000000000 is more than"]),
        ({"hidden_act": "gelu"}, ["hidden_act", "'gelu'"]),
        ({"attention_bias": True}, ["attention_bias"]),
        ({"use_sliding_window": True}, ["use_sliding_window"]),
        ({"layer_types": ["full_attention", "sliding_attention"]}, ["layer_types"]),
        ({"layer_types": 5}, ["layer_types = 5"]),
        ({"layer_types": [[1]]}, ["layer_types = [[1]]"]),
        ({"layer_types": [{}]}, ["layer_types = [{}]"]),
        ({"layer_types": "full_attention"}, ["layer_types"]),
        ({"quantization_config": {"bits": 4}}, ["quantization_config"]),
        ({"quantization_config": {"x": "y" * 999}}, ["quantization_config = {'x': 'yyy", "..."]),
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
        ({"rope_theta": 0.5}, ["rope_theta 0.5 is below 1"]),
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
    assert "\n" not in message and ": " in message and len(message) < 500 + len(str(tmp_path))
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
    ("holds", "words"),
    [
        ([], "give the folder that holds config.json, the safetensors files and tokenizer.json, "
             "or a .gguf file$"),
        (["notes.txt"], "give the folder that holds"),
        (["snapshots/1f/config.json", "refs/main"], "give .*snapshots/1f, which has one$"),
        (["Qwen3-0.6B/config.json"], "give .*Qwen3-0.6B, which has one$"),
        (["adapter_config.json"], "this is an adapter: merge it"),
    ],
)
def test_a_folder_that_is_no_model(tmp_path, holds, words):
    for name in holds:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    with pytest.raises(CourseError, match=f"config.json is missing: {words}"):
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


@pytest.mark.parametrize(
    "name",
    ["config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json",
     "chat_template.jinja", "model.safetensors"],
)
def test_a_link_to_nothing_is_no_absent_file(tmp_path, name):
    """A download's cache whose blobs are gone would else lose end tokens or template silently."""
    write_checkpoint(tmp_path)
    (tmp_path / name).unlink(missing_ok=True)
    (tmp_path / name).symlink_to("blobs/0")
    with pytest.raises(CourseError, match=f"{name} is missing: copy the"):
        Engine.load(tmp_path)


def test_a_config_larger_than_any(tmp_path, monkeypatch):
    monkeypatch.setattr(files, "LARGEST", 1 << 20)
    (tmp_path / "config.json").write_bytes(b" " * ((1 << 20) + 1))
    with pytest.raises(CourseError, match="config.json is larger than 1 MiB, which no such file"):
        ModelConfig.from_folder(tmp_path)
    (tmp_path / "config.json").write_bytes(b" " * (1 << 20))
    with pytest.raises(CourseError, match="not valid JSON"):
        ModelConfig.from_folder(tmp_path)


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
