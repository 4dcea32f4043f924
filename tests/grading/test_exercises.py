"""Every exercise of every day: stub, solution, alternative and mutants give what they should."""

from __future__ import annotations

import proofs
import pytest
from loading import DayProof, days_with_exercises, load_day

from course_lib.classroom.exercises import Exercise, Reading


def _cases():
    for day in days_with_exercises():
        proof = load_day(day)
        for item in proof.items.values():
            yield proof, item


ITEMS = list(_cases())
CODE = [(p, i) for p, i in ITEMS if isinstance(i, Exercise)]
READINGS = [(p, i) for p, i in ITEMS if isinstance(i, Reading)]
MUTANTS = [(p, i, name) for p, i in CODE for name in p.hidden[i.id].mutants]


def _name(value) -> str:
    if isinstance(value, DayProof):
        return f"day{value.day.number:02d}"
    return value if isinstance(value, str) else value.id


@pytest.mark.parametrize("proof, item", CODE, ids=_name)
@pytest.mark.parametrize("proves", [
    proofs.hidden_is_well_formed,
    proofs.stub_is_not_attempted,
    proofs.solution_is_accepted,
    proofs.alternative_is_accepted,
    proofs.enough_mutants,
], ids=lambda f: f.__name__)
def test_code_exercise(proof, item, proves):
    proves(proof, item)


@pytest.mark.parametrize("proof, item, mutant", MUTANTS, ids=_name)
def test_mutant_is_rejected(proof, item, mutant):
    proofs.mutant_is_rejected(proof, item, mutant)


@pytest.mark.parametrize("proof, item", READINGS, ids=_name)
def test_reading_exercise(proof, item):
    proofs.reading_is_proved(proof, item)


def test_every_day_names_only_its_own_items():
    for day in days_with_exercises():
        proof = load_day(day)
        code = {i.id for i in proof.items.values() if isinstance(i, Exercise)}
        assert set(proof.hidden) == code
        assert set(proof.readings) <= set(proof.items) - code
