"""The two plain policies: everything, and Quest's pages with a bound on what they can hold."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import numpy as np

from course_lib.arrays import positive_int, real_number
from course_lib.attention_common import quiet
from course_lib.prefill.policy import BlockChoice, PrefillPolicy, check_chunk, everything, register
from course_lib.prefill.quest import PageBounds, page_bounds, top_pages
from course_lib.prefill.trace import REASONS, Trace, reason_codes

if TYPE_CHECKING:
    from course_lib.prefill.store import BlockStore

QUERY_TILE = 256  # query rows whose page scores are held at once


@register
class FullAttentionPolicy(PrefillPolicy):
    """Reads every block: the one that the others are compared with."""

    name = "full"
    supports_decode = True

    def select_blocks(self, q_chunk: np.ndarray, store: BlockStore, layer: int) -> BlockChoice:
        return everything(store.n_blocks(layer), "all")


@register
class QuestPolicy(PrefillPolicy):
    """Reads the blocks whose pages could hold the largest q·k, by their channels' min and max.

    Per KV head: a page's score is the upper bound of q·k in it, the largest over the chunk's
    queries and the KV head's query heads; a block's score is that of its best page. The last block
    is always read, and the best of the others, `budget` blocks together, or without a budget the
    `share` of all, rounded up. Source: Tang et al. 2024, made for decode, here over a chunk.
    """

    name = "quest"
    supports_decode = True

    def __init__(self, page_size: int = 16, *, share: float = 0.5, budget: int | None = None,
                 block_size: int = 128):
        super().__init__(block_size)
        self.page_size = positive_int(page_size, "page_size")
        self.share = real_number(share, "share")
        if not 0 < self.share <= 1:
            raise ValueError(f"share must be above 0 and at most 1, not {share!r}")
        self.budget = None if budget is None else positive_int(budget, "budget")
        self._bounds: dict[int, list[PageBounds]] = {}

    def on_block_written(self, layer: int, block: int, k: np.ndarray) -> None:
        kept = self._bounds.setdefault(layer, [])
        if block > len(kept):
            raise ValueError(f"block {block} of layer {layer} comes before block {len(kept)}")
        kept[block:] = [page_bounds(k, self.page_size)]

    def reset(self) -> None:
        super().reset()
        self._bounds.clear()

    def select_blocks(self, q_chunk: np.ndarray, store: BlockStore, layer: int) -> BlockChoice:
        blocks, q_chunk = store.n_blocks(layer), check_chunk(q_chunk, store)
        if not blocks:
            return everything(0, "all")
        for block in range(len(self._bounds.get(layer, ())), blocks):  # written before we came
            self.on_block_written(layer, block, store.keys(layer, block))
        kept = self._bounds[layer][:blocks]
        scores = self._block_scores(q_chunk, kept)
        budget = math.ceil(self.share * blocks) if self.budget is None else self.budget
        return best_and_last(scores, budget)

    def _block_scores(self, q: np.ndarray, kept: list[PageBounds]) -> np.ndarray:
        """Bound on q·k of every block, float32 `[num_kv_heads, blocks]`."""
        low = np.concatenate([low for low, _ in kept], axis=1)
        high = np.concatenate([high for _, high in kept], axis=1)
        pages = largest_bounds(q, low, high).reshape(len(low), -1, low.shape[1]).max(axis=1)
        first_pages = np.cumsum([0, *(low.shape[1] for low, _ in kept[:-1])])
        return np.maximum.reduceat(pages, first_pages, axis=1)


@quiet
def largest_bounds(q: np.ndarray, low: np.ndarray, high: np.ndarray) -> np.ndarray:
    """The largest page score over a chunk's queries, float32 `[num_heads, pages]`.

    q float32 `[num_heads, tokens, d]`; low, high float32 `[num_kv_heads, pages, d]`. The score
    Σ max(q·low, q·high) is two products: where q is positive high decides, else low.
    """
    group = len(q) // len(low)
    out = np.full((len(q), low.shape[1]), -np.inf, np.float32)
    for h in range(len(q)):
        for first in range(0, q.shape[1], QUERY_TILE):
            rows = q[h, first : first + QUERY_TILE]
            score = np.maximum(rows, 0) @ high[h // group].T
            score += np.minimum(rows, 0) @ low[h // group].T
            np.maximum(out[h], score.max(axis=0), out=out[h])
    return out


def best_and_last(scores: np.ndarray, budget: int) -> BlockChoice:
    """The last block and the budget - 1 best of the others, of every row of `[lists, blocks]`."""
    chosen = top_pages(scores, budget)
    reasons = reason_codes(chosen, "budget")
    reasons[:, -1] = REASONS.index("safety_last")
    none = np.full(scores.shape, np.nan)
    return BlockChoice(tuple(np.flatnonzero(row) for row in chosen),
                       Trace(scores.astype(np.float64), none, reasons, sums=False))
