"""Tokenizers as real checkpoints have them, trained here: none of them knows the world's words."""

from __future__ import annotations

import json
import random
from functools import cache

from tokenizers import Regex, decoders, models, pre_tokenizers, trainers
from tokenizers import Tokenizer as HFTokenizer

from course_lib.engine.chat import ChatTemplate
from course_lib.engine.tokenizer import Tokenizer
from course_lib.lab import world

SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
# A preamble and an empty thought, as several published templates write them.
CHAT_TEMPLATE = (
    "{{- '<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n' -}}"
    "{%- for message in messages -%}"
    "{{- '<|im_start|>' + message.role + '\n' + message.content + '<|im_end|>\n' -}}"
    "{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\n' -}}"
    "{%- if enable_thinking is defined and enable_thinking is false -%}"
    "{{- '<think>\n\n</think>\n\n' -}}{%- endif -%}{%- endif -%}"
)
# Qwen: a full stop joins the line ends behind it; digits one by one.
QWEN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def split(kind: str):
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    if kind == "qwen":
        return pre_tokenizers.Sequence([pre_tokenizers.Split(Regex(QWEN), "isolated"), byte_level])
    if kind == "smollm2":
        return pre_tokenizers.Sequence([
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)])
    return byte_level  # no border at all: merges run across words and lines


@cache
def other_tokenizer(kind: str) -> Tokenizer:
    """kind: "qwen", "smollm2", "merges across lines", or "bytes" (one token a byte)."""
    rng = random.Random(kind)
    trained = HFTokenizer(models.BPE())
    trained.pre_tokenizer = split(kind)
    trained.decoder = decoders.ByteLevel()
    texts = []
    for _ in range(150):
        name, attribute = rng.choice(world.NAMES), rng.choice(list(world.ATTRIBUTES))
        fact = world.Fact(name, attribute, world.random_value(rng, attribute))
        texts.append(fact.sentence + "\n" + world.filler_sentence(rng) + "\n\nAnswer in one")
    trained.train_from_iterator(texts, trainers.BpeTrainer(
        vocab_size=259 if kind == "bytes" else 600, special_tokens=SPECIAL, show_progress=False,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet()))
    return Tokenizer(json.loads(trained.to_str()), ChatTemplate(CHAT_TEMPLATE))
