"""The example day of docs/authoring.md: it is right, and the proofs fail when it is broken."""

from __future__ import annotations

import dataclasses
import json

import proofs
import pytest
from loading import load_day

import course_lib.classroom.exercises as exercises
from course_lib.classroom.hidden import mark
from course_lib.classroom.source import find_days
from course_lib.paths import ROOT

EXAMPLE = ROOT / "tests" / "fixtures" / "example_day"


@pytest.fixture
def proof(monkeypatch):
    monkeypatch.setattr(
        exercises, "__path__", [*exercises.__path__, str(EXAMPLE / "exercises")]
    )
    return load_day(find_days([99], EXAMPLE)[0], EXAMPLE)


@pytest.fixture
def item(proof):
    return proof.items["d99.a1"]


def with_hidden(proof, **changes):
    hidden = dataclasses.replace(proof.hidden["d99.a1"], **changes)
    return dataclasses.replace(proof, hidden={"d99.a1": hidden})


def test_code_exercise_is_proved(proof, item):
    proofs.hidden_is_well_formed(proof, item)
    proofs.stub_is_not_attempted(proof, item)
    proofs.solution_is_accepted(proof, item)
    proofs.alternative_is_accepted(proof, item)
    proofs.enough_mutants(proof, item)
    for name in proof.hidden[item.id].mutants:
        proofs.mutant_is_rejected(proof, item, name)


def test_reading_exercise_is_proved(proof):
    proofs.reading_is_proved(proof, proof.items["d99.b1"])


def test_a_surviving_mutant_fails_the_proof(proof, item):
    broken = with_hidden(proof, mutants={"right": proof.solutions.best_blocks})
    with pytest.raises(AssertionError, match="full marks"):
        proofs.mutant_is_rejected(broken, item, "right")
    with pytest.raises(AssertionError, match="fewer than four"):
        proofs.enough_mutants(broken, item)


def test_a_stub_is_no_mutant(proof, item):
    broken = with_hidden(proof, mutants={"stub": proof.stub(item)})
    with pytest.raises(AssertionError, match="is a stub"):
        proofs.mutant_is_rejected(broken, item, "stub")


def test_a_wrong_solution_or_alternative_fails_the_proof(proof, item):
    def wrong(scores, k):
        return [0]

    with pytest.raises(AssertionError):
        proofs.right_answer_is_accepted(proof, item, wrong)
    with pytest.raises(AssertionError):
        proofs.alternative_is_accepted(with_hidden(proof, alternative=None), item)


def test_points_that_do_not_add_up_fail_the_proof(proof, item):
    groups = proof.hidden[item.id].groups()[1:]
    with pytest.raises(AssertionError):
        proofs.solution_is_accepted(with_hidden(proof, groups=lambda: groups), item)


def test_changed_cited_code_fails_the_proof(proof, tmp_path, monkeypatch):
    stale = {"d99.b1": {"ties": {"kind": "any", "lines": []}, "winner": {}}}
    monkeypatch.setattr("course_lib.classroom.sealed.load", lambda item_id: stale[item_id])
    with pytest.raises(AssertionError, match="seal_readings"):
        proofs.reading_is_proved(proof, proof.items["d99.b1"])


def test_a_partly_right_answer_earns_its_groups(proof, item):
    higher = proof.hidden[item.id].mutants["accepts k = 0"]
    found = mark(item, proof.hidden[item.id], higher)
    assert (found.points, found.possible) == (3, 4)
    assert found.messages == ("Mind k < 1 and k above the number of blocks.",)


def test_the_sealed_file_shows_no_answer():
    text = (EXAMPLE / "exercises" / "sealed" / "day99.json").read_text(encoding="utf-8")
    assert set(json.loads(text)) == {"d99.b1"}
    for answer in ("generate", "argmax", '"winner": 1'):
        assert answer not in text
