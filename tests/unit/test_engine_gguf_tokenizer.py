"""Tokenizers of GGUF metadata: how text is cut, what control and unused tokens become."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tokenizers import Tokenizer as HFTokenizer

from course_lib.engine.gguf_tokenizer import PRE_TOKENIZERS, SAME_AS, gguf_tokenizer
from tests.tiny_checkpoint import CHAT_TEMPLATE, tiny_tokenizer

PATH = Path("model.gguf")


def metadata(**changes):
    model = json.loads(tiny_tokenizer().to_str())["model"]
    tokens = sorted(model["vocab"], key=model["vocab"].get)
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [3, 3, 3] + [1] * (len(tokens) - 3),
        "tokenizer.ggml.merges": [" ".join(merge) for merge in model["merges"]],
        "tokenizer.chat_template": CHAT_TEMPLATE,
    } | {f"tokenizer.ggml.{key}": value for key, value in changes.items()}


def pieces(pre, text):
    """How `text` is cut before merging, blanks written as blanks."""
    definition = json.loads(tiny_tokenizer().to_str())
    definition["pre_tokenizer"] = PRE_TOKENIZERS[SAME_AS.get(pre, pre)]["pre_tokenizer"]
    found = HFTokenizer.from_str(json.dumps(definition)).pre_tokenizer.pre_tokenize_str(text)
    return [text[begin:end] for _, (begin, end) in found]


@pytest.mark.parametrize(("pre", "text", "expected"), [
    # Digits: one by one, three by three, all in one; a blank before them joins only gpt-2's.
    ("gpt-2", "a 1234  56", ["a", " 1234", " ", " 56"]),
    ("default", "a 1234", ["a", " 1234"]),
    ("smollm", "a 1234  56", ["a", " ", "1", "2", "3", "4", "  ", "5", "6"]),
    ("qwen2", "a 1234  56", ["a", " ", "1", "2", "3", "4", " ", " ", "5", "6"]),
    ("llama-bpe", "a 1234  56", ["a", " ", "123", "4", " ", " ", "56"]),
    ("llama3", "1234567", ["123", "456", "7"]),
    # What stands before a word, and capital contractions.
    ("gpt-2", "(yes) IT'S it's", ["(", "yes", ")", " IT", "'", "S", " it", "'s"]),
    ("qwen2", "(yes) IT'S it's", ["(yes", ")", " IT", "'S", " it", "'s"]),
    ("llama-v3", "(yes) IT'S", ["(yes", ")", " IT", "'S"]),
    # Newlines stay with punctuation, or by themselves.
    ("smollm", "a.\n\nb\n c", ["a", ".", "\n", "\n", "b", "\n", " c"]),
    ("qwen2", "a.\n\nb\n c", ["a", ".\n\n", "b", "\n", " c"]),
    ("llama-bpe", "拉面 12", ["拉面", " ", "12"]),
])
def test_how_text_is_cut(pre, text, expected):
    assert pieces(pre, text) == expected
    tokenizer = gguf_tokenizer(metadata(pre=pre), PATH)
    joined = [token for piece in expected for token in tokenizer.encode(piece)]
    assert tokenizer.encode(text) == joined
    assert tokenizer.decode(joined) == text


def test_only_qwen_composes_characters():
    decomposed = "e\u0301"
    composed = gguf_tokenizer(metadata(pre="qwen2"), PATH)
    assert composed.decode(composed.encode(decomposed)) == "é"
    for pre in ("gpt-2", "smollm", "llama-bpe"):
        tokenizer = gguf_tokenizer(metadata(pre=pre), PATH)
        assert tokenizer.decode(tokenizer.encode(decomposed)) == decomposed


def test_only_llama_takes_whole_words_before_merging():
    tokens = [*metadata()["tokenizer.ggml.tokens"], "xyz"]
    for pre, expected in (("llama-bpe", 1), ("qwen2", 3)):
        types = [3, 3, 3] + [1] * (len(tokens) - 3)
        tokenizer = gguf_tokenizer(metadata(pre=pre, tokens=tokens, token_type=types), PATH)
        assert len(tokenizer.encode("xyz")) == expected


def test_control_tokens_user_defined_ones_and_unused_ones():
    tokens = [*metadata()["tokenizer.ggml.tokens"], "<think>", "[PAD267]"]
    types = [3, 3, 3] + [1] * (len(tokens) - 5) + [4, 5]
    tokenizer = gguf_tokenizer(metadata(tokens=tokens, token_type=types), PATH)
    assert tokenizer.control_tokens == {
        "<|endoftext|>": 0, "<|im_start|>": 1, "<|im_end|>": 2, "<think>": len(tokens) - 2}
    assert tokenizer.encode("<think>") == [len(tokens) - 2]
    assert len(tokenizer.encode("<think>", allow_special=False)) > 1
    assert tokenizer.decode([len(tokens) - 1]) == ""
    assert len(tokenizer.encode("[PAD267]")) == 8
    assert tokenizer.vocab_size == len(tokens) - 1


def test_without_types_every_token_is_ordinary():
    values = metadata()
    del values["tokenizer.ggml.token_type"]
    assert gguf_tokenizer(values, PATH).control_tokens == {}


def test_special_tokens_reach_the_template():
    values = metadata(bos_token_id=0, eos_token_id=2, padding_token_id=10**6)
    values["tokenizer.chat_template"] = (
        "{{ bos_token }}{{ messages[0].content }}{{ eos_token }}{{ pad_token is defined }}")
    tokenizer = gguf_tokenizer(values, PATH)
    ids = tokenizer.apply_chat_template([{"role": "user", "content": "hello"}])
    assert tokenizer.decode(ids) == "<|endoftext|>hello<|im_end|>False"
    del values["tokenizer.chat_template"]
    assert gguf_tokenizer(values, PATH).chat_template is None
