"""What a human sees beside an answer: the places that it cites, in words or in the evidence dict,
and the rubric in lines that flow."""

from __future__ import annotations

import csv
import io
import json

from course_lib.classroom import sealed
from course_lib.classroom.exercises import Reading
from course_lib.classroom.grading import batch
from course_lib.classroom.grading.handed_in import HandedIn
from course_lib.classroom.grading.marking import mark_reading
from course_lib.classroom.grading.review import (
    Reviews,
    cited,
    queue_csv,
    reflowed,
    rubric_of,
    source_of,
)
from course_lib.classroom.grading.submission_marks import ItemMark

ANSWER = "<!-- ANSWER d10.b2 -->\nAnswer: Because.\n\nEvidence: {}"


def mark(evidence, *parts):
    return ItemMark("ann", 10, "d10.b2", "B", "to_review", 1, 4, (), (), "sha",
                    ANSWER.format(evidence), tuple(parts))


def test_the_parts_of_the_dict_are_places_too(monkeypatch):
    item = Reading("d99.b1", ("one", "many", "count", "word", "far"), auto=2)
    truth = {part: sealed.seal(item.id, part, 1) for part in item.parts}
    monkeypatch.setattr(sealed, "load", {item.id: truth}.__getitem__)
    found = {"many": ["a.py:1", "b.py:2-3", 4], "one": " ../c.py:5-6", "count": 7, "word": "yes",
             "far": None, "no part": "d.py:1-2"}
    cell = HandedIn(ANSWER.format("path:first-last"), evidence=f"d = {found}")
    marked = mark_reading(item, cell, "", 4)
    assert marked.evidence == (("one", " ../c.py:5-6"), ("many", "a.py:1"), ("many", "b.py:2-3"))
    empty = HandedIn(ANSWER.format("…").replace("Because.", "…"), evidence=f"d = {found}")
    assert mark_reading(item, empty, "", 4).evidence == ()


def test_the_queue_shows_them_with_their_lines(tmp_path):
    marks = [mark("course_lib/paths.py:1", ("probe", "course_lib/paths.py:3-3"))]
    (waiting,) = Reviews(tmp_path).queue(marks)
    (row,) = csv.DictReader(io.StringIO(queue_csv([waiting])[1:], newline=""))
    assert row["evidence"] == "course_lib/paths.py:1; probe: course_lib/paths.py:3-3"
    own, _, dicts = row["source"].partition("\n\nprobe: course_lib/paths.py:3-3\n")
    assert "    1> " in own and "    3> " not in own and "    3> " in dicts


def test_words_and_the_placeholder_are_no_places():
    assert cited(mark("path:first-last")) == ()
    shown = source_of(cited(mark("see the dict above")))
    assert shown == "in words: see the dict above"
    assert "no file nowhere.py" in source_of(cited(mark("nowhere.py:3")))


def test_marks_with_and_without_evidence_come_back(tmp_path):
    path = tmp_path / "x.json"
    marks = [mark("a.py:1", ("probe", "b.py:2")), mark("a.py:1")]
    path.write_text(json.dumps([m.as_json() for m in marks]))
    assert batch.read_kept(path) == marks
    older = [{k: v for k, v in m.as_json().items() if k != "evidence"} for m in marks[1:]]
    path.write_text(json.dumps(older))
    assert batch.read_kept(path) == marks[1:]


def test_a_rubric_flows():
    text = "One line\n  goes on\n16 blocks.\n\nRubric:\n* 1 point: a\n  and b;\n- 2 points\n1. c\n"
    assert reflowed(text) == ("One line goes on 16 blocks.\n\nRubric:\n* 1 point: a and b;\n"
                              "- 2 points\n1. c")
    solutions = 'ANSWERS = {"d1.b1": """one\ntwo"""}'
    assert rubric_of("d1.b1", solutions) == "one two"
