"""Source-reading answers: right where the lines are, whatever moved; wrong without a hint."""

from __future__ import annotations

import json

import pytest

from course_lib.classroom import sealed
from course_lib.classroom.checking import report
from course_lib.classroom.evidence import lint_answer, read_answer
from course_lib.classroom.sealed import Lines
from course_lib.errors import CourseError

SOURCE = """\
def first(x):
    y = x + 1
    z = y * 2
    return z


class Box:
    def first(self):
        y = 3
        return y


# the end
"""
TARGET = Lines("code.py", first="y * 2", last="return z")


@pytest.fixture
def root(tmp_path):
    (tmp_path / "code.py").write_text(SOURCE, encoding="utf-8")
    (tmp_path / "other.py").write_text(SOURCE, encoding="utf-8")
    return tmp_path


def complaint(root, value, truth, slack=1):
    made = sealed.seal("d42.b1", "part", truth, root)
    json.dumps(made)
    return sealed.complaint("d42.b1", "part", value, made, slack, root)


def test_find(root):
    assert TARGET.find(root) == (3, 4)
    assert Lines("code.py", "y = 3").find(root) == (9, 9)
    assert Lines("code.py", "def first", symbol="Box.first").find(root) == (8, 8)
    assert Lines("code.py", "def first", symbol="first").find(root) == (1, 1)


@pytest.mark.parametrize("target, text", [
    (Lines("code.py", "def first"), "is in 2 lines"),
    (Lines("code.py", "nothing"), "is in 0 lines"),
    (Lines("code.py", "y = 3", symbol="first"), "is in 0 lines"),
    (Lines("code.py", "y = 3", symbol="Bag"), "has no Bag"),
    (Lines("code.py", "y = 3", last="y * 2"), "is in 0 lines"),
])
def test_a_target_that_is_not_there_once_is_refused(root, target, text):
    with pytest.raises(CourseError, match=text):
        target.find(root)


@pytest.mark.parametrize("place, right", [
    ("code.py:3-4", True), ("code.py:2-5", True), (" code.py:3 – 4 ", True),
    ("../code.py:3-4", True), ("./code.py:3-4", True), ("../../code.py:2-5", True),
    ("../code.py:3-3", False), ("../other.py:3-4", False),
    ("code.py:3-3", False), ("code.py:4", False), ("code.py:1-4", False), ("code.py:3-6", False),
    ("code.py:1-13", False), ("code.py:9-10", False), ("other.py:3-4", False),
])
def test_a_range_must_hold_the_lines_and_little_more(root, place, right):
    assert (complaint(root, place, TARGET) is None) == right


@pytest.mark.parametrize("place, text", [
    ("code.py", 'write it as "path:first-last"'), (3, 'write it as "path:first-last"'),
    ("code.py:4-3", "has lines 1 to 13"), ("code.py:0-3", "has lines 1 to 13"),
    ("code.py:3-99", "has lines 1 to 13"), ("none.py:1-2", "there is no file none.py"),
    ("sub/../code.py:1-2", "there is no file"), ("../../etc/passwd:1", "there is no file"),
    ("/code.py:1-2", "there is no file"), ("\x1b[2J\ud800:1-2", "there is no file ?[2J? in"),
    ("x" * 10**5 + ":1-2", "there is no file " + "x" * 80 + " in"),
    ("", "still empty"), (None, "still empty"), (["code.py:1-2", "code.py:3-4"], "give one place"),
])
def test_a_malformed_place_is_told(root, place, text):
    assert text in complaint(root, place, TARGET)


def test_large_files_and_wide_lines_are_not_shown_whole(root):
    (root / "wide.py").write_text("x" * 1000, encoding="utf-8")
    assert len(sealed.place_lines("wide.py:1", 2, root)) < 400
    (root / "large.py").write_text("x\n" * 2**20, encoding="utf-8")
    assert sealed.place_problem("large.py:1", root) == "large.py is too large to be a source file"


def test_a_file_name_without_its_folder_gets_the_full_path(root):
    for name in ("lib/deep/only.py", "lib/twice.py", "lib/deep/twice.py", ".venv/own.py",
                 "work/own.py", "tests/own.py"):
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text("x\n", encoding="utf-8")

    def told(place):
        return sealed.place_problem(place, root)

    full = "did you mean lib/deep/only.py?"
    assert told("only.py:1") == f"there is no file only.py in the course; {full}"
    assert told("../deep/only.py:1") == f"there is no file deep/only.py in the course; {full}"
    assert told("twice.py:1") == "there is no file twice.py in the course"
    assert told("own.py:1") == "there is no file own.py in the course"


def test_a_wrong_place_tells_nothing(root):
    assert complaint(root, "code.py:8-9", TARGET) == "not these lines"


def test_the_answer_moves_with_the_code(root):
    made = sealed.seal("d42.b1", "part", TARGET, root)
    (root / "code.py").write_text('"""New."""\n\n\n' + SOURCE, encoding="utf-8")
    assert sealed.complaint("d42.b1", "part", "code.py:6-7", made, 1, root) is None
    assert sealed.complaint("d42.b1", "part", "code.py:3-4", made, 1, root) is not None
    (root / "code.py").write_text(SOURCE.replace("y * 2", "2 * y"), encoding="utf-8")
    assert sealed.complaint("d42.b1", "part", "code.py:3-4", made, 1, root) is not None


def test_any_of_several_places(root):
    either = [TARGET, Lines("code.py", "y = 3")]
    assert complaint(root, "code.py:9", either) is None
    assert complaint(root, "code.py:3-4", either) is None
    assert complaint(root, "code.py:1", either) == "not these lines"


def test_all_of_several_places_in_any_order(root):
    both = (TARGET, Lines("code.py", "y = 3"))
    assert complaint(root, ["code.py:9", "code.py:3-4"], both) is None
    assert complaint(root, ["code.py:3-4", "code.py:3-4"], both) == "1 of 2 places found"
    assert complaint(root, ["code.py:3-4"], both) == "give a list of 2 places"
    assert "list of 2" in complaint(root, "code.py:3-4", both)


@pytest.mark.parametrize("truth, right, wrong", [
    (16, [16, 16.0], [15, "16a", True, 10**400]), (True, [True], [False, 1, "yes"]),
    ("Prefill", ["prefill", " prefill "], ["decode", 1]), (0.994, [0.994, 0.9941], [0.995, 1]),
])
def test_values(root, truth, right, wrong):
    assert [complaint(root, value, truth) for value in right] == [None] * len(right)
    assert [complaint(root, value, truth) for value in wrong] == ["not this value"] * len(wrong)


def test_a_line_that_looks_like_another_cannot_be_sealed(root):
    (root / "twins.py").write_text("a\nb\nc = 1\n" * 2 + "a\nb\nc = 2\n", encoding="utf-8")
    same = Lines("twins.py", "c = 2")
    sealed.seal("d42.b1", "part", same, root)
    (root / "twins.py").write_text("def f():\n    a\n    b\n    c\n\n\ndef g():\n    a\n    b\n"
                                   "    c\n", encoding="utf-8")
    with pytest.raises(CourseError, match="looks the same"):
        sealed.seal("d42.b1", "part", Lines("twins.py", "b", symbol="f"), root)


def test_the_seal_depends_on_item_and_part():
    made = {json.dumps(sealed.seal(i, p, 1)) for i in ("d42.b1", "d42.b2") for p in ("x", "y")}
    assert len(made) == 4


def test_report_of_a_reading(example):
    path = "course_lib/engine/sampling.py"
    line, _ = Lines(path, "argmax(logits)", symbol="greedy").find()
    blank = {"ties": "", "winner": None}
    assert report("d99.b1", blank)[0] == "[ ] d99.b1 not attempted"
    assert report("d99.b1", {})[0] == "[ ] d99.b1 not attempted"
    right = {"ties": f"{path}:{line - 1}-{line}", "winner": 1}
    assert report("d99.b1", right) == ("[ok] d99.b1 2/2 public checks", True)
    half = report("d99.b1", {**right, "winner": 0})
    assert half == ("[x] d99.b1 1/2: winner — not this value", False)
    part = report("d99.b1", {**right, "ties": ""})
    assert part == ("[x] d99.b1 1/2: ties — still empty", False)
    wrong = "[x] d99.b1 0/2: winner — not this value", False
    assert report("d99.b1", {"ties": "", "winner": 0}) == wrong
    assert report("d99.b1", {"winner": 0}) == wrong
    one = report("d99.b1", {"winner": 1})
    assert one == ("[x] d99.b1 1/2: missing parts: ties", False)
    named = report("d99.b1", {"tie": "", 3: 1, "winner": 1})
    assert named == ("[x] d99.b1 1/2: unknown parts: tie, (int); missing parts: ties", False)
    other = report("d99.b1", {"x": 1})
    assert other == ("[x] d99.b1 0/2: unknown parts: x; missing parts: ties, winner", False)
    assert report("d99.b1", {**right, "note": "mine"})[1]
    assert report("d99.b1", 5)[0] == "[x] d99.b1 0/2: give the dict of parts"


def test_reading_without_a_sealed_file(example, monkeypatch, tmp_path):
    monkeypatch.setattr(sealed, "sealed_path", lambda day: tmp_path / "none.json")
    with pytest.raises(CourseError, match="seal_readings"):
        report("d99.b1", {"ties": "x", "winner": 1})


ANSWER = "<!-- ANSWER d42.b1 -->\nAnswer: it is\nthere\n\nEvidence: `code.py:3-4`, code.py:9\n"


def test_an_answer_is_taken_apart(root):
    answer = read_answer(ANSWER)
    assert (answer.item_id, answer.text) == ("d42.b1", "it is\nthere")
    assert answer.places == ("code.py:3-4", "code.py:9")
    assert lint_answer(ANSWER, root) == []


@pytest.mark.parametrize("old, new, text", [
    ("<!-- ANSWER d42.b1 -->", "", "is gone"),
    ("it is\nthere", "…", "Write your answer"),
    ("it is\nthere", "", "Write your answer"),
    ("Evidence: `code.py:3-4`, code.py:9", "", "Cite the lines"),
    ("`code.py:3-4`, code.py:9", "path:first-last", "Cite the lines"),
    ("code.py:9", "none.py:9", "there is no file none.py"),
    ("code.py:9", "code.py:99", "has lines 1 to 13"),
])
def test_what_is_to_mend_in_an_answer(root, old, new, text):
    found = lint_answer(ANSWER.replace(old, new), root)
    assert len(found) == 1 and text in found[0]
