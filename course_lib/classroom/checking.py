"""`check` and `solved_or`: what a learner's notebook calls.

`check` prints exactly one line and never raises; `solved_or` prints nothing. Both are written
so that a notebook runs from top to bottom whatever the learner has written.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from typing import Any

from course_lib.classroom import exercises, sealed
from course_lib.classroom.running import Result, error_text, is_stub, judge, run, run_all
from course_lib.classroom.values import ForeignValue, type_name
from course_lib.errors import CourseError

_WIDTH = 160
_latest: dict[str, tuple[Any, bool]] = {}


def check(item_id: str, answer: Any) -> None:
    """Check an answer on its public cases and print one line.

    `answer` is the function of an A item, or the evidence dict of a B item. The line is one of
    ``[ ] d10.a1 not attempted``, ``[ok] d10.a1 5/5 public checks`` and
    ``[x] d10.a1 3/5: ties — expected [1, 4], got [4, 1]`` (the first case that failed).
    Nothing that the answer does makes this function raise. The answer's code runs only inside
    `run`, which holds its exceptions, so a KeyboardInterrupt that arrives here is the user's and
    passes; a Ctrl-C while the answer runs prints "interrupted" instead.
    """
    if not issubclass(type(item_id), str):
        kind = type_name(type(item_id))
        _say(f'[x] the exercise id must be a text such as "d10.a1", not {kind}')
        return
    item_id = str.__getitem__(item_id, slice(None))  # its own text, not a subclass's
    try:
        item = exercises.find_item(item_id)
        _latest[item.id] = (answer, False)  # until it is judged
        line, passed = _report(item, answer)
        _latest[item.id] = (answer, passed)
    except CourseError as error:
        line = f"[x] {item_id} {error}"
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # noqa: BLE001 - the last resort
        line = f"[x] {item_id} could not be checked ({type_name(type(error))})"
    _say(line)


def _say(line: str) -> None:
    """Print one line of limited width; a character that stdout cannot write is escaped."""
    line = " ".join(line.split())
    line = line if len(line) <= _WIDTH else line[: _WIDTH - 1] + "…"
    encoding = getattr(sys.stdout, "encoding", None) or "utf-8"
    print(line.encode(encoding, "backslashreplace").decode(encoding))


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
    return _report(exercises.find_item(item_id), answer)


def _report(item: exercises.Item, answer: Any) -> tuple[str, bool]:
    if isinstance(item, exercises.Reading):
        return _report_reading(item, answer)
    item_id = item.id
    if not callable(answer):
        return f"[x] {item_id} 0/{len(item.cases())}: give the function itself", False
    cases = item.cases()
    results = run_all(item, answer, cases)
    if all(is_stub(result, item_id) for result in results):
        return f"[ ] {item_id} not attempted", False
    complaints = [judge(c, r, mutates=item.mutates) for c, r in zip(cases, results, strict=True)]
    return _summary(item_id, [case.name for case in cases], complaints)


def _report_reading(item: exercises.Reading, answer: Any) -> tuple[str, bool]:
    if not issubclass(type(answer), dict):
        return f"[x] {item.id} 0/{len(item.parts)}: give the dict of parts", False
    # dict's own methods and `run`, as for a function's result: an answer can be any object.
    pairs = list(dict.items(answer))
    found = {key: value for key, value in pairs if type(key) is str}
    given = [run(found.get, (part,)) for part in item.parts]
    missing = [part for part in item.parts if part not in found]
    unknown = [key if type(key) is str else f"({type_name(type(key))})"
               for key, _ in pairs if type(key) is not str or key not in item.parts]
    misnamed = bool(missing and unknown)
    if not misnamed and all(r.error is None and sealed.is_blank(r.value) for r in given):
        return f"[ ] {item.id} not attempted", False
    truth = sealed.load(item.id)
    complaints = [
        _part_complaint(item, part, result, truth[part])
        for part, result in zip(item.parts, given, strict=True)
    ]
    filled = [result.error is not None or not sealed.is_blank(result.value) for result in given]
    wrong = any(f and c is not None for f, c in zip(filled, complaints, strict=True))
    if missing and (unknown or not wrong):
        parts = f"unknown parts: {', '.join(unknown)}; " if unknown else ""
        parts += f"missing parts: {', '.join(missing)}"
        return f"[x] {item.id} {complaints.count(None)}/{len(complaints)}: {parts}", False
    # The first wrong part is named, one that is still empty only where no other is wrong.
    order = sorted(range(len(filled)), key=lambda index: not filled[index])
    return _summary(item.id, [item.parts[i] for i in order], [complaints[i] for i in order])


def _part_complaint(item: exercises.Reading, part: str, result: Result,
                    truth: Mapping[str, Any]) -> str | None:
    if result.error is ForeignValue:
        return f"{result.text}; give a place, a number or a word"
    if result.error is not None:
        return error_text(result)
    return sealed.complaint(item.id, part, result.value, truth, item.slack)


def _summary(item_id: str, names: list[str], complaints: list[str | None]) -> tuple[str, bool]:
    total = len(complaints)
    failed = [(n, c) for n, c in zip(names, complaints, strict=True) if c is not None]
    if not failed:
        return f"[ok] {item_id} {total}/{total} public checks", True
    name, complaint = failed[0]
    return f"[x] {item_id} {total - len(failed)}/{total}: {name} — {complaint}", False
