"""`./course grade run`: what it refuses, prints and remarks on; no code of an answer runs here."""

from __future__ import annotations

import csv
import functools
import io
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import nbformat
import pytest

from course_lib.classroom.grading import batch
from course_lib.classroom.grading.review import Reviews
from course_lib.classroom.grading.submission_marks import ItemMark
from course_lib.commands import grade
from course_lib.commands.parser import Parser
from course_lib.errors import CourseError
from course_lib.paths import NOTEBOOKS

DAY10 = next(NOTEBOOKS.glob("day10_*.ipynb"))
TEXT = "<!-- ANSWER d10.b2 -->\nAnswer: Because.\n\nEvidence: path:first-last"


def parser():
    made = Parser(prog="./course grade")
    grade.add_arguments(made)
    return made


def call(*words):
    return grade.run(parser().parse_args([str(word) for word in words]))


@pytest.fixture
def folder(tmp_path):
    """Two who handed in the same answer, two with the notebook as it was handed out."""
    book = nbformat.read(DAY10, as_version=4)
    next(cell for cell in book.cells if cell.source.startswith(TEXT[:20])).source = TEXT
    for name in ("ann", "bob"):
        nbformat.write(book, tmp_path / f"{name}_day10.ipynb")
    for name in ("cy", "dan"):
        (tmp_path / f"{name}_day10.ipynb").write_bytes(DAY10.read_bytes())
    return tmp_path


def rows(out):
    text = (out / "grades.csv").read_text(encoding="utf-8-sig")
    return list(csv.DictReader(io.StringIO(text, newline="")))


@pytest.mark.usefixtures("hidden_half")
def test_a_human_s_points_and_the_same_file_are_seen(folder, tmp_path_factory, monkeypatch, capsys):
    out = tmp_path_factory.mktemp("graded")
    with ThreadPoolExecutor(1) as one:
        monkeypatch.setattr(batch, "grade", functools.partial(batch.grade, executor=one))
        words = ("run", folder, "-o", out, "--allow-unsandboxed")
        assert call(*words) == 0
        printed = capsys.readouterr().out
        assert "ann  day 10  0/29\n" in printed and "     2  to_review\n" in printed
        flagged = {row["student"] for row in rows(out) if "[same_file]" in row["message"]}
        assert flagged == {"ann", "bob"}
        assert "same" not in (out / "feedback" / "ann" / "day10.md").read_text().lower()
        reviews = Reviews(out)
        (mark,) = [m for m in batch.kept_marks(out) if (m.student, m.item) == ("ann", "d10.b2")]
        reviews.give(mark, 1.5, "good")
        assert call(*words) == 0
    printed = capsys.readouterr().out
    assert "ann  day 10  1.5/29\n" in printed and "bob  day 10  0/29\n" in printed
    assert "     1  marked\n" in printed and "     1  to_review\n" in printed


def test_only_attempted_files_of_several_students_are_the_same():
    one = ItemMark("ann", 10, "d10.a1", "A", "ok", 5, 5, (), (), "x")
    bob = replace(one, student="bob")
    assert batch.same_files([one, bob]) == {(10, "x")}
    for other in (one, replace(bob, sha256="y"), replace(bob, day=9)):
        assert batch.same_files([one, other]) == set()
    for status in ("not_attempted", "unreadable"):
        assert batch.same_files([replace(m, status=status) for m in (one, bob)]) == set()


@pytest.mark.parametrize("inside", ["", "graded", "a/b"])
def test_an_output_inside_the_submissions_is_refused(folder, inside, tmp_path_factory):
    before = sorted(folder.iterdir())
    with pytest.raises(CourseError, match="lies in the folder of submissions.*outside it"):
        call("run", folder, "-o", folder / inside)
    link = tmp_path_factory.mktemp("other") / "link"
    link.symlink_to(folder)
    with pytest.raises(CourseError, match="lies in the folder of submissions"):
        call("run", folder, "-o", link / inside)
    assert sorted(folder.iterdir()) == before


def test_the_usage_names_every_verb():
    assert "{run,queue,merge} ..." in parser().format_usage()
