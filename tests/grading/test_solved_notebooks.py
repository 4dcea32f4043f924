"""Each day's notebook with the solutions written in: it runs, every check is right, it is small.

On the NumPy backend, where a lesson must fit the memory of a board too.
"""

from __future__ import annotations

import nbformat
import pytest
from loading import DayProof, days_with_exercises, load_day
from proofs import as_written

import course_lib.classroom.exercises as exercises
from course_lib.classroom.execute import MAX_MEGABYTES, execute
from course_lib.classroom.exercises import Exercise
from course_lib.classroom.source import find_days, parse
from course_lib.paths import ROOT

EXAMPLE = ROOT / "tests" / "fixtures" / "example_day"


def solve(proof: DayProof):
    """Return the day's notebook with every answer and evidence cell filled in."""
    notebook = parse(proof.day)
    with open(str(proof.solutions.__file__), encoding="utf-8") as file:
        solutions = file.read()
    for cell in notebook.cells:
        course = cell.metadata.get("course", {})
        item = proof.items.get(course.get("id"))
        if course.get("role") == "answer" and isinstance(item, Exercise):
            cell.source = solutions
        elif course.get("role") == "evidence":
            name = cell.source.split("\n")[1].split("=")[0]
            right = {part: as_written(t) for part, t in proof.readings[item.id].items()}
            cell.source = f"{name}= {right!r}"
    return notebook


def check_solved(proof: DayProof, before: str = "pass") -> None:
    """Run the solved notebook, after a cell of its own, and demand that every check is right."""
    notebook = solve(proof)
    notebook.cells.insert(0, nbformat.v4.new_code_cell(before))
    run = execute(notebook)
    lines = {
        cell.metadata.course["id"]: "".join(output.get("text", "") for output in cell.outputs)
        for cell in notebook.cells if cell.metadata.get("course", {}).get("role") == "check"
    }
    assert {i: line for i, line in lines.items() if not line.startswith("[ok]")} == {}
    assert run.peak_mb is None or run.peak_mb < MAX_MEGABYTES, str(run)


@pytest.mark.parametrize("day", days_with_exercises(), ids=lambda day: day.name)
def test_solved_notebook(day, monkeypatch):
    monkeypatch.setenv("COURSE_KERNEL", "numpy")
    check_solved(load_day(day))


def test_solved_example(monkeypatch, tmp_path):
    monkeypatch.setattr(
        exercises, "__path__", [*exercises.__path__, str(EXAMPLE / "exercises")]
    )
    proof = load_day(find_days([99], EXAMPLE)[0], EXAMPLE)
    register = ("import course_lib.classroom.exercises as exercises\n"
                f"exercises.__path__.append({str(EXAMPLE / 'exercises')!r})")
    check_solved(proof, register)
    wrong = tmp_path / "wrong.py"
    wrong.write_text("def best_blocks(scores, k):\n    return [1]\n")
    proof.solutions.__file__ = str(wrong)
    with pytest.raises(AssertionError, match="d99.a1"):
        check_solved(proof, register)
