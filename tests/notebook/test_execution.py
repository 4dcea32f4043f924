"""Builds that really start a kernel: what is stored, kept, told and left behind."""

from __future__ import annotations

import json
import re
import shutil
import sys
import tempfile

import nbformat
import pytest

import course_lib
from course_lib.classroom.build import build_day, drift
from course_lib.classroom.execute import CellFailed, execute
from course_lib.classroom.source import find_days
from course_lib.errors import CourseError
from course_lib.paths import ROOT

EXAMPLE = ROOT / "tests" / "fixtures" / "example_day"
IGNORED = "nbval-ignore-output"


def write_day(folder, body):
    (folder / "src").mkdir(exist_ok=True)
    (folder / "src" / "day42_small.py").write_text(body, encoding="utf-8")
    return find_days([42], folder)[0]


def test_a_rebuild_changes_no_byte_and_stores_what_ran(tmp_path):
    shutil.copytree(EXAMPLE, tmp_path / "notebooks")
    example = find_days([99], tmp_path / "notebooks")[0]
    text = example.source.read_text(encoding="utf-8")
    register = ("import course_lib.classroom.exercises as exercises\n"
                f"exercises.__path__.append({str(EXAMPLE / 'exercises')!r})\n")
    example.source.write_text(text.replace("import numpy", f"{register}import numpy", 1),
                              encoding="utf-8")
    first = build_day(example)
    stored = example.notebook.read_bytes()
    assert first.changed and drift(example) is None
    notebook = nbformat.reads(stored.decode(), as_version=4)
    printed = {cell.id: "".join(o.get("text", "") for o in cell.outputs)
               for cell in notebook.cells if cell.cell_type == "code"}
    assert printed["d99-a1-check"] == "[ ] d99.a1 not attempted\n"
    assert printed["d99-b1-check"] == "[ ] d99.b1 not attempted\n"
    assert "kept: [1, 3] of 6\n" in printed.values()
    assert not re.search(r"iopub|\d{4}-\d\d-\d\dT", stored.decode())
    again = build_day(example)
    assert not again.changed and example.notebook.read_bytes() == stored
    assert first.run.seconds > first.run.slowest_seconds > 0
    assert first.run.peak_mb is None or 10 < first.run.peak_mb < 600


CLOCK = f"""\
# %% tags=["{IGNORED}"]
import time
print(time.time_ns())

# %%
import base64, os
from IPython.display import display
png = base64.b64encode(bytes([137, 80, 78, 71]) + os.urandom(8)).decode()
display({{"image/png": png, "text/plain": "twin 1"}}, raw=True)
"""


def outputs(day):
    notebook = nbformat.read(day.notebook, as_version=4)
    clock, picture = (cell.outputs[0] for cell in notebook.cells)
    return clock["text"], picture["data"]["image/png"]


def test_outputs_that_always_differ_are_kept_until_something_changes(tmp_path):
    day = write_day(tmp_path, CLOCK)
    build_day(day)
    clock, picture = outputs(day)
    assert not build_day(day).changed
    day = write_day(tmp_path, CLOCK.replace("twin 1", "twin 2"))
    build_day(day)
    kept, redrawn = outputs(day)
    assert kept == clock and redrawn != picture
    build_day(day, fresh=True)
    assert outputs(day)[0] != clock


def test_a_failing_cell_writes_nothing_and_names_the_place(tmp_path):
    body = '# %% [markdown]\nr"""\ntext\n"""\n\n# %%\nx = 1\n\n# %%\n\ny = 2\nx / 0\n'
    day = write_day(tmp_path, body)
    day.notebook.write_text("as it was")
    with pytest.raises(CourseError) as caught:
        build_day(day)
    text = str(caught.value)
    assert "day 42, code cell 2" in text and "day42_small.py:9" in text
    assert "ZeroDivisionError: division by zero" in text and "y = 2 / x / 0" in text
    assert "Nothing was written" in text and "\n" not in text
    assert day.notebook.read_text() == "as it was"
    assert sorted(p.name for p in tmp_path.iterdir()) == ["day42_small.ipynb", "src"]


def test_a_dead_kernel_and_a_slow_cell_are_told(monkeypatch):
    notebook = nbformat.v4.new_notebook()
    notebook.cells = [nbformat.v4.new_code_cell("import os; os._exit(3)")]
    with pytest.raises(CellFailed, match="the kernel died"):
        execute(notebook)
    monkeypatch.setattr("course_lib.classroom.execute.CELL_TIMEOUT", 1)
    notebook.cells = [nbformat.v4.new_code_cell("import time; time.sleep(30)")]
    with pytest.raises(CellFailed, match="it took over 1 s"):
        execute(notebook)


def test_the_kernel_runs_here_and_in_an_empty_folder(tmp_path, monkeypatch):
    (tmp_path / "startup.py").write_text("raise SystemExit")
    monkeypatch.setenv("PYTHONSTARTUP", str(tmp_path / "startup.py"))
    (tmp_path / "temporary").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "temporary"))
    notebook = nbformat.v4.new_notebook()
    notebook.cells = [nbformat.v4.new_code_cell(
        "import os, sys, json, course_lib\n"
        "print(json.dumps([os.listdir(), sys.executable, course_lib.__file__]))"
    )]
    execute(notebook)
    assert list((tmp_path / "temporary").iterdir()) == [], "something was left behind"
    listed, python, library = json.loads(notebook.cells[0].outputs[0].text)
    assert (listed, python, library) == ([], sys.executable, course_lib.__file__)


@pytest.mark.parametrize("chosen", [None, "3"])
def test_the_kernel_computes_on_one_thread_unless_told_otherwise(monkeypatch, chosen):
    names = "OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS"
    for name in names:
        monkeypatch.delenv(name, raising=False)
        if chosen:
            monkeypatch.setenv(name, chosen)
    notebook = nbformat.v4.new_notebook()
    notebook.cells = [nbformat.v4.new_code_cell(
        f"import os; print([os.environ[name] for name in {names}])"
    )]
    execute(notebook)
    assert notebook.cells[0].outputs[0].text == f"{[chosen or '1'] * 2}\n"
