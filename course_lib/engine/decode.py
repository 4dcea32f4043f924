"""Decode attention of one token: dense or block-sparse, timed, with what it chose."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from course_lib import backend, sparse
from course_lib.attention import kv_head, two_pass, two_pass_rows
from course_lib.decode_gate import automatic_blocks
from course_lib.engine.checks import check_blocks
from course_lib.kvcache import KVCache, LayerRows


@dataclass(frozen=True)
class StepStats:
    """What one decoded token cost: `attn_ms`, milliseconds of selection + attention summed over
    all layers, and `blocks_read`, blocks of the KV cache read, mean per layer and query head."""

    attn_ms: float
    blocks_read: float


class DecodeAttention:
    """Attention of one decoded token in every layer, with its cost."""

    def __init__(
        self,
        cache: KVCache,
        importance: np.ndarray | None,
        *,
        decode_k: int | str | None,
        block_size: int,
        n_probe: int,
        force_blocks: Sequence[int],
    ):
        n = cache.length + 1
        self.cache, self.block_size, self.n_probe = cache, block_size, n_probe
        self.n_blocks = sparse.n_blocks(n, self.block_size)
        self.force_blocks = check_blocks(force_blocks, self.n_blocks)
        # None where the engine's gate finds nothing to prune: then every row is read.
        self.k = automatic_blocks(n, cache.dtype) if isinstance(decode_k, str) else decode_k
        if self.k is not None and not sparse.sparse_decode_gate(n, self.k, self.block_size):
            self.k = None
        self.importance = _padded(importance, n)
        # Copies of the sampled K rows, which only the compiled kernel reads; for float32 rows, of
        # which a sample is several cache lines, they do not pay (`./course bench`).
        self.probes_copies = cache.dtype == "q8" and backend.kernel("sparse_attention") is not None
        self.seconds = 0.0
        self.blocks_read: list[int] = []
        self.selections: list[list[sparse.Selection]] = []

    def __call__(self, layer: int, q: np.ndarray, k: np.ndarray, v: np.ndarray) -> np.ndarray:
        self.cache.append(layer, k, v)
        rows = self.cache.rows(layer)
        begin = time.perf_counter()
        if self.k is None:
            context = two_pass_rows(q[:, 0], rows)
            chosen: list[sparse.Selection] = []
            self.blocks_read += [self.n_blocks] * len(q)
        else:
            context, chosen = sparse.sparse_attention(
                q[:, 0],
                *rows,
                k_blocks=self.k,
                block_size=self.block_size,
                n_probe=self.n_probe,
                importance=self.importance,
                probe_keys=(self.cache.probe_keys(layer, self.n_probe) if self.probes_copies
                            else None),
            )
            for head, selection in enumerate(chosen):
                ids = selection.ids
                if len(self.force_blocks):
                    ids = np.union1d(ids, self.force_blocks)
                if len(ids) > len(selection.ids):
                    context[head] = self._over_blocks(q[head], rows, ids, head, len(q))
                self.blocks_read.append(len(ids))
        self.seconds += time.perf_counter() - begin
        self.selections.append(chosen)
        return context[:, None]

    def _over_blocks(
        self, q: np.ndarray, rows: LayerRows, ids: np.ndarray, head: int, num_heads: int
    ) -> np.ndarray:
        """Exact attention `[1, d]` of one head's query over the rows of the blocks `ids`."""
        kh = kv_head(head, num_heads, len(rows.k))
        picked = [
            None if a is None else sparse.gather_blocks(a[kh], ids, self.block_size)[None]
            for a in rows
        ]
        return two_pass(q, *picked)

    def stats(self) -> StepStats:
        return StepStats(self.seconds * 1e3, sum(self.blocks_read) / len(self.blocks_read))


def _padded(importance: np.ndarray | None, n: int) -> np.ndarray | None:
    """The prompt's importance with zeros for the generated tokens."""
    if importance is None:
        return None
    padded = np.zeros(n, dtype=np.float32)
    padded[: len(importance)] = importance
    return padded
