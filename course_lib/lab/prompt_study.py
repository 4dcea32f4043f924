"""A needle prompt prefilled once, so that every question about its decode is quick to answer.

The query of a step is the one that exact attention produced; block selection is applied to it at
any k. What the model then says at that k is a real run of the engine, made when first asked for.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property, lru_cache

import numpy as np

from course_lib.engine import Engine, Generation, Session, generate_from
from course_lib.engine.prefill import IMPORTANCE_RULES
from course_lib.lab.decode_record import DecodeRecord, record_decode, record_fed
from course_lib.lab.needle import MAX_NEW_TOKENS, recalls
from course_lib.lab.prompts import NeedlePrompt

BLOCK_SIZE = 32


@dataclass(frozen=True)
class Answer:
    """What the model said: text, whether decode produced the value, whether exact says the same.

    margins: best minus second-best logit of every choice, the end token's included.
    """

    ids: tuple[int, ...]
    text: str
    recalled: bool
    identical: bool
    margins: tuple[float, ...]

    @property
    def margin(self) -> float:
        """The smallest margin: a text is as safe from rounding as this is large."""
        return min(self.margins)


class PromptStudy:
    """One prompt of one engine: its session, its exact answer's record, its answers at any k.

    prefill_k: None for exact prefill. block_size: of every selection. Queries of every study of a
    prompt are those of the same tokens, the exact answer's, so that its steps compare; after
    sparse prefill they ask a cache that this prefill left.
    """

    def __init__(self, engine: Engine, prompt: NeedlePrompt, *, prefill_k: int | None = None,
                 block_size: int = BLOCK_SIZE) -> None:
        self.engine, self.prompt = engine, prompt
        self.prefill_k, self.block_size = prefill_k, block_size
        self._importance: dict[str, np.ndarray | None] = {"none": None}
        self._answers: dict[tuple[int | None, int, str], Answer] = {}

    @cached_property
    def exact(self) -> PromptStudy:
        """The same prompt after exact prefill, in blocks of the engine's own size."""
        if self.prefill_k is None and self.block_size == BLOCK_SIZE:
            return self
        return prompt_study(self.engine, self.prompt)

    @cached_property
    def session(self) -> Session:
        """The prefilled prompt (float32 rows, importance of all queries); not to be fed."""
        session = self._prefilled("all_queries")
        self._importance["all_queries"] = session.importance
        return session

    def _prefilled(self, rule: str) -> Session:
        if self.prefill_k is None and self.exact is not self and rule == "all_queries":
            return in_blocks_of(self.block_size, self.exact.session)
        return self.engine.prefill(self.prompt.ids, importance=rule, prefill_k=self.prefill_k,
                                   block_size=self.block_size)

    @cached_property
    def record(self) -> DecodeRecord:
        """The exact answer (of exact prefill) with the queries that its tokens ask here."""
        if self.exact is self:
            return record_decode(self.session, MAX_NEW_TOKENS)
        known = self.exact.record
        if self.prefill_k is None:
            return replace(known, session=in_blocks_of(self.block_size, known.session))
        return record_fed(self.session, known.generation, known.steps)

    @property
    def needle_blocks(self) -> range:
        """The blocks that hold tokens of the needle."""
        first, end = self.prompt.needle_span
        return range(first // self.block_size, (end - 1) // self.block_size + 1)

    @property
    def needle_block(self) -> int:
        """The block that holds the needle's value."""
        return self.prompt.value_span[0] // self.block_size

    @cached_property
    def value_step(self) -> int:
        """The step of the exact answer after which the needle's value is said (else 0)."""
        first, end = self.prompt.value_span
        value, said = list(self.prompt.ids[first:end]), self.record.generation.ids
        found = (s for s in range(self.record.steps) if said[s + 1 :][: len(value)] == value)
        return next(found, 0)

    @cached_property
    def retrieval_head(self) -> tuple[int, int]:
        """Layer and query head that give the needle's block most weight at `value_step`, after
        exact prefill."""
        if self.exact is not self:
            return self.exact.retrieval_head
        _, layers, heads, _ = self.record.queries.shape
        mass = [
            [self.record.attention_mass(self.value_step, layer, head)[self.needle_block]
             for head in range(heads)]
            for layer in range(layers)
        ]
        layer, head = np.unravel_index(int(np.argmax(mass)), (layers, heads))
        return int(layer), int(head)

    def importance(self, rule: str) -> np.ndarray | None:
        """The prompt's importance under one of IMPORTANCE_RULES: float32 [prompt tokens] or None.

        "last_window" costs a prefill the first time. ValueError for an unknown rule.
        """
        if rule not in IMPORTANCE_RULES:
            raise ValueError(f"importance must be one of {', '.join(IMPORTANCE_RULES)}, "
                             f"not {rule!r}.")
        if rule == "all_queries":
            return self.session.importance
        if rule not in self._importance:
            exact = self.exact if self.prefill_k is None else self
            self._importance[rule] = (self._prefilled(rule).importance if exact is self
                                      else exact.importance(rule))
        return self._importance[rule]

    def has_importance(self, rule: str) -> bool:
        """Whether `importance(rule)` is ready."""
        ready = self.exact if self.prefill_k is None else self
        return rule in ready._importance

    def has_answer(self, k: int | None, n_probe: int = 8, importance: str = "all_queries") -> bool:
        """Whether `answer` with these arguments is ready."""
        return _key(k, n_probe, importance) in self._answers

    def answer(
        self, k: int | None = None, n_probe: int = 8, importance: str = "all_queries"
    ) -> Answer:
        """What the model says when decode reads k blocks; None is exact decode.

        Answer.identical compares with the exact answer of exact prefill.
        """
        key = _key(k, n_probe, importance)
        if key not in self._answers:
            start = self.session
            if k is not None and importance != "all_queries":
                start = start.fork()
                start.importance = self.importance(importance)
            made = (self.record.generation if k is None and self.prefill_k is None
                    else generate_from(start, MAX_NEW_TOKENS, k, n_probe=n_probe))
            self._answers[key] = self._answer(made)
        return self._answers[key]

    def _answer(self, made: Generation) -> Answer:
        return Answer(
            ids=tuple(made.ids),
            text=self.engine.decode(made.ids),
            recalled=recalls(self.engine, self.prompt, made.ids),
            identical=made.ids == self.record.generation.ids,
            margins=tuple(made.logits_margin),
        )


def in_blocks_of(block_size: int, session: Session) -> Session:
    """The same prompt and rows, counted in other blocks; both share a cache, so feed neither."""
    other = Session(session.model, session.cache, block_size)
    other.importance, other.logits, other.policy = (
        session.importance, session.logits, session.policy)
    return other


def _key(k: int | None, n_probe: int, importance: str) -> tuple[int | None, int, str]:
    return (None, 0, "") if k is None else (k, n_probe, importance)


def prompt_study(engine: Engine, prompt: NeedlePrompt, *, prefill_k: int | None = None,
                 block_size: int = BLOCK_SIZE) -> PromptStudy:
    """The study of a prompt, shared by all who ask for it with the same engine; the last eight
    are kept."""
    return _shared(engine, prompt, prefill_k, block_size)


@lru_cache(maxsize=8)
def _shared(engine: Engine, prompt: NeedlePrompt, prefill_k: int | None,
            block_size: int) -> PromptStudy:
    return PromptStudy(engine, prompt, prefill_k=prefill_k, block_size=block_size)
