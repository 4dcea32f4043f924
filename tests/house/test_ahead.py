"""What later suites install while earlier ones run: a failure stops nothing, and no process is
left."""

from __future__ import annotations

import os
import subprocess
import sys
import time

import pytest

from course_lib.errors import CourseError
from course_lib.launcher import ahead, arm64, browser, side_environment, suites
from course_lib.launcher.runner import Count
from course_lib.launcher.suites import Suite
from course_lib.paths import ROOT

PATIENCE = 60


def test_one_that_fails_leaves_the_others(monkeypatch):
    prepared = []

    def fails():
        prepared.append("one")
        raise CourseError("no network")

    monkeypatch.setattr(suites, "SUITES", (
        Suite("one", "", Count, "full", fails), Suite("two", "", Count, "full"),
        Suite("three", "", Count, "full", lambda: prepared.append("three")),
        Suite("not asked for", "", Count, "full", lambda: prepared.append("four"))))
    monkeypatch.setattr(ahead.signal, "signal", lambda *_: None)
    ahead.main(["one", "three"])
    assert prepared == ["one", "three"]


def test_every_suite_that_makes_an_environment_can_be_prepared():
    assert {suite.name: suite.prepare for suite in suites.SUITES if suite.prepare} == {
        "oracle-torch": side_environment.oracle_python, "pythons": side_environment.prepare_pythons,
        "browser": browser.browser_python, "arm64": arm64.prepare_ahead}


def test_nothing_to_prepare_starts_nothing(monkeypatch):
    monkeypatch.setattr(ahead.subprocess, "Popen", None)
    with ahead.preparing([]):
        pass


def test_it_ends_with_suites_that_are_interrupted_too(monkeypatch):
    ended = []
    monkeypatch.setattr(ahead.subprocess, "Popen", lambda *_, **options: "child")
    monkeypatch.setattr(ahead, "end", ended.append)
    with pytest.raises(KeyboardInterrupt), ahead.preparing(["slow"]):
        raise KeyboardInterrupt
    assert ended == ["child"]


STEP = """
import os, sys
from course_lib.launcher import ahead, setup_log, suites

def prepare():
    code = "import os, time; open({pid!r}, 'w').write(f'{{os.getpid()}} '); time.sleep(1000)"
    setup_log.run_step("x", [sys.executable, "-c", code], cwd=".", log={log!r}, keep_fd=1)

suites.SUITES = (suites.Suite("slow", "", None, "full", prepare),)
ahead.main(["slow"])
"""


def test_what_still_runs_ends_with_the_suites(tmp_path, monkeypatch):
    pid, start = tmp_path / "pid", subprocess.Popen
    code = STEP.format(pid=str(pid), log=str(tmp_path / "log"))

    def popen(command, **options):
        assert command == [sys.executable, "-m", "course_lib.launcher.ahead", "slow"]
        return start([sys.executable, "-c", code], **options,
                     env=os.environ | {"PYTHONPATH": str(ROOT)})

    monkeypatch.setattr(ahead.subprocess, "Popen", popen)
    with ahead.preparing(["slow"]):
        until = time.monotonic() + PATIENCE
        while not (pid.exists() and pid.read_text().endswith(" ")):
            assert time.monotonic() < until
            time.sleep(0.05)
        os.kill(int(pid.read_text()), 0)
    until = time.monotonic() + PATIENCE
    with pytest.raises(ProcessLookupError):
        while time.monotonic() < until:
            os.kill(int(pid.read_text()), 0)
            time.sleep(0.05)
