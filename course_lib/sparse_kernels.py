"""The compiled kernels of block selection: their arrays, made to fit, and their errors.

Arguments have been checked by course_lib.sparse, so a ValueError of a kernel means that something
it read is not finite.
"""

import copy
from collections.abc import Callable
from typing import Any

import numpy as np

from course_lib import backend
from course_lib.arrays import F32, LayerRows, NotFiniteError
from course_lib.attention_common import whole_heads
from course_lib.probe_keys import ProbeKeys


def _run(name: str, *arguments: Any) -> None:
    kernel: Callable[..., Any] | None = backend.kernel(name)
    assert kernel is not None  # the caller has asked for it
    try:
        kernel(*arguments)
    except ValueError as error:
        raise NotFiniteError(str(error)) from None


def _sizes(rows: LayerRows, *sizes: int) -> list[int]:
    """Sizes beyond the context mean the same as its length, and fit into a C integer."""
    return [min(size, rows.k.shape[1]) for size in sizes]


def probe_scores(q: np.ndarray, rows: LayerRows, block_size: int, n_probe: int,
                 out: np.ndarray) -> np.ndarray:
    """Write the probe score of every head and block to ``out`` and return it."""
    rows = rows.map(whole_heads)
    _run("probe_scores", np.ascontiguousarray(q), rows.k, rows.k_scale,
         *_sizes(rows, block_size, n_probe), out)
    return out


def importance_sums(importance: np.ndarray, block_size: int, out: np.ndarray) -> np.ndarray:
    """Write the sum of every block to ``out`` and return it."""
    try:
        _run("importance_sums", np.ascontiguousarray(importance),
             min(block_size, len(importance)), out)
    except NotFiniteError as error:
        raise NotFiniteError(f"{error}; check the prefill that recorded it.") from None
    return out


class Chosen:
    """The blocks that a kernel chooses, int32: order and ids [num_heads, k], recency and evicted
    [num_heads] (-1 = none); reserved = how many of k go by importance if there is one. With layers
    (num_layers,) the arrays have that axis before the others."""

    def __init__(self, num_heads: int, n_blocks: int, k_blocks: int, layers: tuple[int, ...] = ()):
        k = min(k_blocks, n_blocks)
        self.n_blocks = n_blocks
        self.k_blocks = min(k_blocks, 2 * n_blocks)  # beyond that, all are chosen by importance
        self.reserved = min((k_blocks + 1) // 2, n_blocks)
        self.order, self.ids = np.empty((2, *layers, num_heads, k), np.int32)
        self.recency, self.evicted = np.empty((2, *layers, num_heads), np.int32)

    @property
    def arrays(self) -> tuple[np.ndarray, ...]:
        """The four arrays in the order in which a kernel takes them."""
        return self.order, self.ids, self.recency, self.evicted

    def of_layer(self, layer: int) -> "Chosen":
        """The choice of one layer, as views."""
        one = copy.copy(self)
        one.order, one.ids, one.recency, one.evicted = (array[layer] for array in self.arrays)
        return one

    def select(self, probe: np.ndarray, importance: np.ndarray | None) -> None:
        """Choose by probe scores [num_heads, n_blocks] and importance sums [n_blocks]."""
        if importance is not None:
            importance = np.ascontiguousarray(importance)
        _run("select_blocks", np.ascontiguousarray(probe), importance, self.k_blocks, *self.arrays)

    def attend(self, q: np.ndarray, rows: LayerRows, importance: np.ndarray | None,
               block_size: int, n_probe: int, shared: bool,
               probe_keys: ProbeKeys | None = None) -> tuple[np.ndarray, np.ndarray]:
        """Probe, choose, attend; returns out like q and the probe scores."""
        rows = rows.map(whole_heads)
        out, probe = np.empty_like(q), np.empty((len(q), self.n_blocks), F32)
        _run("sparse_attention", q, *rows, importance, self.k_blocks,
             *_sizes(rows, block_size, n_probe), shared, out, probe, *self.arrays,
             *(probe_keys.arrays if probe_keys else ()))
        return out, probe
