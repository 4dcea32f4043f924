"""Which exercises of a student's copies were right when they were last checked."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from course_lib.classroom.exercises import Item, Reading, day_items
from course_lib.classroom.grading.handed_in import HandedIn, read_notebook, same_text, take_apart
from course_lib.classroom.grading.marking import evidence_of
from course_lib.classroom.sealed import is_blank
from course_lib.errors import CourseError

_LINE = re.compile(r"^\[( |ok|x)\] (d\d\d\.[ab]\d)\b ?(.*)$", re.MULTILINE)


@dataclass(frozen=True)
class Line:
    """One item: `mark` is "ok", "x", " " (not attempted) or "?" (its check cell has not run), and
    what its check said; `unchecked`: the answer was changed and not checked since."""

    item: str
    mark: str
    said: str
    unchecked: bool = False


def progress_of(notebook: Path, day: int, original: Path) -> list[Line]:
    """What the check cells of a saved notebook said, item by item; nothing is run. `original`: the
    day's notebook as it was handed out.

    Raises CourseError where the file is no notebook.
    """
    try:
        book, ours = read_notebook(notebook.read_bytes()), read_notebook(original.read_bytes())
    except OSError as error:
        raise CourseError(f"{notebook} cannot be read ({error.strerror}).") from None
    except CourseError as error:
        raise CourseError(f"{notebook} is {error}; ./course reset {day} starts it over.") from None
    said = {match[2]: (match[1], match[3]) for cell in book.cells if cell.cell_type == "code"
            for text in _printed(cell) for match in _LINE.finditer(text)}
    theirs, stubs = (take_apart(each, ours, day_items(day)) for each in (book, ours))
    lines = []
    for item in day_items(day):
        if isinstance(item, Reading) and not item.parts:
            continue  # text only: a human reads it
        mark, text = said.get(item.id, ("?", "its check cell has not run"))
        if mark in " ?" and _is_changed(item, theirs[item.id], stubs[item.id]):
            lines.append(Line(item.id, "?", "changed, not checked yet: run its check cell", True))
        else:
            lines.append(Line(item.id, mark, text))
    return lines


def _is_changed(item: Item, answer: HandedIn, stub: HandedIn) -> bool:
    """Whether there is an answer that a check would not call "not attempted"."""
    if isinstance(item, Reading):
        found = evidence_of(answer.evidence)
        filled = found is None or not is_blank(list(found.values()))
        return filled and not same_text(answer.evidence or "", stub.evidence or "")
    written = answer.answer or ""
    raises = "raise NotImplementedError" in written  # as the stub does, with a note beside it
    return bool(written.strip()) and not raises and not same_text(written, stub.answer or "")


def _printed(cell: dict) -> Iterable[str]:
    for output in cell.get("outputs", []):
        text = output.get("text") if isinstance(output, dict) else ""
        yield "".join(map(str, text)) if isinstance(text, list) else str(text or "")


def count(lines: Iterable[Line]) -> str:
    """How far a day is, in words."""
    lines = list(lines)
    return f"{sum(line.mark == 'ok' for line in lines)} of {len(lines)} checks pass"
