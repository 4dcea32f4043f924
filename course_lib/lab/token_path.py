"""One token's way through a model, step by step: what `Session.step` does in fused calls, spelled
out so that every number on the way can be looked at, and the softmax can be replaced."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from course_lib import attention
from course_lib.attention import kv_head
from course_lib.engine.layers import linear, rms_norm, rope_tables, silu_mul, split_heads
from course_lib.engine.model import Model, rows_of
from course_lib.engine.prefill import float_rows
from course_lib.engine.weights import DenseMLP
from course_lib.kvcache import KVCache

Softmax = Callable[[np.ndarray], np.ndarray]

LAYER_STAGES = ("norm", "qkv", "rotate", "cache", "scores", "weights", "context", "attention",
                "inner", "mlp")
ENDS = ("embed", "final_norm", "logits")


class Stage(NamedTuple):
    """One step: its name, its layer (None before and behind the layers), and what it computed."""

    name: str
    layer: int | None
    values: np.ndarray


def token_path(model: Model, cache: KVCache, token: int,
               softmax: Softmax = attention.softmax) -> list[Stage]:
    """Feed `token` to `cache` and return every stage on its way to the logits, in order.

    `softmax` turns float32 scores `[n]` into weights. For models whose layers have one SwiGLU.
    """
    config, weights = model.config, model.weights
    heads, kv_heads, d = (config.num_attention_heads, config.num_key_value_heads, config.head_dim)
    eps = config.rms_norm_eps
    cos, sin = rope_tables(np.array([cache.length]), d, config.rope_theta, config.rope)
    x = rows_of(weights.embedding, [token])
    path = [Stage("embed", None, x[0])]
    for layer, w in enumerate(weights.layers):
        assert isinstance(w.mlp, DenseMLP)
        normed = rms_norm(x, w.input_norm, eps)
        qkv = linear(normed, w.qkv_proj).reshape(1, -1, d)
        q = np.empty((heads, 1, d), np.float32)
        k, v = np.empty((2, kv_heads, 1, d), np.float32)
        split_heads(qkv, w.q_norm, w.k_norm, eps, cos, sin, q, k, v)
        cache.append(layer, k, v)
        keys, values, *_ = cache.rows(layer)
        kv = [kv_head(h, heads, kv_heads) for h in range(heads)]
        scores = np.stack([keys[kv[h]] @ q[h, 0] for h in range(heads)])
        scores *= np.float32(1 / math.sqrt(d))
        shares = np.stack([softmax(row) for row in scores])
        context = np.stack([shares[h] @ values[kv[h]] for h in range(heads)])
        x = x + linear(context.reshape(1, -1), w.o_proj)
        after_attention = x[0]
        stacked = linear(rms_norm(x, w.post_attention_norm, eps), w.mlp.gate_up_proj)
        half = stacked.shape[-1] // 2
        inner = silu_mul(stacked[:, :half], stacked[:, half:])
        x = x + linear(inner, w.mlp.down_proj)
        found = (normed[0], qkv[0], q[:, 0], keys, scores, shares, context, after_attention,
                 inner[0], x[0])
        path += [Stage(name, layer, a) for name, a in zip(LAYER_STAGES, found, strict=True)]
    path.append(Stage("final_norm", None, rms_norm(x, weights.final_norm, eps)[0]))
    path.append(Stage("logits", None, model.logits(x[0])))
    return path


def best_token(path: Sequence[Stage]) -> int:
    """The id of the largest logit at the end of a path, the lowest id on a tie."""
    return int(np.argmax(path[-1].values))


def with_value_of(cache: KVCache, other: KVCache, layer: int, token: int) -> KVCache:
    """A float32 copy of `cache` in which one token's value rows in one layer are those of `other`.

    So one can ask what depends on them. Both hold as many tokens of the same model.
    """
    made = KVCache(cache.num_layers, cache.num_kv_heads, cache.head_dim,
                   block_size=cache.block_size)
    for at in range(cache.num_layers):
        keys, values = float_rows(cache.rows(at))
        if at == layer:
            values = values.copy()
            values[:, token] = float_rows(other.rows(at))[1][:, token]
        made.append(at, keys, values)
    return made


def answer_with(model: Model, ids: Sequence[int], softmax: Softmax, most: int = 16) -> list[int]:
    """Greedy answer to a prompt, each token taken along `token_path` with this softmax.

    Ends before an end token or after `most` tokens. Raises what the engine raises where numbers are
    no longer finite.
    """
    config = model.config
    cache = KVCache(config.num_hidden_layers, config.num_key_value_heads, config.head_dim)
    path: list[Stage] = []
    for token in ids:
        path = token_path(model, cache, token, softmax)
    answer: list[int] = []
    while len(answer) < most and (token := best_token(path)) not in config.eos_token_ids:
        answer.append(token)
        path = token_path(model, cache, token, softmax)
    return answer


def ordered_path(shuffled: Iterable[tuple[str, int | None]], sizes: Mapping[str, int],
                 cached: int) -> list[tuple[str, int | None, tuple[int, ...]]]:
    """Stages (name, layer) in the order in which a token meets them, each with its shape.

    sizes: "hidden", "heads", "kv_heads", "head_dim", "inner", "vocab"; cached: tokens that are in
    the cache before this one. Raises ValueError for a name that is no stage.
    """
    rows, d, hidden = cached + 1, sizes["head_dim"], (sizes["hidden"],)
    heads, kv_heads = sizes["heads"], sizes["kv_heads"]
    shapes: dict[str, tuple[int, ...]] = {
        "embed": hidden, "norm": hidden, "qkv": (heads + 2 * kv_heads, d), "rotate": (heads, d),
        "cache": (kv_heads, rows, d), "scores": (heads, rows), "weights": (heads, rows),
        "context": (heads, d), "attention": hidden, "inner": (sizes["inner"],), "mlp": hidden,
        "final_norm": hidden, "logits": (sizes["vocab"],),
    }

    def place(stage: tuple[str, int | None]) -> tuple[int, int, int]:
        name, layer = stage
        if name not in shapes:
            raise ValueError(f"{name!r} is no stage of a token's path.")
        if layer is None:
            return (-1, 0, 0) if name == "embed" else (1, 0, ENDS.index(name))
        return 0, layer, LAYER_STAGES.index(name)

    return [(*stage, shapes[stage[0]]) for stage in sorted(shuffled, key=place)]
