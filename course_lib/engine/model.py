"""The Qwen3 decoder: one definition that prefill, decode and evaluation all run."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from course_lib.arrays import require_finite
from course_lib.engine.checks import finite_arithmetic
from course_lib.engine.config import ModelConfig
from course_lib.engine.layers import linear, rms_norm, rope, rope_tables, silu_mul
from course_lib.engine.weights import DenseMLP, LayerWeights, Matrix, MoELayer, Weights
from course_lib.linear import PackedMatrix

# (layer, q [num_heads, t, d], k [num_kv_heads, t, d], v likewise) -> context [num_heads, t, d]
Attend = Callable[[int, np.ndarray, np.ndarray, np.ndarray], np.ndarray]


class Model:
    """Config and weights, and the arithmetic between a token id and its logits.

    What attention reads and how (a cache of float32 or q8 rows, all rows or some blocks) is the
    caller's: it passes an `attend` function. All arrays are float32.
    """

    def __init__(self, config: ModelConfig, weights: Weights):
        self.config = config
        self.weights = weights

    @finite_arithmetic()
    def hidden(self, ids: Sequence[int], start: int, attend: Attend) -> np.ndarray:
        """Hidden states `[t, hidden]` after the last layer, for tokens at start … start + t - 1.

        Raises CourseError where a row, a score or a context overflows float32.
        """
        config = self.config
        positions = np.arange(start, start + len(ids))
        cos, sin = rope_tables(positions, config.head_dim, config.rope_theta)
        x = rows_of(self.weights.embedding, ids)
        for layer, weights in enumerate(self.weights.layers):
            q, k, v = self._project(weights, x, cos, sin)
            context = attend(layer, q, k, v)
            joined = context.transpose(1, 0, 2).reshape(len(ids), -1)
            x = x + linear(joined, weights.o_proj)
            h = rms_norm(x, weights.post_attention_norm, config.rms_norm_eps)
            x = x + _mlp(h, weights.mlp)
        return x

    @finite_arithmetic()
    def logits(self, hidden: np.ndarray) -> np.ndarray:
        """Logits `[..., vocab]` of hidden states `[..., hidden]`; CourseError if not finite."""
        normed = rms_norm(hidden, self.weights.final_norm, self.config.rms_norm_eps)
        logits = linear(normed, self.weights.output)
        require_finite(logits, "logits")
        return logits

    def _project(
        self, weights: LayerWeights, x: np.ndarray, cos: np.ndarray, sin: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Query, key and value rows, head-major; q and k are normed per head, then rotated."""
        config = self.config
        h = rms_norm(x, weights.input_norm, config.rms_norm_eps)
        by_head = (len(x), -1, config.head_dim)
        qkv = linear(h, weights.qkv_proj).reshape(by_head)
        heads, kv_heads = config.num_attention_heads, config.num_key_value_heads
        q, k, v = np.split(qkv, (heads, heads + kv_heads), axis=1)
        if weights.q_norm is not None and weights.k_norm is not None:
            q = rms_norm(q, weights.q_norm, config.rms_norm_eps)
            k = rms_norm(k, weights.k_norm, config.rms_norm_eps)
        q, k = rope(q, cos, sin), rope(k, cos, sin)
        return _head_major(q), _head_major(k), _head_major(v)


def _mlp(h: np.ndarray, mlp: DenseMLP | MoELayer) -> np.ndarray:
    """The second half of a layer on normed rows `[t, hidden]`."""
    if isinstance(mlp, MoELayer):
        raise NotImplementedError("a mixture of experts")
    gate, up = np.split(linear(h, mlp.gate_up_proj), 2, axis=-1)
    return linear(silu_mul(gate, up), mlp.down_proj)


def rows_of(matrix: Matrix, ids: Sequence[int]) -> np.ndarray:
    """Rows `ids` of a weight matrix, float32 `[len(ids), columns]`."""
    if isinstance(matrix, PackedMatrix):
        return matrix.dequantize()[np.asarray(ids)]
    return matrix[np.asarray(ids)]


def _head_major(rows: np.ndarray) -> np.ndarray:
    """`[t, heads, d]` -> C-contiguous `[heads, t, d]`, the order in which the cache is read."""
    return np.ascontiguousarray(rows.transpose(1, 0, 2))
