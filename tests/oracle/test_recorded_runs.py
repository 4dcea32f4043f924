"""Recorded runs are what the code of today gives: some records of every file are made again."""

from __future__ import annotations

import json
import random

import pytest

import course_lib.lab.experiments as experiments
from course_lib.lab.runs import load_run
from course_lib.paths import MODELS, ROOT, RUNS

NAMES = list(experiments.EXPERIMENTS)


def test_every_file_belongs_to_an_experiment_and_every_experiment_has_its_file():
    assert sorted(path.stem for path in RUNS.glob("*.json")) == sorted(NAMES)


@pytest.mark.parametrize("name", NAMES)
def test_a_file_says_how_it_was_made_and_its_summary_is_that_of_its_records(name):
    run, experiment = load_run(name), experiments.EXPERIMENTS[name]
    assert run["command"] == f"python tools/record_runs.py {name}"
    assert run["date"] and run["backend"] and run["course_version"]
    as_stored = json.loads(json.dumps(experiments.options_record(experiment)))
    assert run["options"] == as_stored
    assert run["summary"] == experiment.summarize(run["records"])
    options = experiment.options
    assert [r["index"] for r in run["records"]] == [
        index for index in range(options.prompts) for _ in options.arms()
    ]
    if "k" in run["records"][0]:
        arms = [arm.k for arm in options.arms()]
        assert [r["k"] for r in run["records"]] == arms * options.prompts


@pytest.mark.parametrize("name", NAMES)
def test_records_come_out_again(name, shipped_engine):
    run, experiment = load_run(name), experiments.EXPERIMENTS[name]
    # A new recording chooses other prompts to make again.
    rng = random.Random(repr(run["records"]))
    for index in sorted(rng.sample(range(experiment.options.prompts), experiment.reruns)):
        stored = [r for r in run["records"] if r["index"] == index]
        again = experiment.records(shipped_engine, experiment.options, index)
        assert len(again) == len(stored)
        for new, old in zip(again, stored, strict=True):
            # A collapsed text may flip at a near tie on another machine's BLAS: what the arm
            # found is compared always, its wording where it found the needle.
            keys = set(experiment.exact_keys)
            if not old.get("recalled", True):
                keys -= {"text"}
            for key in keys:
                assert new[key] == old[key], (index, new, old)
            for key in experiment.close_keys:
                if old.get("recalled", True):
                    close = pytest.approx(old[key], rel=experiment.close, abs=1e-3)
                    assert new[key] == close, (index, key)


def test_model_card_and_readme_hold_the_recorded_numbers():
    import sys

    sys.path.insert(0, str(ROOT / "tools"))
    import write_results

    card = (MODELS / "needle-qwen3" / "README.md").read_text(encoding="utf-8")
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    assert card == write_results.card(), "run python tools/write_results.py"
    assert readme == write_results.readme(), "run python tools/write_results.py"
