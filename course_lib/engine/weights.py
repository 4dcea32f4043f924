"""The weights of a model: what the arrays are, and which tensors of a checkpoint they hold."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from course_lib.engine.config import ModelConfig
from course_lib.engine.tensor_source import TensorSource
from course_lib.errors import CourseError
from course_lib.linear import PackedMatrix

EMBEDDING, FINAL_NORM, OUTPUT = "model.embed_tokens.weight", "model.norm.weight", "lm_head.weight"
REMEDY = "take the config and the weights of one checkpoint, or copy it again"
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


class Slot(NamedTuple):
    """An array or matrix of `Weights`: its name, the checkpoint's tensors whose rows it stacks, its
    shape, and whether it is one of the matrices that are packed where weights are."""

    name: str
    tensors: tuple[str, ...]
    shape: tuple[int, ...]
    packed: bool


@functools.lru_cache(maxsize=4)  # of a mixture of experts they are tens of thousands
def slots_of(config: ModelConfig) -> tuple[Slot, ...]:
    """Every array of the weights of `config`, in the order in which `assemble` asks for it."""
    slots: list[Slot] = []

    def note(slot: Slot) -> Any:
        slots.append(slot)

    assemble(config, note)
    return tuple(slots)


def assemble(config: ModelConfig, fill: Callable[[Slot], Any]) -> Weights:
    """The weights of `config` from what `fill` returns for each slot: a Matrix for a packed one,
    else float32 of its shape."""
    shapes = expected_tensors(config)

    def matrix(name: str, *tensors: str) -> Matrix:
        rows = sum(shapes[tensor][0] for tensor in tensors)
        return fill(Slot(name, tensors, (rows, shapes[tensors[0]][1]), True))

    def array(name: str) -> np.ndarray:
        return fill(Slot(name, (name,), shapes[name], False))

    def swiglu(prefix: str) -> DenseMLP:
        return DenseMLP(
            matrix(prefix + "gate_up_proj", prefix + "gate_proj.weight", prefix + "up_proj.weight"),
            matrix(prefix + "down_proj", prefix + "down_proj.weight"),
        )

    def layer(number: int) -> LayerWeights:
        prefix = f"model.layers.{number}."
        attention = prefix + "self_attn."
        moe = config.moe_of(number)
        return LayerWeights(
            input_norm=array(prefix + "input_layernorm.weight"),
            qkv_proj=matrix(attention + "qkv_proj",
                            *(f"{attention}{part}_proj.weight" for part in "qkv")),
            q_norm=array(attention + "q_norm.weight") if config.qk_norm else None,
            k_norm=array(attention + "k_norm.weight") if config.qk_norm else None,
            o_proj=matrix(attention + "o_proj", attention + "o_proj.weight"),
            post_attention_norm=array(prefix + "post_attention_layernorm.weight"),
            mlp=swiglu(prefix + "mlp.") if moe is None else MoELayer(
                array(prefix + "mlp.gate.weight"),
                tuple(swiglu(f"{prefix}mlp.experts.{expert}.")
                      for expert in range(moe.num_experts))),
        )

    embedding = matrix("model.embed_tokens", EMBEDDING)
    layers = tuple(layer(number) for number in range(config.num_hidden_layers))
    final_norm = array(FINAL_NORM)
    output = embedding if config.tie_word_embeddings else matrix("lm_head", OUTPUT)
    return Weights(embedding, layers, final_norm, output)


def check_tensors(source: TensorSource, config: ModelConfig) -> None:
    """CourseError unless `source` holds the tensors of `config` and nothing else; reads none."""
    path, stored = source.path, source.stored
    layers, experts = config.num_hidden_layers, 0
    if config.moe is not None:
        experts = config.moe.num_experts * (layers - len(config.dense_layers))
    if layers + experts > len(stored):  # before a list of millions of names is made
        what = f"layers and {experts} experts" if experts else "layers"
        raise CourseError(
            f"{path} holds {len(stored)} tensors, too few for the {layers} {what} of its config: "
            f"{REMEDY}"
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
                f"{path} {problem} tensor {names[0]}{more}: {REMEDY}"
            )
    for name, shape in expected.items():
        if stored[name].shape != shape:
            raise CourseError(
                f"{path}: tensor {name} has shape {list(stored[name].shape)}, its config asks for "
                f"{list(shape)}: {REMEDY}"
            )


def check_tied(source: TensorSource, config: ModelConfig) -> None:
    """CourseError if a tied checkpoint repeats the embedding as its output, and not the same."""
    if not config.tie_word_embeddings or OUTPUT not in source.stored:
        return
    if not same_rows(source, EMBEDDING, OUTPUT):
        raise CourseError(
            f"{source.path}: {OUTPUT} differs from {EMBEDDING} although config.json ties them: set "
            "tie_word_embeddings to false in config.json, or remove the tensor"
        )


def same_rows(source: TensorSource, name: str, other: str) -> bool:
    """Whether two matrices of one shape are equal; read some rows at a time."""
    rows = source.stored[name].shape[0]
    return all(
        np.array_equal(source.read_rows(name, first, min(first + 1024, rows)),
                       source.read_rows(other, first, min(first + 1024, rows)))
        for first in range(0, rows, 1024)
    )
