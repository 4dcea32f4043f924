"""Public checks of day 1: bytes of a conversation, the path of a token, a test that can fail."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from course_lib.classroom.exercises import Case, Exercise, Reading

SHIPPED = {"hidden": 160, "heads": 4, "kv_heads": 2, "head_dim": 64, "inner": 448, "vocab": 1657}


def _kv_bytes_cases() -> list[Case]:
    return [
        Case("one token of the shipped model, f16", (3, 2, 64, 1, "f16"), expect=1536),
        Case("a toy of six numbers, q8", (1, 1, 3, 1, "q8"), expect=14),
        Case("2,048 tokens, f32", (3, 2, 64, 2048, "f32"), expect=6291456),
        Case("an empty text", (3, 2, 64, 0, "q8"), expect=0),
        Case("an unknown dtype", (3, 2, 64, 1, "int3"), raises=ValueError),
    ]


def _path_cases() -> list[Case]:
    small = {"hidden": 8, "heads": 2, "kv_heads": 1, "head_dim": 4, "inner": 12, "vocab": 20}
    return [
        Case("both ends and one stage", ([("logits", None), ("qkv", 0), ("embed", None)],
                                         SHIPPED, 10),
             expect=[("embed", None, (160,)), ("qkv", 0, (8, 64)), ("logits", None, (1657,))]),
        Case("attention in one layer", ([("context", 1), ("scores", 1), ("rotate", 1),
                                         ("weights", 1), ("cache", 1)], SHIPPED, 132),
             expect=[("rotate", 1, (4, 64)), ("cache", 1, (2, 133, 64)), ("scores", 1, (4, 133)),
                     ("weights", 1, (4, 133)), ("context", 1, (4, 64))]),
        Case("two layers", ([("norm", 1), ("mlp", 0), ("inner", 0), ("attention", 1)], small, 3),
             expect=[("inner", 0, (12,)), ("mlp", 0, (8,)), ("norm", 1, (8,)),
                     ("attention", 1, (8,))]),
        Case("a name that is no stage", ([("embed", None), ("sauce", 0)], small, 3),
             raises=ValueError),
    ]


RIGHT = """
def softmax(s):
    e = np.exp(s - s.max())
    return e / e.sum()
"""
FORGETS_MAX = """
def softmax(s):
    e = np.exp(s)
    return e / e.sum()
"""
DIVIDES_BY_MAX = """
def softmax(s):
    e = np.exp(s - s.max())
    return e / e.max()
"""
BASE_TWO = """
def softmax(s):
    e = np.exp2(s - s.max())
    return e / e.sum()
"""
IN_FLOAT64 = """
def softmax(s):
    e = np.exp(s.astype(np.float64) - s.max())
    return e / e.sum()
"""


def verdict(test: Callable[..., Any], source: str) -> str:
    """What the learner's test says about the softmax that `source` defines."""
    names: dict[str, Any] = {"np": np}
    exec(source, names)
    try:
        with np.errstate(all="ignore"):
            test(names["softmax"])
    except AssertionError:
        return "killed"
    return "accepted"


def _softmax_test_cases() -> list[Case]:
    def case(name: str, source: str, says: str) -> Case:
        return Case(name, (source,), expect=says)

    return [
        case("a right softmax", RIGHT, "accepted"),
        case("a right one that computes in float64", IN_FLOAT64, "accepted"),
        case("divides_by_max", DIVIDES_BY_MAX, "killed"),
        case("base_two", BASE_TWO, "killed"),
        case("forgets_max", FORGETS_MAX, "killed"),
    ]


EXERCISES: list[Exercise | Reading] = [
    Exercise("d01.a1", function="kv_bytes", cases=_kv_bytes_cases,
             replaces=("course_lib.footprint.kv_bytes", "course_lib.kvcache.kv_bytes_per_token",
                       "course_lib.kvcache.kv_ledger"),
             seconds=3.0),
    Reading("d01.b1", parts=("model_memory", "cache_memory", "one_table", "q8_token",
                             "stored_twice"), auto=2),
    Exercise("d01.a2", function="path_in_order", cases=_path_cases,
             replaces=("course_lib.lab.token_path.ordered_path",), seconds=3.0),
    Reading("d01.b2", parts=("decode_writes", "decode_reads", "prefill_writes", "undone",
                             "rows_read", "order"), auto=2),
    Exercise("d01.a3", function="softmax_test", cases=_softmax_test_cases, call=verdict,
             replaces=("course_lib.lab.softmax_check.softmax_test",), seconds=3.0),
    Reading("d01.b3", parts=("never_reached", "with_itself", "lets_nan_pass", "too_wide",
                             "accept_zeros"), auto=2),
]
