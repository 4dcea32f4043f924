"""Needle prompts: notes of an exact token count, one fact hidden in them, a question at the end."""

from __future__ import annotations

import random
from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

from course_lib.errors import CourseError
from course_lib.lab import world
from course_lib.lab.notes import Notes, line_source

TEMPLATES = ("chat", "instruct", "bare")
HEADER = "Read these notes."
INSTRUCTION = 'Answer in one short sentence from the notes that begins with "{}".'
ARTICLE_FACT = world.Fact("Zara", "favorite food", "ramen")  # article 10-2's needle
_ATTEMPTS = 32


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

    @property
    def content(self) -> str:
        """The prompt as one text, without the marks of a chat template."""
        return content_of(self.lines, self.question, self.template, self.fact.beginning)


def default_template(tokenizer) -> str:
    """The template for a model: "chat" for one trained in this world, else "instruct".

    A model of this world has one token for every name of it; no other tokenizer has.
    """
    names = (tokenizer.encode(" " + name, allow_special=False) for name in world.NAMES)
    return "chat" if all(len(ids) == 1 for ids in names) else "instruct"


def content_of(
    lines: Sequence[str], question: str, template: str, beginning: str = ""
) -> str:
    """Notes and question as one text.

    "chat": nothing more, what the shipped model was trained on. "instruct": says what to do, for
    models that follow instructions; the answer's `beginning` makes them say more than the value,
    whose first token, if it came first, would be prefill's. "bare": a completion, for no chat
    template.
    """
    notes = "\n".join([HEADER, *lines])
    if template == "chat":
        return f"{notes}\n{question}"
    if template == "instruct":
        return f"{notes}\n\nQuestion: {question}\n{INSTRUCTION.format(beginning)}"
    if template == "bare":
        return f"{notes}\nQuestion: {question}\nAnswer:"
    raise ValueError(f"template must be one of {', '.join(TEMPLATES)}, not {template!r}")


def prompt_ids(
    tokenizer, lines: Sequence[str], question: str, template: str, beginning: str = ""
) -> list[int]:
    """Token ids of `content_of`, in the model's chat template unless `template` is "bare"."""
    content = content_of(lines, question, template, beginning)
    if template == "bare":
        return tokenizer.encode(content, allow_special=False)
    return tokenizer.apply_chat_template([{"role": "user", "content": content}])


def build_needle_prompt(
    tokenizer,
    seed: str | int,
    *,
    tokens: int = 2061,
    position: float = 0.5,
    template: str = "chat",
    fact: world.Fact | None = None,
    unseen: bool = False,
) -> NeedlePrompt:
    """A prompt of exactly `tokens` tokens with one needle at `position` (0 = first line, 1 = last).

    tokenizer: an Engine or Tokenizer, of any byte-level BPE. The notes around the needle never
    state its value, so a text that holds the value got it from the needle. `unseen=True` hides a
    made-up name and value that training never used. Raises CourseError when `tokens` is too small
    for the needle and question or cannot be hit exactly.
    """
    if not 0.0 <= position <= 1.0:
        raise ValueError(f"position must lie between 0 and 1, not {position}")
    rng = random.Random(f"needle-{seed}")
    fact = fact or _random_fact(rng, unseen)
    asked = fact.question, template, fact.beginning
    fixed = len(prompt_ids(tokenizer, [fact.sentence], *asked))
    if tokens < fixed:
        raise CourseError(
            f"A needle prompt needs at least {fixed} tokens for its needle and question, "
            f"{tokens} were asked for; give a larger --tokens."
        )

    def cost(line: str) -> int:
        return len(tokenizer.encode(line + "\n", allow_special=False))

    notes = Notes(line_source(rng, fact), cost, tokens - fixed)
    for _ in range(_ATTEMPTS):
        around = notes.lines()
        needle_line = round(position * len(around))
        lines = (*around[:needle_line], fact.sentence, *around[needle_line:])
        ids = prompt_ids(tokenizer, lines, *asked)
        if len(ids) == tokens:
            needle_span, value_span = find_needle(tokenizer, ids, fact)
            return NeedlePrompt(
                tuple(ids), fact, lines, needle_line, needle_span, value_span, template
            )
        notes.adjust(tokens - len(ids))  # a tokenizer that merges across lines: aim again
    raise CourseError(
        f"No choice of sentences gives exactly {tokens} tokens with this tokenizer; "
        f"try --tokens {tokens + cost(fact.sentence)} or another --seed."
    )


def _random_fact(rng: random.Random, unseen: bool) -> world.Fact:
    attribute = rng.choice(list(world.ATTRIBUTES))
    name = world.random_name(rng, held_out=unseen)
    return world.Fact(name, attribute, world.random_value(rng, attribute, held_out=unseen))


def find_needle(
    tokenizer, ids: Sequence[int], fact: world.Fact
) -> tuple[tuple[int, int], tuple[int, int]]:
    """Spans of the tokens that hold a part of the needle's line, and of its value."""
    line = fact.sentence + "\n"
    value = (len(fact.sentence) - len(fact.value) - 2, len(fact.value) + 1)  # without the stop
    return text_span(tokenizer, ids, line), text_span(tokenizer, ids, line, within=value)


def text_span(
    tokenizer, ids: Sequence[int], text: str, *, occurrence: int = 0,
    within: tuple[int, int] | None = None,
) -> tuple[int, int]:
    """First and one-past-last of the tokens that hold a part of `text`, where it stands in `ids`.

    By text, for a tokenizer may join the end of a line to what follows it. occurrence: which one,
    from 0. within: (offset, length) of the part of `text` that is wanted, in characters.
    """
    pieces = [tokenizer.decode([token]) for token in ids]
    ends = list(accumulate(len(piece) for piece in pieces))
    whole, start = "".join(pieces), -1
    for _ in range(occurrence + 1):
        start = whole.find(text, start + 1)
        if start < 0:
            raise CourseError(f"{text!r} cannot be found in the prompt: this tokenizer does not "
                              "give back its text; use another --model.")
    offset, length = within or (0, len(text))
    first = start + offset
    return bisect_right(ends, first), bisect_left(ends, first + length) + 1
