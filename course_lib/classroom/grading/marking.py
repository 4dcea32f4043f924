"""The mark of one item: its hidden cases run in the sandbox, compared out here."""

from __future__ import annotations

import ast
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from course_lib.classroom import sealed
from course_lib.classroom.evidence import PLACEHOLDERS, read_answer
from course_lib.classroom.exercises import Case, Exercise, Reading
from course_lib.classroom.grading.handed_in import HandedIn, parsed, same_text
from course_lib.classroom.hidden import Group
from course_lib.classroom.running import Result, judge
from course_lib.paths import ROOT


class Runner(Protocol):
    """What runs cases: a Sandbox."""

    def run(self, args: Sequence[Any], kwargs: Mapping[str, Any], seconds: float) -> dict: ...


@dataclass(frozen=True)
class Marked:
    """An item's mark: `auto` of `possible` points without a human's; `status` and `flags` as in
    docs/instructors.md; `messages`: what the learner reads; `text`: what a human is to read, and
    `evidence`, the places that the parts of the evidence cell cite, each with its part."""

    status: str
    auto: int
    possible: int
    messages: tuple[str, ...] = ()
    flags: tuple[str, ...] = ()
    text: str = ""
    evidence: tuple[tuple[str, str], ...] = ()


def mark_code(item: Exercise, handed: HandedIn, stub: str, groups: Sequence[Group],
              start: Callable[[], AbstractContextManager[Runner]]) -> Marked:
    """Mark a code answer; `start` makes the sandbox that runs it."""
    possible = sum(group.points for group in groups)
    if handed.answer is None:
        return Marked("missing_cell", 0, possible, (
            f"The answer cell of {item.id} is not in the notebook.",), handed.flags)
    if same_text(handed.answer, stub):
        return Marked("not_attempted", 0, possible, (), handed.flags)
    with start() as sandbox:
        ends = _run_groups(item, groups, sandbox)
    return _judged(item, groups, ends, handed.flags)


def _run_groups(item: Exercise, groups: Sequence[Group],
                sandbox: Runner) -> list[list[dict[str, Any]]]:
    """How every case ended; after one that took too long, or a definition that failed, the rest end
    as it did."""
    ends: list[list[dict[str, Any]]] = []
    last: dict[str, Any] = {}
    for group in groups:
        of_group = []
        for case in group.cases:
            if last.get("end") not in ("timeout", "uses_reference") and last.get(
                    "stage") != "define":
                last = sandbox.run(case.args, case.kwargs, item.seconds)
            of_group.append(last)
        ends.append(of_group)
    return ends


def _judged(item: Exercise, groups: Sequence[Group], ends: Sequence[Sequence[dict]],
            flags: tuple[str, ...]) -> Marked:
    every = [end for group in ends for end in group]
    possible = sum(group.points for group in groups)
    if any(end["end"] == "uses_reference" for end in every):
        return Marked("uses_reference", 0, possible, (
            "The answer calls the library's own function that it was to write.",), flags)
    if all(_is_stub(end, item.id) for end in every):
        return Marked("not_attempted", 0, possible, (), flags)
    points, messages = 0, []
    for group, of_group in zip(groups, ends, strict=True):
        if all(right(case, end, item.mutates)
               for case, end in zip(group.cases, of_group, strict=True)):
            points += group.points
        else:
            messages.append(group.message)
    if points == possible:
        return Marked("ok", points, possible, (), flags)
    status, told = _status(every, points)
    return Marked(status, points, possible, (*told, *messages), flags)


def _status(ends: Sequence[dict], points: int) -> tuple[str, tuple[str, ...]]:
    """One word for what went wrong, and a sentence where the messages of groups do not say it."""
    kinds = {end["end"] for end in ends}
    if "timeout" in kinds:
        told: tuple[str, ...] = ("The answer did not end within its time limit.",)
        return ("partial" if points else "timeout"), told
    if kinds & {"crash", "foreign", "too_large"}:
        told = ("The answer ended its process or gave a result that cannot be read.",)
        return ("partial" if points else "crash"), told
    if points:
        return "partial", ()
    errors = {end["kinds"][0] if end.get("kinds") else "" for end in ends}
    if kinds == {"error"} and len(errors) == 1:
        name = name_of(ends[0])
        return f"error:{name}", (f"The answer raised {name} on every case.",)
    return "failed", ()


def name_of(end: Mapping[str, Any]) -> str:
    """The name of an exception, which the answer has chosen: letters only, and not too many."""
    name = str((end.get("kinds") or ["Exception"])[0])
    return "".join(c for c in name if c.isascii() and (c.isalnum() or c == "_"))[:40] or "Exception"


def right(case: Case, end: Mapping[str, Any], mutates: bool) -> bool:
    """Whether a case ended as it must. An answer can name any exception it likes: that is no more
    than raising it."""
    if end["end"] == "error" and case.raises is not None:
        return end.get("stage") == "call" and case.raises.__name__ in end.get("kinds", ())
    if end["end"] != "value":
        return False
    result = Result(value=end.get("value"), mutated=bool(end.get("mutated")))
    return judge(case, result, mutates=mutates) is None


def _is_stub(end: Mapping[str, Any], item_id: str) -> bool:
    return (end["end"] == "error" and end.get("kinds", [""])[0] == "NotImplementedError"
            and end.get("text") == item_id)


def mark_reading(item: Reading, handed: HandedIn, stub: str, points: int,
                 root: Path = ROOT) -> Marked:
    """Count the right parts of a reading item; the text waits for a human.

    Status "to_review" where there is text to read, "not_attempted" where neither text nor parts are
    there. Nothing is run: the evidence is a literal or it is none.
    """
    if handed.answer is None and handed.evidence is None:
        return Marked("missing_cell", 0, points, (
            f"The answer cell of {item.id} is not in the notebook.",), handed.flags)
    written = read_answer(handed.answer or "").text not in PLACEHOLDERS
    found = evidence_of(handed.evidence)
    given = found is not None and any(not sealed.is_blank(found.get(p)) for p in item.parts)
    if not written and not given and (found is not None or not item.parts):
        return Marked("not_attempted", 0, points, (), handed.flags)
    messages: list[str] = []
    if item.parts and found is None:
        messages.append("The evidence cell is not a dict of plain values.")
    complaints = _complaints(item, found or {}, root)
    messages += [f"{part}: {told}." for part, told in complaints.items() if told]
    count = sum(told is None for told in complaints.values())
    auto = item.auto * count // len(item.parts) if item.parts else 0
    return Marked("to_review" if written else "partial" if auto else "failed", auto, points,
                  tuple(messages), handed.flags, (handed.answer or "") if written else "",
                  _cited(item, found or {}) if written else ())


def _cited(item: Reading, found: Mapping[str, Any]) -> tuple[tuple[str, str], ...]:
    """The places that the parts cite: numbers, words and what has not the form of a place aside."""
    return tuple((part, place) for part in item.parts
                 for value in [found.get(part)]
                 for place in (value if isinstance(value, (list, tuple)) else [value])
                 if isinstance(place, str) and sealed.PLACE.fullmatch(place))


def _complaints(item: Reading, found: Mapping[str, Any], root: Path) -> dict[str, str | None]:
    if not item.parts:
        return {}
    truth = sealed.load(item.id)
    return {part: sealed.complaint(item.id, part, found.get(part), truth[part], item.slack, root)
            for part in item.parts}


def evidence_of(source: str | None) -> dict[str, Any] | None:
    """The dict of an evidence cell, read as a literal; None where it is anything else."""
    try:
        body = parsed(source or "").body
        values = [node.value for node in body if isinstance(node, ast.Assign)]
        value = ast.literal_eval(values[-1])
    except (ValueError, TypeError, IndexError, RecursionError, MemoryError):
        return None
    if not isinstance(value, dict) or not all(isinstance(key, str) for key in value):
        return None
    return value
