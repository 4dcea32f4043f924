"""Public checks of day 4: Q8_0 and Q4_0 bit for bit, and rounding rules told from samples."""

from __future__ import annotations

import numpy as np

from course_lib.classroom.exercises import Case, Exercise, Reading
from course_lib.weight_blocks import (
    dequantize_q4_0,
    dequantize_q8_0,
    quantize_q4_0,
    quantize_q8_0,
)

F32 = np.float32


def block_case(name: str, w: np.ndarray, kind: str) -> Case:
    """One matrix packed and read back as the library does it."""
    pack, unpack = {"q8_0": (quantize_q8_0, dequantize_q8_0),
                    "q4_0": (quantize_q4_0, dequantize_q4_0)}[kind]
    blocks = pack(w)
    return Case(name, (w,), expect=(blocks, unpack(blocks)), dtype=True)


def _matrices() -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Random weights; rows that hold a block of zeros; a matrix with NaN."""
    w = np.random.default_rng(4).standard_normal((3, 64)).astype(F32)
    zeros, bad = w.copy(), w.copy()
    zeros[1, 32:] = 0
    bad[2, 40] = np.nan
    return w, zeros, bad


def _q8_cases() -> list[Case]:
    w, zeros, bad = _matrices()
    ties = np.tile(np.array([254, -100, 51, -7, 3, -3, 1, -1], F32), (1, 4))
    return [
        block_case("the six numbers of the lesson, and halves of both signs", ties, "q8_0"),
        block_case("three rows of two blocks", w, "q8_0"),
        block_case("a block of zeros", zeros, "q8_0"),
        Case("NaN", (bad,), raises=ValueError),
        Case("rows of 48 weights", (w[:, :48],), raises=ValueError),
    ]


def _q4_cases() -> list[Case]:
    w, zeros, bad = _matrices()
    row = np.tile(np.array([-0.75, 0.5, 0.125, 0.75, -0.0625, 0, 0.25, -0.25], F32), (1, 4))
    return [
        block_case("extremes of both signs, the first counts", row, "q4_0"),
        block_case("a positive extreme", -row, "q4_0"),
        block_case("three rows of two blocks", w, "q4_0"),
        block_case("a block of zeros", zeros, "q4_0"),
        Case("NaN", (bad,), raises=ValueError),
        Case("rows of 48 weights", (w[:, :48],), raises=ValueError),
    ]


def _rule_cases() -> list[Case]:
    x = np.array([[127, 0.5, 1.5, 2.5, -0.5, -1.5, 0.75, -0.75]], F32)
    plain = np.array([[127, 0.75, -0.75, 20.25]], F32)
    halves = np.array([[9, 4.5], [15, 7.5]], F32)  # 63.5 in one order, a little less in another
    return [
        Case("ties, to even", (x, np.array([[127, 0, 2, 2, 0, -2, 1, -1]])), expect=["half_even"]),
        Case("ties, up", (x, np.array([[127, 1, 2, 3, 0, -1, 1, -1]])), expect=["half_up"]),
        Case("no ties", (plain, np.array([[127, 1, -1, 20]])),
             expect=["half_up", "half_even", "half_away"]),
        Case("a negative value cut off", (plain, np.array([[127, 1, 0, 20]])), expect=["trunc"]),
        Case("ties in one order of operations only", (halves, np.array([[127, 63], [127, 64]])),
             expect=["half_up", "half_even", "half_away", "trunc"]),
        Case("none of the rules", (plain, np.array([[127, 1, -1, 21]])), expect=[]),
    ]


EXERCISES = [
    Exercise("d04.a1", "q8_0_pack_unpack", _q8_cases,
             replaces=("course_lib.weight_blocks.quantize_q8_0",
                       "course_lib.weight_blocks.dequantize_q8_0",
                       "course_lib.weight_blocks._q8_0_codes")),
    Reading("d04.b1", ("knows_34", "stores_scale", "codes_from", "row_bytes", "scale_share"),
            auto=2),
    Exercise("d04.a2", "q4_0_pack_unpack", _q4_cases,
             replaces=("course_lib.weight_blocks.quantize_q4_0",
                       "course_lib.weight_blocks.dequantize_q4_0",
                       "course_lib.weight_blocks._q4_0_codes",
                       "course_lib.weight_blocks._q4_0_signed")),
    Reading("d04.b2", ("packs", "packs_in_c", "unpacks", "byte_of_100", "half_of_100",
                       "code_of_extreme"), auto=2),
    Exercise("d04.a3", "possible_rules", _rule_cases,
             replaces=("course_lib.lab.rounding_rules.possible_rules",
                       "course_lib.lab.rounding_rules.scaled_in_each_order",
                       "course_lib.lab.rounding_rules.rounded",
                       "course_lib.quant.round_to_int")),
    Reading("d04.b3", ("activations", "weights_q8", "weights_q4", "biased", "rule_activations",
                       "rule_weights_q8", "rule_rows", "rule_weights_q4"), auto=2),
]
