"""Hidden cases of day 6."""

from __future__ import annotations

import math

import numpy as np

from course_lib.classroom.exercises import Case
from course_lib.classroom.exercises.day06 import norm_case, qk_case, rope_case, some_rows
from course_lib.classroom.hidden import Group, Hidden
from course_lib.classroom.sealed import Lines
from course_lib.fused import fused_multiply_add
from course_lib.lab import reduction

F32 = np.float32

# 6-1: RMSNorm by a tree


def _norm_groups() -> list[Group]:
    trees = {"halves": reduction.kernel_tree, "neighbours":
             lambda d: reduction.by_neighbours(reduction.lanes(d)), "chain": reduction.chain,
             "four lanes": lambda d: reduction.by_halves(reduction.lanes(d, 4))}
    random = np.random.default_rng(61).permutation(48).tolist()
    lopsided = ((random[:5], (random[5:6], random[6:30])), random[30:])
    tiny = some_rows(600, 32) * F32(2.0**-12)
    ones = np.ones(32, F32)
    tree = reduction.kernel_tree(32)
    # (1 + 2**-12)² lies halfway between two float32, and the tiny square before it decides.
    halfway = np.repeat(F32([2.0**-30, 1 + 2.0**-12]), 4)
    of_two = [[i, 4 + i] for i in range(4)]
    of_two = (of_two[0], of_two[1]), (of_two[2], of_two[3])
    return [
        Group("the kernels' tree", 2, "A lane is a chain of fused multiply-adds from 0, each "
              "rounded once, and a pair is one addition.",
              [norm_case(f"row {seed}", seed, 160, reduction.kernel_tree(160))
               for seed in range(610, 650, 2)] + [
                   Case("a square halfway, after a tiny one", (halfway, ones[:8], 0.0, of_two),
                        dtype=True, expect=reduction.rms_norm_by_tree(halfway, ones[:8], 0.0,
                                                                      of_two))]),
        Group("other trees", 2, "The order is the tree's: it may be a chain, neighbours, or "
              "lopsided, and a lane may take its numbers in any order.",
              [*(norm_case(f"{name} {seed}", seed, 64, make(64)) for name, make in trees.items()
                 for seed in (660, 662, 664, 666)),
               *(norm_case(f"lopsided {seed}", seed, 48, lopsided)
                 for seed in range(670, 682, 2))]),
        Group("root and gain", 1, "After the sum: divide by d, add eps, take the root, divide x "
              "by it, multiply by the gain; every step rounds to float32.",
              [norm_case(f"row {seed}", seed, 31, reduction.chain(31))
               for seed in range(700, 740, 2)]),
        Group("eps", 1, "eps is added to the mean, inside the root, and decides for tiny rows.",
              [Case("a tiny row", (tiny, ones, 1e-6, tree), dtype=True,
                    expect=reduction.rms_norm_by_tree(tiny, ones, 1e-6, tree)),
               Case("zeros", (0 * tiny, ones, 1e-5, tree), dtype=True, expect=0 * ones),
               norm_case("a large eps", 750, 32, tree, eps=0.25)]),
    ]


def _by_tree(x, gain, eps, tree, *, step=fused_multiply_add, add=lambda a, b: a + b, order=None,
             end=None):
    def total(part):
        if isinstance(part, tuple):
            return add(total(part[0]), total(part[1]))
        s = F32(0)
        for i in order(part) if order else part:
            s = step(x[i], x[i], s)
        return s

    s = total(tree)
    if end is not None:
        return end(x, gain, eps, s)
    return x / np.sqrt(s / F32(len(x)) + F32(eps)) * gain


def _two_roundings(x, gain, eps, tree):
    return _by_tree(x, gain, eps, tree, step=lambda a, b, s: F32(a * b) + s)


def _sorted_lanes(x, gain, eps, tree):
    return _by_tree(x, gain, eps, tree, order=sorted)


def _lanes_from_the_end(x, gain, eps, tree):
    return _by_tree(x, gain, eps, tree, order=lambda part: part[::-1])


def _ignores_the_tree(x, gain, eps, tree):
    return _by_tree(x, gain, eps, list(range(len(x))))


def _numpy_sum(x, gain, eps, tree):
    return (x / np.sqrt(np.mean(np.square(x)) + F32(eps)) * gain).astype(F32)


def _times_one_over_root(x, gain, eps, tree):
    return _by_tree(x, gain, eps, tree, end=lambda x, g, e, s: x * (
        F32(1) / np.sqrt(s / F32(len(x)) + F32(e))) * g)


def _gain_first(x, gain, eps, tree):
    return _by_tree(x, gain, eps, tree, end=lambda x, g, e, s: x * g / np.sqrt(
        s / F32(len(x)) + F32(e)))


def _eps_outside(x, gain, eps, tree):
    return _by_tree(x, gain, eps, tree, end=lambda x, g, e, s: x / (
        np.sqrt(s / F32(len(x))) + F32(e)) * g)


def _eps_before_division(x, gain, eps, tree):
    return _by_tree(x, gain, eps, tree, end=lambda x, g, e, s: x / np.sqrt(
        (s + F32(e)) / F32(len(x))) * g)


def _float64_sum(x, gain, eps, tree):
    return _by_tree(x, gain, eps, tree, step=lambda a, b, s: float(a) * float(b) + float(s),
                    end=lambda x, g, e, s: x / np.sqrt(F32(s) / F32(len(x)) + F32(e)) * g)


def _rounds_float64_first(x, gain, eps, tree):
    return _by_tree(x, gain, eps, tree,
                    step=lambda a, b, s: F32(float(a) * float(b) + float(s)))


def _times_one_over_d(x, gain, eps, tree):
    return _by_tree(x, gain, eps, tree, end=lambda x, g, e, s: x / np.sqrt(
        s * (F32(1) / F32(len(x))) + F32(e)) * g)


def _mean_in_float64(x, gain, eps, tree):
    return _by_tree(x, gain, eps, tree, end=lambda x, g, e, s: x / np.sqrt(
        F32(float(s) / len(x) + e)) * g)


def _norm_with_a_stack(x, gain, eps, tree):
    done, todo = [], [(tree, False)]
    while todo:
        part, ready = todo.pop()
        if isinstance(part, list):
            s = F32(0)
            for value in x[part]:
                # 24 bits squared fit in 48; the sum is rounded to odd before float32 sees it.
                s = fused_multiply_add(np.array([value]), np.array([value]), np.array([s]))[0]
            done.append(s)
        elif ready:
            right, left = done.pop(), done.pop()
            done.append(np.add(left, right, dtype=F32))
        else:
            todo += [(part, True), (part[1], False), (part[0], False)]
    mean = np.divide(done[0], F32(x.size), dtype=F32)
    root = np.sqrt(np.add(mean, F32(eps), dtype=F32), dtype=F32)
    return np.multiply(np.divide(x, root, dtype=F32), gain, dtype=F32)


# 6-2: QK-norm


def _qk_groups() -> list[Group]:
    return [
        Group("heads", 2, "Every head of every token is normed on its own, by its own mean of 64 "
              "squares, not by one over all heads.",
              [qk_case("four and two heads", 620, 5, 4, 2, 64),
               qk_case("one token", 621, 1, 8, 8, 32), qk_case("d = 128", 622, 2, 2, 1, 128)]),
        Group("gains", 1, "q has its gain and k has another; each column has its own number.",
              [qk_case("equal numbers of heads", 623, 4, 2, 2, 16),
               qk_case("as many heads as numbers", 624, 3, 16, 16, 16)]),
        Group("eps", 1, "eps is added to the mean of the squares before the root; nothing is "
              "subtracted.",
              [qk_case("a large eps", 625, 3, 2, 2, 8, eps=2.0),
               Case("zeros", (np.zeros((1, 2, 8), F32), np.zeros((1, 1, 8), F32), np.ones(8, F32),
                              np.ones(8, F32), 1e-6), dtype=True,
                    expect=(np.zeros((1, 2, 8), F32), np.zeros((1, 1, 8), F32)))]),
    ]


def _qk(q, k, q_gain, k_gain, eps, *, norm=None):
    def right(rows, gain, eps):
        return rows / np.sqrt(np.mean(np.square(rows), axis=-1, keepdims=True) + F32(eps)) * gain

    norm = norm or right
    return norm(q, q_gain, eps), norm(k, k_gain, eps)


def _one_norm_for_all_heads(q, k, q_gain, k_gain, eps):
    return _qk(q, k, q_gain, k_gain, eps, norm=lambda r, g, e: r / np.sqrt(
        np.mean(np.square(r), axis=(1, 2), keepdims=True) + F32(e)) * g)


def _over_heads(q, k, q_gain, k_gain, eps):
    return _qk(q, k, q_gain, k_gain, eps, norm=lambda r, g, e: r / np.sqrt(
        np.mean(np.square(r), axis=1, keepdims=True) + F32(e)) * g)


def _one_gain(q, k, q_gain, k_gain, eps):
    return _qk(q, k, q_gain, q_gain, eps)


def _gains_swapped(q, k, q_gain, k_gain, eps):
    return _qk(q, k, k_gain, q_gain, eps)


def _subtracts_the_mean(q, k, q_gain, k_gain, eps):
    return _qk(q, k, q_gain, k_gain, eps, norm=lambda r, g, e: (
        r - r.mean(axis=-1, keepdims=True)) / np.sqrt(r.var(axis=-1, keepdims=True) + F32(e)) * g)


def _gain_of_the_head(q, k, q_gain, k_gain, eps):
    return _qk(q, k, q_gain, k_gain, eps, norm=lambda r, g, e: r / np.sqrt(
        np.mean(np.square(r), axis=-1, keepdims=True) + F32(e)) * (
            g[:, None] if r.shape[1] == len(g) else g))


def _divides_by_the_length(q, k, q_gain, k_gain, eps):
    return _qk(q, k, q_gain, k_gain, eps, norm=lambda r, g, e: r / np.sqrt(
        np.sum(np.square(r), axis=-1, keepdims=True) + F32(e)) * g)


def _qk_eps_outside(q, k, q_gain, k_gain, eps):
    return _qk(q, k, q_gain, k_gain, eps, norm=lambda r, g, e: r / (
        np.sqrt(np.mean(np.square(r), axis=-1, keepdims=True)) + F32(max(e, 1e-6))) * g)


def _qk_float64(q, k, q_gain, k_gain, eps):
    return _qk(q.astype(np.float64), k.astype(np.float64), q_gain, k_gain, eps)


def _qk_in_place(q, k, q_gain, k_gain, eps):
    q[...], k[...] = _qk(q, k, q_gain, k_gain, eps)
    return q, k


def _qk_by_rows(q, k, q_gain, k_gain, eps):
    out = []
    for rows, gain in ((q, q_gain), (k, k_gain)):
        flat = rows.reshape(-1, rows.shape[-1])
        mean = np.einsum("rd,rd->r", flat, flat) / F32(flat.shape[1])
        scaled = gain * (flat / np.sqrt(mean + F32(eps))[:, None])
        out.append(scaled.reshape(rows.shape))
    return tuple(out)


# 6-3: RoPE


def _rope_groups() -> list[Group]:
    x = some_rows(630, 6, 3, 64)
    # The first frequency is exactly 1, so the angle is the position as a float32: 2**24, the even
    # neighbour of 2**24 + 1. NumPy's cos and sin are within some last bits of the exact ones.
    cos, sin = math.cos(2**24), math.sin(2**24)
    not_a_float32 = Case("a position that float32 rounds", (
        F32([[[3, 4]]]), np.array([2**24 + 1]), 1e4), dtype=True, atol=1e-5,
        expect=F32([[[3 * cos - 4 * sin, 4 * cos + 3 * sin]]]))
    return [
        Group("pairs", 2, "The partner of number j is j + d/2, and both turn forwards by the same "
              "angle.",
              [rope_case("d = 4", some_rows(631, 3, 1, 4), [0, 1, 2], 10.0),
               rope_case("three heads of 64", x, [0, 1, 2, 3, 4, 5], 1e5),
               rope_case("d = 128", some_rows(632, 2, 2, 128), [5, 6], 1e6)]),
        Group("positions", 2, "Each token has the position that it is given, in whatever order, "
              "and all its heads share it.",
              [rope_case("from 90 downwards", x, [90, 70, 50, 30, 20, 10], 1e5),
               rope_case("as many heads as tokens", some_rows(633, 4, 4, 8), [9, 0, 2, 2], 1e4),
               rope_case("thousands", x, [4000, 4001, 17, 2048, 1, 0], 1e5), not_a_float32]),
        Group("theta", 1, "The frequencies are theta^(-2j/d): they start at 1 and end just "
              "above 1/theta, for the theta that is given.",
              [rope_case("theta = 2", x, [1, 2, 3, 4, 5, 6], 2.0),
               rope_case("theta = 10,000", x, [3, 9, 27, 81, 50, 1], 1e4),
               rope_case("theta = 5,000,000", x, [60, 61, 62, 63, 64, 65], 5e6)]),
    ]


def _rope_by(x, positions, theta, *, powers=None, sign=1, at=None, base=None):
    d = x.shape[-1]
    exponents = np.arange(0, d, 2, dtype=F32) / F32(d) if powers is None else powers(d)
    frequency = F32(1) / F32(base or theta) ** exponents
    positions = np.asarray(positions) if at is None else at(x, positions)
    angle = positions.astype(F32)[:, None] * frequency
    cos, sin = np.cos(angle)[:, None], F32(sign) * np.sin(angle)[:, None]
    a, b = x[..., : d // 2], x[..., d // 2 :]
    return np.concatenate((a * cos - b * sin, b * cos + a * sin), axis=-1)


def _neighbours(x, positions, theta):
    d = x.shape[-1]
    order = np.arange(d).reshape(-1, 2).T.reshape(-1)
    return _rope_by(x[..., order], positions, theta)[..., np.argsort(order)]


def _backwards(x, positions, theta):
    return _rope_by(x, positions, theta, sign=-1)


def _counts_from_zero(x, positions, theta):
    return _rope_by(x, positions, theta, at=lambda x, p: np.arange(len(x)))


def _from_the_first(x, positions, theta):
    return _rope_by(x, positions, theta, at=lambda x, p: p - p[0])


def _half_exponents(x, positions, theta):
    return _rope_by(x, positions, theta, powers=lambda d: np.arange(d // 2, dtype=F32) / F32(d))


def _reaches_theta(x, positions, theta):
    return _rope_by(x, positions, theta, powers=lambda d: np.linspace(0, 1, d // 2, dtype=F32))


def _always_ten_thousand(x, positions, theta):
    return _rope_by(x, positions, theta, base=10000.0)


def _mirrors(x, positions, theta):
    out = _rope_by(x, positions, theta)
    half = x.shape[-1] // 2
    out[..., half:] = -out[..., half:]
    return out


def _position_of_the_head(x, positions, theta):
    if x.shape[0] != x.shape[1]:
        return _rope_by(x, positions, theta)
    return _rope_by(x.transpose(1, 0, 2), positions, theta).transpose(1, 0, 2)


def _angles_in_float64(x, positions, theta):
    d = x.shape[-1]
    angle = positions[:, None] * (F32(1) / F32(theta) ** (np.arange(0, d, 2, dtype=F32) / F32(d)))
    cos, sin = np.cos(angle).astype(F32)[:, None], np.sin(angle).astype(F32)[:, None]
    a, b = x[..., : d // 2], x[..., d // 2 :]
    return np.concatenate((a * cos - b * sin, b * cos + a * sin), axis=-1)


def _context_of_4096(x, positions, theta):
    return _rope_by(x, positions, theta, at=lambda x, p: p % 4096)


def _rope_float64(x, positions, theta):
    return _rope_by(x.astype(np.float64), positions, theta)


def _rope_in_place(x, positions, theta):
    x[...] = _rope_by(x, positions, theta)
    return x


def _as_complex(x, positions, theta):
    d = x.shape[-1]
    frequency = np.array([1 / theta ** (2 * j / d) for j in range(d // 2)], F32)
    angle = (np.asarray(positions, F32)[:, None] * frequency).astype(np.float64)
    turned = (x[..., : d // 2] + 1j * x[..., d // 2 :]) * np.exp(1j * angle)[:, None]
    return np.concatenate((turned.real, turned.imag), axis=-1).astype(F32)


HIDDEN = [
    Hidden("d06.a1", _norm_groups,
           {"two roundings": _two_roundings, "sorted lanes": _sorted_lanes,
            "lanes from the end": _lanes_from_the_end,
            "ignores the tree": _ignores_the_tree,
            "NumPy's mean": _numpy_sum, "times 1/root": _times_one_over_root,
            "gain first": _gain_first, "eps outside": _eps_outside,
            "eps before division": _eps_before_division, "float64 sum": _float64_sum,
            "rounds float64 first": _rounds_float64_first, "times 1/d": _times_one_over_d,
            "mean in float64": _mean_in_float64},
           alternative=_norm_with_a_stack),
    Hidden("d06.a2", _qk_groups,
           {"one norm for all heads": _one_norm_for_all_heads, "over heads": _over_heads,
            "one gain": _one_gain, "gains swapped": _gains_swapped,
            "subtracts the mean": _subtracts_the_mean, "by the length": _divides_by_the_length,
            "gain of the head": _gain_of_the_head, "eps outside": _qk_eps_outside,
            "float64": _qk_float64, "in place": _qk_in_place},
           alternative=_qk_by_rows),
    Hidden("d06.a3", _rope_groups,
           {"neighbours": _neighbours, "backwards": _backwards, "counts from 0": _counts_from_zero,
            "from the first": _from_the_first, "half exponents": _half_exponents,
            "reaches theta": _reaches_theta, "theta fixed": _always_ten_thousand,
            "mirrors": _mirrors, "position of the head": _position_of_the_head,
            "angles in float64": _angles_in_float64, "a context of 4096": _context_of_4096,
            "float64": _rope_float64, "in place": _rope_in_place},
           alternative=_as_complex),
]

_LAYERS_C, _LAYERS = "kernels_pyx/c/layers.c", "course_lib/engine/layers.py"
_SPLIT, _TABLES = "kernels_pyx/c/split_heads.c", "kernels_pyx/c/rope_tables.c"

READINGS = {
    "d06.b1": {
        "lane_loop": Lines(_LAYERS_C, first="for (; i + 16 <= d; i += 16) {",
                           last="v16 a = v16_load(x + i);"),
        "halves": Lines("kernels_pyx/c/v16_portable.h", first="a.lane[i] += a.lane[i + half];"),
        "refused": Lines("kernels_pyx/c/v16_neon.h", first="/* Not vaddvq_f32:"),
        "divides": Lines(_LAYERS_C, first="v16_mul(v16_div(v16_load(x + i), divisor)"),
        "additions_at_the_end": 15,
    },
    "d06.b2": {
        "numpy_norm": Lines(_LAYERS, first="normed = rows if gain is None else rms_norm("),
        "numpy_turn": Lines(_LAYERS, first="out[...] = rope(normed, cos, sin)"),
        "c_norm": Lines(_SPLIT, first="normed_row(x, gain, in->d, sqrtf(mean), out);"),
        "c_turn": Lines(_SPLIT, first="bad |= rope_pairs("),
        "norms_per_token": 18,
    },
    "d06.b3": {
        "built_once": Lines("course_lib/engine/model.py",
                            first="cos, sin = rope_tables(positions,"),
        "numpy_angle": Lines(_LAYERS, first="angle = positions.astype(np.float32)[:, None] * freq"),
        "c_angle": Lines(_TABLES, first="float angle = (float)positions[t] * frequency;"),
        "step_at_100000": 0.0078125,
        "exact_cos": Lines(_TABLES, first="cos_sin((double)angle, cos + t * pairs"),
    },
}
