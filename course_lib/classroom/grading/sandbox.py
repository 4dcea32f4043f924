"""One answer to one exercise in a sandbox of its own: bubblewrap, resource limits, a clean view.

Inside are the system's libraries, this Python, its packages and a copy of course_lib without the
functions that the exercise asks for; outside stay the hidden cases, the other submissions, the
network and everything else. Without bubblewrap nothing is run.
"""

from __future__ import annotations

import contextlib
import functools
import os
import re
import resource
import select
import shutil
import signal
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

from course_lib.classroom.grading.inside import GRACE
from course_lib.classroom.grading.wire import MAX_BYTES, WireError, decode, encode
from course_lib.classroom.values import ForeignValue, plain
from course_lib.errors import CourseError
from course_lib.paths import ROOT

PROCESSES = 24
MEMORY = 2 * 2**30
FILE_SIZE = 16 * 2**20
START_SECONDS = 60.0
SYSTEM = ("/usr", "/lib", "/lib64", "/bin", "/etc/ld.so.cache", "/etc/ld.so.conf",
          "/etc/ld.so.conf.d")
COURSE = "/course"
FIRST_FREE_ID = 1_900_000_000
"""No account has ids from here on; each sandbox gets one of its own, since the limit of processes
counts all of one user's."""

BOOT = ("import sys; sys.path.insert(0, {course!r}); "
        "from course_lib.classroom.grading import inside; inside.main(alone={alone}, "
        "processes={processes})")


def require_bubblewrap() -> str:
    """Return the path of bubblewrap after a trial; CourseError with the remedy where it is absent
    or not allowed to make namespaces."""
    program = shutil.which("bwrap")
    if program is None:
        raise CourseError(
            "grading runs answers in bubblewrap, which is not installed: sudo apt install "
            "bubblewrap (or, for submissions that you trust, --allow-unsandboxed)."
        )
    for folder in (*SYSTEM, *python_folders()):
        if ROOT.is_relative_to(folder):
            raise CourseError(f"answers can read {folder}, and the course with its hidden cases "
                              f"lies there, in {ROOT}: move the course elsewhere.")
    installed = Path(sysconfig.get_path("purelib"), "course_lib")
    if installed.exists():
        raise CourseError(f"{installed} is a whole copy of the library, which answers can read: "
                          "uninstall it; ./course needs none.")
    problem = _trial(program)
    if problem:
        raise CourseError(
            f"bubblewrap cannot make a sandbox here ({problem}): allow user namespaces (sudo "
            "sysctl kernel.unprivileged_userns_clone=1, or kernel."
            "apparmor_restrict_unprivileged_userns=0), or run as root."
        )
    return program


@functools.cache
def _trial(program: str) -> str:
    """What bubblewrap says when it cannot do what every sandbox asks for; empty where it can."""
    try:
        done = subprocess.run([*command(program, None), "/usr/bin/true"], capture_output=True,
                              text=True, timeout=START_SECONDS)
    except (OSError, subprocess.TimeoutExpired) as error:
        return str(error)
    return "" if done.returncode == 0 else " ".join(done.stderr.split()) or "no reason given"


def command(program: str, library: Path | None) -> list[str]:
    """The words in front of the command that runs inside; `library`: the folder that holds the
    copy of course_lib."""
    words = [program, "--unshare-pid", "--unshare-net", "--unshare-ipc", "--unshare-uts",
             "--unshare-cgroup-try", "--die-with-parent", "--new-session", "--hostname", "sandbox"]
    if os.geteuid() != 0:
        words += ["--unshare-user"]
        if "--disable-userns" in _options(program):  # a smaller door into the kernel
            words += ["--disable-userns"]
    for place in SYSTEM:
        words += ["--ro-bind-try", place, place]
    for folder in python_folders():
        # Folders on the way are made for bubblewrap's own user alone unless they are asked for.
        for parent in reversed(Path(folder).parents[:-1]):
            words += ["--perms", "0755", "--dir", str(parent)]
        words += ["--ro-bind", folder, folder]
    if library is not None:
        words += ["--ro-bind", str(library), COURSE]
    words += ["--proc", "/proc", "--dev", "/dev", "--dir", "/etc",
              *sized_tmpfs(program, "/work"), "--chdir", "/work", "--clearenv"]
    # What bubblewrap itself has made is its user's, who without root is the answer's user too.
    words += ["--remount-ro", "/dev", "--remount-ro", "/"]
    for name, value in environment().items():
        words += ["--setenv", name, value]
    words += ["--"]
    if os.geteuid() == 0:
        own = str(FIRST_FREE_ID + os.getpid() % 100_000_000)
        words += [shutil.which("setpriv") or "/usr/bin/setpriv", "--reuid", own, "--regid", own,
                  "--clear-groups", "--no-new-privs"]
    return words


def python_folders() -> list[str]:
    """What this Python needs of the file system beyond the system's own folders, by every name:
    an environment may be reached through a link."""
    prefixes = (os.path.abspath(path) for path in (sys.base_prefix, sys.prefix))
    wanted = dict.fromkeys(name for path in prefixes for name in (os.path.realpath(path), path))
    return [path for path in wanted if not path.startswith("/usr/") and path != "/usr"]


@functools.cache
def _options(program: str) -> str:
    return subprocess.run([program, "--help"], capture_output=True, text=True).stdout


def sized_tmpfs(program: str, place: str) -> list[str]:
    """A writable folder of limited size; none that an answer could write to where this bubblewrap
    cannot limit it."""
    if "--size" not in _options(program):
        return ["--dir", place]
    return ["--perms", "0777", "--size", str(FILE_SIZE), "--tmpfs", place]


def environment() -> dict[str, str]:
    """Everything that the inside knows of the outside's environment."""
    return {"PATH": "/usr/bin:/bin", "HOME": "/work", "LANG": "C.UTF-8", "COURSE_KERNEL": "numpy",
            "OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1", "PYTHONHASHSEED": "0"}


def _limit() -> None:
    """In the new process, before bubblewrap: what neither it nor what it starts may exceed. The
    limit of processes is set further inside."""
    with contextlib.suppress(OSError), open("/proc/self/oom_score_adj", "w") as file:
        file.write("1000")  # where memory runs out, this ends and not the grader
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    resource.setrlimit(resource.RLIMIT_FSIZE, (FILE_SIZE, FILE_SIZE))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_NOFILE, (256, 256))


def processes(unsandboxed: bool) -> int:
    """The limit of processes inside. What it counts: in a user namespace of Linux 5.14 or later
    what runs there, as an id of its own what runs under that; else all that this user runs."""
    release = tuple(int(n) for n in re.findall(r"\d+", os.uname().release)[:2])
    alone = not unsandboxed and (os.geteuid() == 0 or release >= (5, 14))
    return PROCESSES + (0 if alone else _threads_of(os.geteuid()))


def _threads_of(user: int) -> int:
    """Threads, which the limit of processes means."""
    count = 0
    for name in filter(str.isdigit, os.listdir("/proc")):
        try:
            if os.stat(f"/proc/{name}").st_uid == user:
                count += len(os.listdir(f"/proc/{name}/task"))
        except OSError:  # it has ended
            pass
    return count


def checked_report(found: Any) -> dict[str, Any]:
    """What a message says of a case's end, of known form whatever wrote it: an answer can write
    where its result goes out."""
    end = found.get("end") if type(found) is dict else None
    try:
        if end == "value":
            return {"end": end, "value": plain(found["value"]),
                    "mutated": found["mutated"] is not False}
        if end == "error" and type(found["kinds"]) is list:
            kinds = [str(kind) for kind in found["kinds"][:20]]
            return {"end": end, "kinds": kinds or ["Exception"], "text": str(found["text"])[:500],
                    "stage": "define" if found["stage"] == "define" else "call"}
    except (ForeignValue, KeyError, TypeError, ValueError):
        return {"end": "foreign"}
    known = type(end) is str and end in ("timeout", "crash", "too_large", "uses_reference")
    return {"end": end if known else "foreign"}


class Sandbox:
    """A running sandbox for one answer; a context manager.

    `library` is a folder made by ``taken_away.write_library``; `item` the exercise's id; `sources`
    the cells to run in order, `function` the name that they define. With `unsandboxed` the answer
    runs as the grader's own user, with the limits but without the walls. CourseError where
    bubblewrap does not start.
    """

    def __init__(self, library: Path, item: str, sources: Sequence[str], function: str,
                 unsandboxed: bool = False):
        self._folder = tempfile.TemporaryDirectory() if unsandboxed else None
        words = [] if unsandboxed else command(require_bubblewrap(), library)
        course = str(library) if unsandboxed else COURSE
        python = os.path.join(sys.prefix, "bin", os.path.basename(sys.executable))
        self._process = subprocess.Popen(
            [*words, python, "-I", "-B", "-c", BOOT.format(
                course=course, alone=not unsandboxed, processes=processes(unsandboxed))],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
            preexec_fn=_limit, start_new_session=True,
            cwd=self._folder.name if self._folder else "/",
            env=environment())  # bubblewrap's too: inside, its first process can be read
        until = time.monotonic() + START_SECONDS
        self._send({"item": item, "sources": list(sources), "function": function}, until)
        first = self._receive(until)
        if first != {"ready": True}:
            self.close()
            raise CourseError(f"the sandbox does not start Python ({python}): try "
                              f"./course doctor; it ended with {self._process.returncode}.")

    def run(self, args: Sequence[Any], kwargs: Mapping[str, Any], seconds: float) -> dict[str, Any]:
        """Run one case; how it ended, as ``inside`` reports it: "end" is "value", "error",
        "timeout", "crash", "too_large", "uses_reference" or "foreign" (bytes of nobody's)."""
        until = time.monotonic() + seconds + GRACE + 10
        self._send({"args": list(args), "kwargs": dict(kwargs)}, until)
        found = self._receive(until)
        if found is None:  # the answer has ended its own sandbox, or holds it up
            return {"end": "crash" if time.monotonic() < until else "timeout"}
        return checked_report(found)

    def _send(self, message: dict[str, Any], until: float) -> None:
        """Write a message, or as much of it as is read in time; _receive says what became of it."""
        assert self._process.stdin is not None
        pipe, body = self._process.stdin.fileno(), encode(message)
        body = len(body).to_bytes(8, "little") + body
        while body:
            left = until - time.monotonic()
            if left <= 0 or not select.select([], [pipe], [], left)[1]:
                return
            try:
                body = body[os.write(pipe, body[: select.PIPE_BUF]):]
            except BrokenPipeError:
                return

    def _receive(self, until: float) -> Any:
        """The next message; None where the sandbox is gone or too slow, {} for one not readable."""
        head = self._read(8, until)
        size = int.from_bytes(head, "little")
        if len(head) < 8 or size > MAX_BYTES:
            return None
        body = self._read(size, until)
        if len(body) < size:
            return None
        try:
            return decode(body)
        except WireError:
            return {}

    def _read(self, size: int, until: float) -> bytes:
        assert self._process.stdout is not None
        pipe, parts = self._process.stdout.fileno(), b""
        while len(parts) < size:
            left = until - time.monotonic()
            if left <= 0 or not select.select([pipe], [], [], left)[0]:
                break
            part = os.read(pipe, min(size - len(parts), 2**20))
            if not part:
                break
            parts += part
        return parts

    def close(self) -> None:
        """End everything inside: with bubblewrap's first process the whole namespace goes."""
        if self._process.poll() is None:
            os.killpg(self._process.pid, signal.SIGKILL)
        for stream in (self._process.stdin, self._process.stdout):
            if stream is not None:
                try:
                    stream.close()
                except BrokenPipeError:
                    pass
        self._process.wait()
        if self._folder is not None:
            self._folder.cleanup()

    def __enter__(self) -> Sandbox:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None,
                 trace: TracebackType | None) -> None:
        self.close()
