"""How fast answers are graded, and whether the graders' memory stays flat."""

from __future__ import annotations

import ast
import copy
import json
import multiprocessing
import os
import sys
import tempfile
import time
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import TextIO

from course_lib.atomic import write_atomically
from course_lib.classroom.exercises import Exercise
from course_lib.classroom.grading import batch
from course_lib.classroom.grading.day import load_day
from course_lib.classroom.grading.sandbox import require_bubblewrap
from course_lib.classroom.grading.submissions import Found, Submission

DAY = 10
SUBMISSIONS, QUICK = 200, 24


def solved(number: int) -> bytes:
    """The day's notebook with the solutions in its answer cells; each number gives other bytes."""
    day = load_day(DAY)
    functions = {node.name: ast.unparse(node) for node in ast.parse(day.solutions).body
                 if isinstance(node, ast.FunctionDef)}
    of = {item.id: item.function for item in day.items if isinstance(item, Exercise)}
    book = copy.deepcopy(day.ours)
    for cell in book.cells:
        course = cell.metadata.get("course", {})
        if course.get("role") == "answer" and course["id"] in of:
            cell.source = f"# EXERCISE {course['id']}\n{functions[of[course['id']]]}\n# {number}"
    return json.dumps(book).encode()


def started(day: int) -> int:
    """Load what grades a day, in the process that will."""
    return load_day(day).number


def resident_mb(process: int) -> float:
    """Megabytes that a process holds in memory."""
    with open(f"/proc/{process}/statm", encoding="ascii") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 2**20


def bench_grading(out: TextIO, *, quick: bool, jobs: int, json_path: str | None) -> int:
    """Grade a folder of right answers and print items a second, of code answers and of all; and
    what the graders held in memory after the first quarter and at the end."""
    require_bubblewrap()
    count = QUICK if quick else SUBMISSIONS
    found = Found([Submission(f"s{i}", DAY, f"s{i}", solved(i), "") for i in range(count)], [])
    code = sum(isinstance(item, Exercise) for item in load_day(DAY).items)
    every = len(load_day(DAY).items)
    memory: list[float] = []
    with tempfile.TemporaryDirectory() as folder, ProcessPoolExecutor(
            jobs, mp_context=multiprocessing.get_context("spawn")) as executor:
        tasks = batch.tasks_of(found, Path(folder), unsandboxed=False)
        list(executor.map(started, [DAY] * jobs))  # the graders' start is not what is measured

        def finished(task: batch.Task, marks: list) -> None:
            pids = [process.pid or 0 for process in multiprocessing.active_children()]
            memory.append(sum(map(resident_mb, pids)))

        begin = time.perf_counter()
        batch.grade(tasks, jobs, False, finished, executor)
        seconds = time.perf_counter() - begin
    row = {"submissions": count, "jobs": jobs, "seconds": seconds,
           "code_items_per_s": count * code / seconds, "items_per_s": count * every / seconds,
           "memory_mb_after_a_quarter": memory[count // 4], "memory_mb_at_the_end": memory[-1]}
    print(f"day {DAY}: {count} submissions, {jobs} jobs, {seconds:.1f} s\n"
          f"{row['code_items_per_s']:8.1f} code answers a second, each in a sandbox of its own\n"
          f"{row['items_per_s']:8.1f} items a second with the reading ones\n"
          f"{memory[count // 4]:8.0f} MB held by the graders after a quarter, {memory[-1]:.0f} at "
          "the end", file=out)
    if json_path:
        write_atomically(json_path, json.dumps([row], indent=1) + "\n")
        print(f"written: {json_path}", file=sys.stderr)
    return 0
