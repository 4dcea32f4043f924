"""The launcher on a small checkout of its own, with a real environment and without network.

The checkout's requirements are `pip`, which every new environment holds, and its setup.py says
what a test wants it to say about kernels.
"""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from course_lib import cli
from course_lib.errors import CourseError
from course_lib.launcher import environment, setup_log, state
from course_lib.paths import ROOT
from tests.signals import hear_ctrl_c

FILES = ("course", "course_lib/__init__.py", "course_lib/atomic.py", "course_lib/cli.py",
         "course_lib/errors.py",
         "course_lib/nearest.py", "course_lib/paths.py", "course_lib/launcher/__init__.py",
         "course_lib/launcher/environment.py", "course_lib/launcher/launch.py",
         "course_lib/launcher/setup_log.py", "course_lib/launcher/state.py",
         "course_lib/commands/__init__.py", "course_lib/commands/parser.py")
PATIENCE = 300  # seconds until a process counts as stuck, on a busy machine too
PYPROJECT = '[project]\ndependencies = ["pip"]\n\n[project.optional-dependencies]\ntest = ["pip"]\n'
COMMAND = '''
HELP = "a command that tells where it runs"


def add_arguments(parser):
    parser.add_argument("words", nargs="*")


def run(args):
    import json, os, sys, course_lib
    names = ("PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV")
    print(json.dumps({"words": args.words, "prefix": sys.prefix, "library": course_lib.__file__,
                      "cwd": os.getcwd(), "env": {n: os.environ.get(n) for n in names}}))
    return 7
'''
GOOD_SETUP = 'print("kernels: portable compiled for a test")\n'


def make_checkout(root: Path) -> Path:
    for name in FILES:
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(ROOT / name, root / name)
    for verb in cli.VERBS:
        (root / "course_lib" / "commands" / f"{verb}.py").write_text(COMMAND)
    (root / "pyproject.toml").write_text(PYPROJECT)
    (root / "constraints.txt").write_text("# Python 3.0 only\n")
    (root / "setup.py").write_text(GOOD_SETUP)
    (root / "kernels_pyx").mkdir()
    (root / "kernels_pyx" / "kernel.c").write_text("int x;\n")
    return root


def variables(**changes: str) -> dict[str, str]:
    kept = {k: v for k, v in os.environ.items()
            if not k.startswith(("PIP_", "COURSE_", "PYTHON", "VIRTUAL_ENV"))}
    return {**kept, "PIP_CONFIG_FILE": os.devnull, "PIP_NO_INDEX": "1", **changes}


def call(root: Path, *words: str, program: Path | None = None, cwd: Path | None = None,
         **changes: str) -> subprocess.CompletedProcess:
    command = [sys.executable, str(program or root / "course"), *words]
    return subprocess.run(command, cwd=cwd or root.parent, env=variables(**changes), text=True,
                          capture_output=True, stdin=subprocess.DEVNULL, timeout=PATIENCE)


def stamp_of(root: Path) -> dict:
    return json.loads((root / ".venv" / state.STAMP).read_text())


@pytest.fixture(scope="module")
def first(tmp_path_factory):
    root = make_checkout(tmp_path_factory.mktemp("course") / "课程 one")
    return root, call(root, "start", "a b", "--", "-c")


@pytest.fixture
def checkout(first):
    """The checkout with its environment finished; what a test changes is put back."""
    root, _ = first
    yield root
    (root / "pyproject.toml").write_text(PYPROJECT)
    (root / "setup.py").write_text(GOOD_SETUP)
    (root / "kernels_pyx" / "kernel.c").write_text("int x;\n")


def test_first_use_makes_the_environment_and_runs_the_command_in_it(first):
    root, result = first
    assert result.returncode == 7, result.stderr
    said = json.loads(result.stdout)
    assert said["words"] == ["a b", "-c"]
    assert said["prefix"] == str(root / ".venv")
    assert said["library"] == str(root / "course_lib" / "__init__.py")
    lines = result.stderr.splitlines()
    assert lines[0].startswith("course: setting up ") and lines[0].endswith(".venv.log")
    assert lines[-1].startswith("course: ready in ") and "portable" in lines[-1]
    assert lines[1:-1] == ["course: making the environment …", "course: installing …",
                           "course: compiling the kernels …"]


def test_second_call_says_nothing_and_starts_no_step(checkout):
    before = stamp_of(checkout)
    log = (checkout / ".venv.log").stat().st_mtime_ns
    result = call(checkout, "start")
    assert (result.returncode, result.stderr) == (7, "")
    assert stamp_of(checkout) == before
    assert (checkout / ".venv.log").stat().st_mtime_ns == log


def test_symlink_other_folder_and_foreign_modules(checkout, tmp_path):
    link = tmp_path / "mycourse"
    link.symlink_to(checkout / "course")
    foreign = tmp_path / "foreign"
    foreign.mkdir()
    for name in ("json", "hashlib", "course_lib", "re"):
        (foreign / f"{name}.py").write_text("raise SystemExit('the wrong module')\n")
    result = call(checkout, "start", program=link, cwd=foreign,
                  PYTHONPATH=str(foreign), PYTHONHOME=sys.base_prefix)
    assert result.returncode == 7, result.stderr
    said = json.loads(result.stdout)
    assert said["cwd"] == str(foreign)
    assert said["env"] == {"PYTHONPATH": None, "PYTHONHOME": None,
                           "VIRTUAL_ENV": str(checkout / ".venv")}


def test_any_program_of_the_environment_imports_the_library(checkout, tmp_path):
    code = "import course_lib; print(course_lib.__file__)"
    result = subprocess.run([state.python_of(str(checkout / ".venv")), "-c", code], cwd=tmp_path,
                            env=variables(), capture_output=True, text=True)
    assert result.stdout.strip() == str(checkout / "course_lib" / "__init__.py"), result.stderr


@pytest.mark.parametrize("name", ["plain", "two words"])
def test_a_moved_checkout_is_adapted_without_network(checkout, tmp_path, name):
    moved = tmp_path / name
    shutil.copytree(checkout, moved, symlinks=True)
    result = call(moved, "start")
    assert result.returncode == 7, result.stderr
    assert json.loads(result.stdout)["library"] == str(moved / "course_lib" / "__init__.py")
    assert stamp_of(moved)["env"] == str(moved / ".venv")
    assert "setting up" not in result.stderr
    for script in sorted((moved / ".venv" / "bin").glob("pip*")):
        content = script.read_bytes()
        assert os.fsencode(str(checkout)) not in content
        answer = subprocess.run([script, "--version"], capture_output=True, text=True)
        assert str(moved) in answer.stdout, answer.stderr


def test_changed_kernels_are_compiled_again_and_nothing_else_happens(checkout):
    before = stamp_of(checkout)
    (checkout / "kernels_pyx" / "kernel.c").write_text("int y;\n")
    result = call(checkout, "start")
    assert result.returncode == 7
    assert "ready in" in result.stderr and "setting up" not in result.stderr
    after = stamp_of(checkout)
    assert after.pop("kernels") != before.pop("kernels")
    assert after == before


def cut(path: Path) -> None:
    path.write_text("cut")


@pytest.mark.parametrize("harm", [Path.unlink, cut])
def test_kernels_whose_file_is_gone_or_cut_short_are_compiled_again(checkout, harm):
    built = checkout / "kernels_pyx" / "portable.so"
    (checkout / "setup.py").write_text(
        f"# so that it differs: {harm.__name__}\nopen({str(built)!r}, 'w').write('compiled')\n"
        "print('kernels: portable compiled for a test [files: kernels_pyx/portable.so]')\n")
    assert call(checkout, "start").stderr.endswith("kernels: portable compiled for a test\n")
    assert call(checkout, "start").stderr == ""
    harm(built)
    assert "ready in" in call(checkout, "start").stderr
    assert built.read_text() == "compiled"


def test_without_a_compiler_one_line_and_a_new_try_when_there_is_one(checkout, tmp_path):
    program = "compiler-of-a-test"
    (checkout / "setup.py").write_text(f'print("kernels: not built: none [missing: {program}]")\n')
    result = call(checkout, "start")
    assert result.returncode == 7
    assert result.stderr.splitlines()[:2] == ["course: compiling the kernels …",
                                              "course: kernels: not built: none"]
    assert call(checkout, "start").stderr == ""
    (tmp_path / program).write_text("#!/bin/sh\n")
    (tmp_path / program).chmod(0o755)
    again = call(checkout, "start", PATH=f"{os.environ['PATH']}{os.pathsep}{tmp_path}")
    assert "course: kernels: not built: none" in again.stderr


def test_required_kernels_that_do_not_compile_are_an_error(checkout):
    (checkout / "setup.py").write_text('print("kernels: not built: none [missing: x]")\n')
    assert call(checkout, "start").returncode == 7
    (checkout / "setup.py").write_text('raise SystemExit("error: kernels: not built: none")\n')
    result = call(checkout, "start", COURSE_REQUIRE_KERNELS="1")
    assert result.returncode == 2 and result.stdout == ""
    assert "kernels: not built: none" in result.stderr and ".venv.log" in result.stderr


def test_changed_requirements_are_installed(checkout):
    (checkout / "pyproject.toml").write_text("# a comment\n" + PYPROJECT)
    result = call(checkout, "start")
    assert result.returncode == 7 and "updating" in result.stderr
    assert stamp_of(checkout)["requirements"] == state.requirements_digest(str(checkout))
    (checkout / "pyproject.toml").write_text("# a comment\n" + PYPROJECT + "\n[tool.ruff]\nx = 1\n")
    assert call(checkout, "start").stderr == ""


def test_without_network_one_line_and_the_next_call_repairs(checkout, tmp_path):
    moved = tmp_path / "offline"
    shutil.copytree(checkout, moved, symlinks=True)
    (moved / "pyproject.toml").write_text(PYPROJECT.replace('["pip"]', '["no-such-package"]', 1))
    result = call(moved, "start", PIP_NO_INDEX="0", PIP_RETRIES="1",
                  PIP_INDEX_URL="http://127.0.0.1:9/simple")
    assert result.returncode == 2 and result.stdout == ""
    lines = result.stderr.splitlines()
    assert "package index cannot be reached" in lines[-1] and ".venv.log" in lines[-1]
    assert state.problem(str(moved), str(moved / ".venv")) == "incomplete"


def test_two_calls_at_once_take_turns(checkout):
    (checkout / "kernels_pyx" / "kernel.c").write_text("int z;\n")
    command = [sys.executable, str(checkout / "course"), "start"]
    with open(checkout / ".venv.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        process = subprocess.Popen(command, env=variables(), text=True, stdout=subprocess.PIPE,
                                   stderr=subprocess.PIPE)
        assert process.stderr is not None
        waiting = process.stderr.readline()
        assert "waiting for another ./course" in waiting and process.poll() is None
    out, err = process.communicate(timeout=PATIENCE)
    assert process.returncode == 7 and "ready in" in err and json.loads(out)


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_an_interrupted_step_leaves_no_process_and_the_next_call_goes_on(
        checkout, tmp_path, number, code):
    pids = tmp_path / "pids"
    (checkout / "setup.py").write_text(f"""
import os, subprocess, sys, time
print("the step runs", flush=True)
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(1000)"])
with open({str(pids)!r} + ".new", "w") as file:
    file.write(f"{{os.getpid()}} {{child.pid}}")
os.rename({str(pids)!r} + ".new", {str(pids)!r})
time.sleep(1000)
""")
    log = checkout / ".venv.log"
    log.write_text("")
    process = subprocess.Popen([sys.executable, str(checkout / "course"), "start"],
                               env=variables(), text=True, stderr=subprocess.PIPE,
                               preexec_fn=listen_to_interrupts)
    # The log tells that the launcher watches the step, not only that the step has begun.
    while process.poll() is None and not (pids.exists() and "the step runs" in log.read_text()):
        time.sleep(0.02)
    process.send_signal(number)
    try:
        _, err = process.communicate(timeout=PATIENCE)
        assert process.returncode == code, err
        deadline = time.monotonic() + PATIENCE  # a signalled child still takes a moment to end
        while any(alive(int(pid)) for pid in pids.read_text().split()):
            assert time.monotonic() < deadline, "a child of the interrupted step still runs"
            time.sleep(0.02)
    finally:
        process.kill()
        for pid in filter(alive, map(int, pids.read_text().split())):
            os.kill(pid, signal.SIGKILL)
    (checkout / "setup.py").write_text(GOOD_SETUP)
    assert call(checkout, "start").returncode == 7


def listen_to_interrupts() -> None:
    """A shell starts what runs in its background deaf to them."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def alive(pid: int) -> bool:
    """True if a process runs; one that has ended and waits to be collected does not."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return False
    return stat.rpartition(")")[2].split()[0] != "Z"


def test_an_incomplete_environment_is_made_anew(checkout, tmp_path, monkeypatch):
    moved = tmp_path / "broken"
    shutil.copytree(checkout, moved, symlinks=True)
    root, env = str(moved), str(moved / ".venv")
    os.remove(moved / ".venv" / state.STAMP)
    assert state.problem(root, env) == "incomplete"
    steps = []

    def fake_step(label, command, *rest):
        assert not (moved / ".venv" / "lib").exists() or label != "making the environment"
        steps.append(label)
        site = moved / ".venv" / "lib" / "python3.99" / "site-packages"
        site.mkdir(parents=True, exist_ok=True)
        return "kernels: portable compiled for a test\n"

    monkeypatch.setattr(environment, "step", fake_step)
    assert next(environment.repairs(root, env, str(tmp_path / "log"), 0)) == "incomplete"
    assert steps == ["making the environment", "installing", "compiling the kernels"]
    assert state.read_stamp(env) is not None


def test_another_python_under_the_environment_is_noticed(checkout, tmp_path):
    moved = tmp_path / "upgraded"
    shutil.copytree(checkout, moved, symlinks=True)
    python = moved / ".venv" / "bin" / "python"
    python.unlink()
    assert state.problem(str(moved), str(moved / ".venv")) == "python"
    python.symlink_to("/bin/sh")
    assert state.problem(str(moved), str(moved / ".venv")) == "python"


def test_help_and_mistakes_need_no_environment(tmp_path):
    root = make_checkout(tmp_path / "bare")
    helped = call(root, "help")
    assert helped.returncode == 0 and "a command that tells where it runs" in helped.stdout
    wrong = call(root, "strat")
    assert (wrong.returncode, wrong.stdout) == (2, "")
    assert wrong.stderr == "course: unknown verb 'strat'; did you mean start?\n"
    assert call(root, "doctor").returncode == 7
    assert not (root / ".venv").exists() and not (root / ".venv.lock").exists()


def test_a_read_only_checkout_uses_the_user_s_cache(tmp_path, monkeypatch):
    root = str(make_checkout(tmp_path / "shared"))
    monkeypatch.setattr(os, "access", lambda path, mode: path != root)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    env = state.find_environment(root)
    assert env.startswith(str(tmp_path / "cache" / state.CACHE_NAME))
    assert state.find_environment(root + "2") != env
    assert state.find_environment(str(tmp_path)) == str(tmp_path / ".venv")


def test_a_cache_that_cannot_be_written_is_said(tmp_path, monkeypatch, capsys):
    root = str(make_checkout(tmp_path / "shared"))
    (tmp_path / "file").write_text("")
    monkeypatch.setattr(os, "access", lambda path, mode: path != root)
    assert environment.prepare(root, str(tmp_path / "file" / "env")) == 2
    assert "set XDG_CACHE_HOME" in capsys.readouterr().err


def test_without_the_venv_module_the_package_is_named(tmp_path, monkeypatch, capsys):
    root = make_checkout(tmp_path / "bare")
    monkeypatch.setattr(environment, "find_spec", lambda name: None)
    monkeypatch.setattr(environment.shutil, "which", lambda name: "/usr/bin/" + name)
    assert environment.prepare(str(root), str(root / ".venv")) == 2
    version = f"{sys.version_info[0]}.{sys.version_info[1]}"
    assert capsys.readouterr().err == (
        f"course: Python {version} lacks its venv module; install it: "
        f"sudo apt install python{version}-venv\n")
    assert not (root / ".venv").exists()


def test_an_old_python_gets_a_sentence():
    code = ("import runpy, sys; sys.version_info = (3, 8, 0); sys.argv = ['./course', 'lab']; "
            f"runpy.run_path({str(ROOT / 'course')!r}, run_name='__main__')")
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True,
                            env={"PATH": "/nonexistent"})
    assert result.returncode == 1
    assert result.stderr.startswith("course: Python 3.10 or newer is needed, this is 3.8;")
    assert len(result.stderr.splitlines()) == 1


def test_the_launcher_parses_on_python_3_6():
    import ast

    ast.parse((ROOT / "course").read_text(encoding="utf-8"), feature_version=(3, 6))


def test_an_early_interrupt_is_quiet_and_waits_while_the_environments_python_starts(tmp_path):
    """`course` is started as launch.enter starts it, with a Ctrl-C that came before its first
    line; a stand-in for the launcher shows that it comes through there."""
    env = tmp_path / "env"
    (env / "bin").mkdir(parents=True)
    (env / "bin" / "python").symlink_to(sys.executable)
    root = tmp_path / "root"
    (root / "course_lib" / "launcher").mkdir(parents=True)
    shutil.copy(ROOT / "course", root)
    (root / "course_lib" / "launcher" / "launch.py").write_text("def main(*_): print('ran')\n")
    code = ("import os, signal\n"
            "from course_lib.launcher import launch\n"
            "launch.python_of = lambda env: env + '/bin/python'\n"
            "real = os.execve\n"
            "def execve(*arguments):\n"
            "    os.kill(os.getpid(), signal.SIGINT)\n"
            "    real(*arguments)\n"
            "os.execve = execve\n"
            f"launch.enter({str(root)!r}, {str(env)!r}, [])\n")
    result = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True,
                            preexec_fn=hear_ctrl_c)
    assert (result.returncode, result.stdout, result.stderr) == (130, "", "")


def test_exact_versions_that_do_not_fit_give_way_to_the_bounds(tmp_path, monkeypatch, capsys):
    calls = []

    def fake_step(label, command, *rest):
        calls.append(command)
        if "-c" in command:
            raise environment.NotInstallable("a conflict")
        return "kernels: portable compiled for a test\n"

    root = make_checkout(tmp_path / "root")
    (root / "constraints.txt").write_text(f"# Python 3.{sys.version_info[1]} only\n")
    (root / ".venv" / "lib" / "python3.99" / "site-packages").mkdir(parents=True)
    monkeypatch.setattr(environment, "step", fake_step)
    environment.install(str(root), str(root / ".venv"), "log", 0)
    assert ["-c" in command for command in calls] == [True, False, False]
    assert "constraints.txt does not fit Python" in capsys.readouterr().err


@pytest.mark.parametrize(("output", "cause"), [
    ("x NewConnectionError(...) y\nERROR: No matching distribution", "index cannot be reached"),
    ("OSError: [Errno 28] No space left on device", "no space left"),
    ("ERROR: first\nERROR: second\nnote: more", "ERROR: second"),
    ("ERROR: the cause\nERROR: for help visit https://example.org", "ERROR: the cause"),
    ("just words\n\n", "just words"),
    ("", "it printed nothing"),
])
def test_the_cause_of_a_failure(output, cause):
    assert cause in setup_log.explain(output)


def test_a_list_missing_from_pyproject_is_an_error(tmp_path):
    (tmp_path / "pyproject.toml").write_text("[project]\n")
    with pytest.raises(CourseError, match="dependencies"):
        environment.requirements(str(tmp_path))
