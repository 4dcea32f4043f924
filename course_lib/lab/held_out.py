"""Held-out text for perplexity: windows of tokens whose second half is predicted."""

from __future__ import annotations

import math
import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from course_lib.engine import Engine
from course_lib.engine.tokenizer import Tokenizer
from course_lib.errors import CourseError
from course_lib.lab import world
from course_lib.lab.notes import FACT_SHARE
from course_lib.lab.prompts import content_of, default_template, text_span

NOTES_SHARE = 0.5  # of a window; questions and answers fill the rest


@dataclass(frozen=True)
class Window:
    """Token ids, whose first half is context and whose second half, from `cut` on, is predicted.

    answers: the positions of that half where an answer stands that follows from the context."""

    ids: tuple[int, ...]
    answers: tuple[int, ...] = ()

    @property
    def cut(self) -> int:
        return len(self.ids) // 2


class Cost(NamedTuple):
    """Tokens predicted and the nats they cost together: all, and those of answers alone."""

    tokens: int
    nll: float
    answer_tokens: int
    answer_nll: float


def world_window(tokenizer: Engine | Tokenizer, seed: str, tokens: int) -> Window:
    """A conversation in the course's own world: notes, then questions about them with answers.

    Notes and questions are random, and the shipped model was hardly trained to guess them; answers
    follow from the notes, so they are counted apart too. Held out: training draws its documents
    from numbers as seeds, this from a text. At most `tokens` tokens. Raises CourseError if not one
    question fits.
    """
    rng = random.Random(f"held-out-{seed}")
    template = default_template(tokenizer)
    notes: list[str] = []
    facts: dict[tuple[str, str], world.Fact] = {}
    size = 0
    while size < NOTES_SHARE * tokens:
        line = _line(rng, facts)
        notes.append(line)
        size += len(tokenizer.encode(line + "\n", allow_special=False))
    ids: list[int] = []
    asked: list[world.Fact] = []
    for fact in rng.sample(list(facts.values()), len(facts)):
        longer = _conversation(tokenizer, notes, [*asked, fact], template)
        if len(longer) > tokens:
            break
        ids = longer
        asked.append(fact)
    if not asked:
        raise CourseError(
            f"a window of {tokens} tokens has no room for notes, a question and an answer: give a "
            "larger --window"
        )
    # A fact's sentence stands in the notes and, later, in its answer.
    spans = [text_span(tokenizer, ids, fact.sentence, occurrence=1) for fact in asked]
    return Window(tuple(ids), tuple(p for first, end in spans for p in range(first, end)))


def _line(rng: random.Random, facts: dict[tuple[str, str], world.Fact]) -> str:
    if rng.random() < FACT_SHARE:
        name, attribute = rng.choice(world.NAMES), rng.choice(list(world.ATTRIBUTES))
        if (name, attribute) not in facts:
            fact = world.Fact(name, attribute, world.random_value(rng, attribute))
            facts[name, attribute] = fact
            return fact.sentence
    return world.filler_sentence(rng)


def _conversation(
    tokenizer: Engine | Tokenizer, notes: list[str], facts: list[world.Fact], template: str
) -> list[int]:
    messages = []
    for number, fact in enumerate(facts):
        question = fact.question
        if number == 0:
            question = content_of(notes, question, template, fact.beginning)
        messages.append({"role": "user", "content": question})
        messages.append({"role": "assistant", "content": fact.sentence})
    return tokenizer.apply_chat_template(messages, add_generation_prompt=False)


def text_windows(
    tokenizer: Engine | Tokenizer, text: str, tokens: int, count: int
) -> list[Window]:
    """At most `count` windows of a text, one after the other.

    Raises CourseError if the text has not one window.
    """
    ids = tokenizer.encode(text, allow_special=False)
    count = min(count, len(ids) // tokens)
    if not count:
        raise CourseError(
            f"the text has {len(ids)} tokens, fewer than one window of {tokens}: give a longer "
            "text or a smaller --window"
        )
    return [Window(tuple(ids[i * tokens : (i + 1) * tokens])) for i in range(count)]


def cost_of(window: Window, scores: Sequence[float]) -> Cost:
    """What the second half costs, given the log-probabilities of its tokens."""
    answers = [scores[position - window.cut] for position in window.answers]
    return Cost(len(scores), -math.fsum(scores), len(answers), -math.fsum(answers))


def total(costs: Iterable[Cost]) -> Cost:
    """The sum of costs."""
    columns = [math.fsum(column) for column in zip(*costs, strict=True)]
    return Cost(round(columns[0]), columns[1], round(columns[2]), columns[3])
