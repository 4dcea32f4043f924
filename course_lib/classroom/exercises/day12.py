"""Public checks of day 12, block scoring for prefill."""

from __future__ import annotations

import numpy as np

from course_lib.classroom.exercises import Case, Exercise, Reading
from course_lib.prefill.find_blocks import find_blocks_chunked


def _f32(*values: float) -> np.ndarray:
    return np.array(values, np.float32)


def _antidiagonal_cases() -> list[Case]:
    q = _f32(1, 2, 3, 4).reshape(1, 4, 1)
    k = _f32(1, 0, 2, 5).reshape(1, 4, 1)
    shared = np.stack([q[0], 10 * q[0], 100 * q[0], q[0]])
    two = np.stack([k[0], k[0] + 1])
    return [
        Case("the squares of the text", (q, k, 2), expect=_f32(2, 9, 4, 23).reshape(1, 2, 2),
             dtype=True),
        Case("stride 1 is every product", (q, k, 1), expect=q[0] @ k[0].T[None]),
        Case("four query heads, two KV heads", (shared, two, 4),
             expect=_f32(1 * 5 + 2 * 2 + 4 * 1, 10 * (5 + 4 + 4), 100 * (5 + 4 + 4) + 100 * 10, 23)
             .reshape(4, 1, 1)),
        Case("five keys fill up with zeros", (q, np.concatenate((k, [[[7.0]]]), axis=1)
                                             .astype(np.float32), 2),
             expect=_f32(2, 9, 14, 4, 23, 28).reshape(1, 2, 3)),
    ]


def _keep_cases() -> list[Case]:
    row = _f32(1, 5, 3, 5, 2)[None]
    square = np.tri(4, dtype=np.float32) * 8
    return [
        Case("the toy at 0.75", (row, 4, 0.75), expect=np.array([[1, 1, 0, 1, 1]], bool)),
        Case("need is met exactly", (row, 4, 0.8125), expect=np.array([[1, 1, 0, 1, 1]], bool)),
        Case("the tie goes to the lower block", (row, 4, 0.375),
             expect=np.array([[1, 1, 0, 0, 1]], bool)),
        Case("four rows from block 0", (square, 0, 0.5),
             expect=np.array([[1, 0, 0, 0], [1, 1, 0, 0], [1, 0, 1, 0], [1, 0, 0, 1]], bool)),
        Case("a row of zeros", (np.zeros((1, 3), np.float32), 2, 0.9),
             expect=np.array([[1, 0, 1]], bool)),
        Case("a threshold of 9", (row, 4, 9), raises=ValueError),
    ]


def check_extra(masses: object, rows: int, first: int, threshold: float) -> str | None:
    """What is wrong with masses for which upstream should keep a visible block more."""
    if masses is None:
        return "there are such masses here"
    array = np.asarray(masses)
    shape = (1, rows, first + rows)
    if array.shape != shape:
        return f"the shape must be {shape}, not {array.shape}"
    if array.dtype != np.float32 or not np.isfinite(array).all():
        return "masses must be finite float32"
    visible = np.arange(first + rows) <= np.arange(rows)[:, None] + first
    if not (array[0][visible] > 0).all() or array[0][~visible].any():
        return "visible masses must be above 0, the others 0"
    exact, upstream = (find_blocks_chunked(array, first, threshold, causal=True, compat=compat)[0]
                       for compat in ("exact", "upstream"))
    if not (upstream & visible & ~exact).any():
        return "upstream keeps no visible block that the rule leaves out"
    return None


def extra_case(name: str, rows: int, first: int, threshold: float) -> Case:
    """A case that wants such masses."""
    return Case(name, (rows, first, threshold),
                accept=lambda got: check_extra(got, rows, first, threshold))


def _extra_cases() -> list[Case]:
    return [
        extra_case("six rows from block 0, τ = 0.5", 6, 0, 0.5),
        extra_case("six rows from block 0, τ = 0.9", 6, 0, 0.9),
        Case("two rows", (2, 0, 0.9), expect=None),
    ]


EXERCISES = [
    Exercise("d12.a1", function="antidiagonal_scores", cases=_antidiagonal_cases,
             replaces=("course_lib.prefill.scores.flat_group_gemm_fuse_reshape",), seconds=3.0),
    Reading("d12.b1", parts=("reversal", "group", "rows_beyond", "pairs", "other_scores",
                             "offset_of_5"), auto=2),
    Exercise("d12.a2", function="keep_blocks", cases=_keep_cases,
             replaces=("course_lib.prefill.find_blocks.threshold_blocks",
                       "course_lib.prefill.find_blocks.find_blocks_chunked"), seconds=3.0),
    Reading("d12.b2", parts=("strict", "ties", "tau_one", "visible_only", "padding_rows",
                             "if_at_most"), auto=2),
    Exercise("d12.a3", function="masses_with_an_extra_block", cases=_extra_cases, seconds=5.0),
    Reading("d12.b3", parts=("future", "two_places", "index_0", "extra_rows", "none_at"),
            auto=2),
]
