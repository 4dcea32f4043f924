"""Where the keys and values of a prefill are kept, in blocks of tokens: here, in memory.

A block is [num_kv_heads, block_size, d], K and V apart, so that K can be read alone, and one KV
head of it too. Blocks fill from the front; only the last one of a layer may be part full. In memory
the blocks of a layer lie one behind the other, as in the KV cache, and need not be copied to be
read.
"""

from __future__ import annotations

import threading
from typing import Any

import numpy as np

from course_lib.arrays import (
    F32,
    LayerRows,
    as_float32,
    positive_int,
    require_finite,
    whole_number,
)
from course_lib.errors import CourseError


class Slot:
    """Memory for one block, made once and filled again and again: k, v float32 [num_kv_heads,
    block_size, d], and ``both`` of them in one array. ``number`` tells slots apart; ``parts`` are
    the bytes of each KV head of K, and of V."""

    def __init__(self, number: int, shape: tuple[int, int, int], row: np.ndarray | None = None,
                 place: int = 0) -> None:
        heads, size, d = shape
        self.number, self._first = number, place * size
        self._row = np.zeros((2, heads, size, d), F32) if row is None else row
        self.both = self._row[:, :, self._first : self._first + size]
        self.k, self.v = self.both
        self.parts = [[head.reshape(-1).view(np.uint8).data for head in part]
                      for part in (self.k, self.v)]

    @classmethod
    def side_by_side(cls, count: int, shape: tuple[int, int, int],
                     first: int = 0) -> tuple[Slot, ...]:
        """So many slots, numbered from ``first`` on, whose blocks can be attended in one go."""
        heads, size, d = shape
        row = np.zeros((2, heads, count * size, d), F32)
        return tuple(cls(first + i, shape, row, i) for i in range(count))

    def is_behind(self, other: Slot) -> bool:
        """Whether the memory of this slot goes on where that of the other ends."""
        return self._row is other._row and self._first == other._first + other.k.shape[1]

    def rows(self, tokens: int) -> LayerRows:
        """Views of the first tokens of every KV head; they may go on in the slots behind."""
        return LayerRows(*self._row[:, :, self._first : self._first + tokens])

    @property
    def nbytes(self) -> int:
        return self.both.nbytes


class BlockStore:
    """K and V rows of every layer, float32, in blocks that stay in memory.

    capacity: tokens that each layer is going to hold, if that is known: their place is taken at
    once, in the large pages that a system may have, and rows need not be copied to a larger one.
    ``bytes_read`` counts what callers have read of K and V since the store was made. After
    ``close`` nothing can be read or written. Use it in a ``with`` statement.
    """

    def __init__(self, num_layers: int, num_kv_heads: int, head_dim: int, *,
                 block_size: int = 128, capacity: int | None = None) -> None:
        self.num_layers = positive_int(num_layers, "num_layers")
        self.num_kv_heads = positive_int(num_kv_heads, "num_kv_heads")
        self.head_dim = positive_int(head_dim, "head_dim")
        self.block_size = positive_int(block_size, "block_size")
        self.bytes_read = 0
        self._counting = threading.Lock()
        self._lengths = [0] * self.num_layers
        tokens = 0 if capacity is None else positive_int(capacity, "capacity")
        self._layers = self._allocate(-(-tokens // self.block_size))
        self._closed = False

    @property
    def block_shape(self) -> tuple[int, int, int]:
        """The shape of K, and of V, in a block."""
        return self.num_kv_heads, self.block_size, self.head_dim

    @property
    def block_bytes(self) -> int:
        """Bytes of a block, K and V together."""
        return 2 * 4 * self.num_kv_heads * self.block_size * self.head_dim

    @property
    def resident_bytes(self) -> int:
        """Bytes of K and V that are in memory now."""
        return 0 if self._closed else self.block_bytes * sum(map(self.n_blocks,
                                                                 range(self.num_layers)))

    def length(self, layer: int) -> int:
        """Tokens that a layer holds."""
        return self._lengths[self._layer(layer)]

    def n_blocks(self, layer: int) -> int:
        """Blocks that a layer holds, the last one perhaps in part."""
        return -(-self.length(layer) // self.block_size)

    def tokens(self, layer: int, block: int) -> int:
        """Tokens of a block; ValueError if it is not there."""
        block = whole_number(block, "block")
        if not 0 <= block < self.n_blocks(layer):
            raise ValueError(f"block {block} is not stored; layer {layer} has "
                             f"{self.n_blocks(layer)}.")
        return min(self.block_size, self.length(layer) - block * self.block_size)

    def append(self, layer: int, k: Any, v: Any) -> None:
        """Append rows of t >= 0 tokens to a layer.

        k, v: float32 [num_kv_heads, t, head_dim]. Raises ValueError for another shape, NaN or
        infinity; then nothing is stored. CourseError where the store cannot take them.
        """
        have = self.length(layer)
        k, v = as_float32(k, "k", 3), as_float32(v, "v", 3)
        want = (self.num_kv_heads, k.shape[1], self.head_dim)
        if k.shape != want or v.shape != want:
            raise ValueError(f"k and v must both have shape [{self.num_kv_heads}, t, "
                             f"{self.head_dim}], not {k.shape}, {v.shape}.")
        require_finite(k, "k", first_token=have)
        require_finite(v, "v", first_token=have)
        self.append_checked(layer, k, v)

    def append_checked(self, layer: int, k: np.ndarray, v: np.ndarray) -> None:
        """As `append`, of rows that are known to fit and to be finite."""
        self._require_open()
        have = self.length(layer)
        self._write(layer, have, k, v)
        self._lengths[layer] = have + k.shape[1]

    def keys(self, layer: int, block: int) -> np.ndarray:
        """Read K alone of a block: float32 [num_kv_heads, tokens, head_dim], not to be written."""
        tokens = self.tokens(layer, block)
        self._require_open()
        keys = self._keys(layer, block, tokens)
        self._count(keys.nbytes)
        keys.flags.writeable = False
        return keys

    def all_keys(self, layer: int) -> np.ndarray | None:
        """Read K alone of all blocks, float32 [num_kv_heads, n, head_dim], not to be written, where
        they lie in memory together; else None, and nothing is read."""
        rows = self.span(layer)
        if rows is None:
            return None
        keys = rows.k.view()
        self._count(keys.nbytes)
        keys.flags.writeable = False
        return keys

    def resident(self, layer: int, block: int) -> LayerRows | None:
        """The rows of a block that is in memory, as views, without reading it; else None."""
        tokens = self.tokens(layer, block)
        self._require_open()
        return self._resident(layer, block, tokens)

    def span(self, layer: int) -> LayerRows | None:
        """All rows of a layer, as views, where they lie in memory together; else None."""
        n = self.length(layer)
        self._require_open()
        return self._layers[layer].upto(n)

    def load(self, layer: int, block: int, slot: Slot, heads: np.ndarray | None = None) -> int:
        """Read a block into ``slot`` and return its tokens; the slot's rows behind them are
        anything. With ``heads``, bool [num_kv_heads], only those KV heads are read."""
        tokens = self.tokens(layer, block)
        if slot.k.shape != self.block_shape:
            raise ValueError(f"a slot of this store must have shape {self.block_shape}, not "
                             f"{slot.k.shape}.")
        if heads is not None and (heads.dtype != bool or heads.shape != (self.num_kv_heads,)):
            raise ValueError(f"heads must be bool [{self.num_kv_heads}], not {heads.dtype} "
                             f"{heads.shape}.")
        self._require_open()
        self._load(layer, block, slot, heads)
        self.count_read(tokens, heads)
        return tokens

    def count_read(self, tokens: int, heads: np.ndarray | None) -> None:
        """Add K and V of so many tokens of some KV heads to ``bytes_read``."""
        read = self.num_kv_heads if heads is None else int(np.count_nonzero(heads))
        self.count_rows(read * tokens)

    def count_rows(self, rows: int) -> None:
        """Add so many rows of K, and as many of V, to ``bytes_read``."""
        self._count(2 * 4 * rows * self.head_dim)

    def _count(self, nbytes: int) -> None:
        with self._counting:  # a ring reads in another thread
            self.bytes_read += nbytes

    def make_slots(self, count: int) -> tuple[Slot, ...]:
        """The slots that a ring needs to read this store: none, all blocks are in memory."""
        return ()

    def close(self) -> None:
        """Give the memory back."""
        self._closed = True
        self._layers = self._allocate(0)

    def __enter__(self) -> BlockStore:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def _layer(self, layer: int) -> int:
        if not 0 <= whole_number(layer, "layer") < self.num_layers:
            raise ValueError(f"layer {layer} does not exist; the store has {self.num_layers}.")
        return layer

    def _require_open(self) -> None:
        if self._closed:
            raise CourseError("The block store is closed; make a new one for the next prompt.")

    def _allocate(self, blocks: int, layers: int | None = None) -> list[LayerRows]:
        layers = self.num_layers if layers is None else layers
        rows = np.empty((layers, 2, self.num_kv_heads, blocks * self.block_size, self.head_dim),
                        F32)
        return [LayerRows(k, v) for k, v in rows]

    def _write(self, layer: int, first: int, k: np.ndarray, v: np.ndarray) -> None:
        """Put rows into a layer from token ``first`` on; its earlier tokens stay."""
        rows, end = self._layers[layer], first + k.shape[1]
        capacity = rows.k.shape[1] // self.block_size
        if end > rows.k.shape[1]:  # twice as much: what lies idle costs no memory until written
            blocks = max(-(-end // self.block_size), 2 * capacity)
            (rows,) = self._allocate(blocks, 1)
            rows.k[:, :first], rows.v[:, :first] = (a[:, :first] for a in self._layers[layer][:2])
            self._layers[layer] = rows
        rows.k[:, first:end], rows.v[:, first:end] = k, v

    def _resident(self, layer: int, block: int, tokens: int) -> LayerRows | None:
        start = block * self.block_size
        return self._layers[layer].map(lambda a: a[:, start : start + tokens])

    def _keys(self, layer: int, block: int, tokens: int) -> np.ndarray:
        start = block * self.block_size
        return self._layers[layer].k[:, start : start + tokens]

    def _load(self, layer: int, block: int, slot: Slot, heads: np.ndarray | None) -> None:
        which = slice(None) if heads is None else heads
        tokens = self.tokens(layer, block)
        start = block * self.block_size
        rows = self._layers[layer].map(lambda a: a[which, start : start + tokens])
        slot.k[which, :tokens], slot.v[which, :tokens] = rows.k, rows.v
