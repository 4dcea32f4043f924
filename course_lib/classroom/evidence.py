"""Read and lint the markdown answer of a source-reading exercise.

A lint is help, never points: it says that an answer is still the placeholder, or that its
evidence cites lines that do not exist.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from course_lib.classroom.sealed import place_problem
from course_lib.paths import ROOT

PLACEHOLDERS = {"", "…", "..."}
PLACEHOLDER = "path:first-last"
"""What stands after ``Evidence:`` until a learner fills it in."""
_MARKER = re.compile(r"<!--\s*ANSWER\s+(d\d\d\.b[1-9])\s*-->")


@dataclass(frozen=True)
class Answer:
    """A B answer taken apart: its id (None where the marker is gone), text and cited places."""

    item_id: str | None
    text: str
    places: tuple[str, ...]


def read_answer(markdown: str) -> Answer:
    """Return the parts of an answer cell: the marker, what follows ``Answer:``, and the
    ``Evidence:`` lines (places separated by commas or semicolons, backticks allowed)."""
    marker = _MARKER.search(markdown)
    body = _MARKER.sub("", markdown)
    cited = re.findall(r"^[ \t]*Evidence:(.*)$", body, re.MULTILINE)
    text = re.sub(r"^[ \t]*Evidence:.*$", "", body, flags=re.MULTILINE)
    text = re.sub(r"^\s*Answer:", "", text.strip())
    places = [p.strip(" \t`") for line in cited for p in re.split(r"[,;]", line)]
    return Answer(marker[1] if marker else None, text.strip(), tuple(filter(None, places)))


def lint_answer(markdown: str, root: Path = ROOT) -> list[str]:
    """Return what to mend in an answer cell, one sentence each; an empty list is a pass."""
    answer = read_answer(markdown)
    found = []
    if answer.item_id is None:
        found.append("The line <!-- ANSWER … --> is gone; copy it back from the original.")
    if answer.text in PLACEHOLDERS:
        found.append("Write your answer after 'Answer:'.")
    if not answer.places or PLACEHOLDER in answer.places:
        found.append("Cite the lines you read after 'Evidence:', as path:first-last.")
        return found
    problems = ((place, place_problem(place, root)) for place in answer.places)
    return found + [f"Evidence {place}: {problem}." for place, problem in problems if problem]
