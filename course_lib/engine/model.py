"""The decoder of Qwen3 and Llama: one definition that prefill, decode and evaluation all run."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from course_lib import backend
from course_lib.arrays import require_finite
from course_lib.engine.checks import finite_arithmetic
from course_lib.engine.config import ModelConfig
from course_lib.engine.layers import add_linear, linear, project_heads, rms_norm, rope_tables
from course_lib.engine.moe import add_feed_forward
from course_lib.engine.weights import Matrix, Weights
from course_lib.linear import PackedMatrix

# (layer, q [num_heads, t, d], k [num_kv_heads, t, d], v likewise) -> context [num_heads, t, d]
Attend = Callable[[int, np.ndarray, np.ndarray, np.ndarray], np.ndarray]

TILE = 256  # rows that go through the matrices together: scratch memory does not grow with t


class Model:
    """Config and weights, and the arithmetic between a token id and its logits.

    What attention reads and how (a cache of float32 or q8 rows, all rows or some blocks) is the
    caller's: it passes an `attend` function. All arrays are float32.
    """

    def __init__(self, config: ModelConfig, weights: Weights):
        self.config = config
        self.weights = weights

    @finite_arithmetic()
    @backend.held()
    def hidden(
        self,
        ids: Sequence[int],
        start: int,
        attend: Attend,
        *,
        tile: int = TILE,
        on_progress: Callable[[int, int], None] | None = None,
    ) -> np.ndarray:
        """Hidden states `[t, hidden]` after the last layer, for tokens at start … start + t - 1.

        Each layer takes all tokens through attention at once, and through its matrices in tiles
        of `tile` rows. `on_progress(done, total)` counts the tiles of all layers. Raises
        CourseError where a row, a score or a context overflows float32.
        """
        config, t = self.config, len(ids)
        eps = config.rms_norm_eps
        positions = np.arange(start, start + t)
        cos, sin = rope_tables(positions, config.head_dim, config.rope_theta, config.rope)
        tiles = [slice(first, min(first + tile, t)) for first in range(0, t, tile)]
        x = rows_of(self.weights.embedding, ids)
        for layer, weights in enumerate(self.weights.layers):
            q, k, v = self._heads(t)
            for rows in tiles:
                project_heads(x[rows], weights.input_norm, eps, weights.qkv_proj, weights.q_norm,
                              weights.k_norm, cos[rows], sin[rows],
                              q[:, rows], k[:, rows], v[:, rows])
            context = attend(layer, q, k, v)
            for i, rows in enumerate(tiles):
                some = x[rows]  # a view: what is added to it is added to x
                joined = context[:, rows].transpose(1, 0, 2).reshape(len(some), -1)
                add_linear(some, joined, weights.o_proj)
                add_feed_forward(some, weights.post_attention_norm, eps, weights.mlp,
                                 config.moe_of(layer))
                if on_progress is not None:
                    on_progress(layer * len(tiles) + i + 1, len(self.weights.layers) * len(tiles))
        return x

    @finite_arithmetic()
    def logits(self, hidden: np.ndarray) -> np.ndarray:
        """Logits `[..., vocab]` of hidden states `[..., hidden]`; CourseError if not finite."""
        normed = rms_norm(hidden, self.weights.final_norm, self.config.rms_norm_eps)
        logits = linear(normed, self.weights.output)
        require_finite(logits, "logits")
        return logits

    def _heads(self, t: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Room for query, key and value rows, head-major: the order in which a cache is read."""
        config = self.config
        q = np.empty((config.num_attention_heads, t, config.head_dim), np.float32)
        k, v = np.empty((2, config.num_key_value_heads, t, config.head_dim), np.float32)
        return q, k, v


def rows_of(matrix: Matrix, ids: Sequence[int]) -> np.ndarray:
    """Rows `ids` of a weight matrix, float32 `[len(ids), columns]`."""
    return matrix.take(ids) if isinstance(matrix, PackedMatrix) else matrix[np.asarray(ids)]
