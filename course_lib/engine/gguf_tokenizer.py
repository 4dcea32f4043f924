"""The tokenizer and chat template that a GGUF file's metadata describe."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from course_lib.engine.chat import ChatTemplate
from course_lib.engine.config_keys import shown
from course_lib.engine.files import one_line
from course_lib.engine.gguf_header import REMEDY
from course_lib.engine.tokenizer import Tokenizer
from course_lib.errors import CourseError

KEY = "tokenizer.ggml."
NORMAL, CONTROL, USER_DEFINED, UNUSED = 1, 3, 4, 5

# How text is cut before bytes are merged, as the models' own tokenizer.json say it.
QWEN2 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
LLAMA3 = QWEN2.replace(r"|\p{N}|", r"|\p{N}{1,3}|")


def _byte_level(use_regex: bool) -> dict[str, Any]:
    return {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True,
            "use_regex": use_regex}


def _sequence(first: dict[str, Any], use_regex: bool) -> dict[str, Any]:
    return {"type": "Sequence", "pretokenizers": [first, _byte_level(use_regex)]}


def _split(pattern: str) -> dict[str, Any]:
    return _sequence({"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated",
                      "invert": False}, use_regex=False)


PRE_TOKENIZERS: dict[str, dict[str, Any]] = {
    "gpt-2": {"pre_tokenizer": _byte_level(True)},
    "smollm": {"pre_tokenizer": _sequence({"type": "Digits", "individual_digits": True}, True)},
    "qwen2": {"pre_tokenizer": _split(QWEN2), "normalizer": {"type": "NFC"}},
    "llama-bpe": {"pre_tokenizer": _split(LLAMA3), "ignore_merges": True},
}
"""tokenizer.ggml.pre -> parts of a tokenizer.json."""
SAME_AS = {"default": "gpt-2", "llama3": "llama-bpe", "llama-v3": "llama-bpe"}


def gguf_tokenizer(metadata: Mapping[str, Any], path: Path) -> Tokenizer:
    """The tokenizer of a GGUF file with this metadata; `path` stands in errors.

    Raises CourseError for another kind of tokenizer than byte-level BPE, for a way of cutting text
    that is not known, and for lists that are missing or do not belong together.
    """
    return Tokenizer.from_definition(
        _definition(metadata, path), _chat_template(metadata, path), path, remedy=REMEDY
    )


def _definition(metadata: Mapping[str, Any], path: Path) -> dict[str, Any]:
    """What a tokenizer.json of the same tokenizer says."""
    model = metadata.get(KEY + "model")
    if model != "gpt2":
        raise CourseError(
            f"{path}: its tokenizer is of the kind {shown(model)}, only 'gpt2' (byte-level BPE) is "
            "supported: choose another model"
        )
    pre = metadata.get(KEY + "pre", "default")
    parts = PRE_TOKENIZERS.get(SAME_AS.get(pre, pre)) if isinstance(pre, str) else None
    if parts is None:
        raise CourseError(
            f"{path}: its tokenizer cuts text as {shown(pre)}, known are "
            f"{', '.join(PRE_TOKENIZERS)}: choose another model"
        )
    tokens, merges = (_strings(metadata, KEY + name, path) for name in ("tokens", "merges"))
    types = metadata.get(KEY + "token_type", [NORMAL] * len(tokens))
    if not isinstance(types, list) or len(types) != len(tokens):
        raise CourseError(f"{path}: {KEY}token_type does not fit {len(tokens)} tokens: {REMEDY}")
    if len(set(tokens)) < len(tokens):
        raise CourseError(f"{path}: {KEY}tokens holds a token twice: {REMEDY}")
    added = [
        {"id": id, "content": tokens[id], "single_word": False, "lstrip": False, "rstrip": False,
         "normalized": False, "special": types[id] == CONTROL}
        for id in range(len(tokens)) if types[id] in (CONTROL, USER_DEFINED)
    ]
    # Unused tokens fill the vocabulary up to a round size; no text is made of them.
    vocab = {text: id for id, text in enumerate(tokens) if types[id] != UNUSED}
    pairs = [merge.split(" ") for merge in merges]
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": added,
        "normalizer": parts.get("normalizer"),
        "pre_tokenizer": parts["pre_tokenizer"],
        "post_processor": None,
        "decoder": _byte_level(True),
        "model": {
            "type": "BPE", "dropout": None, "unk_token": None, "continuing_subword_prefix": None,
            "end_of_word_suffix": None, "fuse_unk": False, "byte_fallback": False,
            "ignore_merges": parts.get("ignore_merges", False), "vocab": vocab, "merges": pairs,
        },
    }


def _chat_template(metadata: Mapping[str, Any], path: Path) -> ChatTemplate | None:
    source = metadata.get("tokenizer.chat_template")
    if source is None:
        return None
    tokens = _strings(metadata, KEY + "tokens", path)
    special = {}
    for ours, theirs in (("bos", "bos"), ("eos", "eos"), ("unk", "unknown"), ("pad", "padding")):
        id = metadata.get(f"{KEY}{theirs}_token_id")
        if isinstance(id, int) and 0 <= id < len(tokens):
            special[f"{ours}_token"] = tokens[id]
    name = f"{path}: the chat template"
    try:
        if not isinstance(source, str):
            raise TypeError("it is no text")
        return ChatTemplate(source, special, name)
    except Exception as error:  # not TemplateError alone: {% break %} gives a SyntaxError
        raise CourseError(f"{name} is not valid ({one_line(error)}): {REMEDY}") from None


def _strings(metadata: Mapping[str, Any], key: str, path: Path) -> list[str]:
    value = metadata.get(key)
    if not isinstance(value, list) or not all(isinstance(text, str) for text in value):
        raise CourseError(f"{path}: {key} is missing: {REMEDY}")
    return value
