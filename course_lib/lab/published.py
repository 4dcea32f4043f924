"""Numbers quoted from the articles and the engine's public documents, with their sources.

They are quotations (data/published/quoted.csv): show them beside a measurement, never mixed in.
"""

from __future__ import annotations

import csv
from functools import cache
from typing import NamedTuple

from course_lib.errors import CourseError
from course_lib.paths import PUBLISHED


class Quoted(NamedTuple):
    """One quoted number: `value` as printed by its source, with unit and conditions."""

    group: str
    what: str
    value: str
    unit: str
    conditions: str
    source: str

    @property
    def number(self) -> float:
        """The value as a float; ValueError where the source gives a word (YES, NO)."""
        return float(self.value)


@cache
def _table() -> dict[tuple[str, str], Quoted]:
    path = PUBLISHED / "quoted.csv"
    rows: dict[tuple[str, str], Quoted] = {}
    with path.open(encoding="utf-8", newline="") as f:
        previous = ""
        for row in csv.DictReader(f):
            # "same" at the start means: the conditions of the row above
            conditions = row["conditions"]
            if conditions == "same" or conditions.startswith(("same;", "same ")):
                conditions = previous + conditions.removeprefix("same")
            else:
                previous = conditions
            quoted = Quoted(**{**row, "conditions": conditions})
            rows[quoted.group, quoted.what] = quoted
    return rows


def quoted(group: str, what: str) -> Quoted:
    """The quoted number `what` of `group`. Raises CourseError for an unknown one."""
    try:
        return _table()[group, what]
    except KeyError:
        raise CourseError(
            f"There is no quoted number {group}/{what}; see data/published/quoted.csv."
        ) from None


def group(name: str) -> list[Quoted]:
    """Every quoted number of one group, in the file's order; CourseError if there is none."""
    rows = [row for row in _table().values() if row.group == name]
    if not rows:
        raise CourseError(f"There is no quoted group {name}; see data/published/quoted.csv.")
    return rows
