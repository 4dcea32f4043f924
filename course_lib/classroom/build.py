"""From source to notebook: build a day, and check that nobody edited one without the other."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import nbformat
from nbformat import NotebookNode

from course_lib.atomic import write_atomically
from course_lib.classroom.execute import CellFailed, Run, execute
from course_lib.classroom.normalise import dumps, normalise
from course_lib.classroom.source import Day, cell_line, parse
from course_lib.errors import CourseError
from course_lib.paths import relative


@dataclass(frozen=True)
class Built:
    """A day after its build: what the run cost and whether the notebook's file changed."""

    day: Day
    run: Run
    changed: bool


def build_day(day: Day, *, fresh: bool = False,
              on_cell: Callable[[int], None] = lambda index: None) -> Built:
    """Execute a day's source and write its notebook, atomically; `fresh` keeps no old output.

    Raises CourseError, with nothing written, where the source cannot be read or a cell fails.
    """
    notebook = parse(day)
    try:
        run = execute(notebook, on_cell)
    except CellFailed as failed:
        raise CourseError(_failure(day, notebook, failed)) from None
    previous = None if fresh else load(day.notebook)
    text = dumps(normalise(notebook, previous))
    changed = not day.notebook.exists() or _text(day.notebook) != text
    if changed:
        write_atomically(day.notebook, text)
    return Built(day, run, changed)


def _text(path: Path) -> str:
    """A notebook file's text to compare with; bytes that are no UTF-8 make it differ."""
    return path.read_text(encoding="utf-8", errors="replace")


def _failure(day: Day, notebook: NotebookNode, failed: CellFailed) -> str:
    number = sum(cell.cell_type == "code" for cell in notebook.cells[: failed.index + 1])
    lines = [line for line in notebook.cells[failed.index].source.splitlines() if line.strip()]
    where = f"{relative(day.source)}:{cell_line(day, failed.index)}"
    first = " / ".join(line.strip() for line in lines[:2])
    return (f"day {day.number}, code cell {number} ({where}) failed: {failed.reason}; the cell "
            f"begins: {first}. Nothing was written.")


def load(path: Path) -> NotebookNode | None:
    """Return the stored notebook, or None where there is none that can be read."""
    try:
        text = path.read_text(encoding="utf-8")
        notebook = nbformat.convert(nbformat.reader.reads(text), 4)
        nbformat.validate(notebook)
    except Exception:  # noqa: BLE001 - nbformat raises whatever odd JSON makes it stumble over
        return None
    return notebook


def drift(day: Day) -> str | None:
    """Return None where the notebook is the one built from the source, else what differs.

    Executes nothing: compares sources, ids, tags, course metadata, digests and the file's form;
    outputs are nbval's business.
    """
    remedy = f"run ./course build {day.number}"
    if not day.notebook.exists():
        return f"{relative(day.notebook)} is missing; {remedy}."
    stored = load(day.notebook)
    if stored is None:
        return f"{relative(day.notebook)} cannot be read; {remedy}."
    wanted = parse(day)
    if stored.metadata.get("course") != wanted.metadata.course:
        return f"{relative(day.source)} changed since its notebook was built; {remedy}."
    edited = f"{relative(day.notebook)} was edited, not built: "
    if len(stored.cells) != len(wanted.cells):
        return f"{edited}it has {len(stored.cells)} cells instead of {len(wanted.cells)}; {remedy}."
    for number, (have, want) in enumerate(zip(stored.cells, wanted.cells, strict=True), 1):
        for what in ("cell_type", "source", "id", "metadata"):
            if have.get(what) != want[what]:
                return f"{edited}cell {number} has another {what}; {remedy}."
    stored.metadata = wanted.metadata
    if dumps(normalise(stored)) != _text(day.notebook):
        return f"{edited}its metadata, counts or form are not what a build writes; {remedy}."
    return None
