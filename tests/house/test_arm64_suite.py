"""The emulated arm64 suite, without an emulator: what it would run, where, and what it says when
a machine cannot."""

from __future__ import annotations

import json
import os
import platform
import runpy
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from course_lib.launcher import arm64, state
from course_lib.launcher.runner import TESTS, Count
from course_lib.paths import NOTEBOOKS, ROOT

PREPARE = ROOT / "tools" / "arm64" / "prepare.sh"
needs_cross_compiler = pytest.mark.skipif(shutil.which("aarch64-linux-gnu-gcc") is None,
                                          reason="there is no aarch64-linux-gnu-gcc")
needs_linux_x86 = pytest.mark.skipif(
    (platform.system(), platform.machine()) != ("Linux", "x86_64"),
    reason="emulated arm64 is for Linux on x86-64")


@pytest.fixture
def runs(monkeypatch):
    """Calls of pytest are recorded instead of run: (arguments, python, environment)."""
    seen = []

    def fake_pytest(*arguments, python=sys.executable, env=None, output=None):
        seen.append((arguments, python, env))
        print("output of", python, file=output)
        return Count(passed=1)

    monkeypatch.setattr(arm64, "pytest", fake_pytest)
    return seen


def prepared_with(monkeypatch, code: int, stderr: str) -> list:
    """Let prepare.sh end with `code`; return the list of its commands."""
    commands = []

    def fake_run(command, **options):
        commands.append(command)
        return subprocess.CompletedProcess(command, code, stderr=stderr)

    monkeypatch.setattr(arm64.subprocess, "run", fake_run)
    return commands


def test_every_job_runs_and_is_counted(runs, monkeypatch, tmp_path, capsys):
    monkeypatch.setenv("COURSE_KERNEL", "portable")
    monkeypatch.setattr(state, "find_environment", lambda root: str(tmp_path / ".venv"))
    commands = prepared_with(monkeypatch, 0, "")
    folder = f"{tmp_path}/.venv-arm64"
    jobs = arm64.jobs(folder)
    assert arm64.tests() == Count(passed=len(jobs))
    assert commands == [[str(PREPARE), folder, sys.executable]]
    output = capsys.readouterr().out
    assert all(f"-- {job.title}\noutput of " in output for job in jobs)

    emulated = [run for run in runs if run[1] != sys.executable]
    assert {python for _, python, _ in emulated} == {f"{folder}/python-cortex-a76",
                                                     f"{folder}/python-cortex-a72"}
    for arguments, python, env in emulated:
        assert arguments[:2] == ("-p", "emulated") and "COURSE_KERNEL" not in env
        expected = "dotprod" if python.endswith("a76") else "neon"
        assert env["COURSE_EXPECT_VARIANT"] == expected and env["COURSE_REQUIRE_KERNELS"] == "1"
    for arguments, python, env in runs:
        if python == sys.executable:  # Jupyter's own side runs here
            assert "--nbval" in arguments and env["JUPYTER_PATH"] == f"{folder}/jupyter"
            assert "COURSE_KERNEL" not in env and Path(arguments[-1]).name in arm64.DAYS


def test_each_test_file_belongs_to_one_job_or_is_named_as_left_out():
    kernels = set(arm64.kernel_tests())
    assert all(Path(path).exists() for path in kernels)
    left_out = {path for name in arm64.NOT_EMULATED for path in TESTS.glob(f"*/{name}")}
    assert not left_out & {Path(path) for path in kernels}
    for name in arm64.NOT_EMULATED:
        assert list(TESTS.glob(f"*/{name}")), name
    for pattern in arm64.KERNEL_TESTS:
        assert list(TESTS.glob(pattern)), pattern
    for test in arm64.TOO_LONG:
        path, name = test.split("[")[0].split("::")
        assert f"\ndef {name}(" in (TESTS / path).read_text(encoding="utf-8"), test


def test_variants_that_both_cpus_have_run_where_an_instruction_too_many_is_illegal(runs):
    for job in arm64.jobs("folder"):
        arm64.run_job(job)
    chosen = {python.removeprefix("folder/python-"): arguments[arguments.index("-k") + 1]
              for arguments, python, _ in runs if "-k" in arguments}
    assert chosen == {"cortex-a72": "", "cortex-a76": "test_variant or not (neon or portable)"}


@pytest.mark.parametrize("day", arm64.DAYS)
def test_a_notebook_loses_the_cells_that_are_named_and_no_more(day):
    before = json.loads((NOTEBOOKS / day).read_text(encoding="utf-8"))["cells"]
    after = json.loads(arm64.without_long_cells(day))["cells"]
    gone = ["".join(cell["source"]) for cell in before if cell not in after]
    assert len(gone) <= 8 and len(after) == len(before) - len(gone)
    for mark in arm64.DAYS[day]:
        assert any(mark in source for source in gone), mark
    assert all(cell["cell_type"] == "code" for cell in before if cell not in after)


@pytest.mark.parametrize("ci, expected", [(None, "skipped"), ("true", "failed")])
def test_a_machine_that_cannot_skips_with_the_reason_and_fails_in_ci(ci, expected, monkeypatch,
                                                                     tmp_path, capsys):
    monkeypatch.delenv("CI", raising=False)
    if ci:
        monkeypatch.setenv("CI", ci)
    prepared_with(monkeypatch, arm64.CANNOT, "arm64: a step\nthere is no apt\n")
    assert arm64.tests() == Count(**{expected: 1}, note="there is no apt")
    assert "not run: there is no apt" in capsys.readouterr().out


def test_a_preparation_that_fails_is_a_failure_everywhere(monkeypatch):
    monkeypatch.delenv("CI", raising=False)
    prepared_with(monkeypatch, 1, "unpacking failed; log: here\n")
    assert arm64.tests() == Count(failed=1, note="unpacking failed; log: here")
    prepared_with(monkeypatch, 1, "")
    assert arm64.tests() == Count(failed=1, note="it ended without a word")


@pytest.mark.parametrize("missing", [None, "qemu-aarch64", "aarch64-linux-gnu-gcc"])
def test_no_program_is_installed_while_other_suites_run(monkeypatch, missing):
    monkeypatch.setattr(arm64.shutil, "which", lambda name: None if name == missing else "/bin/it")
    commands = prepared_with(monkeypatch, 0, "")
    arm64.prepare_ahead()
    assert len(commands) == (missing is None)


@pytest.fixture
def programs(tmp_path):
    """A folder of programs for PATH: what prepare.sh calls before it needs the network."""
    folder = tmp_path / "bin"
    folder.mkdir()
    for name in ("bash", "cat", "dirname", "env", "flock", "id", "mkdir", "mv", "realpath", "rm",
                 "sed", "tail", "uname"):
        found = shutil.which(name)
        if found is None:
            pytest.skip(f"this machine has no {name}")
        (folder / name).symlink_to(found)
    return folder


def add_program(folder: Path, name: str, script: str = "exit 0") -> None:
    path = folder / name
    path.unlink(missing_ok=True)
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)


def prepare(folder: Path, programs: Path, python: str = sys.executable):
    environ = {k: v for k, v in os.environ.items() if k not in ("CROSS_CC", "APT_CONFIG")}
    return subprocess.run(["bash", str(PREPARE), str(folder), python], text=True,
                          capture_output=True, env=environ | {"PATH": str(programs)})


@needs_linux_x86
def test_prepare_says_in_one_line_why_it_cannot(tmp_path, programs):
    target = tmp_path / "arm64"
    result = prepare(target, programs)
    assert (result.returncode, result.stderr) == (
        arm64.CANNOT, "the arm64 Python comes from Debian's or Ubuntu's packages, and there is no "
                      "apt\n")

    add_program(programs, "dpkg-deb")
    add_program(programs, "apt-get")
    add_program(programs, "id", "echo 1000")
    result = prepare(target, programs)
    assert (result.returncode, result.stderr) == (
        arm64.CANNOT, "missing: sudo apt install gcc-aarch64-linux-gnu libc6-dev-arm64-cross "
                      "qemu-user\n")

    add_program(programs, "aarch64-linux-gnu-gcc")
    add_program(programs, "qemu-aarch64")
    for script in ("exit 100", "echo python3"):  # no such package; one of no known form
        add_program(programs, "apt-cache", script)
        result = prepare(target, programs)
        assert (result.returncode, result.stderr.splitlines()[-1]) == (
            arm64.CANNOT, "this machine's package sources have no arm64 python3")

    add_program(programs, "apt-get", "echo no route; exit 100")
    result = prepare(target, programs)
    assert result.returncode == 1 and result.stderr.splitlines()[-2:] == [
        "no route", f"apt-get update for arm64 failed; log: {target}/log"]


@needs_linux_x86
def test_prepare_elsewhere_and_with_wrong_arguments(tmp_path, programs):
    target = tmp_path / "arm64"
    result = prepare(target, programs, "no-such-python")
    assert (result.returncode, result.stderr) == (2, "no-such-python is no program\n")
    add_program(programs, "uname", '[ "$1" = -s ] && echo Linux || echo aarch64')
    result = prepare(target, programs)
    assert (result.returncode, result.stderr) == (
        arm64.CANNOT, "emulated arm64 needs Linux on x86-64, and this is Linux on aarch64\n")
    assert not target.exists()


def check_counts(root: Path, **environ: str) -> subprocess.CompletedProcess:
    return subprocess.run([sys.executable, str(root / "tools" / "arm64" / "counts.py"), "--check"],
                          capture_output=True, text=True, env=os.environ | environ)


@needs_cross_compiler
def test_counts_find_the_loops_that_they_count():
    result = check_counts(ROOT)
    assert (result.returncode, result.stdout, result.stderr) == (0, "", "")


@needs_cross_compiler
@pytest.mark.parametrize("old, new, said", [
    ("sums_of_run", "sums_of_rows", "implicit declaration of function ‘sums_of_run’"),
    ("static void sums_of_run(float *acc,", "static void sums_of_run(ptrdiff_t more, float *acc,",
     "makes integer from pointer without a cast"),
])
def test_counts_say_in_one_sentence_that_a_loop_changed(tmp_path, old, new, said):
    shutil.copy(ROOT / "setup.py", tmp_path)
    for name in ("kernels_pyx/c", "tools/arm64"):
        shutil.copytree(ROOT / name, tmp_path / name)
    for path in (tmp_path / "kernels_pyx" / "c").glob("attention*.c"):
        path.write_text(path.read_text().replace(old, new))
    result = check_counts(tmp_path, LC_ALL="C.UTF-8")
    assert result.returncode == 1 and said in result.stderr
    assert result.stderr.startswith("counts.py: the kernels have changed and ")
    assert len(result.stderr.splitlines()) == 1


def test_counts_name_the_packages_that_are_missing():
    result = check_counts(ROOT, PATH=os.devnull)
    assert result.returncode == 1
    assert result.stderr.startswith("counts.py: there is no aarch64-linux-gnu-gcc; sudo apt ")


def test_counts_join_a_block_that_a_page_cuts():
    counts = runpy.run_path(str(ROOT / "tools" / "arm64" / "counts.py"))
    rows = counts["MANY"] - counts["FEW"]
    cut = {(0xF80, 32): rows, (0x1000, 45): rows, (0x10B4, 60): rows // 4, (0x3000, 70): rows}
    assert counts["hottest"]({}, cut) == (0xF80, 77, 1.0)
    assert counts["hottest"]({(0x3000, 70): rows}, cut | {(0x3000, 70): 3 * rows}) == (
        0x3000, 70, 2.0)
