"""The size of a Q8_0 block is stated where day 4 says that it is, and nowhere else."""

from __future__ import annotations

import ast
import re

from course_lib.paths import ROOT
from course_lib.weight_blocks import BLOCK_BYTES

STATED = {"course_lib/weight_blocks.py", "course_lib/engine/gguf_types.py",
          "course_lib/bench/engine_cases.py"}


def test_three_lines_of_code_know_the_number():
    size = BLOCK_BYTES["q8_0"]
    found = []
    for path in sorted((ROOT / "course_lib").rglob("*.py")):
        text = path.read_text(encoding="utf-8")
        lines = text.splitlines()
        if not any(re.search(rf"\b{size}\b", line) and "q8" in line.lower() for line in lines):
            continue
        for node in ast.walk(ast.parse(text)):
            stated = isinstance(node, ast.Constant) and node.value == size
            if stated and "q8" in lines[node.lineno - 1].lower():
                found.append(path.relative_to(ROOT).as_posix())
    assert len(found) == len(STATED) and set(found) == STATED, "d04.b1 asks for three places"
