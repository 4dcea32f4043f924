"""Chunked prefill: one layer's attention of a chunk over its history and over itself.

The policy chooses blocks of history; a ring brings them one after the other; each is attended
without a mask and merged, in ascending order; the chunk itself, under its mask, is merged last;
then its rows are stored. The order is fixed, so the result has the same bits for any number of
slots and threads, and for a store in memory or in a file. It is not bit-equal to attention in one
pass: a merge rounds where one pass does not.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import numpy as np

from course_lib import backend
from course_lib.arrays import LayerRows, NotFiniteError, require_finite
from course_lib.attention_common import as_query, check_rows, finite_output
from course_lib.prefill.density import ChunkDensity
from course_lib.prefill.lse import (
    attend_part,
    check_block_lists,
    empty_part,
    merge_part,
    readers,
)
from course_lib.prefill.policy import BlockChoice, PrefillPolicy
from course_lib.prefill.ring import Ring
from course_lib.prefill.store import BlockStore

TOGETHER = 16
"""Blocks in memory that are read in one call: the bits are those of one call for each."""


class ChunkedPrefill:
    """Attends chunk after chunk of a prompt, layer by layer, under a policy.

    store keeps the history; slots: how many blocks a ring holds, where the store is a file; trace:
    whether ``ring.timeline`` is kept. What was chosen and read is added to ``policy.density``, and
    the time of attention, without choosing and storing, to ``attend_seconds``. Use it in a ``with``
    statement, inside that of the store.
    """

    def __init__(self, store: BlockStore, policy: PrefillPolicy, *, slots: int = 2,
                 trace: bool = False) -> None:
        self.store, self.policy = store, policy
        self.ring = Ring(store, slots, together=slots, trace=trace)
        self.choice: BlockChoice | None = None  # the last one, for pictures
        self.attend_seconds = 0.0

    def attend(self, layer: int, q: Any, k: Any, v: Any) -> np.ndarray:
        """Attention of a chunk, whose rows are then part of the layer's history.

        q float32 [num_heads, Lq, d]; k, v float32 [num_kv_heads, Lq, d], rotated. Returns float32
        [num_heads, Lq, d]. Raises ValueError for shapes that do not fit, NaN or infinity, and for
        a choice of blocks that are not there; CourseError where the store fails. Nothing is
        stored then, unless storing is what failed.
        """
        q, own = self._check(q, k, v)
        try:
            out = self._attend(layer, q, own)
        except NotFiniteError:
            _require_finite(q, own)  # if it was the chunk, say so
            raise
        self._store(layer, own)
        return out

    def _attend(self, layer: int, q: np.ndarray, own: LayerRows) -> np.ndarray:
        history = self.store.length(layer)
        before = self.store.bytes_read
        reads, kept, keepable = self._choose(layer, q)
        chosen = self.store.bytes_read
        out, lse = empty_part(q)

        def attend_itself(out: np.ndarray, lse: np.ndarray) -> None:
            attend_part(q, own, np.arange(1, q.shape[1] + 1), q.shape[1], None, out, lse)

        start, span = time.perf_counter(), self.store.span(layer)
        if span is None and reads.any():
            self._attend_stream(layer, q, attend_itself, reads, out, lse)
        else:
            if span is not None:
                self._attend_span(q, span, reads, out, lse)
            attend_itself(out, lse)
        self.attend_seconds += time.perf_counter() - start
        loaded = self.store.bytes_read - chosen
        cells = loaded // (8 * q.shape[2]) * (len(q) // len(own.k)) * q.shape[1]
        causal = len(q) * q.shape[1] * (q.shape[1] + 1) // 2
        self.policy.density.record(ChunkDensity(
            policy=self.policy.name, layer=layer, available=self.store.n_blocks(layer),
            selected=int(reads.any(axis=1).sum()), kept=kept, keepable=keepable,
            applied=cells + causal, visible=len(q) * history * q.shape[1] + causal,
            estimate_bytes=chosen - before, load_bytes=loaded,
            full_bytes=2 * own.k.nbytes // q.shape[1] * history))
        return out

    def _attend_span(self, q: np.ndarray, rows: LayerRows, reads: np.ndarray, out: np.ndarray,
                     lse: np.ndarray) -> None:
        """History in memory, a few blocks at a time where they lie."""
        size, n = self.store.block_size, rows.k.shape[1]
        taken = np.cumsum(reads.any(axis=1))
        ends = np.searchsorted(taken, np.arange(TOGETHER, len(taken), TOGETHER)) + 1
        for first, last in pairwise([0, *ends.tolist(), len(reads)]):
            some = reads[first:last]
            if some.any():
                part = rows.map(lambda a, at=slice(first * size, last * size): a[:, at])  # type: ignore[misc]
                width = part.k.shape[1]
                attend_part(q, part, np.full(q.shape[1], width, np.int64), size, some, out, lse)
        short = len(reads) * size - n  # tokens that the last block lacks
        self.store.count_rows(size * int(reads.sum()) - short * int(reads[-1:].sum()))

    def _attend_stream(self, layer: int, q: np.ndarray, attend_itself: Callable,
                       reads: np.ndarray, out: np.ndarray, lse: np.ndarray) -> None:
        """History that has to be read, block after block as the ring brings it, and the chunk,
        which is attended while the first blocks are read, and merged last."""
        wanted = [(block, None if heads.all() else heads)
                  for block, heads in enumerate(reads) if heads.any()]
        visible, (own_out, own_lse) = np.empty(q.shape[1], np.int64), empty_part(q)
        with contextlib.closing(self.ring.stream(
                layer, wanted, lambda: attend_itself(own_out, own_lse))) as blocks:
            for some, rows in blocks:
                visible.fill(rows.k.shape[1])
                attend_part(q, rows, visible, self.store.block_size, reads[some], out, lse)
        merge_part(out, lse, own_out, own_lse)
        finite_output(out)

    def close(self) -> None:
        """End the ring's thread; the store stays open."""
        self.ring.close()

    def __enter__(self) -> ChunkedPrefill:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def _check(self, q: Any, k: Any, v: Any) -> tuple[np.ndarray, LayerRows]:
        q = as_query(q, ndim=3)
        rows = check_rows(q, k, v)
        want = (self.store.num_kv_heads, q.shape[1], self.store.head_dim)
        if rows.k.shape != want:
            raise ValueError(f"k and v must have shape {want}, the chunk's rows as the store keeps "
                             f"them, not {rows.k.shape}.")
        if backend.kernel("partial_attention") is None:
            _require_finite(q, rows)  # the kernel finds out by itself, as it goes
        return q, rows

    def _choose(self, layer: int, q: np.ndarray) -> tuple[np.ndarray, int, int]:
        """Which KV heads read which blocks, bool [blocks, num_kv_heads]; and how many cells of the
        policy's mask are kept, of how many."""
        available = self.store.n_blocks(layer)
        if not available:
            return np.zeros((0, self.store.num_kv_heads), bool), 0, 0
        require_finite(q, "q")  # the kernel would find it, but a policy would have used it
        choice = self.policy.select_blocks(q, self.store, layer)
        if not isinstance(choice, BlockChoice):
            raise TypeError(f"select_blocks of policy {self.policy.name!r} must return a "
                            f"BlockChoice, not {type(choice).__name__}.")
        self.choice = choice
        lists = check_block_lists(choice.by_head, self.store.num_kv_heads, available)
        kept, keepable = choice.mask_cells or (q.shape[1] * sum(map(len, lists)),
                                               q.shape[1] * len(lists) * available)
        return readers(lists, self.store.num_kv_heads, available), kept, keepable

    def _store(self, layer: int, rows: LayerRows) -> None:
        """Store the chunk and show the policy every block that has grown."""
        start, size = self.store.length(layer), self.store.block_size
        self.store.append_checked(layer, rows.k, rows.v)
        for block in range(start // size, self.store.n_blocks(layer)):
            first = block * size - start
            near = rows.k[:, max(first, 0) : first + size]
            whole = near if first >= 0 else self.store.keys(layer, block)
            self.policy.on_block_written(layer, block, whole)


def _require_finite(q: np.ndarray, rows: LayerRows) -> None:
    for name, values in (("q", q), ("k", rows.k), ("v", rows.v)):
        require_finite(values, name)
