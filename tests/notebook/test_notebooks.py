"""The notebooks as they are committed: built from their sources, and clean by the lint."""

from __future__ import annotations

import pytest

from course_lib.classroom.build import drift
from course_lib.classroom.lint import lint_day, stray_notebooks
from course_lib.classroom.source import find_days

DAYS = find_days()


@pytest.mark.parametrize("day", DAYS, ids=lambda day: day.name)
def test_notebook_is_the_one_built_from_its_source(day):
    assert drift(day) is None


@pytest.mark.parametrize("day", DAYS, ids=lambda day: day.name)
def test_notebook_is_clean(day):
    assert [str(problem) for problem in lint_day(day)] == []


def test_no_stray_notebooks():
    assert [str(problem) for problem in stray_notebooks()] == []
