"""Needle prompts: exact length, one needle, a value that nothing else states."""

from __future__ import annotations

import random

import pytest

from course_lib.errors import CourseError
from course_lib.lab import world
from course_lib.lab.prompts import ARTICLE_FACT, TEMPLATES, build_needle_prompt


def random_cases(count: int):
    rng = random.Random(11)
    for seed in range(count):
        yield {
            "seed": seed,
            "tokens": rng.randrange(64, 900),
            "position": rng.choice((0.0, 0.1, 0.5, 0.9, 1.0)),
            "template": rng.choice(TEMPLATES),
            "unseen": rng.random() < 0.4,
        }


@pytest.mark.parametrize("case", list(random_cases(40)), ids=lambda c: str(c["seed"]))
def test_a_prompt_has_exactly_its_tokens_and_one_needle(shipped_engine, case):
    seed = case["seed"]
    prompt = build_needle_prompt(shipped_engine, **case)
    text = shipped_engine.decode(list(prompt.ids))
    assert len(prompt.ids) == case["tokens"]
    assert text.count(prompt.fact.sentence) == 1
    assert text.count(" " + prompt.fact.value) == 1, seed
    assert text.count(prompt.fact.question) == 1
    first, last = prompt.value_span
    assert shipped_engine.decode(list(prompt.ids[first:last])) == " " + prompt.fact.value
    first, last = prompt.needle_span
    assert shipped_engine.decode(list(prompt.ids[first:last])) == prompt.fact.sentence + "\n"
    assert prompt.lines[prompt.needle_line] == prompt.fact.sentence


def test_no_note_asks_or_answers_the_needle_question_again(shipped_engine):
    prompt = build_needle_prompt(shipped_engine, "twice", tokens=2061)
    start = f"{prompt.fact.name}'s {prompt.fact.attribute} is"
    assert sum(line.startswith(start) for line in prompt.lines) == 1
    facts = [line for line in prompt.lines if "'s " in line]
    assert len({line.split(" is ")[0] for line in facts}) == len(facts)
    assert len(facts) > 80


@pytest.mark.parametrize("position, line", [(0.0, 0), (1.0, -1)])
def test_position_is_the_place_among_the_lines(shipped_engine, position, line):
    prompt = build_needle_prompt(shipped_engine, "end", tokens=500, position=position)
    assert prompt.lines[line] == prompt.fact.sentence


def test_a_prompt_is_a_function_of_its_seed(shipped_engine):
    one, again, other = (
        build_needle_prompt(shipped_engine, seed, tokens=300) for seed in ("a", "a", "b")
    )
    assert one == again
    assert one.ids != other.ids


def test_a_given_fact_is_the_needle_whatever_the_seed(shipped_engine):
    prompt = build_needle_prompt(shipped_engine, "any", tokens=300, fact=ARTICLE_FACT)
    assert prompt.fact == world.Fact("Zara", "favorite food", "ramen")


def test_unseen_needles_use_held_out_words(shipped_engine):
    fact = build_needle_prompt(shipped_engine, "new", tokens=300, unseen=True).fact
    assert world.is_held_out(fact.name) and world.is_held_out(fact.value)


def test_too_few_tokens_is_one_sentence_with_the_least_number(shipped_engine):
    with pytest.raises(CourseError, match=r"needs at least \d+ tokens"):
        build_needle_prompt(shipped_engine, "short", tokens=12)
    least = least_tokens(shipped_engine)
    prompt = build_needle_prompt(shipped_engine, "short", tokens=least)
    assert len(prompt.ids) == least and len(prompt.lines) == 1


def test_a_length_that_no_sentence_reaches_is_said(shipped_engine):
    with pytest.raises(CourseError, match="No choice of sentences gives exactly"):
        build_needle_prompt(shipped_engine, "short", tokens=least_tokens(shipped_engine) + 1)


def least_tokens(engine) -> int:
    """Tokens of the prompt "short" with its needle and no other line."""
    with pytest.raises(CourseError) as caught:
        build_needle_prompt(engine, "short", tokens=1)
    return int(str(caught.value).split("at least ")[1].split(" ")[0])


def test_unknown_template_and_position_are_refused(shipped_engine):
    with pytest.raises(ValueError, match="template must be one of chat, bare"):
        build_needle_prompt(shipped_engine, 1, template="raw")
    with pytest.raises(ValueError, match="position"):
        build_needle_prompt(shipped_engine, 1, position=1.5)
