"""Recorded runs: written whole or not at all, resumed only where they belong."""

from __future__ import annotations

import json
import os
import sys

import pytest

from course_lib.errors import CourseError
from course_lib.lab import runs
from course_lib.lab.experiments import EXPERIMENTS, Experiment
from course_lib.lab.needle import NeedleOptions
from course_lib.paths import ROOT

sys.path.insert(0, str(ROOT / "tools"))

import record_runs  # noqa: E402


def save(name="trial", records=({"index": 0, "k": "exact", "text": "读"},)):
    return runs.save_run(name, command="c", options={"k": [1]}, summary=[1], records=list(records))


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.setattr(runs, "RUNS", tmp_path)
    return tmp_path


def test_a_saved_run_comes_back_with_how_it_was_made(folder):
    path = save()
    run = runs.load_run("trial")
    assert run["records"] == [{"index": 0, "k": "exact", "text": "读"}]
    assert run["command"] == "c" and run["backend"] and run["date"] and run["course_version"]
    assert list(folder.iterdir()) == [path]


def test_a_write_that_fails_leaves_the_old_file_as_it_was(folder, monkeypatch):
    before = save().read_bytes()

    def fail(*names):
        raise OSError("disk")

    monkeypatch.setattr(os, "replace", fail)
    with pytest.raises(OSError, match="disk"):
        save(records=[{"index": 1}])
    assert (folder / "trial.json").read_bytes() == before


def test_an_absent_run_names_the_command_that_makes_it(folder):
    with pytest.raises(CourseError, match=r"python tools/record_runs\.py nothing"):
        runs.load_run("nothing")


class Recorder:
    """An experiment that counts its prompts and can be interrupted."""

    def __init__(self, prompts=4):
        self.made: list[int] = []
        self.stop_at: int | None = None
        self.experiment = Experiment(NeedleOptions(prompts=prompts), self.records, len, "a test")

    def records(self, engine, options, index):
        if index == self.stop_at:
            raise KeyboardInterrupt
        self.made.append(index)
        return [{"index": index, "k": k} for k in ("exact", 1)]


@pytest.fixture
def recorder(folder, monkeypatch):
    made = Recorder()
    monkeypatch.setitem(EXPERIMENTS, "trial", made.experiment)
    monkeypatch.setattr(record_runs, "PARTIAL", folder / "partial")
    (folder / "model.safetensors").write_bytes(b"weights")
    return made


def interrupt(recorder, folder):
    recorder.stop_at = 2
    with pytest.raises(KeyboardInterrupt):
        record_runs.record(None, "trial", folder)
    recorder.stop_at = None
    recorder.made.clear()
    return folder / "partial" / "trial.jsonl"


def test_an_interrupted_recording_goes_on_where_it_stopped(folder, recorder):
    interrupt(recorder, folder)
    record_runs.record(None, "trial", folder)
    assert recorder.made == [2, 3]
    run = runs.load_run("trial")
    assert run["summary"] == 8 and [r["index"] for r in run["records"]] == [0, 0, 1, 1, 2, 2, 3, 3]
    assert not list((folder / "partial").iterdir())


def test_a_torn_prompt_is_made_again(folder, recorder):
    partial = interrupt(recorder, folder)
    partial.write_text(partial.read_text()[:-9])
    record_runs.record(None, "trial", folder)
    assert recorder.made == [1, 2, 3] and runs.load_run("trial")["summary"] == 8


@pytest.mark.parametrize("change", ["model", "options", "header", "empty"])
def test_what_another_run_left_is_not_taken_over(folder, recorder, monkeypatch, change):
    partial = interrupt(recorder, folder)
    if change == "model":
        (folder / "model.safetensors").write_bytes(b"other")
    elif change == "options":
        header, *lines = partial.read_text().splitlines(keepends=True)
        header = json.loads(header)
        header["options"]["seed"] = 9
        partial.write_text(json.dumps(header) + "\n" + "".join(lines))
    elif change == "header":
        partial.write_text("".join(partial.read_text().splitlines(keepends=True)[1:]))
    else:
        partial.write_text("")
    record_runs.record(None, "trial", folder)
    assert recorder.made == [0, 1, 2, 3]
