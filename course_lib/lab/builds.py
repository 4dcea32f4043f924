"""Builds of the same engine that differ in switches: a reference and steps towards a fast one.

One of these switches is wrong on purpose: day 5 finds it. The others do what they say.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from course_lib.fused import fused_multiply_add
from course_lib.weight_blocks import (
    BLOCK,
    dequantize_q8_0,
    quantize_activations,
    quantize_q8_0,
    split_blocks,
)

SWITCHES = ("q8 weights", "q8 activations", "blocks backwards", "tiles of 16", "unrolled")

TILE = 16
Dot = Callable[[np.ndarray, np.ndarray], np.ndarray]


def sum_of_products(x: np.ndarray, w: np.ndarray) -> np.ndarray:
    """Exact dots of int8 rows x `[t, 32]` and w `[rows, 32]`: whole numbers `[t, rows]`.

    In float32, which holds every whole number up to 2**24: NumPy's product is fastest there.
    """
    return x.astype(np.float32) @ w.astype(np.float32).T


def unrolled_sum_of_products(x: np.ndarray, w: np.ndarray) -> np.ndarray:
    """The same in 8 lanes of 16 bits, each with 4 of the 32 products; widened once a block."""
    total = np.zeros((len(x), len(w)), np.float32)
    for lane in range(8):
        products = sum_of_products(x[:, lane::8], w[:, lane::8])
        total += products.astype(np.int32).astype(np.int16)
    return total


class Build:
    """x · wᵀ as one build of the engine computes it, by the switches that are on.

    lanes: the sum of products that "unrolled" stands for; another one to try a repair.
    """

    def __init__(self, *switches: str, lanes: Dot = unrolled_sum_of_products):
        unknown = set(switches) - set(SWITCHES)
        if unknown:
            raise ValueError(f"no switch {min(unknown)!r}; there are {', '.join(SWITCHES)}.")
        self.switches = frozenset(switches)
        self._lanes = lanes
        self._blocks: dict[int, tuple[np.ndarray, np.ndarray]] = {}

    def __call__(self, x: np.ndarray, w: np.ndarray) -> np.ndarray:
        if "tiles of 16" in self.switches:
            tiles = range(0, len(x), TILE)
            return np.concatenate([self._product(x[i : i + TILE], w) for i in tiles])
        return self._product(x, w)

    def blocks(self, w: np.ndarray) -> np.ndarray:
        """The Q8_0 blocks of a matrix, made once."""
        if id(w) not in self._blocks:
            self._blocks[id(w)] = w, quantize_q8_0(w)
        return self._blocks[id(w)][1]

    def _product(self, x: np.ndarray, w: np.ndarray) -> np.ndarray:
        if "q8 weights" not in self.switches:
            return x @ w.T
        if "q8 activations" not in self.switches:
            return x @ dequantize_q8_0(self.blocks(w)).T
        codes, x_scale = quantize_activations(x)
        w_scale, w_codes = split_blocks(self.blocks(w), "q8_0")
        codes, w_codes = codes.reshape(len(x), -1, BLOCK), w_codes.view(np.int8)
        order = list(range(x_scale.shape[1]))
        if "blocks backwards" in self.switches:
            order.reverse()
        in_pairs = "unrolled" in self.switches and len(order) % 2 == 0
        dot = self._lanes if in_pairs else sum_of_products
        acc = np.zeros((len(x), len(w)), np.float32)
        for b in order:
            scale = w_scale[:, b].astype(np.float32) * x_scale[:, b, None]
            acc = fused_multiply_add(scale, dot(codes[:, b], w_codes[:, b]), acc)
        return acc
