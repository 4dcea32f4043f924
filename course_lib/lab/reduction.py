"""Orders of addition as data, and RMSNorm by one of them: by the kernels' own, with their bits.

A tree is a list of indexes, a *lane*: a chain of fused multiply-adds s = x[i] · x[i] + s from 0, in
that order; or a pair (left, right) of trees: one float32 addition of their two sums.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from course_lib.fused import fused_multiply_add

F32 = np.float32
Tree = Any  # list[int] or tuple[Tree, Tree]: a type that contains itself


def chain(d: int) -> Tree:
    """One lane: every square is added to what is there, one after the other."""
    return list(range(d))


def lanes(d: int, count: int = 16) -> list[Tree]:
    """`count` lanes, a power of two; lane j takes the values j, j + count, j + 2 · count, …"""
    return [list(range(j, d, count)) for j in range(count)]


def by_halves(parts: list[Tree]) -> Tree:
    """Parts i and i + half are added, then halves again: 8 + 8, 4 + 4, 2 + 2, 1 + 1."""
    while len(parts) > 1:
        half = len(parts) // 2
        parts = [(parts[i], parts[i + half]) for i in range(half)]
    return parts[0]


def by_neighbours(parts: list[Tree]) -> Tree:
    """Parts 0 and 1, 2 and 3, … are added, then neighbours again."""
    while len(parts) > 1:
        parts = [(parts[i], parts[i + 1]) for i in range(0, len(parts), 2)]
    return parts[0]


def kernel_tree(d: int) -> Tree:
    """The order of the compiled kernels: 16 lanes, added by halves."""
    return by_halves(lanes(d))


ORDERS: dict[str, Callable[[int], Tree]] = {
    "one chain": chain,
    "16 lanes, halves": kernel_tree,
    "16 lanes, neighbours": lambda d: by_neighbours(lanes(d)),
    "a lane per number": lambda d: by_halves(lanes(d, d)),
}
"""Orders that lessons compare; the last for d a power of two."""


def sum_of_squares(x: np.ndarray, tree: Tree) -> np.ndarray:
    """Σ x² over the last axis of float32 `[..., d]` in the order of a tree: float32 `[...]`."""
    if isinstance(tree, tuple):
        left, right = tree
        return sum_of_squares(x, left) + sum_of_squares(x, right)
    total = np.zeros(x.shape[:-1], F32)
    for i in tree:
        total = fused_multiply_add(x[..., i], x[..., i], total)
    return total


def rms_norm_by_tree(x: np.ndarray, gain: np.ndarray, eps: float, tree: Tree) -> np.ndarray:
    """x / sqrt(Σ x² / d + eps) · gain of float32 `[..., d]`, every operation rounded to float32.

    With `kernel_tree(d)` these are the bits of the compiled rms_norm.
    """
    mean = sum_of_squares(x, tree) / F32(x.shape[-1])
    root = np.sqrt(mean + F32(eps))
    return x / root[..., None] * gain
