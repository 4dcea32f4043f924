"""The tables that an instructor opens: grades.csv and totals.csv."""

from __future__ import annotations

import csv
import io
import unicodedata
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from course_lib.classroom.grading.human import HumanMark, Key, points_of, status_of, waits
from course_lib.classroom.grading.submission_marks import ItemMark

COLUMNS = ("student", "day", "item", "kind", "status", "auto", "manual", "max", "message", "sha256")
FORMULA = ("=", "+", "-", "@", "\t", "＝", "＋", "－", "＠")


def grades_csv(marks: Iterable[ItemMark], human: Mapping[Key, HumanMark]) -> str:
    """One line per student and item, in that order."""
    return table(COLUMNS, (
        (mark.student, mark.day, mark.item, mark.kind, status_of(mark, human), mark.auto,
         number(human[mark.student, mark.item].points) if (mark.student, mark.item) in human
         else "",
         mark.max, " ".join((*(f"[{flag}]" for flag in mark.flags), *mark.messages)), mark.sha256)
        for mark in in_order(marks)))


def totals_csv(marks: Iterable[ItemMark], human: Mapping[Key, HumanMark]) -> str:
    """One line per student: points of each day, empty where it was not handed in, and of all; the
    most that the days handed in could give; how many texts wait to be read."""
    marks = in_order(marks)
    days = sorted({mark.day for mark in marks})
    lines: list[tuple[Any, ...]] = []
    for student in dict.fromkeys(mark.student for mark in marks):
        own = [mark for mark in marks if mark.student == student]
        of_day = {day: sum(points_of(m, human) for m in own if m.day == day)
                  for day in days if any(m.day == day for m in own)}
        waiting = sum(waits(m, human) for m in own)
        lines.append((student, *(number(of_day[day]) if day in of_day else "" for day in days),
                      number(sum(of_day.values())), sum(m.max for m in own), waiting))
    head = ("student", *(f"day{day:02d}" for day in days), "points", "max", "to_review")
    return table(head, lines)


def in_order(marks: Iterable[ItemMark]) -> list[ItemMark]:
    """By student, then by day and item."""
    return sorted(marks, key=lambda mark: (mark.student, mark.day, mark.item[4:]))


def number(value: float) -> str:
    """A number of points without needless digits."""
    return f"{value:g}"


def table(head: Sequence[str], rows: Iterable[Sequence[Any]], lines: bool = False) -> str:
    """CSV that a spreadsheet opens as text: with a byte-order mark, and no cell that it would take
    for a formula; with `lines` a cell may have several."""
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow(head)
    for row in rows:
        writer.writerow([harmless(cell, lines) for cell in row])
    return "\ufeff" + out.getvalue()


def harmless(cell: Any, lines: bool = False) -> Any:
    """A text cell that a spreadsheet takes for text: one that begins like a formula gets an
    apostrophe in front; characters that a terminal obeys or UTF-8 does not have are shown as �."""
    if not isinstance(cell, str):
        return cell
    cell = cell.replace("\r", " ")
    cell = cell if lines else cell.replace("\n", " ")
    cell = "".join("\ufffd" if unicodedata.category(c) in ("Cc", "Cs") and c not in "\t\n" else c
                   for c in cell)
    return "'" + cell if cell.startswith(FORMULA) else cell
