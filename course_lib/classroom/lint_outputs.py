"""Rules about the outputs stored in a built notebook; each is a way nbval has been fooled."""

from __future__ import annotations

import re
import sys
from pathlib import Path

from nbformat import NotebookNode

from course_lib.classroom.lint_problem import ABSOLUTE, Problem
from course_lib.classroom.normalise import PICTURES, WIDGET_VIEW
from course_lib.paths import ROOT

_FORBIDDEN = {
    "image/svg+xml": "SVG carries a date; show a PNG",
    WIDGET_VIEW: "a widget view is stored; build the notebook",
    "application/javascript": "no JavaScript of our own",
}


def output_problems(notebook: NotebookNode, name: str) -> list[Problem]:
    """Return the problems of a stored notebook's counts, metadata and outputs."""
    found: list[Problem] = []
    if "widgets" in notebook.metadata:
        found.append(Problem("widget", name, "widget state is stored; build the notebook"))
    if notebook.metadata.get("kernelspec", {}).get("name") != "python3":
        found.append(Problem("kernel", name, "the kernel must be python3; build the notebook"))
    count = 0
    for cell in notebook.cells:
        if cell.cell_type != "code":
            continue
        count += 1
        where = f"{name}, code cell {count}"
        if cell.execution_count != count:
            found.append(Problem("executed", where, f"execution count {cell.execution_count}, "
                                 f"expected {count}: an unexecuted cell passes unseen"))
        for output in cell.outputs:
            found += [Problem(rule, where, text) for rule, text in _output_problems(output)]
        if _has_picture(cell) and not _has_twin(cell):
            found.append(Problem("twin", where, "print the numbers that the picture shows"))
    return found


def _output_problems(output: NotebookNode) -> list[tuple[str, str]]:
    found = []
    if output.output_type == "error":
        found.append(("error", f"a stored {output.get('ename', 'error')}"))
    if output.output_type == "stream" and output.name == "stderr":
        found.append(("stderr", "text on stderr (a warning or a bar) differs between runs"))
    for kind in output.get("data", {}):
        if kind in _FORBIDDEN:
            found.append(("output", _FORBIDDEN[kind]))
    text = _text(output)
    if "<Figure size" in text:
        found.append(("figure", "'<Figure size …>' is compared; display through course_lib.show"))
    if re.search(r"<script\b", text):
        found.append(("output", "no JavaScript in an output"))
    match = ABSOLUTE.search(text)
    here = [p for p in (str(ROOT), str(Path.home()), sys.prefix) if len(p) > 4 and p in text]
    if match or here:
        found.append(("path", f"absolute path {match[0] if match else here[0]}… in an output"))
    return found


def _text(output: NotebookNode) -> str:
    parts = [output.get("text", "")]
    parts += [v for k, v in output.get("data", {}).items()
              if k.startswith("text/") and isinstance(v, str)]
    return "\n".join(parts)


def _has_picture(cell: NotebookNode) -> bool:
    return any(kind in output.get("data", {}) for output in cell.outputs for kind in PICTURES)


def _has_twin(cell: NotebookNode) -> bool:
    return any(re.search(r"\d", _text(output)) for output in cell.outputs)
