"""The XAttention policy: antidiagonal scores of a chunk, a threshold, one list from many heads."""

from __future__ import annotations

import math
from collections.abc import Iterator

import numpy as np

from course_lib.arrays import positive_int, real_number
from course_lib.prefill.aggregate import AGGREGATORS, aggregate
from course_lib.prefill.find_blocks import COMPATS, check_threshold, find_blocks_chunked
from course_lib.prefill.policy import BlockChoice, PrefillPolicy, check_chunk, everything, register
from course_lib.prefill.scores import (
    flat_group_gemm_fuse_reshape,
    padded,
    softmax_fuse_block_sum,
)
from course_lib.prefill.store import BlockStore, Slot
from course_lib.prefill.xattn import base_2_scale, check_blocks
from course_lib.quant import dequantize_rows, quantize_rows

KEY_BLOCKS = 16  # blocks of keys that are scored together
CHOICES = {
    "aggregate": tuple(AGGREGATORS),
    "compat": COMPATS,
    "estimate_reuse": ("none", "layer0"),
    "estimate_from": ("f32", "int8", "kv"),
    "sample_of": ("rows", "blocks"),
}


@register
class XAttentionBSAPolicy(PrefillPolicy):
    """Reads the blocks that together hold `threshold` of the estimated softmax mass.

    Every query head and query block of the chunk keeps its own shortest list (`compat` as in
    `find_blocks_chunked`); `aggregate` makes of these one list for all, or with "per_head" one for
    each KV head. A chunk of fewer than `short_query` tokens (default stride · 128) reads all.

    chunk_size: queries scored at once. estimate_reuse "layer0": other layers take layer 0's list.
    estimate_sample: share of the chunk's strides of queries ("rows") or of the history's blocks
    ("blocks", where a block left out takes the sums of the scored one before it) that is scored.
    estimate_from "int8": keys are kept as int8 rows in memory for the estimate, so that it reads
    nothing from the store; "kv": it reads K and V of every block, of which it needs K alone, as the
    published policy does. Only for prefill: one query is no stride. Source: Xu et al. 2025, and
    the policy design that the course quotes.
    """

    name = "xattn"

    def __init__(
        self,
        threshold: float | np.ndarray = 0.95,
        stride: int = 8,
        block_size: int = 128,
        chunk_size: int = 16384,
        aggregate: str = "majority",
        compat: str = "exact",
        estimate_reuse: str = "none",
        estimate_sample: float = 1.0,
        estimate_from: str = "f32",
        sample_of: str = "rows",
        short_query: int | None = None,
    ):
        super().__init__(block_size)
        self.threshold = check_threshold(threshold)
        self.stride = positive_int(stride, "stride")
        self.chunk_size = positive_int(chunk_size, "chunk_size")
        check_blocks(stride, block_size)
        if self.chunk_size % self.block_size:
            raise ValueError(f"chunk_size {chunk_size} is no multiple of block_size {block_size}")
        if not 0 < real_number(estimate_sample, "estimate_sample") <= 1:
            raise ValueError(f"estimate_sample must be above 0 and at most 1, "
                             f"not {estimate_sample!r}")
        self.aggregate, self.compat, self.estimate_sample = aggregate, compat, estimate_sample
        self.estimate_reuse, self.estimate_from = estimate_reuse, estimate_from
        self.sample_of = sample_of
        for option, known in CHOICES.items():
            if (value := getattr(self, option)) not in known:
                raise ValueError(f"{option} must be one of {', '.join(known)}, not {value!r}")
        self.short_query = self.stride * 128 if short_query is None \
            else positive_int(short_query, "short_query")
        self._int8: dict[int, list[tuple[np.ndarray, np.ndarray]]] = {}
        self._layer0: tuple[int, BlockChoice] | None = None

    def on_block_written(self, layer: int, block: int, k: np.ndarray) -> None:
        if self.estimate_from == "int8":
            kept = self._int8.setdefault(layer, [])
            if block > len(kept):
                raise ValueError(f"block {block} of layer {layer} comes before block {len(kept)}")
            kept[block:] = [quantize_rows(k)]

    def reset(self) -> None:
        super().reset()
        self._int8.clear()
        self._layer0 = None

    def select_blocks(self, q_chunk: np.ndarray, store: BlockStore, layer: int) -> BlockChoice:
        if store.block_size != self.block_size:
            raise ValueError(f"the policy chooses blocks of {self.block_size} tokens and the store "
                             f"keeps blocks of {store.block_size}: give both the same block_size")
        blocks, q_chunk = store.n_blocks(layer), check_chunk(q_chunk, store)
        if self.threshold.ndim and len(self.threshold) != len(q_chunk):
            raise ValueError(f"{len(self.threshold)} thresholds do not fit {len(q_chunk)} heads")
        if q_chunk.shape[1] < max(self.short_query, self.stride):
            return everything(blocks, "short_query")
        if not blocks:
            return everything(0, "all")
        if self.estimate_reuse == "layer0" and layer and self._layer0 is not None \
                and self._layer0[0] == blocks:
            return self._layer0[1]
        choice = self._choose(q_chunk, store, layer, blocks)
        if layer == 0:
            self._layer0 = blocks, choice
        return choice

    def _choose(
        self, q: np.ndarray, store: BlockStore, layer: int, blocks: int
    ) -> BlockChoice:
        pieces = [self._block_sums(q[:, first : first + self.chunk_size], store, layer, blocks)
                  for first in range(0, q.shape[1], self.chunk_size)]
        sums = np.concatenate(pieces, axis=1)
        masks = find_blocks_chunked(sums, 0, self._thresholds(), mode="prefill", causal=False,
                                    compat=self.compat)
        joined = aggregate(masks, self.aggregate, num_kv_heads=store.num_kv_heads,
                           block_sums=sums, threshold=self._thresholds())
        return BlockChoice(*joined, mask_cells=(int(masks.sum()), masks.size))

    def _thresholds(self) -> float | np.ndarray:
        return self.threshold if self.threshold.ndim else float(self.threshold)

    def _block_sums(
        self, q: np.ndarray, store: BlockStore, layer: int, blocks: int
    ) -> np.ndarray:
        """Estimated softmax mass of each block of history, `[num_heads, query blocks, blocks]`."""
        scored = np.arange(blocks)
        if self.estimate_sample < 1 and self.sample_of == "rows":
            q = sample_strides(q, self.stride, self.estimate_sample)
        elif self.estimate_sample < 1:
            scored = sample(blocks, self.estimate_sample)
        q = padded(q, -q.shape[1] % self.stride)
        parts = [flat_group_gemm_fuse_reshape(q, k, self.stride)
                 for k in self._scored_keys(store, layer, scored, blocks)]
        sums = softmax_fuse_block_sum(
            parts[0] if len(parts) == 1 else np.concatenate(parts, axis=2),
            self.block_size // self.stride, scale=base_2_scale(self.stride, q.shape[2]),
            is_causal=False)
        stands_for = np.searchsorted(scored, np.arange(blocks), side="right") - 1
        return sums if len(scored) == blocks else sums[:, :, stands_for]

    def _scored_keys(
        self, store: BlockStore, layer: int, scored: np.ndarray, blocks: int
    ) -> Iterator[np.ndarray]:
        """Keys of the blocks to score, some at a time; all at once where they lie together."""
        if self.estimate_from == "f32" and len(scored) == blocks \
                and store.length(layer) % self.stride == 0 \
                and (together := store.all_keys(layer)) is not None:
            yield together
            return
        for first in range(0, len(scored), KEY_BLOCKS):
            keys = [self._keys(store, layer, int(b)) for b in scored[first : first + KEY_BLOCKS]]
            k = np.concatenate(keys, axis=1)
            yield padded(k, -k.shape[1] % self.stride)

    def _keys(self, store: BlockStore, layer: int, block: int) -> np.ndarray:
        if self.estimate_from == "f32":
            return store.keys(layer, block)
        if self.estimate_from == "kv":
            slot = Slot(-1, store.block_shape)
            return slot.rows(store.load(layer, block, slot)).k.copy()
        kept = self._int8.setdefault(layer, [])
        for missing in range(len(kept), block + 1):  # written before we came
            self.on_block_written(layer, missing, store.keys(layer, missing))
        return dequantize_rows(*kept[block])


def sample(count: int, share: float) -> np.ndarray:
    """Numbers below `count`, evenly spaced, the first and the last among them: `share` of them."""
    some = min(max(math.ceil(share * count), 2), count)
    return np.unique(np.linspace(0, count - 1, some).round().astype(np.int64))


def sample_strides(q: np.ndarray, stride: int, share: float) -> np.ndarray:
    """`share` of the whole strides of a chunk's queries `[num_heads, tokens, d]`, in order."""
    whole = q.shape[1] // stride
    strides = q[:, : whole * stride].reshape(len(q), whole, stride, -1)
    return np.ascontiguousarray(strides[:, sample(whole, share)]).reshape(len(q), -1, q.shape[2])
