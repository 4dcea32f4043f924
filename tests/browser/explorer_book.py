"""Written by the course's own Python for test_explorers.py: a notebook with one explorer a cell,
its outputs stored as a built notebook stores them, and what every explorer must show at the start,
after one arrow key and after a drag.

    python tests/browser/explorer_book.py FOLDER
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any, NamedTuple

import nbformat

from course_lib import show
from course_lib.classroom.html_page import as_html
from course_lib.classroom.normalise import dumps, normalise
from course_lib.show import Explorer
from course_lib.show.picture import base64_text


class Moves(NamedTuple):
    """How an explorer is made; a control moved by an arrow key, to the next of its values; another
    one dragged to a value."""

    arguments: str
    key: str
    drag: str
    to: Any


MOVES = {
    "BlockSelectionExplorer": Moves("tokens=700, k=4", "k", "block", 3),
    "ImportanceMapExplorer": Moves("", "queries", "k", 32),
    "KSweepExplorer": Moves("", "k", "prompt", 1),
    "KVLedgerExplorer": Moves("", "layers", "tokens", None),
    "LseMergeExplorer": Moves("source='model', parts=6, merged=3", "order", "merged", 1),
    "OnlineSoftmaxExplorer": Moves("source='model'", "read", "read", 40),
    "PrefillMaskExplorer": Moves("", "threshold", "head", 1),
    "QuantizationErrorExplorer": Moves("source='k', layer=1", "rule", "outlier", 8),
    "RingTimelineExplorer": Moves("", "load", "slots", None),
    "RooflineExplorer": Moves("", "kernel", "batch", 64),
    "RoundingBiasExplorer": Moves("source='model'", "values", "head", 1),
    "VoteExplorer": Moves("", "rule", "threshold", None),
    "WeightBlockExplorer": Moves("", "kind", "element", 20),
}
DAY_10 = Moves("k=1", "k", "n_probe", 1)
FIRST = """from course_lib.show import *

class Failing(QuantizationErrorExplorer):
    def compute(self, **params):
        if params["outlier"] == 2:
            raise ValueError("two is <not> for this explorer")
        return super().compute(**params)"""


def options(control: Any) -> list:
    """The values of a control, in order."""
    if hasattr(control, "options"):
        return [value for _, value in control._options_full]
    return list(range(control.min, control.max + 1))


def control_state(explorer: Explorer, name: str, value: Any) -> dict[str, Any]:
    """What the browser must find: the control, where its value lies, and all that is shown."""
    control = explorer.controls[name]
    before = options(control).index(control.value)
    explorer.set(**{name: value})
    known = options(control)
    assert explorer.summary() == explorer.describe(explorer.compute(**explorer.params))
    return {"control": control.description, "slider": "Slider" in type(control).__name__,
            "before": before, "index": known.index(value), "count": len(known),
            **shown(explorer)}


def shown(explorer: Explorer) -> dict[str, str]:
    return {"text": explorer.summary(), "png": base64_text(explorer.png())}


def neighbour(explorer: Explorer, name: str) -> Any:
    """The value that one arrow key leads to: the next, at the end the one before."""
    known, now = options(explorer.controls[name]), explorer.params[name]
    at = known.index(now)
    return known[at + 1] if at + 1 < len(known) else known[at - 1]


def states(explorer: Explorer, moves: Moves) -> dict[str, Any]:
    """All that an explorer must show: at the start, after an arrow key, after a drag."""
    start = shown(explorer)
    key = control_state(explorer, moves.key, neighbour(explorer, moves.key))
    to = options(explorer.controls[moves.drag])[-1] if moves.to is None else moves.to
    drag = control_state(explorer, moves.drag, to)
    return {"name": type(explorer).__name__, "alt": explorer.alt, "question": explorer.question,
            "start": start, "key": key, "drag": drag}


def write(folder: Path) -> None:
    """Write book.ipynb, book.html and expected.json."""
    known = {name for name in show.__all__ if name.endswith("Explorer") and name != "Explorer"}
    assert known == set(MOVES), f"say in MOVES how to move {known ^ set(MOVES)}"
    cells, expected = [nbformat.v4.new_code_cell(FIRST, id="first")], []
    for number, (name, moves) in enumerate(MOVES.items(), 1):
        source = f"{name}({moves.arguments})"
        explorer = eval(source, vars(show))
        output = nbformat.v4.new_output("execute_result", explorer._repr_mimebundle_(),
                                        execution_count=number + 1)
        cells.append(nbformat.v4.new_code_cell(source, outputs=[output], id=f"explorer-{number}"))
        expected.append(states(explorer, moves))
    cells.append(nbformat.v4.new_code_cell("Failing()", id="failing"))
    kernel = {"name": "python3", "display_name": "Python 3", "language": "python"}
    book = normalise(nbformat.v4.new_notebook(cells=cells, metadata={
        "kernelspec": kernel, "language_info": {"name": "python"}, "course": {}}))
    (folder / "book.ipynb").write_text(dumps(book))
    (folder / "book.html").write_text(as_html(book, folder / "book.ipynb", folder / "book.html"))
    day_10 = states(show.BlockSelectionExplorer(k=1), DAY_10)
    (folder / "expected.json").write_text(json.dumps({"book": expected, "day 10": day_10}))


if __name__ == "__main__":
    write(Path(sys.argv[1]))
