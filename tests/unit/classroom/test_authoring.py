"""docs/authoring.md keeps its word: its commands make a day out of the example, and nothing is
left to mend in it; no command of the guides wants another Python than the course's."""

from __future__ import annotations

import re
import runpy
import subprocess

import pytest

import course_lib.classroom.exercises as exercises
from course_lib.classroom.checking import report
from course_lib.classroom.lint import lint_day
from course_lib.classroom.sealed import seal_day, sealed_path
from course_lib.classroom.source import find_days
from course_lib.paths import ROOT

FOLDERS = ("notebooks/src", "course_lib/classroom/exercises/sealed", "tests/solutions",
           "tests/grading")


def commands() -> list[str]:
    """The indented block of commands that copies the example."""
    text = (ROOT / "docs" / "authoring.md").read_text(encoding="utf-8")
    block = re.search(r"(?:^    .*\n)*^    sed .*\n(?:^    .*\n)*", text, re.MULTILINE)
    assert block
    return [line.strip() for line in block[0].splitlines()]


@pytest.fixture
def copied(tmp_path, monkeypatch):
    """An empty course in which the copying commands made day 98."""
    for folder in FOLDERS:
        (tmp_path / folder).mkdir(parents=True)
    for link in ("tests/fixtures", "course_lib/engine"):
        (tmp_path / link).symlink_to(ROOT / link)
    copying = [line for line in commands() if not line.startswith((".venv/", "./course"))]
    script = "\n".join(copying).replace("n=11", "n=98", 1)
    subprocess.run(["sh", "-euc", script], cwd=tmp_path, check=True)
    monkeypatch.setattr(
        exercises, "__path__", [*exercises.__path__, str(tmp_path / FOLDERS[1][:-len("/sealed")])]
    )
    return tmp_path


def test_the_copied_example_is_a_clean_day_with_right_solutions(copied):
    day = find_days(folder=copied / "notebooks")[0]
    assert day.name == "day98_my_topic"
    assert [problem.rule for problem in lint_day(day)] == ["notebook"]  # it is not built yet
    solutions = runpy.run_path(str(copied / "tests" / "solutions" / "day98.py"))
    assert report("d98.a1", solutions["best_blocks"])[1]
    grading = runpy.run_path(str(copied / "tests" / "grading" / "day98.py"))
    assert [hidden.id for hidden in grading["HIDDEN"]] == ["d98.a1"]
    assert sealed_path(98).is_relative_to(copied)
    sealed_path(98).write_text(seal_day(grading["READINGS"]), encoding="utf-8")
    line = report("d98.b1", {"ties": "../course_lib/engine/generate.py:1", "winner": 1})[0]
    assert line == "[x] d98.b1 1/2: ties — not these lines"


def test_nothing_of_the_example_is_left_in_the_copy(copied):
    made = [path for folder in FOLDERS for path in (copied / folder).glob("*.py")]
    made += (copied / "course_lib" / "classroom" / "exercises").glob("*.py")
    assert len(made) == 4
    for path in made:
        text = path.read_text(encoding="utf-8")
        assert "98" in text and "99" not in text and "fixtures" not in text, path


@pytest.mark.parametrize("guide", ["docs/authoring.md", "CONTRIBUTING.md"])
def test_every_command_uses_the_environment_of_the_course(guide):
    text = (ROOT / guide).read_text(encoding="utf-8")
    command = r"(?:^    |`)((?:\S*/)?(?:python3?|pytest|ruff|mypy|jupyter)\b [^`\n]*)"
    found = re.findall(command, text, re.MULTILINE)
    assert found
    assert [line for line in found if not line.startswith(".venv/bin/python ")] == []


@pytest.mark.parametrize("guide", ["docs/authoring.md", "CONTRIBUTING.md"])
def test_every_tool_that_a_guide_calls_is_there(guide):
    text = (ROOT / guide).read_text(encoding="utf-8")
    for name in set(re.findall(r"\b((?:tools|tests|docs|course_lib)/[\w/]+\.(?:py|md))", text)):
        if not re.search(r"day(NN|\d\d)|NAME", name):
            assert (ROOT / name).exists(), name
