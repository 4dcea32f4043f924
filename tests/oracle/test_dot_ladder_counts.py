"""The recorded instruction counts of the C rungs are what the kernels of today need."""

from __future__ import annotations

import platform
import shutil
import subprocess
import sys

import pytest

from course_lib.lab.dot_ladder import recorded_counts
from course_lib.paths import ROOT

TOOLS = ROOT / "tools" / "arm64"


@pytest.fixture
def ladder(monkeypatch):
    if platform.machine() != "x86_64" or not shutil.which("aarch64-linux-gnu-gcc"):
        pytest.skip("there is no aarch64-linux-gnu-gcc for this machine")
    monkeypatch.syspath_prepend(str(TOOLS))
    import ladder

    return ladder


def test_the_ladder_finds_what_it_counts(ladder):
    result = subprocess.run([sys.executable, str(TOOLS / "ladder.py"), "--check"],
                            capture_output=True, text=True)
    assert (result.returncode, result.stdout, result.stderr) == (0, "", "")


def test_the_compiled_rungs_come_out_again(ladder):
    table = recorded_counts()
    import counts

    compiler = counts.run("aarch64-linux-gnu-gcc", "--version").splitlines()[0]
    if shutil.which("qemu-aarch64") is None or compiler != table["compiler"]:
        pytest.skip("recorded with another compiler, which may choose other instructions")
    rungs = {name: ladder.RUNGS[name] for name in ("neon", "dotprod")}
    stored = [record for record in table["records"] if record["rung"] in rungs]
    assert ladder.count_rungs(rungs, None) == stored


def test_the_python_rungs_come_out_again(ladder):
    """Where tools/arm64_test.sh has made its arm64 Python; another Python has other counts."""
    table, python = recorded_counts(), ROOT / ".venv-arm64" / "python-cortex-a76"
    if not python.exists():
        pytest.skip("there is no .venv-arm64")
    import counts

    versions = counts.run(python, "-c", ladder.VERSIONS).strip()
    if versions != table["python"]:
        pytest.skip(f"recorded with Python and NumPy {table['python']}, here are {versions}")
    again = ladder.count_rungs({name: ladder.RUNGS[name] for name in ("python", "numpy")}, python)
    for new, old in zip(again, table["records"][:2], strict=True):
        for what in ("instructions", "loaded", "stored"):  # where memory comes from may differ
            assert new[what] == pytest.approx(old[what], rel=0.02), (new, old)
