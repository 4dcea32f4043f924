"""The exponential function compiled for NEON and emulated gives the recorded digest."""

from __future__ import annotations

import shutil
import subprocess
import sys

import pytest

from course_lib.paths import ROOT

TOOL = [sys.executable, str(ROOT / "tools" / "arm64" / "exp_walk.py")]


@pytest.mark.skipif(not (shutil.which("aarch64-linux-gnu-gcc") and shutil.which("qemu-aarch64")),
                    reason="needs gcc-aarch64-linux-gnu and qemu-user")
def test_the_floats_from_minus_87_to_minus_64():
    done = subprocess.run([*TOOL, "133"], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0
    assert done.stdout == "stretches compared on emulated NEON: 1, that differ: none\n"


def test_a_stretch_that_is_not_there():
    done = subprocess.run([*TOOL, "268"], capture_output=True, text=True, timeout=60)
    assert done.returncode == 2 and "no stretch 268; there are 0 to 267" in done.stderr
