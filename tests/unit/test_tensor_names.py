"""Tensors' names of every family, brought to those of Qwen3 and Llama."""

import numpy as np
import pytest
from safetensors.numpy import save_file

from course_lib.engine.safetensors_source import SafetensorsSource
from course_lib.engine.tensor_names import Part, parts_of
from course_lib.engine.tensor_source import Stored
from course_lib.errors import CourseError


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
@pytest.mark.parametrize("inner", [3, 5, 8])
def test_all_experts_in_two_tensors(tmp_path, transposed, inner):
    """Which way round they lie is seen from the router's width, 8 here; in doubt not transposed."""
    rng = np.random.default_rng(inner)
    gate_up = rng.standard_normal((4, 2 * inner, 8)).astype(np.float32)
    down = rng.standard_normal((4, 8, inner)).astype(np.float32)
    turn = transposed and inner != 8  # of down alone both orders would fit
    stored = {
        GATE_UP: np.ascontiguousarray(gate_up.transpose(0, 2, 1)) if turn else gate_up,
        DOWN: np.ascontiguousarray(down.transpose(0, 2, 1)) if turn else down,
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
    "shapes",
    [
        {GATE_UP: (4, 6, 8)},  # no router
        {GATE_UP: (4, 6, 8), ROUTER: (32,)},
        {GATE_UP: (4, 48), ROUTER: (4, 8)},
        {GATE_UP: (4, 6, 7), ROUTER: (4, 8)},
        {GATE_UP: (4, 5, 8), ROUTER: (4, 8)},  # gate and up cannot be as high
        {GATE_UP: (4, 0, 8), ROUTER: (4, 8)},
        {GATE_UP: (10**9, 2, 8), ROUTER: (4, 8)},
        {DOWN: (4, 6, 7), ROUTER: (4, 8)},
    ],
)
def test_experts_of_a_strange_shape_keep_their_name(shapes):
    """So that they are reported as an unknown tensor."""
    name = next(iter(shapes))
    assert names_of(**shapes)[name.replace("language_model.", "")] == Part(name, shapes[name])
