"""The second half of a layer: one SwiGLU, or for each token the best few of many."""

from __future__ import annotations

import numpy as np

from course_lib.engine.config import MoEConfig
from course_lib.engine.layers import add_swiglu, linear, rms_norm, softmax, swiglu
from course_lib.engine.weights import DenseMLP, MoELayer


def add_feed_forward(x: np.ndarray, gain: np.ndarray, eps: float, mlp: DenseMLP | MoELayer,
                     moe: MoEConfig | None) -> None:
    """Add to rows x `[t, hidden]` the MLP of them normed; `moe` says how a MoELayer chooses."""
    if isinstance(mlp, MoELayer):
        assert moe is not None  # weights are loaded by this config
        x += mixture(rms_norm(x, gain, eps), mlp, moe)
    else:
        add_swiglu(x, gain, eps, mlp.gate_up_proj, mlp.down_proj)


def route(h: np.ndarray, router: np.ndarray, moe: MoEConfig) -> tuple[np.ndarray, np.ndarray]:
    """The experts of each token, best first, and their weights: int64 and float32 `[t, chosen]`.

    h float32 `[t, hidden]`, router float32 `[experts, hidden]`. The weights are those of a softmax
    over all experts; ties go to the lower expert. With `norm_topk_prob` they are divided by their
    sum, added up best first.
    """
    probabilities = softmax(linear(h, router))
    chosen = np.argsort(-probabilities, axis=-1, kind="stable")[:, : moe.experts_per_token]
    weights = np.take_along_axis(probabilities, chosen, axis=-1)
    if moe.norm_topk_prob:
        total = weights[:, 0].copy()
        for place in range(1, weights.shape[1]):  # np.sum's order depends on the number of rows
            total += weights[:, place]
        weights /= total[:, None]
    return chosen, weights


def mixture(h: np.ndarray, layer: MoELayer, moe: MoEConfig) -> np.ndarray:
    """The weighted sum of each token's experts, `[t, hidden]`.

    Expert after expert, each on all tokens that chose it. So a token's sum is added up in
    ascending order of experts: its bits do not depend on the other tokens (on compiled kernels).
    Source: Qwen3-MoE, as transformers computes it.
    """
    chosen, weights = route(h, layer.router, moe)
    out = np.zeros_like(h)
    for expert in np.unique(chosen):
        mlp = layer.experts[expert]
        tokens, place = np.nonzero(chosen == expert)
        result = swiglu(h[tokens], mlp.gate_up_proj, mlp.down_proj)
        out[tokens] += weights[tokens, place, None] * result
    return out
