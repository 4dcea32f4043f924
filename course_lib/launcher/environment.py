"""Making and repairing the course's environment: a venv with the requirements, a path file that
lets any notebook import course_lib, and the compiled kernels.

Standard library only: it runs on a bare Python. The stamp is written last, so an interrupted
set-up is known by its absence; a lock keeps two calls apart.
"""

from __future__ import annotations

import ast
import fcntl
import json
import os
import platform
import re
import shutil
import signal
import sys
import time
from contextlib import contextmanager
from importlib.util import find_spec

from course_lib.atomic import write_atomically
from course_lib.errors import CourseError
from course_lib.launcher import state
from course_lib.launcher.setup_log import NoNetwork, StepFailed, run_step

PTH = "course_lib.pth"


class NotInstallable(CourseError):
    """A step failed for another reason than the network."""


def prepare(root: str, env: str) -> int:
    """Make or repair the environment `env` of the checkout `root`; return an exit code.

    Says on stderr what it does; every failure is one line with the remedy and the log's path.
    """
    signals = (signal.SIGTERM, signal.SIGHUP)
    previous = {s: signal.signal(s, lambda number, _: sys.exit(128 + number)) for s in signals}
    log = env + ".log"
    try:
        os.makedirs(os.path.dirname(env), exist_ok=True)
        with locked(env + ".lock") as lock:
            start = time.monotonic()
            done = [reason for reason in repairs(root, env, log, lock)]
            if done:
                stamp = state.read_stamp(env) or {}
                print(
                    f"course: ready in {time.monotonic() - start:.0f} s; {stamp['kernels_line']}",
                    file=sys.stderr,
                )
        return 0
    except KeyboardInterrupt:
        print("course: interrupted; the next call goes on with the set-up", file=sys.stderr)
        return 130
    except CourseError as error:
        print(f"course: {error}", file=sys.stderr)
        return 2
    except OSError as error:
        why = f"cannot set up {env} ({error.strerror or error})"
        if not os.access(root, os.W_OK):
            why += "; the checkout is read-only, so set XDG_CACHE_HOME to a folder you can write"
        print(f"course: {why}", file=sys.stderr)
        return 2
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


@contextmanager
def locked(path: str):
    """Hold an exclusive lock on `path`; yield its file descriptor.

    Child processes inherit the descriptor, so a pip that outlives a killed launcher keeps the lock.
    """
    fd = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
    try:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            log = path.removesuffix(".lock") + ".log"
            print(f"course: waiting for another ./course that is setting up; log: {log}",
                  file=sys.stderr)
            fcntl.flock(fd, fcntl.LOCK_EX)
        yield fd
    finally:
        os.close(fd)


def repairs(root: str, env: str, log: str, lock: int):
    """Do what `state.problem` asks for until it asks for nothing; yield each reason."""
    for _ in range(5):
        reason = state.problem(root, env)
        if reason is None:
            return
        if reason in ("incomplete", "python"):
            create(root, env, log, lock)
        elif reason == "moved":
            relocate(root, env)
        elif reason == "requirements":
            announce(f"updating {env}", log)
            os.remove(os.path.join(env, state.STAMP))
            install(root, env, log, lock)
        else:
            write_stamp(root, env, build_kernels(root, env, log, lock))
        yield reason
    raise CourseError(f"{env} cannot be repaired; remove it and call again")


def create(root: str, env: str, log: str, lock: int) -> None:
    """Make the environment from nothing."""
    version = f"{sys.version_info[0]}.{sys.version_info[1]}"
    if not has_venv():
        remedy = (
            f"sudo apt install python{version}-venv"
            if shutil.which("apt-get")
            else f"the package of your system that holds Python {version}'s venv and ensurepip"
        )
        raise CourseError(f"Python {version} lacks its venv module; install it: {remedy}")
    size = "100 MB of downloads, 600 MB on disk"
    announce(f"setting up {env} (once; a few minutes, about {size})", log)
    if os.path.lexists(env):
        shutil.rmtree(env) if not os.path.islink(env) else os.remove(env)
    with open(log, "wb"):
        pass
    step("making the environment", [sys.executable, "-I", "-m", "venv", env], root, log, lock)
    install(root, env, log, lock)


def has_venv() -> bool:
    """True if this Python can make environments; Debian ships these two modules apart. (An empty
    folder left of one has a spec too, without an origin.)"""
    specs = [find_spec(name) for name in ("venv", "ensurepip")]
    return all(spec is not None and spec.origin is not None for spec in specs)


def announce(message: str, log: str) -> None:
    print(f"course: {message}; log: {log}", file=sys.stderr, flush=True)


def install(root: str, env: str, log: str, lock: int) -> None:
    """Install the requirements, write the path file, build the kernels, write the stamp."""
    python = state.python_of(env)
    pip = [python, "-m", "pip", "install", "--disable-pip-version-check", "--no-input"]
    pip += ["--progress-bar", "off", "--prefer-binary"]
    exact = constraints(root)
    try:
        step("installing", [*pip, *exact, *requirements(root)], root, log, lock)
    except NotInstallable:
        # An older patch release of the same Python can be too old for one of the exact versions.
        if not exact:
            raise
        print(f"course: constraints.txt does not fit Python {platform.python_version()}; "
              "installing the newest versions instead", file=sys.stderr)
        step("installing", [*pip, *requirements(root)], root, log, lock)
    write_path_file(root, env)
    write_stamp(root, env, build_kernels(root, env, log, lock))


def requirements(root: str, extras: tuple[str, ...] = ("test",)) -> list[str]:
    """Return the requirements of pyproject.toml: dependencies plus the named extras.

    Python 3.10 has no tomllib; the lists are written so that they are Python literals too.
    """
    with open(os.path.join(root, "pyproject.toml"), encoding="utf-8") as file:
        text = file.read()
    found: list[str] = []
    for name in ("dependencies", *extras):
        match = re.search(rf"^{name} = (\[.*?\])$", text, re.MULTILINE | re.DOTALL)
        if match is None:
            raise CourseError(f"pyproject.toml has no list named {name}")
        found += ast.literal_eval(match.group(1))
    return found


def constraints(root: str) -> list[str]:
    """Return pip's arguments for the exact versions, if constraints.txt is for this Python."""
    path = os.path.join(root, "constraints.txt")
    with open(path, encoding="utf-8") as file:
        header = file.readline()
    version = f"Python {sys.version_info[0]}.{sys.version_info[1]} "
    return ["-c", path] if version in header else []


def site_packages(env: str) -> str:
    lib = os.path.join(env, "lib")
    names = sorted(n for n in os.listdir(lib) if re.fullmatch(r"python3\.\d+", n))
    return os.path.join(lib, names[-1], "site-packages")


def write_path_file(root: str, env: str) -> None:
    """Let every Python of the environment import from the checkout, wherever it is started.

    An import line in ASCII: a plain path line would be read in the locale's encoding.
    """
    line = f"import sys; sys.path.append({ascii(root)})\n"
    with open(os.path.join(site_packages(env), PTH), "w", encoding="ascii") as file:
        file.write(line)


def build_kernels(root: str, env: str, log: str, lock: int, in_place: bool = True) -> dict:
    """Compile kernels_pyx in place, or into the environment when the checkout is read-only; return
    what the stamp says about it. Without a compiler or headers this is no failure."""
    in_place = in_place and os.access(os.path.join(root, "kernels_pyx"), os.W_OK)
    temporary = os.path.join(env, "build")
    command = [state.python_of(env), "setup.py", "build_ext", "--force"]
    command += ["--build-temp", temporary]
    command += ["--build-lib", temporary if in_place else site_packages(env)]
    if in_place:
        command.append("--inplace")
    digest = state.kernels_digest(root)
    output = step("compiling the kernels", command, root, log, lock)
    lines = [line for line in output.splitlines() if line.startswith("kernels: ")]
    if not lines:
        raise CourseError(f"setup.py said nothing about the kernels; log: {log}")
    line, _, rest = lines[-1].removesuffix("]").partition(" [")
    kind, _, value = rest.partition(": ")
    missing = value if kind == "missing" else None
    if missing:
        print(f"course: {line}", file=sys.stderr)
    files = value.split(os.pathsep) if kind == "files" else []
    return {
        "kernels": digest,
        "kernels_line": line if not missing else "kernels: NumPy backend",
        "kernels_missing": missing,
        "kernels_files": state.sizes_of(
            root, [os.path.relpath(os.path.join(root, name), root) for name in files]),
    }


def relocate(root: str, env: str) -> None:
    """Adapt an environment whose folder got another path: no network, no reinstall.

    The scripts in bin/ and pyvenv.cfg name the old path; the path file names the old checkout.
    """
    stamp = state.read_stamp(env) or {}
    old, new = os.fsencode(str(stamp.get("env"))), os.fsencode(env)
    folder = os.path.join(env, "bin")
    paths = [os.path.join(folder, name) for name in sorted(os.listdir(folder))]
    for path in [*paths, os.path.join(env, "pyvenv.cfg")]:
        if os.path.islink(path) or not os.path.isfile(path) or os.path.getsize(path) > 1_000_000:
            continue
        with open(path, "rb") as file:
            content = file.read()
        if old in content and b"\0" not in content:
            mode = os.stat(path).st_mode
            first, _, rest = content.replace(old, new).partition(b"\n")
            if first.startswith(b"#!" + new) and (b" " in first or len(first) > 127):
                # What the system reads as an interpreter's path ends at a space and at 127 bytes;
                # this line is a call to the shell and a string to Python, as pip writes it.
                python = first.removeprefix(b"#!")
                first = b"#!/bin/sh\n'''exec' \"" + python + b"\" \"$0\" \"$@\"\n' '''"
            write_atomically(path, first + b"\n" + rest)
            os.chmod(path, mode)
    write_path_file(root, env)
    kernels = {key: value for key, value in stamp.items() if key.startswith("kernels")}
    write_stamp(root, env, kernels, requirements=stamp.get("requirements"))


def write_stamp(root: str, env: str, kernels: dict, requirements: str | None = None) -> None:
    stamp = {
        "env": env,
        "root": root,
        "python": os.path.realpath(state.python_of(env)),
        "requirements": requirements or state.requirements_digest(root),
        **kernels,
    }
    text = json.dumps(stamp, indent=1) + "\n"
    write_atomically(os.path.join(env, state.STAMP), text)


def step(label: str, command: list[str], root: str, log: str, lock: int) -> str:
    """Run one step of the set-up; its failure is one sentence with the log's path."""
    try:
        return run_step(label, command, cwd=root, log=log, keep_fd=lock)
    except NoNetwork as failure:
        raise CourseError(f"{failure}; log: {log}") from None
    except StepFailed as failure:
        raise NotInstallable(f"{failure}; log: {log}") from None
