"""The hidden half of an exercise: what ``tests/grading/dayNN.py`` is written with."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from course_lib.classroom.exercises import Case, Exercise
from course_lib.classroom.running import is_stub, judge, run_all


@dataclass(frozen=True)
class Group:
    """Hidden cases that earn `points` together: all of them right, or none of the points.

    `message` is what a learner reads as feedback when the group fails: it names the idea that
    was missed, never a case or its result.
    """

    name: str
    points: int
    message: str
    cases: Sequence[Case]


@dataclass(frozen=True)
class Hidden:
    """Hidden cases of one A item and the answers that prove them.

    `groups` returns the groups; their points add up to the item's points. `mutants` are at least
    four plausible wrong answers, by name; `alternative` is a right answer written another way
    than the solution.
    """

    id: str
    groups: Callable[[], Sequence[Group]]
    mutants: Mapping[str, Callable] = field(default_factory=dict)
    alternative: Callable | None = None


@dataclass(frozen=True)
class Mark:
    """Points of one answer, the messages of its failed groups, and how each group first failed
    (for authors; never shown to a learner)."""

    points: int
    possible: int
    attempted: bool
    messages: tuple[str, ...]
    details: tuple[str, ...]


def mark(item: Exercise, hidden: Hidden, fn: Callable) -> Mark:
    """Run `fn` on every hidden case and add up the points of the groups it passes."""
    points, possible, stubs, total = 0, 0, 0, 0
    messages: list[str] = []
    details: list[str] = []
    for group in hidden.groups():
        possible += group.points
        results = run_all(item, fn, group.cases)
        total += len(results)
        stubs += sum(is_stub(result, item.id) for result in results)
        wrong = [
            f"{group.name} / {case.name}: {complaint}"
            for case, result in zip(group.cases, results, strict=True)
            if (complaint := judge(case, result, mutates=item.mutates)) is not None
        ]
        if wrong:
            messages.append(group.message)
            details.append(wrong[0])
        else:
            points += group.points
    return Mark(points, possible, stubs < total, tuple(messages), tuple(details))
