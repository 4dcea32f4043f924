"""Every step of a prompt's way through a model, kept, so that two builds can be compared.

`Model.hidden` does the same in fused calls. Here the product with a matrix and what happens to a
query or key row are arguments, so that one of them can be changed and nothing else.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from course_lib.attention import causal_attention
from course_lib.engine.layers import linear, rms_norm, rope, rope_tables, silu_mul
from course_lib.engine.model import Model, rows_of
from course_lib.engine.weights import DenseMLP

Linear = Callable[[np.ndarray, Any], np.ndarray]
"""Rows x `[t, cols]` and weights `[rows, cols]` -> x · wᵀ `[t, rows]`."""

Turn = Callable[[np.ndarray, np.ndarray, float, np.ndarray, np.ndarray], np.ndarray]
"""Heads `[t, heads, d]`, gain `[d]`, eps, cos and sin `[t, d/2]` -> heads, normed and turned."""


def norm_then_turn(rows: np.ndarray, gain: np.ndarray, eps: float, cos: np.ndarray,
                   sin: np.ndarray) -> np.ndarray:
    """What the engine does to a query or key row: RMSNorm over the head, then RoPE."""
    return rope(rms_norm(rows, gain, eps), cos, sin)


def run_stages(
    model: Model,
    ids: Sequence[int],
    *,
    product: Linear = linear,
    turn: Turn = norm_then_turn,
    positions: Sequence[int] | None = None,
) -> list[tuple[str, np.ndarray]]:
    """Run a prompt and return all stages in order as (name, float32 rows of all tokens).

    The last stage, "logits", belongs to the last token only. product: for the four matrices of
    every layer (the output matrix is always the engine's own product). positions: 0, 1, 2, …
    where None. For models with q/k-norm whose layers have one SwiGLU, as the shipped one.
    """
    config, weights = model.config, model.weights
    heads, kv_heads, d = (config.num_attention_heads, config.num_key_value_heads, config.head_dim)
    eps, t = config.rms_norm_eps, len(ids)
    at = np.arange(t) if positions is None else np.asarray(positions)
    cos, sin = rope_tables(at, d, config.rope_theta, config.rope)
    x = rows_of(weights.embedding, ids)
    found = [("embedding", x)]
    for layer, w in enumerate(weights.layers):
        assert isinstance(w.mlp, DenseMLP) and w.q_norm is not None and w.k_norm is not None
        normed = rms_norm(x, w.input_norm, eps)
        qkv = product(normed, w.qkv_proj)
        q, k, v = np.split(qkv.reshape(t, -1, d), (heads, heads + kv_heads), axis=1)
        q, k = turn(q, w.q_norm, eps, cos, sin), turn(k, w.k_norm, eps, cos, sin)
        context = causal_attention(*(np.ascontiguousarray(a.transpose(1, 0, 2))
                                     for a in (q, k, v)))
        context = context.transpose(1, 0, 2).reshape(t, -1)
        out = product(context, w.o_proj)
        x = x + out
        normed_again = rms_norm(x, w.post_attention_norm, eps)
        gate_up = product(normed_again, w.mlp.gate_up_proj)
        gate, up = np.split(gate_up, 2, axis=1)
        inner = silu_mul(gate, up)
        down = product(inner, w.mlp.down_proj)
        x = x + down
        found += [(f"layer {layer} {name}", rows) for name, rows in (
            ("norm", normed), ("qkv", qkv), ("q", q), ("k", k), ("context", context),
            ("attention out", out), ("mlp norm", normed_again), ("gate and up", gate_up),
            ("inner", inner), ("mlp out", down), ("sum", x))]
    found.append(("logits", model.logits(x[-1])))
    return found
