"""A copy of the example day that a test may change and build."""

from __future__ import annotations

import shutil
import signal

import pytest

import course_lib.classroom.exercises as exercises
from course_lib.classroom.source import Day, find_days
from course_lib.paths import ROOT

EXAMPLE = ROOT / "tests" / "fixtures" / "example_day"


@pytest.fixture
def example(tmp_path, monkeypatch) -> Day:
    """The example day in a folder of its own, its exercises registered, nothing built."""
    monkeypatch.setattr(
        exercises, "__path__", [*exercises.__path__, str(EXAMPLE / "exercises")]
    )
    folder = tmp_path / "notebooks"
    shutil.copytree(EXAMPLE, folder)
    (tmp_path / "course_lib").symlink_to(ROOT / "course_lib")  # its links lead there
    return find_days([99], folder)[0]


@pytest.fixture
def hidden_half() -> None:
    """For tests that grade: hidden cases and solutions, which the students' edition lacks."""
    if not (ROOT / "tests" / "grading").is_dir():
        pytest.skip("the students' edition has no tests/grading")


@pytest.fixture
def default_signals():
    """SIGTERM and SIGHUP as in a terminal, also where the tests run under nohup."""
    before = {n: signal.signal(n, signal.SIG_DFL) for n in (signal.SIGTERM, signal.SIGHUP)}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.fixture
def edit(example):
    """Return a function that replaces text in the example's source; the text must be there."""

    def replace(old: str, new: str) -> None:
        text = example.source.read_text(encoding="utf-8")
        assert old in text, old
        example.source.write_text(text.replace(old, new, 1), encoding="utf-8")

    return replace
