"""Notes of a wanted length: sentences of the world whose token counts add up to it exactly."""

from __future__ import annotations

import random
from collections.abc import Callable

from course_lib.lab import world

FACT_SHARE = 0.6  # of the notes around the needle; the rest is filler sentences
_TAIL_TOKENS = 48  # the last tokens of the notes are fitted by choosing sentence lengths
_TAIL_LINES = 3  # … or those of this many long lines, for a tokenizer that needs many tokens a line
_POOL = 160
_STEP = 7  # the pool turns by this many lines when a choice missed, else it could miss for ever
_GIVE_BACK = 8  # lines that may return to the tail where its length cannot be hit


def line_source(rng: random.Random, needle: world.Fact) -> Callable[[], str]:
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


class Notes:
    """Lines from `draw` that cost `budget` tokens together: a body, and a tail chosen to fit.

    cost(line) is the tokens of a line. A tokenizer that merges across lines makes a sum of costs
    wrong by a little: `adjust` then moves the budget and chooses the tail again.
    """

    def __init__(self, draw: Callable[[], str], cost: Callable[[str], int], budget: int):
        self._draw, self._cost = draw, cost
        self._body: list[tuple[str, int]] = []
        self._pool: list[tuple[str, int]] = []
        self._rest, self._tail_tokens = budget, _TAIL_TOKENS
        self._extend()

    def _extend(self) -> None:
        """Draw the body; what is left for the tail is at most a few lines long."""
        while self._rest > self._tail_tokens:
            line = self._draw()
            price = self._cost(line)
            self._tail_tokens = max(self._tail_tokens, _TAIL_LINES * price)
            if price <= self._rest:
                self._body.append((line, price))
                self._rest -= price

    def adjust(self, tokens: int) -> None:
        """Make the notes longer by `tokens`, or shorter where it is negative; with other lines."""
        self._rest += tokens
        self._pool = self._pool[_STEP:] + self._pool[:_STEP]
        self._extend()

    def lines(self) -> list[str]:
        """The lines; they cost less than the budget only where no choice hits it."""
        for _ in range(_GIVE_BACK):
            tail, missed = self._tail()
            if not missed or not self._body:
                break
            self._rest += self._body.pop()[1]
        return [line for line, _ in self._body] + tail

    def _tail(self) -> tuple[list[str], bool]:
        """Lines of the pool for the rest, and whether they miss it."""
        if self._rest <= 0:
            return [], self._rest < 0
        if not self._pool:
            self._pool = [(line, self._cost(line)) for line in (self._draw() for _ in range(_POOL))]
        chosen = exact_subset(self._pool, self._rest)
        return [line for line, _ in chosen], sum(price for _, price in chosen) != self._rest


def exact_subset(pool: list[tuple[str, int]], total: int) -> list[tuple[str, int]]:
    """Lines of the pool whose costs sum to `total`, or to the nearest sum below it."""
    reach: dict[int, tuple[int, int] | None] = {0: None}  # sum → (line index, sum before it)
    for i, (_, price) in enumerate(pool):
        for before in sorted(reach, reverse=True):
            if before + price <= total and before + price not in reach:
                reach[before + price] = (i, before)
        if total in reach:
            break
    at = max(reach)
    chosen: list[tuple[str, int]] = []
    while (step := reach[at]) is not None:
        chosen.append(pool[step[0]])
        at = step[1]
    return chosen
