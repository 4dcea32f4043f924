"""Public checks of day 6: RMSNorm by a tree, QK-norm, RoPE."""

from __future__ import annotations

from typing import Any

import numpy as np

from course_lib.classroom.exercises import Case, Exercise, Reading
from course_lib.engine import layers
from course_lib.lab import reduction

F32 = np.float32


def _f32(values: Any) -> np.ndarray:
    return np.array(values, F32)


def some_rows(seed: int, *shape: int) -> np.ndarray:
    """Float32 numbers of mixed sizes from whole random numbers: the same on every machine."""
    rng = np.random.default_rng(seed)
    return np.ldexp(rng.integers(-2**20, 2**20, shape).astype(F32), rng.integers(-22, -17, shape))


def norm_case(name: str, seed: int, d: int, tree: Any, eps: float = 1e-6) -> Case:
    x, gain = some_rows(seed, d), np.abs(some_rows(seed + 1, d))
    return Case(name, (x, gain, eps, tree), dtype=True,
                expect=reduction.rms_norm_by_tree(x, gain, eps, tree))


def _rms_norm_cases() -> list[Case]:
    return [
        Case("two numbers", (_f32([3, 4]), _f32([1, 2]), 0.0, ([0], [1])), dtype=True,
             expect=_f32([0.84852815, 2.2627418])),
        norm_case("one chain of 32", 61, 32, reduction.chain(32)),
        norm_case("the kernels' tree of 160", 62, 160, reduction.kernel_tree(160)),
        norm_case("lanes of different length", 63, 7, (([6, 0, 3], [1]), ([2, 4], [5]))),
        Case("a row of zeros", (np.zeros(4, F32), np.ones(4, F32), 1e-6, [0, 1, 2, 3]), dtype=True,
             expect=np.zeros(4, F32)),
    ]


def qk_case(name: str, seed: int, tokens: int, heads: int, kv_heads: int, d: int,
            eps: float = 1e-6) -> Case:
    q, k = some_rows(seed, tokens, heads, d), some_rows(seed + 1, tokens, kv_heads, d)
    gains = np.abs(some_rows(seed + 2, 2, d)) + F32(0.5)
    expect = tuple(
        reduction.rms_norm_by_tree(rows, gain, eps, reduction.kernel_tree(d))
        for rows, gain in ((q, gains[0]), (k, gains[1])))
    # 64 squares added in another order are off by 64 · 2**-24 at most; root and product by less.
    return Case(name, (q, k, gains[0], gains[1], eps), expect=expect, dtype=True, rtol=8e-6)


def _qk_norm_cases() -> list[Case]:
    one = np.ones(2, F32)
    return [
        Case("one head of two numbers", (_f32([[[3, 4]]]), _f32([[[0, 2]]]), one, 2 * one, 0.0),
             expect=(_f32([[[0.84852815, 1.1313709]]]), _f32([[[0, 2.828427]]])), dtype=True,
             rtol=8e-6),
        qk_case("four query heads, two key heads", 64, 3, 4, 2, 64),
        qk_case("a large eps", 65, 2, 2, 1, 16, eps=0.5),
    ]


def rope_case(name: str, x: np.ndarray, positions: Any, theta: float) -> Case:
    positions = np.asarray(positions)
    tables = layers.rope_tables(positions, x.shape[-1], theta)
    # An angle is off by its own last bits, twice p · 2**-24, and so is cos, times |x|, twice.
    largest = max(1, int(np.abs(positions).max()))
    bound = float(np.abs(x).max()) * (4 * largest + 8) * 2.0**-23
    return Case(name, (x, positions, theta), expect=layers.rope(x, *tables), atol=bound, dtype=True)


def _rope_cases() -> list[Case]:
    two_heads = some_rows(66, 5, 2, 64)
    return [
        rope_case("one pair, position 3", _f32([[[1, 0]]]), [3], 10000.0),
        rope_case("two pairs: partners are halves", _f32([[[1, 2, 0, 0]]]), [1], 100.0),
        rope_case("five tokens, two heads", two_heads, [0, 1, 2, 3, 4], 1e5),
        rope_case("positions that do not start at 0", two_heads, [7, 3, 3, 40, 11], 1e5),
    ]


EXERCISES = [
    Exercise("d06.a1", function="rms_norm", cases=_rms_norm_cases,
             replaces=("course_lib.lab.reduction.rms_norm_by_tree",
                       "course_lib.lab.reduction.sum_of_squares",
                       "course_lib.engine.layers.rms_norm"), seconds=5.0),
    Reading("d06.b1", parts=("lane_loop", "halves", "refused", "divides", "additions_at_the_end"),
            auto=2),
    Exercise("d06.a2", function="qk_norm", cases=_qk_norm_cases,
             replaces=("course_lib.engine.layers.rms_norm",
                       "course_lib.lab.reduction.rms_norm_by_tree"), seconds=3.0),
    Reading("d06.b2", parts=("numpy_norm", "numpy_turn", "c_norm", "c_turn", "norms_per_token"),
            auto=2),
    Exercise("d06.a3", function="rope", cases=_rope_cases,
             replaces=("course_lib.engine.layers.rope", "course_lib.engine.layers.rope_tables",
                       "course_lib.engine.layers.rope_powers"), seconds=3.0),
    Reading("d06.b3", parts=("built_once", "numpy_angle", "c_angle", "step_at_100000", "exact_cos"),
            auto=2),
]
