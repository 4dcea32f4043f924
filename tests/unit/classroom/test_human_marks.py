"""What a human's mark does to the tables, the queue and the feedback: one rule for all of them."""

from __future__ import annotations

import csv
import io
from dataclasses import replace

import pytest

from course_lib.classroom.grading import feedback, tables
from course_lib.classroom.grading.human import HumanMark, digest, status_of
from course_lib.classroom.grading.review import Reviews
from course_lib.classroom.grading.submission_marks import ItemMark
from course_lib.paths import ROOT

PAGE = ROOT / "docs" / "instructors.md"

TEXT = ItemMark("ann", 10, "d10.b2", "B", "to_review", 1, 4, (), (), "sha", "Answer: Because.")
NONE = replace(TEXT, item="d10.b3", status="partial", text="")
CODE = replace(TEXT, item="d10.a1", kind="A", status="error:KeyError", auto=0, max=5, text="")
OTHER = replace(CODE, student="bob", day=9, item="d09.a1", status="ok", auto=5)
MARKS = [TEXT, NONE, CODE, OTHER]
READ = {("ann", "d10.b2"): HumanMark(1.5, "", digest(TEXT.text))}
STALE = {("ann", "d10.b2"): HumanMark(1.5, "", digest("Answer: Since."))}


def rows(text):
    return list(csv.DictReader(io.StringIO(text.removeprefix("\ufeff"), newline="")))


@pytest.mark.parametrize("human, status, waiting, points", [
    ({}, "to_review", 1, "2"), (READ, "marked", 0, "3.5"), (STALE, "to_review", 1, "3.5")])
def test_tables_and_queue_wait_for_the_same_texts(human, status, waiting, points, tmp_path):
    reviews = Reviews(tmp_path)
    reviews.human = human
    assert len(reviews.queue(MARKS)) == waiting
    found = {(r["student"], r["item"]): r["status"] for r in rows(tables.grades_csv(MARKS, human))}
    assert found == {("ann", "d10.b2"): status, ("ann", "d10.b3"): "partial",
                     ("ann", "d10.a1"): "error:KeyError", ("bob", "d09.a1"): "ok"}
    ann, _ = rows(tables.totals_csv(MARKS, human))
    assert (ann["to_review"], ann["day10"], ann["points"]) == (str(waiting), points, points)


def test_points_for_an_answer_that_is_gone_do_not_make_it_marked():
    assert status_of(replace(TEXT, status="not_attempted", text=""), READ) == "not_attempted"


def test_a_day_that_was_not_handed_in_is_empty():
    ann, bob = rows(tables.totals_csv(MARKS, {}))
    assert (ann["day09"], ann["day10"], ann["max"]) == ("", "2", "13")
    assert (bob["day09"], bob["day10"], bob["max"]) == ("5", "", "5")


@pytest.mark.parametrize("human, told, points", [
    ({}, "A human reads the text: up to 2 more points.", "1 of 4"),
    (READ, "Read: 1.5 of 2 points for the text.", "2.5 of 4"),
    (STALE, "A human reads the text again: up to 2 points in place of 1.5.", "2.5 of 4")])
def test_feedback_says_who_reads_and_for_how_many_points(human, told, points):
    for text in (feedback.markdown([TEXT], human), feedback.page([TEXT], human)):
        assert told in text and f"d10.b2: {points} points" in text


def test_the_name_of_an_exception_keeps_its_case():
    for text in (feedback.markdown([CODE], {}), feedback.page([CODE], {})):
        assert "It raised KeyError." in text


@pytest.mark.skipif(not PAGE.is_file(), reason="the students' edition lacks docs/instructors.md")
def test_every_status_and_remark_is_documented():
    text = PAGE.read_text(encoding="utf-8")
    for name in (*feedback.WORDS, "to_review", "marked"):
        assert f"`{name}`" in text, name
    for name in feedback.FLAGS:
        assert f"`[{name}]`" in text, name
