"""The world of notes: what training and evaluation may use, and what one token each means."""

from __future__ import annotations

import random

import pytest

from course_lib.lab import world


def test_words_of_training_and_of_evaluation_never_meet():
    rng = random.Random(5)
    training = {world.made_up_word(rng) for _ in range(4000)}
    held_out = {world.made_up_word(rng, held_out=True) for _ in range(4000)}
    assert not training & held_out
    assert len(held_out) > 400
    assert not any(world.is_held_out(word) for word in training)
    assert all(world.is_held_out(word.capitalize()) for word in held_out)


def test_held_out_names_and_values_are_held_out():
    rng = random.Random(6)
    for attribute in world.ATTRIBUTES:
        assert world.is_held_out(world.random_name(rng, held_out=True))
        assert world.is_held_out(world.random_value(rng, attribute, held_out=True))


def test_closed_lists_have_no_repeats_and_24_values_each():
    assert len(set(world.NAMES)) == len(world.NAMES) == 120
    closed = [values for values in world.ATTRIBUTES.values() if values]
    assert [len(set(values)) for values in closed] == [24] * 6
    assert not set(world.NAMES) & {v for values in closed for v in values}


def test_a_fact_is_its_parts_in_order():
    fact = world.Fact("Zara", "favorite food", "ramen")
    assert fact.sentence == "Zara's favorite food is ramen."
    assert fact.question == "What is Zara's favorite food?"
    assert [role for role, _ in fact.parts if role != "glue"] == ["name", "attribute", "value"]


def test_a_chain_states_its_number_and_lists_variables_in_order():
    chain = [world.Assignment("zamu", "48213"), world.Assignment("qiro", "zamu")]
    assert [line.sentence for line in chain] == ["VAR zamu = 48213.", "VAR qiro = zamu."]
    assert world.chain_question(chain) == "List the 2 variables that hold 48213."
    assert world.chain_answer(chain) == "VAR zamu, VAR qiro."


@pytest.mark.parametrize("digits", [1, 4, 5])
def test_numbers_have_exactly_their_digits(digits):
    rng = random.Random(digits)
    assert {len(world.number(rng, digits)) for _ in range(300)} == {digits}


def test_the_same_seed_gives_the_same_sentences():
    """These values were written down once: a prompt must not change with the Python version."""
    rng = random.Random("needle-0")
    first = [world.filler_sentence(rng), world.made_up_word(rng), world.number(rng)]
    rng = random.Random("needle-0")
    assert first == [world.filler_sentence(rng), world.made_up_word(rng), world.number(rng)]
    assert first == FIRST_OF_SEED_0


FIRST_OF_SEED_0 = ["The library crosses the tunnel.", "suguno", "2647"]


def test_every_word_of_the_world_is_one_token(shipped_engine):
    for word in world.vocabulary_words():
        ids = shipped_engine.encode(" " + word, allow_special=False)
        assert len(ids) == 1, word
    for name in world.NAMES:
        assert len(shipped_engine.encode(name, allow_special=False)) == 1, name
