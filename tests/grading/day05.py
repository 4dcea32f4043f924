"""Hidden cases of day 5."""

from __future__ import annotations

import numpy as np

from course_lib.classroom.exercises import Case
from course_lib.classroom.exercises.day05 import q8_row
from course_lib.classroom.hidden import Group, Hidden
from course_lib.classroom.sealed import Lines
from course_lib.weight_blocks import linear_q8_0_reference

F32 = np.float32

# 5-1: an integer dot product


def _reference(x, x_scales, w, w_scales):
    """The kernels' definition, fed with an x that quantizes to these codes and scales.

    A block of x holds a code of 127, and its scale is a power of two, so that its values, code
    times scale, come back as they were."""
    values = x.reshape(-1, 32).astype(F32) * x_scales[:, None]
    blocks = np.concatenate((w_scales.astype("<f2")[:, None].view(np.uint8),
                             w.reshape(-1, 32).view(np.uint8)), axis=1).reshape(1, -1)
    return linear_q8_0_reference(values.reshape(1, -1), blocks)[0, 0]


def exact_row(seed: int, blocks: int, w_low: int = -127) -> tuple[np.ndarray, ...]:
    """As q8_row, with an x that `_reference` can be fed with."""
    rng = np.random.default_rng(seed)
    x, _, w, w_scales = q8_row(seed, blocks)
    x[::32] = 127
    w = np.where(w < -120, w_low, w).astype(np.int8)
    return x, np.ldexp(np.ones(blocks, F32), rng.integers(-9, -3, blocks)), w, w_scales


def _q8_case(name: str, seed: int, blocks: int, w_low: int = -127) -> Case:
    row = exact_row(seed, blocks, w_low)
    return Case(name, row, expect=_reference(*row), dtype=True)


def _q8_groups() -> list[Group]:
    from course_lib.lab.dot_ladder import q8_dot

    full = np.full(64, 127, np.int8)
    flat = np.array([2.0**-7, 2.0**-7], F32), np.array([0.5, 0.5], np.float16)
    near = [q8_row(seed, 14) for seed in range(60, 100)]
    return [
        Group("sums", 2, "A block's sum of products needs more than 16 bits, and a weight may be "
              "-128: widen the codes before you multiply.",
              [Case("largest codes", (full, flat[0], -full, flat[1]), dtype=True,
                    expect=F32(-2 * 32 * 127 * 127 * 2.0**-8)),
               _q8_case("five blocks", 51, 5), _q8_case("weights of -128", 52, 8, -128)]),
        Group("scales", 2, "Every block has its own pair of scales, and the product of the two is "
              "a float32.",
              [_q8_case("one block", 53, 1), _q8_case("eight blocks", 54, 8),
               _q8_case("fourteen blocks", 55, 14)]),
        Group("bits", 1, "A last bit differs: blocks in ascending order, one rounding for scale · "
              "sum + acc, and float32 between the blocks.",
              [Case(f"row {i}", row, expect=q8_dot(*row), dtype=True)
               for i, row in enumerate(near)]),
    ]


def _by_blocks(x, x_scales, w, w_scales, *, total=None, step=None, order=1):
    total = total or (lambda a, b: int(a.astype(np.int64) @ b.astype(np.int64)))
    step = step or (lambda s, t, acc: F32(float(s) * t + float(acc)))
    acc = F32(0)
    for b in range(len(x_scales))[::order]:
        block = slice(32 * b, 32 * b + 32)
        acc = step(F32(w_scales[b]) * x_scales[b], total(x[block], w[block]), acc)
    return acc


def _sum_in_int16(x, x_scales, w, w_scales):
    return _by_blocks(x, x_scales, w, w_scales, total=lambda a, b: int(
        (a.astype(np.int16) * b.astype(np.int16)).sum(dtype=np.int16)))


def _products_in_int8(x, x_scales, w, w_scales):
    return _by_blocks(x, x_scales, w, w_scales, total=lambda a, b: int((a * b).sum(dtype=np.int64)))


def _two_roundings(x, x_scales, w, w_scales):
    return _by_blocks(x, x_scales, w, w_scales, step=lambda s, t, acc: F32(s * F32(t)) + acc)


def _backwards(x, x_scales, w, w_scales):
    return _by_blocks(x, x_scales, w, w_scales, order=-1)


def _one_scale_for_all(x, x_scales, w, w_scales):
    return _by_blocks(x, np.full_like(x_scales, x_scales[0]), w, w_scales)


def _float64_to_the_end(x, x_scales, w, w_scales):
    sums = (x.reshape(-1, 32).astype(int) * w.reshape(-1, 32)).sum(axis=1)
    return F32((sums * x_scales.astype(float) * w_scales.astype(float)).sum())


def _scales_after_each_other(x, x_scales, w, w_scales):
    acc = F32(0)
    for b in range(len(x_scales)):
        total = int(x[32 * b : 32 * b + 32].astype(int) @ w[32 * b : 32 * b + 32].astype(int))
        acc = F32(float(F32(total) * F32(w_scales[b])) * float(x_scales[b]) + float(acc))
    return acc


def _scales_in_float64(x, x_scales, w, w_scales):
    acc = F32(0)
    for b in range(len(x_scales)):
        total = int(x[32 * b : 32 * b + 32].astype(int) @ w[32 * b : 32 * b + 32].astype(int))
        acc = F32(float(w_scales[b]) * float(x_scales[b]) * total + float(acc))
    return acc


def _no_weight_below_127(x, x_scales, w, w_scales):
    return _by_blocks(x, x_scales, np.maximum(w, -127), w_scales)


def _absolute_weight_trick(x, x_scales, w, w_scales):
    return _by_blocks(x, x_scales, w, w_scales, total=lambda a, b: int(
        (np.abs(b).astype(int) * (a.astype(int) * np.sign(b))).sum()))


def _by_matrix(x, x_scales, w, w_scales):
    sums = np.einsum("bi,bi->b", x.reshape(-1, 32).astype(np.int64),
                     w.reshape(-1, 32).astype(np.int64))
    scale = w_scales.astype(F32) * x_scales.astype(F32)
    acc = np.float32(0)
    for s, t in zip(scale.astype(np.float64), sums.tolist(), strict=True):
        acc = (s * t + np.float64(acc)).astype(np.float32)
    return acc


# 5-2: SDOT


def _literal_sdot(acc, a, b):
    out = []
    for lane in range(4):
        total = int(acc[lane])
        for i in range(4 * lane, 4 * lane + 4):
            total += int(a[i]) * int(b[i])
        out.append((total + 2**31) % 2**32 - 2**31)
    return np.array(out, np.int32)


def _sdot_case(name, acc, a, b) -> Case:
    args = (np.array(acc, np.int32), np.array(a, np.int8), np.array(b, np.int8))
    return Case(name, args, expect=_literal_sdot(*args), dtype=True)


def _sdot_groups() -> list[Group]:
    rng = np.random.default_rng(52)

    def some(low=-128, high=128):
        return rng.integers(low, high, 16)

    zero = [0, 0, 0, 0]
    return [
        Group("lanes", 2, "Lane i gets four neighbouring products, 4 i to 4 i + 3, and its old "
              "value.",
              [_sdot_case("small numbers", zero, some(-9, 9), some(-9, 9)),
               _sdot_case("an accumulator", [5, -70000, 3, 9], some(-9, 9), some(-9, 9))]),
        Group("the whole range", 1, "Products of int8 do not fit int8, and four of them do not fit "
              "int16.",
              [_sdot_case("random codes", rng.integers(-10**6, 10**6, 4), some(), some()),
               _sdot_case("all 127", zero, [127] * 16, [127] * 16),
               _sdot_case("all -128", zero, [-128] * 16, [-128] * 16),
               _sdot_case("-128 times 127", zero, [-128] * 16, [127] * 16)]),
        Group("wrapping", 1, "The instruction wraps around at both ends of int32; it neither stops "
              "at the largest number nor fails.",
              [_sdot_case("upwards", [2**31 - 1, 2**31 - 5, 0, 2**31 - 65536], [-128] * 16,
                          [-128] * 16),
               _sdot_case("downwards", [-(2**31), -(2**31) + 3, 0, -1], [127] * 16, [-128] * 16)]),
    ]


def _sdot_by(acc, a, b, *, pick=lambda p: p.reshape(4, 4).sum(axis=1), limit=None, start=True):
    total = pick(a.astype(np.int64) * b.astype(np.int64)) + (acc.astype(np.int64) if start else 0)
    if limit is not None:
        total = np.clip(total, -limit - 1, limit)
    return total.astype(np.int32)


def _strided_lanes(acc, a, b):
    return _sdot_by(acc, a, b, pick=lambda p: p.reshape(4, 4).sum(axis=0))


def _saturates(acc, a, b):
    return _sdot_by(acc, a, b, limit=2**31 - 1)


def _wraps_upwards_only(acc, a, b):
    total = acc.astype(int) + (a.astype(int) * b).reshape(4, 4).sum(axis=1)
    return np.where(total >= 2**31, total - 2**32, np.maximum(total, -2**31)).astype(np.int32)


def _without_acc(acc, a, b):
    return _sdot_by(acc, a, b, start=False)


def _sums_in_int16(acc, a, b):
    return acc + (a.astype(np.int16) * b).reshape(4, 4).sum(axis=1, dtype=np.int16)


def _int8_products(acc, a, b):
    return acc + (a * b).reshape(4, 4).sum(axis=1, dtype=np.int32)


def _returns_int64(acc, a, b):
    return _sdot_by(acc, a, b).astype(np.int64)


def _unsigned(acc, a, b):
    return _sdot_by(acc, a.view(np.uint8), b)


def _changes_acc(acc, a, b):
    acc += (a.astype(np.int32) * b).reshape(4, 4).sum(axis=1, dtype=np.int32)
    return acc


def _sdot_by_einsum(acc, a, b):
    four = np.einsum("li,li->l", a.reshape(4, 4).astype(np.int32), b.reshape(4, 4).astype(np.int32))
    return np.add(acc, four.astype(np.int32), dtype=np.int32)


# 5-3: the first difference


def _literal_difference(stages_a, stages_b):
    if [n for n, _ in stages_a] != [n for n, _ in stages_b]:
        raise ValueError("stages")
    for (name, a), (_, b) in zip(stages_a, stages_b, strict=True):
        if a.shape != b.shape or a.dtype != b.dtype:
            return name, None
        for index in np.ndindex(a.shape):
            if a[index].tobytes() != b[index].tobytes():
                return name, tuple(index)
    return None


def _run(seed: int, changes=(), stages: int = 6):
    """Stages of a made-up run, with some numbers changed: (stage, index, value)."""
    rng = np.random.default_rng(seed)
    run = [(f"stage {i}", rng.integers(-99, 99, (3, 4, 5)).astype(F32)) for i in range(stages)]
    for stage, index, value in changes:
        run[stage][1][index] = value
    return run


def _next(x: float) -> float:
    return float(np.nextafter(F32(x), F32(np.inf)))


def _difference_case(name, a, b) -> Case:
    return Case(name, (a, b), expect=_literal_difference(a, b))


def _difference_groups() -> list[Group]:
    plain = _run(7)
    small = _next(plain[2][1][1, 2, 3])
    views = [("t", np.arange(12, dtype=F32).reshape(3, 4).T), ("s", np.arange(9)[::2])]
    other_views = [("t", np.arange(12, dtype=F32).reshape(3, 4).T.copy()),
                   ("s", np.arange(9)[::2].copy())]
    other_views[1][1][3] = 5
    turned = [("t", views[0][1].copy())]
    turned[0][1][1, 0] = turned[0][1][0, 2] = -1
    missing = _run(7)[:-1]
    other_nan = [[("a", np.array([0, bits], np.uint32).view(F32))]
                 for bits in (0x7FC00000, 0x7FC00001)]
    return [
        Group("first, not largest", 2, "The first stage with any difference counts, however small; "
              "in it the first number in reading order.",
              [_difference_case("equal runs", plain, _run(7)),
               _difference_case("one last bit before a large change", plain,
                                _run(7, [(2, (1, 2, 3), small), (4, (0, 0, 0), 1e9)])),
               _difference_case("two in one stage", plain,
                                _run(7, [(3, (2, 0, 4), 1e9), (3, (1, 3, 0), 0.5)])),
               _difference_case("the last number of all", plain, _run(7, [(5, (2, 3, 4), 0.5)])),
               _difference_case("two stages of one name", *(
                   [("norm", F32([first])), ("norm", F32([2]))] for first in (0, 1)))]),
        Group("bits", 1, "Compare bits, not values: signs of zero count, and a NaN can be the same "
              "NaN.",
              [_difference_case("minus zero", _run(8, [(1, (0, 1, 0), 0.0)]),
                                _run(8, [(1, (0, 1, 0), -0.0)])),
               _difference_case("NaN and NaN, then a difference",
                                _run(8, [(1, (0, 1, 0), np.nan)]),
                                _run(8, [(1, (0, 1, 0), np.nan), (4, (1, 1, 1), 0.5)])),
               _difference_case("number and NaN", _run(8), _run(8, [(3, (2, 2, 2), np.nan)])),
               _difference_case("two NaNs with different bits", *other_nan),
               _difference_case("minus zero in float64", *(
                   [("s", F32([1])), ("t", np.array([1, zero]))] for zero in (0.0, -0.0))),
               _difference_case("minus zero in float16", *(
                   [("s", F32([1])), ("t", np.array([1, zero], np.float16))]
                   for zero in (0.0, -0.0)))]),
        Group("shapes and types", 1, "Another shape or dtype of a stage is a difference of that "
              "stage, even if the values agree; integers and strided arrays are compared too.",
              [_difference_case("float64", [("a", F32([1, 2]))], [("a", np.array([1.0, 2.0]))]),
               _difference_case("one row more", [("a", F32([[1, 2]]))],
                                [("a", F32([[1, 2], [1, 2]]))]),
               _difference_case("same bytes, other dtype", [("a", F32([1, 2]))],
                                [("a", F32([1, 2]).view(np.int32))]),
               _difference_case("same bytes, other shape", [("a", F32([1, 2]))],
                                [("a", F32([[1], [2]]))]),
               _difference_case("strided and whole numbers", views, other_views),
               _difference_case("reading order of a transposed array", views[:1], turned),
               _difference_case("a number without axes", [("a", np.array(F32(1)))],
                                [("a", np.array(F32(2)))])]),
        Group("stages", 1, "Runs with other stages, or in another order, cannot be compared: raise "
              "ValueError, also where the first stages agree.",
              [Case("a stage is missing at the end", (plain, missing), raises=ValueError),
               Case("other names", ([("a", F32([1]))], [("b", F32([1]))]), raises=ValueError),
               Case("a difference, then a stage more",
                    (_run(7), _run(7, [(0, (0, 0, 0), 0.5)], stages=7)), raises=ValueError)]),
    ]


def _walk(stages_a, stages_b, *, differs, names=True, shapes=True, last=False):
    if names and [n for n, _ in stages_a] != [n for n, _ in stages_b]:
        raise ValueError("stages")
    for (name, a), (_, b) in zip(stages_a, stages_b, strict=False):
        if shapes and (a.shape != b.shape or a.dtype != b.dtype):
            return name, None
        wrong = np.argwhere(differs(a, b))
        if len(wrong):
            return name, tuple(int(i) for i in wrong[-1 if last else 0])
    return None


def _bits(a, b):
    flat = [np.ascontiguousarray(x).reshape(-1).view(np.uint8).reshape(-1, x.itemsize)
            for x in (a, b)]
    return (flat[0] != flat[1]).any(axis=1).reshape(a.shape)


def _by_value(stages_a, stages_b):
    return _walk(stages_a, stages_b, differs=lambda a, b: a != b)


def _nan_aware_values(stages_a, stages_b):
    return _walk(stages_a, stages_b, differs=lambda a, b: (a != b) & ~((a != a) & (b != b)))


def _with_a_tolerance(stages_a, stages_b):
    return _walk(stages_a, stages_b,
                 differs=lambda a, b: ~np.isclose(a, b, rtol=1e-6, equal_nan=True))


def _last_of_the_stage(stages_a, stages_b):
    return _walk(stages_a, stages_b, differs=_bits, last=True)


def _stops_with_the_shorter_run(stages_a, stages_b):
    return _walk(stages_a, stages_b, differs=_bits, names=False)


def _checks_names_on_the_way(stages_a, stages_b):
    for (name, a), (other, b) in zip(stages_a, stages_b, strict=False):
        if name != other:
            raise ValueError("stages")
        found = _walk([(name, a)], [(name, b)], differs=_bits)
        if found:
            return found
    if len(stages_a) != len(stages_b):
        raise ValueError("stages")
    return None


def _ignores_dtype(stages_a, stages_b):
    return _walk([(n, a.astype(np.float64)) for n, a in stages_a],
                 [(n, b.astype(np.float64)) for n, b in stages_b], differs=_bits)


def _signs_and_nans(stages_a, stages_b):
    return _walk(stages_a, stages_b, differs=lambda a, b:
                 (a != b) & ~(np.isnan(a) & np.isnan(b)) | (np.signbit(a) != np.signbit(b)))


def _bits_of_float32_only(stages_a, stages_b):
    return _walk(stages_a, stages_b,
                 differs=lambda a, b: _bits(a, b) if a.dtype == F32 else a != b)


def _by_dictionary(stages_a, stages_b):
    a, b = dict(stages_a), dict(stages_b)
    return _walk(list(a.items()), list(b.items()), differs=_bits)


def _size_for_dtype(stages_a, stages_b):
    return _walk([(n, a.view(f"u{a.itemsize}")) for n, a in stages_a],
                 [(n, b.view(f"u{b.itemsize}")) for n, b in stages_b], differs=_bits)


def _printed_numbers(stages_a, stages_b):
    return _walk(stages_a, stages_b, differs=np.vectorize(lambda a, b: repr(a) != repr(b)))


def _largest_difference(stages_a, stages_b):
    found = _literal_difference(stages_a, stages_b)
    if found is None or found[1] is None:
        return found
    sizes = [np.abs(np.nan_to_num(a.astype(float) - b)) for (_, a), (_, b)
             in zip(stages_a, stages_b, strict=True)]
    stage = int(np.argmax([s.max() for s in sizes]))
    index = np.unravel_index(int(sizes[stage].argmax()), sizes[stage].shape)
    return stages_a[stage][0], tuple(int(i) for i in index)


def _memory_order(stages_a, stages_b):
    return _walk(stages_a, stages_b, differs=lambda a, b: _bits(a.T, b.T).T
                 if a.ndim == 2 and not a.flags.c_contiguous else _bits(a, b)) if all(
        a.flags.c_contiguous for _, a in stages_a) else None


def _by_integers(stages_a, stages_b):
    names_a, arrays_a = zip(*stages_a, strict=True)
    names_b, arrays_b = zip(*stages_b, strict=True)
    if names_a != names_b:
        raise ValueError("different stages")
    for name, a, b in zip(names_a, arrays_a, arrays_b, strict=True):
        if (a.shape, a.dtype) != (b.shape, b.dtype):
            return (name, None)
        whole = np.dtype(f"u{a.itemsize}")
        unequal = np.array(a, order="C").view(whole) != np.array(b, order="C").view(whole)
        if unequal.any():
            return (name, tuple(map(int, np.unravel_index(unequal.argmax(), unequal.shape))))
    return None


HIDDEN = [
    Hidden("d05.a1", _q8_groups,
           {"sums in int16": _sum_in_int16, "products in int8": _products_in_int8,
            "two roundings": _two_roundings, "blocks backwards": _backwards,
            "one scale": _one_scale_for_all, "float64 to the end": _float64_to_the_end,
            "scales after each other": _scales_after_each_other,
            "scales in float64": _scales_in_float64, "no weight of -128": _no_weight_below_127,
            "int8 has no 128": _absolute_weight_trick},
           alternative=_by_matrix),
    Hidden("d05.a2", _sdot_groups,
           {"strided lanes": _strided_lanes, "saturates": _saturates,
            "wraps upwards only": _wraps_upwards_only,
            "no accumulator": _without_acc,
            "sums in int16": _sums_in_int16, "products in int8": _int8_products,
            "int64": _returns_int64, "unsigned": _unsigned, "changes acc": _changes_acc},
           alternative=_sdot_by_einsum),
    Hidden("d05.a3", _difference_groups,
           {"by value": _by_value, "NaN-aware values": _nan_aware_values,
            "with a tolerance": _with_a_tolerance, "last of the stage": _last_of_the_stage,
            "shorter run decides": _stops_with_the_shorter_run,
            "names on the way": _checks_names_on_the_way, "ignores dtype": _ignores_dtype,
            "signs and NaNs": _signs_and_nans, "bits of float32 only": _bits_of_float32_only,
            "by dictionary": _by_dictionary, "size for dtype": _size_for_dtype,
            "printed numbers": _printed_numbers, "largest": _largest_difference,
            "skips strided arrays": _memory_order},
           alternative=_by_integers),
]

_BLOCKS_PY = "course_lib/weight_blocks.py"
_BLOCKS_C = "kernels_pyx/c/linear_blocks.c"
_NEON = "kernels_pyx/c/attention_q8_neon.h"

READINGS = {
    "d05.b1": {
        "rounds_numpy": Lines(_BLOCKS_PY, first="q = np.rint(groups * (F32(127) / m)[..., None])",
                              symbol="quantize_activations"),
        "rounds_c": Lines(_BLOCKS_C, first="v16_store(whole, v16_sub(v16_add(v16_mul(a, to_int)",
                          last="v16_store(whole + 16, v16_sub(v16_add(v16_mul(b, to_int)"),
        "quantized_once": Lines(_BLOCKS_C, first="threads, quantize_piece, &p);"),
        "products_per_value": 896,
    },
    "d05.b2": {
        "two_products": Lines(_NEON, first="int16x8_t low = vmlal_high_s8(",
                              last="int16x8_t high = vmlal_high_s8("),
        "largest_group_sum": 32 * 128 * 127,
        "restart": Lines(_NEON, first="if (g > 0 && g % COUNTED_GROUPS == 0) {",
                         last="x[r] = start;"),
    },
    "d05.b3": {
        "weights_q8_0": True,
        "threads": False,
        "tile": False,
        "kernel_numpy": True,
        "kv_q8": True,
        "second_variable": Lines(_BLOCKS_PY, first="q, x_scale = quantize_activations(x)"),
    },
}
