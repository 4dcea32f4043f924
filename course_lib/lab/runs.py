"""Recorded experiments: files of data/runs, written by tools/record_runs.py, shown in lessons.

A file holds the command that makes it, course version, backend, date, a summary and one record per
trial, so that a lesson can show 200 prompts without running them and a test can re-run a few.
"""

from __future__ import annotations

import datetime
import json
from pathlib import Path
from typing import Any

import numpy as np

import course_lib
from course_lib import backend
from course_lib.atomic import write_atomically
from course_lib.errors import CourseError
from course_lib.paths import RUNS


def load_run(name: str) -> dict[str, Any]:
    """The recorded run `name` (data/runs/<name>.json). Raises CourseError if it is absent."""
    path = RUNS / f"{name}.json"
    if not path.exists():
        raise CourseError(
            f"data/runs/{name}.json is missing; make it with "
            f"python tools/record_runs.py {name}."
        )
    return json.loads(path.read_text(encoding="utf-8"))


def save_run(
    name: str, *, command: str, options: dict, summary: Any, records: list[dict]
) -> Path:
    """Write data/runs/<name>.json, whole or not at all; the path of the file."""
    run = {
        "name": name,
        "command": command,
        "course_version": course_lib.__version__,
        "backend": backend.info().name,
        "numpy": np.__version__,
        "date": datetime.date.today().isoformat(),
        "options": options,
        "summary": summary,
    }
    head = json.dumps(run, ensure_ascii=False, indent=1)
    lines = ",\n  ".join(json.dumps(r, ensure_ascii=False) for r in records)
    text = head[:-2] + f',\n "records": [\n  {lines}\n ]\n}}\n'
    json.loads(text)
    RUNS.mkdir(parents=True, exist_ok=True)
    path = RUNS / f"{name}.json"
    write_atomically(path, text)
    return path
