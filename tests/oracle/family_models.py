"""Tiny random models of every family that the engine computes, made by transformers."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from safetensors.numpy import load_file, save_file

TEXT = {
    "vocab_size": 300,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 512,
    "eos_token_id": 2,
}
MOE = {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 40}
MROPE = {"rope_type": "default", "rope_theta": 5e6, "mrope_section": [4, 2, 2],
         "mrope_interleaved": True}
YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0,
        "original_max_position_embeddings": 128}
LINEAR = {"rope_type": "linear", "rope_theta": 1e4, "factor": 3.0}
LLAMA3 = {"rope_type": "llama3", "rope_theta": 5e5, "factor": 8.0, "low_freq_factor": 1.0,
          "high_freq_factor": 4.0, "original_max_position_embeddings": 64}
VISION = {"depth": 1, "hidden_size": 8, "intermediate_size": 8, "num_heads": 2, "patch_size": 2,
          "num_position_embeddings": 4, "deepstack_visual_indexes": [0]}
# name -> family, changes to TEXT, what save_pretrained is told
CASES = {
    "qwen3, sharded": ("Qwen3", {}, {"max_shard_size": "40KB"}),
    "qwen3, tied, sharded": ("Qwen3", {"tie_word_embeddings": True}, {"max_shard_size": "60KB"}),
    "qwen3, yarn": ("Qwen3", {"rope_parameters": YARN}, {}),
    "qwen3, yarn, its own attention factor": (
        "Qwen3", {"rope_parameters": YARN | {"attention_factor": 0.8, "beta_fast": 16.0}}, {}),
    "qwen3, linear rope": ("Qwen3", {"rope_parameters": LINEAR}, {}),
    "qwen3-vl, tied, sharded": (
        "Qwen3VL", {"rope_parameters": MROPE, "tie_word_embeddings": True},
        {"max_shard_size": "60KB"}),
    "qwen3-vl, untied": ("Qwen3VL", {"rope_parameters": MROPE}, {}),
    "qwen3-moe": ("Qwen3Moe", MOE, {}),
    "qwen3-moe, weights sum to 1, sharded": (
        "Qwen3Moe", MOE | {"norm_topk_prob": True, "num_experts_per_tok": 3},
        {"max_shard_size": "60KB"}),
    "qwen3-moe, two dense layers": (
        "Qwen3Moe", MOE | {"norm_topk_prob": True, "mlp_only_layers": [0, 2]}, {}),
    "qwen3-moe, every other layer": ("Qwen3Moe", MOE | {"decoder_sparse_step": 2}, {}),
    "qwen3-moe, one expert, tied": (
        "Qwen3Moe", MOE | {"num_experts_per_tok": 1, "tie_word_embeddings": True}, {}),
    "qwen3-vl-moe": ("Qwen3VLMoe", MOE | {"rope_parameters": MROPE}, {}),
    "llama, untied": ("Llama", {"head_dim": None}, {}),
    "llama, tied, wide heads, sharded": (
        "Llama", {"tie_word_embeddings": True, "head_dim": 24, "num_key_value_heads": 1},
        {"max_shard_size": "60KB"}),
    "llama, llama3 rope": ("Llama", {"rope_parameters": LLAMA3}, {}),
}


def random_model(family, changes, seed):
    """transformers' model of TEXT with `changes`, its attention and routing far from uniform."""
    import torch
    import transformers

    options = TEXT | changes
    vision = "VL" in family
    if vision:
        config_class = getattr(transformers, f"{family}Config")
        tied = options.pop("tie_word_embeddings", False)
        config = config_class(
            text_config=options, vision_config=VISION | {"out_hidden_size": options["hidden_size"]},
            tie_word_embeddings=tied)
    else:
        config = getattr(transformers, f"{family}Config")(**options)
    torch.manual_seed(seed)
    kind = "ForConditionalGeneration" if vision else "ForCausalLM"
    model = getattr(transformers, family + kind)(config)
    with torch.no_grad():
        for name, p in model.named_parameters():
            if p.dim() >= 2:
                # A router's scores twice as far apart, so that the choice of experts matters; still
                # farther, and rounding a score would change a weight more than the tolerance says.
                wide = 2.0 if name.endswith("gate.weight") else 1.0
                p.normal_(std=p.shape[-1] ** -0.5 * wide)
            else:
                final = name in ("model.norm.weight", "model.language_model.norm.weight")
                p.normal_(4.0 if final else 1.3, 0.3)
    return model.eval()


def transpose_experts(path: Path) -> None:
    """Turn a saved Qwen3-VL-MoE's experts as they are published: `[experts, in, out]`."""
    tensors = load_file(path)
    for name, tensor in tensors.items():
        if tensor.ndim == 3 and "mlp.experts." in name:
            tensors[name] = np.ascontiguousarray(tensor.transpose(0, 2, 1))
    save_file(tensors, path, metadata={"format": "pt"})
