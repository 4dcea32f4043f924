"""Tensors' names of every family, brought to those of Qwen3 and Llama."""

import json
from dataclasses import replace

import numpy as np
import pytest
from safetensors.numpy import save_file

from course_lib.engine import Engine
from course_lib.engine.safetensors_source import SafetensorsSource
from course_lib.engine.tensor_names import Part, parts_of
from course_lib.engine.tensor_source import Stored
from course_lib.errors import CourseError
from tests.tiny_checkpoint import random_tensors, write_checkpoint


def names_of(**shapes):
    return parts_of({name: Stored("F32", shape) for name, shape in shapes.items()})


def test_plain_names_stay():
    shapes = {"model.norm.weight": (4,), "lm_head.weight": (9, 4), "model.visual.x": (1,)}
    assert names_of(**shapes) == {name: Part(name, shape) for name, shape in shapes.items()}


def test_a_language_model_beside_a_vision_tower():
    parts = names_of(**{
        "model.language_model.norm.weight": (4,),
        "model.language_model.layers.0.mlp.up_proj.weight": (5, 4),
        "model.visual.blocks.0.attn.qkv.weight": (3, 3),
        "lm_head.weight": (9, 4),
        "model.other": (2,),
    })
    assert parts == {
        "model.norm.weight": Part("model.language_model.norm.weight", (4,)),
        "model.layers.0.mlp.up_proj.weight":
            Part("model.language_model.layers.0.mlp.up_proj.weight", (5, 4)),
        "lm_head.weight": Part("lm_head.weight", (9, 4)),
        "model.other": Part("model.other", (2,)),
    }


def test_frequencies_that_old_checkpoints_hold_are_left_out():
    assert names_of(**{"model.layers.0.self_attn.rotary_emb.inv_freq": (4,)}) == {}


def test_two_of_one_name_are_refused(tmp_path):
    both = {"model.norm.weight": (4,), "model.language_model.norm.weight": (4,)}
    with pytest.raises(ValueError, match="same tensor"):
        names_of(**both)
    save_file({name: np.zeros(shape, np.float32) for name, shape in both.items()},
              tmp_path / "model.safetensors")
    with pytest.raises(CourseError, match="safetensors holds a tensor twice .model.*same tensor"):
        SafetensorsSource(tmp_path)


LAYER = "model.language_model.layers.3."
GATE_UP, DOWN = LAYER + "mlp.experts.gate_up_proj", LAYER + "mlp.experts.down_proj"
ROUTER = LAYER + "mlp.gate.weight"


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("inner", [3, 4, 8])
def test_all_experts_in_two_tensors(tmp_path, transposed, inner):
    """Which way round they lie is seen from the router's width, 8 here. With 4 one of the tensors
    is square, with 8 the other."""
    rng = np.random.default_rng(inner)
    gate_up = rng.standard_normal((4, 2 * inner, 8)).astype(np.float32)
    down = rng.standard_normal((4, 8, inner)).astype(np.float32)
    stored = {
        GATE_UP: np.ascontiguousarray(gate_up.transpose(0, 2, 1)) if transposed else gate_up,
        DOWN: np.ascontiguousarray(down.transpose(0, 2, 1)) if transposed else down,
        ROUTER: np.zeros((4, 8), np.float32),
    }
    save_file(stored, tmp_path / "model.safetensors")
    source = SafetensorsSource(tmp_path)
    assert len(source.stored) == 4 * 3 + 1
    for expert in range(4):
        prefix = f"model.layers.3.mlp.experts.{expert}."
        for name, matrix in [("gate_proj", gate_up[expert, :inner]),
                             ("up_proj", gate_up[expert, inner:]), ("down_proj", down[expert])]:
            full = f"{prefix}{name}.weight"
            assert source.stored[full] == Stored("F32", matrix.shape)
            got = source.read(full)
            np.testing.assert_array_equal(got, matrix)
            assert got.flags.c_contiguous
            np.testing.assert_array_equal(source.read_rows(full, 1, 3), matrix[1:3])


@pytest.mark.parametrize(
    ("gate_up", "down", "router"),
    [
        ((4, 6, 8), (4, 8, 3), None),
        ((4, 6, 8), None, (4, 8)),
        (None, (4, 8, 3), (4, 8)),
        ((4, 6, 8), (4, 8, 3), (32,)),
        ((4, 48), (4, 8, 3), (4, 8)),
        ((4, 6, 8), (4, 24), (4, 8)),
        ((4, 6, 7), (4, 8, 3), (4, 8)),
        ((4, 6, 8), (4, 7, 3), (4, 8)),
        ((4, 6, 8), (4, 3, 8), (4, 8)),  # one each way round
        ((4, 8, 6), (4, 8, 3), (4, 8)),
        ((4, 8, 6), (4, 3, 7), (4, 8)),
        ((4, 5, 8), (4, 8, 3), (4, 8)),
        ((3, 6, 8), (4, 8, 3), (4, 8)),
        ((4, 0, 8), (4, 8, 0), (4, 8)),
        ((4, 6, 0), (4, 0, 3), (4, 0)),
        ((0, 6, 8), (0, 8, 3), (4, 8)),
        ((10**9, 6, 8), (10**9, 8, 3), (4, 8)),
    ],
)
def test_experts_of_a_strange_shape_keep_their_name(gate_up, down, router):
    """So that they are reported as an unknown tensor."""
    shapes = {GATE_UP: gate_up, DOWN: down, ROUTER: router}
    shapes = {name: shape for name, shape in shapes.items() if shape is not None}
    assert names_of(**shapes) == {
        name.replace("language_model.", ""): Part(name, shape) for name, shape in shapes.items()}


MOE = {"model_type": "qwen3_moe", "hidden_size": 64, "num_experts": 3, "num_experts_per_tok": 2,
       "moe_intermediate_size": 32, "norm_topk_prob": True, "tie_word_embeddings": False}


@pytest.mark.parametrize("kind", ["f32", "q8_0"])
def test_a_vision_model_of_experts_is_its_text_model(tmp_path, kind):
    """The same weights under Qwen3-MoE's names, and as Qwen3-VL-MoE is published."""
    config = write_checkpoint(tmp_path / "text", **MOE)
    plain = random_tensors(config)
    published = {"model.visual.pos_embed.weight": np.full((4, 4), np.nan, np.float32)}
    for name, tensor in plain.items():
        if "mlp.experts." not in name:
            published[name.replace("model.", "model.language_model.")] = tensor
    for layer in range(2):
        parts = {part: np.stack([
            plain[f"model.layers.{layer}.mlp.experts.{expert}.{part}_proj.weight"].T
            for expert in range(3)]) for part in ("gate", "up", "down")}
        prefix = f"model.language_model.layers.{layer}.mlp.experts."
        both = np.concatenate([parts["gate"], parts["up"]], axis=2)
        published[prefix + "gate_up_proj"] = np.ascontiguousarray(both)
        published[prefix + "down_proj"] = np.ascontiguousarray(parts["down"])
    write_checkpoint(tmp_path / "vision", published)
    text = {key: value for key, value in config.items() if key != "architectures"}
    (tmp_path / "vision" / "config.json").write_text(json.dumps({
        "model_type": "qwen3_vl_moe", "tie_word_embeddings": False,
        "text_config": text | {"model_type": "qwen3_vl_moe_text"}}))
    ids = [5, 90, 17, 250]
    engines = [Engine.load(tmp_path / name, weights=kind) for name in ("text", "vision")]
    assert engines[1].config == replace(engines[0].config, family="qwen3_vl_moe")
    np.testing.assert_array_equal(engines[1].forward(ids), engines[0].forward(ids))
