"""``./course reset``: a day from the start again; the old copy is kept."""

from __future__ import annotations

import argparse
import time

HELP = "start a day over; your copy moves to work/backup/"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of ``./course reset``."""
    parser.add_argument("days", nargs="+", type=int, metavar="DAY", help="days, such as 9 10")


def run(args: argparse.Namespace) -> int:
    """Move each day's copy away, put a fresh one there, and say where the old one is."""
    from course_lib.launcher import workspace

    work = workspace.folder()
    notebooks = {day: workspace.find_notebook(day) for day in dict.fromkeys(args.days)}
    for day, notebook in notebooks.items():
        kept = workspace.reset(notebook, work, time.strftime("%Y%m%d-%H%M%S"))
        told = "" if kept is None else f"; yours is kept as {kept}"
        print(f"day {day}: a fresh copy is in {work / notebook.name}{told}")
    return 0
