"""``./course grade``: from a folder of submissions to marks and feedback."""

from __future__ import annotations

import argparse
import os
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from course_lib.errors import CourseError

if TYPE_CHECKING:
    from course_lib.classroom.grading.human import HumanMark, Key
    from course_lib.classroom.grading.submission_marks import ItemMark

HELP = "grade submissions in a sandbox: tables of marks, feedback for every student"
BANNER = """\
*** --allow-unsandboxed: the submissions run with your own rights on this machine. ***
*** They can read and delete your files. Use it for work that you trust only.      ***"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of ``./course grade``."""
    verbs = parser.add_subparsers(dest="action", required=True, metavar="{run,queue,merge}")
    run_ = verbs.add_parser("run", help="grade a folder of submissions")
    run_.add_argument("submissions", type=Path, help="folder with STUDENT/day10*.ipynb, "
                      "STUDENT_day10*.ipynb or zips of them")
    run_.add_argument("-o", "--output", type=Path, required=True, metavar="DIR",
                      help="folder for grades.csv, totals.csv and feedback/")
    run_.add_argument("--jobs", type=jobs, default=1, metavar="N",
                      help="submissions graded at the same time (default 1)")
    run_.add_argument("--allow-unsandboxed", action="store_true",
                      help="without bubblewrap, for submissions that you trust")
    queue = verbs.add_parser("queue", help="read the texts that wait for a human, blind")
    queue.add_argument("output", type=Path, metavar="DIR", help="folder that grade run wrote")
    queue.add_argument("--kind", choices=("B",), default="B", help="kind of items (B, the only one "
                       "with texts)")
    queue.add_argument("--item", metavar="ID", help="one question only, such as d10.b2")
    queue.add_argument("--all", action="store_true", help="also texts that are marked already")
    queue.add_argument("--no-browser", action="store_true", help="only print the page's address")
    queue.add_argument("--csv", action="store_true",
                       help="write DIR/review.csv to fill in instead of opening a page")
    merge = verbs.add_parser("merge", help="fold human marks into the tables and the feedback")
    merge.add_argument("output", type=Path, metavar="DIR", help="folder that grade run wrote")
    merge.add_argument("--csv", type=Path, metavar="FILE",
                       help="a filled-in table (default: DIR/review.csv where it is there)")
    merge.add_argument("--canvas", type=Path, metavar="EXPORT",
                       help="a gradebook exported from Canvas: also write DIR/canvas.csv to import")


def jobs(text: str) -> int:
    """A number of jobs."""
    if not (text.isascii() and text.isdigit() and 1 <= int(text) <= 64):
        raise argparse.ArgumentTypeError(f"must be a number from 1 to 64, not {text!r}")
    return int(text)


def run(args: argparse.Namespace) -> int:
    """Run the action that was asked for."""
    return {"run": run_grading, "queue": run_queue, "merge": run_merge}[args.action](args)


def run_grading(args: argparse.Namespace) -> int:
    """Grade, write, and say how it went; 130 after Ctrl-C, with what was done kept."""
    # NumPy's own threads are of no use beside other submissions; they are read when it is loaded.
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
    from course_lib.classroom.grading import batch
    from course_lib.classroom.grading.review import Reviews
    from course_lib.classroom.grading.submissions import find_submissions

    if args.output.resolve().is_relative_to(args.submissions.resolve()):
        raise CourseError(f"grade: the output {args.output} lies in the folder of submissions, "
                          f"{args.submissions}; name a folder outside it.")
    found = find_submissions(args.submissions)
    for name in found.unrecognised:
        print(f"not recognised, left out: {name}", file=sys.stderr)
    if not found.submissions:
        raise CourseError(f"grade: {args.submissions} holds no notebook of a known name; name them "
                          "STUDENT/day10_….ipynb or STUDENT_day10.ipynb.")
    if args.allow_unsandboxed:
        print(BANNER, file=sys.stderr)
    try:
        args.output.mkdir(parents=True, exist_ok=True)
        tasks = batch.tasks_of(found, args.output, args.allow_unsandboxed)
        if not _graded(batch, tasks, args, Reviews(args.output).human):
            return 130
        reviews = Reviews(args.output)  # somebody may have marked meanwhile
        marks = batch.all_marks(found, tasks)
        batch.keep_marks(args.output, marks)
        marks = reviews.flagged(marks)
        batch.write_results(args.output, marks, reviews.human)
    except OSError as error:
        raise CourseError(f"grade: cannot write to {args.output} ({error.strerror}); free or "
                          "unlock it and run again, what is done is kept.") from None
    _summary(marks, reviews.human, args.output)
    return 0


def run_queue(args: argparse.Namespace) -> int:
    """Open the page on which texts are read, or write the table."""
    from course_lib.atomic import write_atomically
    from course_lib.classroom.grading import batch
    from course_lib.classroom.grading.review import QUEUE, Reviews, queue_csv

    marks = batch.kept_marks(args.output)
    if args.item:
        marks = [mark for mark in marks if mark.item == args.item]
        if not marks:
            raise CourseError(f"grade: {args.item} is no item of the submissions graded in "
                              f"{args.output}.")
    reviews = Reviews(args.output)
    waiting = reviews.queue(marks, args.all)
    if not waiting:
        print("no text waits; --all shows those that are marked")
        return 0
    if args.csv:
        target = args.output / QUEUE
        if target.exists() and not target.read_text(encoding="utf-8-sig").strip() == "":
            raise CourseError(f"grade: {target} is there already; merge it (./course grade merge "
                              f"{args.output}) or move it away first.")
        write_atomically(target, queue_csv(waiting))
        print(f"{target}: {len(waiting)} texts; fill in points and comment, then ./course grade "
              f"merge {args.output}")
        return 0
    from course_lib.classroom.grading.review_page import serve

    return serve(reviews, marks, args.all, not args.no_browser)


def run_merge(args: argparse.Namespace) -> int:
    """Take a filled-in table, then write tables and feedback anew."""
    from course_lib.atomic import write_atomically
    from course_lib.classroom.grading import batch
    from course_lib.classroom.grading.canvas import canvas_csv
    from course_lib.classroom.grading.review import QUEUE, Reviews, merge_csv

    marks = batch.kept_marks(args.output)
    reviews = Reviews(args.output)
    table = args.csv or args.output / QUEUE
    export = _read(args.canvas) if args.canvas else ""
    if args.csv or table.exists():
        text = _read(table)
        try:
            merged = merge_csv(reviews, marks, text)
        except CourseError as error:
            raise CourseError(f"grade: {table}: {error}") from None
        print(f"{table}: {merged.taken} marks taken")
        for line in merged.kept:
            print(f"kept as it was: {line}", file=sys.stderr)
    marks = reviews.flagged(marks)
    batch.write_results(args.output, marks, reviews.human)
    if args.canvas:
        found = canvas_csv(export, marks, reviews.human)
        write_atomically(args.output / "canvas.csv", found.text)
        print(f"written: {args.output}/canvas.csv")
        for student in found.unknown:
            print(f"not in {args.canvas}: {student}", file=sys.stderr)
    waiting = len(reviews.queue(marks))
    print(f"written: {args.output}/grades.csv, totals.csv, feedback/; {waiting} texts wait")
    return 0


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise CourseError(f"grade: {path} cannot be read as UTF-8 text "
                          f"({type(error).__name__}).") from None


def _graded(batch: Any, tasks: Sequence[Any], args: argparse.Namespace,
            human: Mapping[Key, HumanMark]) -> bool:
    """Run the tasks under a bar; False after Ctrl-C."""
    from tqdm import tqdm

    from course_lib.classroom.grading.human import points_of
    from course_lib.classroom.grading.tables import number

    done = 0
    bar = tqdm(total=len(tasks), unit="notebook", file=sys.stderr,
               disable=not sys.stderr.isatty())

    def finished(task: Any, marks: list[ItemMark]) -> None:
        nonlocal done
        done += 1
        bar.update()
        points, most = sum(points_of(m, human) for m in marks), sum(m.max for m in marks)
        tqdm.write(f"{task.submission.student}  day {task.submission.day}  "
                   f"{number(points)}/{most}", file=sys.stdout)

    try:
        with bar:
            batch.grade(tasks, args.jobs, args.allow_unsandboxed, finished)
    except KeyboardInterrupt:
        print(f"course: interrupted; {done} of {len(tasks)} notebooks are kept, run again to go on",
              file=sys.stderr)
        return False
    return True


def _summary(marks: Sequence[ItemMark], human: Mapping[Key, HumanMark], out: Path) -> None:
    """Counts per status, and the items with the smallest share of their points."""
    from course_lib.classroom.grading.human import status_of

    print()
    for status, count in sorted(Counter(status_of(m, human) for m in marks).items()):
        print(f"{count:6}  {status}")
    flags = Counter(flag for m in marks for flag in m.flags)
    for flag, count in sorted(flags.items()):
        print(f"{count:6}  [{flag}]")
    code = [m for m in marks if m.kind == "A" and m.status != "unreadable"]
    share = {item: sum(m.auto for m in code if m.item == item)
             / sum(m.max for m in code if m.item == item)
             for item in dict.fromkeys(m.item for m in code)}
    hardest = sorted(share, key=lambda item: (share[item], item))[:3]
    if hardest:
        print("hardest: " + ", ".join(f"{item} ({share[item]:.0%})" for item in hardest))
    print(f"written: {out}/grades.csv, totals.csv, feedback/")
