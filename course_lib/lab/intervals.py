"""How sure is a share? Wilson's interval, and the smallest k that a sweep lets one claim."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from math import sqrt
from typing import Any

from course_lib.arrays import positive_int, whole_number

Z = 1.96  # 95 % of a normal distribution lies within so many standard deviations


def wilson(hits: int, trials: int, z: float = Z) -> tuple[float, float]:
    """The shares that `hits` of `trials` leave plausible: (low, high), inside 0 … 1.

    Wilson's score interval: every share p whose distance from hits / trials is at most z standard
    deviations sqrt(p (1 − p) / trials). At 0 and at all hits it stays open to the other side, where
    the textbook's ± z sqrt(s (1 − s) / n) shrinks to nothing. Raises ValueError for no trial, hits
    outside 0 … trials or z <= 0. Source: Wilson (1927).
    """
    hits, trials = whole_number(hits, "hits"), positive_int(trials, "trials")
    if not 0 <= hits <= trials:
        raise ValueError(f"hits must lie between 0 and {trials}, not {hits}.")
    if not z > 0:
        raise ValueError(f"z must be above 0, not {z}.")
    share, spread = hits / trials, z * z / trials
    middle = (share + spread / 2) / (1 + spread)
    half = z * sqrt(share * (1 - share) / trials + spread / (4 * trials)) / (1 + spread)
    # At the ends the formula gives 0 and 1 but for a rounding.
    return (0.0 if hits == 0 else middle - half, 1.0 if hits == trials else middle + half)


def critical_k(
    records: Iterable[Mapping[str, Any]], floor: float = 0.9, z: float = Z
) -> int | None:
    """The smallest k from which on the sweep lets one claim a recall of at least `floor`.

    records: {"k": int or "exact", "recalled": bool} in any order; records of "exact" do not count.
    A k passes if the lower end of wilson(hits, trials, z) reaches floor; every larger k of the
    records has to pass as well. None where no k does. Raises ValueError for records without a
    numbered k and a floor outside 0 … 1.
    """
    if not 0 <= floor <= 1:
        raise ValueError(f"floor must lie between 0 and 1, not {floor}.")
    counts: dict[int, list[int]] = {}
    for record in records:
        if record["k"] != "exact":
            count = counts.setdefault(record["k"], [0, 0])
            count[0] += bool(record["recalled"])
            count[1] += 1
    if not counts:
        raise ValueError("records hold no k.")
    found = None
    for k in sorted(counts, reverse=True):
        hits, trials = counts[k]
        if wilson(hits, trials, z)[0] < floor:
            break
        found = k
    return found
