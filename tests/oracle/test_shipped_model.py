"""What the shipped model must do: recall, follow the text rather than its habits, collapse."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from course_lib.engine import generate_from
from course_lib.lab import world
from course_lib.lab.needle import NeedleOptions, holds_value, prompt_of
from course_lib.lab.needle_results import run_needle
from course_lib.lab.prompts import prompt_ids

OPTIONS = NeedleOptions(prompts=4, seed=7, ks=(32, 1))


def answer(engine, lines: list[str], question: str) -> str:
    session = engine.prefill(prompt_ids(engine, lines, question, "chat"))
    return engine.decode(generate_from(session, 24).ids)


def test_it_recalls_at_2061_tokens_and_loses_the_needle_at_k_1(shipped_engine):
    exact, k32, k1 = run_needle(shipped_engine, OPTIONS)
    assert exact.recall == 1.0
    assert k32.recall == 1.0
    assert k1.recall == 0.0


@pytest.mark.parametrize("index", range(3))
def test_another_value_in_the_same_prompt_gives_another_answer(shipped_engine, index):
    """The control: the answer comes from the note, not from what the model likes to say."""
    prompt = prompt_of(shipped_engine, replace(OPTIONS, tokens=1024), index)
    rng = random.Random(index)
    other = prompt.fact.value
    while other == prompt.fact.value:
        other = world.random_value(rng, prompt.fact.attribute)
    lines = list(prompt.lines)
    lines[prompt.needle_line] = world.Fact(prompt.fact.name, prompt.fact.attribute, other).sentence
    text = answer(shipped_engine, lines, prompt.question)
    assert holds_value(text, other) and not holds_value(text, prompt.fact.value)


def test_without_the_note_it_does_not_know_the_articles_answer(shipped_engine):
    prompt = prompt_of(shipped_engine, NeedleOptions(), 0)
    lines = [line for line in prompt.lines if line != prompt.fact.sentence]
    assert not holds_value(answer(shipped_engine, lines, prompt.question), "ramen")
    assert not holds_value(answer(shipped_engine, [], prompt.question), "ramen")


def test_q8_rows_give_the_same_answers(shipped_engine):
    for kv in ("f32", "q8"):
        (exact,) = run_needle(shipped_engine, replace(OPTIONS, kv=kv, ks=(), tokens=1024))
        assert exact.recall == 1.0, kv
