"""Weights of a checkpoint, checked against its config: float32, or packed blocks of 8 or 4 bits."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from course_lib.engine.config import ModelConfig
from course_lib.engine.tensor_source import TensorSource
from course_lib.errors import CourseError
from course_lib.linear import PackedMatrix
from course_lib.weight_blocks import Kind

EMBEDDING, FINAL_NORM, OUTPUT = "model.embed_tokens.weight", "model.norm.weight", "lm_head.weight"
WEIGHT_KINDS = ("f32", "q8_0", "q4_0")

Matrix = np.ndarray | PackedMatrix
"""float32 `[out, in]`, or that matrix in blocks."""


@dataclass(frozen=True)
class DenseMLP:
    """A SwiGLU: `gate_up_proj` `[2 · inner, hidden]`, the gate's rows first; `down_proj`
    `[hidden, inner]`."""

    gate_up_proj: Matrix
    down_proj: Matrix


@dataclass(frozen=True)
class MoELayer:
    """A mixture of experts: `router` float32 `[experts, hidden]` and one SwiGLU per expert."""

    router: np.ndarray
    experts: tuple[DenseMLP, ...]


@dataclass(frozen=True)
class LayerWeights:
    """One layer: norm gains float32 `[size]`, the query's, key's and value's rows in one matrix.

    `q_norm` and `k_norm` are None in architectures without them.
    """

    input_norm: np.ndarray
    qkv_proj: Matrix
    q_norm: np.ndarray | None
    k_norm: np.ndarray | None
    o_proj: Matrix
    post_attention_norm: np.ndarray
    mlp: DenseMLP | MoELayer


@dataclass(frozen=True)
class Weights:
    """All weights: `embedding` and `output` `[vocab, hidden]`, one object where tied."""

    embedding: Matrix
    layers: tuple[LayerWeights, ...]
    final_norm: np.ndarray
    output: Matrix


def layer_tensors(config: ModelConfig, layer: int) -> dict[str, tuple[int, ...]]:
    """Tensor name -> shape of what one layer of the checkpoint holds."""
    hidden, d = config.hidden_size, config.head_dim
    q_rows, kv_rows = config.num_attention_heads * d, config.num_key_value_heads * d
    prefix = f"model.layers.{layer}."
    shapes: dict[str, tuple[int, ...]] = {
        "input_layernorm.weight": (hidden,),
        "self_attn.q_proj.weight": (q_rows, hidden),
        "self_attn.k_proj.weight": (kv_rows, hidden),
        "self_attn.v_proj.weight": (kv_rows, hidden),
        "self_attn.o_proj.weight": (hidden, q_rows),
        "post_attention_layernorm.weight": (hidden,),
    }
    if config.qk_norm:
        shapes |= {"self_attn.q_norm.weight": (d,), "self_attn.k_norm.weight": (d,)}
    moe = config.moe_of(layer)
    if moe is None:
        shapes |= mlp_tensors("mlp.", hidden, config.intermediate_size)
    else:
        shapes["mlp.gate.weight"] = (moe.num_experts, hidden)
        for expert in range(moe.num_experts):
            shapes |= mlp_tensors(f"mlp.experts.{expert}.", hidden, moe.intermediate_size)
    return {prefix + name: shape for name, shape in shapes.items()}


def mlp_tensors(prefix: str, hidden: int, inner: int) -> dict[str, tuple[int, ...]]:
    """Tensor name -> shape of one SwiGLU."""
    return {
        prefix + "gate_proj.weight": (inner, hidden),
        prefix + "up_proj.weight": (inner, hidden),
        prefix + "down_proj.weight": (hidden, inner),
    }


def expected_tensors(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Name and shape of every tensor that the checkpoint must hold, and nothing else may."""
    shapes: dict[str, tuple[int, ...]] = {EMBEDDING: (config.vocab_size, config.hidden_size)}
    for layer in range(config.num_hidden_layers):
        shapes.update(layer_tensors(config, layer))
    shapes[FINAL_NORM] = (config.hidden_size,)
    if not config.tie_word_embeddings:
        shapes[OUTPUT] = (config.vocab_size, config.hidden_size)
    return shapes


def load_weights(
    source: TensorSource,
    config: ModelConfig,
    kind: str = "f32",
    on_progress: Callable[[int, int], None] | None = None,
) -> Weights:
    """Read the weights of `source` as `kind`, layer by layer.

    Matrices become float32 or PackedMatrix; norm gains and routers stay float32. A tied checkpoint
    may repeat the embedding as `lm_head.weight`. `on_progress(done, total)` counts layers. Raises
    CourseError naming the file, the tensor and the remedy: tensor missing, unknown, of another
    shape, NaN or infinite; rows that do not divide into blocks; ValueError for an unknown kind.
    """
    if kind not in WEIGHT_KINDS:
        raise ValueError(f"weights must be one of {', '.join(WEIGHT_KINDS)}, not {kind!r}")
    check_tensors(source, config)
    embedding = matrix(source, [EMBEDDING], kind)
    layers = []
    for layer in range(config.num_hidden_layers):
        layers.append(layer_weights(source, config, layer, kind))
        if on_progress is not None:
            on_progress(layer + 1, config.num_hidden_layers)
    output = embedding if config.tie_word_embeddings else matrix(source, [OUTPUT], kind)
    return Weights(embedding, tuple(layers), source.read(FINAL_NORM), output)


def layer_weights(
    source: TensorSource, config: ModelConfig, layer: int, kind: str
) -> LayerWeights:
    """The weights of one layer; `load_weights` has checked that they are there."""
    prefix = f"model.layers.{layer}."
    attention = prefix + "self_attn."
    moe = config.moe_of(layer)
    mlp: DenseMLP | MoELayer
    if moe is None:
        mlp = dense_mlp(source, prefix + "mlp.", kind)
    else:
        mlp = MoELayer(
            source.read(prefix + "mlp.gate.weight"),
            tuple(dense_mlp(source, f"{prefix}mlp.experts.{expert}.", kind)
                  for expert in range(moe.num_experts)),
        )
    return LayerWeights(
        input_norm=source.read(prefix + "input_layernorm.weight"),
        qkv_proj=matrix(source, [f"{attention}{part}_proj.weight" for part in "qkv"], kind),
        q_norm=source.read(attention + "q_norm.weight") if config.qk_norm else None,
        k_norm=source.read(attention + "k_norm.weight") if config.qk_norm else None,
        o_proj=matrix(source, [attention + "o_proj.weight"], kind),
        post_attention_norm=source.read(prefix + "post_attention_layernorm.weight"),
        mlp=mlp,
    )


def dense_mlp(source: TensorSource, prefix: str, kind: str) -> DenseMLP:
    """One SwiGLU whose tensors' names begin with `prefix`."""
    gate_up = [prefix + "gate_proj.weight", prefix + "up_proj.weight"]
    return DenseMLP(matrix(source, gate_up, kind),
                    matrix(source, [prefix + "down_proj.weight"], kind))


def matrix(source: TensorSource, names: Sequence[str], kind: str) -> Matrix:
    """The rows of several tensors in one matrix of a kind."""
    if kind == "f32":
        parts = [source.read(name) for name in names]
        return parts[0] if len(parts) == 1 else np.concatenate(parts)
    blocks: Kind = kind  # type: ignore[assignment]
    found = [source.blocks(name, blocks) for name in names]
    if all(part is not None for part in found):
        return PackedMatrix.from_blocks(np.concatenate(found), blocks)  # type: ignore[arg-type]
    return PackedMatrix.quantize(np.concatenate([source.read(name) for name in names]), blocks)


def check_tensors(source: TensorSource, config: ModelConfig) -> None:
    """CourseError unless `source` holds the tensors of `config` and nothing else."""
    path, stored = source.path, source.stored
    if config.num_hidden_layers > len(stored):  # before a list of millions of names is made
        raise CourseError(
            f"{path} holds {len(stored)} tensors, too few for the {config.num_hidden_layers} "
            "layers of config.json: use the config.json and model.safetensors of one checkpoint"
        )
    expected = expected_tensors(config)
    repeated = config.tie_word_embeddings and OUTPUT in stored
    if repeated:
        expected = {**expected, OUTPUT: expected[EMBEDDING]}
    missing = [name for name in expected if name not in stored]
    unknown = sorted(name for name in stored if name not in expected)
    for problem, names in (("lacks", missing), ("holds the unknown", unknown)):
        if names:
            more = f" and {len(names) - 1} more" if len(names) > 1 else ""
            raise CourseError(
                f"{path} {problem} tensor {names[0]}{more}: use the config.json and "
                "model.safetensors of one checkpoint"
            )
    for name, shape in expected.items():
        if stored[name].shape != shape:
            raise CourseError(
                f"{path}: tensor {name} has shape {list(stored[name].shape)}, config.json asks for "
                f"{list(shape)}: use the config.json and model.safetensors of one checkpoint"
            )
    if repeated and not np.array_equal(source.read(OUTPUT), source.read(EMBEDDING)):
        raise CourseError(
            f"{path}: {OUTPUT} differs from {EMBEDDING} although config.json ties them: set "
            "tie_word_embeddings to false in config.json, or remove the tensor"
        )
