"""Points as Canvas imports them: the identification columns of its own export, one column a day."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from course_lib.classroom.grading.human import HumanMark, Key, points_of
from course_lib.classroom.grading.submission_marks import ItemMark
from course_lib.classroom.grading.tables import in_order, number, table
from course_lib.errors import CourseError

IDENTIFICATION = ("Student", "ID", "SIS User ID", "SIS Login ID", "Section")
NAMES = ("SIS Login ID", "SIS User ID", "ID", "Student")
"""Columns in which a submission's student is looked for, in this order."""


@dataclass(frozen=True)
class CanvasTable:
    """The file to import, and the students of submissions whom the export does not know."""

    text: str
    unknown: list[str]


def canvas_csv(export: str, marks: Iterable[ItemMark],
               human: Mapping[Key, HumanMark]) -> CanvasTable:
    """Join the points of each day to the students of a gradebook that Canvas exported.

    Students without a submission keep empty cells. Raises CourseError for a text that is no such
    export, and for a student whom two of its rows could be.
    """
    rows = list(csv.DictReader(io.StringIO(export.removeprefix("\ufeff"), newline="")))
    if not rows or any(name not in rows[0] for name in ("Student", "ID", "Section")):
        raise CourseError("this is no gradebook exported from Canvas: it has no columns Student, "
                          "ID and Section.")
    marks = in_order(marks)
    days = sorted({mark.day for mark in marks})
    columns = [name for name in IDENTIFICATION if name in rows[0]]
    of: dict[int, dict[int, str]] = {}
    unknown = []
    for student in dict.fromkeys(mark.student for mark in marks):
        found = _rows_of(student, rows)
        if len(found) > 1:
            raise CourseError(f"{student} is the name of {len(found)} students in the export; "
                              "rename the submission to the login.")
        if not found:
            unknown.append(student)
            continue
        of[found[0]] = {day: number(sum(points_of(m, human) for m in marks
                                        if (m.student, m.day) == (student, day)))
                        for day in days if any((m.student, m.day) == (student, day) for m in marks)}
    most = {day: max(sum(m.max for m in marks if (m.student, m.day) == (s, day))
                     for s in {m.student for m in marks}) for day in days}
    lines = [["    Points Possible", *[""] * (len(columns) - 1), *(str(most[d]) for d in days)]]
    for index, row in enumerate(rows):
        if not _is_possible(row):
            lines.append([*(row[name] or "" for name in columns),
                          *(of.get(index, {}).get(day, "") for day in days)])
    return CanvasTable(table((*columns, *(f"Day {day}" for day in days)), lines), unknown)


def _rows_of(student: str, rows: list[dict[str, str]]) -> list[int]:
    """Rows that a submission's name can mean, by the first column in which it stands."""
    wanted = student.casefold().strip()
    for name in NAMES:
        found = [index for index, row in enumerate(rows) if not _is_possible(row)
                 and (row.get(name) or "").casefold().strip() == wanted]
        if found:
            return found
    return []


def _is_possible(row: dict[str, str]) -> bool:
    """Whether a row is the one that Canvas writes below its header."""
    return (row["Student"] or "").strip() == "Points Possible"
