"""Which blocks each query block of one head keeps under a policy, as one square mask.

The queries and keys are those of a recorded prefill; every query block chooses among the blocks
before it and always reads its own.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from course_lib.attention import kv_head
from course_lib.lab.captured import Layer
from course_lib.prefill import BlockStore, QuestPolicy, xattn_estimate
from course_lib.prefill.find_blocks import REASONS as MASK_REASONS
from course_lib.prefill.find_blocks import threshold_blocks
from course_lib.quant import dequantize_rows, quantize_rows


@dataclass(frozen=True, eq=False)
class HeadMask:
    """mask bool [blocks, blocks]; reason: for each cell a word, "" above the diagonal. estimate
    float64 [blocks, blocks]: the share of its row that the policy expects in a block, None where
    it has no such number."""

    mask: np.ndarray
    reason: np.ndarray
    estimate: np.ndarray | None

    @property
    def density(self) -> float:
        """Cells kept, of those that a causal mask shows."""
        return float(self.mask.sum() / np.tril(np.ones(self.mask.shape)).sum())

    def kept(self, mass: np.ndarray) -> float:
        """The share of the attention mass [blocks, blocks] that lies in cells kept."""
        return float((mass * self.mask).sum() / mass.sum())


def full_mask(blocks: int) -> HeadMask:
    """Everything that is visible."""
    mask = np.tril(np.ones((blocks, blocks), bool))
    reason = np.where(mask, "all", "").astype(object)
    return HeadMask(mask, reason, None)


def xattn_masks(layer: Layer, *, block_size: int, threshold: float, stride: int = 8,
                compat: str = "exact", keys: str = "f32") -> list[HeadMask]:
    """XAttention's mask of every query head. keys "int8": the estimate sees quantized keys.

    With compat="upstream" a block that the exact rule would leave out has the reason "extra".
    """
    k = layer.k if keys == "f32" else dequantize_rows(*quantize_rows(layer.k))
    sums, mask = xattn_estimate(layer.q, k, stride=stride, block_size=block_size,
                                threshold=threshold, compat=compat)
    exact = threshold_blocks(np.tril(sums), 0, threshold, causal=True)
    words = np.array(MASK_REASONS, object)[exact.reason]
    blocks = np.arange(mask.shape[1])
    above = blocks[None, :] > blocks[:, None]
    masks = []
    for head in range(len(mask)):
        reason = words[head].copy()
        reason[above] = ""
        reason[mask[head] & ~exact.mask[head]] = "extra"
        reason[~mask[head] & exact.mask[head]] = "not_selected"
        share = np.tril(sums[head]).astype(np.float64)
        masks.append(HeadMask(mask[head], reason, share / share.sum(axis=1, keepdims=True)))
    return masks


def quest_masks(layer: Layer, *, block_size: int, share: float) -> list[HeadMask]:
    """Quest's mask of every query head, block by block through the policy itself; the query heads
    of a KV head share one."""
    heads, n, d = layer.q.shape
    kv_heads, blocks = len(layer.k), -(-n // block_size)
    mask = np.zeros((kv_heads, blocks, blocks), bool)
    reason = np.full(mask.shape, "", object)
    policy = QuestPolicy(share=share, block_size=block_size)
    with BlockStore(1, kv_heads, d, block_size=block_size) as store:
        for row in range(blocks):
            tokens = slice(row * block_size, (row + 1) * block_size)
            if row:
                choice = policy.select_blocks(layer.q[:, tokens], store, 0)
                for traced in choice.trace:
                    head = range(kv_heads) if traced.head is None else traced.head
                    reason[head, row, traced.block] = traced.reason
                    mask[head, row, traced.block] = traced.selected
            mask[:, row, row], reason[:, row, row] = True, "diagonal"
            store.append(0, layer.k[:, tokens], layer.v[:, tokens])
    return [HeadMask(mask[at], reason[at], None)
            for at in (kv_head(h, heads, kv_heads) for h in range(heads))]


