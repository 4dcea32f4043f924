"""Read a day's py:percent source into a notebook whose cells have lasting names.

The notebook made here is not executed. It is what the build executes, what the drift check
compares with, and where a cell's translation is looked up by its id.
"""

from __future__ import annotations

import hashlib
import re
from dataclasses import dataclass
from pathlib import Path

import jupytext
import nbformat
from nbformat import NotebookNode

from course_lib.classroom import see
from course_lib.errors import CourseError
from course_lib.paths import NOTEBOOKS, relative

IGNORE_OUTPUT = "nbval-ignore-output"
LOCKED_ROLES = ("given", "check")
NOTEBOOK_METADATA = {
    "kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"},
    "language_info": {"name": "python", "file_extension": ".py", "mimetype": "text/x-python",
                      "pygments_lexer": "ipython3"},
}
_NAME = re.compile(r"day(\d\d)_[a-z0-9_]+")
_JUPYTEXT_OWN = {"cell_marker", "lines_to_next_cell", "lines_to_end_of_cell_marker"}


@dataclass(frozen=True)
class Day:
    """One day's files: the source that authors edit and the notebook built from it."""

    number: int
    source: Path
    notebook: Path

    @property
    def name(self) -> str:
        """The name of both files without their ending, such as ``day10_sparse``."""
        return self.source.stem


def find_days(numbers: list[int] | None = None, folder: Path = NOTEBOOKS) -> list[Day]:
    """Return the days with a source in ``folder/src``, in order, or those of `numbers`.

    Raises CourseError for a file name that is no day's, a number there twice, or a number asked
    for that has no source.
    """
    days: dict[int, Day] = {}
    for source in sorted((folder / "src").glob("*.py")):
        match = _NAME.fullmatch(source.stem)
        if match is None:
            raise CourseError(f"{relative(source)}: name it like day10_sparse_attention.py.")
        number = int(match[1])
        if number in days:
            raise CourseError(f"day {number} has two sources: {days[number].name}, {source.stem}.")
        days[number] = Day(number, source, folder / f"{source.stem}.ipynb")
    if not numbers:
        return [days[n] for n in sorted(days)]
    for number in numbers:
        if number not in days:
            there = ", ".join(map(str, sorted(days))) or "none"
            raise CourseError(f"there is no day {number}; days there are: {there}.")
    return [days[n] for n in sorted(set(numbers))]


def read_text(path: Path) -> str:
    """Return a source's text with ``\\n`` line ends, whatever the checkout made of them.

    Raises CourseError where the file is not UTF-8 or cannot be read.
    """
    try:
        return path.read_text(encoding="utf-8").replace("\r\n", "\n")
    except UnicodeDecodeError as error:
        line = error.object.count(b"\n", 0, error.start) + 1
        what = f"{relative(path)}:{line} is not UTF-8 text; save it as UTF-8"
    except OSError as error:
        what = f"{relative(path)} cannot be read ({error.strerror})"
    number = path.name[3:5].lstrip("0")
    raise CourseError(f"{what}, then run ./course build {number}.")


def parse(day: Day) -> NotebookNode:
    """Return the day's notebook, not executed: cells with ids, tags and course metadata.

    The source's digest is in ``metadata.course``. Raises CourseError for a file that is
    not UTF-8, a marker line that jupytext cannot read and markdown that is not in a raw string.
    """
    text = read_text(day.source)
    read = jupytext.reads(text, fmt="py:percent")
    notebook = nbformat.v4.new_notebook(metadata={
        **NOTEBOOK_METADATA,
        "course": {"day": day.number, "source": relative(day.source), "digest": digest(text)},
    })
    used: set[str] = set()
    for number, cell in enumerate(read.cells, 1):
        notebook.cells.append(_cell(day, number, cell, used))
    return notebook


def digest(text: str) -> str:
    """Return a text's SHA-256 in hexadecimal."""
    return hashlib.sha256(text.encode()).hexdigest()


def _cell(day: Day, number: int, cell: NotebookNode, used: set[str]) -> NotebookNode:
    where = f"{relative(day.source)}, cell {number}"
    unknown = set(cell.metadata) - _JUPYTEXT_OWN - {"tags", "course"}
    if unknown:
        raise CourseError(f"{where}: cannot read its marker line ({', '.join(sorted(unknown))}).")
    if cell.cell_type == "markdown" and cell.metadata.get("cell_marker") != 'r"""':
        raise CourseError(f'{where}: write markdown as a raw string, r""" … """.')
    metadata: dict = {}
    course = cell.metadata.get("course")
    if course is not None:
        if not isinstance(course, dict):
            raise CourseError(f"{where}: course metadata must be an object.")
        metadata["course"] = dict(course)
        if course.get("role") in LOCKED_ROLES:
            metadata |= {"editable": False, "deletable": False}
    if cell.metadata.get("tags"):
        metadata["tags"] = list(cell.metadata["tags"])
    make = {"code": nbformat.v4.new_code_cell, "markdown": nbformat.v4.new_markdown_cell}
    if cell.cell_type not in make:
        raise CourseError(f"{where}: a {cell.cell_type} cell; use code or markdown.")
    source = see.expand(cell.source, where) if cell.cell_type == "markdown" else cell.source
    made = make[cell.cell_type](source, metadata=metadata)
    made["id"] = _unique(_cell_id(course, cell.source), used)
    return made


def _cell_id(course: dict | None, source: str) -> str:
    if course and course.get("id"):
        name = str(course["id"]).replace(".", "-")
        role = course.get("role")
        return name if role == "answer" else f"{name}-{role}"
    return "c-" + digest(source)[:10]


def _unique(name: str, used: set[str]) -> str:
    candidate, count = name, 1
    while candidate in used:
        count += 1
        candidate = f"{name}-{count}"
    used.add(candidate)
    return candidate


def cell_line(day: Day, index: int) -> int:
    """Return the line of the source where the cell of this index (from 0) begins."""
    lines = read_text(day.source).splitlines()
    markers = [n for n, line in enumerate(lines, 1) if line.startswith("# %%")]
    return markers[index] if index < len(markers) else 1
