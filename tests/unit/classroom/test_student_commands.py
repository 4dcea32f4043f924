"""reset, progress, submit and release: what they print, keep and refuse."""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import re
import subprocess
import zipfile
from pathlib import Path

import nbformat
import pytest

import course_lib
from course_lib.classroom.grading.submissions import find_submissions
from course_lib.classroom.handing_in import file_name, packed
from course_lib.classroom.release import (
    KEPT_BACK,
    PRODUCT,
    course_files,
    for_students,
    kept_back,
    release,
)
from course_lib.commands import progress, reset, start, submit
from course_lib.errors import CourseError
from course_lib.launcher import workspace
from course_lib.paths import NOTEBOOKS, ROOT

DAY10 = next(NOTEBOOKS.glob("day10_*.ipynb"))


def call(command, *words):
    parser = argparse.ArgumentParser()
    command.add_arguments(parser)
    return command.run(parser.parse_args(words))


@pytest.fixture
def work(tmp_path, monkeypatch):
    monkeypatch.setattr(workspace, "folder", lambda: tmp_path / "work")
    return tmp_path / "work"


def checked(work, **lines):
    """Store what check cells printed in the copy of day 10."""
    book = nbformat.read(work / DAY10.name, as_version=4)
    for cell in book.cells:
        course = cell.metadata.get("course", {})
        short = course.get("id", "")[4:]
        if course.get("role") == "check" and short in lines:
            cell.outputs = [nbformat.v4.new_output("stream", text=lines[short] + "\n")]
    nbformat.write(book, work / DAY10.name)


def test_progress_shows_what_the_checks_said(work, capsys):
    assert call(progress) == 0
    assert "no day is started" in capsys.readouterr().out
    call(start, "10")
    checked(work, a1="[ok] d10.a1 5/5 public checks", a2="[x] d10.a2 3/6: ties — expected 1, got 2",
            a3="")
    capsys.readouterr()
    call(progress)
    out = capsys.readouterr().out
    assert out.splitlines()[0] == "day 10: 1 of 6 checks pass"
    assert "  [ok] d10.a1 5/5 public checks" in out
    assert "  [x] d10.a2 3/6: ties — expected 1, got 2" in out
    assert "  [?] d10.a3 its check cell has not run" in out
    assert "  [ ] d10.b1 not attempted" in out
    call(progress, "9")
    assert capsys.readouterr().out == "day 9: not started; ./course start 9\n"


def answered(work, **sources):
    """Write answer cells (evidence cells of readings) of the copy of day 10, outputs kept."""
    book = nbformat.read(work / DAY10.name, as_version=4)
    for cell in book.cells:
        course = cell.metadata.get("course", {})
        short = course.get("id", "")[4:]
        if course.get("role") == ("answer" if short[:1] == "a" else "evidence"):
            cell.source = sources[short](cell.source) if short in sources else cell.source
    nbformat.write(book, work / DAY10.name)


CHANGED = "changed, not checked yet: run its check cell"


def test_a_changed_answer_that_was_not_checked_is_said(work, capsys):
    call(start, "10")
    checked(work, a1="[x] d10.a1 3/5: ties — expected 1, got 2", a2="")
    answered(work, a1=lambda s: s + "\n# more", a2=lambda s: "# EXERCISE d10.a2\ndef f(): return 1",
             a3=lambda s: "# a note\n" + s + "  \n\n", b1=lambda s: s.replace('""', '"x:1"', 1),
             b2=lambda s: s.replace('""', '" "', 1), b3=lambda s: s + "\n1 + ")
    capsys.readouterr()
    call(progress)
    lines = capsys.readouterr().out.splitlines()
    assert lines == [
        "day 10: 0 of 6 checks pass", "  [x] d10.a1 3/5: ties — expected 1, got 2",
        f"  [?] d10.b1 {CHANGED}", f"  [?] d10.a2 {CHANGED}", "  [ ] d10.b2 not attempted",
        "  [ ] d10.a3 not attempted", f"  [?] d10.b3 {CHANGED}"]
    call(submit, "10", "--name", "ann")
    told = capsys.readouterr().err
    assert "not checked since it was changed: d10.b1, d10.a2, d10.b3; run" in told
    checked(work, a2="[ok] d10.a2 6/6 public checks", b1="[x] d10.b1 0/6: x", b3="[x] d10.b3 0/8")
    call(submit, "10", "--name", "ann")
    assert "not checked since" not in capsys.readouterr().err


def test_progress_of_a_damaged_copy(work):
    call(start, "10")
    (work / DAY10.name).write_text("{")
    with pytest.raises(CourseError, match="not a notebook.*course reset 10"):
        call(progress)


def test_reset_keeps_every_old_copy(work, capsys, monkeypatch):
    monkeypatch.setattr("time.strftime", lambda form: "20260101-000000")
    call(reset, "10")
    assert "yours is kept" not in capsys.readouterr().out
    for text in ("first", "second"):
        (work / DAY10.name).write_text(text)
        call(reset, "10")
        assert (work / DAY10.name).read_bytes() == DAY10.read_bytes()
    kept = sorted(path.read_text() for path in (work / "backup").iterdir())
    assert kept == ["first", "second"]


def test_reset_of_an_unknown_day_touches_nothing(work):
    call(start, "10")
    (work / DAY10.name).write_text("mine")
    with pytest.raises(CourseError, match="no notebook for day 77"):
        call(reset, "10", "77")
    assert (work / DAY10.name).read_text() == "mine"


def test_submit_packs_what_the_grader_reads(work, capsys):
    call(start, "10")
    assert call(submit, "10", "--name", "王 小明") == 0
    out, err = capsys.readouterr()
    target = work / "王-小明_day10.zip"
    assert str(target) in out and "0 of 6 checks pass" in out and "[ ] d10.a1" in err
    (found,) = find_submissions(work).submissions[-1:]
    assert (found.student, found.day, found.content) == ("王-小明", 10, DAY10.read_bytes())
    with zipfile.ZipFile(target) as file:
        manifest = json.loads(file.read("manifest.json"))
    digest = hashlib.sha256(DAY10.read_bytes()).hexdigest()
    assert manifest == {"course": course_lib.__version__, "day": 10, "student": "王 小明",
                        "files": {DAY10.name: digest}}
    before = target.read_bytes()
    call(submit, "10", "--name", "王 小明")
    assert target.read_bytes() == before == packed(10, "王 小明", [work / DAY10.name])


@pytest.mark.parametrize("name", ["", "///", "..", " ", "a" * 200])
def test_names_that_are_no_file_name(name):
    with pytest.raises(CourseError, match="gives no file name"):
        file_name(name, 10)


def test_names_of_any_script_and_encoding(work):
    assert file_name("कि", 10) != file_name("का", 10)
    call(start, "10")
    assert call(submit, "10", "--name", "Ann\udcff") == 0
    with zipfile.ZipFile(work / "Ann_day10.zip") as file:
        assert json.loads(file.read("manifest.json"))["student"] == "Ann?"


@pytest.mark.parametrize("outputs", [[{"text": None}], [{"text": 7}], [{"text": ["a"]}]])
def test_progress_of_odd_outputs(work, outputs):
    call(start, "10")
    book = json.loads((work / DAY10.name).read_text())
    for cell in book["cells"]:
        if cell["cell_type"] == "code":
            cell["outputs"] = outputs
    (work / DAY10.name).write_text(json.dumps(book))
    assert call(progress, "10") == 0


def test_submit_refuses_what_is_not_there_or_no_notebook(work):
    with pytest.raises(CourseError, match="course start 10"):
        call(submit, "10", "--name", "x")
    call(start, "10")
    (work / DAY10.name).write_text("{")
    with pytest.raises(CourseError, match="save it again in JupyterLab"):
        call(submit, "10", "--name", "x")
    assert not list(work.glob("*.zip"))


@pytest.fixture
def small(tmp_path):
    """A course of a few files, known to git."""
    root = tmp_path / "course"
    for name in ("README.md", "tests/solutions/day01.py", "tests/grading/day01.py",
                 "tests/unit/test_a.py", "course_lib/a.py", "docs/instructors.md"):
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(name)
    (root / "course").write_text("#!x")
    (root / "course").chmod(0o755)
    return root


@pytest.mark.parametrize("with_git", [True, False])
def test_release_leaves_the_hidden_half_behind(small, tmp_path, with_git):
    if with_git:
        for words in (["init", "-q"], ["add", "."]):
            subprocess.run(["git", *words], cwd=small, check=True)
        (small / "scratch.txt").write_text("not known to git")
    else:
        for name in ("work/day.ipynb", "submissions/ann_day10.ipynb", "graded/grades.csv", "x.csv"):
            (small / name).parent.mkdir(exist_ok=True)
            (small / name).write_text("a student's")
    target = tmp_path / "out" / "students"
    count = release(target, small)
    files = sorted(path.relative_to(target).as_posix() for path in target.rglob("*")
                   if path.is_file())
    assert files == ["README.md", "course", "course_lib/a.py", "tests/unit/test_a.py"]
    assert count == 4 and (target / "course").stat().st_mode & 0o100
    with pytest.raises(CourseError, match="is not empty"):
        release(target, small)
    with pytest.raises(CourseError, match="inside the course"):
        release(small / "x", small)
    (tmp_path / "link").symlink_to(small)
    with pytest.raises(CourseError, match="inside the course"):
        release(tmp_path / "link" / "x", small)


def test_everything_at_the_top_of_the_course_is_released():
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True)
    assert {name.split("/")[0] for name in listed.stdout.splitlines()} <= PRODUCT


@pytest.mark.usefixtures("hidden_half")
def test_the_courses_own_release_holds_no_hidden_case():
    kept = {path.as_posix() for path in course_files()
            if path.as_posix().startswith(tuple(KEPT_BACK))}
    assert {"tests/solutions/day10.py", "tests/grading/day10.py"} <= kept


def test_no_link_of_the_students_edition_leads_to_what_is_kept_back():
    pages = {path: (ROOT / path).read_text(encoding="utf-8") for path in course_files()
             if path.suffix == ".md" and not kept_back(path)}
    readme = for_students(pages[Path("README.md")])
    assert "a **student**" in readme and "./course needle" in readme
    for path, text in {**pages, Path("README.md"): readme}.items():
        links = [Path(os.path.normpath(path.parent / link))
                 for link in re.findall(r"\]\(([^)#:]+)", text)]
        assert [link for link in links if kept_back(link)] == [], path


def test_only_rows_that_lead_to_what_is_kept_back_are_dropped(small, tmp_path):
    rows = "| a | b |\n|---|---|\n| x | [y](docs/a.md) |\n"
    (small / "README.md").write_text(
        f"{rows}| an **instructor** | [z](docs/instructors.md) |\n\nSee docs/instructors.md.\n")
    release(tmp_path / "students", small)
    assert (tmp_path / "students" / "README.md").read_text() == (
        f"{rows}\nSee docs/instructors.md.\n")


def test_what_the_environment_leaves_is_not_released_without_git(small):
    for name in (".venv.lock", ".venv.log", ".venv/pyvenv.cfg", "tests/.venv.lock/x"):
        (small / name).parent.mkdir(exist_ok=True)
        (small / name).write_text("")
    assert not [path for path in course_files(small) if ".venv" in path.as_posix()]
