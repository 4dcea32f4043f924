"""Reading texts: what waits for a human, blind and question by question, and what humans gave."""

from __future__ import annotations

import ast
import csv
import fcntl
import hashlib
import io
import json
import re
import secrets
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from course_lib.atomic import write_atomically
from course_lib.classroom.evidence import PLACEHOLDER, read_answer
from course_lib.classroom.grading.human import (
    HumanMark,
    Key,
    digest,
    is_stale,
    most_of,
    waits,
)
from course_lib.classroom.grading.submission_marks import ItemMark
from course_lib.classroom.grading.tables import in_order, table
from course_lib.classroom.sealed import PLACE, place_lines
from course_lib.errors import CourseError

MARKS, QUEUE, SALT, LOCK = "review.json", "review.csv", ".state/salt", ".state/lock"
COLUMNS = ("item", "id", "answer", "evidence", "source", "max", "points", "comment")
CONTEXT = 2
"""Lines shown around a cited place."""
MOST_PLACES = 20


Cited = tuple[str, str]
"""A part of the evidence cell, or nothing for the answer's own lines, and the place."""


@dataclass(frozen=True)
class Waiting:
    """A text in the queue: `id` stands for the student; `places`: what the answer cites,
    each with the part of the evidence cell that does, if any; `most`: points that a human can give;
    `given`: an earlier mark, of this answer or (`changed`) of one that was replaced since."""

    id: str
    item: str
    answer: str
    places: tuple[Cited, ...]
    most: int
    given: HumanMark | None
    changed: bool


class Reviews:
    """The human marks of one folder of grades, kept in review.json beside the tables; `drafts` are
    comments on answers that have no points yet.

    Every change is written at once, whole, onto what the file holds by then: several may mark in
    one folder. Raises CourseError where the file cannot be read: it is the one thing here that
    cannot be made again.
    """

    def __init__(self, out: Path):
        self.path = out / MARKS
        self._salt = _salt(out / SALT)
        self.human: dict[Key, HumanMark] = {}
        self.drafts: dict[Key, str] = {}
        self._read()

    def _read(self) -> None:
        self.human, self.drafts = {}, {}
        try:
            kept = json.loads(self.path.read_text(encoding="utf-8"))
            for line in kept["marks"]:
                self.human[str(line["student"]), str(line["item"])] = HumanMark(
                    float(line["points"]), str(line["comment"]), str(line["answer_sha256"]))
            for line in kept["drafts"]:
                self.drafts[str(line["student"]), str(line["item"])] = str(line["comment"])
        except FileNotFoundError:
            pass
        except (OSError, ValueError, TypeError, KeyError) as error:
            raise CourseError(f"{self.path} cannot be read ({type(error).__name__}); it holds the "
                              "marks that humans gave: put back a copy of it.") from None

    def blind(self, student: str, item: str) -> str:
        """What stands for a student in the queue of one item, not the same in the next item's. It
        begins with a letter: a spreadsheet takes 12e4567890 for a number."""
        text = "\0".join((self._salt, student, item))
        return "q" + hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()[:10]

    def queue(self, marks: Iterable[ItemMark], everything: bool = False) -> list[Waiting]:
        """Texts that no human has marked, or that changed since; with `everything` all texts.

        Question by question, in each in the order of the ids, which says nothing about students.
        """
        waiting = []
        for mark in in_order(marks):
            if not mark.text:
                continue
            given = self.human.get((mark.student, mark.item))
            if everything or waits(mark, self.human):
                waiting.append(Waiting(
                    self.blind(mark.student, mark.item), mark.item, read_answer(mark.text).text,
                    cited(mark), most_of(mark), given,
                    is_stale(mark, self.human)))
        return sorted(waiting, key=lambda w: (w.item, w.id))

    def give(self, mark: ItemMark, points: float | None, comment: str) -> None:
        """Keep a human's mark, or with points None a comment alone; CourseError for points that the
        text cannot earn."""
        most, key = most_of(mark), (mark.student, mark.item)
        if points is not None and not 0 <= points <= most:  # also refuses NaN
            raise CourseError(f"{mark.item} takes 0 to {most} points from a human, not {points:g}.")
        comment = comment.encode("utf-8", "replace").decode()  # half an emoji is no character
        with open(self.path.parent / LOCK, "w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            self._read()
            before = dict(self.human), dict(self.drafts)
            if points is None:
                self.drafts[key] = comment
            else:
                self.human[key] = HumanMark(points, comment, digest(mark.text))
                self.drafts.pop(key, None)
            try:
                self._write()
            except OSError:
                self.human, self.drafts = before
                raise

    def flagged(self, marks: Iterable[ItemMark]) -> list[ItemMark]:
        """The marks with "resubmitted" where an answer changed after a human had marked it."""
        return [replace(mark, flags=(*mark.flags, "resubmitted"))
                if is_stale(mark, self.human) else mark for mark in marks]

    def _write(self) -> None:
        lines = [{"student": student, "item": item, "points": mark.points, "comment": mark.comment,
                  "answer_sha256": mark.answer_sha256}
                 for (student, item), mark in sorted(self.human.items())]
        drafts = [{"student": student, "item": item, "comment": comment}
                  for (student, item), comment in sorted(self.drafts.items())]
        write_atomically(self.path, json.dumps({"marks": lines, "drafts": drafts},
                                               ensure_ascii=False, indent=1) + "\n")


def _salt(path: Path) -> str:
    """A secret of this folder, so that nobody can compute who an id stands for."""
    try:
        return path.read_text(encoding="ascii")
    except (FileNotFoundError, UnicodeDecodeError):
        path.parent.mkdir(parents=True, exist_ok=True)
        salt = secrets.token_hex(16)
        write_atomically(path, salt)
        return salt


def rubric_of(item: str, solutions: str) -> str:
    """The model answer and rubric of a reading item, from the text of the day's solutions."""
    for node in ast.parse(solutions).body:
        if isinstance(node, ast.Assign) and any(
                isinstance(t, ast.Name) and t.id == "ANSWERS" for t in node.targets):
            return reflowed(str(ast.literal_eval(node.value).get(item, "")))
    return ""


def reflowed(text: str) -> str:
    """Text whose soft line breaks are joined: an empty line and an item of a list stay."""
    return re.sub(r"(?<=\S)[ \t]*\n[ \t]*(?=\S)(?![*-] |\d+[.)] )", " ", text.strip())


def cited(mark: ItemMark) -> tuple[Cited, ...]:
    """What an answer cites: its Evidence lines, then the parts of its evidence cell."""
    own = (place for place in read_answer(mark.text).places if place != PLACEHOLDER)
    return (*(("", place) for place in own), *mark.evidence)


def source_of(places: Sequence[Cited]) -> str:
    """The cited lines with their numbers; what is wrong with a place that is not there. What was
    written in words is shown as it is."""
    shown = [f"{_named(cite)[:200]}\n{place_lines(cite[1], CONTEXT)}"
             if PLACE.fullmatch(cite[1]) else f"in words: {cite[1][:200]}"
             for cite in places[:MOST_PLACES]]
    left = len(places) - len(shown)
    return "\n\n".join([*shown, f"(and {left} more places)"] if left else shown)


def _named(cite: Cited) -> str:
    return f"{cite[0]}: {cite[1]}" if cite[0] else cite[1]


def queue_csv(waiting: Iterable[Waiting]) -> str:
    """The queue as a table to fill in."""
    return table(COLUMNS, (
        (w.item, w.id, w.answer, "; ".join(map(_named, w.places)), source_of(w.places), w.most,
         "" if w.given is None or w.changed else f"{w.given.points:g}",
         "" if w.given is None else w.given.comment)
        for w in waiting), lines=True)


@dataclass(frozen=True)
class Merged:
    """What a filled-in table did: marks taken, and rows left alone because a human had marked the
    same answer differently."""

    taken: int
    kept: list[str]


def merge_csv(reviews: Reviews, marks: Iterable[ItemMark], text: str) -> Merged:
    """Take the points of a filled-in table; a human's mark of the same answer is never replaced.

    Raises CourseError, before anything is taken, for a table without the columns, an unknown id, a
    row there twice with different points, and points that are no number or too many.
    """
    by_id: Mapping[tuple[str, str], ItemMark] = {
        (mark.item, reviews.blind(mark.student, mark.item)): mark for mark in marks if mark.text}
    wanted: dict[tuple[str, str], tuple[float, str]] = {}
    for number, row in enumerate(_rows(text), 2):
        key = (row["item"].strip(), row["id"].strip())
        if not row["points"].strip():
            continue
        if key not in by_id:
            raise CourseError(f"line {number}: {key[0]} {key[1]} is in no queue of this folder.")
        points, most = _number(row["points"], number), most_of(by_id[key])
        if not 0 <= points <= most:
            raise CourseError(f"line {number}: {key[0]} takes 0 to {most} points, not {points:g}.")
        found = points, row["comment"].strip()
        if wanted.setdefault(key, found) != found:
            raise CourseError(f"line {number}: {key[0]} {key[1]} is there twice, differently.")
    taken, kept = 0, []
    for key, (points, comment) in wanted.items():
        mark = by_id[key]
        given = reviews.human.get((mark.student, mark.item))
        if given is not None and given.answer_sha256 == digest(mark.text):
            if (given.points, given.comment) != (points, comment):
                kept.append(f"{key[0]} {key[1]}: {given.points:g} stays, the table says {points:g}")
            continue
        reviews.give(mark, points, comment)
        taken += 1
    return Merged(taken, kept)


def _rows(text: str) -> list[dict[str, str]]:
    csv.field_size_limit(sys.maxsize)  # an answer may be longer than 131,072 characters
    try:
        dialect: Any = csv.Sniffer().sniff(text.splitlines()[0], ",;\t") if text.strip() else None
        rows = list(csv.DictReader(io.StringIO(text.removeprefix("\ufeff"), newline=""),
                                   delimiter=dialect.delimiter if dialect else ","))
    except csv.Error as error:
        raise CourseError(f"the table cannot be read ({error}).") from None
    missing = [name for name in ("item", "id", "points", "comment")
               if not rows or rows[0].get(name) is None]
    if missing:
        raise CourseError(f"the table has no column {missing[0]}: fill in the one that "
                          "./course grade queue --csv wrote.")
    return [{name: value or "" for name, value in row.items() if name} for row in rows]


def _number(text: str, line: int) -> float:
    try:
        return float(text.strip().replace(",", "."))
    except ValueError:
        raise CourseError(f"line {line}: points must be a number, not {text.strip()!r}.") from None
