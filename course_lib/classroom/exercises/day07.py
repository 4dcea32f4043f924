"""Public checks of day 7: shared KV heads, online softmax, an exponential function."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from unittest import mock

import numpy as np

from course_lib.attention import two_pass
from course_lib.classroom.exercises import Case, Exercise, Reading
from course_lib.exponential import LOWEST, ulp_error
from course_lib.lab.exp_walk import bits, floats
from course_lib.lab.online_trace import trace_online_softmax

F32 = np.float32

# --- d07.a1 ------------------------------------------------------------------------------------


def attention_case(name: str, seed: int, heads: int, kv_heads: int, n: int, d: int,
                   size: float = 1.0) -> Case:
    """A token of N(0, 1) queries (times `size`), keys and values, and what two_pass makes of it.

    Tolerance: a score is a sum of d products and three more roundings, so with u = 2**-24 it is
    off by at most (d + 3) u Σ|q k| / √d, in the answer and in the kernel; a weight by twice that
    and some 20 u for exp and the sum, relatively; and the output by the weights' error.
    """
    rng = np.random.default_rng(seed)
    q = (size * rng.standard_normal((heads, d))).astype(F32)
    k, v = rng.standard_normal((2, kv_heads, n, d)).astype(F32)
    kh = np.arange(heads) * kv_heads // heads
    largest = float((np.abs(k[kh]) @ np.abs(q)[:, :, None]).max()) / math.sqrt(d)
    relative = 2 * (2 * (d + 3) * largest + n + 20) * 2.0**-24
    return Case(name, (q, k, v), expect=two_pass(q, k, v),
                atol=min(relative, 0.02) * float(np.abs(v).max()), dtype=True)


def _gqa_cases() -> list[Case]:
    one = np.ones((1, 1, 1), F32)
    rng = np.random.default_rng(7)
    q, k = rng.standard_normal((6, 8)).astype(F32), rng.standard_normal((4, 3, 8)).astype(F32)
    return [
        Case("one token", (np.zeros((2, 1), F32), one, 7 * one), expect=np.full((2, 1), 7, F32),
             dtype=True),
        attention_case("as many KV heads as query heads", 1, 2, 2, 5, 8),
        attention_case("4 query heads, 2 KV heads", 2, 4, 2, 9, 16),
        attention_case("scores in the hundreds", 3, 4, 1, 6, 32, 120.0),
        Case("6 query heads, 4 KV heads", (q, k, k), raises=ValueError),
    ]


# --- d07.a2 ------------------------------------------------------------------------------------


def once(fn: Callable, scores: np.ndarray, values: np.ndarray):
    """Call fn with a stream of tokens whose rows all come in the same memory.

    So collecting them gives the last row n times, and a row that fn changes is noticed.
    """
    def stream() -> Iterator[tuple[np.float32, np.ndarray]]:
        row = np.empty(values.shape[1:], values.dtype)
        for score, value in zip(scores, values, strict=True):
            row[:] = value
            yield score, row
            if row.tobytes() != value.tobytes():
                raise ValueError("the row of a token was changed")

    return fn(stream())


def stream_case(name: str, scores, values) -> Case:
    """A stream and what online softmax holds at its end.

    Tolerance: n additions and rescales of one rounding each, and exp's: (2 n + 20) 2**-24 of the
    largest visible value, in the answer and in the reference; the maximum and the count are exact.
    """
    scores, values = np.asarray(scores, F32), np.asarray(values, F32)
    trace = trace_online_softmax(scores, values)
    bound = 2 * (2 * len(scores) + 20) * 2.0**-24
    return Case(name, (scores, values),
                expect={"out": trace.out, "max": float(trace.max[-1]),
                        "sum": float(trace.total[-1]), "rescales": trace.rescales},
                rtol=bound, atol=bound * float(np.nanmax(np.abs(values))))


def _online_cases() -> list[Case]:
    inf = np.inf
    tens = np.arange(10, 70, 10, dtype=F32)[:, None]
    rng = np.random.default_rng(7)
    return [
        stream_case("the six numbers of the lesson",
                    np.log(2) * np.array([1, 0, 2, 0, 3, 3]), tens),
        stream_case("one token", [-3.5], [[4, 5]]),
        stream_case("scores in the hundreds", [100, 250, 249, 251], rng.standard_normal((4, 3))),
        stream_case("a masked token in between", [1, -inf, 2], tens[:3]),
        stream_case("the first token is masked", [-inf, 1, 0], tens[:3]),
        stream_case("all tokens are masked", [-inf, -inf], tens[:2]),
    ]


# --- d07.a3 ------------------------------------------------------------------------------------

_TAKEN = {np: ("exp", "exp2", "expm1", "power", "float_power", "pow", "logaddexp", "logaddexp2",
               "sinh", "cosh", "tanh"),
          math: ("exp", "exp2", "expm1", "pow", "sinh", "cosh", "tanh")}


class _Watched(np.ndarray):
    """Numbers that no ufunc raises e to, also by ``e ** x`` or under a name imported before."""

    def __array_ufunc__(self, ufunc, method, *inputs, out=None, **kwargs):
        given = [np.asarray(value) if isinstance(value, _Watched) else value for value in inputs]
        whole = "power" in ufunc.__name__ and np.equal(given[1], np.rint(given[1])).all()
        if ufunc.__name__ in _TAKEN[np] and not whole:  # 2.0 ** n and r ** 3 are no exp
            raise ValueError("no exponential function of a library here")
        if out is not None:
            kwargs["out"] = tuple(np.asarray(o) if isinstance(o, _Watched) else o for o in out)
        found = getattr(ufunc, method)(*given, **kwargs)
        if out is not None:
            return out[0] if len(out) == 1 else out
        several = found if isinstance(found, tuple) else (found,)
        watched = tuple(f.view(_Watched) if isinstance(f, np.ndarray) else f for f in several)
        return watched if isinstance(found, tuple) else watched[0]


def without_exp(fn: Callable, x: np.ndarray):
    """Call fn while the exponential functions of NumPy and math are away.

    A help against habit, not a sandbox: ``math.e ** float(x[0])`` is not noticed.
    """
    def refuse(*args, **kwargs):
        raise ValueError("no exponential function of a library here")

    with ExitStack() as stack:
        for module, names in _TAKEN.items():
            for name in names:
                if hasattr(module, name):
                    stack.enter_context(mock.patch.object(module, name, refuse))
        return fn(x.view(_Watched))


def within_3_ulp(name: str, x) -> Case:
    """Results float32 like x, at most 3 ulp off where x >= -87, and 0 below."""
    x = np.asarray(x, F32)
    inside = x >= F32(LOWEST)

    def accept(got) -> str | None:
        if not isinstance(got, np.ndarray) or got.dtype != F32:
            return "return a float32 array"
        if got.shape != x.shape:
            return f"expected shape {x.shape}, got {got.shape}"
        if not np.isfinite(got).all():
            return "a result is not finite"
        if got[~inside].any():
            return f"expected 0 below -87, got {got[~inside][got[~inside] != 0][0]:.3g}"
        error = np.abs(ulp_error(got[inside], x[inside]))
        if not error.size or error.max() <= 3:
            return None
        worst = int(error.argmax())
        return f"off by {error[worst]:.3g} ulp at x = {x[inside][worst]:.6g}"

    return Case(name, (x,), accept=accept)


def _exp_cases() -> list[Case]:
    return [
        within_3_ulp("0 and -1", [0.0, -1.0]),
        within_3_ulp("close to 0", [-1e-30, -1e-6, -0.01, -0.3]),
        within_3_ulp("2,000 numbers from -87 to 0", np.linspace(-87, 0, 2000)),
        within_3_ulp("halfway between multiples of ln 2", -math.log(2) * (np.arange(125) + 0.5)),
        within_3_ulp("below -87", [-87.0, np.nextafter(F32(-87), F32(-88)), -200.0, -1e30]),
    ]


def sampled(every: int) -> np.ndarray:
    """Every so many-th float32 from 0 down to -87."""
    return floats(0, bits(LOWEST) + 1, True, every)


EXERCISES = [
    Exercise("d07.a1", "gqa_attention", _gqa_cases,
             replaces=("course_lib.attention.two_pass", "course_lib.attention.attend",
                       "course_lib.attention.online")),
    Reading("d07.b1", ("definition", "python_loop", "kv_head_of_21", "right_by_luck"), auto=2),
    Exercise("d07.a2", "online_softmax_attention", _online_cases, call=once,
             replaces=("course_lib.attention.online_softmax",
                       "course_lib.lab.online_trace.trace_online_softmax")),
    Reading("d07.b2", ("start", "masked", "c_start", "why_zero", "first_shrink",
                       "most_rescales"), auto=2),
    Exercise("d07.a3", "exp_poly", _exp_cases, call=without_exp,
             replaces=("course_lib.exponential.exp_poly",
                       "course_lib.lab.exp_recipes.exp_recipe")),
    Reading("d07.b3", ("avx2", "neon", "no_other_fusing", "multiply_adds"), auto=2),
]
