"""The tests in a real browser: Debian's Chromium, driven by Playwright in an environment of its
own."""

from __future__ import annotations

import shutil
import sys

from course_lib.errors import CourseError
from course_lib.launcher import environment, side_environment
from course_lib.launcher.runner import BY_FILE, TESTS, Count, environ, pytest
from course_lib.launcher.side_environment import impossible
from course_lib.paths import ROOT

CHROMIUM = ("chromium", "chromium-browser", "google-chrome")


def find_chromium() -> str | None:
    """The path of a browser of the Chromium family, None where there is none."""
    return next(filter(None, map(shutil.which, CHROMIUM)), None)


def tests() -> Count:
    """Run tests/browser; the servers that they look at run in the course's own environment."""
    chromium = find_chromium()
    if chromium is None:
        return impossible("no Chromium is installed: sudo apt install chromium")
    folder = str(TESTS / "browser")
    try:
        python = browser_python()
    except CourseError as error:
        return impossible(str(error))
    # Without the other tests' settings, whose packages are not in that environment.
    return pytest(*BY_FILE, "--confcutdir", folder, folder, python=python, skips_fail=True,
                  env=environ(COURSE_CHROMIUM=chromium, COURSE_PYTHON=sys.executable))


def browser_python() -> str:
    """The Python with Playwright; CourseError where it cannot be made."""
    base = environment.requirements(str(ROOT), ())
    packages = environment.requirements(str(ROOT), ("browser",))[len(base):]
    packages += ["pytest", "pytest-xdist"]
    return side_environment.ensure("browser", sys.executable, packages)
