"""The command line: a table of verbs, each a small module under course_lib/commands.

A command module has `HELP` (one line), `add_arguments(parser)` and `run(args) -> exit code`; it is
imported only when its verb is called, so help and errors about verbs cost nothing.
"""

from __future__ import annotations

import os
import sys
from importlib import import_module
from typing import NamedTuple

from course_lib.errors import CourseError


class Verb(NamedTuple):
    module: str
    help: str
    needs_environment: bool = True


VERBS = {
    "lab": Verb("lab", "open JupyterLab on your copies of the days"),
    "start": Verb("start", "copy a day into work/, never overwriting"),
    "day": Verb("day", "run one day headless and print its numbers"),
    "needle": Verb("needle", "exact against block-sparse decode on needle prompts"),
    "test": Verb("test", "run the tests"),
    "build": Verb("build", "build notebooks from their sources, or --check them"),
    "doctor": Verb("doctor", "say what this machine has and what is missing", False),
}

EXIT_CODES = """\
exit codes: 0 done; 1 ran, and a test or check failed (or a defect of the course: a traceback);
2 not run: a wrong verb, option, value or file, or a set-up that failed; 130 interrupted;
141 the reader of the output went away"""

ENVIRONMENT = """\
environment: COURSE_KERNEL=numpy|portable chooses the backend; COURSE_REQUIRE_KERNELS=1 makes
kernels that do not compile an error; XDG_CACHE_HOME holds the environment of a read-only checkout"""


def usage() -> str:
    width = max(map(len, VERBS)) + 2
    lines = ["usage: ./course VERB [options]     (./course VERB --help for its options)", ""]
    lines += [f"  {name:{width}}{verb.help}" for name, verb in VERBS.items()]
    lines += [f"  {'help':{width}}this text", "", EXIT_CODES, "", ENVIRONMENT]
    return "\n".join(lines)


def without_environment(argv: list[str]) -> int | None:
    """Run what needs no environment (help, a wrong verb, doctor) and return its exit code; None
    for every other command."""
    if argv and argv[0] in VERBS and VERBS[argv[0]].needs_environment:
        return None
    return main(argv)


def main(argv: list[str]) -> int:
    """Run one command; return the exit code.

    CourseError becomes one line on stderr and 2, Ctrl-C one line and 130, a closed pipe 141.
    """
    try:
        code = dispatch(argv)
        sys.stdout.flush()
        return code
    except CourseError as error:
        print(f"course: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("course: interrupted", file=sys.stderr)
        return 130
    except BrokenPipeError:
        # Python flushes stdout once more on exit; give it somewhere harmless to go.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141


def dispatch(argv: list[str]) -> int:
    if not argv or argv[0] in ("help", "-h", "--help"):
        if len(argv) > 1 and argv[1] in VERBS:
            return dispatch([argv[1], "--help"])
        print(usage())
        return 0
    name, *rest = argv
    if name not in VERBS:
        kind = "option" if name.startswith("-") else "verb"
        raise CourseError(f"unknown {kind} {name!r}; {nearest(name, [*VERBS, 'help', '--help'])}")
    module = import_module(f"course_lib.commands.{VERBS[name].module}")
    from course_lib.commands.parser import Parser

    parser = Parser(prog=f"./course {name}", description=module.HELP, epilog=EXIT_CODES)
    module.add_arguments(parser)
    try:
        args = parser.parse_args(rest)
    except SystemExit as stop:  # argparse has printed its help
        return int(stop.code or 0)
    return int(module.run(args) or 0)


def nearest(word: str, valid: list[str]) -> str:
    """Return "did you mean …?" with the closest of `valid`, or the whole list."""
    import difflib

    close = difflib.get_close_matches(word, valid, n=1, cutoff=0.5)
    return f"did you mean {close[0]}?" if close else f"there are {', '.join(valid)}"
