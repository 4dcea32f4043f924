"""``./course day``: run a day without a browser."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

HELP = "run one day headless and print its numbers"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of ``./course day``."""
    parser.add_argument("day", type=int, metavar="DAY", help="the day, such as 10")
    parser.add_argument("--html", nargs="?", const="", metavar="FILE",
                        help="write a page (default: dayNN_….html here) instead of printing")
    parser.add_argument("--force", action="store_true", help="write over an existing page")


def run(args: argparse.Namespace) -> int:
    """Execute the day's notebook in an empty folder; print or write what it gives.

    Returns 1 where a cell fails; raises CourseError for a day that is not there and for a page
    that exists or cannot be written.
    """
    from tqdm import tqdm

    from course_lib.classroom import pages
    from course_lib.classroom.execute import CellFailed, execute
    from course_lib.classroom.normalise import strip_widget_views
    from course_lib.launcher import workspace

    path = workspace.find_notebook(args.day)
    page = None if args.html is None else _page(args.html or f"{path.stem}.html", args.force)
    notebook = pages.read_without_outputs(path)
    try:
        with tqdm(total=len(notebook.cells), desc=f"day {args.day}", unit="cell", leave=False,
                  disable=None) as bar:
            cost = execute(notebook, on_cell=lambda index: bar.update())
    except CellFailed as failed:
        number = sum(c.cell_type == "code" for c in notebook.cells[: failed.index + 1])
        print(f"day {args.day}, code cell {number} failed: {failed.reason}", file=sys.stderr)
        return 1
    strip_widget_views(notebook)
    if page is None:
        print(pages.as_text(notebook))
    else:
        from course_lib.classroom.html_page import as_html

        _write(page, as_html(notebook, path, page))
    print(f"day {args.day} ran from top to bottom: {cost}", file=sys.stderr)
    return 0


def _page(name: str, force: bool) -> Path:
    from course_lib.errors import CourseError

    page = Path(name)
    if page.is_dir() or not page.absolute().parent.is_dir():
        raise CourseError(f"cannot write {page}: give the name of a file in a folder that exists.")
    if page.exists() and not force:
        raise CourseError(f"{page} exists; give another name, or --force.")
    return page


def _write(page: Path, text: str) -> None:
    from course_lib.atomic import write_atomically
    from course_lib.errors import CourseError

    try:
        write_atomically(page, text)
    except OSError as error:
        raise CourseError(f"cannot write {page} ({error.strerror}); try another place") from None
    print(f"wrote {page}")
