"""Hidden cases of day 7."""

from __future__ import annotations

import math

import numpy as np

from course_lib.classroom.exercises import Case
from course_lib.classroom.exercises.day07 import (
    attention_case,
    sampled,
    stream_case,
    within_3_ulp,
)
from course_lib.classroom.hidden import Group, Hidden
from course_lib.classroom.sealed import Lines
from course_lib.lab.exp_recipes import exp_recipe

F32 = np.float32

# --- d07.a1 ------------------------------------------------------------------------------------


def _gqa_groups() -> list[Group]:
    rng = np.random.default_rng(71)
    q = rng.standard_normal((3, 4)).astype(F32)
    k = rng.standard_normal((2, 5, 4)).astype(F32)
    return [
        Group("one map", 2, "Query head h reads KV head h * kv_heads // heads: neighbours share, "
              "and K and V come from the same KV head.",
              [attention_case("16 over 8", 1, 16, 8, 12, 16),
               attention_case("8 over 2", 2, 8, 2, 40, 32),
               attention_case("6 over 3", 3, 6, 3, 7, 8),
               attention_case("12 over 3", 10, 12, 3, 7, 8),
               attention_case("5 over 1", 4, 5, 1, 33, 64)]),
        Group("scores and weights", 2, "Scores are divided by the square root of d, and each "
              "head has a softmax of its own over its tokens.",
              [attention_case("d = 3", 5, 4, 2, 20, 3),
               attention_case("more heads than tokens", 6, 8, 4, 2, 16),
               attention_case("300 tokens", 7, 2, 1, 300, 64),
               attention_case("scores in the thousands", 8, 4, 2, 10, 64, 900.0)]),
        Group("edges", 1, "Mind a single token, and query heads that do not divide over the KV "
              "heads.",
              [attention_case("one token", 9, 4, 2, 1, 8),
               Case("3 over 2", (q, k, k), raises=ValueError),
               Case("1 over 2", (q[:1], k, k), raises=ValueError)]),
    ]


def _gqa_with(q, k, v, *, head=None, v_head=None, root=None, axis=1, shift=True, guard=True,
              change=None):
    """The right answer with one part replaced."""
    heads, kv_heads = len(q), len(k)
    if guard and heads % kv_heads:
        raise ValueError("heads do not divide")
    head = head or (lambda h: h * kv_heads // heads)
    kh = np.array([head(h) for h in range(heads)])
    vh = kh if v_head is None else np.array([v_head(h, kv_heads) for h in range(heads)])
    scores = (k[kh] @ q[:, :, None])[..., 0] / F32(root or math.sqrt(q.shape[1]))
    top = scores.max(axis=axis, keepdims=True) if shift is True else F32(0)
    if shift == "all heads":
        top = scores.max()
    if shift == "magnitudes":
        top = np.abs(scores).max(axis=axis, keepdims=True)
    weights = np.exp(scores - top)
    weights /= weights.sum(axis=axis, keepdims=True)
    if change:
        change(q)
    return (weights[:, None] @ v[vh])[:, 0].astype(F32)


def _modulo(q, k, v):
    return _gqa_with(q, k, v, head=lambda h: h % len(k))


def _v_by_modulo(q, k, v):
    return _gqa_with(q, k, v, v_head=lambda h, kv_heads: h % kv_heads)


def _first_heads(q, k, v):
    return _gqa_with(q, k, v, head=lambda h: min(h, len(k) - 1))


def _spread_by_rounding(q, k, v):
    places = np.linspace(0, len(k) - 1, len(q)).round().astype(int)
    return _gqa_with(q, k, v, head=lambda h: places[h])


def _maximum_of_magnitudes(q, k, v):
    return _gqa_with(q, k, v, shift="magnitudes")


def _no_root(q, k, v):
    return _gqa_with(q, k, v, root=1.0)


def _divides_by_d(q, k, v):
    return _gqa_with(q, k, v, root=q.shape[1])


def _root_of_all_heads(q, k, v):
    return _gqa_with(q, k, v, root=math.sqrt(q.size))


def _softmax_over_heads(q, k, v):
    return _gqa_with(q, k, v, axis=0)


def _no_maximum(q, k, v):
    return _gqa_with(q, k, v, shift=False)


def _one_maximum(q, k, v):
    return _gqa_with(q, k, v, shift="all heads")


def _no_guard(q, k, v):
    return _gqa_with(q, k, v, guard=False)


def _float64(q, k, v):
    return _gqa_with(q, k, v).astype(np.float64)


def _changes_q(q, k, v):
    return _gqa_with(q, k, v, change=lambda q: q.__imul__(0))


def _gqa_alternative(q, k, v):
    """All heads at once: query heads in groups, no loop."""
    heads, (kv_heads, _, d) = len(q), k.shape
    if heads % kv_heads:
        raise ValueError("heads do not divide")
    grouped = q.reshape(kv_heads, heads // kv_heads, d).astype(np.float64)
    scores = np.einsum("ghd,gnd->ghn", grouped, k) / math.sqrt(d)
    weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
    weights /= weights.sum(axis=-1, keepdims=True)
    return np.einsum("ghn,gnd->ghd", weights, v).reshape(heads, d).astype(F32)


# --- d07.a2 ------------------------------------------------------------------------------------


def _online_groups() -> list[Group]:
    rng = np.random.default_rng(72)
    inf = np.inf

    def values(n, d=3):
        return rng.standard_normal((n, d)).astype(F32) + F32(0.5)

    rising, falling = np.linspace(-40, 60, 50), np.linspace(60, -40, 50)
    ties = rng.integers(0, 4, 40).astype(F32)
    noise = np.array([[1, 2], [np.nan, np.nan], [3, 4], [np.nan, 0]], F32)
    holes = np.where(rng.random(60) < 0.4, -inf, rng.standard_normal(60) * 3)
    return [
        Group("result", 2, "When a larger score comes, both the sum and the accumulator shrink by "
              "exp(old maximum - new maximum), before the token is added.",
              [stream_case("random", rng.standard_normal(200) * 2, values(200, 8)),
               stream_case("rising", rising, values(50)),
               stream_case("falling", falling, values(50)),
               stream_case("far below zero", rng.standard_normal(20) - 500, values(20))]),
        Group("counting", 2, "Only a score strictly larger than all before rescales; the first one "
              "that is visible does, an equal one does not.",
              [stream_case("ties", ties, values(40)),
               stream_case("all equal", np.full(9, 2.0), values(9)),
               stream_case("negative scores", [-5, -4, -6, -4, -1], values(5)),
               stream_case("one token", [0.0], values(1, 1))]),
        Group("masked tokens", 2, "A masked token changes nothing, wherever it stands, also first; "
              "and if nothing is visible the output is zeros.",
              [stream_case("holes", holes, values(60)),
               stream_case("masked at both ends", [-inf, -inf, 3, 5, -inf], values(5)),
               stream_case("masked rows of NaN", [0, -inf, 1, -inf], noise),
               stream_case("all masked", [-inf] * 4, values(4)),
               stream_case("one masked token", [-inf], values(1))]),
    ]


def _online_with(tokens, *, start=-np.inf, shrink_sum=True, shrink_acc=True, equal=False,
                 mask="skip", count_first=True, order="before", divide=True, in_place=False,
                 rescale=True):
    """The right answer with one part replaced."""
    top, total, acc, rescales = F32(start), F32(0), None, 0
    with np.errstate(invalid="ignore", over="ignore"):
        for score, value in tokens:
            if acc is None:
                acc = value if in_place else np.zeros_like(value)
                if in_place:
                    acc *= 0
            if score == -np.inf and mask == "skip":
                continue
            if order == "after":
                weight = np.exp(score - max(top, score))
                total, acc = total + weight, acc + weight * value
            if score > top or (equal and score == top):
                shrink = np.exp(top - score) if rescale else F32(1)
                total = total * shrink if shrink_sum else total
                acc = acc * shrink if shrink_acc else acc
                rescales += 1 if count_first or top > -np.inf else 0
                top = score
            if order == "before":
                weight = F32(0) if score == -np.inf and mask == "zero" else np.exp(score - top)
                total, acc = total + weight, acc + weight * value
        out = acc / total if divide and (total > 0 or mask == "no") else acc
    return {"out": out, "max": float(top), "sum": float(total), "rescales": rescales}


def _online_variant(**change):
    def answer(tokens):
        return _online_with(tokens, **change)
    return answer


def _collects(tokens):
    scores, values = zip(*tokens, strict=True)
    return _online_with(iter(zip(scores, values, strict=True)))


def _sorts_first(tokens):
    return _online_with(iter(sorted(tokens, key=lambda pair: -pair[0])))


def _sum_of_plain_exponentials(tokens):
    tokens = list(tokens)
    found = _online_with(iter(tokens))
    return {**found, "sum": float(np.sum([math.exp(min(700.0, float(s))) for s, _ in tokens]))}


def _online_alternative(tokens):
    """Collects nothing: log-sum-exp kept instead of maximum and sum, in float64."""
    mean, log_sum, top, rescales = None, -math.inf, -math.inf, 0
    for score, value in tokens:
        score = float(score)
        mean = np.zeros(len(value)) if mean is None else mean
        if score == -math.inf:
            continue
        if score > top:
            top, rescales = score, rescales + 1
        high, low = max(log_sum, score), min(log_sum, score)
        merged = high + math.log1p(math.exp(low - high))
        share = math.exp(score - merged)
        mean, log_sum = mean + share * (value - mean), merged
    total = 0.0 if top == -math.inf else math.exp(log_sum - top)
    return {"rescales": rescales, "sum": total, "max": top, "out": mean}


# --- d07.a3 ------------------------------------------------------------------------------------


def _exp_groups() -> list[Group]:
    ln2 = math.log(2)
    below = [*np.linspace(-200, -87, 400, endpoint=False), -3e38, -np.inf, -104.0, -88.5]
    return [
        Group("every exponent", 3, "Somewhere the error exceeds 3 ulp: reduce x by the nearest "
              "multiple of ln 2, and take enough terms.",
              [within_3_ulp("a sample of all floats", sampled(9001)),
               within_3_ulp("evenly spaced", np.linspace(-87, 0, 50_001)),
               # Two floats where degree 6, rounded at every step, is 3.01 ulp off.
               within_3_ulp("two of a billion", [-26.6860046, -48.8668213])]),
        Group("large magnitudes", 2, "Far from 0 digits are lost in n times ln 2: subtract it in "
              "two parts, the first exact.",
              [within_3_ulp("-87 to -40", np.linspace(-87, -40, 60_001)),
               within_3_ulp("multiples of ln 2", -ln2 * np.arange(126)),
               within_3_ulp("halfway between them", -ln2 * (np.arange(125) + 0.5))]),
        Group("edges", 2, "Mind 0, numbers close to 0, -87 itself, all that lies below it, and the "
              "dtype.",
              [within_3_ulp("0 and tiny", [0.0, -0.0, -1e-45, -1e-38, -2.0**-25]),
               within_3_ulp("around -87", np.nextafter(F32(-87), F32([-88, 0])).tolist() + [-87.0]),
               within_3_ulp("below -87", below),
               within_3_ulp("nothing", np.zeros(0))]),
    ]


def _finish(x, values):
    return np.where(x >= F32(-87), values, F32(0)).astype(F32)


def _exp_variant(**choice):
    def answer(x):
        return _finish(x, exp_recipe(np.maximum(x, F32(-87)), **choice))
    return answer


def _library(x):
    return _finish(x, np.exp(x))


def _imported(x, function=np.exp):
    return _finish(x, function(np.maximum(x, F32(-87))))


def _math_library(x):
    return np.array([math.exp(max(float(value), -87.0)) if value >= -87 else 0 for value in x], F32)


def _in_float64(x):
    return exp_recipe(np.maximum(x, F32(-87))).astype(np.float64) * (x >= -87)


def _operator(x):
    return _finish(x, math.e ** np.maximum(x, F32(-87)).astype(np.float64))


def _not_zero_below(x):
    return exp_recipe(np.maximum(x, F32(-87)))


def _zero_at_the_border(x):
    return np.where(x > F32(-87), exp_recipe(np.maximum(x, F32(-87))), F32(0)).astype(F32)


def _low_part_forgotten(x):
    used = np.maximum(x, F32(-87))
    n = np.rint(used * F32(1 / math.log(2)))
    return _finish(x, exp_recipe(used - n * F32(0.693359375), reduce=False)
                   * ((n.astype(np.int32) + 127) << 23).view(F32))


def _halves_and_squares(x):
    """(e^(x/256))^256: every squaring doubles the error."""
    p = exp_recipe(np.maximum(x, F32(-87)) / F32(256), reduce=False)
    for _ in range(8):
        p = p * p
    return _finish(x, p)


def _overwrites(x):
    x[:] = np.maximum(x, F32(-87))
    return exp_recipe(x)


def _exp_alternative(x):
    """In float64 all the way: fewer bits to worry about, one rounding at the end."""
    used = np.maximum(x, F32(-87)).astype(np.float64)
    n = np.floor(used / math.log(2) + 0.5)
    r = (used - n * math.log(2)) / 4
    p = 1 + r * (1 + r / 2 * (1 + r / 3 * (1 + r / 4 * (1 + r / 5 * (1 + r / 6)))))
    return _finish(x, np.ldexp(p * p * p * p, n.astype(np.int64)))


HIDDEN = [
    Hidden("d07.a1", _gqa_groups, alternative=_gqa_alternative, mutants={
        "h % kv_heads": _modulo,
        "V by another map than K": _v_by_modulo,
        "first heads, the last for the rest": _first_heads,
        "spread over the KV heads by rounding": _spread_by_rounding,
        "no division by sqrt(d)": _no_root,
        "divides by d": _divides_by_d,
        "square root of all heads' values": _root_of_all_heads,
        "softmax over heads": _softmax_over_heads,
        "no maximum subtracted": _no_maximum,
        "one maximum for all heads": _one_maximum,
        "largest magnitude subtracted": _maximum_of_magnitudes,
        "no check of the head counts": _no_guard,
        "float64 result": _float64,
        "changes the query": _changes_q,
    }),
    Hidden("d07.a2", _online_groups, alternative=_online_alternative, mutants={
        "sum not rescaled": _online_variant(shrink_sum=False),
        "accumulator not rescaled": _online_variant(shrink_acc=False),
        "nothing rescaled": _online_variant(rescale=False),
        "rescales on equal scores": _online_variant(equal=True),
        "first token not counted": _online_variant(count_first=False),
        "maximum starts at 0": _online_variant(start=0.0),
        "masked tokens not skipped": _online_variant(mask="no"),
        "masked tokens times 0": _online_variant(mask="zero"),
        "collects all tokens": _collects,
        "adds before it rescales": _online_variant(order="after"),
        "no division at the end": _online_variant(divide=False),
        "accumulates into the caller's row": _online_variant(in_place=True),
        "sorts the tokens first": _sorts_first,
        "sum of plain exponentials": _sum_of_plain_exponentials,
    }),
    Hidden("d07.a3", _exp_groups, alternative=_exp_alternative, mutants={
        "np.exp": _library,
        "math.exp": _math_library,
        "e ** x": _operator,
        "a library function under its own name": _imported,
        "degree 5": _exp_variant(degree=5),
        "degree 6": _exp_variant(degree=6),
        "no range reduction": _exp_variant(reduce=False, degree=20),
        "ln 2 in one part": _exp_variant(parts=1),
        "whole number below": _exp_variant(nearest=False),
        "low part of ln 2 forgotten": _low_part_forgotten,
        "squared eight times": _halves_and_squares,
        "float64 result": _in_float64,
        "not 0 below -87": _not_zero_below,
        "0 at -87 itself": _zero_at_the_border,
        "overwrites its argument": _overwrites,
    }),
]

READINGS = {
    "d07.b1": {
        "definition": Lines("course_lib/attention_common.py",
                            "return head * num_kv_heads // num_heads", symbol="kv_head"),
        "python_loop": Lines("course_lib/attention.py",
                             "for h in range(kh * group, (kh + 1) * group)", symbol="_all_heads"),
        "kv_head_of_21": 5,
        "right_by_luck": sum(h % 8 == h // 4 for h in range(32)),
    },
    "d07.b2": {
        "start": Lines("course_lib/attention.py", "running_max, total = F32(-np.inf), F32(0)",
                       symbol="online_softmax"),
        "masked": Lines("course_lib/attention.py", "if score == -np.inf:", "continue",
                        symbol="online_softmax"),
        "c_start": Lines("kernels_pyx/c/attention_single_pass.c", "{.max = -INFINITY"),
        "why_zero": Lines("kernels_pyx/c/v16.h", "return v16_zero_below("),
        "first_shrink": 0,
        "most_rescales": 65,
    },
    "d07.b3": {
        "avx2": Lines("kernels_pyx/c/v16_avx2.h", "_mm256_fmadd_ps(a.low"),
        "neon": Lines("kernels_pyx/c/v16_neon.h", "vfmaq_f32(z.a", "vfmaq_f32(z.c"),
        "no_other_fusing": Lines("setup.py", "-ffp-contract=off"),
        "multiply_adds": 10,
    },
}
