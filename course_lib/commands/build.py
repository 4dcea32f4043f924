"""``./course build``: notebooks from their sources."""

from __future__ import annotations

import argparse
import sys

HELP = "build notebooks from notebooks/src (for authors), or check that they match"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of ``./course build``."""
    parser.add_argument("days", nargs="*", type=int, metavar="DAY", help="days (default: all)")
    parser.add_argument("--check", action="store_true",
                        help="execute nothing; say which notebooks differ from their sources")
    parser.add_argument("--fresh", action="store_true",
                        help="keep no stored output of tagged cells and pictures")


def run(args: argparse.Namespace) -> int:
    """Build or check; 0 where all is well, 1 where --check found a difference, 130 or 143 where
    Ctrl-C or SIGTERM ended a build."""
    from course_lib.classroom.source import find_days

    days = find_days(args.days)
    return _check(days) if args.check else _build(days, args.fresh)


def _check(days) -> int:
    from course_lib.classroom.build import drift
    from course_lib.classroom.lint import stray_notebooks

    problems = [*filter(None, map(drift, days)), *map(str, stray_notebooks())]
    for problem in problems:
        print(problem)
    print(f"{len(days)} notebooks compared with their sources, {len(problems)} differences")
    return 1 if problems else 0


def _build(days, fresh: bool) -> int:
    from tqdm import tqdm

    from course_lib.classroom.build import build_day
    from course_lib.classroom.execute import clean_exit
    from course_lib.classroom.source import parse

    done: list[str] = []
    try:
        with clean_exit():
            for day in days:
                with tqdm(total=len(parse(day).cells), desc=f"day {day.number}", unit="cell",
                          leave=False, disable=None) as bar:
                    built = build_day(day, fresh=fresh, on_cell=lambda index: bar.update())
                done.append(str(day.number))
                state = "built" if built.changed else "unchanged"
                print(f"day {day.number}: {state}, {built.run}")
                for warning in built.run.over():
                    print(f"day {day.number}: too heavy for a lesson: {warning}")
    except (KeyboardInterrupt, SystemExit) as stop:
        kept = f"built so far: {', '.join(done)}" if done else "nothing was built"
        print(f"course: interrupted; {kept}, the other notebooks are as they were",
              file=sys.stderr)
        return int(stop.code or 0) if isinstance(stop, SystemExit) else 130
    return 0
