"""Needle prompts: exact length, one needle, a value that nothing else states."""

from __future__ import annotations

import random

import pytest

from course_lib.errors import CourseError
from course_lib.lab import world
from course_lib.lab.notes import Notes, exact_subset
from course_lib.lab.prompts import (
    ARTICLE_FACT,
    INSTRUCTION,
    TEMPLATES,
    build_needle_prompt,
    default_template,
)
from tests.other_tokenizers import other_tokenizer

OTHERS = ("qwen", "smollm2", "merges across lines", "bytes")


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
    with pytest.raises(ValueError, match="template must be one of chat, instruct, bare"):
        build_needle_prompt(shipped_engine, 1, template="raw")
    with pytest.raises(ValueError, match="position"):
        build_needle_prompt(shipped_engine, 1, position=1.5)


@pytest.mark.parametrize("kind", OTHERS)
@pytest.mark.parametrize("template", TEMPLATES)
@pytest.mark.parametrize("position", [0.0, 0.5, 1.0])
def test_other_tokenizers_hit_their_length_too(kind, template, position):
    tokenizer = other_tokenizer(kind)
    for seed, tokens in enumerate((700, 1003, 2061)):
        prompt = build_needle_prompt(
            tokenizer, seed, tokens=tokens, position=position, template=template)
        ids, (first, end), (value, after) = prompt.ids, prompt.needle_span, prompt.value_span
        assert len(ids) == tokens and tokenizer.decode(ids).count(prompt.fact.sentence) == 1
        # The spans hold the needle and its value, and no token at their ends does without.
        assert prompt.fact.sentence in tokenizer.decode(ids[first:end])
        assert prompt.fact.sentence not in tokenizer.decode(ids[first + 1 : end])
        assert " " + prompt.fact.value in tokenizer.decode(ids[value:after])
        for smaller in (ids[value + 1 : after], ids[value : after - 1]):
            assert " " + prompt.fact.value not in tokenizer.decode(smaller)
        assert first <= value < after <= end


@pytest.mark.parametrize("kind", OTHERS)
def test_short_prompts_are_hit_or_refused_in_one_sentence(kind):
    tokenizer, hit = other_tokenizer(kind), 0
    for tokens in range(150, 400, 23):
        try:
            prompt = build_needle_prompt(tokenizer, "short", tokens=tokens, template="instruct")
        except CourseError as error:
            assert "needs at least" in str(error) or "No choice of sentences" in str(error)
        else:
            hit += len(prompt.ids) == tokens
    assert hit > 3


def test_a_model_of_the_world_keeps_its_format_and_others_get_instructions(shipped_engine):
    assert default_template(shipped_engine) == "chat"
    assert {default_template(other_tokenizer(kind)) for kind in OTHERS} == {"instruct"}
    prompt = build_needle_prompt(other_tokenizer("qwen"), 0, tokens=700, template="instruct")
    fact = prompt.fact
    beginning = f"{fact.name}'s {fact.attribute} is"
    end = f"Question: {prompt.question}\n{INSTRUCTION.format(beginning)}"
    assert f'"{beginning}"' in end
    assert prompt.content.endswith(end) and prompt.content.startswith("Read these notes.\n")
    assert prompt.content in other_tokenizer("qwen").decode(prompt.ids)


@pytest.mark.parametrize("total, sums", [(0, 0), (7, 7), (8, 7), (11, 7), (19, 19), (99, 26)])
def test_a_subset_has_the_sum_or_the_next_below(total, sums):
    pool = [("a", 7), ("b", 7), ("c", 12)]
    chosen = exact_subset(pool, total)
    assert sum(price for _, price in chosen) == sums and len(set(chosen)) == len(chosen)


def test_lines_return_to_the_tail_until_the_budget_is_hit():
    """Lines of 7 and of 20 tokens: 43 tokens cannot be hit, 63 can."""
    missed = []
    for budget in range(150, 300):
        rng = random.Random(budget)
        lines = Notes(lambda rng=rng: "x" * rng.choice((7, 20)), len, budget).lines()
        missed += [budget] * (sum(map(len, lines)) != budget)
    assert not missed


def test_lines_longer_than_what_is_left_end():
    assert Notes(lambda: "x" * 60, len, 110).lines() == ["x" * 60]
    assert Notes(lambda: "x" * 60, len, 10).lines() == []
