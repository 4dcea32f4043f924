"""The test suites behind `./course test`: what each runs and how its results are counted."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from xml.etree import ElementTree

from course_lib.paths import NOTEBOOKS, ROOT

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


@dataclass(frozen=True)
class Suite:
    """A named set of tests. `full`: only with --full or when named by --only."""

    name: str
    about: str
    run: Callable[[], Count]
    full: bool = False


def environ(**changes: str) -> dict[str, str]:
    """Return the environment of test processes: one BLAS thread each, because the suites bring
    their own parallelism and small products only lose by more."""
    return {**os.environ, "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", **changes}


def pytest(*arguments: str, python: str = sys.executable, env: dict[str, str] | None = None,
           skips_fail: bool = False) -> Count:
    """Run pytest, its output shown as it comes, and count its results.

    No test collected, or an end that its own counts do not explain, counts as one failure; with
    `skips_fail` so does every skipped test.
    """
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.xml"
        command = [python, "-m", "pytest", "-q", "--no-header", "-p", "no:cacheprovider"]
        command += [f"--junitxml={report}", *arguments]
        code = subprocess.run(command, cwd=ROOT, env=env or environ()).returncode
        count = read_report(report) if report.exists() else Count()
    if count == Count() or (code and not count.failed):
        print(f"pytest ended with {code}: no test ran, or it stopped before the end", flush=True)
        count += Count(failed=1)
    if skips_fail and count.skipped:
        print("no test of this suite may be skipped", flush=True)
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


def folder(name: str) -> Callable[[], Count]:
    """Return a suite that runs the tests of one folder."""

    def run() -> Count:
        path = TESTS / name
        return pytest(str(path)) if path.is_dir() else Count(note=f"there is no tests/{name}")

    return run


def command(*arguments: str) -> Count:
    """Run a tool; its exit code is one passed or one failed test."""
    result = subprocess.run(arguments, cwd=ROOT, env=environ(), text=True, stdout=subprocess.PIPE,
                            stderr=subprocess.STDOUT)
    if result.returncode == 0:
        return Count(passed=1)
    print(result.stdout, flush=True)
    return Count(failed=1)


def lint() -> Count:
    from course_lib.classroom.lint import lint_all

    cache = Path(sys.prefix) / "cache"
    count = command(sys.executable, "-m", "ruff", "check", f"--cache-dir={cache / 'ruff'}", ".")
    count += command(sys.executable, "-m", "mypy", f"--cache-dir={cache / 'mypy'}")
    problems = lint_all()
    print(*problems, sep="\n", end="\n" if problems else "", flush=True)
    return count + (Count(failed=1) if problems else Count(passed=1))


def build_check() -> Count:
    from course_lib import cli

    return Count(failed=1) if cli.main(["build", "--check"]) else Count(passed=1)


def nbval(backend: str | None = None) -> Count:
    """Run every notebook and compare its outputs with the stored ones."""
    if not list(NOTEBOOKS.glob("*.ipynb")):
        return Count(failed=1, note="no notebook is built; run ./course build")
    changes = {"JUPYTER_PREFER_ENV_PATH": "1"} | ({"COURSE_KERNEL": backend} if backend else {})
    workers = str(min(2, os.cpu_count() or 1))
    return pytest("--nbval", "--nbval-current-env", "--nbval-cell-timeout", "120", "-n", workers,
                  "--dist", "loadscope", str(NOTEBOOKS), env=environ(**changes))


def oracle_torch() -> Count:
    from course_lib import side_environment

    return side_environment.oracle_tests()


def pythons() -> Count:
    from course_lib import side_environment

    return side_environment.other_pythons()


SUITES = (
    Suite("unit", "tests/unit", folder("unit")),
    Suite("property", "tests/property", folder("property")),
    Suite("oracle", "tests/oracle against stored results", folder("oracle")),
    Suite("lint", "ruff, mypy, the rules of a lesson", lint),
    Suite("build", "notebooks match their sources", build_check),
    Suite("notebook", "tests/notebook", folder("notebook")),
    Suite("nbval", "every notebook's outputs", nbval),
    Suite("grading", "tests/grading", folder("grading")),
    Suite("nbval-numpy", "every notebook's outputs on NumPy", lambda: nbval("numpy"), full=True),
    Suite("oracle-torch", "tests/oracle against torch, in .venv-oracle", oracle_torch, full=True),
    Suite("pythons", "tests/unit on other Pythons, in .venv-py3.x", pythons, full=True),
)
"""Fast ones first."""
