"""Public checks of day 14, chunks and offload."""

from __future__ import annotations

from typing import Any

import numpy as np

from course_lib.classroom.exercises import Case, Exercise, Reading

NONE = -np.inf


def _merge_cases() -> list[Case]:
    def arrays(*parts):
        return tuple(np.array(part, np.float64) for part in parts)

    # An answer rounds a few times in float64; an LSE of 1000 is known to 1e-13.
    near: dict[str, Any] = {"rtol": 1e-9, "atol": 1e-9}
    nan = float("nan")
    return [
        Case("the six numbers of the lesson",
             arrays([[20.0]], [np.log(3)], [[(100 + 50 * np.e**3) / (2 + np.e**3)]],
                    [np.log(2 + np.e**3)]),
             expect=[[[(160 + 50 * np.e**3) / (5 + np.e**3)]], [np.log(5 + np.e**3)]], **near),
        Case("two rows, each with its own larger part",
             arrays([[1.0, 0.0], [1.0, 0.0]], [0.0, np.log(3)], [[0.0, 4.0], [0.0, 4.0]],
                    [np.log(3), 0.0]),
             expect=[[[0.25, 3.0], [0.75, 1.0]], [np.log(4), np.log(4)]], **near),
        Case("large LSEs", arrays([[2.0]], [1000.0], [[4.0]], [1000.0]),
             expect=[[[3.0]], [1000 + np.log(2)]], **near),
        Case("one part without tokens", arrays([[5.0], [nan]], [1.5, NONE], [[nan], [7.0]],
                                               [NONE, -2.0]),
             expect=[[[5.0], [7.0]], [1.5, -2.0]], **near),
        Case("both parts without tokens", arrays([[3.0]], [NONE], [[nan]], [NONE]),
             expect=[[[0.0]], [NONE]], **near),
    ]


def _ring_cases() -> list[Case]:
    return [
        Case("four equal blocks, two slots", ([2, 2, 2, 2], [3, 3, 3, 3], 2),
             expect=[(0, 0, 2, 2, 5), (1, 2, 4, 5, 8), (0, 5, 7, 8, 11), (1, 8, 10, 11, 14)]),
        Case("one slot: in turns", ([2, 1], [3, 4], 1),
             expect=[(0, 0, 2, 2, 5), (0, 5, 6, 6, 10)]),
        Case("slow loads, three slots", ([4, 4, 4], [1, 1, 1], 3),
             expect=[(0, 0, 4, 4, 5), (1, 4, 8, 8, 9), (2, 8, 12, 12, 13)]),
        Case("no block", ([], [], 2), expect=[]),
        Case("no slot", ([1], [1], 0), raises=ValueError),
        Case("a compute time is missing", ([1, 2], [1], 2), raises=ValueError),
    ]


def _bytes_cases() -> list[Case]:
    near: dict[str, Any] = {"rtol": 1e-12}
    return [
        Case("full attention", ("none", 1.0), expect=1.0, **near),
        Case("as published", ("kv", 0.52), expect=1.52, **near),
        Case("K alone, half of the blocks", ("k", 0.5), expect=1.0, **near),
        Case("pages of 16", ("pages", 0.5), expect=0.5625, **near),
        Case("two layers share an estimate", ("k", 0.5, 16, 2), expect=0.75, **near),
        Case("an unknown estimate", ("v", 0.5), raises=ValueError),
    ]


EXERCISES = [
    Exercise("d14.a1", function="merge_lse", cases=_merge_cases,
             replaces=("course_lib.prefill.lse.merge_attention_outputs",
                       "course_lib.prefill.lse.merge_into"), seconds=3.0),
    Reading("d14.b1", parts=("flags", "cases", "no_nan_warning", "blind_rows", "itself_last",
                             "exp_of_minus_inf"), auto=1),
    Exercise("d14.a2", function="ring_plan", cases=_ring_cases,
             replaces=("course_lib.prefill.schedule.ring_schedule",), seconds=3.0),
    Reading("d14.b2", parts=("frees", "takes", "announces", "waits", "after_stop", "ahead_1",
                             "ahead_4", "wrong_answer"), auto=2),
    Exercise("d14.a3", function="bytes_read", cases=_bytes_cases,
             replaces=("course_lib.lab.prefill_cost.bytes_read",
                       "course_lib.lab.prefill_cost.estimate_share"), seconds=3.0),
    Reading("d14.b3", parts=("layer0", "document", "bytes", "any_head", "itself",
                             "estimate_counted", "itself_counted", "published_bytes"), auto=2),
]
