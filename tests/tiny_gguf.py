"""Small GGUF files for tests, written by the gguf package from the tensors of a tiny checkpoint."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import gguf
import numpy as np

from tests.tiny_checkpoint import BASE_CONFIG, CHAT_TEMPLATE, random_tensors, tiny_tokenizer

KINDS = ("F32", "F16", "BF16", "Q8_0", "Q4_0", "Q4_1")
# Rows that divide into blocks of 32.
CONFIG = BASE_CONFIG | {"hidden_size": 64, "intermediate_size": 96, "head_dim": 16}
LLAMA = CONFIG | {"model_type": "llama", "architectures": ["LlamaForCausalLM"]}
MOE = CONFIG | {
    "model_type": "qwen3_moe", "architectures": ["Qwen3MoeForCausalLM"], "num_experts": 4,
    "num_experts_per_tok": 2, "moe_intermediate_size": 32, "norm_topk_prob": True,
}
ARCHITECTURES = {"qwen3": gguf.MODEL_ARCH.QWEN3, "llama": gguf.MODEL_ARCH.LLAMA,
                 "qwen3_moe": gguf.MODEL_ARCH.QWEN3MOE}


def tensors_of(config: dict, seed: int = 0) -> dict[str, np.ndarray]:
    """The tensors of a checkpoint of any of the three families, in Hugging Face's order."""
    tensors = random_tensors(config, seed)
    if config["model_type"] == "llama":
        return {name: x for name, x in tensors.items() if "q_norm" not in name
                and "k_norm" not in name}
    if config["model_type"] == "qwen3_moe":
        tensors = {name: x for name, x in tensors.items() if ".mlp." not in name}
        rng = np.random.default_rng(seed + 1)
        hidden, inner = config["hidden_size"], config["moe_intermediate_size"]

        def matrix(rows: int, columns: int) -> np.ndarray:
            return (rng.standard_normal((rows, columns)) / columns**0.5).astype(np.float32)

        for layer in range(config["num_hidden_layers"]):
            p = f"model.layers.{layer}.mlp."
            tensors[p + "gate.weight"] = matrix(config["num_experts"], hidden)
            for expert in range(config["num_experts"]):
                tensors |= {
                    f"{p}experts.{expert}.gate_proj.weight": matrix(inner, hidden),
                    f"{p}experts.{expert}.up_proj.weight": matrix(inner, hidden),
                    f"{p}experts.{expert}.down_proj.weight": matrix(hidden, inner),
                }
    return tensors


def neighbour_pairs(rows: np.ndarray, heads: int) -> np.ndarray:
    """Rows of q or k in llama.cpp's order: each head's row i beside its row i + d/2."""
    d = len(rows) // heads
    order = [head * d + half * (d // 2) + i
             for head in range(heads) for i in range(d // 2) for half in (0, 1)]
    return rows[order]


def write_gguf(
    path: Path,
    config: dict = CONFIG,
    tensors: dict[str, np.ndarray] | None = None,
    kind: str = "F32",
    tokenizer: dict[str, Any] | None = None,
    extra: dict[str, np.ndarray] | None = None,
    **metadata: Any,
) -> dict[str, np.ndarray]:
    """Write a GGUF file of `config`; matrices in `kind`, norms and routers in F32.

    `tokenizer`: other values of tokenizer.ggml.… keys, `metadata`: of the architecture's keys with
    "__" for "."; None leaves a key out. `extra`: more tensors, under the file's names. Returns the
    tensors that were written, in Hugging Face's order.
    """
    tensors = tensors_of(config) if tensors is None else tensors
    family = config["model_type"]
    architecture = ARCHITECTURES[family]
    writer = gguf.GGUFWriter(path, gguf.MODEL_ARCH_NAMES[architecture])
    for key, value in _metadata(config, metadata).items():
        add_value(writer, f"{writer.arch}.{key}", value)
    for key, value in (tokenizer_metadata() | (tokenizer or {})).items():
        add_value(writer, key, value)
    names = gguf.get_tensor_name_map(architecture, config["num_hidden_layers"])
    for name, x in _stacked_experts(tensors, config).items():
        heads = {"q_proj": config["num_attention_heads"],
                 "k_proj": config["num_key_value_heads"]}.get(name.split(".")[-2], 0)
        x = neighbour_pairs(x, heads) if family == "llama" and heads else x
        theirs = names.get_name(name, try_suffixes=(".weight",))
        assert theirs is not None, name
        add_tensor(writer, theirs, x, kind if x.ndim > 1 and "gate_inp" not in theirs else "F32")
    for name, x in (extra or {}).items():
        add_tensor(writer, name, x, "F32")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return tensors


def add_value(writer: gguf.GGUFWriter, key: str, value: Any) -> None:
    if isinstance(value, bool):
        writer.add_bool(key, value)
    elif isinstance(value, int):
        writer.add_uint32(key, value)
    elif isinstance(value, float):
        writer.add_float32(key, value)
    elif isinstance(value, str):
        writer.add_string(key, value)
    elif value is not None:
        writer.add_array(key, value)


def add_tensor(writer: gguf.GGUFWriter, name: str, x: np.ndarray, kind: str) -> None:
    qtype = gguf.GGMLQuantizationType[kind]
    writer.add_tensor(name, gguf.quantize(x, qtype), raw_dtype=qtype)


def _metadata(config: dict, changes: dict[str, Any]) -> dict[str, Any]:
    values = {
        "vocab_size": config["vocab_size"],
        "context_length": config["max_position_embeddings"],
        "embedding_length": config["hidden_size"],
        "feed_forward_length": config["intermediate_size"],
        "block_count": config["num_hidden_layers"],
        "attention.head_count": config["num_attention_heads"],
        "attention.head_count_kv": config["num_key_value_heads"],
        "attention.key_length": config["head_dim"],
        "attention.value_length": config["head_dim"],
        "attention.layer_norm_rms_epsilon": config["rms_norm_eps"],
        "rope.freq_base": config["rope_theta"],
        "rope.dimension_count": config["head_dim"],
    }
    if "num_experts" in config:
        values |= {"expert_count": config["num_experts"],
                   "expert_used_count": config["num_experts_per_tok"],
                   "expert_feed_forward_length": config["moe_intermediate_size"]}
    return values | {key.replace("__", "."): value for key, value in changes.items()}


def tokenizer_metadata() -> dict[str, Any]:
    """What a converter writes of the tiny tokenizer."""
    model = json.loads(tiny_tokenizer().to_str())["model"]
    tokens = sorted(model["vocab"], key=model["vocab"].get)
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "gpt-2",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [3, 3, 3] + [1] * (len(tokens) - 3),
        "tokenizer.ggml.merges": [" ".join(merge) for merge in model["merges"]],
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.padding_token_id": 0,
        "tokenizer.chat_template": CHAT_TEMPLATE,
    }


def _stacked_experts(tensors: dict[str, np.ndarray], config: dict) -> dict[str, np.ndarray]:
    """The matrices of all experts of a layer in one, as llama.cpp wants them."""
    if "num_experts" not in config:
        return tensors
    stacked = {name: x for name, x in tensors.items() if ".experts." not in name}
    for layer in range(config["num_hidden_layers"]):
        p = f"model.layers.{layer}.mlp.experts."
        for part in ("gate_proj", "up_proj", "down_proj"):
            stacked[f"{p}{part}.weight"] = np.stack(
                [tensors[f"{p}{e}.{part}.weight"] for e in range(config["num_experts"])])
    return stacked
