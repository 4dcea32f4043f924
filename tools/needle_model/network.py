"""Qwen3 in PyTorch, only what training needs; exported under Hugging Face's tensor names."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.nn import functional as F


@dataclass(frozen=True)
class Shape:
    """Sizes of the network; the defaults are those of the shipped model."""

    vocab: int
    hidden: int = 160
    layers: int = 3
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 64
    mlp: int = 448
    theta: float = 1e5
    eps: float = 1e-6
    context: int = 4096


class RMSNorm(nn.Module):
    def __init__(self, size: int, eps: float):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        x32 = x.float()
        return x32 * torch.rsqrt(x32.pow(2).mean(-1, keepdim=True) + self.eps) * self.weight


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    half = x.shape[-1] // 2
    return x * cos + torch.cat((-x[..., half:], x[..., :half]), -1) * sin


class Attention(nn.Module):
    def __init__(self, s: Shape):
        super().__init__()
        self.s = s
        self.q_proj = nn.Linear(s.hidden, s.heads * s.head_dim, bias=False)
        self.k_proj = nn.Linear(s.hidden, s.kv_heads * s.head_dim, bias=False)
        self.v_proj = nn.Linear(s.hidden, s.kv_heads * s.head_dim, bias=False)
        self.o_proj = nn.Linear(s.heads * s.head_dim, s.hidden, bias=False)
        self.q_norm = RMSNorm(s.head_dim, s.eps)
        self.k_norm = RMSNorm(s.head_dim, s.eps)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        b, n, _ = x.shape
        s = self.s
        q = self.q_norm(self.q_proj(x).view(b, n, s.heads, s.head_dim)).transpose(1, 2)
        k = self.k_norm(self.k_proj(x).view(b, n, s.kv_heads, s.head_dim)).transpose(1, 2)
        v = self.v_proj(x).view(b, n, s.kv_heads, s.head_dim).transpose(1, 2)
        q, k = rotate(q, cos, sin), rotate(k, cos, sin)
        group = s.heads // s.kv_heads
        k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
        out = F.scaled_dot_product_attention(q.to(v.dtype), k.to(v.dtype), v, is_causal=True)
        return self.o_proj(out.transpose(1, 2).reshape(b, n, -1)), q, k


class Layer(nn.Module):
    def __init__(self, s: Shape):
        super().__init__()
        self.input_layernorm = RMSNorm(s.hidden, s.eps)
        self.self_attn = Attention(s)
        self.post_attention_layernorm = RMSNorm(s.hidden, s.eps)
        self.mlp = nn.ModuleDict(
            {
                "gate_proj": nn.Linear(s.hidden, s.mlp, bias=False),
                "up_proj": nn.Linear(s.hidden, s.mlp, bias=False),
                "down_proj": nn.Linear(s.mlp, s.hidden, bias=False),
            }
        )

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        attended, q, k = self.self_attn(self.input_layernorm(x), cos, sin)
        x = x + attended
        h = self.post_attention_layernorm(x)
        h = self.mlp["down_proj"](F.silu(self.mlp["gate_proj"](h)) * self.mlp["up_proj"](h))
        return x + h, q, k


class Network(nn.Module):
    """The whole model; `forward` gives final hidden states and each layer's rotated q and k."""

    def __init__(self, shape: Shape):
        super().__init__()
        self.shape = shape
        self.embed_tokens = nn.Embedding(shape.vocab, shape.hidden)
        self.layers = nn.ModuleList(Layer(shape) for _ in range(shape.layers))
        self.norm = RMSNorm(shape.hidden, shape.eps)
        for name, p in self.named_parameters():
            if p.dim() == 2:
                scale = 0.5 / (2 * shape.layers) ** 0.5 if "o_proj" in name or "down" in name else 1
                nn.init.normal_(p, std=scale * (0.05 if "embed" in name else p.shape[1] ** -0.5))

    def forward(self, ids: Tensor) -> tuple[Tensor, list[tuple[Tensor, Tensor]]]:
        s = self.shape
        freq = s.theta ** (-torch.arange(0, s.head_dim, 2).float() / s.head_dim)
        angle = torch.outer(torch.arange(ids.shape[1]).float(), freq)
        cos, sin = (torch.cat((f(angle), f(angle)), -1) for f in (torch.cos, torch.sin))
        x = self.embed_tokens(ids)
        heads = []
        for layer in self.layers:
            x, q, k = layer(x, cos, sin)
            heads.append((q, k))
        return self.norm(x), heads

    def logits(self, hidden: Tensor) -> Tensor:
        return F.linear(hidden, self.embed_tokens.weight).float()


def export(network: Network, folder: Path) -> None:
    """Write config.json, generation_config.json and model.safetensors (float16) into `folder`."""
    s = network.shape
    tensors = {
        "model." + name: p.detach().to(torch.float16).contiguous()
        for name, p in network.state_dict().items()
    }
    path = folder / "model.safetensors"
    save_file(tensors, str(path), metadata={"format": "pt"})
    path.chmod(0o644)  # safetensors writes it for the owner alone
    config = {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "vocab_size": s.vocab,
        "hidden_size": s.hidden,
        "num_hidden_layers": s.layers,
        "num_attention_heads": s.heads,
        "num_key_value_heads": s.kv_heads,
        "head_dim": s.head_dim,
        "intermediate_size": s.mlp,
        "hidden_act": "silu",
        "max_position_embeddings": s.context,
        "rope_theta": s.theta,
        "rope_scaling": None,
        "rms_norm_eps": s.eps,
        "attention_bias": False,
        "attention_dropout": 0.0,
        "tie_word_embeddings": True,
        "use_sliding_window": False,
        "torch_dtype": "float16",
        "bos_token_id": None,
        "pad_token_id": 0,
        "eos_token_id": 2,
    }
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    generation = {"eos_token_id": 2, "pad_token_id": 0, "do_sample": False}
    (folder / "generation_config.json").write_text(json.dumps(generation, indent=2) + "\n")
