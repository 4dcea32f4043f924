"""A folder of submissions, honest and hostile, gives exactly the expected table."""

from __future__ import annotations

import csv
import hashlib
import io
import os
import shutil
import signal
import subprocess
import sys
import time

import pytest
from folder_of_submissions import GOLDEN, lasting, write_folder

from course_lib.classroom.grading.batch import LAST, STATE
from course_lib.classroom.grading.submissions import find_submissions
from course_lib.paths import ROOT

if shutil.which("bwrap") is None and os.environ.get("CI") != "true":
    pytest.skip("bubblewrap is not installed", allow_module_level=True)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("submissions")
    write_folder(path)
    return path


def grade(folder, out, jobs):
    code = "import sys; from course_lib import cli; sys.exit(cli.main(sys.argv[1:]))"
    return subprocess.Popen(
        [sys.executable, "-c", code, "grade", "run", str(folder), "-o", str(out),
         "--jobs", str(jobs)], cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        env={**os.environ, "PYTHONPATH": str(ROOT)}, start_new_session=True)


def rows(out):
    text = (out / "grades.csv").read_text(encoding="utf-8-sig")
    return list(csv.DictReader(io.StringIO(text)))


def without_digests(found):
    return [lasting(row) for row in found]


def golden():
    return list(csv.DictReader(io.StringIO(GOLDEN.read_text(encoding="utf-8-sig"))))


def differences(found):
    """The rows that are not as expected, so that a failure is short."""
    expected = {(r["student"], r["item"]): r for r in golden()}
    got = {(r["student"], r["item"]): r for r in without_digests(found)}
    return [(expected.get(key), got.get(key)) for key in {**expected, **got}
            if expected.get(key) != got.get(key)]


@pytest.fixture(scope="module")
def graded(folder, tmp_path_factory):
    out = tmp_path_factory.mktemp("two-jobs")
    process = grade(folder, out, 2)
    printed, errors = process.communicate(timeout=900)
    assert process.returncode == 0, errors
    return out, printed, errors


def test_the_table_is_the_expected_one(folder, graded):
    out, printed, errors = graded
    assert differences(rows(out)) == []
    files = {s.student: s.content for s in find_submissions(folder).submissions}
    for row in rows(out):
        name = row["student"].removeprefix("'")
        assert row["sha256"] == hashlib.sha256(files[name] or b"").hexdigest()
    assert "not recognised, left out: notes.txt" in errors
    assert "not recognised, left out: day10.ipynb" in errors
    assert "hardest: " in printed


def test_killed_half_way_and_resumed_with_one_job(folder, graded, tmp_path):
    """An earlier run kept two thirds of the marks; what is left is enough to kill one amidst."""
    state = tmp_path / STATE
    state.mkdir()
    all_kept = sorted(path for path in (graded[0] / STATE).glob("*.json") if path.name != LAST)
    kept = [path for place, path in enumerate(all_kept) if place % 3]
    for path in kept:
        shutil.copy(path, state)
    process = grade(folder, tmp_path, 2)
    until = time.monotonic() + 300
    while len(list(state.glob("*.json"))) < (len(kept) + len(all_kept)) // 2:
        assert time.monotonic() < until and process.poll() is None
        time.sleep(0.05)
    os.killpg(process.pid, signal.SIGKILL)
    process.communicate()
    assert not (tmp_path / "grades.csv").exists()
    process = grade(folder, tmp_path, 1)
    _, errors = process.communicate(timeout=900)
    assert process.returncode == 0, errors
    for name in ("grades.csv", "totals.csv"):
        assert (tmp_path / name).read_bytes() == (graded[0] / name).read_bytes()
    assert fed_back(tmp_path) == fed_back(graded[0])


def fed_back(out):
    return {path.relative_to(out).as_posix(): path.read_bytes()
            for path in (out / "feedback").rglob("*") if path.is_file()}


def test_nothing_of_hidden_cases_is_written(graded):
    """The names of hidden cases and groups, and what the grader keeps, stay out of every file."""
    from course_lib.classroom.grading.day import load_day

    day = load_day(10)
    names = {case.name for item in day.hidden for group in day.groups(item)
             for case in group.cases if len(case.name) > 8}
    assert names
    out, printed, errors = graded
    texts = [printed, errors, *(path.read_text(encoding="utf-8") for path in out.rglob("*")
                                if path.is_file())]
    public = {case.name for item in day.items if hasattr(item, "cases") for case in item.cases()}
    assert [name for name in names - public if any(name in text for text in texts)] == []


def test_nothing_runs_on_and_nothing_was_written_outside(graded):
    assert not os.path.exists("/usr/share/stolen")
    for name in os.listdir("/proc"):
        if name.isdigit():
            try:
                with open(f"/proc/{name}/cmdline", "rb") as file:
                    assert b"inside.main(alone=" not in file.read()
            except OSError:
                pass


def test_the_bench_of_grading_measures_every_submission(tmp_path, monkeypatch):
    import json

    from course_lib.bench import grading

    monkeypatch.setattr(grading, "QUICK", 4)
    out = io.StringIO()
    grading.bench_grading(out, quick=True, jobs=1, json_path=str(tmp_path / "g.json"))
    (row,) = json.loads((tmp_path / "g.json").read_text())
    assert row["submissions"] == 4 and row["items_per_s"] == pytest.approx(
        2 * row["code_items_per_s"])
    assert row["memory_mb_at_the_end"] > 10 and "4 submissions, 1 jobs" in out.getvalue()
