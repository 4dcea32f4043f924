"""Public checks of day 10, sparse attention."""

from __future__ import annotations

import numpy as np

from course_lib.classroom.exercises import Case, Exercise, Reading


def _decode_cost_cases() -> list[Case]:
    return [
        Case("full blocks only", (4096, 32, 128),
             expect={"dense": 1048576, "probe": 131072, "attend": 262144}),
        Case("a short last block", (77, 1, 10),
             expect={"dense": 1540, "probe": 290, "attend": 640}),
        Case("another block size and number of probes", (100, 2, 1, 16, 4),
             expect={"dense": 200, "probe": 28, "attend": 64}),
        Case("the gate is shut: two blocks", (64, 1, 1),
             expect={"dense": 128, "probe": 0, "attend": 128}),
        Case("n below 1", (0, 1, 1), raises=ValueError),
    ]


def _f32(*values: float) -> np.ndarray:
    return np.array(values, np.float32)


def _select_blocks_cases() -> list[Case]:
    probe, importance = _f32(2, 7, 7, 1, 5, 3), _f32(9, 0, 1, 4, 4, 0)
    return [
        Case("the toy at k = 4", (probe, importance, 4),
             expect=[(0, "I"), (3, "I"), (5, "R"), (2, "P")]),
        Case("k = 1 with importance", (probe, importance, 1), expect=[(0, "I")]),
        Case("no importance array", (probe, None, 2), expect=[(5, "R"), (2, "P")]),
        Case("the last block already chosen", (_f32(1, 2, 9), _f32(5, 0, 0), 2),
             expect=[(0, "I"), (2, "P")]),
        Case("more blocks asked for than there are", (_f32(1, 2), _f32(0, 3), 5),
             expect=[(1, "I"), (0, "I")]),
        Case("k below 1", (probe, importance, 0), raises=ValueError),
    ]


def _end_to_end_cases() -> list[Case]:
    third = {"dense": 12, "probe": 2, "attend": 2}
    return [
        Case("a quarter of the token is attention", ({"attention": 25.0, "rest": 75.0}, third),
             expect={"change": -50 / 3, "ceiling": -25.0}, rtol=1e-9),
        Case("probes cost more than the blocks save",
             ({"attention": 10.0, "rest": 10.0}, {"dense": 8, "probe": 3, "attend": 7}),
             expect={"change": 12.5, "ceiling": -50.0}, rtol=1e-9),
        Case("several other parts", ({"mlp": 3.0, "attention": 4.0, "sampling": 1.0}, third),
             expect={"change": -100 / 3, "ceiling": -50.0}, rtol=1e-9),
        Case("a profile without attention", ({"mlp": 3.0}, third), raises=ValueError),
    ]


EXERCISES = [
    Exercise("d10.a1", function="decode_cost", cases=_decode_cost_cases,
             replaces=("course_lib.lab.decode_cost.decode_cost",), seconds=3.0),
    Reading("d10.b1", parts=("decode_gate", "asked_in", "prefill_gate", "first_n_k1",
                             "first_n_k32", "break_even_k16"), auto=1),
    Exercise("d10.a2", function="select_blocks", cases=_select_blocks_cases,
             replaces=("course_lib.sparse.select_heads", "course_lib.sparse.select_from_scores",
                       "course_lib.sparse.select_blocks"), seconds=3.0),
    Reading("d10.b2", parts=("probe", "importance", "top_k", "recency", "ties",
                             "only_probe_blocks", "budget_k1", "budget_k32"), auto=2),
    Exercise("d10.a3", function="end_to_end_change", cases=_end_to_end_cases,
             replaces=("course_lib.lab.decode_cost.end_to_end_change",), seconds=3.0),
    Reading("d10.b3", parts=("reads_all_anyway", "first_token", "evaluation", "same_blocks",
                             "probe_is_cheap", "tail_block", "no_probe_at_k1", "always_recent"),
            auto=2),
]
