"""The commands build, day and start: what they print, write and refuse."""

from __future__ import annotations

import argparse
import os
import re
import signal

import nbformat
import pytest

from course_lib.classroom import source
from course_lib.classroom.execute import CellFailed, Run, clean_exit
from course_lib.classroom.normalise import WIDGET_VIEW, dumps, normalise
from course_lib.classroom.source import find_days, parse
from course_lib.commands import build, day, start
from course_lib.errors import CourseError
from course_lib.launcher import workspace


def call(command, *words):
    parser = argparse.ArgumentParser()
    command.add_arguments(parser)
    return command.run(parser.parse_args(words))


@pytest.fixture
def course(example, monkeypatch, tmp_path):
    """A course whose notebooks are the example day only, stored as a build writes it."""
    folder = example.notebook.parent
    example.notebook.write_text(dumps(normalise(parse(example))), encoding="utf-8")

    def days(numbers=None):
        return find_days(numbers, folder)

    def find(number):
        return find_in(number, folder)

    find_in = workspace.find_notebook
    monkeypatch.setattr(source, "find_days", days)
    monkeypatch.setattr(workspace, "find_notebook", find)
    monkeypatch.setattr("course_lib.classroom.lint.stray_notebooks", lambda: [])
    monkeypatch.setattr(workspace, "folder", lambda: tmp_path / "work")
    monkeypatch.chdir(tmp_path)
    return example


@pytest.fixture
def no_kernel(monkeypatch):
    """Stand in for execution: every cell prints its number and shows a widget view."""

    def execute(notebook, on_cell=lambda index: None):
        for index, cell in enumerate(notebook.cells):
            if cell.cell_type == "code":
                made = nbformat.v4.new_output("display_data")
                made.data.update({"text/plain": f"text {index}", WIDGET_VIEW: {}})
                cell.outputs = [nbformat.v4.new_output("stream", text=f"out {index}\n"), made]
            on_cell(index)
        return Run(25.0, 2.0, 3, None)

    monkeypatch.setattr("course_lib.classroom.execute.execute", execute)
    monkeypatch.setattr("course_lib.classroom.build.execute", execute)


def test_build_tells_what_it_did(course, no_kernel, capsys):
    assert call(build, "99") == 0
    out, err = capsys.readouterr()
    assert "day 99: built, 25.0 s (code cell 3: 2.0 s)" in out and err == ""
    assert "too heavy for a lesson: it took 25 s (limit 20 s)" in out
    assert call(build) == 0
    assert "day 99: unchanged" in capsys.readouterr().out
    with pytest.raises(CourseError, match="no day 3"):
        call(build, "3")


def test_build_check_counts_differences(course, capsys):
    assert call(build, "--check") == 0
    assert capsys.readouterr().out == "1 notebooks compared with their sources, 0 differences\n"
    text = course.source.read_text(encoding="utf-8")
    course.source.write_text(text + "\n# %%\nx = 1\n", encoding="utf-8")
    assert call(build, "--check") == 1
    out = capsys.readouterr().out
    assert "run ./course build 99" in out and "1 differences" in out


def test_an_interrupted_build_says_what_it_kept(course, monkeypatch, capsys):
    def interrupted(*args, **kwargs):
        raise KeyboardInterrupt

    before = course.notebook.read_bytes()
    monkeypatch.setattr("course_lib.classroom.build.execute", interrupted)
    assert call(build) == 130
    assert capsys.readouterr().err.startswith("course: interrupted; nothing was built, ")
    assert course.notebook.read_bytes() == before


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_terminated_build_cleans_up_and_says_what_it_kept(
        course, default_signals, monkeypatch, capsys, tmp_path, number):
    own = tmp_path / "temporary"
    own.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(own))
    seen = []

    def terminated(*args):
        seen.extend(own.glob("course-*"))
        os.kill(os.getpid(), number)

    before = course.notebook.read_bytes()
    monkeypatch.setattr("course_lib.classroom.execute._execute", terminated)
    assert call(build) == 128 + number
    assert capsys.readouterr().err.startswith("course: interrupted; nothing was built, ")
    assert len(seen) == 1 and list(own.iterdir()) == []
    assert course.notebook.read_bytes() == before and signal.getsignal(number) is signal.SIG_DFL


@pytest.mark.parametrize("handler", [signal.SIG_IGN, lambda number, frame: None])
def test_a_signal_that_somebody_handles_is_left_alone(handler):
    before = signal.signal(signal.SIGHUP, handler)
    try:
        with clean_exit():
            assert signal.getsignal(signal.SIGHUP) is handler
            os.kill(os.getpid(), signal.SIGHUP)
        assert signal.getsignal(signal.SIGHUP) is handler
    finally:
        signal.signal(signal.SIGHUP, before)


def test_day_prints_headings_and_outputs(course, no_kernel, capsys):
    assert call(day, "99") == 0
    out, err = capsys.readouterr()
    assert out.startswith("# Day 99/30 · 例子 An example day\nout 1\n")
    assert "\n## 99-1 Six numbers\nout 3\n" in out
    assert "ran from top to bottom: 25.0 s" in err
    with pytest.raises(CourseError, match="no notebook for day 3; days there are: 99"):
        call(day, "3")


def test_day_writes_a_page_that_loads_nothing(course, no_kernel, capsys, tmp_path):
    assert call(day, "99", "--html") == 0
    page = tmp_path / "day99_example.html"
    text = page.read_text(encoding="utf-8")
    assert "out 3" in text and "Six numbers" in text and "widget-view" not in text
    assert not re.search(r"<(?:script|link|img|iframe)[^>]*(?:src|href)=[\"']?(?:https?:)?//", text)
    with pytest.raises(CourseError, match="exists; give another name, or --force"):
        call(day, "99", "--html")
    assert call(day, "99", "--html", "--force") == 0
    with pytest.raises(CourseError, match="in a folder that exists"):
        call(day, "99", "--html", "none/x.html")
    assert not (tmp_path / "none").exists()
    capsys.readouterr()


def test_a_day_that_fails_is_exit_code_1(course, monkeypatch, capsys):
    def failing(notebook, on_cell):
        raise CellFailed(3, "ValueError: no")

    monkeypatch.setattr("course_lib.classroom.execute.execute", failing)
    assert call(day, "99", "--html") == 1
    assert capsys.readouterr().err == "day 99, code cell 2 failed: ValueError: no\n"


def test_a_broken_notebook_is_told(course):
    course.notebook.write_text("no json")
    with pytest.raises(CourseError, match="is not a notebook"):
        call(day, "99")


def test_start_never_overwrites(course, capsys, tmp_path):
    assert call(start, "99") == 0
    copy = tmp_path / "work" / "day99_example.ipynb"
    assert copy.read_bytes() == course.notebook.read_bytes()
    assert f"day 99: copied to {copy}" in capsys.readouterr().out
    copy.write_text("mine")
    assert call(start, "99") == 0
    assert "left alone" in capsys.readouterr().out and copy.read_text() == "mine"
    with pytest.raises(CourseError, match="no notebook for day 3"):
        call(start, "99", "3")
