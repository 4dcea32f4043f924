"""Grading a folder: every submission an independent task, what is done kept, tables at the end."""

from __future__ import annotations

import hashlib
import json
import multiprocessing
import tempfile
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Executor, ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, replace
from pathlib import Path

from course_lib.atomic import write_atomically
from course_lib.classroom.grading import feedback, tables
from course_lib.classroom.grading.day import load_day
from course_lib.classroom.grading.human import HumanMark, Key
from course_lib.classroom.grading.sandbox import require_bubblewrap
from course_lib.classroom.grading.submission_marks import ItemMark, grader
from course_lib.classroom.grading.submissions import Found, Submission
from course_lib.errors import CourseError

STATE, LAST = ".state", "last.json"


@dataclass(frozen=True)
class Task:
    """A submission, and the file that keeps its marks: named by everything that they depend on."""

    submission: Submission
    kept: Path


def tasks_of(found: Found, out: Path, unsandboxed: bool) -> list[Task]:
    """A task for each student and day; CourseError for a day that cannot be graded."""
    last: dict[tuple[str, int], Submission] = {}
    for submission in found.submissions:  # in the order of their names: the last one counts
        last[submission.student, submission.day] = submission
    tasks = []
    for submission in last.values():
        facts = (load_day(submission.day).digest, submission.student, submission.problem,
                 str(unsandboxed), hashlib.sha256(submission.content or b"").hexdigest())
        name = hashlib.sha256("\0".join(facts).encode()).hexdigest()[:32]
        tasks.append(Task(submission, out / STATE / f"{name}.json"))
    return tasks


def grade(tasks: Sequence[Task], jobs: int, unsandboxed: bool,
          finished: Callable[[Task, list[ItemMark]], object] = lambda task, marks: None,
          executor: Executor | None = None) -> None:
    """Grade what is not kept yet; `finished` is called for every task, kept ones first.

    An interrupt loses only what is running. CourseError where bubblewrap is absent.
    """
    if not unsandboxed:
        require_bubblewrap()
    waiting = []
    for task in tasks:
        marks = read_kept(task.kept)
        if not marks:
            waiting.append(task)
        else:
            finished(task, marks)
    if not waiting:
        return
    waiting[0].kept.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        libraries = Path(folder)
        libraries.chmod(0o755)  # the sandbox's user reads them
        work = grader(libraries, unsandboxed)
        own = executor or ProcessPoolExecutor(
            jobs, mp_context=multiprocessing.get_context("spawn"))
        try:
            running = {own.submit(work, task.submission): task for task in waiting}
            for future in as_completed(running):
                task, marks = running[future], future.result()
                write_atomically(task.kept, json.dumps([m.as_json() for m in marks]) + "\n")
                finished(task, marks)
        except BrokenProcessPool:
            raise CourseError("grade: the system ended one of the graders, as a rule for want of "
                              "memory; run again with fewer --jobs: what is done is kept."
                              ) from None
        except BaseException:
            own.shutdown(wait=False, cancel_futures=True)
            raise
        finally:
            if executor is None:
                own.shutdown(cancel_futures=True)


def read_kept(path: Path) -> list[ItemMark] | None:
    """Marks that an earlier run kept; None where there are none or they are damaged."""
    try:
        return [ItemMark(**(line | {"messages": tuple(line["messages"]),
                                    "flags": tuple(line["flags"]),
                                    "evidence": tuple((part, place) for part, place
                                                      in line.get("evidence", ()))}))
                for line in json.loads(path.read_text(encoding="utf-8"))]
    except (OSError, ValueError, TypeError, KeyError):
        return None


def all_marks(found: Found, tasks: Iterable[Task]) -> list[ItemMark]:
    """The kept marks of every task, with a remark where a student handed in a day twice, or several
    students the same file."""
    count = Counter((s.student, s.day) for s in found.submissions)
    marks = [mark for task in tasks for mark in read_kept(task.kept) or []]
    same = same_files(marks)
    remarks = ((mark, "several_files" if count[mark.student, mark.day] > 1 else "",
                "same_file" if (mark.day, mark.sha256) in same else "") for mark in marks)
    return [replace(mark, flags=(*mark.flags, *filter(None, more))) for mark, *more in remarks]


def same_files(marks: Iterable[ItemMark]) -> set[tuple[int, str]]:
    """Day and digest of files that several students handed in; not of those in which nothing was
    attempted, as in the notebook that was handed out."""
    students: dict[tuple[int, str], set[str]] = {}
    for mark in marks:
        if mark.status not in ("not_attempted", "unreadable"):
            students.setdefault((mark.day, mark.sha256), set()).add(mark.student)
    return {file for file, who in students.items() if len(who) > 1}


def keep_marks(out: Path, marks: Sequence[ItemMark]) -> None:
    """Keep the marks of the last run in one file, which review and merge go on from."""
    write_atomically(out / STATE / LAST, json.dumps([m.as_json() for m in marks]) + "\n")


def kept_marks(out: Path) -> list[ItemMark]:
    """The marks of the last run; CourseError where there are none."""
    marks = read_kept(out / STATE / LAST)
    if marks is None:
        raise CourseError(f"grade: {out} holds no graded submissions; run ./course grade run "
                          f"SUBMISSIONS -o {out} first.")
    return marks


def write_results(out: Path, marks: Sequence[ItemMark], human: Mapping[Key, HumanMark]) -> None:
    """Write the tables and every student's feedback, each file whole or not at all."""
    write_atomically(out / "grades.csv", tables.grades_csv(marks, human))
    write_atomically(out / "totals.csv", tables.totals_csv(marks, human))
    for folder, day, own in by_notebook(marks):
        place = out / "feedback" / folder
        place.mkdir(parents=True, exist_ok=True)
        write_atomically(place / f"day{day:02d}.md", feedback.markdown(own, human))
        write_atomically(place / f"day{day:02d}.html", feedback.page(own, human))


def by_notebook(marks: Sequence[ItemMark]) -> Iterator[tuple[str, int, list[ItemMark]]]:
    """(folder name, day, marks) of each student and day."""
    ordered = tables.in_order(marks)
    folders = folder_names(dict.fromkeys(mark.student for mark in ordered))
    for student, day in dict.fromkeys((mark.student, mark.day) for mark in ordered):
        own = [m for m in ordered if (m.student, m.day) == (student, day)]
        yield folders[student], day, own


def folder_names(students: Iterable[str]) -> dict[str, str]:
    """A folder name for each student that every file system takes; different students, different
    names."""
    names: dict[str, str] = {}
    used: set[str] = set()
    for student in students:
        name = "".join(c if c.isalnum() or c in " .-_()" else "_" for c in student)[:80].strip(" .")
        name = name.encode()[:200].decode(errors="ignore")  # a file system counts bytes
        digest = hashlib.sha256(student.encode("utf-8", "surrogatepass")).hexdigest()[:8]
        if not name or name != student or name.casefold() in used:
            name = f"{name or 'student'}-{digest}"
        used.add(name.casefold())
        names[student] = name
    return names
