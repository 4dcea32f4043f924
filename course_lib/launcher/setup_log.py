"""Running one step of the set-up: output to the log, a status line on a terminal, and a failure
told in one sentence."""

from __future__ import annotations

import os
import select
import shutil
import signal
import subprocess
import sys
import time

from course_lib.launcher.state import clean_environ

OFFLINE = (
    "NewConnectionError",
    "NameResolutionError",
    "Temporary failure in name resolution",
    "Name or service not known",
    "Network is unreachable",
    "ConnectTimeoutError",
    "Connection refused",
    "ProxyError",
)


class StepFailed(Exception):
    """A step of the set-up ended with an error; the text is for the user."""


class NoNetwork(StepFailed):
    """It failed because the package index cannot be reached."""


def run_step(label: str, command: list[str], *, cwd: str, log: str, keep_fd: int) -> str:
    """Run `command`, append its output to the file `log` and return it.

    `keep_fd` stays open in the child (the set-up's lock). Says on stderr that the step starts,
    or, on a terminal, how it goes on. Raises StepFailed. When this process is
    interrupted the child is ended first.
    """
    if not sys.stderr.isatty():  # where no status line can be shown
        print(f"course: {label} …", file=sys.stderr, flush=True)
    environ = {**clean_environ(), "PIP_USER": "0", "PYTHONUNBUFFERED": "1"}
    with open(log, "ab") as file:
        file.write(f"\n--- {label}\n".encode())
        file.flush()
        child = subprocess.Popen(
            command,
            cwd=cwd,
            env=environ,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            pass_fds=(keep_fd,),
            start_new_session=True,  # so that its own children can be ended with it
        )
        try:
            output = follow(child, label, file)
        except BaseException:
            end(child)
            raise
        finally:
            clear_status()
    if child.returncode:
        failure = NoNetwork if any(mark in output for mark in OFFLINE) else StepFailed
        raise failure(f"{label} failed: {explain(output)}")
    return output


def end(child: subprocess.Popen) -> None:
    """End a child and its children, by their process group."""
    try:
        os.killpg(child.pid, signal.SIGTERM)
        child.wait(timeout=5)
        os.killpg(child.pid, signal.SIGKILL)  # whoever of the group did not listen
    except subprocess.TimeoutExpired:
        os.killpg(child.pid, signal.SIGKILL)
        child.wait()
    except ProcessLookupError:
        pass


def follow(child: subprocess.Popen, label: str, log) -> str:
    """Copy the child's output to `log` until it ends; show its last line on a terminal."""
    assert child.stdout is not None
    fd = child.stdout.fileno()
    start = time.monotonic()
    collected = b""
    while True:
        ready, _, _ = select.select([fd], [], [], 1.0)
        if ready:
            chunk = os.read(fd, 65536)
            if not chunk:
                break
            log.write(chunk)
            log.flush()
            collected += chunk
        last = collected.rstrip().rpartition(b"\n")[2].decode(errors="replace").strip()
        show_status(f"{label} ({time.monotonic() - start:.0f} s) {last}")
    child.wait()
    return collected.decode(errors="replace")


def show_status(text: str) -> None:
    if sys.stderr.isatty():
        width = shutil.get_terminal_size().columns - 1
        sys.stderr.write(f"\r\033[K{text[:width]}")
        sys.stderr.flush()


def clear_status() -> None:
    if sys.stderr.isatty():
        sys.stderr.write("\r\033[K")
        sys.stderr.flush()


def explain(output: str) -> str:
    """Return the cause of a failed step: no network, a full disk, or its last useful line."""
    if any(mark in output for mark in OFFLINE):
        return "the package index cannot be reached; the first use needs the network once"
    if "No space left on device" in output:
        return "no space left on the disk; the environment needs about 1 GB"
    lines = [line.strip() for line in output.splitlines() if line.strip()]
    errors = [line for line in lines if line.lower().startswith(("error:", "fatal:"))]
    # pip ends a conflict with a link to its manual; the cause stands in an error before it.
    useful = [line for line in errors if "https://" not in line]
    return (useful or errors or lines or ["it printed nothing"])[-1]
