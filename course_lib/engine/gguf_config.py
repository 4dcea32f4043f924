"""The hyperparameters in a GGUF file's metadata."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from course_lib.engine.config import ModelConfig, MoEConfig
from course_lib.engine.config_keys import ConfigKeys, shown
from course_lib.engine.families import FAMILIES
from course_lib.engine.gguf_header import REMEDY
from course_lib.engine.gguf_source import GgufSource
from course_lib.engine.rope import RopeScaling
from course_lib.engine.weights import EMBEDDING, OUTPUT
from course_lib.errors import CourseError

ARCHITECTURES = {"llama": "llama", "qwen3": "qwen3", "qwen3moe": "qwen3_moe"}
"""llama.cpp's name of an architecture -> model_type."""
# Where all Llama models since 3.1 keep or stretch frequencies, as their config.json says.
LLAMA3_CONTEXT, LLAMA3_LOW, LLAMA3_HIGH = 8192, 1.0, 4.0
# Keys of RoPE scaling -> Hugging Face's, and those that change nothing at this value.
SCALING = {
    "type": "rope_type",
    "factor": "factor",
    "original_context_length": "original_max_position_embeddings",
    "yarn_beta_fast": "beta_fast",
    "yarn_beta_slow": "beta_slow",
}
NEUTRAL = {"attn_factor": 1.0, "yarn_attn_factor": 1.0, "yarn_ext_factor": 1.0}


class _Keys(ConfigKeys):
    """The metadata of one architecture."""

    def refuse(self, key: str, problem: str, remedy: str = REMEDY) -> CourseError:
        return super().refuse(key, problem, remedy)


def gguf_config(source: GgufSource) -> ModelConfig:
    """The config of a GGUF file.

    Raises CourseError naming the file, the key and the remedy for another architecture and for
    anything that the engine would compute wrongly.
    """
    path, metadata = source.path, source.metadata
    architecture = metadata.get("general.architecture")
    family = ARCHITECTURES.get(architecture) if isinstance(architecture, str) else None
    if family is None:
        raise CourseError(
            f"{path}: architecture {shown(architecture)} is not supported: choose a model of "
            f"{', '.join(ARCHITECTURES)}"
        )
    prefix = f"{architecture}."
    keys = _Keys({key.removeprefix(prefix): value for key, value in metadata.items()
                  if key.startswith(prefix)}, path, {"rope.freq_base": 10_000.0}, prefix)
    hidden, heads = keys.count("embedding_length"), keys.count("attention.head_count")
    context = keys.count("context_length")
    moe = _experts(keys) if FAMILIES[family].experts else None
    if moe is None and keys.get("expert_count"):
        raise keys.refuse("expert_count", f"is {shown(keys.get('expert_count'))}, in this "
                          "architecture experts are not supported", "choose another model")
    embedding = source.stored.get(EMBEDDING)
    config = ModelConfig(
        vocab_size=keys.count("vocab_size", default=embedding.shape[0] if embedding else None),
        hidden_size=hidden,
        intermediate_size=keys.count(
            "feed_forward_length", default=moe.intermediate_size if moe else None),
        num_hidden_layers=keys.count("block_count"),
        num_attention_heads=heads,
        num_key_value_heads=keys.count("attention.head_count_kv", default=heads),
        head_dim=_head_dim(keys, hidden, heads),
        max_position_embeddings=context,
        rms_norm_eps=keys.positive("attention.layer_norm_rms_epsilon"),
        rope_theta=keys.positive("rope.freq_base"),
        tie_word_embeddings=OUTPUT not in source.stored,
        eos_token_ids=_ends(ConfigKeys(metadata, path, {})),
        family=family,
        qk_norm=FAMILIES[family].qk_norm,
        rope=_rope(keys, context),
        moe=moe,
    )
    config.check(path)
    return _with_stretched_frequencies(config, source)


def _head_dim(keys: ConfigKeys, hidden: int, heads: int) -> int:
    head_dim = keys.count("attention.key_length", default=max(hidden // heads, 1))
    for key in ("attention.value_length", "rope.dimension_count"):
        if keys.count(key, default=head_dim) != head_dim:
            raise keys.refuse(key, f"is {keys.get(key)}, not the head's {head_dim}: this is not "
                              "supported", "choose another model")
    return head_dim


def _experts(keys: ConfigKeys) -> MoEConfig:
    # llama.cpp makes the weights of a token's experts sum to 1 in this architecture.
    return MoEConfig(keys.count("expert_count"), keys.count("expert_used_count"),
                     keys.count("expert_feed_forward_length"), norm_topk_prob=True)


def _ends(keys: ConfigKeys) -> tuple[int, ...]:
    """The tokens that end a text and a turn."""
    ends: list[int] = []
    for name in ("eos", "eot"):
        ends += keys.integers(f"tokenizer.ggml.{name}_token_id", "a token id")
    return tuple(dict.fromkeys(ends))


def _rope(keys: ConfigKeys, context: int) -> RopeScaling | None:
    """The scaling that `rope.scaling.…` asks for."""
    given: dict[str, Any] = {}
    for key, value in keys.raw.items():
        name = key.removeprefix("rope.scaling.")
        if name == key or name == "finetuned":
            continue
        if name in SCALING:
            given[SCALING[name]] = value
        elif value != NEUTRAL.get(name):
            raise keys.refuse(key, f"is {shown(value)}: this is not supported",
                              "choose another model")
    if given.get("rope_type", "none") == "none":
        return None
    return RopeScaling.from_parameters(given, keys.path, max_position_embeddings=context)


def _with_stretched_frequencies(config: ModelConfig, source: GgufSource) -> ModelConfig:
    """The config with the scaling of Llama 3.1 and later, which its GGUF files hold as one divisor
    for each frequency. Raises CourseError for divisors that no such model has."""
    divisors = source.rope_divisors()
    if divisors is None:
        return config
    unknown = CourseError(
        f"{source.path}: tensor rope_freqs.weight scales RoPE in a way that is not known: choose "
        "another model"
    )
    if len(divisors) != config.head_dim // 2:  # before arrays for a head_dim that lies
        raise unknown
    scaling = RopeScaling("llama3", float(np.max(divisors, initial=1.0)), LLAMA3_CONTEXT,
                          low_freq_factor=LLAMA3_LOW, high_freq_factor=LLAMA3_HIGH)
    exponents = np.arange(0, config.head_dim, 2, dtype=np.float32) / np.float32(config.head_dim)
    powers = np.power(np.float32(config.rope_theta), exponents)
    expected = np.float32(1) / (powers * scaling.stretched(powers, config.rope_theta))
    if not np.allclose(divisors, expected, 1e-4, 0):
        raise unknown
    return replace(config, rope=scaling)
