"""A browser for each test, and servers of the course's own environment.

Screenshots go to ``tests/browser/screenshots``, which git ignores.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest

playwright = pytest.importorskip("playwright.sync_api")

ROOT = Path(__file__).resolve().parents[2]
SHOTS = Path(__file__).parent / "screenshots"


@pytest.fixture(scope="session")
def chromium():
    with playwright.sync_playwright() as driver:
        browser = driver.chromium.launch(
            executable_path=os.environ.get("COURSE_CHROMIUM", "/usr/bin/chromium"),
            args=["--no-sandbox"])  # Chromium's own sandbox refuses to run as root
        yield browser
        browser.close()


@pytest.fixture
def page(chromium, request):
    """A page that fails its test where a script of it failed; a screenshot is kept of its end."""
    context = chromium.new_context(viewport={"width": 1280, "height": 800})
    page, errors = context.new_page(), []
    page.on("pageerror", lambda error: errors.append(str(error)))
    page.set_default_timeout(15_000)
    yield page
    SHOTS.mkdir(exist_ok=True)
    page.screenshot(path=str(SHOTS / (re.sub(r"\W+", "_", request.node.name) + ".png")))
    context.close()
    assert errors == []


@pytest.fixture
def course():
    """Start ``./course WORDS`` and wait for a line that matches; everything ends with the test."""
    running = []

    def start(words, pattern, seconds=60):
        code = "import sys; from course_lib import cli; sys.exit(cli.main(sys.argv[1:]))"
        process = subprocess.Popen(
            [os.environ.get("COURSE_PYTHON", sys.executable), "-u", "-c", code, *words], cwd=ROOT,
            env={**os.environ, "PYTHONPATH": str(ROOT)}, stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT, text=True)
        running.append(process)
        until, seen = time.monotonic() + seconds, []
        for line in process.stdout:
            seen.append(line)
            if match := re.search(pattern, line):
                return match, process
            assert time.monotonic() < until, seen
        raise AssertionError(f"ended with {process.wait()}: {seen}")

    yield start
    for process in running:
        process.terminate()
        try:
            process.wait(10)
        except subprocess.TimeoutExpired:
            process.kill()
        process.stdout.close()
