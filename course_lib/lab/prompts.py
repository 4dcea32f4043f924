"""Needle prompts: notes of an exact token count, one fact hidden in them, a question at the end."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass

from course_lib.errors import CourseError
from course_lib.lab import world

TEMPLATES = ("chat", "bare")
HEADER = "Read these notes."
ARTICLE_FACT = world.Fact("Zara", "favorite food", "ramen")  # article 10-2's needle
FACT_SHARE = 0.6  # of the notes around the needle; the rest is filler sentences
_TAIL_TOKENS = 48  # the last tokens of the notes are fitted by choosing sentence lengths
_POOL = 160


@dataclass(frozen=True)
class NeedlePrompt:
    """A prompt and what is hidden in it.

    ids: prompt token ids, exactly as many as asked for. needle_span: first and one-past-last
    position of the needle's tokens. value_span: the same for the value. lines: the notes."""

    ids: tuple[int, ...]
    fact: world.Fact
    lines: tuple[str, ...]
    needle_line: int
    needle_span: tuple[int, int]
    value_span: tuple[int, int]
    template: str

    @property
    def question(self) -> str:
        return self.fact.question


def prompt_ids(engine, lines: list[str], question: str, template: str) -> list[int]:
    """Token ids of notes and question in the chat template or as a bare completion."""
    notes = "\n".join([HEADER, *lines])
    if template == "chat":
        return engine.apply_chat_template([{"role": "user", "content": f"{notes}\n{question}"}])
    if template == "bare":
        return engine.encode(f"{notes}\nQuestion: {question}\nAnswer:", allow_special=False)
    raise ValueError(f"template must be one of {', '.join(TEMPLATES)}, not {template!r}")


def build_needle_prompt(
    engine,
    seed: str | int,
    *,
    tokens: int = 2061,
    position: float = 0.5,
    template: str = "chat",
    fact: world.Fact | None = None,
    unseen: bool = False,
) -> NeedlePrompt:
    """A prompt of exactly `tokens` tokens with one needle at `position` (0 = first line, 1 = last).

    The notes around the needle never state its value, so a text that holds the value got it from
    the needle. `unseen=True` hides a made-up name and value that training never used. Raises
    CourseError when `tokens` is too small for the needle and question or cannot be hit exactly.
    """
    if not 0.0 <= position <= 1.0:
        raise ValueError(f"position must lie between 0 and 1, not {position}")
    rng = random.Random(f"needle-{seed}")
    fact = fact or _random_fact(rng, unseen)
    fixed = len(prompt_ids(engine, [fact.sentence], fact.question, template))
    if tokens < fixed:
        raise CourseError(
            f"A needle prompt needs at least {fixed} tokens for its needle and question, "
            f"{tokens} were asked for; give a larger --tokens."
        )
    budget = tokens - fixed
    draw = _line_source(rng, fact)
    for _ in range(8):
        notes = _fill(engine, draw, budget)
        needle_line = round(position * len(notes))
        lines = [*notes[:needle_line], fact.sentence, *notes[needle_line:]]
        ids = prompt_ids(engine, lines, fact.question, template)
        if len(ids) == tokens:
            span = _find_needle(engine, ids, fact)
            return NeedlePrompt(
                tuple(ids), fact, tuple(lines), needle_line, span[0], span[1], template
            )
        budget += tokens - len(ids)  # a tokenizer that merges across lines: aim again
    raise CourseError(
        f"No choice of sentences gives exactly {tokens} tokens with this tokenizer; "
        f"try --tokens {tokens + 8} or another --seed."
    )


def _random_fact(rng: random.Random, unseen: bool) -> world.Fact:
    attribute = rng.choice(list(world.ATTRIBUTES))
    name = world.random_name(rng, held_out=unseen)
    return world.Fact(name, attribute, world.random_value(rng, attribute, held_out=unseen))


def _line_source(rng: random.Random, needle: world.Fact) -> Callable[[], str]:
    """Draws notes: facts about other (name, attribute) pairs, never twice, and filler."""
    used = {(needle.name, needle.attribute)}

    def draw() -> str:
        if rng.random() >= FACT_SHARE:
            return world.filler_sentence(rng)
        for _ in range(64):
            name, attribute = rng.choice(world.NAMES), rng.choice(list(world.ATTRIBUTES))
            value = world.random_value(rng, attribute)
            if (name, attribute) not in used and value != needle.value:
                used.add((name, attribute))
                return world.Fact(name, attribute, value).sentence
        return world.filler_sentence(rng)  # a very long prompt has used up the pairs

    return draw


def _fill(engine, draw: Callable[[], str], budget: int) -> list[str]:
    """Sentences that cost exactly `budget` tokens where lengths allow it, else nearly."""

    def cost(line: str) -> int:
        return len(engine.encode(line + "\n", allow_special=False))

    lines: list[str] = []
    while budget > _TAIL_TOKENS:
        line = draw()
        price = cost(line)
        if price <= budget:
            lines.append(line)
            budget -= price
    pool = [(line, cost(line)) for line in (draw() for _ in range(_POOL))] if budget > 0 else []
    return lines + _exact_subset(pool, budget)


def _exact_subset(pool: list[tuple[str, int]], total: int) -> list[str]:
    """Lines of the pool whose costs sum to `total`, or to the nearest sum below it."""
    reach: dict[int, tuple[int, int] | None] = {0: None}  # sum → (line index, sum before it)
    for i, (_, price) in enumerate(pool):
        for before in sorted(reach, reverse=True):
            if before + price <= total and before + price not in reach:
                reach[before + price] = (i, before)
        if total in reach:
            break
    at = max(reach)
    chosen: list[str] = []
    while (step := reach[at]) is not None:
        chosen.append(pool[step[0]][0])
        at = step[1]
    return chosen


def _find_needle(
    engine, ids: list[int], fact: world.Fact
) -> tuple[tuple[int, int], tuple[int, int]]:
    """Spans of the needle's sentence and of its value among the prompt's tokens."""
    sentence = engine.encode(fact.sentence + "\n", allow_special=False)
    head = engine.encode(fact.sentence[: -len(fact.value) - 2], allow_special=False)
    for start in range(len(ids) - len(sentence) + 1):
        if ids[start : start + len(sentence)] == sentence:
            value_end = start + len(engine.encode(fact.sentence[:-1], allow_special=False))
            return (start, start + len(sentence)), (start + len(head), value_end)
    raise CourseError(
        "The needle's tokens cannot be found in the prompt: this tokenizer merges across lines."
    )
