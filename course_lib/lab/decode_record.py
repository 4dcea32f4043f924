"""One exact answer, written down: every query that decode asked the KV cache, step by step.

What block selection would do with a query can then be studied at any k without running the model
again. The recorder is a Model whose `hidden` keeps the queries it hands to attention, so prefill,
decode and their kernels stay the engine's own.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from course_lib.arrays import LayerRows
from course_lib.attention import head_scores, kv_head, softmax, widen
from course_lib.engine import Generation, Session, generate_from
from course_lib.engine.model import Attend, Model
from course_lib.sparse import Selection, n_blocks, select_blocks


class RecordingModel(Model):
    """The given model; `queries` gets one float32 [layers, num_heads, head_dim] per decode step."""

    def __init__(self, model: Model) -> None:
        super().__init__(model.config, model.weights)
        self.queries: list[np.ndarray] = []

    def hidden(self, ids, start: int, attend: Attend, **options) -> np.ndarray:
        asked: list[np.ndarray] = []

        def recording(layer: int, q: np.ndarray, k: np.ndarray, v: np.ndarray) -> np.ndarray:
            asked.append(q[:, -1].copy())
            return attend(layer, q, k, v)

        hidden = super().hidden(ids, start, recording, **options)
        self.queries.append(np.stack(asked))
        return hidden


@dataclass(frozen=True)
class DecodeRecord:
    """A generation and what is needed to look at any of its steps.

    Step s feeds token `generation.ids[s]`; its context is the prompt and the s + 1 tokens fed so
    far. queries: float32 [steps, layers, num_heads, head_dim], normed and rotated as attention
    gets them. session: the session after the last step (its cache holds every row).
    """

    generation: Generation
    queries: np.ndarray
    session: Session
    prompt_tokens: int

    @property
    def steps(self) -> int:
        return len(self.queries)

    def context(self, step: int) -> int:
        """Tokens that the query of `step` may read, itself included."""
        return self.prompt_tokens + step + 1

    def rows(self, step: int, layer: int, head: int) -> LayerRows:
        """K, V rows [n, head_dim] (and q8 scales [n]) that one query head reads at one step."""
        rows = self.session.cache.rows(layer)
        n = self.context(step)
        kh = kv_head(head, self.queries.shape[2], rows.k.shape[0])
        return rows.head(kh).map(lambda a: a[:n])

    def selection(
        self, step: int, layer: int, head: int, *, k_blocks: int, n_probe: int = 8,
        importance: np.ndarray | None = None,
    ) -> Selection:
        """The blocks that decode would read for this query, by sparse.select_blocks.

        importance: float32 [prompt tokens] or None; generated tokens count as zero, as in the
        engine. Raises ValueError as select_blocks does.
        """
        rows = self.rows(step, layer, head)
        if importance is not None:
            padding = np.zeros(self.context(step) - len(importance), np.float32)
            importance = np.concatenate((importance, padding))
        return select_blocks(
            self.queries[step, layer, head], rows.k, k_scale=rows.k_scale, k_blocks=k_blocks,
            block_size=self.session.block_size, n_probe=n_probe, importance=importance,
        )

    def attention_mass(self, step: int, layer: int, head: int) -> np.ndarray:
        """The share of exact attention that each block gets, float64 [n_blocks], summing to 1."""
        rows = widen(self.rows(step, layer, head))
        weights = softmax(head_scores(self.queries[step, layer, head], rows))
        starts = np.arange(n_blocks(len(weights), self.session.block_size))
        return np.add.reduceat(weights.astype(np.float64), starts * self.session.block_size)


def record_decode(
    session: Session, max_new_tokens: int, decode_k: int | None = None, *, n_probe: int = 8,
    trace: bool = False,
) -> DecodeRecord:
    """Generate from a prefilled session, which is left as it is, and keep every query.

    decode_k=None records the exact run. Raises CourseError and ValueError as generate_from does,
    and ValueError if the answer ends before decode was asked anything.
    """
    recorder = RecordingModel(session.model)
    start = session.fork()
    start.model = recorder
    last = start

    def keep(token: int, fed: Session) -> None:
        nonlocal last
        last = fed

    generation = generate_from(start, max_new_tokens, decode_k, n_probe=n_probe, trace=trace,
                               on_step=keep)
    if not recorder.queries:
        raise ValueError("the answer ended before decode read the cache; record a longer one.")
    return DecodeRecord(generation, np.stack(recorder.queries), last, len(session))


def record_fed(session: Session, generation: Generation, steps: int) -> DecodeRecord:
    """Feed the first `steps` tokens of a generation to a prefilled session, which is left as it
    is, under exact decode, and keep every query: the same text, asked of another cache."""
    recorder = RecordingModel(session.model)
    fed = session.fork()
    fed.model = recorder
    for token in generation.ids[:steps]:
        fed.step(token)
    return DecodeRecord(generation, np.stack(recorder.queries), fed, len(session))
