#!/usr/bin/env python3
"""Write the tokens that llama.cpp makes of some texts with the real model smollm2.

    python tools/make_token_golden.py          # extra `peer`: llama-cpp-python

transformers reads a GGUF file's vocabulary but not how its tokenizer cuts text (tokenizer.ggml.pre)
and always cuts as GPT-2 does: where two blanks stand before a digit, and in numbers that are not
0 … 9, its tokens are not the model's. llama.cpp knows, and shares no code with the engine.
tests/oracle/golden/smollm2_tokens.json holds the texts, their ids and whether they have such
numbers.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import unicodedata
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from course_lib.launcher.extras import need  # noqa: E402

if __name__ == "__main__":  # before what needs the extra
    argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    need("peer", "llama_cpp")

from llama_cpp import Llama  # noqa: E402

from course_lib.atomic import write_atomically  # noqa: E402
from course_lib.known_models import installed_file  # noqa: E402

GOLDEN = ROOT / "tests" / "oracle" / "golden" / "smollm2_tokens.json"
TEXTS = (
    "", " ", "\n", "   \n\n  ", "Hello, world!", "  leading", "trailing  ", "tab\tand\r\nreturn",
    "In 2024 I paid 123456 € for 3.14 kg.", "1 22  333   4444\n5", "½ ³ Ⅷ 四 ٣٤ 12,345.67",
    "I'm we're they'll IT'S 'tis don'T", "def f(x):\n    return x**2  # 好\n\tif a:\n\t\tb\n",
    "大语言模型在板上推理,第 12 天:KV 缓存。", "😀😀 a😀b 👩\u200d👩\u200d👧",
    "naïve café e\u0301 Ångström", "مرحبا हिन्दी ไทย",
    "\u00a0no-break\u3000ideographic\u200bzero", "https://a.b/c?d=e&f=%20#g", "A" * 60,
    "<|im_end|> <|im_start|>user\n<repo_name>", "a  b   c    d     e", '{"k": [1, 2.5e-3, null]}',
)
LETTERS = "abz Z19\n\t.,'好é😀_-  "


def main() -> None:
    choose = random.Random(0)
    drawn = ["".join(choose.choice(LETTERS) for _ in range(choose.randrange(4, 30)))
             for _ in range(40)]
    model = Llama(str(installed_file("smollm2")), vocab_only=True, verbose=False)
    lines = []
    for text in dict.fromkeys((*TEXTS, *drawn)):
        ids = model.tokenize(text.encode(), add_bos=False, special=False)
        case = {"text": text, "numbers_apart": numbers_apart(text), "ids": ids}
        lines.append(json.dumps(case, ensure_ascii=False))
    write_atomically(GOLDEN, '{"model": "smollm2", "texts": [\n' + ",\n".join(lines) + "\n]}\n")


def numbers_apart(text: str) -> bool:
    """Whether cutting numbers apart from blanks, digit by digit, can change the tokens."""
    return any(unicodedata.category(letter)[0] == "N"
               and (not letter.isascii() or text[max(place - 2, 0) : place].isspace() and place > 1)
               for place, letter in enumerate(text))


if __name__ == "__main__":
    main()
