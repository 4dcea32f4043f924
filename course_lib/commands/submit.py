"""``./course submit``: your work on a day as one file to hand in."""

from __future__ import annotations

import argparse
import getpass
import sys
from pathlib import Path

from course_lib.errors import CourseError

HELP = "pack your work on a day into one zip to hand in"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of ``./course submit``."""
    parser.add_argument("day", type=int, metavar="DAY", help="the day, such as 10")
    parser.add_argument("--name", metavar="NAME",
                        help="what your instructor told you to use, such as your student number "
                        "(default: your login)")
    parser.add_argument("-o", "--output", type=Path, metavar="DIR",
                        help="folder for the zip (default: work/)")


def run(args: argparse.Namespace) -> int:
    """Write the zip and say what is in it; what is not attempted is said, and packed all the
    same."""
    from course_lib.atomic import write_atomically
    from course_lib.classroom.handing_in import file_name, packed
    from course_lib.classroom.progress import count, progress_of
    from course_lib.launcher import workspace

    work = workspace.folder()
    original = workspace.find_notebook(args.day)
    copy = work / original.name
    if not copy.exists():
        raise CourseError(f"submit: {copy} is not there; ./course start {args.day} makes it, or "
                          "name the day that you worked on.")
    student = args.name or _login()
    folder = args.output or work
    target = folder / file_name(student, args.day)
    data = packed(args.day, student, [copy])
    lines = progress_of(copy, args.day, original)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        write_atomically(target, data)
    except OSError as error:
        raise CourseError(f"submit: cannot write {target} ({error.strerror}).") from None
    print(f"{target}: day {args.day} by {student}, {count(lines)} as last saved")
    for line in lines:
        if line.mark != "ok":
            print(f"  [{line.mark}] {line.item} {line.said}".rstrip(), file=sys.stderr)
    unchecked = [line.item for line in lines if line.unchecked]
    if unchecked:
        print(f"course: not checked since it was changed: {', '.join(unchecked)}; run the check "
              "cells, save and submit again if you want to know before your instructor does",
              file=sys.stderr)
    return 0


def _login() -> str:
    try:
        return getpass.getuser()
    except (KeyError, OSError, ImportError):
        raise CourseError("submit: give your name with --name.") from None
