"""A day outside JupyterLab: its notebook read, and shown as text (`html_page`: a page)."""

from __future__ import annotations

from pathlib import Path

from nbformat import NotebookNode

from course_lib.classroom.build import load
from course_lib.errors import CourseError
from course_lib.paths import relative


def read_without_outputs(path: Path) -> NotebookNode:
    """Return a notebook ready to run; CourseError where the file is broken."""
    notebook = load(path)
    if notebook is None:
        raise CourseError(f"{relative(path)} is not a notebook; get it again from the course.")
    for cell in notebook.cells:
        if cell.cell_type == "code":
            cell.outputs, cell.execution_count = [], None
    return notebook


def as_text(notebook: NotebookNode) -> str:
    """Return the headings of a notebook and the text of its outputs, in order."""
    parts: list[str] = []
    for cell in notebook.cells:
        if cell.cell_type == "markdown":
            parts += [f"\n{line}" for line in cell.source.splitlines() if line.startswith("#")]
        elif cell.cell_type == "code":
            for output in cell.outputs:
                text = output.get("text") or output.get("data", {}).get("text/plain", "")
                parts += [text.rstrip()] if text.strip() else []
    return "\n".join(parts).lstrip("\n")
