"""The command line on awkward outputs: closed, full, not UTF-8, a reader that goes away."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from course_lib.paths import ROOT

COMMAND = "import sys; from course_lib.cli import main; sys.exit(main(sys.argv[1:]))"


def run(*argv: str, code: str = COMMAND, **options) -> subprocess.CompletedProcess:
    env = {**os.environ, "PYTHONPATH": str(ROOT), **options.pop("env", {})}
    return subprocess.run([sys.executable, "-c", code, *argv], env=env, stderr=subprocess.PIPE,
                          timeout=60, **options)


def test_a_closed_stdout_is_no_crash():
    result = run("help", code=COMMAND.replace("import sys;", "import sys; sys.stdout = None;"))
    assert (result.returncode, result.stderr) == (0, b"")


def test_a_closed_stderr_is_no_crash():
    code = COMMAND.replace("import sys;", "import sys; sys.stderr = None;")
    result = run("chat", "Where is Zara?", "--max-new-tokens", "1", code=code,
                 stdout=subprocess.PIPE)
    assert (result.returncode, result.stderr) == (0, b"") and result.stdout


def test_too_little_memory_is_one_line_and_2():
    code = COMMAND.replace("import sys;", "import sys; import course_lib.cli as cli; "
                           "cli.dispatch = lambda argv: bytearray(1 << 62);")
    result = run("help", code=code)
    assert result.returncode == 2
    assert result.stderr.startswith(b"course: there is not enough memory: close other programs")
    assert result.stderr.count(b"\n") == 1


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="this system has no /dev/full")
def test_a_full_disk_is_one_line_and_2():
    with open("/dev/full", "wb") as full:
        result = run("help", stdout=full)
    assert result.returncode == 2
    assert result.stderr == b"course: the output could not be written: no space left\n"


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="this system has no /dev/full")
def test_a_full_disk_under_stderr_is_2():
    code = COMMAND.replace("import sys;", "import sys; sys.stderr = open('/dev/full', 'w', 1);")
    assert run("no-such-verb", code=code).returncode == 2


def test_a_terminal_that_lacks_a_character_shows_another():
    code = ("import sys; from course_lib.cli import main; code = main(sys.argv[1:]); "
            "print('block 块 ⏎ 5 ≤ 6'); sys.exit(code)")
    result = run("help", code=code, env={"PYTHONIOENCODING": "ascii"}, stdout=subprocess.PIPE)
    assert result.returncode == 0
    assert result.stdout.splitlines()[-1] == b"block ? ? 5 ? 6"


def test_a_reader_that_goes_away_is_141():
    read, write = os.pipe()
    os.close(read)
    try:
        result = run("help", stdout=write)
    finally:
        os.close(write)
    assert (result.returncode, result.stderr) == (141, b"")
