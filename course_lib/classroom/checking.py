"""`check` and `solved_or`: what a learner's notebook calls.

`check` prints exactly one line and never raises; `solved_or` prints nothing. Both are written
so that a notebook runs from top to bottom whatever the learner has written.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from course_lib.classroom import exercises, sealed
from course_lib.classroom.running import is_stub, judge, run_all
from course_lib.errors import CourseError

_WIDTH = 160
_latest: dict[str, tuple[Any, bool]] = {}


def check(item_id: str, answer: Any) -> None:
    """Check an answer on its public cases and print one line.

    `answer` is the function of an A item, or the evidence dict of a B item. The line is one of
    ``[ ] d10.a1 not attempted``, ``[ok] d10.a1 5/5 public checks`` and
    ``[x] d10.a1 3/5: ties — expected [1, 4], got [4, 1]`` (the first case that failed).
    Nothing that the answer does makes this function raise.
    """
    try:
        line, passed = report(item_id, answer)
    except CourseError as error:
        line, passed = f"[x] {item_id} {error}", False
    _latest[str(item_id)] = (answer, passed)
    line = " ".join(line.split())
    print(line if len(line) <= _WIDTH else line[: _WIDTH - 1] + "…")


def solved_or(fn: Callable, reference: Callable) -> Callable:
    """Return `fn` where its latest checks were all right, else `reference`.

    The function object itself must have been checked: after an edit, check it again.
    """
    results = [passed for answer, passed in _latest.values() if answer is fn]
    return fn if results and all(results) else reference


def report(item_id: str, answer: Any) -> tuple[str, bool]:
    """Return the line that `check` prints and whether every public case passed.

    Raises CourseError for an unknown id.
    """
    item = exercises.find_item(item_id)
    if isinstance(item, exercises.Reading):
        return _report_reading(item, answer)
    if not callable(answer):
        return f"[x] {item_id} 0/{len(item.cases())}: give the function itself", False
    cases = item.cases()
    results = run_all(item, answer, cases)
    if all(is_stub(result, item_id) for result in results):
        return f"[ ] {item_id} not attempted", False
    complaints = [judge(c, r, mutates=item.mutates) for c, r in zip(cases, results, strict=True)]
    return _summary(item_id, [case.name for case in cases], complaints)


def _report_reading(item: exercises.Reading, answer: Any) -> tuple[str, bool]:
    if not isinstance(answer, Mapping):
        return f"[x] {item.id} 0/{len(item.parts)}: give the dict of parts", False
    given = [answer.get(part) for part in item.parts]
    missing = [part for part in item.parts if part not in answer]
    unknown = [key if type(key) is str else f"({type(key).__name__})"
               for key in answer if type(key) is not str or key not in item.parts]
    misnamed = bool(missing and unknown)
    if not misnamed and all(sealed.is_blank(value) for value in given):
        return f"[ ] {item.id} not attempted", False
    truth = sealed.load(item.id)
    complaints = [
        sealed.complaint(item.id, part, value, truth[part], item.slack)
        for part, value in zip(item.parts, given, strict=True)
    ]
    if missing:
        parts = f"unknown parts: {', '.join(unknown)}; " if unknown else ""
        parts += f"missing parts: {', '.join(missing)}"
        return f"[x] {item.id} {complaints.count(None)}/{len(complaints)}: {parts}", False
    return _summary(item.id, list(item.parts), complaints)


def _summary(item_id: str, names: list[str], complaints: list[str | None]) -> tuple[str, bool]:
    total = len(complaints)
    failed = [(n, c) for n, c in zip(names, complaints, strict=True) if c is not None]
    if not failed:
        return f"[ok] {item_id} {total}/{total} public checks", True
    name, complaint = failed[0]
    return f"[x] {item_id} {total - len(failed)}/{total}: {name} — {complaint}", False
