"""What an exercise is: the public half of it, one module ``dayNN.py`` a day.

``EXERCISES`` in each module lists the day's items. Points, minutes and difficulty are stated
once, in the metadata of the notebook's cells; hidden cases are in ``tests/grading/dayNN.py``.
How to write a day: docs/authoring.md.
"""

from __future__ import annotations

import importlib
import importlib.util
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from course_lib.classroom.values import ForeignValue, plain
from course_lib.errors import CourseError

ID = re.compile(r"d(\d\d)\.([ab])([1-9])")
NOTHING: Any = type("Nothing", (), {"__repr__": lambda self: "NOTHING"})()


@dataclass(frozen=True)
class Case:
    """One call of the answer and what it must give: exactly one of expect, raises, accept.

    `name` is what the learner reads when the case fails: say the situation ("ties", "k above
    the number of blocks"), not the answer. `args` and `kwargs` hold plain values only (numbers,
    text, lists, tuples, dicts, arrays). `raises` also accepts subclasses. `accept` gets the plain
    result and returns None, or a short complaint. `rtol` and `atol` bound the difference of
    numbers (default: exactly equal); `dtype` demands the array's dtype too.
    """

    name: str
    args: Sequence[Any] = ()
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    expect: Any = NOTHING
    raises: type[Exception] | None = None
    accept: Callable[[Any], str | None] | None = None
    rtol: float = 0.0
    atol: float = 0.0
    dtype: bool = False

    def __post_init__(self) -> None:
        given = (self.expect is not NOTHING) + (self.raises is not None) + (self.accept is not None)
        if given != 1:
            raise ValueError(f"case {self.name!r}: give exactly one of expect, raises, accept")
        if not isinstance(self.args, (tuple, list)):
            raise ValueError(f"case {self.name!r}: args must be a tuple of the arguments")
        held = {"args": self.args, "kwargs": dict(self.kwargs)}
        if self.expect is not NOTHING:
            held["expect"] = self.expect
        for what, value in held.items():
            try:
                plain(value)
            except ForeignValue as error:
                raise ValueError(f"case {self.name!r}: {what} holds {error}") from None


@dataclass(frozen=True)
class Exercise:
    """An A item: a function that the learner writes, with its public cases.

    `function` is the name defined in the answer cell. `cases` returns the public cases (it is
    called only when checked, so it may build data). `replaces` names the course_lib functions
    that the answer reimplements ("course_lib.sparse.select_blocks"); a grader takes them away.
    `call(fn, *args, **kwargs)`, if given, makes the call (several calls, a generator made from
    a seed …); it holds no expected value. `mutates` allows the answer to change its arguments.
    `seconds` is the time limit of one case.
    """

    id: str
    function: str
    cases: Callable[[], Sequence[Case]]
    replaces: tuple[str, ...] = ()
    call: Callable[..., Any] | None = None
    mutates: bool = False
    seconds: float = 10.0


@dataclass(frozen=True)
class Reading:
    """A B item: source reading, with the names of its countable parts (may be none).

    The learner fills a dict with these keys: ``"path:first-last"`` (a list of such texts where
    several places are asked for) or a number or word. The truth is written in
    ``tests/grading/dayNN.py`` and reaches this package only as digests (`sealed`). A cited range
    may be up to `slack` lines longer than the target at each end. `auto` of the item's points are
    earned by the parts, in proportion; the text earns the rest by a human's mark.
    """

    id: str
    parts: tuple[str, ...] = ()
    slack: int = 3
    auto: int = 0


Item = Exercise | Reading


def parse_id(item_id: str) -> tuple[int, str]:
    """Return (day, kind) of an exercise id, ("d10.a1" → 10, "A"); CourseError if it is none."""
    match = ID.fullmatch(item_id) if isinstance(item_id, str) else None
    if match is None:
        raise CourseError(f"{item_id!r} is not an exercise id; write it like d10.a1 or d10.b2.")
    return int(match[1]), match[2].upper()


def day_items(day: int) -> list[Item]:
    """Return the items of one day, in order; an empty list where the day has none.

    Raises CourseError where the day's module defines an id twice or one of another day.
    """
    name = f"{__name__}.day{day:02d}"
    if importlib.util.find_spec(name) is None:
        return []
    items = list(importlib.import_module(name).EXERCISES)
    seen = set()
    for item in items:
        number, kind = parse_id(item.id)
        if number != day or item.id in seen or (kind == "A") != isinstance(item, Exercise):
            raise CourseError(f"{name}: {item.id} is misplaced, of the wrong kind or there twice.")
        seen.add(item.id)
    return items


def find_item(item_id: str) -> Item:
    """Return the item of this id; CourseError naming the day's ids where there is none."""
    day, _ = parse_id(item_id)
    items = day_items(day)
    for item in items:
        if item.id == item_id:
            return item
    known = ", ".join(item.id for item in items) or "none"
    raise CourseError(f"there is no exercise {item_id}; day {day} has: {known}.")
