"""tools/make_kernel_digests.py: a build without kernels, a file that is damaged or gone."""

from __future__ import annotations

import importlib.util
import json

import pytest

import kernels_pyx
from course_lib.paths import ROOT

NEW = {"op(n=1)": "0123", "op(n=2)": "4567"}


@pytest.fixture
def tool(monkeypatch, tmp_path):
    """The tool with two digests and a file of its own."""
    spec = importlib.util.spec_from_file_location(
        "make_kernel_digests", ROOT / "tools" / "make_kernel_digests.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    monkeypatch.setattr(module, "GOLDEN", tmp_path / "digests.json")
    monkeypatch.setattr(module, "digests", lambda: NEW)
    monkeypatch.setattr(kernels_pyx, "VARIANTS", ("portable",))
    return module


def test_without_kernels_it_is_one_sentence_and_2(tool, monkeypatch, capsys):
    monkeypatch.setattr(kernels_pyx, "VARIANTS", ())
    for argv in ([], ["--check"]):
        assert tool.main(argv) == 2
        captured = capsys.readouterr()
        assert captured.out == "" and captured.err.count("\n") == 1
        assert captured.err.startswith("make_kernel_digests: the portable kernels are not compiled")
    assert not tool.GOLDEN.exists()


@pytest.mark.parametrize("content", [None, b"", b'{"op(n=1)": ', b"[1]", b"\xff",
                                     pytest.param(b"[" * 100_000, id="nested")])
def test_a_file_that_is_damaged_or_gone_is_written_anew(tool, content, capsys):
    if content is not None:
        tool.GOLDEN.write_bytes(content)
    assert tool.main(["--check"]) == 1
    assert (tool.GOLDEN.read_bytes() if tool.GOLDEN.exists() else None) == content
    assert tool.main([]) == 0
    assert json.loads(tool.GOLDEN.read_text()) == NEW
    assert "2 digests; new, changed or gone: 2 (op)" in capsys.readouterr().out
    assert tool.main(["--check"]) == 0
    assert "gone: 0" in capsys.readouterr().out
