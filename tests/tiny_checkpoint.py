"""Tiny random Qwen3 checkpoints for tests, and a literal float64 Qwen3 to compare with.

`reference_logits` is written for reading, one scalar formula at a time, and shares no code with
the engine: an error in the engine cannot hide in it.
"""

from __future__ import annotations

import hashlib
import json
import math
from pathlib import Path

import numpy as np
from safetensors.numpy import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from course_lib.engine import Engine
from course_lib.engine.config import ModelConfig
from course_lib.engine.tensor_source import Stored

CONTROL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
CHAT_TEMPLATE = (
    "{%- for message in messages %}\n"
    "    {{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}\n"
    "{%- endfor %}\n"
    "{%- if add_generation_prompt %}\n    {{- '<|im_start|>assistant\\n' }}\n{%- endif %}\n"
)

BASE_CONFIG = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "vocab_size": 300,
    "hidden_size": 24,
    "intermediate_size": 40,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "hidden_act": "silu",
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "tie_word_embeddings": True,
    "eos_token_id": 2,
}


def random_tensors(config: dict, seed: int = 0) -> dict[str, np.ndarray]:
    """Weights large enough that attention is far from uniform, so that a wrong one shows."""
    rng = np.random.default_rng(seed)
    hidden, inner, d = config["hidden_size"], config["intermediate_size"], config["head_dim"]
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]

    def matrix(rows: int, columns: int) -> np.ndarray:
        return (rng.standard_normal((rows, columns)) / math.sqrt(columns)).astype(np.float32)

    def gain(size: int, around: float) -> np.ndarray:
        return (around + 0.3 * rng.standard_normal(size)).astype(np.float32)

    tensors = {"model.embed_tokens.weight": matrix(config["vocab_size"], hidden)}
    for layer in range(config["num_hidden_layers"]):
        p = f"model.layers.{layer}."
        tensors |= {
            p + "input_layernorm.weight": gain(hidden, 1.0),
            p + "self_attn.q_proj.weight": matrix(heads * d, hidden),
            p + "self_attn.k_proj.weight": matrix(kv_heads * d, hidden),
            p + "self_attn.v_proj.weight": matrix(kv_heads * d, hidden),
            p + "self_attn.o_proj.weight": matrix(hidden, heads * d),
            p + "self_attn.q_norm.weight": gain(d, 1.5),
            p + "self_attn.k_norm.weight": gain(d, 1.5),
            p + "post_attention_layernorm.weight": gain(hidden, 1.0),
        }
        mlps = {p + "mlp.": inner}
        if experts := config.get("num_experts"):
            tensors[p + "mlp.gate.weight"] = matrix(experts, hidden)
            width = config["moe_intermediate_size"]
            mlps = {f"{p}mlp.experts.{expert}.": width for expert in range(experts)}
        for prefix, width in mlps.items():
            tensors |= {
                prefix + "gate_proj.weight": matrix(width, hidden),
                prefix + "up_proj.weight": matrix(width, hidden),
                prefix + "down_proj.weight": matrix(hidden, width),
            }
    tensors["model.norm.weight"] = gain(hidden, 4.0)
    if not config["tie_word_embeddings"]:
        tensors["lm_head.weight"] = matrix(config["vocab_size"], hidden)
    return tensors


class ArraySource:
    """A TensorSource of arrays in memory."""

    path = Path("arrays")

    def __init__(self, tensors: dict[str, np.ndarray]):
        self.tensors = tensors
        self.stored = {name: Stored("F32", x.shape) for name, x in tensors.items()}

    def read(self, name: str) -> np.ndarray:
        return self.tensors[name]

    def read_rows(self, name: str, first: int, last: int) -> np.ndarray:
        return self.tensors[name][first:last]

    def blocks(self, name: str, kind: str) -> None:
        return None

    def fingerprint(self) -> str:
        return "arrays"


def tiny_tokenizer() -> Tokenizer:
    """Byte-level BPE with three control tokens, the 256 bytes and a few merges."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {token: i for i, token in enumerate(CONTROL_TOKENS)}
    vocab |= {letter: len(CONTROL_TOKENS) + i for i, letter in enumerate(alphabet)}
    merges = [("h", "e"), ("l", "l"), ("he", "ll"), ("i", "m"), ("<", "|"), ("Ċ", "Ċ"), ("Ġ", "a")]
    vocab |= {left + right: len(vocab) + i for i, (left, right) in enumerate(merges)}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(list(CONTROL_TOKENS))
    return tokenizer


def write_checkpoint(
    folder: Path, tensors: dict[str, np.ndarray] | None = None, seed: int = 0, **changes
) -> dict:
    """Write a checkpoint of BASE_CONFIG with `changes` into `folder`; returns the config."""
    config = BASE_CONFIG | changes
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    write_tokenizer(folder)
    save_file(
        random_tensors(config, seed) if tensors is None else tensors, folder / "model.safetensors"
    )
    return config


def tiny_engine(tmp_path_factory, **config) -> Engine:
    """A tiny model without an end token, for a fixture of a module."""
    folder = tmp_path_factory.mktemp("tiny")
    write_checkpoint(folder, eos_token_id=None, **config)
    return Engine.load(folder)


def digest_of_weights(folder: Path) -> str:
    """SHA-256 of the folder's safetensors files, in the order of their names."""
    digest = hashlib.sha256()
    for file in sorted(folder.glob("*.safetensors")):
        digest.update(file.read_bytes())
    return digest.hexdigest()


def write_tokenizer(folder: Path) -> None:
    """Write tokenizer.json and tokenizer_config.json (with the chat template) into `folder`."""
    tiny_tokenizer().save(str(folder / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": "<|im_end|>",
        "pad_token": "<|endoftext|>",
        "chat_template": CHAT_TEMPLATE,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))


def logit_tolerance(config: dict, logits: np.ndarray) -> float:
    """How far float32 logits may be from exact ones.

    One rounding of 2^-24 at the largest logit's size for every addition on the longest path from
    a token to a logit; roundings are independent, so N of them add up to sqrt(N) of one (Higham
    and Mary 2019). Times 8: a softmax score of size s turns an error of the score into s times
    that error of a weight, and single logits lie some deviations out.
    """
    hidden, inner, d = config["hidden_size"], config["intermediate_size"], config["head_dim"]
    rows = config["num_attention_heads"] * d
    per_layer = 4 * hidden + inner + rows + 2 * d
    steps = config["num_hidden_layers"] * per_layer + 2 * hidden
    return float(8 * math.sqrt(steps) * 2.0**-24 * np.abs(logits).max())


def longest_path(config: ModelConfig) -> dict[str, int]:
    """The sizes of a ModelConfig as `logit_tolerance` reads them: a mixture adds up its router's
    scores and its experts' results."""
    sizes = {name: getattr(config, name) for name in (
        "hidden_size", "intermediate_size", "head_dim", "num_attention_heads", "num_hidden_layers")}
    if config.moe is not None:
        through = config.hidden_size + config.moe.intermediate_size + config.moe.num_experts
        sizes["intermediate_size"] = max(sizes["intermediate_size"], through)
    return sizes


def reference_logits(config: dict, tensors: dict[str, np.ndarray], ids: list[int]) -> np.ndarray:
    """Logits `[n, vocab]` in float64, from the Qwen3 definition."""
    w = {name: tensor.astype(np.float64) for name, tensor in tensors.items()}
    d, heads, kv_heads = (
        config["head_dim"],
        config["num_attention_heads"],
        config["num_key_value_heads"],
    )
    eps = config["rms_norm_eps"]

    def norm(row: np.ndarray, gain: np.ndarray) -> np.ndarray:
        return row / math.sqrt(sum(value * value for value in row) / len(row) + eps) * gain

    def rotate(row: np.ndarray, position: int) -> np.ndarray:
        out = row.copy()
        for i in range(d // 2):
            angle = position * config["rope_theta"] ** (-2 * i / d)
            a, b = row[i], row[i + d // 2]
            out[i] = a * math.cos(angle) - b * math.sin(angle)
            out[i + d // 2] = a * math.sin(angle) + b * math.cos(angle)
        return out

    x = [w["model.embed_tokens.weight"][token] for token in ids]
    for layer in range(config["num_hidden_layers"]):
        p = f"model.layers.{layer}."
        queries, keys, values = [], [], []
        for position, row in enumerate(x):
            h = norm(row, w[p + "input_layernorm.weight"])
            q = (w[p + "self_attn.q_proj.weight"] @ h).reshape(heads, d)
            k = (w[p + "self_attn.k_proj.weight"] @ h).reshape(kv_heads, d)
            q_gain, k_gain = w[p + "self_attn.q_norm.weight"], w[p + "self_attn.k_norm.weight"]
            queries.append([rotate(norm(head, q_gain), position) for head in q])
            keys.append([rotate(norm(head, k_gain), position) for head in k])
            values.append((w[p + "self_attn.v_proj.weight"] @ h).reshape(kv_heads, d))
        for position, row in enumerate(x):
            context = []
            for head in range(heads):
                kv_head = head // (heads // kv_heads)
                query = queries[position][head]
                scores = [query @ keys[t][kv_head] / math.sqrt(d) for t in range(position + 1)]
                weights = np.exp(np.array(scores) - max(scores))
                weights /= weights.sum()
                context.append(sum(weights[t] * values[t][kv_head] for t in range(position + 1)))
            row = row + w[p + "self_attn.o_proj.weight"] @ np.concatenate(context)
            h = norm(row, w[p + "post_attention_layernorm.weight"])
            gate, up = w[p + "mlp.gate_proj.weight"] @ h, w[p + "mlp.up_proj.weight"] @ h
            x[position] = row + w[p + "mlp.down_proj.weight"] @ (gate / (1 + np.exp(-gate)) * up)
    output = w.get("lm_head.weight", w["model.embed_tokens.weight"])
    return np.stack([output @ norm(row, w["model.norm.weight"]) for row in x])
