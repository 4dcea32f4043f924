"""Who looked where while the prompt was read: importance layer by layer, and head by head."""

from __future__ import annotations

from typing import Any

import numpy as np

from course_lib.arrays import F32, as_float32, positive_int


def importance_map(weights: Any, window: int | None = None, block_size: int = 32) -> np.ndarray:
    """The softmax weight that each layer's queries gave to each block, float32 [layers, n_blocks].

    weights: float32 [layers, heads, n, n], row i of a head the weights of the query at position
    i. Only the last `window` queries count (None, or more than there are: all). Summed over
    queries and heads, not averaged; the last block may be short. Raises ValueError for another
    shape, window or block_size below 1.
    """
    weights = as_float32(weights, "weights", 4)
    n = weights.shape[-1]
    if weights.shape[2] != n or n == 0:
        raise ValueError(f"weights must hold one row for each of the tokens, not shape "
                         f"{weights.shape}.")
    block_size = positive_int(block_size, "block_size")
    first = 0 if window is None else max(0, n - positive_int(window, "window"))
    received = weights[:, :, first:].sum(axis=(1, 2), dtype=F32)
    return np.add.reduceat(received, np.arange(0, n, block_size), axis=1)
