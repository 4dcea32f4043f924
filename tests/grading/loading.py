"""Load a day's solutions, hidden cases and stubs for the tests that prove them."""

from __future__ import annotations

import ast
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

from course_lib.classroom.exercises import Exercise, Item, day_items
from course_lib.classroom.grading.day import load_module
from course_lib.classroom.hidden import Hidden
from course_lib.classroom.source import Day, find_days, parse
from course_lib.paths import NOTEBOOKS, ROOT

TESTS = ROOT / "tests"


@dataclass(frozen=True)
class DayProof:
    """Everything that proves one day's exercises."""

    day: Day
    items: dict[str, Item]
    solutions: ModuleType
    hidden: dict[str, Hidden]
    readings: dict[str, dict[str, Any]]

    def points(self, item_id: str) -> int:
        """Points that the notebook's answer cell states for this item."""
        return self._answer(item_id).metadata.course["points"]

    def stub(self, item: Exercise):
        """The function as the notebook hands it out, made from the answer cell's source."""
        notebook = parse(self.day)
        namespace: dict[str, Any] = {}
        for cell in notebook.cells:
            if cell.cell_type == "code":
                exec(_imports(cell.source), namespace)
        exec(self._answer(item.id).source, namespace)
        return namespace[item.function]

    def evidence(self, item_id: str) -> dict[str, Any]:
        """The empty evidence dict as the notebook hands it out."""
        for cell in parse(self.day).cells:
            course = cell.metadata.get("course", {})
            if course.get("id") == item_id and course.get("role") == "evidence":
                return ast.literal_eval(ast.parse(cell.source).body[0].value)
        raise LookupError(item_id)

    def _answer(self, item_id: str):
        for cell in parse(self.day).cells:
            course = cell.metadata.get("course", {})
            if course.get("id") == item_id and course.get("role") == "answer":
                return cell
        raise LookupError(item_id)


def load_day(day: Day, tests: Path = TESTS) -> DayProof:
    """Load one day; a missing file of a day that has exercises is an error."""
    file = f"day{day.number:02d}.py"
    grading = load_module(tests / "grading" / file)
    return DayProof(
        day,
        {item.id: item for item in day_items(day.number)},
        load_module(tests / "solutions" / file),
        {hidden.id: hidden for hidden in grading.HIDDEN},
        dict(grading.READINGS),
    )


def days_with_exercises() -> list[Day]:
    """The course's days that have an exercises module."""
    return [day for day in find_days(folder=NOTEBOOKS) if day_items(day.number)]


def _imports(source: str) -> str:
    try:
        body = ast.parse(source).body
    except SyntaxError:  # a cell with a magic
        return ""
    return "\n".join(ast.unparse(n) for n in body if isinstance(n, (ast.Import, ast.ImportFrom)))
