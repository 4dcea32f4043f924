"""The written-out tokenizers against the tokenizers package and against each other."""

from __future__ import annotations

import json
import random

import pytest
from tokenizers import Tokenizer as HFTokenizer

from course_lib.paths import MODELS
from course_lib.tokenizing import bpe_encode, bpe_steps, longest_match, longest_match_scan

FILE = MODELS / "needle-qwen3" / "tokenizer.json"


@pytest.fixture(scope="module")
def shipped():
    return HFTokenizer.from_file(str(FILE))


@pytest.fixture(scope="module")
def merges():
    return json.loads(FILE.read_text(encoding="utf-8"))["model"]["merges"]


def _word(rng: random.Random) -> str:
    letters = rng.choice(["aeinrst", "abcdefghijklmnopqrstuvwxyzĠ", "ĠZa'r0129Ċ"])
    return "".join(rng.choice(letters) for _ in range(rng.randint(1, 14)))


def test_merges_are_those_of_the_package(shipped, merges):
    rng = random.Random(0)
    words = [_word(rng) for _ in range(150)] + ["Ġattention", "Ġhedgehog", "aaaa", "eeeee"]
    for word in words:
        expected = [shipped.id_to_token(t.id) for t in shipped.model.tokenize(word)]
        assert bpe_encode(merges, word) == expected, word


def test_steps_join_one_pair_at_a_time_and_lose_nothing():
    steps = list(bpe_steps([("a", "a"), ("aa", "a")], "aaaa"))
    assert steps == [(0, ["aa", "a", "a"]), (0, ["aa", "aa"])]
    assert list(bpe_steps([("a", "b")], "ba")) == [] and bpe_encode([], "") == []


@pytest.mark.parametrize("seed", range(30))
def test_the_index_finds_what_the_scan_finds(seed):
    rng = random.Random(seed)
    vocab = ["".join(rng.choice("abc") for _ in range(rng.randint(0, 4))) for _ in range(20)]
    vocab += ["a", "b", "c"]
    rng.shuffle(vocab)
    text = "".join(rng.choice("abc") for _ in range(40))
    ids = longest_match_scan(vocab, text)
    assert longest_match(vocab, text) == ids
    assert "".join(vocab[i] for i in ids) == text
    assert all(vocab.index(vocab[i]) == i for i in ids), "not the smallest id"


@pytest.mark.parametrize("match", [longest_match, longest_match_scan])
def test_text_without_a_token_is_refused(match):
    with pytest.raises(ValueError, match="position 2: 'z'"):
        match(["a", ""], "aaz")
    assert match([], "") == []
