"""The test suites behind `./course test`: what each runs."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

from course_lib.launcher import arm64, browser, kernel_builds, side_environment
from course_lib.launcher.runner import BY_FILE, ONE_BY_ONE, TESTS, WORKERS, Count, environ, pytest
from course_lib.paths import NOTEBOOKS, ROOT


@dataclass(frozen=True)
class Suite:
    """A named set of tests. `needs`: runs only with this option of `./course test` ("full" for
    --full), or when named by --only. `prepare`: makes what it installs, if it can."""

    name: str
    about: str
    run: Callable[[], Count]
    needs: str = ""
    prepare: Callable[[], object] | None = None


def folder(name: str, *arguments: str) -> Callable[[], Count]:
    """Return a suite that runs the tests of one folder, with more arguments for pytest."""

    def run() -> Count:
        path = TESTS / name
        if not path.is_dir():
            return Count(note=f"there is no tests/{name}")
        return pytest(*arguments, str(path))

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


PORTABLE_DAYS = (5, 9, 10)
"""Days about the kernels themselves, which plain C must run as they are stored too."""


def nbval(backend: str | None = None, days: Iterable[int] | None = None) -> Count:
    """Run every notebook, or those of some days, and compare its outputs with the stored ones."""
    patterns = ["*.ipynb"] if days is None else [f"day{day:02d}_*.ipynb" for day in days]
    notebooks = [str(path) for pattern in patterns for path in sorted(NOTEBOOKS.glob(pattern))]
    if not notebooks:
        return Count(failed=1, note="no notebook is built; run ./course build")
    changes = {"JUPYTER_PREFER_ENV_PATH": "1"} | ({"COURSE_KERNEL": backend} if backend else {})
    return pytest("--nbval", "--nbval-current-env", "--nbval-cell-timeout", "120", *WORKERS,
                  "--dist", "loadscope", *notebooks, env=environ(**changes))


SUITES = (
    Suite("unit", "tests/unit", folder("unit", *BY_FILE)),
    Suite("show", "tests/show: explorers and pictures", folder("show", *BY_FILE)),
    Suite("house", "tests/house: set-up, launcher, packaging, tools", folder("house", *BY_FILE)),
    Suite("property", "tests/property", folder("property", *BY_FILE)),
    Suite("oracle", "tests/oracle against stored results", folder("oracle", *BY_FILE)),
    Suite("lint", "ruff, mypy, the rules of a lesson", lint),
    Suite("build", "notebooks match their sources", build_check),
    Suite("notebook", "tests/notebook", folder("notebook", *BY_FILE)),
    Suite("nbval", "every notebook's outputs", nbval),
    Suite("grading", "tests/grading", folder("grading", *ONE_BY_ONE)),
    Suite("submissions", "tests/submissions: a folder of work, honest and hostile, graded",
          folder("submissions"), "full"),
    Suite("builds", "tests/builds: the kernels by other compilers", folder("builds", *ONE_BY_ONE),
          "full"),
    Suite("nbval-numpy", "every notebook's outputs on NumPy", lambda: nbval("numpy"), "full"),
    Suite("nbval-portable", "the outputs of the days about kernels on plain C",
          lambda: nbval("portable", PORTABLE_DAYS), "full"),
    Suite("oracle-torch", "tests/oracle against torch, in .venv-oracle",
          side_environment.oracle_tests, "full", side_environment.oracle_python),
    Suite("pythons", "tests/unit and the launcher on the oldest and newest Python, in .venv-py3.x",
          side_environment.other_pythons, "full", side_environment.prepare_pythons),
    Suite("browser", "tests/browser: pages in Chromium, by Playwright in .venv-browser",
          browser.tests, "browser", browser.browser_python),
    Suite("sanitize", "the kernels under address and undefined-behaviour sanitizers",
          kernel_builds.sanitized, "sanitize"),
    Suite("arm64", "the kernels on emulated arm64, in .venv-arm64", arm64.tests, "arm64",
          arm64.prepare_ahead),
)
"""Fast ones first."""
