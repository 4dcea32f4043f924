#!/usr/bin/env python3
"""Choose prompts on which the engine and transformers must write the same text.

    .venv-oracle/bin/python tools/choose_prompts.py    # what the suite oracle-torch runs in

Both continue each candidate greedily with the real model smollm2 in float32. Where every choice is
clear (the best logit leads the second by more than 10 times the largest difference of a logit
between the two), rounding cannot have decided. tests/oracle/golden/smollm2_prompts.json lists the
20 clearest, with the tokens that were written, the smallest lead and the largest difference;
tests/oracle/test_smollm2.py checks all of it.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from course_lib.launcher.extras import need  # noqa: E402

if __name__ == "__main__":  # before what needs the extra
    argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    need("oracle", "torch", "transformers", "accelerate")

from tqdm import tqdm  # noqa: E402

from course_lib.atomic import write_atomically  # noqa: E402
from course_lib.engine import Engine  # noqa: E402
from tests.oracle.two_engines import TwoEngines, prompt_ids  # noqa: E402

GOLDEN = ROOT / "tests" / "oracle" / "golden" / "smollm2_prompts.json"
WANTED, NEW_TOKENS = 20, 32
QUESTIONS = (
    "What is the capital of France?",
    "Name three primary colours.",
    "Write one sentence about the sea.",
    "What does a compiler do?",
    "Is 17 a prime number?",
    "Translate 'good morning' into Spanish.",
    "Who wrote Romeo and Juliet?",
    "Explain photosynthesis to a child.",
    "What is 12 plus 30?",
    "Give me a recipe for pancakes.",
    "List the days of the week.",
    "Why is the sky blue?",
    "Write a haiku about rain.",
    "What is the opposite of 'hot'?",
    "How many legs does a spider have?",
    "Write a Python function that adds two numbers.",
    "What is the largest planet in our solar system?",
    "Describe a cat in three words.",
    "我想学中文。",
    "What language is spoken in Brazil?",
)
BEGINNINGS = (
    "Once upon a time, in a small village by the sea,",
    "The three laws of motion are",
    "def fibonacci(n):\n    ",
    "Water boils at",
    "The following is a list of fruits: apple, banana,",
    "In 1969, the first human",
    "Dear Sir or Madam,\n\n",
    "import numpy as np\n\n# Make an array of zeros\n",
    "Q: What is the chemical symbol for gold?\nA:",
    "The quick brown fox jumps over the lazy dog. " * 12 + "The quick brown",
    "1, 2, 3, 4, 5, 6,",
    "<html>\n<head>\n<title>",
    "Photosynthesis is the process by which",
    "My favourite season is autumn because",
)


def main() -> None:
    pair = TwoEngines(Engine.load("smollm2"))
    kept = []
    candidates = [(kind, text) for texts in zip(QUESTIONS, BEGINNINGS, strict=False)
                  for kind, text in zip(("chat", "text"), texts, strict=True)]
    candidates += [("chat", text) for text in QUESTIONS[len(BEGINNINGS):]]
    for kind, text in tqdm(candidates, disable=not sys.stderr.isatty()):
        ids = prompt_ids(pair.engine, kind, text)
        written = pair.ours(ids, NEW_TOKENS)
        found = pair.clearness(ids, written, NEW_TOKENS)
        same = written == pair.theirs(ids, NEW_TOKENS)
        print(f"{'kept' if found.allows_comparison else 'no':4} {kind} margin {found.margin:.2g}, "
              f"difference {found.difference:.2g}, {'same' if same else 'other'} text: {text!r}")
        if found.allows_comparison:
            kept.append({"kind": kind, "text": text, "written": written,
                         "margin": float(f"{found.margin:.4g}"),
                         "difference": float(f"{found.difference:.4g}")})
    if len(kept) < WANTED:
        raise SystemExit(f"only {len(kept)} of {len(candidates)} candidates are clear, "
                         f"{WANTED} are wanted")
    kept.sort(key=lambda prompt: prompt["difference"] / prompt["margin"])
    lines = [json.dumps(prompt, ensure_ascii=False) for prompt in kept[:WANTED]]
    write_atomically(GOLDEN, f'{{"model": "smollm2", "new_tokens": {NEW_TOKENS}, "prompts": [\n'
                             + ",\n".join(lines) + "\n]}\n")


if __name__ == "__main__":
    main()
