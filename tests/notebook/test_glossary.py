"""The glossary: sorted, its days mention their terms, its names are in the code."""

from __future__ import annotations

import re
import subprocess
from functools import cache

import pytest

from course_lib.classroom.source import find_days, parse
from course_lib.paths import ROOT

DAYS = {day.number: day for day in find_days()}
TEXT = (ROOT / "docs" / "glossary.md").read_text("utf-8")
ROWS = [[cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]]
        for line in TEXT.splitlines() if re.match(r"\| (?!term )", line)]


@cache
def words_of(day: int) -> str:
    """All that a day's reader sees before running it, in lower case."""
    return " ".join("\n".join(cell.source for cell in parse(DAYS[day]).cells).lower().split())


@cache
def is_in_code(name: str) -> bool:
    found = subprocess.run(
        ["grep", "-rqwF", "--include=*.py", "--include=*.[ch]", "--include=*.pyx", "--", name,
         "course_lib", "kernels_pyx"], cwd=ROOT)
    return found.returncode == 0


def test_every_row_has_five_cells_and_terms_are_sorted_and_single():
    assert len(ROWS) > 100 and {len(row) for row in ROWS} == {5}
    terms = [re.sub(r"^[^a-z0-9]+", "", row[0].lower()) for row in ROWS]
    assert terms == sorted(set(terms))


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row[0])
def test_a_mark_says_that_the_day_is_here(row):
    day, _, mark = row[3].partition(" ")
    assert 1 <= int(day) <= 30 and (mark == "●") == (int(day) in DAYS)


@pytest.mark.parametrize("row", [r for r in ROWS if "●" in r[3]], ids=lambda row: row[0])
def test_the_day_explains_the_term(row):
    text = words_of(int(row[3].split()[0]))
    names = [re.findall(r"\w+", re.sub(r"\(.*\)", "", name).lower()) for name in row[0].split(",")]
    # "eviction" may be explained as "evicted", "online softmax" as "softmax, online".
    assert any(all(word[:5] in text for word in name) for name in names), names


@pytest.mark.parametrize("row", [r for r in ROWS if "`" in r[4]], ids=lambda row: row[0])
def test_the_code_has_the_name(row):
    for name in re.findall(r"`([^`]+)`", row[4]):
        paths = [ROOT / name, ROOT / "course_lib" / name]
        paths += (ROOT / "data" / "models").glob(f"*/{name}")
        words = re.findall(r"[\w-]+", name.split("/")[-1])
        assert any(path.exists() for path in paths) or all(
            is_in_code(word.lstrip("-")) for word in words if word not in ("py",)), name
