"""``./course start``: your own copy of a day."""

from __future__ import annotations

import argparse

HELP = "copy a day into work/ to edit it there; a copy that exists is left alone"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of ``./course start``."""
    parser.add_argument("days", nargs="+", type=int, metavar="DAY", help="days, such as 9 10")


def run(args: argparse.Namespace) -> int:
    """Copy the days and say where they are."""
    from course_lib.launcher import workspace

    work = workspace.folder()
    notebooks = {day: workspace.find_notebook(day) for day in args.days}
    new = workspace.copy_missing(notebooks.values(), work)
    for day, notebook in notebooks.items():
        copy = work / notebook.name
        state = "copied to" if copy in new else "you have it already, left alone:"
        print(f"day {day}: {state} {copy}")
    print("open it with ./course lab")
    return 0
