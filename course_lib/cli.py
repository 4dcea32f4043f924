"""The command line: a table of verbs, each a small module under course_lib/commands.

A command module has `HELP` (one line), `add_arguments(parser)` and `run(args) -> exit code`; it is
imported only when its verb is called, so help and errors about verbs cost nothing.
"""

from __future__ import annotations

import errno
import io
import os
import re
import sys
from importlib import import_module
from typing import TextIO

from course_lib.errors import CourseError
from course_lib.nearest import nearest

VERBS = ("lab", "start", "reset", "progress", "submit", "day", "needle", "ruler", "perplexity",
         "chat", "bench", "grade", "release", "test", "build", "doctor")
"""In reading order; each is a module of course_lib.commands."""

WITHOUT_ENVIRONMENT = ("doctor",)
"""Verbs that also run on a bare Python."""

EXIT_CODES = """\
exit codes: 0 done; 1 ran, and a test or check failed (or a defect of the course: a traceback);
2 not run: a wrong verb, option, value or file, or a set-up that failed; 130 interrupted;
141 the reader of the output went away; 143 terminated"""

ENVIRONMENT = """\
environment: COURSE_KERNEL=numpy|portable|avx2|avx512|neon|dotprod chooses the kernels (else the
best that this CPU runs); COURSE_THREADS=N their threads (else one per fast core);
COURSE_API_KEY is sent to the server of needle --url; COURSE_LOG=DEBUG tells of every chunk of a
prefill policy what was read;
COURSE_REQUIRE_KERNELS=1 makes kernels that do not compile an error; COURSE_CACHE=DIR|off says
where packed weights of large models are kept (else beside the checkpoint); under XDG_CACHE_HOME lie
the environment of a read-only checkout and the weights of a read-only checkpoint"""



def usage() -> str:
    lines = ["usage: ./course VERB [options]     (./course VERB --help for its options)", ""]
    lines += [f"  {name:11}{help_of(name)}" for name in VERBS]
    lines += [f"  {'help':11}this text", "", EXIT_CODES, "", ENVIRONMENT]
    return "\n".join(lines)


def help_of(verb: str) -> str:
    """Return a command's HELP, read from its source: importing it may need the environment."""
    path = os.path.join(os.path.dirname(__file__), "commands", f"{verb}.py")
    with open(path, encoding="utf-8") as file:
        match = re.search(r'^HELP = "(.*)"$', file.read(), re.MULTILINE)
    if match is None:
        raise CourseError(f"{path} has no line HELP = \"…\"")
    return match.group(1)


def without_environment(argv: list[str]) -> int | None:
    """Run what needs no environment (help, a wrong verb, doctor) and return its exit code; None
    for every other command."""
    about_a_model = any(word.split("=", 1)[0] == "--model" for word in argv)
    if argv and argv[0] in VERBS and (argv[0] not in WITHOUT_ENVIRONMENT or about_a_model):
        return None
    return main(argv)


def main(argv: list[str]) -> int:
    """Run one command; return the exit code.

    CourseError becomes one line on stderr and 2, Ctrl-C one line and 130, a closed pipe 141. On a
    terminal that is not UTF-8 a character it lacks is shown as "?"; a full stdout and too little
    memory are one line and 2.
    """
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:  # closed
            setattr(sys, name, open(os.devnull, "w", encoding="utf-8"))  # noqa: SIM115
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")
    try:
        code = dispatch(argv)
        sys.stdout.flush()
        return code
    except CourseError as error:
        complain(str(error))
        return 2
    except KeyboardInterrupt:
        complain("interrupted")
        return 130
    except MemoryError:
        complain("there is not enough memory: close other programs, raise a limit (ulimit -v), or "
                 "ask for less at once")
        return 2
    except BrokenPipeError:
        discard(sys.stdout)
        return 141
    except OSError as error:
        if error.errno != errno.ENOSPC:
            raise
        discard(sys.stdout)
        complain("the output could not be written: no space left")
        return 2


def complain(text: str) -> None:
    """Say one line on stderr, if that can be written."""
    try:
        print(f"course: {text}", file=sys.stderr, flush=True)
    except OSError:
        discard(sys.stderr)


def discard(stream: TextIO) -> None:
    """Send what Python still flushes on exit to where it does no harm."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


def dispatch(argv: list[str]) -> int:
    if not argv or argv[0] in ("help", "-h", "--help"):
        if len(argv) > 1 and argv[1] != "help":
            return dispatch([argv[1], "--help"])
        print(usage())
        return 0
    name, *rest = argv
    if name not in VERBS:
        kind = "option" if name.startswith("-") else "verb"
        raise CourseError(f"unknown {kind} {name!r}; {nearest(name, [*VERBS, 'help', '--help'])}")
    module = import_module(f"course_lib.commands.{name}")
    from course_lib.commands.parser import Parser

    parser = Parser(prog=f"./course {name}", description=module.HELP, epilog=EXIT_CODES)
    module.add_arguments(parser)
    try:
        args = parser.parse_args(rest)
    except SystemExit as stop:  # argparse has printed its help
        return int(stop.code or 0)
    return int(module.run(args) or 0)
