"""Public checks of day 9: the q8 write path, the single pass, the sign of errors."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from course_lib.attention import single_pass_q8, two_pass
from course_lib.classroom.exercises import Case, Exercise, Reading
from course_lib.quant import quantize_rows

F32 = np.float32


def _quantize_cases() -> list[Case]:
    two_heads = np.array([[2, -1, 0.5, 0.25], [-0.5, 0.125, 0.25, 0]], F32)
    one_token = np.random.default_rng(9).standard_normal((3, 2, 64)).astype(F32)
    bad = two_heads.copy()
    bad[1, 2] = np.nan
    return [
        Case("two heads, four values each", (two_heads,), dtype=True,
             expect=(np.array([[127, -63, 32, 16], [-127, 32, 64, 0]], np.int8),
                     np.array([2 / 127, 0.5 / 127], F32))),
        Case("three tokens, two heads", (one_token,), expect=quantize_rows(one_token), dtype=True),
        Case("a row of zeros", (np.zeros((1, 4), F32),), dtype=True,
             expect=(np.zeros((1, 4), np.int8), np.array([1 / 127], F32))),
        Case("half of the row's maximum (order of operations)",
             (np.array([[9, 4.5], [15, 7.5]], F32),), dtype=True,
             expect=(np.array([[127, 64], [127, 63]], np.int8),
                     np.array([9, 15], F32) / F32(127))),
        Case("NaN in one head", (bad,), raises=ValueError),
    ]


def single_pass_case(seed: int, n: int, d: int) -> tuple[np.ndarray, ...]:
    """A query [d] and q8 rows (kq, k_scale, vq, v_scale) of n tokens from N(0, 1)."""
    rng = np.random.default_rng(seed)
    q, k, v = (rng.standard_normal(s).astype(F32) for s in ((d,), (n, d), (n, d)))
    return q, *quantize_rows(k), *quantize_rows(v)


def output_and_bound(args: tuple[np.ndarray, ...], largest: float) -> Callable:
    """Accept (out, bound): out that of the library's int8-query kernel, bound at least the
    difference from the two-pass kernel with the float query, and at most `largest`."""
    q, *rows = args
    # Float32 rounding of scores and sums, far below what rounding q to int8 does.
    score = float(np.abs(rows[0] @ q * rows[1]).max()) / q.size**0.5
    noise = 2e-6 * (10 + score) * float(np.abs(rows[2] * rows[3][:, None]).max())
    heads = [q[None], *(a[None] for a in rows)]
    wanted = single_pass_q8(*heads)[0]
    float_query = two_pass(heads[0], heads[1], heads[3], heads[2], heads[4])[0]
    actual = float(np.abs(wanted - float_query).max())

    def accept(got) -> str | None:
        if not isinstance(got, (tuple, list)) or len(got) != 2:
            return "return the pair (out, bound)"
        out, bound = np.asarray(got[0], np.float64), got[1]
        if out.shape != wanted.shape:
            return f"expected out of shape {wanted.shape}, got {out.shape}"
        if not np.abs(out - wanted).max() <= noise:
            return "out is not that of the int8 query over these rows"
        if isinstance(bound, bool) or not isinstance(bound, (int, float)):
            return "bound must be one number"
        if not bound >= actual - noise:
            return "the difference from two_pass is larger than your bound"
        return None if bound <= largest else "the bound holds, but is too loose to be of use"

    return accept


def _single_pass_cases() -> list[Case]:
    # The last number is about three times the bound that the card derives for these rows.
    cases = [("one token", (1, 1, 32), 0.54), ("three tokens", (2, 3, 32), 0.63),
             ("two groups of 32", (3, 40, 64), 2.11), ("a whole block and a short one",
                                                       (4, 45, 128), 2.32)]
    made = [(name, single_pass_case(*case), largest) for name, case, largest in cases]
    found = [Case(name, args, accept=output_and_bound(args, largest))
             for name, args, largest in made]
    q, *rows = single_pass_case(5, 33, 32)
    large = (q * F32(60), *rows)
    return [*found, Case("scores in the hundreds", large, accept=output_and_bound(large, 1e4))]


def _bias_cases() -> list[Case]:
    return [
        Case("three of four positive", ([0.25, 1.0, -0.5, 2.0],),
             expect={"n": 4, "positive": 3, "p": 0.625}),
        Case("one error", ([-1e-9],), expect={"n": 1, "positive": 0, "p": 1.0}),
        Case("zeros among them", ([0.0, 1.0, 0.0, 2.0, 3.0, 4.0, 5.0, 6.0],),
             expect={"n": 6, "positive": 6, "p": 0.03125}),
        Case("as many of each sign", (np.array([1, -1, 2, -2], F32),),
             expect={"n": 4, "positive": 2, "p": 1.0}),
        Case("NaN", ([1.0, float("nan")],), raises=ValueError),
    ]


EXERCISES = [
    Exercise("d09.a1", "kv_quantize_per_head", _quantize_cases,
             replaces=("course_lib.quant.quantize_rows", "course_lib.quant._scales")),
    Reading("d09.b1", ("max_of_one_head", "write_path", "clamp", "lowest_code",
                       "scales_per_token"), auto=2),
    Exercise("d09.a2", "single_pass_q8_attention", _single_pass_cases,
             replaces=("course_lib.attention.single_pass_q8",
                       "course_lib.attention._single_pass_head")),
    Reading("d09.b2", ("rounds_q", "rounds_k_and_v", "exact_dot", "rule_for_q", "rule_for_kv",
                       "query_scales"), auto=2),
    Exercise("d09.a3", "bias_test", _bias_cases, replaces=("course_lib.lab.bias.bias_test",)),
    Reading("d09.b3", ("quoted_ratio", "our_ratio", "numerator", "worse_side", "nats_per_token"),
            auto=2),
]
