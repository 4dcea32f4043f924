"""Blocks by the probe alone: no place reserved for importance, none kept for the last block.

The engine has no such switch. It answers one question of day 11: does k = 1 fail because one block
is too little, or because of the rules that fill it?
"""

from __future__ import annotations

from typing import Any

import numpy as np

from course_lib.attention import attend as attend_rows
from course_lib.attention_common import kv_head, widen
from course_lib.engine.decode import DecodeAttention
from course_lib.engine.model import Attend, Model
from course_lib.gather import gather_rows
from course_lib.selection import ranks
from course_lib.sparse import probe_heads


class ProbeOnlyModel(Model):
    """The given model; decode reads, per layer and query head, the k blocks of best probe score.

    Ties go to the lower block. What prefill does is not touched.
    """

    def __init__(self, model: Model, k: int) -> None:
        super().__init__(model.config, model.weights)
        self.k = k

    def hidden(self, ids, start: int, attend: Attend, **options: Any) -> np.ndarray:
        if not isinstance(attend, DecodeAttention):
            return super().hidden(ids, start, attend, **options)
        decode = attend

        def by_probe(layer: int, q: np.ndarray, k: np.ndarray, v: np.ndarray) -> np.ndarray:
            decode.cache.append(layer, k, v)
            rows = decode.cache.rows(layer)
            scores = probe_heads(q[:, 0], rows, decode.block_size, decode.n_probe)
            out = np.empty_like(q)
            for h, probe in enumerate(scores):
                best = np.flatnonzero(ranks(probe) <= self.k)
                head = rows.head(kv_head(h, len(q), len(rows.k)))
                out[h, 0] = attend_rows(q[h, 0], widen(gather_rows(head, best, decode.block_size)))
                decode.blocks_read.append(len(best))
            return out

        return super().hidden(ids, start, by_probe, **options)
