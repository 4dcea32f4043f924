"""Weights of a dense Qwen3 checkpoint: read from `model.safetensors`, checked, made float32."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from safetensors import SafetensorError, safe_open

from course_lib.engine.config import ModelConfig
from course_lib.engine.files import is_there, require_file
from course_lib.errors import CourseError

REMEDY = "copy the file again from where the checkpoint came from"
EMBEDDING, FINAL_NORM, OUTPUT = "model.embed_tokens.weight", "model.norm.weight", "lm_head.weight"

# NumPy has no bfloat16: its 16 bits are read as integers and become the high half of a float32.
STORED_AS: dict[str, np.dtype] = {
    "F32": np.dtype("<f4"),
    "F16": np.dtype("<f2"),
    "BF16": np.dtype("<u2"),
}


@dataclass(frozen=True)
class LayerWeights:
    """One layer's matrices, float32 `[out, in]` as stored, and norm gains `[size]`."""

    input_norm: np.ndarray
    q_proj: np.ndarray
    k_proj: np.ndarray
    v_proj: np.ndarray
    q_norm: np.ndarray
    k_norm: np.ndarray
    o_proj: np.ndarray
    post_attention_norm: np.ndarray
    gate_proj: np.ndarray
    up_proj: np.ndarray
    down_proj: np.ndarray


@dataclass(frozen=True)
class Weights:
    """All weights, float32: `embedding` and `output` `[vocab, hidden]` (one array where tied)."""

    embedding: np.ndarray
    layers: tuple[LayerWeights, ...]
    final_norm: np.ndarray
    output: np.ndarray


def layer_tensors(config: ModelConfig, layer: int) -> dict[str, tuple[str, tuple[int, ...]]]:
    """LayerWeights field -> (tensor name in the file, shape) for one layer."""
    hidden, inner, d = config.hidden_size, config.intermediate_size, config.head_dim
    q_rows, kv_rows = config.num_attention_heads * d, config.num_key_value_heads * d
    prefix = f"model.layers.{layer}."
    return {
        "input_norm": (prefix + "input_layernorm.weight", (hidden,)),
        "q_proj": (prefix + "self_attn.q_proj.weight", (q_rows, hidden)),
        "k_proj": (prefix + "self_attn.k_proj.weight", (kv_rows, hidden)),
        "v_proj": (prefix + "self_attn.v_proj.weight", (kv_rows, hidden)),
        "q_norm": (prefix + "self_attn.q_norm.weight", (d,)),
        "k_norm": (prefix + "self_attn.k_norm.weight", (d,)),
        "o_proj": (prefix + "self_attn.o_proj.weight", (hidden, q_rows)),
        "post_attention_norm": (prefix + "post_attention_layernorm.weight", (hidden,)),
        "gate_proj": (prefix + "mlp.gate_proj.weight", (inner, hidden)),
        "up_proj": (prefix + "mlp.up_proj.weight", (inner, hidden)),
        "down_proj": (prefix + "mlp.down_proj.weight", (hidden, inner)),
    }


def expected_tensors(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Name and shape of every tensor that the checkpoint must hold, and nothing else may."""
    shapes: dict[str, tuple[int, ...]] = {EMBEDDING: (config.vocab_size, config.hidden_size)}
    for layer in range(config.num_hidden_layers):
        shapes.update(layer_tensors(config, layer).values())
    shapes[FINAL_NORM] = (config.hidden_size,)
    if not config.tie_word_embeddings:
        shapes[OUTPUT] = (config.vocab_size, config.hidden_size)
    return shapes


def load_weights(folder: Path, config: ModelConfig) -> Weights:
    """Read `model.safetensors` of `folder` into float32 arrays.

    F32, F16 and BF16 tensors are read. Raises CourseError naming the file, the tensor and the
    remedy: file absent or truncated, tensor missing, unknown, of another shape or type, NaN or
    infinite. A tied checkpoint may repeat the embedding as `lm_head.weight`.
    """
    path = folder / "model.safetensors"
    stored = _stored_tensors(path)
    if config.num_hidden_layers > len(stored):  # before a list of millions of names is made
        raise CourseError(
            f"{path} holds {len(stored)} tensors, too few for the {config.num_hidden_layers} "
            "layers of config.json: use the config.json and model.safetensors of one checkpoint"
        )
    expected = expected_tensors(config)
    repeated = config.tie_word_embeddings and OUTPUT in stored
    if repeated:
        expected = {**expected, OUTPUT: expected[EMBEDDING]}
    _check_names(path, expected, stored)
    for name, shape in expected.items():
        dtype, found = stored[name]
        if found != shape:
            raise CourseError(
                f"{path}: tensor {name} has shape {list(found)}, config.json asks for "
                f"{list(shape)}: use the config.json and model.safetensors of one checkpoint"
            )
        if dtype not in STORED_AS:
            raise CourseError(
                f"{path}: tensor {name} is stored as {dtype}, readable are "
                f"{', '.join(STORED_AS)}: choose an unquantized checkpoint"
            )
    tensors = dict(_read_tensors(path, expected))
    if repeated and not np.array_equal(tensors[OUTPUT], tensors[EMBEDDING]):
        raise CourseError(
            f"{path}: {OUTPUT} differs from {EMBEDDING} although config.json ties them: set "
            "tie_word_embeddings to false in config.json, or remove the tensor"
        )
    layers = tuple(
        LayerWeights(
            **{field: tensors[name] for field, (name, _) in layer_tensors(config, layer).items()}
        )
        for layer in range(config.num_hidden_layers)
    )
    output = EMBEDDING if config.tie_word_embeddings else OUTPUT
    return Weights(tensors[EMBEDDING], layers, tensors[FINAL_NORM], tensors[output])


def _stored_tensors(path: Path) -> dict[str, tuple[str, tuple[int, ...]]]:
    """Tensor name -> (stored type, shape); the safetensors package checks the file's layout."""
    index = path.with_name(path.name + ".index.json")
    if not is_there(path) and is_there(index):
        raise CourseError(
            f"{path} is missing and {index.name} says that the checkpoint is split into "
            "several files: choose a checkpoint with one model.safetensors, or save it as one"
        )
    require_file(path, remedy=REMEDY)
    try:
        with safe_open(str(path), framework="np") as file:
            return {
                name: (file.get_slice(name).get_dtype(), tuple(file.get_slice(name).get_shape()))
                for name in file.keys()
            }
    except (SafetensorError, OSError, ValueError) as error:
        raise CourseError(f"{path} is damaged or truncated ({error}): {REMEDY}") from None


def _check_names(path: Path, expected: dict, stored: dict) -> None:
    missing = [name for name in expected if name not in stored]
    unknown = sorted(name for name in stored if name not in expected)
    for kind, names in (("lacks", missing), ("holds the unknown", unknown)):
        if names:
            more = f" and {len(names) - 1} more" if len(names) > 1 else ""
            raise CourseError(
                f"{path} {kind} tensor {names[0]}{more}: use the config.json and "
                "model.safetensors of one checkpoint"
            )


def _read_tensors(path: Path, names: dict) -> Iterator[tuple[str, np.ndarray]]:
    """Yield every named tensor as a finite float32 array, one at a time to keep memory low."""
    with open(path, "rb") as file:
        header_size = int.from_bytes(file.read(8), "little")
        header = json.loads(file.read(header_size))
    raw = np.memmap(path, dtype=np.uint8, mode="r", offset=8 + header_size)
    for name in names:
        entry = header[name]
        begin, end = entry["data_offsets"]
        stored = raw[begin:end].view(STORED_AS[entry["dtype"]])
        if entry["dtype"] == "BF16":
            bits: np.ndarray = stored.astype(np.uint32) << np.uint32(16)
            values = bits.view(np.float32)
        else:
            values = stored.astype(np.float32)
        if not np.isfinite(values).all():
            raise CourseError(f"{path}: tensor {name} holds NaN or infinity: {REMEDY}")
        yield name, values.reshape(entry["shape"])
