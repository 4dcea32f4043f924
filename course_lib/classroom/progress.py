"""Which exercises of a student's copies were right when they were last checked."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from course_lib.classroom.exercises import Reading, day_items
from course_lib.classroom.grading.handed_in import read_notebook
from course_lib.errors import CourseError

_LINE = re.compile(r"^\[( |ok|x)\] (d\d\d\.[ab]\d)\b ?(.*)$", re.MULTILINE)


@dataclass(frozen=True)
class Line:
    """One item: `mark` is "ok", "x", " " (not attempted) or "?" (its check cell has not run), and
    what its check said."""

    item: str
    mark: str
    said: str


def progress_of(notebook: Path, day: int) -> list[Line]:
    """What the check cells of a saved notebook said, item by item; nothing is run.

    Raises CourseError where the file is no notebook.
    """
    try:
        cells = read_notebook(notebook.read_bytes()).cells
    except OSError as error:
        raise CourseError(f"{notebook} cannot be read ({error.strerror}).") from None
    except CourseError as error:
        raise CourseError(f"{notebook} is {error}; ./course reset {day} starts it over.") from None
    said = {match[2]: (match[1], match[3]) for cell in cells if cell.cell_type == "code"
            for text in _printed(cell) for match in _LINE.finditer(text)}
    lines = []
    for item in day_items(day):
        if isinstance(item, Reading) and not item.parts:
            continue  # text only: a human reads it
        mark, text = said.get(item.id, ("?", "its check cell has not run"))
        lines.append(Line(item.id, mark, text))
    return lines


def _printed(cell: dict) -> Iterable[str]:
    for output in cell.get("outputs", []):
        text = output.get("text") if isinstance(output, dict) else ""
        yield "".join(map(str, text)) if isinstance(text, list) else str(text or "")


def count(lines: Iterable[Line]) -> str:
    """How far a day is, in words."""
    lines = list(lines)
    return f"{sum(line.mark == 'ok' for line in lines)} of {len(lines)} checks pass"
