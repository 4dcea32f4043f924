"""The model families that the engine computes: what `model_type` says, and what it leaves unsaid.

How their tensors are called is in `tensor_names.py`. Source of the defaults: the configuration
classes of transformers 5.24.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from course_lib.engine.config_keys import ConfigKeys, shown
from course_lib.errors import CourseError


@dataclass(frozen=True)
class Family:
    """One `model_type`.

    `qk_norm`: query and key rows are normed per head before RoPE. `experts`: layers hold a mixture
    of experts. `text_config`: the model_type of the nested object that describes the language
    model, None where config.json itself does. `defaults`: what keys mean that are left out;
    without one for head_dim it is hidden_size / num_attention_heads, without one for
    num_key_value_heads as many as query heads. Sizes that every checkpoint states have none.
    """

    title: str
    qk_norm: bool = True
    experts: bool = False
    text_config: str | None = None
    defaults: Mapping[str, Any] = field(default_factory=dict)


_COMMON = {"rms_norm_eps": 1e-6, "rope_theta": 10_000.0, "hidden_act": "silu"}
_QWEN3 = _COMMON | {"max_position_embeddings": 32_768}
_QWEN3_VL = _COMMON | {"max_position_embeddings": 128_000, "rope_theta": 500_000.0}
_MOE = {"decoder_sparse_step": 1, "num_experts_per_tok": 8}

FAMILIES = {
    "qwen3": Family("Qwen3", defaults=_QWEN3 | {"num_key_value_heads": 32, "head_dim": 128}),
    "qwen3_moe": Family(
        "Qwen3-MoE", experts=True, defaults=_QWEN3 | _MOE | {"num_key_value_heads": 4}),
    "qwen3_vl": Family(
        "Qwen3-VL", text_config="qwen3_vl_text",
        defaults=_QWEN3_VL | {"num_key_value_heads": 32, "head_dim": 128}),
    "qwen3_vl_moe": Family(
        "Qwen3-VL-MoE", experts=True, text_config="qwen3_vl_moe_text",
        defaults=_QWEN3_VL | _MOE
        | {"num_key_value_heads": 16, "num_experts_per_tok": 4, "norm_topk_prob": True}),
    "llama": Family(
        "Llama", qk_norm=False,
        defaults=_COMMON | {"max_position_embeddings": 2048, "eos_token_id": 2}),
}
# Families of other names that a checkpoint of these is mistaken for, and their nearest kin here.
_KIN = {"mistral": "llama", "smollm3": "llama", "phi3": "llama", "gemma": "llama",
        "mixtral": "qwen3_moe", "deepseek": "qwen3_moe", "qwen": "qwen3"}


def family_of(raw: Mapping[str, Any], path: Path) -> Family:
    """The family of a config.json; CourseError naming those that there are, the nearest first."""
    model_type = raw.get("model_type")
    if isinstance(model_type, str) and model_type in FAMILIES:
        return FAMILIES[model_type]
    nearest = _nearest(model_type) if isinstance(model_type, str) else None
    others = [name for name in FAMILIES if name != nearest]
    first = f"{nearest!r} (the nearest to it), " if nearest else ""
    raise CourseError(
        f"{path}: model_type {shown(model_type)} is not supported: choose a checkpoint whose "
        f"model_type is {first}{', '.join(map(repr, others[:-1]))} or {others[-1]!r}"
    )


def _nearest(model_type: str) -> str | None:
    beginnings = [name for name in FAMILIES if model_type.startswith(name)]
    if beginnings:
        return max(beginnings, key=len)
    close = difflib.get_close_matches(model_type[:40], FAMILIES, n=1, cutoff=0.7)
    if close:
        return close[0]
    return next((kin for name, kin in _KIN.items() if model_type.startswith(name)), None)


def text_keys(raw: Mapping[str, Any], family: Family, path: Path) -> ConfigKeys:
    """The keys that describe the language model, all that would be computed wrongly refused."""
    whole = ConfigKeys(raw, path, family.defaults)
    if family.text_config is None:
        _refuse_unsupported(whole)
        return whole
    text = raw.get("text_config")
    if not isinstance(text, dict):
        raise whole.refuse("text_config", f"must be an object, got {shown(text)}")
    kind = text.get("model_type", family.text_config)
    if kind != family.text_config:
        raise whole.refuse(
            "text_config.model_type", f"is {shown(kind)}, not {family.text_config!r}")
    _refuse_unsupported(ConfigKeys(
        {key: raw.get(key) for key in ("architectures", "quantization_config")}, path, {}))
    # Whether output and embedding are one matrix is said of the whole model; so may the end be.
    said = {key: raw[key] for key in ("tie_word_embeddings",) if raw.get(key) is not None}
    end = {key: raw[key] for key in ("eos_token_id",) if text.get(key) is None and key in raw}
    nested = ConfigKeys(text | said | end, path, family.defaults, "text_config.")
    _refuse_unsupported(nested)
    return nested


def _refuse_unsupported(keys: ConfigKeys) -> None:
    """CourseError for what these families can ask for and this engine does not compute."""
    raw = keys.raw
    refused = {
        "architectures": not _generates(raw.get("architectures")),
        "hidden_act": raw.get("hidden_act") not in (None, "silu"),
        "attention_bias": bool(raw.get("attention_bias")),
        "mlp_bias": bool(raw.get("mlp_bias")),
        "use_sliding_window":
            bool(raw.get("use_sliding_window")) and raw.get("sliding_window", 4096) is not None,
        "layer_types": not _all_full_attention(raw.get("layer_types")),
        "per_layer_config": bool(raw.get("per_layer_config")),
        "partial_rotary_factor": raw.get("partial_rotary_factor") not in (None, 1),
        "quantization_config": raw.get("quantization_config") is not None,
    }
    for key, bad in refused.items():
        if bad:
            raise keys.refuse(
                key, f"= {shown(raw[key] if key in raw else None)} is not supported",
                "choose an unquantized checkpoint that generates text, with full attention, whole "
                "RoPE, no bias and the silu activation")


def _generates(architectures: Any) -> bool:
    """Whether the model is one that continues text, not one that ranks or classifies."""
    if architectures in (None, []):
        return True
    return isinstance(architectures, list) and any(
        isinstance(name, str) and name.endswith(("ForCausalLM", "ForConditionalGeneration"))
        for name in architectures)


def _all_full_attention(layer_types: Any) -> bool:
    if layer_types is None:
        return True
    return isinstance(layer_types, list) and all(kind == "full_attention" for kind in layer_types)
