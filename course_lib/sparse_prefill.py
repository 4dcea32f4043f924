"""Sparse prefill as the public engine does it: one block selection for a whole mini-batch.

Lesson 11-2 shows what this does to a prompt: the set of blocks is chosen by the last token of a
mini-batch and clipped causally, so an early query may see nothing at all.
"""

import math
from dataclasses import dataclass
from typing import Any

import numpy as np

from course_lib.arrays import F32, positive_int
from course_lib.attention import check_prefill, kv_head, quiet, softmax
from course_lib.sparse import Selection, gather_blocks, select_blocks


def prefill_selection(q: Any, k: Any, *, k_blocks: int, block_size: int = 32,
                      n_probe: int = 8) -> Selection:
    """Choose the blocks of a mini-batch by the probe scores of its last token.

    q float32 [d] of that token, k float32 [n, d] up to and including it. No importance is used,
    so the recency rule always applies: the last block is always chosen. Errors as for
    sparse.select_blocks. Source: engine rule.
    """
    return select_blocks(q, k, k_blocks=k_blocks, block_size=block_size, n_probe=n_probe)


@dataclass(frozen=True, eq=False)
class PrefillTrace:
    """What sparse prefill did: visible bool [num_heads, Lq] (the query saw some token), groups
    (first, end) positions that shared a selection, selections[head][group] (None = dense)."""

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
    """Split positions start..end-1 into mini-batches and those into groups of ``group`` tokens.

    Each (first, end) pair shares one selection; group None makes it one per mini-batch.
    """
    minibatch = positive_int(minibatch, "minibatch")
    size = minibatch if group is None else positive_int(group, "group")
    pairs = []
    for batch in range(start, end, minibatch):
        batch_end = min(batch + minibatch, end)
        pairs += [(g, min(g + size, batch_end)) for g in range(batch, batch_end, size)]
    return pairs


@quiet
def sparse_prefill_attention(
    q: Any, k: Any, v: Any, *, start: int = 0, k_blocks: int, block_size: int = 32,
    n_probe: int = 8, minibatch: int = 256, group: int | None = None,
    importance: np.ndarray | None = None, importance_from: int = 0,
) -> tuple[np.ndarray, PrefillTrace]:
    """Prefill attention over blocks chosen once per mini-batch (or per ``group`` tokens).

    Arrays, importance and errors as for attention.causal_attention. Mini-batches are counted
    from ``start``. A mini-batch whose context is at most two blocks is dense (the engine's
    gate). A query that sees no selected token gets zeros and adds no importance. Returns
    (out float32 [num_heads, Lq, head_dim], PrefillTrace). Source: engine rule.
    """
    k_blocks, block_size = positive_int(k_blocks, "k_blocks"), positive_int(block_size, "block_size")
    n_probe = positive_int(n_probe, "n_probe")
    q, rows, importance = check_prefill(q, k, v, start, importance)
    num_heads, num_queries, head_dim = q.shape
    groups = prefill_groups(start, start + num_queries, minibatch, group)
    inv_sqrt_d = F32(1 / math.sqrt(head_dim))
    out = np.zeros_like(q)
    visible = np.ones((num_heads, num_queries), bool)
    selections: list[list[Selection | None]] = []
    for h in range(num_heads):
        kh = kv_head(h, num_heads, rows.k.shape[0])
        chosen_of_head: list[Selection | None] = []
        for first, end in groups:
            part = slice(first - start, end - start)
            head_k, head_v = rows.k[kh, :end], rows.v[kh, :end]
            tokens, chosen = np.arange(end), None
            if end > 2 * block_size:
                chosen = prefill_selection(q[h, end - 1 - start], head_k, k_blocks=k_blocks,
                                           block_size=block_size, n_probe=n_probe)
                tokens = chosen.tokens(end, block_size)
                head_k = gather_blocks(head_k, chosen.ids, block_size)
                head_v = gather_blocks(head_v, chosen.ids, block_size)
            chosen_of_head.append(chosen)
            positions = np.arange(first, end)
            sees = positions >= tokens[0]
            visible[h, part] = sees
            queries = q[h, part][sees]
            scores = (queries * inv_sqrt_d) @ head_k.T
            scores[tokens > positions[sees, None]] = -np.inf
            weights = softmax(scores, out=scores)
            out[h, part][sees] = weights @ head_v
            if importance is not None:
                full = np.zeros(end, F32)
                for position, row in zip(positions[sees], weights):
                    if position >= importance_from:
                        importance[tokens] += row
        selections.append(chosen_of_head)
    return out, PrefillTrace(visible, groups, selections)
