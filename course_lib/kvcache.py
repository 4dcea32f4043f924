"""The KV cache: rows of every layer, grown block by block, in float32 or q8; and its byte ledger.

Each layer stores K and V head-major, [num_kv_heads, capacity, head_dim], so that all rows of a
head are contiguous and a scan reads memory strictly in order. Capacity is a whole number of
blocks and is allocated only when tokens arrive.
"""

import operator
from typing import Any, NamedTuple

import numpy as np

from course_lib.arrays import (
    F32,
    LayerRows,
    as_float32,
    positive_int,
    require_finite,
    whole_number,
)
from course_lib.probe_keys import ProbeArrays, ProbeKeys
from course_lib.quant import ROUNDING_RULES, quantize_rows

CACHE_DTYPES = ("f32", "q8")


class RowAddress(NamedTuple):
    """Where a row lies: its block, its slot in the block, its byte offset in the K (or V) array."""

    block: int
    slot: int
    offset: int


class KVCache:
    """K and V rows of all layers for one sequence.

    dtype "f32" stores float32 rows; "q8" stores int8 rows with one float32 scale per token and
    KV head, rounded by ``rule``. Source: article 9-1; block addressing: day 8-2.
    """

    def __init__(self, num_layers: int, num_kv_heads: int, head_dim: int, *, dtype: str = "f32",
                 block_size: int = 32, rule: str = "half_up") -> None:
        self.num_layers = positive_int(num_layers, "num_layers")
        self.num_kv_heads = positive_int(num_kv_heads, "num_kv_heads")
        self.head_dim = positive_int(head_dim, "head_dim")
        self.block_size = positive_int(block_size, "block_size")
        if dtype not in CACHE_DTYPES:
            raise ValueError(f"dtype {dtype!r} is unknown; use one of {', '.join(CACHE_DTYPES)}.")
        if rule not in ROUNDING_RULES:
            raise ValueError(f"rule {rule!r} is unknown; use one of {', '.join(ROUNDING_RULES)}.")
        self.dtype = dtype
        self.rule = rule
        self._lengths = [0] * self.num_layers
        self._layers = [self._allocate(0) for _ in range(self.num_layers)]
        self._probe_keys: dict[tuple[int, int], ProbeKeys] = {}

    def _allocate(self, capacity: int) -> LayerRows:
        shape = (self.num_kv_heads, capacity, self.head_dim)
        if self.dtype == "f32":
            return LayerRows(np.empty(shape, F32), np.empty(shape, F32))
        return LayerRows(np.empty(shape, np.int8), np.empty(shape, np.int8),
                         np.empty(shape[:2], F32), np.empty(shape[:2], F32))

    @property
    def length(self) -> int:
        """Tokens that every layer holds."""
        return min(self._lengths)

    @property
    def nbytes(self) -> int:
        """Bytes allocated now, over all layers, scales and probe keys included."""
        rows = sum(a.nbytes for layer in self._layers for a in layer if a is not None)
        return rows + sum(keys.nbytes for keys in self._probe_keys.values())

    def layer_length(self, layer: int) -> int:
        """Tokens that one layer holds."""
        return self._lengths[self._layer(layer)]

    def _layer(self, layer: int) -> int:
        if not 0 <= layer < self.num_layers:
            raise ValueError(f"layer {layer} does not exist; the cache has {self.num_layers}.")
        return layer

    def append(self, layer: int, k: Any, v: Any) -> None:
        """Append rows of t >= 0 new tokens to one layer.

        k, v: real numbers [num_kv_heads, t, head_dim], stored as the cache's dtype. Raises
        ValueError for a wrong shape, and for NaN or infinity, naming head and token; then
        nothing is written, neither K nor V.
        """
        have = self.layer_length(layer)
        k, v = as_float32(k, "k", 3), as_float32(v, "v", 3)
        want = (self.num_kv_heads, k.shape[1], self.head_dim)
        if k.shape != want or v.shape != want:
            raise ValueError(
                f"k and v must both have shape [{self.num_kv_heads}, t, {self.head_dim}], "
                f"not {k.shape}, {v.shape}."
            )
        require_finite(k, "k", first_token=have)
        require_finite(v, "v", first_token=have)
        new = LayerRows(k, v)
        if self.dtype == "q8":
            (kq, k_scale), (vq, v_scale) = quantize_rows(k, self.rule), quantize_rows(v, self.rule)
            new = LayerRows(kq, vq, k_scale, v_scale)
        self._reserve(layer, have + k.shape[1])
        _write(self._layers[layer], new, have)
        self._lengths[layer] = have + k.shape[1]

    @property
    def holds_whole_tokens(self) -> bool:
        """Whether every layer holds the same number of tokens."""
        return self._lengths.count(self._lengths[0]) == self.num_layers

    def with_room(self) -> list[LayerRows]:
        """Return the whole arrays of every layer, with room for one token behind those it holds.

        For a kernel that writes the rows of a token itself; `count_token` then makes them count.
        """
        for layer, have in enumerate(self._lengths):
            self._reserve(layer, have + 1)
        return list(self._layers)

    def count_token(self) -> None:
        """Count the rows of a token that were written behind those that every layer holds."""
        self._lengths = [have + 1 for have in self._lengths]

    def _reserve(self, layer: int, tokens: int) -> None:
        old = self._layers[layer]
        capacity = old.k.shape[1]
        if tokens <= capacity:
            return
        # An eighth more than now, so that n appended tokens cost O(n) copies, not O(n^2).
        blocks = -(-max(tokens, capacity + capacity // 8) // self.block_size)
        grown = self._allocate(blocks * self.block_size)
        _write(grown, old.upto(self._lengths[layer]), 0)
        self._layers[layer] = grown

    def rows(self, layer: int) -> LayerRows:
        """Return read-only views of a layer's rows; they keep their values until truncate."""
        n = self.layer_length(layer)

        def view(array: np.ndarray) -> np.ndarray:
            rows = array[:, :n]
            rows.setflags(write=False)
            return rows

        return self._layers[layer].map(view)

    def probe_keys(self, layer: int, n_probe: int) -> ProbeKeys:
        """Return the sampled K rows of a layer's full blocks, copied together, up to date.

        What block selection with ``n_probe`` samples a block reads; a quarter of K's memory with
        8 of 32. Kept from call to call, for one n_probe at a time.
        """
        n_probe, rows = positive_int(n_probe, "n_probe"), self.rows(layer)
        layer = operator.index(layer)
        for other in [key for key in self._probe_keys if key[1] != n_probe]:
            del self._probe_keys[other]
        keys = self._probe_keys.setdefault((layer, n_probe), ProbeKeys(self.block_size, n_probe))
        keys.update(rows)
        return keys

    def probe_samples(self, n_probe: int) -> tuple[ProbeArrays, ...]:
        """Return the arrays of `probe_keys` of every layer."""
        full = self.length // self.block_size
        held = [self._probe_keys.get((layer, n_probe)) for layer in range(self.num_layers)]
        return tuple((keys if keys is not None and keys.blocks == full
                      else self.probe_keys(layer, n_probe)).arrays
                     for layer, keys in enumerate(held))

    def truncate(self, n: int) -> None:
        """Keep the first n tokens of every layer; the memory stays reserved.

        ``truncate(cache.length)`` drops what a failed step left in some layers only. Raises
        TypeError if n is no integer, ValueError unless 0 <= n <= length.
        """
        n = operator.index(n)
        if not 0 <= n <= self.length:
            raise ValueError(f"cannot truncate to {n} tokens; the cache holds {self.length}.")
        self._lengths = [n] * self.num_layers
        self._probe_keys.clear()  # they may hold samples of tokens that are gone

    def copy(self) -> "KVCache":
        """Return an independent cache with the same rows."""
        other = KVCache(self.num_layers, self.num_kv_heads, self.head_dim, dtype=self.dtype,
                        block_size=self.block_size, rule=self.rule)
        other._layers = [layer.map(np.copy) for layer in self._layers]
        other._lengths = list(self._lengths)
        return other

    def row_address(self, token: int, head: int, layer: int = 0) -> RowAddress:
        """Return block, slot and byte offset of a stored row; ValueError if it is not stored."""
        token, head = whole_number(token, "token"), whole_number(head, "head")
        if not 0 <= token < self.layer_length(layer):
            raise ValueError(f"token {token} is not stored; layer {layer} holds "
                             f"{self.layer_length(layer)}.")
        if not 0 <= head < self.num_kv_heads:
            raise ValueError(f"head {head} does not exist; the cache has {self.num_kv_heads}.")
        k = self._layers[layer].k
        block, slot = divmod(token, self.block_size)
        return RowAddress(block, slot, head * k.strides[0] + token * k.strides[1])


def _write(target: LayerRows, source: LayerRows, first: int) -> None:
    for stored, fresh in zip(target, source, strict=True):
        if stored is not None and fresh is not None:
            stored[:, first : first + fresh.shape[1]] = fresh


def kv_bytes_per_token(num_kv_heads: int, head_dim: int, dtype: str) -> int:
    """Bytes of K and V together for one token in one layer.

    dtype: "f32", "f16", "q8" (int8 and one float32 scale per row) or "q4" (4 bits and two
    float32 scales per 64 values). Raises ValueError for an unknown dtype, and for q4 with a
    head_dim that 64 does not divide. Source: article 9-1 (2112 against 4096 bytes at 8 x 128).
    """
    rows = 2 * positive_int(num_kv_heads, "num_kv_heads")
    head_dim = positive_int(head_dim, "head_dim")
    if dtype == "q4" and head_dim % 64:
        raise ValueError(f"q4 rows need a head_dim that 64 divides, not {head_dim}.")
    row_bytes = {"f32": 4 * head_dim, "f16": 2 * head_dim, "q8": head_dim + 4,
                 "q4": head_dim // 2 + 8 * (head_dim // 64)}
    if dtype not in row_bytes:
        raise ValueError(f"dtype {dtype!r} is unknown; use one of {', '.join(row_bytes)}.")
    return rows * row_bytes[dtype]


class LedgerRow(NamedTuple):
    """One line of kv_ledger: bytes a decode step scans and bytes kept in memory, all layers."""

    name: str
    scan_bytes: int
    memory_bytes: int
    scan_vs_f16: float
    memory_vs_f16: float


def kv_ledger(num_layers: int, num_kv_heads: int, head_dim: int, tokens: int) -> list[LedgerRow]:
    """Bytes of a context of ``tokens`` in each format, and in q8 kept beside an f32 mirror.

    Scan bytes are what one exact decode step reads, memory bytes what stays allocated: with the
    mirror (the engine's default) the scan shrinks while memory grows. The line with probe keys has
    every fourth K row of whole blocks of 32 a second time, for block selection. q4 is left out
    where 64 does not divide head_dim. Raises ValueError for counts below 1.
    """
    num_layers, tokens = positive_int(num_layers, "num_layers"), positive_int(tokens, "tokens")
    num_kv_heads = positive_int(num_kv_heads, "num_kv_heads")
    head_dim = positive_int(head_dim, "head_dim")
    count = num_layers * tokens
    formats = ["f32", "f16", "q8"] + (["q4"] if head_dim % 64 == 0 else [])
    size = {name: count * kv_bytes_per_token(num_kv_heads, head_dim, name) for name in formats}
    lines = [(name, size[name], size[name]) for name in formats]
    probed = num_layers * (tokens // 32 * 8) * num_kv_heads * (head_dim + 4)
    lines.append(("q8 + probe keys", size["q8"], size["q8"] + probed))
    lines.append(("q8 + f32 mirror", size["q8"], size["q8"] + size["f32"]))
    return [LedgerRow(name, scan, memory, scan / size["f16"], memory / size["f16"])
            for name, scan, memory in lines]
