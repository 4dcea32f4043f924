"""Prefill policies on a real prompt's queries and keys: what is run, and what each run shows."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields

import numpy as np

from course_lib.lab.captured import Layer
from course_lib.prefill import (
    BlockChoice,
    BlockFile,
    BlockStore,
    ChunkedPrefill,
    FullAttentionPolicy,
    PrefillPolicy,
    QuestPolicy,
    XAttentionBSAPolicy,
)
from course_lib.prefill_attention import causal_attention

CHUNK, BLOCK, THRESHOLD = 256, 64, 0.9
LOW_THRESHOLD = 0.3  # for cheaper estimates: where nearly all is read, nearly all is found again
STORES = ("memory", "file", "slow file")


class Watched(PrefillPolicy):
    """A policy whose choices are timed and kept."""

    def __init__(self, policy: PrefillPolicy) -> None:
        super().__init__(policy.block_size)
        self.name, self.policy = policy.name, policy
        self.seconds = 0.0
        self.choices: list[BlockChoice] = []

    def on_block_written(self, layer: int, block: int, k: np.ndarray) -> None:
        start = time.perf_counter()
        self.policy.on_block_written(layer, block, k)
        self.seconds += time.perf_counter() - start

    def select_blocks(self, q_chunk: np.ndarray, store: BlockStore, layer: int) -> BlockChoice:
        start = time.perf_counter()
        choice = self.policy.select_blocks(q_chunk, store, layer)
        self.seconds += time.perf_counter() - start
        self.choices.append(choice)
        return choice


@dataclass(frozen=True)
class PolicyRecord:
    """One way to run the attention of a prompt; times in milliseconds, over all layers.

    estimate: choosing. load: reading blocks of a file, by the prefetching thread; wait: for it.
    mask, applied, bytes: densities, see `course_lib.prefill.density`; estimate_share, load_share:
    bytes read to choose and to attend, of full attention's. recall: of the blocks that the plain
    xattn policy of the same aggregate chooses, how many this one chooses too; None for others.
    """

    policy: str
    store: str
    tokens: int
    threads: int
    ms: float
    estimate_ms: float
    load_ms: float
    wait_ms: float
    mask: float
    applied: float
    bytes: float
    estimate_share: float
    load_share: float
    recall: float | None = None


COLUMNS = tuple(field.name for field in fields(PolicyRecord))

POLICIES: dict[str, Callable[[], PrefillPolicy]] = {
    "full": lambda: FullAttentionPolicy(BLOCK),
    "quest": lambda: QuestPolicy(block_size=BLOCK),
    "xattn majority": lambda: xattn(),
    "xattn K and V": lambda: xattn(estimate_from="kv"),  # as the published policy reads
    "xattn per_head": lambda: xattn(aggregate="per_head"),
}
CURES: dict[str, Callable[[], PrefillPolicy]] = {
    "xattn per_head": lambda: low(),
    "reuse layer0": lambda: low(estimate_reuse="layer0"),
    "half the rows": lambda: low(estimate_sample=0.5),
    "half the blocks": lambda: low(estimate_sample=0.5, sample_of="blocks"),
    "int8 in memory": lambda: low(estimate_from="int8"),
}
"""The first is what the others are compared with."""


def xattn(threshold: float = THRESHOLD, **options) -> XAttentionBSAPolicy:
    return XAttentionBSAPolicy(threshold, block_size=BLOCK, short_query=CHUNK, **options)


def low(**options) -> XAttentionBSAPolicy:
    return xattn(LOW_THRESHOLD, aggregate="per_head", **options)


def replay(
    layers: Sequence[Layer], policy: Watched, store: BlockStore
) -> tuple[float, float, float]:
    """Attention of the whole prompt, chunk by chunk; seconds of all, of loading, and of waiting."""
    tokens = layers[0].q.shape[1]
    start = time.perf_counter()
    with store, ChunkedPrefill(store, policy) as chunked:
        for first in range(0, tokens, CHUNK):
            rows = slice(first, first + CHUNK)
            for number, layer in enumerate(layers):
                chunked.attend(number, layer.q[:, rows], layer.k[:, rows], layer.v[:, rows])
        seconds = time.perf_counter() - start
        return seconds, chunked.ring.load_seconds, chunked.ring.wait_seconds


def store_for(layers: Sequence[Layer], kind: str, bytes_per_second: float) -> BlockStore:
    """An empty store of one of STORES for these layers."""
    heads, tokens, d = layers[0].k.shape
    if kind == "memory":
        return BlockStore(len(layers), heads, d, block_size=BLOCK, capacity=tokens)
    return BlockFile(len(layers), heads, d, capacity=tokens, block_size=BLOCK,
                     throttle=bytes_per_second if kind == "slow file" else None)


def run_way(layers: Sequence[Layer], name: str, make: Callable[[], PrefillPolicy], kind: str,
            threads: int, bytes_per_second: float) -> tuple[PolicyRecord, list[BlockChoice]]:
    """One replay, and what was chosen in it."""
    policy = Watched(make())
    seconds, load, wait = replay(layers, policy, store_for(layers, kind, bytes_per_second))
    stats = policy.get_density_stats()
    full = max(stats["full_bytes"], 1)
    return PolicyRecord(
        name, kind, layers[0].q.shape[1], threads, 1e3 * seconds, 1e3 * policy.seconds, 1e3 * load,
        1e3 * wait, stats["mask_density"], stats["applied_density"], stats["bytes_density"],
        stats["estimate_bytes"] / full, stats["load_bytes"] / full,
    ), policy.choices


def recall(plain: Sequence[BlockChoice], other: Sequence[BlockChoice], kv_heads: int) -> float:
    """Share of the blocks that `plain` chooses, over chunks, layers and KV heads, which `other`
    chooses too."""
    wanted = found = 0
    for a, b in zip(plain, other, strict=True):
        for head in range(kv_heads):
            wanted += len(a.of_head(head))
            found += len(np.intersect1d(a.of_head(head), b.of_head(head)))
    return found / wanted if wanted else 1.0


def one_pass(layers: Sequence[Layer]) -> float:
    """Seconds of exact attention over the whole prompt at once, layer after layer."""
    start = time.perf_counter()
    for layer in layers:
        causal_attention(layer.q, layer.k, layer.v)
    return time.perf_counter() - start
