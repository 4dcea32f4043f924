"""The command line: verbs, errors in one sentence, exit codes, and how `course test` counts."""

from __future__ import annotations

import contextlib
import subprocess
import sys

import pytest

from course_lib import cli
from course_lib.commands import lab
from course_lib.commands import test as test_command
from course_lib.errors import CourseError
from course_lib.launcher import runner, suites, workspace
from course_lib.launcher.runner import Count
from course_lib.launcher.suites import Suite
from course_lib.paths import ROOT


def start(code: str, **options) -> subprocess.CompletedProcess:
    return subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True,
                          **options)


def test_help_names_every_verb_and_the_exit_codes(capsys):
    assert cli.main(["--help"]) == cli.main(["help"]) == cli.main([]) == 0
    text = capsys.readouterr().out
    for verb in cli.VERBS:
        assert f"  {verb} " in text and cli.help_of(verb) in text
    assert "exit codes: 0 done; 1 " in text


@pytest.mark.parametrize("verb", cli.VERBS)
def test_each_verb_has_its_help(verb, capsys):
    pytest.importorskip("IPython" if verb == "lab" else "numpy")
    assert cli.main([verb, "--help"]) == 0
    assert cli.main(["help", verb]) == 0
    text = capsys.readouterr().out
    assert text.count(f"usage: ./course {verb}") == 2 and cli.help_of(verb).split(",")[0] in text


def test_help_imports_nothing_heavy():
    heavy = {"numpy", "argparse", "pathlib", "tokenizers"}
    result = start("import sys; from course_lib.cli import main; main(['help']); "
                   f"print(*sorted({heavy} & set(sys.modules)))")
    assert result.stdout.splitlines()[-1] == ""


def test_starting_a_day_imports_nothing_heavy(tmp_path):
    heavy = {"numpy", "nbformat", "jupytext", "IPython"}
    result = start("import sys; from pathlib import Path; from course_lib import cli; "
                   "from course_lib.launcher import workspace; "
                   f"workspace.folder = lambda: Path({str(tmp_path)!r}); code = cli.main(['start', "
                   f"'9']); print(code, *sorted({heavy} & set(sys.modules)))")
    assert result.stdout.splitlines()[-1] == "0", result.stderr
    assert [path.name[:6] for path in tmp_path.iterdir()] == ["day09_"]


@pytest.mark.parametrize(("argv", "message"), [
    (["nedle"], "unknown verb 'nedle'; did you mean needle?"),
    (["--hlep"], "unknown option '--hlep'; did you mean --help?"),
    (["help", "strat"], "unknown verb 'strat'; did you mean start?"),
    (["help", "--hlep"], "unknown option '--hlep'; did you mean --help?"),
    (["zzzzzz"], "unknown verb 'zzzzzz'; there are lab, "),
    (["lab", "--prot", "8"], "lab: unknown option --prot; did you mean --port?"),
    (["lab", "--prot=8"], "lab: unknown option --prot; did you mean --port?"),
    (["lab", "--por", "8"], "lab: unknown option --por; did you mean --port?"),
    (["lab", "--port", "x"], "lab: argument --port: must be a number from 1 to 65535, not 'x'"),
    (["lab", "--port"], "lab: argument --port: expected one argument"),
    (["lab", "12"], "lab: unexpected argument '12'; see ./course lab --help"),
    (["test", "--only", "unti"], "test: argument --only: invalid choice: 'unti'"),
    (["test", "--backend", "abacus"], "COURSE_KERNEL=abacus is not a kernel name"),
])
def test_a_mistake_is_one_line_on_stderr_and_2(argv, message, capsys, monkeypatch):
    monkeypatch.setenv("COURSE_KERNEL", "numpy")
    assert cli.main(argv) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith(f"course: {message}")
    assert captured.err.count("\n") == 1


def raising(error):
    def dispatch(argv):
        raise error

    return dispatch


def test_errors_and_interrupts(monkeypatch, capsys):
    monkeypatch.setattr(cli, "dispatch", raising(CourseError("the file is gone; make it")))
    assert cli.main(["lab"]) == 2
    assert capsys.readouterr().err == "course: the file is gone; make it\n"
    monkeypatch.setattr(cli, "dispatch", raising(KeyboardInterrupt()))
    assert cli.main(["lab"]) == 130
    assert capsys.readouterr().err == "course: interrupted\n"
    monkeypatch.setattr(cli, "dispatch", raising(ZeroDivisionError()))
    with pytest.raises(ZeroDivisionError):
        cli.main(["lab"])


def test_a_reader_that_goes_away_is_no_traceback():
    code = ("import sys; from course_lib import cli; "
            "cli.usage = lambda: 'x' * 1000000; sys.exit(cli.main(['help']))")
    process = subprocess.Popen([sys.executable, "-c", code], cwd=ROOT, stdout=subprocess.PIPE,
                               stderr=subprocess.PIPE)
    assert process.stdout is not None and process.stderr is not None
    process.stdout.read(1)
    process.stdout.close()
    assert process.stderr.read() == b""
    process.stderr.close()
    assert process.wait() == 141


def test_every_folder_of_tests_belongs_to_a_suite():
    tests = ROOT / "tests"
    folders = {path.relative_to(tests).parts[0] for path in tests.glob("*/**/test_*.py")}
    assert folders <= {suite.name for suite in suites.SUITES}


def fake_pytest(monkeypatch, cases: str | None, code: int) -> None:
    """Let pytest end with `code` after writing a report of `cases`, or none."""

    def run(command, **options):
        assert options["cwd"] == ROOT and options["env"]["OMP_NUM_THREADS"] == "1"
        (report,) = [word.partition("=")[2] for word in command if word.startswith("--junitxml=")]
        if cases is not None:
            with open(report, "w") as file:
                file.write(f"<testsuites><testsuite>{cases}</testsuite></testsuites>")
        return subprocess.CompletedProcess(command, code)

    monkeypatch.setattr(runner.subprocess, "run", run)


PASS, FAIL = "<testcase name='a'/>", "<testcase name='b'><failure/></testcase>"
SKIP, ERROR = "<testcase><skipped/></testcase>", "<testcase><error/><system-out/></testcase>"


@pytest.mark.parametrize(("cases", "code", "expected"), [
    (PASS * 3 + FAIL + SKIP * 2, 1, Count(3, 1, 2)),
    (PASS + SKIP, 0, Count(1, 0, 1)),
    (PASS + ERROR + FAIL, 1, Count(1, 2, 0)),
    (SKIP, 0, Count(0, 0, 1)),
    ("", 5, Count(0, 1, 0)),  # nothing collected
    (None, 0, Count(0, 1, 0)),  # a test ended the process
    (PASS, 2, Count(1, 1, 0)),  # stopped before the end
])
def test_counting(monkeypatch, cases, code, expected):
    fake_pytest(monkeypatch, cases, code)
    assert runner.pytest("x") == expected


def test_a_skip_fails_where_none_is_allowed(monkeypatch):
    fake_pytest(monkeypatch, PASS + SKIP * 2, 0)
    assert runner.pytest("x", skips_fail=True) == Count(1, 2, 0)


def test_counting_a_real_run(tmp_path):
    (tmp_path / "test_it.py").write_text("def test_a(): pass\ndef test_b(): assert 0\n")
    assert runner.pytest(str(tmp_path), "-p", "no:xdist", "-p", "no:nbval") == Count(1, 1, 0)


def run_test_command(monkeypatch, capsys, *argv: str) -> tuple[int, list[str]]:
    chosen = [Suite("unit", "x", lambda: Count(3, 0, 1)), Suite("lint", "x", lambda: Count(0, 1)),
              Suite("property", "x", lambda: Count(note="there is no tests/property")),
              Suite("pythons", "x", lambda: Count(5), needs="full"),
              Suite("sanitize", "x", lambda: Count(100), needs="sanitize")]
    monkeypatch.setattr(test_command, "SUITES", chosen)
    monkeypatch.setenv("COURSE_KERNEL", "numpy")
    code = cli.main(["test", *argv])
    return code, capsys.readouterr().out.splitlines()


def test_the_closing_line_adds_up_and_a_failure_is_1(monkeypatch, capsys):
    code, lines = run_test_command(monkeypatch, capsys)
    assert code == 1 and lines[-1] == "3 passed, 1 failed, 1 skipped"
    assert [line.split()[0] for line in lines[-4:-1]] == ["unit", "lint", "property"]
    assert "there is no tests/property" in lines[-2]


def test_only_and_full_choose_suites(monkeypatch, capsys):
    code, lines = run_test_command(monkeypatch, capsys, "--only", "unit")
    assert code == 0 and lines[-1] == "3 passed, 0 failed, 1 skipped"
    code, lines = run_test_command(monkeypatch, capsys, "--only", "pythons", "--only", "unit")
    assert code == 0 and lines[-1] == "8 passed, 0 failed, 1 skipped"
    code, lines = run_test_command(monkeypatch, capsys, "--full")
    assert code == 1 and lines[-1] == "8 passed, 1 failed, 1 skipped"
    code, lines = run_test_command(monkeypatch, capsys, "--sanitize")
    assert code == 1 and lines[-1] == "103 passed, 1 failed, 1 skipped"
    code, lines = run_test_command(monkeypatch, capsys, "--full", "--sanitize")
    assert code == 1 and lines[-1] == "108 passed, 1 failed, 1 skipped"


def test_later_suites_are_prepared_while_optional_ones_run(monkeypatch, capsys):
    told: list[str] = []

    @contextlib.contextmanager
    def preparing(names):
        told.append(f"preparing {names}")
        yield
        told.append("the end")

    def suite(name, needs="", prepare=None):
        return Suite(name, name, lambda: told.append(name) or Count(1), needs, prepare)

    monkeypatch.setattr(test_command.ahead, "preparing", preparing)
    monkeypatch.setattr(test_command, "SUITES", [
        suite("unit"), suite("a", "full", int), suite("b", "full"), suite("c", "full", int),
        suite("d", "arm64", int)])
    monkeypatch.setenv("COURSE_KERNEL", "numpy")
    assert cli.main(["test", "--full"]) == 0
    assert told == ["unit", "preparing ['c']", "a", "b", "c", "the end"]


def test_a_folder_that_is_not_there_is_a_note_and_no_failure():
    count = suites.folder("no-such-folder")()
    assert count == Count(note="there is no tests/no-such-folder")


def test_copies_are_never_overwritten(tmp_path):
    source = tmp_path / "day09_x.ipynb"
    source.write_text("new")
    work = tmp_path / "home" / "work"
    assert workspace.copy_missing([source], work) == [work / "day09_x.ipynb"]
    (work / "day09_x.ipynb").write_text("mine")
    assert workspace.copy_missing([source], work) == []
    assert (work / "day09_x.ipynb").read_text() == "mine"
    assert not workspace.place(source, work / "day09_x.ipynb")
    assert [path.name for path in work.iterdir()] == ["day09_x.ipynb"]


def test_a_file_system_without_hard_links(tmp_path, monkeypatch):
    def no_links(*_):
        raise PermissionError(1, "not here")

    monkeypatch.setattr(workspace.os, "link", no_links)
    source = tmp_path / "day09_x.ipynb"
    source.write_text("new")
    assert workspace.place(source, tmp_path / "copy")
    assert (tmp_path / "copy").read_text() == "new"
    source.write_text("newer")
    assert not workspace.place(source, tmp_path / "copy")
    assert (tmp_path / "copy").read_text() == "new"


def test_a_work_folder_that_cannot_be_made_is_said(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(CourseError, match="cannot write to"):
        workspace.copy_missing([], tmp_path / "file" / "work")


def test_a_browser_only_where_there_is_a_screen(monkeypatch):
    monkeypatch.setattr(lab.sys, "platform", "linux")
    monkeypatch.delenv("DISPLAY", raising=False)
    monkeypatch.delenv("WAYLAND_DISPLAY", raising=False)
    assert not lab.wants_browser(False)
    monkeypatch.setenv("DISPLAY", ":0")
    assert lab.wants_browser(False) and not lab.wants_browser(True)
