"""Hidden cases of day 4."""

from __future__ import annotations

from functools import cache

import numpy as np

from course_lib.classroom.exercises import Case
from course_lib.classroom.exercises.day04 import block_case
from course_lib.classroom.hidden import Group, Hidden
from course_lib.classroom.sealed import Lines
from course_lib.engine.checkpoint import open_checkpoint
from course_lib.lab.rounding_rules import RULES
from course_lib.paths import MODELS
from course_lib.quant import quantize_rows
from course_lib.weight_blocks import quantize_activations, quantize_q8_0, split_blocks

F32 = np.float32


def _weights(name):
    """A matrix of the shipped model."""
    _, source, _ = open_checkpoint(MODELS / "needle-qwen3")
    return source.read(name)


def _bad(value):
    w = np.ones((2, 64), F32)
    w[1, 33] = value
    return Case(f"{value}", (w,), raises=ValueError)


def _halves(top):
    """Blocks whose values are halves of a step on paper, whatever the step."""
    rng = np.random.default_rng(top)
    steps = rng.integers(-top, top, (97, 29)) + 0.5
    m = np.arange(3.0, 100)[:, None]
    return np.concatenate((m, m / 2, -m / 2, steps * m / top), axis=1).astype(F32)


# --- d04.a1 and d04.a2 -------------------------------------------------------------------------


def _random(seed, kind, name):
    rng = np.random.default_rng(seed)
    w = rng.standard_normal((4, 96)) * np.exp(rng.uniform(-6, 6, (4, 1)))
    return block_case(f"{name} {seed}", w.astype(F32), kind)


def _pack_groups(kind, top, extra) -> list[Group]:
    edge = np.zeros((3, 64), F32)
    edge[0, 3], edge[1, 40], edge[2, :] = 1e-9, -6e-6, 1e-4
    tie = np.full((2, 32), 0.5, F32)
    tie[:, 0] = top, -top
    tie[:, 1:8] = np.array([1.5, 2.5, -0.5, -1.5, -2.5, np.nextafter(F32(0.5), F32(0)),
                            -np.nextafter(F32(0.5), F32(0))], F32)
    return [
        Group("blocks", 2, "Scale, codes or their bytes differ: one scale for each 32 weights of a "
              "row, in the order that the format says.",
              [_random(s, kind, "random") for s in (1, 2, 3)]
              + [block_case("real weights", _weights("model.layers.1.self_attn.q_proj.weight")[:40],
                            kind)]),
        Group("rounding", 2, "A code is one off, or the values are not those of the stored bytes: "
              "mind the order of operations, halves, and which scale is used when.",
              [block_case("halves of the largest", _halves(top), kind),
               block_case("ties and the floats below them", tie, kind), *extra]),
        Group("edges", 1, "Mind blocks of zeros, tiny blocks, other widths, and weights that are "
              "not finite.",
              [block_case("zeros and tiny blocks", edge, kind),
               block_case("one block of zeros", np.zeros((1, 32), F32), kind),
               _bad(np.nan), _bad(-np.inf),
               Case("33 columns", (np.ones((2, 33), F32),), raises=ValueError),
               Case("2 rows of 48", (np.ones((2, 48), F32),), raises=ValueError)]),
    ]


@cache
def _q8_groups():
    return _pack_groups("q8_0", 127, [])


@cache
def _q4_groups():
    both = np.zeros((2, 32), F32)
    both[0, [4, 20]], both[1, [4, 20]] = (-2, 2), (2, -2)
    every = np.tile(np.arange(16, dtype=F32) - 8, (1, 2))
    every[0, 16:] = every[0, 16:][::-1]
    return _pack_groups("q4_0", 8, [
        block_case("equal magnitudes of both signs", both, "q4_0"),
        block_case("each code once", every, "q4_0"),
        block_case("each code once, signs turned", -every, "q4_0")])


def _checked(w):
    if w.shape[1] % 32 or not np.isfinite(w).all():
        raise ValueError("refused")
    return w.reshape(len(w), -1, 32)


def _inverse(d):
    return np.divide(F32(1), d, out=np.zeros_like(d), where=d != 0)


def _away(y):
    whole = np.trunc(y)
    return whole + np.copysign(np.abs(y - whole) >= F32(0.5), y)


def _q8(w, *, magnitude=None, scaled=None, rounding=_away, stored="<f2", read="stored",
        check=True, whole_row=False, guard=True, codes_first=False):
    """The right answer with one part replaced."""
    g = _checked(w) if check else np.nan_to_num(w).reshape(len(w), -1, 32)
    m = (magnitude or (lambda a: np.abs(a).max(axis=-1, keepdims=True)))(g)
    if whole_row:
        m = np.broadcast_to(m.max(axis=1, keepdims=True), m.shape)
    d = (m / F32(127)).astype(F32)
    inverse = _inverse(d) if guard else F32(1) / d
    y = scaled(g, d) if scaled else g * inverse
    codes = np.clip(rounding(y), -128, 127).astype(np.int8)
    half = d.astype(stored)
    parts = (half.view(np.uint8).reshape(*d.shape[:2], -1), codes.view(np.uint8))
    blocks = np.concatenate(parts[::-1] if codes_first else parts, axis=-1)
    scale = half.astype(F32) if read == "stored" else d
    return blocks.reshape(len(w), -1), (codes.astype(F32) * scale).reshape(w.shape)


def _q8_variant(**change):
    def answer(w):
        return _q8(w, **change)
    return answer


def _left_to_reshape(pack):
    """reshape(-1, 32) refuses only what is no multiple of 32 in all, so blocks run across rows."""
    def answer(w):
        blocks, values = pack(w.reshape(-1, 32))
        return blocks.reshape(len(w), -1), values.reshape(w.shape)
    return answer


def _divided(g, d):
    return np.divide(g, d, out=np.zeros_like(g), where=d != 0)


def _by_half(g, d):
    return g * _inverse(d.astype("<f2").astype(F32))


def _times_127_over_m(g, d):
    m = np.abs(g).max(axis=-1, keepdims=True)
    return g * np.divide(F32(127), m, out=np.zeros_like(m), where=m > 0)


def _changes_w(w):
    found = _q8(w)
    w *= 0
    return found


def _floats64(w):
    g = _checked(w).astype(np.float64)
    d = np.abs(g).max(axis=-1, keepdims=True) / 127
    codes = np.clip(_away(g * _inverse(d)), -127, 127).astype(np.int8)
    half = d.astype("<f2")
    blocks = np.concatenate((half.view(np.uint8), codes.view(np.uint8)), axis=-1)
    return blocks.reshape(len(w), -1), (codes * half.astype(np.float64)).reshape(w.shape)


def _q8_alternative(w):
    """Block by block, with struct, and read back from the bytes alone."""
    import struct

    if w.shape[1] % 32 or not np.isfinite(w).all():
        raise ValueError("refused")
    blocks = np.zeros((len(w), w.shape[1] // 32 * 34), np.uint8)
    values = np.zeros(w.shape, F32)
    for r, row in enumerate(w):
        for b in range(len(row) // 32):
            x = row[32 * b : 32 * b + 32]
            d = F32(max(abs(v) for v in x)) / F32(127)
            inverse = F32(1) / d if d > 0 else F32(0)
            codes = []
            for v in x:
                y = F32(v * inverse)
                whole = int(y)
                codes.append(whole + (1 if y - whole >= 0.5 else -1 if y - whole <= -0.5 else 0))
            data = struct.pack("<e32b", d, *codes)
            blocks[r, 34 * b : 34 * b + 34] = np.frombuffer(data, np.uint8)
            half, *read = struct.unpack("<e32b", data)
            values[r, 32 * b : 32 * b + 32] = np.array(read, F32) * F32(half)
    return blocks, values


def _q4(w, *, extreme=None, rounding=None, pair="halves", swap=False, read="stored", scaled=None,
        offset=8, limit=15, check=True, stored="<f2"):
    """The right answer with one part replaced."""
    g = _checked(w) if check else np.nan_to_num(w).reshape(len(w), -1, 32)
    place = np.abs(g).argmax(axis=-1)[..., None]
    top = (extreme or (lambda a: np.take_along_axis(a, place, axis=-1)))(g)
    d = (top / F32(-8)).astype(F32)
    y = scaled(g, d) if scaled else g * _inverse(d)
    codes = (rounding or (lambda a: np.trunc(a + F32(8.5))))(y)
    codes = np.minimum(codes, limit).astype(np.int64).astype(np.uint8) & 15
    low, high = ((codes[..., :16], codes[..., 16:]) if pair == "halves"
                 else (codes[..., ::2], codes[..., 1::2]))
    low, high = (high, low) if swap else (low, high)
    half = d.astype(stored)
    blocks = np.concatenate((half.view(np.uint8).reshape(*d.shape[:2], -1), low | high << 4), -1)
    scale = half.astype(F32) if read == "stored" else d
    values = (codes.astype(F32) - F32(offset)) * scale
    return blocks.reshape(len(w), -1), values.reshape(w.shape)


def _q4_variant(**change):
    def answer(w):
        return _q4(w, **change)
    return answer


def _last_extreme(g):
    back = g[..., ::-1]
    return np.take_along_axis(back, np.abs(back).argmax(axis=-1)[..., None], axis=-1)


def _negative_magnitude(g):
    return -np.abs(g).max(axis=-1, keepdims=True)


def _symmetric(w):
    """m / 7, codes 1 … 15."""
    return _q4(w, extreme=lambda g: np.abs(g).max(axis=-1, keepdims=True) * F32(-8 / 7))


def _trunc_then_offset(y):
    return np.trunc(y + F32(0.5)) + 8


def _wraps(w):
    return _q4(w, limit=255)


def _minus_in_uint8(w):
    blocks, values = _q4(w)
    return blocks, np.where(values < 0, values + 256 * np.abs(values).max(), values).astype(F32)


def _q4_alternative(w):
    """Block by block in Python numbers, and read back from the bytes alone."""
    if w.shape[1] % 32 or not np.isfinite(w).all():
        raise ValueError("refused")
    blocks, values = [], []
    for x in w.reshape(-1, 32):
        top = x[0]
        for v in x[1:]:
            top = v if abs(v) > abs(top) else top
        d = F32(top) / F32(-8)
        inverse = F32(1) / d if d else F32(0)
        codes = [min(int(F32(F32(v * inverse) + F32(8.5))), 15) for v in x]
        data = np.array([d], "<f2").tobytes() + bytes(a + 16 * b for a, b in
                                                      zip(codes[:16], codes[16:], strict=True))
        blocks.append(np.frombuffer(data, np.uint8))
        half = F32(np.frombuffer(data[:2], "<f2")[0])
        read = [b % 16 for b in data[2:]] + [b // 16 for b in data[2:]]
        values.append(np.array([(c - 8) * half for c in read], F32))
    return (np.concatenate(blocks).reshape(len(w), -1),
            np.concatenate(values).astype(F32).reshape(w.shape))


# --- d04.a3 ------------------------------------------------------------------------------------

ORDERS = (lambda x, m: x * (F32(127) / m), lambda x, m: x / (m / F32(127)),
          lambda x, m: x * (F32(1) / (m / F32(127))))
BY_HAND = {
    "half_up": lambda y: np.floor(y + F32(0.5)), "half_even": np.rint, "half_away": _away,
    "trunc": lambda y: np.trunc(y + F32(0.5)), "toward_zero": np.trunc}


def _with_ties(seed):
    """Rows with ties of both signs whose step is a power of two, so that every order gives them,
    and rows of halves of their maximum, which are ties in some orders only."""
    rng = np.random.default_rng(seed)
    rows, d = 12, int(rng.integers(16, 50))
    x = rng.integers(-126, 127, (rows, d)) + rng.choice([0, 0.5, 0.5, 0.25, -0.3], (rows, d))
    x = np.clip(x, -126.5, 126.5)
    x[:, 0] = 127 * rng.choice([-1, 1], rows)
    x[:, 1:6] = 0.5, 1.5, -0.5, -1.5, -3.3
    uneven = rng.standard_normal((6, d))
    uneven[:, 1] = np.abs(uneven).max(axis=1) / 2
    return np.concatenate([x * 2.0 ** rng.integers(-9, 9, (rows, 1)), uneven]).astype(F32)


def _without_ties(seed):
    x = np.random.default_rng(seed).standard_normal((20, 64)).astype(F32)
    m = np.abs(x).max(axis=1, keepdims=True)
    y = 127.0 * x.astype(np.float64) / m
    return np.where(np.abs(np.abs(y - np.trunc(y)) - 0.5) < 1e-3, F32(0), x)


def _codes(x, rule, order):
    m = np.abs(x).max(axis=-1, keepdims=True)
    m = np.where(m < F32(1e-6), F32(1), m)
    return BY_HAND[rule](ORDERS[order](x, m)).astype(np.int8)


def _box(name, x, codes, expect):
    return Case(name, (x, codes), expect=expect)


@cache
def _rule_groups() -> list[Group]:
    nearest = ["half_up", "half_even", "half_away"]
    tied, free = [], []
    for seed in range(24):
        x = _with_ties(1000 + seed)
        tied += [_box(f"box {seed}, {rule}", x, _codes(x, rule, seed % 3), [rule])
                 for rule in RULES]
    for seed in range(6):
        x = _without_ties(2000 + seed)
        free += [_box(f"no ties {seed}, {rule}", x, _codes(x, rule, seed % 3),
                      nearest if rule in nearest else [rule]) for rule in RULES]
    w = _weights("model.layers.0.mlp.down_proj.weight").reshape(-1, 32)[:1200]
    kernels = [
        _box("Q8_0 weights", w,
             split_blocks(quantize_q8_0(w), "q8_0")[1].view(np.int8)[:, 0], ["half_away"]),
        _box("activations", w, quantize_activations(w)[0], ["half_even"]),
        _box("rows", w, quantize_rows(w)[0], ["half_up"]),
        _box("older rows", w, quantize_rows(w, "trunc")[0], ["trunc"])]
    x = _with_ties(3000)
    m = np.abs(x).max(axis=1, keepdims=True)
    rng = np.random.default_rng(3001)
    y = 127.0 * x / m
    mixed = np.where(np.arange(len(x))[:, None] % 2, _codes(x, "half_up", 0),
                     _codes(x, "half_even", 0))
    one_off = _codes(x, "half_away", 1)
    one_off[7, 9] += 1 if one_off[7, 9] < 0 else -1
    zeros = np.concatenate([x, np.zeros((2, x.shape[1]), F32), x[:1] * F32(1e-12)])
    small = np.array([[4e-7, 2e-7], [3e-6, 1e-6]], F32)  # below and above the limit, 1e-6
    below_half = np.array([[127, np.nextafter(F32(0.5), F32(0))]], F32)  # + 0.5 is 1 in float32
    return [
        Group("ties", 2, "A rule to nearest is known by its ties: use those on which every order "
              "of operations agrees, and let the others not mislead you.", tied),
        Group("no ties", 1, "Where no tie tells them apart, all rules to nearest stay possible.",
              free),
        Group("kernels", 2, "Real weights quantized by the library: the order of operations is not "
              "known to you, and each row has its own scale.", kernels),
        Group("edges", 1, "If no rule explains every code, none is possible; mind rows of zeros "
              "and tiny rows.",
              [_box("floor", x, np.floor(y).astype(np.int8), []),
               _box("random rounding", x,
                    np.floor(y + rng.random(y.shape)).clip(-127, 127).astype(np.int8), []),
               _box("two rules in turn", x, mixed.astype(np.int8), []),
               _box("one code off", x, one_off, []),
               _box("rows of zeros, a tiny row", zeros, _codes(zeros, "half_even", 1),
                    ["half_even"]),
               _box("a row of zeros, a code that is none", np.zeros((1, 2), F32),
                    np.array([[0, 1]]), []),
               _box("rows on both sides of 1e-6", small, np.array([[0, 0], [127, 42]]),
                    ["half_up", "half_even", "half_away", "trunc", "toward_zero"]),
               _box("the float below one half", below_half, np.array([[127, 0]]),
                    ["half_even", "half_away", "toward_zero"]),
               _box("two orders in one row", np.array([[9, 4.5, -4.5]], F32),
                    np.array([[127, 64, -63]]), ["half_up", "half_even", "half_away", "trunc"])]),
    ]


def _classify(x, codes, *, orders=ORDERS, rules=BY_HAND, scale=None, guard=True,
              agree=lambda found: np.any(found, axis=0).all()):
    """The right answer with one part replaced."""
    m = np.abs(x).max(axis=-1, keepdims=True) if scale is None else scale(x)
    m = np.where(m < F32(1e-6), F32(1), m) if guard else m
    ys = [order(x, m) for order in orders]
    return [name for name, rule in rules.items() if agree([rule(y) == codes for y in ys])]


def _one_order_a_row(found):
    return np.any([codes.all(axis=-1) for codes in found], axis=0).all()


def _limited(limit):
    def scale(x):
        m = np.abs(x).max(axis=-1, keepdims=True)
        return np.where(m < F32(limit), F32(1), m)
    return scale


def _skips_rows_of_zeros(x, codes):
    use = np.abs(x).max(axis=-1) > 0
    return _classify(x[use], codes[use])


def _classify_with(**change):
    def answer(x, codes):
        return _classify(x, codes, **change)
    return answer


def _by_mean_error(x, codes):
    """The sign of the bias alone: ties are never looked at."""
    m = np.abs(x).max(axis=-1, keepdims=True)
    y = ORDERS[0](x, np.where(m < F32(1e-6), F32(1), m))
    error = codes - y
    up = error[y < 0].mean()
    if up > 0.75:
        return ["trunc"]
    if up > 0.25:
        return ["toward_zero"]
    return ["half_up", "half_even", "half_away"]


def _first_possible(x, codes):
    return _classify(x, codes)[:1]


def _most_codes(x, codes):
    """The rule that explains most codes, also where it does not explain all."""
    m = np.abs(x).max(axis=-1, keepdims=True)
    m = np.where(m < F32(1e-6), F32(1), m)
    hits = {name: np.any([rule(o(x, m)) == codes for o in ORDERS], axis=0).sum()
            for name, rule in BY_HAND.items()}
    return [name for name, count in hits.items() if count == max(hits.values())]


def _near_is_a_tie(x, codes):
    """Takes all that is within 1e-4 of a tie for one."""
    m = np.abs(x).max(axis=-1, keepdims=True)
    y = ORDERS[0](x, np.where(m < F32(1e-6), F32(1), m))
    near = np.abs(np.abs(y - np.trunc(y)) - 0.5) < 1e-4
    y = np.where(near, np.sign(y) * (np.floor(np.abs(y)) + F32(0.5)), y)
    return [name for name, rule in BY_HAND.items() if (rule(y) == codes).all()]


def _ignores_ties(x, codes):
    m = np.abs(x).max(axis=-1, keepdims=True)
    y = ORDERS[0](x, np.where(m < F32(1e-6), F32(1), m))
    use = np.abs(np.abs(y - np.trunc(y)) - 0.5) > 1e-3
    return [name for name, rule in BY_HAND.items() if (rule(y) == codes)[use].all()]


def _away_as_up(x, codes):
    return _classify(x, codes, rules=BY_HAND | {"half_away": lambda y: np.floor(y + F32(0.5))})


def _rules_alternative(x, codes):
    """Number by number, in exact comparisons of float32 values."""
    possible = dict.fromkeys(RULES, True)
    for row, given in zip(np.asarray(x, F32), np.asarray(codes), strict=True):
        m = np.abs(row).max()
        m = m if m >= F32(1e-6) else F32(1)
        ys = np.stack([row * (F32(127) / m), row / (m / F32(127)),
                       row * (F32(1) / (m / F32(127)))])
        low = np.floor(ys)
        rest = (ys - low).astype(np.float64)
        even = np.where(low % 2 == 0, low, low + 1)
        cut = np.where(ys < 0, np.ceil(ys), low)
        nearest = np.where(rest < 0.5, low, low + 1)
        tie = rest == 0.5
        made = {"half_up": np.floor(ys + F32(0.5)), "half_even": np.where(tie, even, nearest),
                "half_away": np.where(tie & (ys < 0), low, nearest),
                "trunc": np.trunc(ys + F32(0.5)), "toward_zero": cut}
        for rule in RULES:
            possible[rule] &= bool((made[rule] == given).any(axis=0).all())
    return [rule for rule, left in possible.items() if left]


HIDDEN = [
    Hidden("d04.a1", _q8_groups, alternative=_q8_alternative, mutants={
        "max instead of max-abs": _q8_variant(
            magnitude=lambda g: np.maximum(g.max(axis=-1, keepdims=True), F32(1e-3))),
        "one scale for a row": _q8_variant(whole_row=True),
        "divides by d": _q8_variant(scaled=_divided),
        "x * (127 / m)": _q8_variant(scaled=_times_127_over_m),
        "codes from the float16 d": _q8_variant(scaled=_by_half),
        "values from the float32 d": _q8_variant(read="exact"),
        "halves to even": _q8_variant(rounding=np.rint),
        "halves up": _q8_variant(rounding=lambda y: np.floor(y + F32(0.5))),
        "trunc(y + 0.5)": _q8_variant(rounding=lambda y: np.trunc(y + F32(0.5))),
        "trunc(|y| + 0.5)": _q8_variant(
            rounding=lambda y: np.copysign(np.trunc(np.abs(y) + F32(0.5)), y)),
        "high byte first": _q8_variant(stored=">f2"),
        "a float32 scale": _q8_variant(stored="<f4"),
        "scale behind the codes": _q8_variant(codes_first=True),
        "no guard for zeros": _q8_variant(guard=False),
        "accepts NaN": _q8_variant(check=False),
        "leaves the width to reshape": _left_to_reshape(_q8),
        "float64 inside": _floats64,
        "changes its argument": _changes_w,
    }),
    Hidden("d04.a2", _q4_groups, alternative=_q4_alternative, mutants={
        "magnitude without its sign": _q4_variant(extreme=_negative_magnitude),
        "the last of equal magnitudes": _q4_variant(extreme=_last_extreme),
        "m / 7": _symmetric,
        "neighbours share a byte": _q4_variant(pair="neighbours"),
        "high and low swapped": _q4_variant(swap=True),
        "no limit 15": _wraps,
        "8 added behind the conversion": _q4_variant(rounding=_trunc_then_offset),
        "halves to even": _q4_variant(rounding=lambda y: np.rint(y) + 8),
        "halves away": _q4_variant(rounding=lambda y: _away(y) + 8),
        "divides by d": _q4_variant(scaled=_divided),
        "codes from the float16 d": _q4_variant(scaled=_by_half),
        "values from the float32 d": _q4_variant(read="exact"),
        "offset 7": _q4_variant(offset=7),
        "8 subtracted in uint8": _minus_in_uint8,
        "high byte first": _q4_variant(stored=">f2"),
        "accepts NaN": _q4_variant(check=False),
        "leaves the width to reshape": _left_to_reshape(_q4),
    }),
    Hidden("d04.a3", _rule_groups, alternative=_rules_alternative, mutants={
        "one order, 127 / m": _classify_with(orders=ORDERS[:1]),
        "one order, x / d": _classify_with(orders=ORDERS[1:2]),
        "one order for all codes": lambda x, codes: _classify(
            x, codes, agree=lambda found: any(np.all(f) for f in found)),
        "one order for a row": _classify_with(agree=_one_order_a_row),
        "every order must agree": _classify_with(agree=np.all),
        "mean errors alone": _by_mean_error,
        "the first possible rule": _first_possible,
        "the rule with most hits": _most_codes,
        "nearly a tie is a tie": _near_is_a_tie,
        "ties are left out": _ignores_ties,
        "half_away as half_up": _away_as_up,
        "one scale for all rows": _classify_with(scale=lambda x: np.abs(x).max()),
        "max instead of max-abs": _classify_with(
            scale=lambda x: np.maximum(x.max(axis=-1, keepdims=True), F32(1e-6))),
        "no guard for zeros": _classify_with(guard=False),
        "a limit of 1e-5": _classify_with(guard=False, scale=_limited(1e-5)),
        "a limit of 1e-8": _classify_with(guard=False, scale=_limited(1e-8)),
        "skips rows of zeros": _skips_rows_of_zeros,
        "half_away by |y| + 0.5": _classify_with(rules=BY_HAND | {
            "half_away": lambda y: np.copysign(np.floor(np.abs(y) + F32(0.5)), y)}),
        "half_up in float64": _classify_with(rules=BY_HAND | {
            "half_up": lambda y: np.floor(y.astype(np.float64) + 0.5)}),
    }),
]

READINGS = {
    "d04.b1": {
        "knows_34": (
            Lines("course_lib/weight_blocks.py", "BLOCK_BYTES: dict[Kind, int] ="),
            Lines("course_lib/engine/gguf_types.py", 'TensorKind("Q8_0"'),
            Lines("course_lib/bench/engine_cases.py", "Q8_0_BYTES ="),
        ),
        "stores_scale": Lines("course_lib/weight_blocks.py", 'stored = d.astype("<f2")',
                              symbol="_quantize"),
        "codes_from": Lines("course_lib/weight_blocks.py", "y = groups * _inverse(d)",
                            symbol="_q8_0_codes"),
        "row_bytes": 170,
        "scale_share": 100 * 2 / 34,
    },
    "d04.b2": {
        "packs": Lines("course_lib/weight_blocks.py", "codes[..., 16:] << 4", symbol="_q4_0_codes"),
        "packs_in_c": Lines("kernels_pyx/c/pack.c", "code[i + 16] << 4"),
        "unpacks": Lines("course_lib/weight_blocks.py", "(codes & 15, codes >> 4)",
                         symbol="_q4_0_signed"),
        "byte_of_100": 60,
        "half_of_100": "low",
        "code_of_extreme": 0,
    },
    "d04.b3": {
        "activations": Lines("kernels_pyx/c/linear_blocks.c", "v16_store(whole, v16_sub(v16_add(",
                             "v16_store(whole + 16, v16_sub(v16_add("),
        "weights_q8": Lines("kernels_pyx/c/pack.c", "round_half_away(x[i] * inverse)"),
        "weights_q4": Lines("kernels_pyx/c/pack.c", "(int32_t)(x[i] * inverse + 8.5f)"),
        "biased": Lines("kernels_pyx/c/quantize.c", "static inline float round_trunc(float y)"),
        "rule_activations": "half_even",
        "rule_weights_q8": "half_away",
        "rule_rows": "half_up",
        "rule_weights_q4": "half_up",
    },
}
