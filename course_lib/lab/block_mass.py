"""How much of exact attention falls on each block: what a policy's choice is compared with.

On the model's own queries and keys. Random ones would not do: noise has no structure to be sparse
in.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import numpy as np

from course_lib.arrays import F32
from course_lib.attention import kv_head, softmax
from course_lib.engine import Engine
from course_lib.lab.captured import capture
from course_lib.lab.prompts import NeedlePrompt

QUERIES = 256  # whose weights are held at once


class LayerMasses:
    """The layers of one exact prefill and the attention mass of their blocks."""

    def __init__(self, engine: Engine, ids: Sequence[int]) -> None:
        self.ids = tuple(ids)
        self.layers = capture(engine, ids)
        self._mass: dict[tuple[int, int], np.ndarray] = {}

    def block_mass(self, layer: int, block_size: int) -> np.ndarray:
        """Exact attention's weight of every block, float64 [num_heads, blocks, blocks].

        A row of blocks adds up to its number of queries. Kept, since every picture asks for it.
        """
        key = layer, block_size
        if key not in self._mass:
            q, k, _ = self.layers[layer]
            self._mass[key] = np.stack([
                causal_block_mass(q[h], k[kv_head(h, len(q), len(k))], block_size)
                for h in range(len(q))])
        return self._mass[key]

    def last_query_mass(self, layer: int, block_size: int) -> np.ndarray:
        """Where the last query looks: its weight on every block, float64 [num_heads, blocks]."""
        q, k, _ = self.layers[layer]
        starts = np.arange(0, k.shape[1], block_size)
        return np.stack([
            np.add.reduceat(softmax(k[kv_head(h, len(q), len(k))] @ q[h, -1]
                                    * F32(1 / np.sqrt(q.shape[2]))).astype(np.float64), starts)
            for h in range(len(q))])

    def asking_head(self, token: int, block_size: int) -> tuple[int, int]:
        """Layer and query head whose last query gives the block of `token` most weight."""
        block = token // block_size
        weight = [self.last_query_mass(layer, block_size)[:, block]
                  for layer in range(len(self.layers))]
        layer, head = np.unravel_index(int(np.argmax(weight)), np.shape(weight))
        return int(layer), int(head)


def causal_block_mass(q: np.ndarray, k: np.ndarray, block_size: int) -> np.ndarray:
    """The softmax weights of one head, q and k float32 [n, d], added up over tiles of blocks:
    float64 [blocks, blocks]."""
    n = len(q)
    blocks = -(-n // block_size)
    starts = np.arange(blocks) * block_size
    mass = np.zeros((blocks, blocks))
    scale = F32(1 / np.sqrt(q.shape[1]))
    for first in range(0, n, QUERIES):
        scores = q[first : first + QUERIES] @ k[: first + QUERIES].T
        scores *= scale
        rows, columns = np.ogrid[first : first + len(scores), : scores.shape[1]]
        np.copyto(scores, -np.inf, where=columns > rows)
        scores -= scores.max(axis=1, keepdims=True)
        weights = np.exp(scores, out=scores).astype(np.float64)
        weights /= weights.sum(axis=1, keepdims=True)
        seen = starts[starts < weights.shape[1]]
        by_block = np.add.reduceat(weights, seen, axis=1)
        row_blocks = np.arange(first, first + len(weights)) // block_size
        np.add.at(mass[:, : len(seen)], row_blocks, by_block)
    return mass


@lru_cache(maxsize=4)
def layer_masses(engine: Engine, prompt: NeedlePrompt) -> LayerMasses:
    """Those of a prompt, shared by all who ask with the same engine; the last four are kept."""
    return LayerMasses(engine, prompt.ids)
