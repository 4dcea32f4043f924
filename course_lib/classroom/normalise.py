"""Make an executed notebook depend on its source alone, so that a rebuild changes nothing."""

from __future__ import annotations

import copy

import nbformat
from nbformat import NotebookNode

from course_lib.classroom.source import IGNORE_OUTPUT

WIDGET_VIEW = "application/vnd.jupyter.widget-view+json"
PICTURES = ("image/png", "image/jpeg")


def normalise(executed: NotebookNode, previous: NotebookNode | None = None) -> NotebookNode:
    """Return the notebook to store for an executed one.

    Widget views, timings and kernel details are dropped; code cells count 1…n. Where the cell
    of the same id in `previous` has the same source and tags, stored outputs are kept if the
    cell is tagged nbval-ignore-output, or if everything but its pictures is unchanged.
    """
    notebook = copy.deepcopy(executed)
    notebook.metadata = nbformat.from_dict({
        key: executed.metadata[key] for key in ("kernelspec", "language_info", "course")
    })
    stored = {cell.get("id"): cell for cell in previous.cells} if previous else {}
    count = 0
    for cell in notebook.cells:
        if cell.cell_type != "code":
            continue
        count += 1
        cell.metadata.pop("execution", None)
        outputs = [_output(output, count) for output in cell.outputs]
        cell.outputs = [output for output in outputs if output is not None]
        cell.execution_count = count
        before = stored.get(cell.id)
        if before is not None and _keeps(cell, before):
            cell.outputs = [_renumbered(output, count) for output in before.outputs]
    return notebook


def strip_widget_views(notebook: NotebookNode) -> None:
    """Drop widget views from a notebook's outputs in place; their pictures and text stay."""
    for cell in notebook.cells:
        if cell.cell_type == "code":
            outputs = [_output(output, cell.execution_count) for output in cell.outputs]
            cell.outputs = [output for output in outputs if output is not None]
    notebook.metadata.pop("widgets", None)


def _output(output: NotebookNode, count: int | None) -> NotebookNode | None:
    output = copy.deepcopy(output)
    if "data" in output:
        output.data.pop(WIDGET_VIEW, None)
        output.metadata = nbformat.from_dict({})
        if not output.data:
            return None
    output.pop("transient", None)
    return _renumbered(output, count)


def _renumbered(output: NotebookNode, count: int | None) -> NotebookNode:
    output = copy.deepcopy(output)
    if output.output_type == "execute_result":
        output.execution_count = count
    return output


def _keeps(cell: NotebookNode, before: NotebookNode) -> bool:
    same = (
        before.cell_type == "code"
        and before.source == cell.source
        and before.metadata.get("tags", []) == cell.metadata.get("tags", [])
    )
    if not same:
        return False
    if IGNORE_OUTPUT in cell.metadata.get("tags", []):
        return True
    return _twin(cell.outputs) == _twin(before.outputs)


def _twin(outputs: list[NotebookNode]) -> list:
    """What nbval compares: the outputs without the pixels of their pictures."""
    twins = []
    for output in outputs:
        twin = {k: v for k, v in output.items() if k not in ("data", "metadata", "execution_count")}
        if "data" in output:
            twin["data"] = {k: "picture" if k in PICTURES else v for k, v in output.data.items()}
        twins.append(twin)
    return twins


def dumps(notebook: NotebookNode) -> str:
    """Return the notebook file's text: valid nbformat 4.5, sorted keys, one final newline."""
    notebook.nbformat, notebook.nbformat_minor = 4, 5
    nbformat.validate(notebook)
    return nbformat.writes(notebook, version=nbformat.NO_CONVERT).rstrip("\n") + "\n"
