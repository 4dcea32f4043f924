"""Hidden cases of day 9."""

from __future__ import annotations

import math

import numpy as np

from course_lib.classroom.exercises import Case
from course_lib.classroom.exercises.day09 import output_and_bound, single_pass_case
from course_lib.classroom.hidden import Group, Hidden
from course_lib.classroom.sealed import Lines

F32 = np.float32

# --- d09.a1 ------------------------------------------------------------------------------------


def _quantize_truth(x):
    """The definition, one float32 number at a time."""
    q, scale = np.zeros(x.shape, np.int8), np.zeros(x.shape[:-1], F32)
    for place in np.ndindex(scale.shape):
        m = max(abs(value) for value in x[place])
        m = F32(1) if m < F32(1e-6) else m
        inverse = F32(127) / m
        for i, value in enumerate(x[place]):
            y = F32(value * inverse)
            q[place + (i,)] = math.floor(F32(y + F32(0.5)))
        scale[place] = m / F32(127)
    return q, scale


def _same(name, x):
    return Case(name, (x,), expect=_quantize_truth(x), dtype=True)


def _halves(maxima):
    """Rows whose second value is half of the maximum: 63.5 steps in exact arithmetic."""
    return np.array([[m, m / 2, -m / 2, m / 4] for m in maxima], F32)


def _quantize_groups() -> list[Group]:
    rng = np.random.default_rng(91)
    normal = rng.standard_normal((5, 4, 32)).astype(F32)
    uneven = normal * np.array([1, 1e-3, 300, 7], F32)[:, None]
    infinite, nan = normal.copy(), normal.copy()
    infinite[2, 1, 5], nan[4, 3, 0] = -np.inf, np.nan
    return [
        Group("random rows", 2, "Codes and scales differ from the rule: mind the axis of the "
              "maximum, its sign, and what one scale belongs to.",
              [_same("tokens, heads, d", normal), _same("heads, d", normal[0]),
               _same("heads of very different size", uneven),
               _same("the largest magnitude is negative", -np.abs(normal))]),
        Group("bits", 2, "A code is one step off: compute 127/m first, in float32, and round "
              "by floor(y + 0.5).",
              [_same("halves of the maximum", _halves(range(3, 200))),
               _same("float32 all the way", (rng.integers(-254, 255, (400, 16)) / 2).astype(F32))]),
        Group("edges", 1, "Mind rows of zeros, tiny rows, and values that are not finite.",
              [_same("zeros and a tiny row", np.array([[0, 0], [9e-7, -9e-7], [2e-6, 1e-6]], F32)),
               Case("infinity", (infinite,), raises=ValueError),
               Case("NaN", (nan,), raises=ValueError)]),
    ]


def _finite(x):
    if not np.isfinite(x).all():
        raise ValueError("not finite")


def _by_rule(x, *, magnitude=None, codes=None, guard=True):
    """The right answer with one part replaced."""
    _finite(x)
    m = (magnitude or (lambda a: np.abs(a).max(axis=-1, keepdims=True)))(x)
    m = np.where(m < F32(1e-6), F32(1), m) if guard else m
    codes = codes or (lambda a, top: np.floor(a * (F32(127) / top) + F32(0.5)))
    q = np.clip(codes(x, m), -127, 127).astype(np.int8)
    scale = np.broadcast_to(m / F32(127), x.shape[:-1] + (1,))[..., 0]
    return q, scale.astype(F32)


def _max_without_abs(x):
    return _by_rule(x, magnitude=lambda a: a.max(axis=-1, keepdims=True))


def _one_scale_for_all_heads(x):
    return _by_rule(x, magnitude=lambda a: np.abs(a).max(axis=(-2, -1), keepdims=True))


def _divides_by_the_scale(x):
    return _by_rule(x, codes=lambda a, m: np.floor(a / (m / F32(127)) + F32(0.5)))


def _multiplies_by_127_first(x):
    return _by_rule(x, codes=lambda a, m: np.floor(a * F32(127) / m + F32(0.5)))


def _half_to_even(x):
    return _by_rule(x, codes=lambda a, m: np.rint(a * (F32(127) / m)))


def _half_away(x):
    def codes(a, m):
        y = a * (F32(127) / m)
        return np.sign(y) * np.floor(np.abs(y) + F32(0.5))
    return _by_rule(x, codes=codes)


def _truncates(x):
    return _by_rule(x, codes=lambda a, m: np.trunc(a * (F32(127) / m) + F32(0.5)))


def _float64_inside(x):
    return _by_rule(x, codes=lambda a, m: np.floor(a.astype(np.float64) * (127 / m.astype(float))
                                                   + 0.5))


def _float64_scale(x):
    q, scale = _by_rule(x)
    return q, scale.astype(np.float64)


def _no_guard(x):
    return _by_rule(x, guard=False)


def _accepts_nan(x):
    return _by_rule(np.nan_to_num(x))


def _changes_its_argument(x):
    found = _by_rule(x)
    x *= 0
    return found


def _quantize_alternative(x):
    _finite(x)
    rows = np.array(x, F32).reshape(-1, x.shape[-1])
    q, scale = np.empty(rows.shape, np.int8), np.empty(len(rows), F32)
    for row, codes, at in zip(rows, q, range(len(rows)), strict=True):
        top = max(row.max(), -row.min())
        top = top if top >= F32(1e-6) else F32(1)
        y = row * F32(F32(127) / top) + F32(0.5)
        whole = np.trunc(y)
        codes[:] = (whole - (whole > y)).astype(np.int8)
        scale[at] = top / F32(127)
    return q.reshape(x.shape), scale.reshape(x.shape[:-1])


# --- d09.a2 ------------------------------------------------------------------------------------


def _reference_bound(q, kq, k_scale, vq, v_scale):
    """(exp(2 e) - 1) * max|v| with e the largest score change that rounding q can make."""
    half_step = np.repeat(np.abs(q.reshape(-1, 32)).max(axis=1).clip(1e-6) / 254, 32)
    change = np.abs(kq.astype(np.float64)) @ half_step * k_scale / math.sqrt(q.size)
    return math.expm1(2 * change.max()) * np.abs(vq * v_scale[:, None].astype(np.float64)).max()


def _single_pass(name, args, largest=None):
    largest = 3 * _reference_bound(*args) if largest is None else largest
    return Case(name, args, accept=output_and_bound(args, largest))


def _tightest(sign):
    """Rounding moves every query value by almost half a step the same way, two tokens look
    exactly against each other, their scores are about equal: the difference nears its bound."""
    q = np.tile([3.49, -2.51], 16)
    q[:2] = 127, -127  # fixes the step at 1
    kq = np.stack([np.full(32, 127), np.full(32, -127)]).astype(np.int8)
    kq[:, :2] = 127
    vq = np.stack([np.full(32, 127), np.full(32, -127)]).astype(np.int8)
    k_scale, v_scale = np.full(2, 0.0004, F32), np.full(2, 0.004, F32)
    return (q * sign).astype(F32), kq, k_scale, vq, v_scale


def _tied_query():
    """Query values exactly between two codes, of both signs."""
    q = np.r_[127, np.arange(-15, 16) + 0.5].astype(F32)
    rows = single_pass_case(17, 6, 32)[1:]
    return q, rows[0], rows[1] * F32(0.02), *rows[2:]


def _uneven_groups():
    q, *rows = single_pass_case(18, 20, 96)
    return q * np.repeat(np.array([1, 0, 0.05], F32), 32), *rows


def _large_scores():
    q, kq, k_scale, vq, v_scale = single_pass_case(19, 70, 64)
    order = np.argsort((kq @ q) * k_scale)  # every token has a new maximum
    return q * F32(40), kq[order], k_scale[order], vq[order], v_scale[order]


def _single_pass_groups() -> list[Group]:
    random = [single_pass_case(*c) for c in [(11, 1, 32), (12, 31, 64), (13, 32, 64),
                                             (14, 200, 128), (15, 65, 96)]]
    uneven = single_pass_case(16, 50, 64)
    tokens = np.geomspace(0.2, 5, 50).astype(F32)
    uneven = (uneven[0], uneven[1], uneven[2] * tokens, uneven[3], uneven[4] * tokens[::-1])
    return [
        Group("random rows", 3, "The output is not that of the int8 query: mind one scale per 32 "
              "query values, both row scales, and the division by sqrt(d).",
              [_single_pass(f"{len(a[1])} tokens, d = {len(a[0])}", a) for a in random]
              + [_single_pass("rows of very different size", uneven)]),
        Group("query", 2, "Mind query groups of zeros, small groups beside large ones, and values "
              "exactly between two codes.",
              [_single_pass("ties", _tied_query()), _single_pass("groups", _uneven_groups())]),
        Group("softmax", 1, "Large scores need the running maximum subtracted, and sum and output "
              "rescaled when it grows.",
              [_single_pass("rising scores", _large_scores(), 1e300)]),
        Group("bound", 2, "The bound must hold for the worst rounding of q, also through the "
              "softmax, and stay within three times the derived one.",
              [_single_pass("worst rounding", _tightest(1)),
               _single_pass("worst rounding, other sign", _tightest(-1)),
               _single_pass("many tokens", single_pass_case(20, 300, 64))]),
    ]


def _pass_with(q, kq, k_scale, vq, v_scale, *, groups=32, query="int8", root=None, rescale=True,
               subtract=True, ties="away", bound=None):
    """The right answer with one part replaced."""
    d = q.size
    parts = q.reshape(-1, groups or d)
    m = np.abs(parts).max(axis=1, keepdims=True)
    m = np.where(m < F32(1e-6), F32(1), m)
    y = parts * (F32(127) / m)
    if ties == "away":
        codes = np.copysign(np.floor(np.abs(y) + F32(0.5)), y)
    else:
        codes = np.floor(y + F32(0.5)) if ties == "up" else np.trunc(y + F32(0.5))
    used = (codes * (m / F32(127))).reshape(-1) if query == "int8" else q
    scores = (kq.astype(F32) @ used) * k_scale * F32(root or 1 / math.sqrt(d))
    top, total, acc = F32(scores[0] if subtract else 0), F32(0), np.zeros(vq.shape[1], F32)
    for score, row, scale in zip(scores, vq, v_scale, strict=True):
        if subtract and score > top:
            shrink = np.exp(top - score) if rescale else F32(1)
            top, total, acc = score, total * shrink, acc * shrink
        weight = np.exp(score - top)
        total, acc = total + weight, acc + weight * scale * row
    right = _reference_bound(q, kq, k_scale, vq, v_scale)
    return acc / total, right if bound is None else bound(right)


def _variant(**change):
    def answer(q, kq, k_scale, vq, v_scale):
        return _pass_with(q, kq, k_scale, vq, v_scale, **change)
    return answer


def _forgets_v_scale(q, kq, k_scale, vq, v_scale):
    return _pass_with(q, kq, k_scale, vq, np.full_like(v_scale, v_scale.mean()))


def _forgets_k_scale(q, kq, k_scale, vq, v_scale):
    return _pass_with(q, kq, np.full_like(k_scale, k_scale.mean()), vq, v_scale)


def _only_the_output(q, kq, k_scale, vq, v_scale):
    return _pass_with(q, kq, k_scale, vq, v_scale)[0]


def _typical_rounding(q, kq, k_scale, vq, v_scale):
    """Takes the root mean square of rounding for its worst case."""
    step = np.repeat(np.abs(q.reshape(-1, 32)).max(axis=1).clip(1e-6) / 127, 32)
    change = np.sqrt((kq.astype(float) ** 2) @ (step**2 / 12)) * k_scale / math.sqrt(q.size)
    largest_v = float(np.abs(vq * v_scale[:, None].astype(float)).max())
    out = _pass_with(q, kq, k_scale, vq, v_scale)[0]
    return out, math.expm1(2 * float(change.max())) * largest_v


def _single_pass_alternative(q, kq, k_scale, vq, v_scale):
    """32 tokens at a time, and the sharper bound tanh(e / 2) * (max v - min v)."""
    m = np.abs(q.reshape(-1, 32)).max(axis=1)
    m[m < 1e-6] = 1
    y = q * np.repeat(F32(127) / m, 32)
    whole = np.trunc(y)
    q_int = whole + np.sign(y) * (np.abs(y - whole) >= 0.5)
    step = np.repeat(m / F32(127), 32).astype(np.float64)
    root = 1 / math.sqrt(q.size)
    scores = kq.astype(np.float64) @ (q_int * step) * k_scale * root
    top, total, acc = -np.inf, 0.0, np.zeros(vq.shape[1])
    for first in range(0, len(scores), 32):
        block = slice(first, first + 32)
        new = max(top, scores[block].max())
        weights = np.exp(scores[block] - new)
        shrink = math.exp(top - new)
        total = total * shrink + weights.sum()
        acc = acc * shrink + (weights * v_scale[block]) @ vq[block]
        top = new
    change = float((np.abs(kq) @ (step / 2) * k_scale * root).max())
    v = vq * v_scale[:, None].astype(np.float64)
    return acc / total, math.tanh(change / 2) * float((v.max(axis=0) - v.min(axis=0)).max())


# --- d09.a3 ------------------------------------------------------------------------------------


def _bias_truth(errors):
    """The definition: the share of all sign patterns that split at least as unevenly."""
    signs = [e > 0 for e in np.asarray(errors).ravel().tolist() if e != 0]
    n, positive = len(signs), sum(signs)
    row = [1]  # Pascal's triangle, row n
    for _ in range(n):
        row = [a + b for a, b in zip([0, *row], [*row, 0], strict=True)]
    uneven = sum(ways for heads, ways in enumerate(row)
                 if abs(2 * heads - n) >= abs(2 * positive - n))
    return {"n": n, "positive": positive, "p": uneven / 2**n}


def _errors(name, errors):
    return Case(name, (errors,), expect=_bias_truth(errors), rtol=1e-9)


def _bias_groups() -> list[Group]:
    rng = np.random.default_rng(93)
    some = [rng.standard_normal(n) + shift for n, shift in [(9, 0.5), (40, 0.0), (128, -0.4)]]
    return [
        Group("counts", 2, "p must be the exact two-sided probability of such a split.",
              [_errors(f"{len(e)} errors", e) for e in some]
              + [_errors("one of five", [1, -1, -1, -1, -1]),
                 _errors("all positive", np.ones(128, F32))]),
        Group("signs only", 1, "Zeros have no sign; sizes do not matter.",
              [_errors("zeros", [0.0, -0.0, 0.0, 2.0, 2.0, -1.0]),
               _errors("one large error", [-1e9, 1e-9, 1e-9, 1e-9, 1e-9, 1e-9, 1e-9]),
               _errors("a matrix", rng.integers(-1, 3, (6, 5)).astype(F32))]),
        Group("edges", 1, "Mind nothing to count, an even split, many errors and NaN.",
              [_errors("no errors", []), _errors("only zeros", [0.0, 0.0]),
               _errors("even split", np.tile([1.0, -1.0], 20)),
               _errors("1,500 errors", np.where(np.arange(1500) % 9 < 4, 1.0, -1.0)),
               Case("NaN", ([float("nan"), 1.0],), raises=ValueError)]),
    ]


def _counts(errors):
    errors = np.asarray(errors)
    if np.isnan(errors).any():
        raise ValueError("NaN")
    return int((errors > 0).sum()), int((errors < 0).sum())


def _tail(n, k):
    return sum(math.comb(n, i) for i in range(k + 1)) / 2**n


def _report(positive, n, p):
    return {"n": n, "positive": positive, "p": p}


def _one_sided(errors):
    up, down = _counts(errors)
    return _report(up, up + down, _tail(up + down, min(up, down)))


def _more_than_one(errors):
    up, down = _counts(errors)
    return _report(up, up + down, 2 * _tail(up + down, min(up, down)))


def _zeros_are_negative(errors):
    up, down = _counts(errors)
    n = np.asarray(errors).size
    return _report(up, n, min(1.0, 2 * _tail(n, min(up, n - up))))


def _only_too_many_positives(errors):
    up, down = _counts(errors)
    return _report(up, up + down, min(1.0, 2 * _tail(up + down, down)))


def _normal_approximation(errors):
    up, down = _counts(errors)
    n = max(1, up + down)
    return _report(up, up + down, math.erfc(abs(up - down) / math.sqrt(2 * n)))


def _point_probability(errors):
    up, down = _counts(errors)
    n = up + down
    return _report(up, n, min(1.0, 2 * math.comb(n, up) / 2**n))


def _sign_of_the_mean(errors):
    up, down = _counts(errors)
    mean = float(np.sum(errors))
    return _report(up, up + down, 1.0 if mean == 0 else 2.0 ** -(up + down - 1))


def _floats_overflow(errors):
    up, down = _counts(errors)
    n = up + down
    tail = sum(float(math.comb(n, i)) * 0.5**n for i in range(min(up, down) + 1))
    return _report(up, n, min(1.0, 2 * tail))


def _accepts_nan_errors(errors):
    errors = np.asarray(errors)
    up, down = int((errors > 0).sum()), int((errors < 0).sum())
    return _report(up, up + down, min(1.0, 2 * _tail(up + down, min(up, down))))


def _bias_alternative(errors):
    up, down = _counts(errors)
    n, few = up + down, min(up, down)
    ways, tail = 1, 0  # ways = comb(n, i), stepped
    for i in range(few + 1):
        tail += ways
        ways = ways * (n - i) // (i + 1)
    middle = math.comb(n, few) if 2 * few == n else 0
    return {"positive": up, "n": n, "p": (2 * tail - middle) / (1 << n)}


HIDDEN = [
    Hidden("d09.a1", _quantize_groups, alternative=_quantize_alternative, mutants={
        "max instead of max-abs": _max_without_abs,
        "one scale for all heads": _one_scale_for_all_heads,
        "divides by the scale": _divides_by_the_scale,
        "x * 127 / m": _multiplies_by_127_first,
        "half to even": _half_to_even,
        "half away from zero": _half_away,
        "trunc(y + 0.5)": _truncates,
        "float64 inside": _float64_inside,
        "float64 scale": _float64_scale,
        "no guard for zero rows": _no_guard,
        "accepts NaN": _accepts_nan,
        "changes its argument": _changes_its_argument,
    }),
    Hidden("d09.a2", _single_pass_groups, alternative=_single_pass_alternative, mutants={
        "one scale for the whole query": _variant(groups=None),
        "float query": _variant(query="float"),
        "ties up": _variant(ties="up"),
        "trunc(y + 0.5)": _variant(ties="trunc"),
        "no division by sqrt(d)": _variant(root=1.0),
        "no maximum subtracted": _variant(subtract=False),
        "sum not rescaled": _variant(rescale=False),
        "one k scale": _forgets_k_scale,
        "one v scale": _forgets_v_scale,
        "bound zero": _variant(bound=lambda right: 0.0),
        "bound of a typical rounding": _typical_rounding,
        "bound too loose": _variant(bound=lambda right: 10 * right),
        "no bound": _only_the_output,
    }),
    Hidden("d09.a3", _bias_groups, alternative=_bias_alternative, mutants={
        "one-sided": _one_sided,
        "p above 1": _more_than_one,
        "zeros counted as negative": _zeros_are_negative,
        "only too many positives": _only_too_many_positives,
        "normal approximation": _normal_approximation,
        "probability of this split only": _point_probability,
        "sign of the mean": _sign_of_the_mean,
        "float overflow": _floats_overflow,
        "accepts NaN": _accepts_nan_errors,
    }),
]

READINGS = {
    "d09.b1": {
        "max_of_one_head": Lines("course_lib/quant.py", "np.abs(x).max(axis=-1)",
                                 symbol="quantize_rows"),
        "write_path": Lines("course_lib/kvcache.py", "quantize_rows(k, self.rule)",
                            symbol="KVCache.append"),
        "clamp": Lines("course_lib/quant.py", "np.clip(rounded, -Q_MAX, Q_MAX)",
                       symbol="quantize_rows"),
        "lowest_code": -127,
        "scales_per_token": 16,
    },
    "d09.b2": {
        "rounds_q": Lines("course_lib/attention.py", "quantize_blocks(q, group)",
                          symbol="_single_pass_head"),
        "rounds_k_and_v": Lines("course_lib/kvcache.py", "quantize_rows(k, self.rule)",
                                symbol="KVCache.append"),
        "exact_dot": Lines("course_lib/attention.py", "@ q_int[part]",
                           symbol="_single_pass_head"),
        "rule_for_q": "half_away",
        "rule_for_kv": "half_up",
        "query_scales": 4,
    },
    "d09.b3": {
        "quoted_ratio": Lines("data/published/quoted.csv", "ppl_ratio_low", "ppl_ratio_high"),
        "our_ratio": Lines("course_lib/lab/experiments.py", '"perplexity_ratio": round(q8',
                           symbol="kv_summary"),
        "numerator": "q8",
        "worse_side": "above",
        "nats_per_token": math.log(0.996),
    },
}
