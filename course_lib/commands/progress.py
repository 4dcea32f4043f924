"""``./course progress``: which checks of your copies pass."""

from __future__ import annotations

import argparse

HELP = "list which checks pass in your copies, as they were last saved"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of ``./course progress``."""
    parser.add_argument("days", nargs="*", type=int, metavar="DAY",
                        help="days, such as 9 10 (default: all that you have started)")


def run(args: argparse.Namespace) -> int:
    """Print one line per item of every started day."""
    from course_lib.classroom.progress import count, progress_of
    from course_lib.launcher import workspace

    work = workspace.folder()
    numbers = args.days or sorted(int(path.name[3:5]) for path in workspace.days())
    begun = 0
    for day in dict.fromkeys(numbers):
        original = workspace.find_notebook(day)
        copy = work / original.name
        if not copy.exists():
            if args.days:
                print(f"day {day}: not started; ./course start {day}")
            continue
        begun += 1
        lines = progress_of(copy, day, original)
        print(f"day {day}: {count(lines)}")
        for line in lines:
            print(f"  [{line.mark}] {line.item} {line.said}".rstrip())
    if not begun and not args.days:
        print("no day is started; ./course lab copies them and opens JupyterLab")
    return 0
