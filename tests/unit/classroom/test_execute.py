"""A run ends its kernel and removes its folder, however it ends."""

from __future__ import annotations

import os
import signal

import nbformat
import pytest

from course_lib.classroom.execute import CellFailed, execute


@pytest.mark.parametrize("code, on_cell, error", [
    ("pass", lambda index: None, None),
    ("1 / 0", lambda index: None, CellFailed),
    ("pass", lambda index: os.kill(os.getpid(), signal.SIGTERM), SystemExit),
], ids=["done", "failed", "terminated"])
def test_no_kernel_and_no_folder_is_left(default_signals, tmp_path, monkeypatch, code, on_cell,
                                         error):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "own"))
    (tmp_path / "own").mkdir()
    told = tmp_path / "pid"
    cell = f"import os, pathlib; pathlib.Path({str(told)!r}).write_text(str(os.getpid()))\n{code}"
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(cell)])
    if error is None:
        execute(notebook, on_cell)
    else:
        with pytest.raises(error):
            execute(notebook, on_cell)
    with pytest.raises(ProcessLookupError):
        os.kill(int(told.read_text()), 0)
    assert list((tmp_path / "own").iterdir()) == []
