"""The maintainers' tools: their help has no side effect, and a missing extra is one line."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from course_lib.paths import ROOT

pytest.importorskip("ipywidgets")  # some tools draw with the upper floor

TOOLS = sorted(path.name for path in (ROOT / "tools").glob("*.py"))
NEED_TORCH = {"train_needle_model.py": "train", "make_engine_golden.py": "oracle",
              "choose_prompts.py": "oracle"}
WITHOUT_TORCH = ("import runpy, sys; sys.modules['torch'] = None; sys.argv = sys.argv[1:]; "
                 "runpy.run_path(sys.argv[0], run_name='__main__')")


@pytest.fixture(scope="module")
def checkout(tmp_path_factory):
    """A copy of the checkout, so that a tool that writes does no harm."""
    root = tmp_path_factory.mktemp("checkout")
    unwanted = shutil.ignore_patterns("__pycache__", ".*", "build", "work", "*.png")
    shutil.copytree(ROOT, root, ignore=unwanted, dirs_exist_ok=True)
    return root


def files(root: Path) -> dict[Path, tuple[int, int]]:
    stats = {path: path.stat() for path in root.rglob("*") if path.is_file()}
    return {path: (stat.st_mtime_ns, stat.st_ino) for path, stat in stats.items()}


def run(root: Path, *words: str) -> subprocess.CompletedProcess:
    environ = {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "COURSE_DATA")}
    environ |= {"PYTHONDONTWRITEBYTECODE": "1", "PIP_NO_INDEX": "1"}
    return subprocess.run([sys.executable, *words], cwd=root, env=environ, capture_output=True,
                          text=True)


@pytest.mark.parametrize("name", TOOLS)
def test_help_tells_and_does_nothing(checkout, name):
    before = files(checkout)
    result = run(checkout, "-c", WITHOUT_TORCH, f"tools/{name}", "--help")
    assert result.returncode == 0, result.stderr
    assert result.stdout.startswith(f"usage: {name} [-h]") and result.stderr == ""
    assert files(checkout) == before


@pytest.mark.parametrize("name", TOOLS)
def test_an_unknown_option_is_refused_before_any_work(checkout, name):
    before = files(checkout)
    result = run(checkout, "-c", WITHOUT_TORCH, f"tools/{name}", "--no-such-option")
    assert result.returncode == 2
    assert "unrecognized arguments: --no-such-option" in result.stderr
    assert files(checkout) == before


@pytest.mark.parametrize("name", NEED_TORCH)
def test_a_missing_extra_is_one_line(checkout, name):
    result = run(checkout, "-c", WITHOUT_TORCH, f"tools/{name}")
    assert (result.returncode, result.stdout) == (2, "")
    assert result.stderr == ("course: torch is not installed; in the course's folder: "
                             f"pip install '.[{NEED_TORCH[name]}]'\n")


@pytest.mark.skipif(not (ROOT / "tests" / "grading").is_dir(),
                    reason="the students' edition has no tests/grading to seal")
def test_a_day_without_readings_is_refused(checkout):
    result = run(checkout, "tools/seal_readings.py", "77")
    assert result.returncode == 2
    assert result.stderr.startswith("seal_readings: no tests/grading/day77.py; days there are: ")
    assert ", 9, 10" in result.stderr
