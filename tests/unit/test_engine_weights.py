"""model.safetensors: every stored type gives the same model; every damage is named."""

import json
import os
import struct

import numpy as np
import pytest
from safetensors.numpy import save_file

from course_lib.engine import Engine
from course_lib.errors import CourseError
from tests.tiny_checkpoint import BASE_CONFIG, random_tensors, write_checkpoint

Q_PROJ = "model.layers.1.self_attn.q_proj.weight"
V_PROJ = "model.layers.0.self_attn.v_proj.weight"
Q_NORM = "model.layers.1.self_attn.q_norm.weight"
K_NORM = "model.layers.1.self_attn.k_norm.weight"


def write_raw(path, tensors):
    """Write a safetensors file from name -> (type, shape, bytes), with no package in between."""
    header, offset = {}, 0
    for name, (kind, shape, data) in tensors.items():
        header[name] = {
            "dtype": kind,
            "shape": list(shape),
            "data_offsets": [offset, offset + len(data)],
        }
        offset += len(data)
    text = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + b"".join(t[2] for t in tensors.values()))


def bf16_bytes(array):
    """The upper 16 bits of each float32: exact when the lower ones are zero."""
    return (array.view(np.uint32) >> 16).astype("<u2").tobytes()


@pytest.fixture
def tensors():
    return random_tensors(BASE_CONFIG)


def test_bf16_f16_and_f32_are_read_exactly(tmp_path, tensors):
    # Values that every one of the three types holds exactly.
    coarse = {
        name: (np.round(x * 16) / 16).clip(-8, 8).astype(np.float32) for name, x in tensors.items()
    }
    ids = [5, 90, 17]
    outputs = []
    for kind in ("F32", "F16", "BF16"):
        folder = tmp_path / kind
        write_checkpoint(folder, coarse)
        if kind != "F32":
            data = {
                name: (
                    kind,
                    x.shape,
                    bf16_bytes(x) if kind == "BF16" else x.astype("<f2").tobytes(),
                )
                for name, x in coarse.items()
            }
            write_raw(folder / "model.safetensors", data)
        engine = Engine.load(folder)
        for layer in engine.model.weights.layers:
            for name, x in (vars(layer) | vars(layer.mlp)).items():
                assert name == "mlp" or (x.dtype == np.float32 and x.flags.c_contiguous)
        np.testing.assert_array_equal(q_proj(engine), coarse[Q_PROJ], err_msg=kind)
        outputs.append(engine.forward(ids))
    np.testing.assert_array_equal(outputs[0], outputs[1])
    np.testing.assert_array_equal(outputs[0], outputs[2])


def q_proj(engine):
    """The query's rows of layer 1."""
    return engine.model.weights.layers[1].qkv_proj[: engine.config.num_attention_heads * 8]


def test_mixed_types_at_unaligned_offsets(tmp_path, tensors):
    write_checkpoint(tmp_path, tensors)
    odd = tensors[Q_PROJ].astype(np.float16)
    names = sorted(tensors, key=lambda name: name != "model.norm.weight")
    raw = {name: ("F32", tensors[name].shape, tensors[name].tobytes()) for name in names}
    raw["model.norm.weight"] = ("F16", (24,), tensors["model.norm.weight"].astype("<f2").tobytes())
    raw[Q_PROJ] = ("F16", odd.shape, odd.tobytes())
    write_raw(tmp_path / "model.safetensors", raw)
    np.testing.assert_array_equal(q_proj(Engine.load(tmp_path)), odd)


def test_tied_and_untied_output(tmp_path, tensors):
    write_checkpoint(tmp_path / "tied", tensors)
    tied = Engine.load(tmp_path / "tied").model.weights
    assert tied.output is tied.embedding
    head = np.arange(300 * 24, dtype=np.float32).reshape(300, 24)
    write_checkpoint(
        tmp_path / "untied", tensors | {"lm_head.weight": head}, tie_word_embeddings=False
    )
    np.testing.assert_array_equal(Engine.load(tmp_path / "untied").model.weights.output, head)
    repeated = tensors | {"lm_head.weight": tensors["model.embed_tokens.weight"]}
    write_checkpoint(tmp_path / "repeated", repeated)
    weights = Engine.load(tmp_path / "repeated").model.weights
    assert weights.output is weights.embedding
    write_checkpoint(tmp_path / "differs", tensors | {"lm_head.weight": head})
    with pytest.raises(CourseError, match="lm_head.weight differs.*tie_word_embeddings"):
        Engine.load(tmp_path / "differs")


def without(tensors, name):
    return {key: value for key, value in tensors.items() if key != name}


DAMAGES = {
    "missing": (lambda t: without(t, Q_PROJ), f"lacks tensor {Q_PROJ}: "),
    "two missing": (
        lambda t: without(without(t, Q_PROJ), "model.norm.weight"),
        f"lacks tensor {Q_PROJ} and 1 more",
    ),
    "unknown": (
        lambda t: t | {"model.layers.2.mlp.up_proj.weight": t[Q_PROJ]},
        "holds the unknown tensor model.layers.2.mlp.up_proj.weight",
    ),
    "bias": (
        lambda t: t | {"model.layers.0.self_attn.q_proj.bias": np.zeros(32, np.float32)},
        "q_proj.bias",
    ),
    "transposed": (lambda t: t | {Q_PROJ: t[Q_PROJ].T.copy()}, r"shape \[24, 32\].*\[32, 24\]"),
    "nan": (lambda t: t | {Q_PROJ: np.full_like(t[Q_PROJ], np.nan)}, f"{Q_PROJ} holds NaN"),
    "inf": (lambda t: t | {"model.norm.weight": np.full(24, np.inf, np.float32)}, "infinity"),
    "int8": (lambda t: t | {Q_PROJ: t[Q_PROJ].astype(np.int8)}, "stored as I8"),
    "f64": (lambda t: t | {Q_PROJ: t[Q_PROJ].astype(np.float64)}, "stored as F64"),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_each_damage_names_file_and_tensor(tmp_path, tensors, damage):
    change, words = DAMAGES[damage]
    write_checkpoint(tmp_path, change(tensors))
    with pytest.raises(CourseError, match=words) as error:
        Engine.load(tmp_path)
    assert str(tmp_path / "model.safetensors") in str(error.value)
    assert "\n" not in str(error.value)


def test_one_nan_among_many_is_found(tmp_path, tensors):
    tensors["model.layers.0.mlp.up_proj.weight"][-1, -1] = np.nan
    write_checkpoint(tmp_path, tensors)
    with pytest.raises(CourseError, match="layers.0.mlp.up_proj.weight holds NaN"):
        Engine.load(tmp_path)


@pytest.mark.parametrize("keep", [0, 5, 100, 3000, -1])
def test_truncated_at_any_length(tmp_path, keep):
    write_checkpoint(tmp_path)
    path = tmp_path / "model.safetensors"
    path.write_bytes(path.read_bytes()[:keep])
    with pytest.raises(CourseError, match="damaged or truncated.*copy the file again"):
        Engine.load(tmp_path)


def test_absent_and_split_files(tmp_path, tensors):
    write_checkpoint(tmp_path, tensors)
    (tmp_path / "model.safetensors").unlink()
    with pytest.raises(CourseError, match="model.safetensors is missing"):
        Engine.load(tmp_path)
    (tmp_path / "model.safetensors.index.json").write_text("{}")
    with pytest.raises(CourseError, match="has no weight_map"):
        Engine.load(tmp_path)


def test_files_of_two_checkpoints_are_told_apart(tmp_path):
    write_checkpoint(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"num_hidden_layers": 1}))
    with pytest.raises(CourseError, match="unknown tensor model.layers.1.*one checkpoint"):
        Engine.load(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(config | {"vocab_size": 200}))
    with pytest.raises(CourseError, match="tokenizer.json has token ids up to 265.*200 tokens"):
        Engine.load(tmp_path)


def test_header_without_tensors(tmp_path):
    write_checkpoint(tmp_path)
    save_file({}, tmp_path / "model.safetensors")
    with pytest.raises(CourseError, match="holds 0 tensors, too few for the 2 layers"):
        Engine.load(tmp_path)
    save_file({"a": np.zeros(1, np.float32), "b": np.zeros(1)}, tmp_path / "model.safetensors")
    with pytest.raises(CourseError, match="lacks tensor model.embed_tokens.weight and 23 more"):
        Engine.load(tmp_path)


def test_millions_of_layers_are_refused_before_their_names_are_made(tmp_path, monkeypatch):
    write_checkpoint(tmp_path, random_tensors(BASE_CONFIG), num_hidden_layers=10_000_000)
    monkeypatch.setattr("course_lib.engine.weights.expected_tensors", None)
    with pytest.raises(CourseError, match="24 tensors, too few for the 10000000 layers"):
        Engine.load(tmp_path)


def test_millions_of_experts_are_refused_before_their_names_are_made(tmp_path, monkeypatch):
    moe = {"model_type": "qwen3_moe", "num_experts_per_tok": 2, "moe_intermediate_size": 16}
    write_checkpoint(tmp_path, random_tensors(BASE_CONFIG), **moe, num_experts=10**9)
    monkeypatch.setattr("course_lib.engine.weights.expected_tensors", None)
    with pytest.raises(CourseError, match="24 tensors, too few for the 2 layers and 2000000000 ex"):
        Engine.load(tmp_path)


def test_a_tokenizer_without_the_token_that_ends(tmp_path):
    write_checkpoint(tmp_path, eos_token_id=[2, 266])
    with pytest.raises(CourseError, match="tokenizer.json has token ids up to 265, the model ends "
                       "with token 266: use the tokenizer.json and config.json of one checkpoint"):
        Engine.load(tmp_path)


def test_weights_that_are_no_regular_file(tmp_path):
    write_checkpoint(tmp_path)
    path = tmp_path / "model.safetensors"
    path.unlink()
    os.mkfifo(path)
    with pytest.raises(CourseError, match="safetensors cannot be read .it is not a regular file"):
        Engine.load(tmp_path)


@pytest.mark.parametrize(
    "name", ["model.embed_tokens.weight", Q_PROJ, "model.norm.weight", V_PROJ, Q_NORM, K_NORM]
)
def test_finite_weights_that_overflow_are_an_error_without_a_warning(
    tmp_path, tensors, name, recwarn
):
    tensors[name] = np.full_like(tensors[name], 3e38)
    tensors[name].flat[::2] = -3e38
    if name == K_NORM:  # rows stay finite here: it is the scores that overflow
        tensors[name] /= 1e10
        tensors[Q_NORM.replace("q_norm", "k_norm")] = tensors[name]
        tensors[Q_NORM] = tensors[name]
    write_checkpoint(tmp_path, tensors)
    engine = Engine.load(tmp_path)
    for call in (engine.prefill, engine.forward, lambda ids: engine.generate(ids, 2)):
        with pytest.raises(CourseError, match="leave the range of float32 .*(not finite|NaN)"):
            call([5, 90, 17])
    assert not recwarn.list


def test_a_step_that_overflows_leaves_the_session_as_it_was(tmp_path, tensors):
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].copy()
    tensors["model.embed_tokens.weight"][77] = 3e38
    write_checkpoint(tmp_path, tensors, tie_word_embeddings=False)
    session = Engine.load(tmp_path).prefill([5, 90])
    before = session.logits.tobytes()
    with pytest.raises(CourseError, match="leave the range of float32"):
        session.step(77)
    assert len(session) == 2 and session.logits.tobytes() == before
