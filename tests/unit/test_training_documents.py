"""Training documents of the shipped model: what they hold, and what their hints point at."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

from course_lib.lab import world
from course_lib.paths import MODELS, ROOT

sys.path.insert(0, str(ROOT / "tools"))

from needle_model.documents import (  # noqa: E402
    COPY_HEADS,
    SUBJECT_HEAD,
    W_VALUE,
    DocumentWriter,
)
from needle_model.tokenizer import build_tokenizer  # noqa: E402

SEEDS = range(40)


@pytest.fixture(scope="module")
def tokenizer():
    return build_tokenizer()


@pytest.fixture(scope="module")
def documents(tokenizer):
    writer = DocumentWriter(tokenizer)
    return [writer.write(seed, 512) for seed in SEEDS]


def test_the_shipped_tokenizer_is_the_one_that_training_builds(tokenizer):
    stored = Path(MODELS / "needle-qwen3" / "tokenizer.json").read_text(encoding="utf-8")
    assert tokenizer.to_str(pretty=True) == stored


def test_documents_fit_and_are_functions_of_their_seed(tokenizer, documents):
    assert all(len(d.ids) <= 512 for d in documents)
    again = DocumentWriter(tokenizer).write(SEEDS[3], 512)
    assert again == documents[3] != documents[4]


def test_piecewise_encoding_is_that_of_the_whole_text(tokenizer, documents):
    for d in documents:
        text = tokenizer.decode(d.ids, skip_special_tokens=False)
        assert tokenizer.encode(text, add_special_tokens=False).ids == d.ids


def test_no_document_holds_a_word_that_is_kept_for_evaluation(tokenizer, documents):
    known = {w.lower() for w in world.vocabulary_words()}
    made_up = {
        word
        for d in documents
        for word in re.findall(r"[a-z]+", tokenizer.decode(d.ids).lower())
        if word not in known and word != "s"
    }
    assert len(made_up) > 100
    assert not [word for word in made_up if world.is_held_out(word)]


def test_copy_hints_point_at_the_token_that_comes_next(documents):
    checked = 0
    for d in documents:
        for query, first, last in d.hints.get(COPY_HEADS[0], []):
            assert first == last < query
            assert d.ids[first] == d.ids[query + 1]
            assert d.weights[query + 1] == W_VALUE
            checked += 1
    assert checked > 300


def test_probe_spans_hold_four_tokens_that_stand_before_the_query(tokenizer, documents):
    """Four in a row: a probe of every fourth key meets one of them whatever the phase."""
    checked = 0
    for d in documents:
        for query, first, last in d.probes:
            assert last - first >= 3 and last < query
            text = tokenizer.decode(d.ids[first : last + 1])
            assert " is" in text and tokenizer.decode([d.ids[query + 1]]).strip() in text
            checked += 1
    assert checked > 300


def test_subject_hints_point_backwards_within_one_line(tokenizer, documents):
    for d in documents[:8]:
        for query, first, last in d.hints[SUBJECT_HEAD]:
            assert first <= last < query
            between = tokenizer.decode(d.ids[last + 1 : query])
            assert "\n" not in between.rstrip("\n")


def test_scored_values_are_stated_before_they_are_asked_for(tokenizer, documents):
    for d in documents:
        values = [i for i, scored in enumerate(d.is_value) if scored]
        assert values and all(d.weights[i] == W_VALUE for i in values)
