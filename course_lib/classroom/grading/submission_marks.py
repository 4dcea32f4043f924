"""From one submission to its marks: a pure function, so that it can run anywhere."""

from __future__ import annotations

import functools
import hashlib
import os
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from course_lib.classroom.exercises import Exercise
from course_lib.classroom.grading.day import GradedDay, load_day
from course_lib.classroom.grading.handed_in import (
    MAX_SOURCE,
    HandedIn,
    read_notebook,
    take_apart,
)
from course_lib.classroom.grading.marking import Marked, Runner, mark_code, mark_reading
from course_lib.classroom.grading.program import program_of
from course_lib.classroom.grading.sandbox import Sandbox
from course_lib.classroom.grading.submissions import Submission
from course_lib.classroom.grading.taken_away import write_library
from course_lib.errors import CourseError


@dataclass(frozen=True)
class ItemMark:
    """A line of grades.csv before a human's points; `sha256` is that of the submission, `text` the
    answer cell that a human is to read, `evidence` the places of its evidence cell by part."""

    student: str
    day: int
    item: str
    kind: str
    status: str
    auto: int
    max: int
    messages: tuple[str, ...]
    flags: tuple[str, ...]
    sha256: str
    text: str = ""
    evidence: tuple[tuple[str, str], ...] = ()

    def as_json(self) -> dict[str, Any]:
        """Plain JSON, as kept beside the tables."""
        return asdict(self)


def marks_of(submission: Submission, libraries: Path, unsandboxed: bool = False) -> list[ItemMark]:
    """Every item's mark of one submission. `libraries`: a folder for the copies of course_lib that
    sandboxes show, kept from one submission to the next."""
    day = load_day(submission.day)
    content = submission.content
    sha = hashlib.sha256(content or b"").hexdigest()
    try:
        if content is None:
            raise CourseError(submission.problem)
        handed = take_apart(read_notebook(content), day.ours, day.items)
    except CourseError as error:
        told = (f"The notebook could not be read: {error}.",)
        marked = {item.id: Marked("unreadable", 0, day.points(item.id), told)
                  for item in day.items}
    else:
        marked = {item.id: _mark_or_say(day, item, handed[item.id], libraries, unsandboxed)
                  for item in day.items}
    return [
        ItemMark(submission.student, day.number, item.id, item.id[4].upper(), mark.status,
                 mark.auto, mark.possible, mark.messages,
                 (*mark.flags, "unsandboxed") if unsandboxed and isinstance(item, Exercise)
                 else mark.flags, sha, mark.text, mark.evidence)
        for item, mark in ((item, marked[item.id]) for item in day.items)
    ]


def _mark_or_say(day: GradedDay, item: Any, handed: HandedIn, libraries: Path,
                 unsandboxed: bool) -> Marked:
    """The item's mark; a defect of the grader that one answer brings to light is said in that
    answer's row and stops no other. What this machine lacks still stops the run."""
    try:
        return _mark(day, item, handed, libraries, unsandboxed)
    except (CourseError, OSError, MemoryError):
        raise
    except Exception as error:  # noqa: BLE001 - a defect has any type
        told = (f"The grader failed on this answer ({type(error).__name__}).",)
        return Marked("not_graded", 0, day.points(item.id), told, handed.flags)


def _mark(day: GradedDay, item: Any, handed: HandedIn, libraries: Path,
          unsandboxed: bool) -> Marked:
    if handed.too_long:
        told = (f"The answer is longer than {MAX_SOURCE:,} characters.",)
        return Marked("unreadable", 0, day.points(item.id), told, handed.flags)
    stub = day.stub(item.id)
    if not isinstance(item, Exercise):
        return mark_reading(item, handed, stub, day.points(item.id))

    def start() -> AbstractContextManager[Runner]:
        sources = program_of(item, handed, day.ours, day.items, day.solutions)
        return Sandbox(library_of(libraries, item), item.id, sources, item.function, unsandboxed)

    return mark_code(item, handed, stub, day.groups(item.id), start)


def library_of(libraries: Path, item: Exercise) -> Path:
    """The folder with course_lib as this exercise's answers see it; written at the first call."""
    folder = libraries / item.id
    if not folder.is_dir():
        begun = libraries / f".{item.id}.{os.getpid()}"
        begun.mkdir(mode=0o755)
        write_library(begun, item.replaces)
        try:
            begun.rename(folder)
        except OSError:  # another process was first
            if not folder.is_dir():
                raise
    return folder


Grader = Callable[[Submission], list[ItemMark]]


def grader(libraries: Path, unsandboxed: bool) -> Grader:
    """`marks_of` with everything but the submission said, as an executor wants it."""
    return functools.partial(marks_of, libraries=libraries, unsandboxed=unsandboxed)
