"""Sparse prefill as the public engine does it: one block selection for a whole mini-batch.

The set of blocks is chosen by the last token of a mini-batch and clipped causally, so an early
query of it may see nothing at all. Lesson 11-2 shows what this does to a prompt.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np

from course_lib.arrays import F32, LayerRows, positive_int, whole_number
from course_lib.attention_common import kv_head
from course_lib.prefill_attention import (
    add_heads,
    attend_prefixes,
    check_prefill,
    first_counted,
)
from course_lib.sparse import Selection, gather_rows, probe_heads, select_blocks, select_heads


def prefill_selection(q: Any, k: Any, *, k_blocks: int, block_size: int = 32,
                      n_probe: int = 8) -> Selection:
    """Choose the blocks of a mini-batch by the probe scores of its last token.

    q float32 [d] of that token, k float32 [n, d] up to and including it. No importance is used,
    so recency always acts: the last block is always chosen. Raises ValueError as
    sparse.select_blocks does. Source: engine rule.
    """
    return select_blocks(q, k, k_blocks=k_blocks, block_size=block_size, n_probe=n_probe)


@dataclass(frozen=True, eq=False)
class PrefillTrace:
    """What sparse prefill did.

    visible: bool [num_heads, Lq], whether the query saw any token. groups: (first, end) positions
    that shared a selection. selections: [head][group], None where the gate made it dense.
    """

    visible: np.ndarray
    groups: list[tuple[int, int]]
    selections: list[list[Selection | None]]

    @property
    def blind_fraction(self) -> float:
        """Share of (head, query) pairs that attended to nothing."""
        return float(1 - self.visible.mean())

    @property
    def blind_positions(self) -> int:
        """Number of query positions that attended to nothing in every head."""
        return int((~self.visible.any(axis=0)).sum())


def prefill_groups(start: int, end: int, minibatch: int = 256,
                   group: int | None = None) -> list[tuple[int, int]]:
    """Split positions start..end-1 into mini-batches, and those into groups of ``group`` tokens.

    Each (first, end) pair shares one selection; group None makes that one per mini-batch. Raises
    ValueError for sizes below 1.
    """
    start, end = whole_number(start, "start"), whole_number(end, "end")
    minibatch = positive_int(minibatch, "minibatch")
    size = minibatch if group is None else positive_int(group, "group")
    pairs = []
    for batch in range(start, end, minibatch):
        batch_end = min(batch + minibatch, end)
        pairs += [(g, min(g + size, batch_end)) for g in range(batch, batch_end, size)]
    return pairs


def sparse_prefill_attention(
    q: Any, k: Any, v: Any, *, start: int = 0, k_blocks: int, block_size: int = 32,
    n_probe: int = 8, minibatch: int = 256, group: int | None = None,
    importance: np.ndarray | None = None, importance_from: int = 0,
) -> tuple[np.ndarray, PrefillTrace]:
    """Prefill attention over blocks chosen once per mini-batch (or per ``group`` tokens).

    Arrays, importance and errors as for attention.causal_attention. Mini-batches are counted from
    ``start``; each is chosen by the query of its last token over the context up to that token. A
    context of at most two blocks is dense (the engine's gate). A query that sees no selected
    token gets zeros and adds no importance. Returns (out float32 [num_heads, Lq, head_dim],
    PrefillTrace). Source: engine rule.
    """
    block_size = positive_int(block_size, "block_size")
    start = whole_number(start, "start")
    q, rows = check_prefill(q, k, v, start, importance)
    groups = prefill_groups(start, start + q.shape[1], minibatch, group)
    chosen = [_choose(q[:, end - 1 - start], rows.upto(end), k_blocks, block_size, n_probe)
              for _, end in groups]
    out = np.empty_like(q)
    visible = np.zeros(q.shape[:2], bool)
    received = None if importance is None else np.zeros((len(q), rows.k.shape[1]), F32)
    for h in range(len(q)):
        kh = kv_head(h, len(q), len(rows.k))
        for (first, end), by_head in zip(groups, chosen, strict=True):
            picked, tokens = rows.upto(end).head(kh), np.arange(end)
            if (selection := by_head[h]) is not None:
                tokens = selection.tokens(end, block_size)
                picked = gather_rows(picked, selection.ids, block_size)
            seen = np.searchsorted(tokens, np.arange(first, end), side="right")
            part = slice(first - start, end - start)
            visible[h, part] = seen > 0
            # The sums of the picked tokens go on from where the groups before have left them.
            sums = None if received is None else received[h, tokens][None]
            attend_prefixes(q[h, part][None], picked.map(lambda a: a[None]), seen,
                            out[h, part][None], sums,
                            first_counted(importance_from, first, end - first))
            if received is not None and sums is not None:
                received[h, tokens] = sums[0]
    add_heads(importance, received)
    by_head_first = [[group[h] for group in chosen] for h in range(q.shape[0])]
    return out, PrefillTrace(visible, groups, by_head_first)


def _choose(q: np.ndarray, rows: LayerRows, k_blocks: int, block_size: int,
            n_probe: int) -> list[Selection] | list[None]:
    """The prefill_selection of every head, or Nones where the context is too short to prune."""
    if rows.k.shape[1] <= 2 * block_size:
        positive_int(k_blocks, "k_blocks")
        return [None] * len(q)
    return select_heads(probe_heads(q, rows, block_size, n_probe), None, k_blocks)
