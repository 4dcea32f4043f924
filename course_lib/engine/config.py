"""The hyperparameters of a dense Qwen3 model, read from a Hugging Face `config.json`."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from course_lib.engine.files import is_there, read_json_object
from course_lib.engine.rope import RopeScaling
from course_lib.errors import CourseError

REMEDY = "copy the whole checkpoint folder again, or choose a dense Qwen3 checkpoint"

# What transformers assumes where a config.json leaves the key out.
DEFAULT_HEAD_DIM = 128
DEFAULT_RMS_NORM_EPS = 1e-6
DEFAULT_ROPE_THETA = 10_000.0
DEFAULT_CONTEXT = 32_768


@dataclass(frozen=True)
class MoEConfig:
    """A layer with a mixture of experts: each token goes through the `experts_per_token` best of
    `num_experts`, of width `intermediate_size`; `norm_topk_prob`: their weights are made to sum
    to 1."""

    num_experts: int
    experts_per_token: int
    intermediate_size: int
    norm_topk_prob: bool


@dataclass(frozen=True)
class ModelConfig:
    """The numbers that fix every shape of a model.

    Sizes are counts; `rope_theta` and `rms_norm_eps` are dimensionless; `eos_token_ids` are the
    token ids that end a generation. `qk_norm`: query and key rows are normed per head before RoPE.
    `moe` holds for the layers not in `dense_layers`. Names are those of Hugging Face's
    `config.json`.
    """

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    max_position_embeddings: int
    rms_norm_eps: float
    rope_theta: float
    tie_word_embeddings: bool
    eos_token_ids: tuple[int, ...] = ()
    family: str = "qwen3"
    qk_norm: bool = True
    rope: RopeScaling | None = None
    moe: MoEConfig | None = None
    dense_layers: frozenset[int] = frozenset()

    def moe_of(self, layer: int) -> MoEConfig | None:
        """The experts of a layer, None where it has one SwiGLU."""
        return None if layer in self.dense_layers else self.moe

    @classmethod
    def from_folder(cls, folder: Path) -> ModelConfig:
        """Read and check `config.json` (and `generation_config.json` where present) in `folder`.

        Raises CourseError naming the file, the key and the remedy for anything that this engine
        would compute wrongly: another architecture, scaled RoPE, sliding windows, biases.
        """
        path = folder / "config.json"
        raw = read_json_object(path, remedy=REMEDY)
        _refuse_unsupported(raw, path)
        config = cls(
            vocab_size=_count(raw, "vocab_size", path),
            hidden_size=_count(raw, "hidden_size", path),
            intermediate_size=_count(raw, "intermediate_size", path),
            num_hidden_layers=_count(raw, "num_hidden_layers", path),
            num_attention_heads=_count(raw, "num_attention_heads", path),
            num_key_value_heads=_count(
                raw, "num_key_value_heads", path, default=raw.get("num_attention_heads")
            ),
            head_dim=_count(raw, "head_dim", path, default=DEFAULT_HEAD_DIM),
            max_position_embeddings=_count(
                raw, "max_position_embeddings", path, default=DEFAULT_CONTEXT
            ),
            rms_norm_eps=_positive(raw, "rms_norm_eps", path, DEFAULT_RMS_NORM_EPS),
            rope_theta=_rope_theta(raw, path),
            tie_word_embeddings=_flag(raw, "tie_word_embeddings", path),
            eos_token_ids=_eos_token_ids(raw, folder),
        )
        if config.num_attention_heads % config.num_key_value_heads:
            raise CourseError(
                f"{path}: num_attention_heads {config.num_attention_heads} is not a multiple of "
                f"num_key_value_heads {config.num_key_value_heads}: {REMEDY}"
            )
        if config.head_dim % 2:
            raise CourseError(
                f"{path}: head_dim {config.head_dim} is odd, RoPE turns pairs: {REMEDY}"
            )
        for token in config.eos_token_ids:
            if not 0 <= token < config.vocab_size:
                raise CourseError(
                    f"{path}: eos_token_id {token} is outside the vocabulary of "
                    f"{config.vocab_size}: {REMEDY}"
                )
        return config


def _refuse_unsupported(raw: dict[str, Any], path: Path) -> None:
    model_type = raw.get("model_type")
    if model_type != "qwen3":
        raise CourseError(
            f"{path}: model_type {model_type!r} is not supported: choose a checkpoint whose "
            "model_type is 'qwen3' (dense)"
        )
    refused = {
        "hidden_act": raw.get("hidden_act", "silu") != "silu",
        "attention_bias": bool(raw.get("attention_bias")),
        "use_sliding_window": bool(raw.get("use_sliding_window")),
        "layer_types": not _all_full_attention(raw.get("layer_types")),
        "quantization_config": raw.get("quantization_config") is not None,
    }
    for key, bad in refused.items():
        if bad:
            raise CourseError(
                f"{path}: {key} = {raw[key]!r} is not supported: choose an unquantized Qwen3 "
                "checkpoint with full attention, no bias and the silu activation"
            )


def _all_full_attention(layer_types: Any) -> bool:
    if layer_types is None:
        return True
    return isinstance(layer_types, list) and all(kind == "full_attention" for kind in layer_types)


def _rope_theta(raw: dict[str, Any], path: Path) -> float:
    """RoPE base: `rope_parameters` (transformers 5) or `rope_theta` + `rope_scaling` (before)."""
    for key in ("rope_scaling", "rope_parameters"):
        parameters = raw.get(key)
        if parameters is None:
            continue
        if not isinstance(parameters, dict):
            raise CourseError(f"{path}: {key} must be an object, got {parameters!r}: {REMEDY}")
        kind = parameters.get("rope_type", parameters.get("type", "default"))
        if kind != "default":
            raise CourseError(
                f"{path}: {key} asks for RoPE scaling {kind!r}, only 'default' is supported: "
                "remove the scaling (for contexts within the model's own length it is not needed) "
                "or choose another checkpoint"
            )
        if "rope_theta" in parameters:
            return _positive(parameters, "rope_theta", path, DEFAULT_ROPE_THETA)
    return _positive(raw, "rope_theta", path, DEFAULT_ROPE_THETA)


def _eos_token_ids(raw: dict[str, Any], folder: Path) -> tuple[int, ...]:
    """End-of-generation ids: those of `generation_config.json` where it names any."""
    path = folder / "config.json"
    value = raw.get("eos_token_id")
    generation = folder / "generation_config.json"
    if is_there(generation):
        wanted = read_json_object(generation, remedy=REMEDY).get("eos_token_id")
        if wanted is not None:
            path, value = generation, wanted
    values = value if isinstance(value, list) else [] if value is None else [value]
    for item in values:
        if isinstance(item, bool) or not isinstance(item, int):
            raise CourseError(
                f"{path}: eos_token_id must be a token id or a list, got {value!r}: {REMEDY}"
            )
    return tuple(values)


def _count(raw: dict[str, Any], key: str, path: Path, default: Any = None) -> int:
    value = raw.get(key)
    value = default if value is None else value
    if value is None:
        raise CourseError(f"{path}: {key} is missing: {REMEDY}")
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise CourseError(f"{path}: {key} must be a positive integer, got {value!r}: {REMEDY}")
    return value


def _positive(raw: dict[str, Any], key: str, path: Path, default: float) -> float:
    value = raw.get(key)
    value = default if value is None else value
    number = isinstance(value, (int, float)) and not isinstance(value, bool)
    # The model computes in float32, where 1e-50 is 0 and 1e300 is infinite.
    least, most = float(np.finfo(np.float32).tiny), float(np.finfo(np.float32).max)
    if not number or not least <= value <= most:
        raise CourseError(
            f"{path}: {key} must be a positive number in the range of float32 ({least:.0e} … "
            f"{most:.0e}), got {value!r}: {REMEDY}"
        )
    return float(value)


def _flag(raw: dict[str, Any], key: str, path: Path) -> bool:
    value = raw.get(key, False)
    if not isinstance(value, bool):
        raise CourseError(f"{path}: {key} must be true or false, got {value!r}: {REMEDY}")
    return value
