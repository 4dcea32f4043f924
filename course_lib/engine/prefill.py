"""Prefill: a whole prompt through the model, its rows cached and its attention weights counted."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from course_lib.engine.model import TILE, Model
from course_lib.engine.session import Session
from course_lib.kvcache import KVCache, LayerRows
from course_lib.prefill_attention import causal_attention
from course_lib.quant import dequantize_rows
from course_lib.sparse_prefill import sparse_prefill_attention

IMPORTANCE_RULES = ("all_queries", "last_window", "none")
MINIBATCH = 256


def run_prompt(
    model: Model,
    ids: list[int],
    *,
    kv: str = "f32",
    importance: str = "none",
    window: int | None = None,
    prefill_k: int | None = None,
    prefill_group: int | None = None,
    block_size: int = 32,
    tile: int = TILE,
    on_progress: Callable[[int, int], None] | None = None,
) -> tuple[Session, np.ndarray]:
    """A session that holds the prompt, and the hidden states `[n, hidden]` of all its tokens.

    Layer by layer over the whole prompt, so importance adds up in the order layer, head, query.
    Options as `Engine.prefill`, `tile` as `Model.hidden`; the session has no logits yet.
    """
    n, config = len(ids), model.config
    cache = KVCache(
        config.num_hidden_layers,
        config.num_key_value_heads,
        config.head_dim,
        dtype=kv,
        block_size=block_size,
    )
    session = Session(model, cache, block_size)
    counted = None if importance == "none" else np.zeros(n, dtype=np.float32)
    window = window if window is not None else (n % MINIBATCH or MINIBATCH)
    counted_from = max(0, n - window) if importance == "last_window" else 0

    def attend(layer: int, q: np.ndarray, k: np.ndarray, v: np.ndarray) -> np.ndarray:
        cache.append(layer, k, v)
        k, v = float_rows(cache.rows(layer))
        if prefill_k is None:
            return causal_attention(q, k, v, importance=counted, importance_from=counted_from)
        context, _ = sparse_prefill_attention(
            q,
            k,
            v,
            k_blocks=prefill_k,
            block_size=block_size,
            minibatch=MINIBATCH,
            group=prefill_group,
            importance=counted,
            importance_from=counted_from,
        )
        return context

    hidden = model.hidden(ids, 0, attend, tile=tile, on_progress=on_progress)
    session.importance = counted
    return session, hidden


def float_rows(rows: LayerRows) -> tuple[np.ndarray, np.ndarray]:
    """The rows as attention sees them: q8 rows are read back, so prefill meets their rounding."""
    if rows.k_scale is None:
        return rows.k, rows.v
    return dequantize_rows(rows.k, rows.k_scale), dequantize_rows(rows.v, rows.v_scale)
