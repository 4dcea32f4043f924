"""What every exercise must prove; each function asserts one thing about one item."""

from __future__ import annotations

import inspect
import json
import re
from typing import Any

from loading import DayProof

from course_lib.classroom import sealed
from course_lib.classroom.checking import report
from course_lib.classroom.exercises import Exercise, Reading
from course_lib.classroom.hidden import mark
from course_lib.classroom.sealed import Lines


def stub_is_not_attempted(proof: DayProof, item: Exercise) -> None:
    stub = proof.stub(item)
    assert report(item.id, stub) == (f"[ ] {item.id} not attempted", False)
    found = mark(item, proof.hidden[item.id], stub)
    assert (found.points, found.attempted) == (0, False), "the stub earns hidden points"


def right_answer_is_accepted(proof: DayProof, item: Exercise, answer) -> None:
    line, passed = report(item.id, answer)
    assert passed and line.startswith("[ok]"), line
    found = mark(item, proof.hidden[item.id], answer)
    assert found.points == found.possible == proof.points(item.id), found


def solution_is_accepted(proof: DayProof, item: Exercise) -> None:
    solution = getattr(proof.solutions, item.function)
    wanted = list(inspect.signature(proof.stub(item)).parameters)
    assert list(inspect.signature(solution).parameters) == wanted, "another signature"
    right_answer_is_accepted(proof, item, solution)


def alternative_is_accepted(proof: DayProof, item: Exercise) -> None:
    alternative = proof.hidden[item.id].alternative
    assert alternative is not None, f"{item.id} has no alternative right answer"
    right_answer_is_accepted(proof, item, alternative)


def enough_mutants(proof: DayProof, item: Exercise) -> None:
    mutants = proof.hidden[item.id].mutants
    assert len(set(mutants.values())) >= 4, f"{item.id} has fewer than four mutants"


def mutant_is_rejected(proof: DayProof, item: Exercise, name: str) -> None:
    mutant = proof.hidden[item.id].mutants[name]
    found = mark(item, proof.hidden[item.id], mutant)
    assert found.attempted, f"{name}: raises NotImplementedError, so it is a stub, not a mutant"
    assert found.points < found.possible, f"{name}: hidden cases give it full marks"


def hidden_is_well_formed(proof: DayProof, item: Exercise) -> None:
    for group in proof.hidden[item.id].groups():
        assert group.points > 0 and group.cases, group.name
        assert len(group.message.split()) >= 3, f"{group.name}: write a message to learn from"
    assert 3 <= len(item.cases()) <= 12, "give 3 to 12 public cases"


def reading_is_proved(proof: DayProof, item: Reading) -> None:
    """Blank is [ ], the truth is [ok], each part made wrong alone is [x]; sealed is current."""
    answer, _, rubric = proof.solutions.ANSWERS[item.id].partition("Rubric:")
    assert len(answer.split()) >= 8, "write a model answer and a rubric"
    stated = sum(map(int, re.findall(r"(\d+)\s+points?:", rubric)))
    assert stated == proof.points(item.id) - item.auto, "the rubric gives other points"
    assert (item.auto > 0) == bool(item.parts), "say with auto= what the parts earn"
    truths = proof.readings.get(item.id, {})
    assert tuple(truths) == item.parts
    if not item.parts:
        return
    current = json.loads(sealed.seal_day(proof.readings))[item.id]
    assert sealed.load(item.id) == current, "the cited code changed: run tools/seal_readings.py"
    assert report(item.id, proof.evidence(item.id))[0] == f"[ ] {item.id} not attempted"
    right = {part: as_written(truth) for part, truth in truths.items()}
    line, passed = report(item.id, right)
    assert passed, line
    for part in item.parts:
        line, passed = report(item.id, {**right, part: _made_wrong(truths[part])})
        assert not passed and f": {part} — " in line, line
        for other in truths[part][1:] if isinstance(truths[part], list) else ():
            line, passed = report(item.id, {**right, part: as_written(other)})
            assert passed, line


def as_written(truth: Any) -> Any:
    """What a learner would write for this truth."""
    if isinstance(truth, Lines):
        first, last = truth.find()
        return f"{truth.path}:{first}-{last}"
    if isinstance(truth, list):
        return as_written(truth[0])
    if isinstance(truth, tuple):
        return [as_written(target) for target in truth]
    return truth


def _made_wrong(truth: Any) -> Any:
    if isinstance(truth, Lines):
        _, last = truth.find()
        count = len((sealed.ROOT / truth.path).read_text(encoding="utf-8").splitlines())
        return f"{truth.path}:1-1" if last > 1 else f"{truth.path}:{count}-{count}"
    if isinstance(truth, list):
        return _made_wrong(truth[0])
    if isinstance(truth, tuple):
        return [as_written(truth[0])] * len(truth)
    if isinstance(truth, bool):
        return not truth
    return truth + 1 if isinstance(truth, (int, float)) else f"not {truth}"
