"""The README's table of days is the course's table of contents: what is there is linked and marked,
with the title and the sections that the lesson has."""

from __future__ import annotations

import re

import pytest

from course_lib.classroom.source import find_days, parse
from course_lib.paths import ROOT

DAYS = {day.number: day for day in find_days()}
ROW = re.compile(r"^\| (\d+) \| (●| ?) \| (.+?) \| (.+) \|$", re.MULTILINE)
ROWS = {int(number): (mark.strip(), title, sections)
        for number, mark, title, sections in ROW.findall((ROOT / "README.md").read_text("utf-8"))}


def test_thirty_rows():
    assert list(ROWS) == list(range(1, 31))


@pytest.mark.parametrize("number", range(1, 31))
def test_a_day_that_is_there_is_marked_and_linked(number):
    mark, title, _ = ROWS[number]
    if number in DAYS:
        assert mark == "●"
        assert title.endswith(f"](notebooks/{DAYS[number].notebook.name})")
    else:
        assert mark == "" and "](" not in title


@pytest.mark.parametrize("number", DAYS)
def test_title_and_sections_are_those_of_the_lesson(number):
    _, title, sections = ROWS[number]
    prose = [cell.source for cell in parse(DAYS[number]).cells if cell.cell_type == "markdown"]
    assert prose[0].split("\n", 1)[0] == f"# Day {number}/30 · {title.split('](')[0].lstrip('[')}"
    headings = re.findall(rf"^## ({number}-\d) \S", "\n".join(prose), re.MULTILINE)
    assert headings == re.findall(rf"\b({number}-\d) ", sections)
