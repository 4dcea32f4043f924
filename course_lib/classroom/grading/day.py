"""Everything that grades one day: the notebook as handed out, its items and their hidden half."""

from __future__ import annotations

import functools
import hashlib
import importlib.util
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

from nbformat import NotebookNode

import course_lib
from course_lib.classroom import sealed
from course_lib.classroom.exercises import Item, day_items
from course_lib.classroom.grading.taken_away import library_files
from course_lib.classroom.hidden import Group, Hidden
from course_lib.classroom.source import find_days, parse
from course_lib.errors import CourseError
from course_lib.paths import ROOT

TESTS = ROOT / "tests"


@dataclass(frozen=True)
class GradedDay:
    """One day: `ours`, the notebook as handed out; `items` in order; `hidden` by item; `solutions`,
    the text of the file of solutions; `digest`, which changes with anything that could change a
    mark."""

    number: int
    ours: NotebookNode
    items: Sequence[Item]
    hidden: dict[str, Hidden]
    solutions: str
    digest: str

    def points(self, item_id: str) -> int:
        """The item's points, as its answer cell states them."""
        return self._answer(item_id).metadata.course["points"]

    def stub(self, item_id: str) -> str:
        """The answer cell's source as handed out."""
        return self._answer(item_id).source

    @functools.cache  # noqa: B019 - days live as long as the grader does
    def groups(self, item_id: str) -> Sequence[Group]:
        """The item's hidden groups, built once."""
        return self.hidden[item_id].groups()

    def _answer(self, item_id: str) -> NotebookNode:
        return next(cell for cell in self.ours.cells
                    if cell.metadata.get("course", {}).get("id") == item_id
                    and cell.metadata["course"].get("role") == "answer")

    __hash__ = object.__hash__


@functools.cache
def load_day(number: int) -> GradedDay:
    """Load what grades a day; CourseError where the course has no such day, or is the student's
    edition, which has no hidden cases."""
    day = find_days([number])[0]
    file = f"day{number:02d}.py"
    grading, solutions = TESTS / "grading" / file, TESTS / "solutions" / file
    for path in (grading, solutions):
        if not path.is_file():
            raise CourseError(f"tests/{path.parent.name}/{file} is not here: grade with the "
                              "instructor's edition of the course, and a day that has exercises.")
    return GradedDay(
        number, parse(day), day_items(number),
        {hidden.id: hidden for hidden in load_module(grading).HIDDEN},
        solutions.read_text(encoding="utf-8"),
        _digest([day.source, grading, solutions, sealed.sealed_path(number)]),
    )


def load_module(path: Path) -> ModuleType:
    """Import a file by its path, under a name of its own."""
    name = "_".join(["graded", *path.with_suffix("").parts[-2:]])
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec and spec.loader, path
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _digest(files: Sequence[Path]) -> str:
    """Over the day's files and all of the library's code, which the expected values come from."""
    found = hashlib.sha256(course_lib.__version__.encode())
    for path in [*files, *library_files()]:
        if path.is_file():
            found.update(path.name.encode() + b"\0" + path.read_bytes() + b"\0")
    return found.hexdigest()
