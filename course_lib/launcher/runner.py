"""Run pytest in a child and count its results."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import IO
from xml.etree import ElementTree

from course_lib.paths import ROOT

TESTS = ROOT / "tests"


@dataclass(frozen=True)
class Count:
    """Results of a suite; `note` says why nothing ran."""

    passed: int = 0
    failed: int = 0
    skipped: int = 0
    note: str = ""

    def __add__(self, other: Count) -> Count:
        return Count(self.passed + other.passed, self.failed + other.failed,
                     self.skipped + other.skipped)

    def __str__(self) -> str:
        return f"{self.passed} passed, {self.failed} failed, {self.skipped} skipped"


ONE_THREAD = {"COURSE_THREADS": "1", "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
"""For a process beside others: kernels and BLAS keep to one thread."""


WORKERS = ("-n", str(min(2, os.cpu_count() or 1)))
"""Two test processes: more would not fit a board's memory beside a browser."""

BY_FILE = (*WORKERS, "--dist", "loadfile")
"""A file's tests stay in one process, where they share what they load."""

ONE_BY_ONE = (*WORKERS, "--dist", "worksteal")
"""Every test goes to the process that is free."""


def environ(**changes: str) -> dict[str, str]:
    """Return the environment of test processes: one thread each, because the suites bring their
    own parallelism and small products only lose by more."""
    return {**os.environ, **ONE_THREAD, **changes}


def pytest(*arguments: str, python: str = sys.executable, env: dict[str, str] | None = None,
           skips_fail: bool = False, output: IO[str] | None = None) -> Count:
    """Run pytest, its output shown as it comes or written to `output`, and count its results.

    No test collected, or an end that its own counts do not explain, counts as one failure; with
    `skips_fail` so does every skipped test.
    """
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.xml"
        command = [python, "-m", "pytest", "-q", "--no-header", "-p", "no:cacheprovider"]
        command += [f"--junitxml={report}", *arguments]
        code = subprocess.run(command, cwd=ROOT, env=env or environ(), stdout=output,
                              stderr=output and subprocess.STDOUT).returncode
        count = read_report(report) if report.exists() else Count()
    if count == Count() or (code and not count.failed):
        print(f"pytest ended with {code}: no test ran, or it stopped before the end", file=output,
              flush=True)
        count += Count(failed=1)
    if skips_fail and count.skipped:
        print("no test of this suite may be skipped", file=output, flush=True)
        count = Count(count.passed, count.failed + count.skipped)
    return count


def read_report(report: Path) -> Count:
    """Count the cases of a JUnit file; like pytest, a failure and an error in the same test's
    teardown as two."""
    count = Count()
    for case in ElementTree.parse(report).getroot().iter("testcase"):
        kinds = {child.tag for child in case}
        if kinds & {"failure", "error"}:
            count += Count(failed=1)
        elif "skipped" in kinds:
            count += Count(skipped=1)
        else:
            count += Count(passed=1)
    return count
