"""One prompt's prefill, written down: every query of every layer, so that any question about who
looked where is answered without running the model again."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache

import numpy as np

from course_lib.arrays import F32, LayerRows
from course_lib.attention_common import kv_head, softmax
from course_lib.engine import Engine
from course_lib.engine.model import Attend, Model
from course_lib.engine.prefill import float_rows
from course_lib.engine.session import Session
from course_lib.prefill_attention import attend_prefixes
from course_lib.sparse_prefill import PrefillTrace, sparse_prefill_attention


class RecordingPrefill(Model):
    """The given model; `queries` gets float32 [num_heads, n, head_dim] per layer."""

    def __init__(self, model: Model) -> None:
        super().__init__(model.config, model.weights)
        self.queries: list[np.ndarray] = []

    def hidden(self, ids, start: int, attend: Attend, **options) -> np.ndarray:
        def recording(layer: int, q: np.ndarray, k: np.ndarray, v: np.ndarray) -> np.ndarray:
            self.queries.append(q.copy())
            return attend(layer, q, k, v)

        return super().hidden(ids, start, recording, **options)


@dataclass(frozen=True, eq=False)
class PrefillRecord:
    """A prefilled session and its queries, float32 [layers, num_heads, n, head_dim].

    prefill_k, group: the sparse prefill that asked them; None for exact prefill.
    """

    session: Session
    queries: np.ndarray
    prefill_k: int | None = None
    group: int | None = None
    _received: dict[int, np.ndarray] = field(default_factory=dict)

    @property
    def tokens(self) -> int:
        return self.queries.shape[2]

    def received(self, window: int | None = None) -> np.ndarray:
        """The attention weight that the last `window` queries (None: all) gave to each position,
        float32 [layers, num_heads, n], by the engine's own kernels.

        Summed over layers and heads it is the session's importance, but for the order of the
        additions. Kept: the second call is free. ValueError for window < 1.
        """
        count = self.tokens if window is None else min(window, self.tokens)
        if count < 1:
            raise ValueError(f"window must be at least 1, not {window}.")
        if count not in self._received:
            layers, heads, n, _ = self.queries.shape
            sums = np.zeros((layers, heads, n), F32)
            for layer in range(layers):
                k, v = (a[:, :n] for a in float_rows(self.session.cache.rows(layer)))
                if self.prefill_k is None:
                    self._add_exact(layer, k, v, count, sums[layer])
                else:
                    self._add_sparse(layer, k, v, count, sums[layer])
            self._received[count] = sums
        return self._received[count]

    def _add_exact(self, layer: int, k: np.ndarray, v: np.ndarray, count: int,
                   sums: np.ndarray) -> None:
        q = np.ascontiguousarray(self.queries[layer][:, -count:])
        visible = np.arange(self.tokens - count, self.tokens) + 1
        attend_prefixes(q, LayerRows(k, v), visible, np.empty_like(q), sums, 0)

    def _add_sparse(self, layer: int, k: np.ndarray, v: np.ndarray, count: int,
                    sums: np.ndarray) -> None:
        for head, row in enumerate(sums):  # one at a time: the engine adds the heads up
            kh = kv_head(head, len(sums), len(k))
            sparse_prefill_attention(
                self.queries[layer, head : head + 1], k[kh : kh + 1], v[kh : kh + 1],
                k_blocks=self.prefill_k or 1, block_size=self.session.block_size,
                group=self.group, importance=row, importance_from=self.tokens - count,
            )

    def weights(self, window: int | None = None) -> np.ndarray:
        """The weights themselves, float32 [layers, num_heads, n, n]; rows before the last `window`
        queries are zero. 48 · n² bytes for the shipped model: for short prompts."""
        layers, heads, n, d = self.queries.shape
        first = 0 if window is None else max(0, n - window)
        weights = np.zeros((layers, heads, n, n), F32)
        hidden = np.arange(n) > np.arange(first, n)[:, None]
        for layer in range(layers):
            k, _ = float_rows(self.session.cache.rows(layer))
            for h in range(heads):
                keys = k[kv_head(h, heads, len(k)), :n]
                scores = self.queries[layer, h, first:] @ keys.T * F32(d**-0.5)
                scores[hidden] = -np.inf
                weights[layer, h, first:] = softmax(scores)
        return weights

    def trace(self, layer: int) -> PrefillTrace:
        """What sparse prefill chose in one layer. ValueError for a record of exact prefill."""
        if self.prefill_k is None:
            raise ValueError("exact prefill chooses nothing; record one with prefill_k.")
        k, v = (a[:, : self.tokens] for a in float_rows(self.session.cache.rows(layer)))
        return sparse_prefill_attention(
            self.queries[layer], k, v, k_blocks=self.prefill_k,
            block_size=self.session.block_size, group=self.group,
        )[1]


def record_prefill(
    engine: Engine, ids: Sequence[int], *, prefill_k: int | None = None,
    prefill_group: int | None = None, **options
) -> PrefillRecord:
    """Prefill `ids` with the options of Engine.prefill (no policy) and keep every query."""
    recorder = RecordingPrefill(engine.model)
    watched = Engine(engine.config, engine.model.weights, engine.tokenizer)
    watched.model = recorder
    session = watched.prefill(ids, prefill_k=prefill_k, prefill_group=prefill_group, **options)
    session.model = engine.model
    return PrefillRecord(session, np.stack(recorder.queries), prefill_k, prefill_group)


@lru_cache(maxsize=8)
def prefill_record(engine: Engine, ids: tuple[int, ...],
                   prefill_k: int | None = None) -> PrefillRecord:
    """record_prefill, shared by all who ask with the same engine; the last eight are kept."""
    return record_prefill(engine, ids, prefill_k=prefill_k)
