"""From a bare Python into the course's environment: find it, check its stamp, exec.

Standard library only and few imports: this runs before every command.
"""

from __future__ import annotations

import os
import signal
import sys

from course_lib.launcher.state import (
    clean_environ,
    find_environment,
    inside,
    problem,
    python_of,
)


def main(root: str, argv: list[str]) -> int:
    """Run the command `argv` of the course at `root`; return its exit code.

    Outside the environment this prepares it if needed and replaces the process.
    """
    from course_lib import cli

    env = find_environment(root)
    if problem(root, env) is None:
        return cli.main(argv) if inside(env) else enter(root, env, argv)
    early = cli.without_environment(argv)
    if early is not None:
        return early
    from course_lib.launcher import environment

    code = environment.prepare(root, env)
    if code:
        return code
    return enter(root, env, argv)


def enter(root: str, env: str, argv: list[str]) -> int:
    """Replace this process by the same command run by the environment's Python.

    Ctrl-C waits while that Python starts, which would answer it with a traceback; `course` lets it
    through again.
    """
    python = python_of(env)
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])
    try:
        os.execve(python, [python, os.path.join(root, "course"), *argv], clean_environ(env))
    except OSError as error:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGINT])
        message = f"course: {python} does not start ({error.strerror}); remove {env} and call again"
        print(message, file=sys.stderr)
    return 2
