"""``./course release``: the edition that students get."""

from __future__ import annotations

import argparse
from pathlib import Path

HELP = "write the students' edition, without solutions and hidden cases, into a new folder"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of ``./course release``."""
    parser.add_argument("folder", type=Path, metavar="DIR", help="a new or empty folder")


def run(args: argparse.Namespace) -> int:
    """Write it and say how many files it has and what stayed behind."""
    from course_lib.classroom.release import KEPT_BACK, release

    count = release(args.folder)
    print(f"{args.folder}: {count} files; kept back: {', '.join(KEPT_BACK)}")
    return 0
