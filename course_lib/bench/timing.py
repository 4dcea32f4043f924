"""Times to compare: calls in turn, medians, and where two lines of medians cross."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Collection, Hashable, Mapping
from statistics import median
from typing import NamedTuple, TypeVar

ROUNDS = 7
"""A median of fewer is not worth quoting."""

MOST_ROUNDS = 41

Name = TypeVar("Name", bound=Hashable)


def interleaved(
    calls: Mapping[Name, Callable[[], object]],
    seconds: float = 0.0,
    clock: Callable[[], float] = time.perf_counter,
    settled: Collection[Name] = (),
) -> dict[Name, float]:
    """Return the median time in seconds of every call.

    Each round makes every call once, so that a slow minute of the machine is one for all of them,
    and ratios of the medians stand. One round before does not count. At least ROUNDS rounds, more
    until `seconds` have passed, at most MOST_ROUNDS. A call named in ``settled`` is made twice and
    timed once: it finds the caches as another of its kind leaves them, and not full of what the
    call before it has written, which must go to memory first.
    """
    times: dict[Name, list[float]] = {name: [] for name in calls}
    for call in calls.values():
        call()
    begun = clock()
    for done in range(MOST_ROUNDS):
        if done >= ROUNDS and clock() - begun >= seconds:
            break
        for name, call in calls.items():
            if name in settled:
                call()
            start = clock()
            call()
            times[name].append(clock() - start)
    return {name: median(measured) for name, measured in times.items()}


class Crossing(NamedTuple):
    """Where one way becomes the faster: at `estimate` tokens, between two measured contexts.

    `slower` is the longest context at which it is not faster, None if it always was; `faster` the
    next one, None if it never is.
    """

    slower: int | None
    faster: int | None
    estimate: int | None


def crossing(usual: Mapping[int, float], other: Mapping[int, float]) -> Crossing:
    """Return from which context on `other` takes less time than `usual`, to the longest of all.

    Both map a context to a time, on the same contexts. Between two contexts the logarithm of the
    ratio of times is taken to be linear in the logarithm of the context. ValueError without a
    context or where the contexts differ.
    """
    contexts = sorted(usual)
    if not contexts or contexts != sorted(other):
        raise ValueError("both ways must be measured at the same contexts, at least one.")
    gain = {n: math.log(usual[n] / other[n]) for n in contexts}
    slow = [n for n in contexts if gain[n] <= 0]
    if not slow:
        return Crossing(None, contexts[0], None)
    last = slow[-1]
    if last == contexts[-1]:
        return Crossing(last, None, None)
    following = contexts[contexts.index(last) + 1]
    part = -gain[last] / (gain[following] - gain[last])
    estimate = math.exp(math.log(last) + part * math.log(following / last))
    return Crossing(last, following, round(estimate))
