"""Prefill chunk by chunk, each layer reading the blocks of history that a policy chooses.

The chunk is the outer loop and the layer the inner one, so hidden states and queries exist for one
chunk only; keys and values go to a block store, in memory or in a file.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from course_lib.engine.checks import check_count
from course_lib.engine.config import ModelConfig
from course_lib.engine.fits import require_context
from course_lib.engine.model import TILE, Model
from course_lib.engine.session import Session
from course_lib.kvcache import KVCache
from course_lib.prefill import (
    BlockFile,
    BlockStore,
    ChunkedPrefill,
    PrefillPolicy,
    Slot,
    make_policy,
)
from course_lib.quant import dequantize_rows, quantize_rows

CHUNK = 1024  # tokens of a chunk
SLOTS = 8  # blocks of a ring, where the rows are in a file


@dataclass(frozen=True)
class Chunked:
    """How a prompt is run in chunks; as `Engine.prefill`."""

    policy: PrefillPolicy
    chunk: int
    offload: str | Path | bool | None
    ram_budget: int | None
    slots: int


def as_chunked(policy: str | PrefillPolicy, chunk: int, offload: str | Path | bool | None,
               ram_budget: int | None, slots: int) -> Chunked:
    """The options, checked; ValueError for an unknown policy and what does not go together.

    Chunks are whole blocks, so that no block is half history and half chunk.
    """
    made = policy if isinstance(policy, PrefillPolicy) else make_policy(policy)
    check_count("chunk", chunk)
    check_count("ram_budget", ram_budget, optional=True)
    check_count("slots", slots)
    if not made.supports_prefill:
        raise ValueError(f"policy {made.name!r} is not for prefill")
    if chunk % made.block_size:
        raise ValueError(f"chunk must be a multiple of the policy's block_size {made.block_size}, "
                         f"not {chunk}; give {-(-chunk // made.block_size) * made.block_size}")
    if ram_budget is not None and not offload:
        raise ValueError("ram_budget needs offload: without it all rows are in memory")
    if slots != SLOTS and not offload:
        raise ValueError("slots needs offload: rows in memory are attended where they lie")
    return Chunked(made, chunk, offload, ram_budget, slots)


def run_chunked(
    model: Model,
    ids: list[int],
    options: Chunked,
    *,
    kv: str = "f32",
    block_size: int = 32,
    tile: int = TILE,
    on_progress: Callable[[int, int], None] | None = None,
) -> Session:
    """A session that holds the prompt and the logits after it.

    The policy begins anew (`reset`), so what it saw before changes nothing. Options as
    `Engine.prefill`. The store is gone when this returns, and its file too, also after an error.
    """
    config, policy, chunk = model.config, options.policy, options.chunk
    require_context(config, kv, len(ids), chunk=chunk, offloaded=bool(options.offload))
    policy.reset()
    with (_store(config, len(ids), options) as store,
          ChunkedPrefill(store, policy, slots=options.slots) as chunked):

        def attend(layer: int, q: np.ndarray, k: np.ndarray, v: np.ndarray) -> np.ndarray:
            if kv == "q8":  # the rows as the cache will give them back
                k, v = dequantize_rows(*quantize_rows(k)), dequantize_rows(*quantize_rows(v))
            return chunked.attend(layer, q, k, v)

        last = np.empty(0, np.float32)
        for first in range(0, len(ids), chunk):
            some = ids[first : first + chunk]
            last = model.hidden(some, first, attend, tile=tile)[-1].copy()
            if on_progress is not None:
                on_progress(first + len(some), len(ids))
        cache = KVCache(config.num_hidden_layers, config.num_key_value_heads, config.head_dim,
                        dtype=kv, block_size=block_size)
        _fill(cache, store)
    session = Session(model, cache, block_size)
    session.policy, session.logits = policy, model.logits(last)
    return session


def _store(config: ModelConfig, tokens: int, options: Chunked) -> BlockStore:
    """A store for so many tokens: in memory, or in a file of the folder `offload`."""
    shape = config.num_hidden_layers, config.num_key_value_heads, config.head_dim
    size = options.policy.block_size
    if not options.offload:
        return BlockStore(*shape, block_size=size, capacity=tokens)
    folder = None if options.offload is True else options.offload
    return BlockFile(*shape, capacity=tokens, folder=folder, block_size=size,
                     ram_budget=options.ram_budget)


def _fill(cache: KVCache, store: BlockStore) -> None:
    """Copy the rows of every layer from the store to the cache, block by block."""
    slot: Slot | None = None
    for layer in range(store.num_layers):
        for block in range(store.n_blocks(layer)):
            rows = store.resident(layer, block)
            if rows is None:
                slot = slot or Slot(-1, store.block_shape)
                rows = slot.rows(store.load(layer, block, slot))
            cache.append(layer, rows.k, rows.v)
