"""Public checks of day 5: an integer dot product, one instruction, the first difference."""

from __future__ import annotations

from typing import Any

import numpy as np

from course_lib.classroom.exercises import Case, Exercise, Reading

F32 = np.float32


def q8_row(seed: int, blocks: int) -> tuple[np.ndarray, ...]:
    """x_codes, x_scales, w_codes, w_scales of so many blocks, codes over the whole range."""
    rng = np.random.default_rng(seed)
    x, w = rng.integers(-127, 128, (2, 32 * blocks)).astype(np.int8)
    x_scales = rng.integers(2**19, 2**20, blocks).astype(F32) * F32(2**-26)
    w_scales = rng.integers(2**9, 2**10, blocks).astype(np.float16) * np.float16(2**-14)
    return x, x_scales, w, w_scales


def _q8_dot_cases() -> list[Case]:
    from course_lib.lab.dot_ladder import q8_dot

    one = np.ones(32, np.int8)
    half, quarter = np.array([0.5], F32), np.array([0.25], np.float16)
    large = np.full(32, 127, np.int8), half, np.full(32, -127, np.int8), quarter
    two = (np.array([1] * 32 + [2] * 32, np.int8), np.array([0.5, 0.125], F32),
           np.array([3] * 32 + [-1] * 32, np.int8), np.array([0.25, 2], np.float16))
    random = q8_row(1, 5)
    return [
        Case("one block of ones", (one, half, 3 * one, quarter), expect=F32(12), dtype=True),
        Case("a block whose sum needs 20 bits", large, expect=F32(-64516), dtype=True),
        Case("two blocks, each with its own scales", two, expect=F32(12 - 16), dtype=True),
        Case("five random blocks, every bit", random, expect=q8_dot(*random), dtype=True),
    ]


def _i32(*values: int) -> np.ndarray:
    return np.array(values, np.int32)


def _sdot_cases() -> list[Case]:
    ramp = np.arange(16, dtype=np.int8)
    low = np.full(16, -128, np.int8)
    return [
        Case("0 … 15 times ones", (_i32(0, 0, 0, 0), ramp, np.ones(16, np.int8)),
             expect=_i32(6, 22, 38, 54), dtype=True),
        Case("the accumulator counts", (_i32(1000, -5, 0, 7), ramp, -ramp), dtype=True,
             expect=_i32(986, -131, -366, -727)),
        Case("-128 times -128", (_i32(0, 0, 0, 0), low, low), expect=_i32(*[65536] * 4),
             dtype=True),
        Case("a sum past the largest int32", (_i32(2**31 - 1, 0, 0, 0), ramp, np.ones(16, np.int8)),
             expect=_i32(-(2**31) + 5, 22, 38, 54), dtype=True),
    ]


def _f32(values: Any) -> np.ndarray:
    return np.array(values, F32)


def _first_difference_cases() -> list[Case]:
    one = [("norm", _f32([1, 2])), ("out", _f32([[3, 4], [5, 6]])), ("last", _f32([7]))]
    two = [("norm", _f32([1, 2])), ("out", _f32([[3, 4], [0, 6]])), ("last", _f32([700]))]
    zero = [("norm", _f32([1, 2])), ("out", _f32([[3, 4], [5, 6]])), ("last", _f32([7]))]
    signed = [("a", _f32([0.0, 1.0]))], [("a", _f32([-0.0, 1.0]))]
    nan = [("a", _f32([np.nan, 1.0]))]
    return [
        Case("a small difference before a large one", (one, two), expect=("out", (1, 0))),
        Case("equal runs", (one, zero), expect=None),
        Case("zero and minus zero", signed, expect=("a", (0,))),
        Case("the same NaN on both sides", (nan, [("a", _f32([np.nan, 1.0]))]), expect=None),
        Case("another shape", (one[:1], [("norm", _f32([[1, 2]]))]), expect=("norm", None)),
        Case("another order of stages", (one, [two[1], two[0], two[2]]), raises=ValueError),
    ]


EXERCISES = [
    Exercise("d05.a1", function="q8_dot", cases=_q8_dot_cases,
             replaces=("course_lib.lab.dot_ladder.q8_dot",), seconds=3.0),
    Reading("d05.b1", parts=("rounds_numpy", "rounds_c", "quantized_once", "products_per_value"),
            auto=2),
    Exercise("d05.a2", function="vdotq_s32", cases=_sdot_cases,
             replaces=("course_lib.lab.dot_ladder.sdot",), seconds=3.0),
    Reading("d05.b2", parts=("two_products", "largest_group_sum", "restart"), auto=2),
    Exercise("d05.a3", function="first_difference", cases=_first_difference_cases,
             replaces=("course_lib.lab.differential.first_difference",
                       "course_lib.lab.differential.different_bits"), seconds=3.0),
    Reading("d05.b3", parts=("weights_q8_0", "threads", "tile", "kernel_numpy", "kv_q8",
                             "second_variable"), auto=2),
]
