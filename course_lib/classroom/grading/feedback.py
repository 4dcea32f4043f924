"""What a student gets to read: points, and for what was missed the author's words. Nothing of a
hidden case is in it."""

from __future__ import annotations

import html
from collections.abc import Mapping, Sequence

from course_lib.classroom.grading.human import (
    HumanMark,
    Key,
    is_stale,
    most_of,
    points_of,
    status_of,
)
from course_lib.classroom.grading.submission_marks import ItemMark
from course_lib.classroom.grading.tables import number

WORDS = {
    "ok": "all right",
    "partial": "partly right",
    "failed": "not right yet",
    "not_attempted": "not attempted",
    "missing_cell": "the answer cell is missing",
    "timeout": "it did not end within its time",
    "crash": "it ended the process",
    "uses_reference": "it calls the function that it was to replace",
    "unreadable": "it could not be read",
    "not_graded": "it could not be graded; ask your instructor to look at it",
}
FLAGS = {
    "duplicate_cell": "The answer cell is there more than once; the last one that is filled in "
                      "counts.",
    "changed_given_code": "Given cells were changed; the course's own were used.",
    "several_files": "More than one notebook of this day was handed in; the last by name counts.",
    "resubmitted": "The answer changed after it was marked.",
    "unsandboxed": "",
    "same_file": "",
}


def words(mark: ItemMark, human: Mapping[Key, HumanMark]) -> str:
    """A status as a sentence."""
    name, _, error = status_of(mark, human).partition(":")
    given = human.get((mark.student, mark.item))
    if name == "marked" and given is not None:
        return f"Read: {number(given.points)} of {most_of(mark)} points for the text."
    if name == "to_review" and given is not None and is_stale(mark, human):
        return (f"A human reads the text again: up to {most_of(mark)} points in place of "
                f"{number(given.points)}.")
    if name == "to_review":
        return f"A human reads the text: up to {most_of(mark)} more points."
    told = WORDS.get(name, f"it raised {error}" if error else name)
    return f"{told[:1].upper()}{told[1:]}."  # the name of an exception keeps its case


def lines_of(mark: ItemMark, human: Mapping[Key, HumanMark]) -> list[str]:
    """What is said about one item, a sentence each."""
    given = human.get((mark.student, mark.item))
    told = [FLAGS[flag] for flag in mark.flags if FLAGS.get(flag)]
    told += [f"Comment: {given.comment}"] if given and given.comment else []
    return [*mark.messages, *told]


def markdown(marks: Sequence[ItemMark], human: Mapping[Key, HumanMark]) -> str:
    """Feedback on one day of one student as markdown."""
    out = [f"# Day {marks[0].day}: {plain_markdown(marks[0].student)}", ""]
    for mark in marks:
        out += [f"## {mark.item}: {number(points_of(mark, human))} of {mark.max} points", "",
                plain_markdown(words(mark, human)), ""]
        out += [f"* {plain_markdown(line)}" for line in lines_of(mark, human)]
        out += [""]
    return "\n".join(out).rstrip() + "\n"


def page(marks: Sequence[ItemMark], human: Mapping[Key, HumanMark]) -> str:
    """The same as an HTML page without scripts."""
    student = html.escape(marks[0].student)
    out = ["<!doctype html>", '<html lang="en"><head><meta charset="utf-8">',
           f"<title>Day {marks[0].day}: {student}</title>",
           "<style>body{font:16px/1.5 sans-serif;max-width:45rem;margin:2rem auto;padding:0 1rem}"
           "h2{font-size:1.1rem;margin-top:2rem}</style></head><body>",
           f"<h1>Day {marks[0].day}: {student}</h1>"]
    for mark in marks:
        out += [f"<h2>{mark.item}: {number(points_of(mark, human))} of {mark.max} points</h2>",
                f"<p>{html.escape(words(mark, human))}</p>"]
        lines = lines_of(mark, human)
        if lines:
            out += ["<ul>", *(f"<li>{html.escape(line)}</li>" for line in lines), "</ul>"]
    return "\n".join([*out, "</body></html>"]) + "\n"


def plain_markdown(text: str) -> str:
    """Text that markdown shows as it is, on one line."""
    return "".join("\\" + c if c in "\\`*_{}[]<>#|" else c for c in " ".join(text.split()))
