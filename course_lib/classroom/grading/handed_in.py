"""Taking a submitted notebook apart, without running anything of it."""

from __future__ import annotations

import ast
import json
import re
import warnings
from collections.abc import Sequence
from dataclasses import dataclass

import nbformat
from nbformat import NotebookNode

from course_lib.classroom.exercises import Exercise, Item
from course_lib.classroom.source import LOCKED_ROLES
from course_lib.errors import CourseError

MARKERS = {
    "answer": re.compile(r"^[ \t]*(?:#[ \t]*EXERCISE[ \t]+(d\d\d\.a[1-9])|"
                         r"<!--[ \t]*ANSWER[ \t]+(d\d\d\.b[1-9])[ \t]*-->)[ \t]*$", re.MULTILINE),
    "evidence": re.compile(r"^[ \t]*#[ \t]*EVIDENCE[ \t]+(d\d\d\.b[1-9])[ \t]*$", re.MULTILINE),
}
_MAGIC = re.compile(r"^([ \t]*)(?=[%!])", re.MULTILINE)
MAX_SOURCE = 200_000
"""Characters of an answer, its helpers and its evidence together; more is neither parsed nor run
nor shown."""


@dataclass(frozen=True)
class HandedIn:
    """What a notebook holds for one item: the source of the answer cell that counts (None where
    there is none), the student's own cells right above it, the evidence cell, and remarks."""

    answer: str | None
    helpers: tuple[str, ...] = ()
    evidence: str | None = None
    flags: tuple[str, ...] = ()

    @property
    def too_long(self) -> bool:
        """Whether this is more than anybody writes as an answer."""
        texts = (self.answer or "", self.evidence or "", *self.helpers)
        return sum(map(len, texts)) > MAX_SOURCE


def read_notebook(content: bytes) -> NotebookNode:
    """A notebook of any saved form; CourseError, one clause, where it is none.

    A byte-order mark and Windows line ends are taken away; older formats are converted.
    """
    try:
        text = content.decode("utf-8-sig")
        raw = json.loads(text)
        if not isinstance(raw, dict):
            raise ValueError("no JSON object")
        with warnings.catch_warnings():  # cell ids there twice, or of an older format
            warnings.simplefilter("ignore")
            notebook = nbformat.reads(json.dumps(raw), as_version=4)
        cells = list(notebook.cells)
        for cell in cells:
            source = cell.get("source", "")
            cell["source"] = (source if isinstance(source, str) else "".join(source)).replace(
                "\r\n", "\n")
            if not isinstance(cell.get("metadata"), dict) or not isinstance(
                    cell.get("cell_type"), str):
                raise ValueError("a cell without type or metadata")
    except RecursionError:
        raise CourseError("nested too deep to be a notebook") from None
    except Exception as error:  # nbformat raises many types on what is no notebook
        raise CourseError(f"not a notebook ({type(error).__name__})") from None
    notebook["cells"] = cells
    return notebook


def take_apart(notebook: NotebookNode, ours: NotebookNode,
               items: Sequence[Item]) -> dict[str, HandedIn]:
    """What `notebook` holds for each item, beside `ours`, the day as it was handed out."""
    cells = _by_item(notebook)
    originals = _by_item(ours)
    ours_sources = {cell.source.strip() for cell in ours.cells}
    theirs = {cell.source.strip() for cell in notebook.cells}
    for cell in notebook.cells:
        if cell.cell_type == "code":
            cell.source = without_magics(cell.source)
    found = {}
    for item in items:
        stub = _source(ours, originals.get((item.id, "answer"), []))
        places = cells.get((item.id, "answer"), [])
        flags = []
        if len(places) > 1:
            flags.append("duplicate_cell")
        if any(cell.source.strip() not in theirs for cell in _locked(ours, item.id)):
            flags.append("changed_given_code")
        place = _counting(notebook, places, stub, item)
        evidence = cells.get((item.id, "evidence"), [])
        found[item.id] = HandedIn(
            answer=None if place is None else notebook.cells[place].source,
            helpers=() if place is None else _helpers(notebook, place, ours_sources),
            evidence=_last_changed(notebook, evidence, _source(
                ours, originals.get((item.id, "evidence"), []))),
            flags=tuple(flags),
        )
    return found


def without_magics(source: str) -> str:
    """A cell whose lines that IPython alone understands (%time, !ls) are comments; as it is where
    it parses, or does not parse without them either."""
    if parsed(source).body or not _MAGIC.search(source):
        return source
    plain = _MAGIC.sub(r"\1# ", source)
    return plain if parsed(plain).body else source


def _by_item(notebook: NotebookNode) -> dict[tuple[str, str], list[int]]:
    """Cells by the id in their text, which the eye sees, else by the one in their metadata."""
    cells: dict[tuple[str, str], list[int]] = {}
    for index, cell in enumerate(notebook.cells):
        course = cell.metadata.get("course")
        said: tuple[str, str] | None = None
        if isinstance(course, dict) and isinstance(course.get("id"), str):
            said = course["id"], str(course.get("role"))
        for role, marker in MARKERS.items():
            match = marker.search(cell.source)
            if match is not None:
                said = next(group for group in match.groups() if group), role
        if said is not None:
            cells.setdefault(said, []).append(index)
    return cells


def _locked(ours: NotebookNode, item_id: str) -> list[NotebookNode]:
    return [cell for cell in ours.cells
            if cell.metadata.get("course", {}).get("id") == item_id
            and cell.metadata["course"].get("role") in LOCKED_ROLES]


def _source(notebook: NotebookNode, places: list[int]) -> str:
    return notebook.cells[places[0]].source if places else ""


def same_text(one: str, other: str) -> bool:
    """Whether two cells say the same, blank space at line ends and around them left aside."""
    def bare(text: str) -> list[str]:
        return [line.rstrip() for line in text.strip().splitlines()]

    return bare(one) == bare(other)


def _counting(notebook: NotebookNode, places: list[int], stub: str, item: Item) -> int | None:
    """Of several cells of one item: the last that is not the stub, for code the last of those that
    define the function."""
    changed = [p for p in places if not same_text(notebook.cells[p].source, stub)]
    if isinstance(item, Exercise):
        defining = [p for p in changed if item.function in defined(notebook.cells[p].source)]
        changed = defining or changed
    pool = changed or places
    return pool[-1] if pool else None


def _last_changed(notebook: NotebookNode, places: list[int], empty: str) -> str | None:
    changed = [p for p in places if not same_text(notebook.cells[p].source, empty)]
    pool = changed or places
    return notebook.cells[pool[-1]].source if pool else None


def parsed(source: str) -> ast.Module:
    """A cell's syntax tree; an empty one where it does not parse, or is too long: a tree takes
    some hundred times the memory of its text."""
    try:
        return ast.parse(source if len(source) <= MAX_SOURCE else "")
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return ast.Module([], [])


def defined(source: str) -> set[str]:
    """Names that a cell defines at its top level; none where it does not parse."""
    names = set()
    for node in parsed(source).body:
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            names.add(node.name)
        elif isinstance(node, ast.Assign):
            names |= {t.id for t in node.targets if isinstance(t, ast.Name)}
    return names


def _helpers(notebook: NotebookNode, place: int, ours: set[str]) -> tuple[str, ...]:
    """The student's own code cells between an answer and the course's cell above it."""
    found = []
    for cell in reversed(notebook.cells[:place]):
        if cell.source.strip() in ours or cell.metadata.get("course") or any(
                marker.search(cell.source) for marker in MARKERS.values()):
            break
        if cell.cell_type == "code" and cell.source.strip():
            found.append(cell.source)
    return tuple(reversed(found))
