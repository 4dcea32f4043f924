"""Three tasks of RULER in the course's world: one needle, one among several, a chain of variables.

Source of the tasks: Hsieh et al. 2024, "RULER". The sentences are the course's own.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass

from course_lib.errors import CourseError
from course_lib.lab import world
from course_lib.lab.notes import Notes, line_source
from course_lib.lab.prompts import prompt_ids

TASKS = ("niah_single", "niah_multikey", "variable_tracking")
KEYS = 4  # facts about the attribute that niah_multikey asks for, one of them asked
CHAIN = {"chat": 3, "instruct": 5}  # variables: as trained; RULER's own, one value and four hops
_ATTEMPTS = 32


@dataclass(frozen=True)
class RulerPrompt:
    """One sample: its token ids, and the strings that a right answer holds."""

    task: str
    ids: tuple[int, ...]
    question: str
    references: tuple[str, ...]
    lines: tuple[str, ...]


@dataclass(frozen=True)
class _Case:
    """What a task hides, in the order in which it stands; the rest of the notes comes from draw."""

    needles: tuple[str, ...]
    question: str
    beginning: str
    references: tuple[str, ...]
    draw: Callable[[], str]


def build_ruler_prompt(
    tokenizer, task: str, tokens: int, seed: str | int, template: str = "chat"
) -> RulerPrompt:
    """Sample `seed` of a task, exactly `tokens` tokens long, its needles at random places.

    template: "chat" or "instruct", as `prompts.content_of`. Raises ValueError for an unknown task,
    CourseError when `tokens` is too small or cannot be hit exactly.
    """
    if task not in TASKS:
        raise ValueError(f"task must be one of {', '.join(TASKS)}, not {task!r}")
    rng = random.Random(f"ruler-{task}-{seed}")
    case = _CASES[task](rng, template)
    asked = case.question, template, case.beginning
    fixed = len(prompt_ids(tokenizer, case.needles, *asked))
    if tokens < fixed:
        raise CourseError(f"{task} needs at least {fixed} tokens, {tokens} were asked for; "
                          "give a larger --lengths.")

    def cost(line: str) -> int:
        return len(tokenizer.encode(line + "\n", allow_special=False))

    notes = Notes(case.draw, cost, tokens - fixed)
    places = sorted(rng.random() for _ in case.needles)
    for _ in range(_ATTEMPTS):
        lines = _with_needles(notes.lines(), case.needles, places)
        ids = prompt_ids(tokenizer, lines, *asked)
        if len(ids) == tokens:
            return RulerPrompt(task, tuple(ids), case.question, case.references, tuple(lines))
        notes.adjust(tokens - len(ids))  # a tokenizer that merges across lines: aim again
    raise CourseError(f"No choice of sentences gives exactly {tokens} tokens of {task} with this "
                      "tokenizer; try another --lengths or --seed.")


def _with_needles(around: list[str], needles: tuple[str, ...], places: list[float]) -> list[str]:
    """The notes with the needles, in their order, at shares `places` (ascending) of them."""
    lines = list(around)
    for before, (needle, place) in enumerate(zip(needles, places, strict=True)):
        lines.insert(int(place * (len(around) + 1)) + before, needle)
    return lines


def _single(rng: random.Random, template: str) -> _Case:
    """One fact among sentences that no question asks about."""
    fact = _fact(rng)
    return _Case((fact.sentence,), fact.question, fact.beginning, (fact.value,),
                 lambda: world.filler_sentence(rng))


def _multikey(rng: random.Random, template: str) -> _Case:
    """One fact among facts of the same attribute, and many others."""
    fact = _fact(rng)
    others: list[world.Fact] = []
    while len(others) < KEYS - 1:
        name, value = rng.choice(world.NAMES), world.random_value(rng, fact.attribute)
        if name not in {fact.name, *(o.name for o in others)} and value != fact.value:
            others.append(world.Fact(name, fact.attribute, value))
    needles = [fact.sentence, *(other.sentence for other in others)]
    rng.shuffle(needles)
    return _Case(tuple(needles), fact.question, fact.beginning, (fact.value,),
                 _other_facts(rng, [fact, *others]))


def _chain(rng: random.Random, template: str) -> _Case:
    """A number given from variable to variable; all of them are asked for."""
    variables: list[str] = []
    while len(variables) < CHAIN[template]:
        word = world.made_up_word(rng)
        if not any(word in other or other in word for other in variables):
            variables.append(word)
    sources = [world.number(rng, 5), *variables[:-1]]
    chain = [world.Assignment(v, s) for v, s in zip(variables, sources, strict=True)]
    return _Case(tuple(line.sentence for line in chain), world.chain_question(chain),
                 f"The variables that hold {sources[0]} are", tuple(variables),
                 lambda: world.filler_sentence(rng))


def _fact(rng: random.Random) -> world.Fact:
    attribute = rng.choice(list(world.ATTRIBUTES))
    return world.Fact(world.random_name(rng), attribute, world.random_value(rng, attribute))


def _other_facts(rng: random.Random, hidden: list[world.Fact]) -> Callable[[], str]:
    """Draws notes that say nothing about the hidden facts' names and attributes."""
    draw, keys = line_source(rng, hidden[0]), [f.beginning for f in hidden]

    def line() -> str:
        text = draw()
        return world.filler_sentence(rng) if text.startswith(tuple(keys)) else text

    return line


_CASES: dict[str, Callable[[random.Random, str], _Case]] = {
    "niah_single": _single, "niah_multikey": _multikey, "variable_tracking": _chain,
}
