"""What a human gave the text of a reading item, and what that makes of the item's mark."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass

from course_lib.classroom.exercises import Reading, find_item
from course_lib.classroom.grading.submission_marks import ItemMark


@dataclass(frozen=True)
class HumanMark:
    """What a human gave a reading item, and the digest of the answer that was read."""

    points: float
    comment: str
    answer_sha256: str


Key = tuple[str, str]
"""Student and item."""


def digest(text: str) -> str:
    """SHA-256 of a text."""
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()


def points_of(mark: ItemMark, human: Mapping[Key, HumanMark]) -> float:
    """All points of an item: those counted and a human's."""
    given = human.get((mark.student, mark.item))
    return mark.auto + (given.points if given else 0)


def most_of(mark: ItemMark) -> int:
    """Points that a human can give a reading item: what its countable parts leave."""
    item = find_item(mark.item)
    return mark.max - (item.auto if isinstance(item, Reading) else mark.max)


def is_stale(mark: ItemMark, human: Mapping[Key, HumanMark]) -> bool:
    """Whether the answer changed after a human had marked it."""
    given = human.get((mark.student, mark.item))
    return given is not None and given.answer_sha256 != digest(mark.text)


def waits(mark: ItemMark, human: Mapping[Key, HumanMark]) -> bool:
    """Whether there is a text that no human has marked as it is now."""
    given = (mark.student, mark.item) in human
    return bool(mark.text) and (not given or is_stale(mark, human))


def status_of(mark: ItemMark, human: Mapping[Key, HumanMark]) -> str:
    """The item's status as the tables say it: "marked" where a human has read the text."""
    return "marked" if mark.text and not waits(mark, human) else mark.status
