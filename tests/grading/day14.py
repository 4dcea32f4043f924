"""Hidden cases of day 14."""

from __future__ import annotations

import math

import numpy as np

from course_lib.classroom.exercises import Case
from course_lib.classroom.hidden import Group, Hidden
from course_lib.classroom.sealed import Lines

NONE, NAN = -math.inf, math.nan

# 14-1: the merge


def _merged(o1, lse1, o2, lse2):
    """The definition, one row and one number at a time, in Python floats."""
    outs, lses = [], []
    for a, la, b, lb in zip(o1, lse1, o2, lse2, strict=True):
        if la == NONE or lb == NONE:
            row = [0.0] * len(a) if la == lb else list(b if la == NONE else a)
            outs.append(row)
            lses.append(max(la, lb))
            continue
        w1, w2 = math.exp(la - max(la, lb)), math.exp(lb - max(la, lb))
        outs.append([(w1 * x + w2 * y) / (w1 + w2) for x, y in zip(a, b, strict=True)])
        lses.append(max(la, lb) + math.log(w1 + w2))
    return np.array(outs, np.float64).reshape(np.shape(o1)), np.array(lses)


def _merge_case(name, *parts) -> Case:
    args = tuple(np.array(part, np.float64) for part in parts)
    # float64 on both sides: a few roundings of numbers up to 1000
    return Case(name, args, expect=_merged(*args), rtol=1e-9, atol=1e-9, dtype=True)


def _random_case(name, rows, d, low, high, seed) -> Case:
    rng = np.random.default_rng(seed)
    return _merge_case(name, rng.normal(size=(rows, d)), rng.uniform(low, high, rows),
                       rng.normal(size=(rows, d)), rng.uniform(low, high, rows))


def _merge_groups() -> list[Group]:
    return [
        Group("two parts", 1, "The weights are e^(LSE - M), the outputs' weighted mean is divided "
              "by the sum of the weights, and M comes back into the merged LSE.",
              [_random_case(f"seed {s}", 7, 5, -3, 8, s) for s in range(3)]),
        Group("large and far apart", 1, "Subtract the larger LSE of each row before taking e: with "
              "one M for all rows, or with none, something overflows or vanishes.",
              [_random_case("around 1000", 6, 3, 995, 1005, 5),
               _random_case("around -1000", 6, 3, -1005, -995, 6),
               _random_case("-1000 to 1000", 40, 2, -1000, 1000, 7),
               _merge_case("a faint part of large numbers", [[1.0], [-1e15]], [25.0, -4.0],
                           [[1e12], [3.0]], [0.0, 29.0])]),
        Group("one part empty", 1, "Where one part has no tokens, the other is the result, "
              "unchanged, whatever stands in the empty part's output.",
              [_merge_case("NaN beside", [[NAN, 1.0], [2.0, 3.0]], [NONE, 0.5],
                           [[4.0, 5.0], [NAN, NAN]], [700.0, NONE]),
               _merge_case("infinity beside", [[math.inf]], [NONE], [[-2.5]], [-900.0]),
               _merge_case("beside a very small sum", [[NAN], [8.0]], [NONE, -2e4],
                           [[-2.5], [4.0]], [-2e4, -2e4])]),
        Group("both parts empty", 1, "A row that nobody saw is zeros and -inf, and it must not "
              "spoil the rows beside it.",
              [_merge_case("among others", [[NAN], [1.0], [9.0]], [NONE, 2.0, NONE],
                           [[NAN], [3.0], [6.0]], [NONE, 2.0, 1.0]),
               _merge_case("all rows", [[1.0], [2.0]], [NONE, NONE], [[3.0], [4.0]],
                           [NONE, NONE])]),
        Group("no row", 1, "No query at all is a case too: empty arrays of the same shape.",
              [_merge_case("zero rows", np.zeros((0, 4)), np.zeros(0), np.zeros((0, 4)),
                           np.zeros(0))]),
    ]


def _merge_by_logaddexp(o1, lse1, o2, lse2):
    o1, o2 = (np.where((lse > NONE)[:, None], o, 0.0) for o, lse in ((o1, lse1), (o2, lse2)))
    lse = np.logaddexp(lse1, lse2)
    base = np.where(lse > NONE, lse, 0.0)[:, None]
    return np.exp(lse1[:, None] - base) * o1 + np.exp(lse2[:, None] - base) * o2, lse


def _guarded(merge):
    """A mistake with the empty rows set right, so that only the mistake is caught."""
    def run(o1, lse1, o2, lse2):
        out, lse = _merged(o1, lse1, o2, lse2)
        both = (lse1 > NONE) & (lse2 > NONE)
        out[both], lse[both] = merge(o1[both], lse1[both], o2[both], lse2[both])
        return out, lse
    return run


@_guarded
def _no_maximum(o1, lse1, o2, lse2):
    w1, w2 = np.exp(lse1), np.exp(lse2)
    return (w1[:, None] * o1 + w2[:, None] * o2) / (w1 + w2)[:, None], np.log(w1 + w2)


@_guarded
def _one_maximum_for_all(o1, lse1, o2, lse2):
    largest = max([*lse1, *lse2, -1e9])
    w1, w2 = np.exp(lse1 - largest), np.exp(lse2 - largest)
    total = np.where(w1 + w2 > 0, w1 + w2, 1.0)
    return (w1[:, None] * o1 + w2[:, None] * o2) / total[:, None], largest + np.log(total)


@_guarded
def _plain_mean(o1, lse1, o2, lse2):
    return (o1 + o2) / 2, np.logaddexp(lse1, lse2)


@_guarded
def _weighs_by_the_logarithm(o1, lse1, o2, lse2):
    w = np.stack([lse1, lse2])
    total = np.where(w.sum(axis=0) == 0, 1.0, w.sum(axis=0))
    return (w[0][:, None] * o1 + w[1][:, None] * o2) / total[:, None], np.logaddexp(lse1, lse2)


@_guarded
def _forgets_to_divide(o1, lse1, o2, lse2):
    largest = np.maximum(lse1, lse2)
    w1, w2 = np.exp(lse1 - largest), np.exp(lse2 - largest)
    return w1[:, None] * o1 + w2[:, None] * o2, largest + np.log(w1 + w2)


@_guarded
def _forgets_the_maximum_in_the_lse(o1, lse1, o2, lse2):
    largest = np.maximum(lse1, lse2)
    out, _ = _merged(o1, lse1, o2, lse2)
    return out, np.log(np.exp(lse1 - largest) + np.exp(lse2 - largest))


@_guarded
def _larger_lse_is_the_result(o1, lse1, o2, lse2):
    return _merged(o1, lse1, o2, lse2)[0], np.maximum(lse1, lse2)


@_guarded
def _base_two(o1, lse1, o2, lse2):
    w = 2.0 ** np.clip(lse1 - lse2, -1000, 1000)
    return (w[:, None] * o1 + o2) / (w + 1)[:, None], lse2 + np.log2(1 + w)


def _empty_rows_unguarded(o1, lse1, o2, lse2):
    with np.errstate(invalid="ignore"):
        largest = np.maximum(lse1, lse2)
        w1, w2 = np.exp(lse1 - largest), np.exp(lse2 - largest)
        return ((w1[:, None] * o1 + w2[:, None] * o2) / (w1 + w2)[:, None],
                largest + np.log(w1 + w2))


def _zero_times_nan_leaks(o1, lse1, o2, lse2):
    largest = np.maximum(lse1, lse2)
    largest = np.where(largest > NONE, largest, 0.0)
    w1, w2 = np.exp(lse1 - largest), np.exp(lse2 - largest)
    total = np.where(w1 + w2 > 0, w1 + w2, 1.0)
    out = (w1[:, None] * o1 + w2[:, None] * o2) / total[:, None]
    empty = (lse1 == NONE) & (lse2 == NONE)
    out[empty] = 0.0
    return out, np.where(empty, NONE, largest + np.log(total))


def _empty_is_minus_1e30(o1, lse1, o2, lse2):
    out, lse = _merged(o1, lse1, o2, lse2)
    return out, np.maximum(lse, -1e30)


def _empty_is_a_small_number(o1, lse1, o2, lse2):
    least = [np.maximum(lse, -1e4) for lse in (lse1, lse2)]
    outs = [np.where((lse > NONE)[:, None], o, 0.0)
            for o, lse in ((o1, lse1), (o2, lse2))]
    out, lse = _merged(outs[0], least[0], outs[1], least[1])
    return out, np.where((lse1 == NONE) & (lse2 == NONE), NONE, lse)


def _drops_a_faint_part(o1, lse1, o2, lse2):
    return _merged(o1, np.where(lse1 < lse2 - 20, NONE, lse1),
                   o2, np.where(lse2 < lse1 - 20, NONE, lse2))


def _merges_in_place(o1, lse1, o2, lse2):
    out, lse = _merged(o1, lse1, o2, lse2)
    o1[...], lse1[...] = out, lse
    return o1, lse1


def _drops_the_row_of_one_empty_part(o1, lse1, o2, lse2):
    out, lse = _merged(o1, lse1, o2, lse2)
    one = (lse1 == NONE) ^ (lse2 == NONE)
    return np.where(one[:, None], 0.0, out), np.where(one, NONE, lse)


# 14-2: the plan of a ring


def _simulated(loads, computes, slots):
    """The definition, event by event: every slot has a state, both workers act when they may."""
    if slots < 1 or len(loads) != len(computes):
        raise ValueError("slots, or two lengths")
    n = len(loads)
    free_from = [0] * slots
    plan = [[i % slots, None, None, None, None] for i in range(n)]
    reader_free, loaded, computer_free, computed = 0, 0, 0, 0
    while computed < n:
        slot = loaded % slots
        if loaded < n and free_from[slot] is not None:
            start = max(reader_free, free_from[slot])
            plan[loaded][1:3] = start, start + loads[loaded]
            reader_free, free_from[slot] = start + loads[loaded], None
            loaded += 1
            continue
        block = plan[computed]
        begin = max(block[2], computer_free)
        block[3:] = begin, begin + computes[computed]
        computer_free = free_from[block[0]] = begin + computes[computed]
        computed += 1
    return [tuple(block) for block in plan]


def _ring_case(name, loads, computes, slots) -> Case:
    return Case(name, (list(loads), list(computes), slots),
                expect=_simulated(list(loads), list(computes), slots))


def _random_ring(seed, n, slots) -> Case:
    rng = np.random.default_rng(seed)
    return _ring_case(f"seed {seed}, {slots} slots", rng.integers(0, 9, n).tolist(),
                      rng.integers(0, 9, n).tolist(), slots)


def _ring_groups() -> list[Group]:
    return [
        Group("equal blocks", 1, "With two slots the computer waits for the first block only, or "
              "the reader for a free slot.",
              [_ring_case("compute slower", [1] * 7, [4] * 7, 2),
               _ring_case("load slower", [5] * 7, [2] * 7, 2),
               _ring_case("alike", [3] * 6, [3] * 6, 3)]),
        Group("in turns", 1, "One slot is never loaded while it is computed on.",
              [_ring_case("one slot", [2, 3, 1, 4], [5, 1, 2, 2], 1),
               _ring_case("one slot, quick loads", [0, 0, 0], [1, 1, 1], 1)]),
        Group("uneven blocks", 2, "A load begins when the reader is done AND the slot's last block "
              "has been computed; a computation when its load AND the one before are over.",
              [_random_ring(seed, 15, slots) for seed, slots in
               ((1, 2), (2, 2), (3, 3), (4, 3), (5, 4), (6, 6))]
              + [_ring_case("halves and quarters", [0.5, 1.25, 0.25, 2.75, 0.5],
                            [1.5, 0.75, 0.25, 1.0, 2.5], 2)]),
        Group("slots", 1, "Block i uses slot i % slots, also when a lower slot is free earlier, "
              "and when there are more slots than blocks.",
              [_ring_case("more slots than blocks", [2, 2], [1, 1], 5),
               _ring_case("six slots", [1] * 9 + [8], [4] * 10, 6),
               _ring_case("quick computing", [4, 4, 4, 4, 4], [1, 1, 1, 1, 1], 3)]),
        Group("arguments", 1, "No slot, or lists of two lengths: raise ValueError. No block: an "
              "empty plan.",
              [Case("minus one slot", ([1], [1], -1), raises=ValueError),
               Case("a load is missing", ([1], [1, 1], 2), raises=ValueError),
               Case("no block, no slot", ([], [], 0), raises=ValueError),
               _ring_case("no block", [], [], 3)]),
    ]


def _ring_mutant(free=lambda plan, i, slots: plan[i - slots][4] if i >= slots else 0,
                 reader=lambda plan: plan[-1][2], computer=lambda plan: plan[-1][4],
                 slot=lambda plan, i, slots: i % slots, checks=True):
    def run(loads, computes, slots):
        if checks and (slots < 1 or len(loads) != len(computes)):
            raise ValueError("no")
        plan = []
        for i, (load, compute) in enumerate(zip(loads, computes, strict=checks)):
            start = max(reader(plan) if plan else 0, free(plan, i, slots))
            begin = max(start + load, computer(plan) if plan else 0)
            plan.append((slot(plan, i, slots), start, start + load, begin, begin + compute))
        return plan
    return run


def _lowest_free(plan, i, slots):
    start = max(plan[-1][2] if plan else 0, plan[i - slots][4] if i >= slots else 0)
    busy = {p[0] for p in plan if p[4] > start}
    return min(set(range(slots)) - busy, default=i % slots)


def _ring_by_end_times(loads, computes, slots):
    if slots < 1:
        raise ValueError("slots")
    if len(loads) != len(computes):
        raise ValueError("lengths")
    load_end, compute_end = [0] * slots, [0] * slots
    plan, reader, computer = [], 0, 0
    for i in range(len(loads)):
        s = i % slots
        start = reader if reader > compute_end[s] else compute_end[s]
        load_end[s] = reader = start + loads[i]
        begin = computer if computer > reader else reader
        compute_end[s] = computer = begin + computes[i]
        plan.append([s, start, load_end[s], begin, computer])
    return plan


def _four_slots_at_most(loads, computes, slots):
    plan = _ring_mutant()(loads, computes, min(slots, 4))
    return [(i % slots, *times) for i, (_, *times) in enumerate(plan)]


def _whole_units(loads, computes, slots):
    return _ring_mutant()([int(x) for x in loads], [int(x) for x in computes], slots)


def _in_rounds(plan, i, slots):
    """Loads slots blocks, and the next ones when all of them are computed."""
    return plan[i // slots * slots - 1][4] if i >= slots else 0


# 14-3: bytes


def _bytes_by_counting(estimate, rho, page_size=16, layers=1):
    """The definition: rows of K and V of one history, layer by layer."""
    if not 0 <= rho <= 1:
        raise ValueError("rho")
    tokens = page_size * 240
    rows = {"none": 0, "kv": 2 * tokens, "k": tokens, "pages": 2 * (tokens // page_size),
            "resident": 0}
    if estimate not in rows:
        raise ValueError("estimate")
    read = rows[estimate] + layers * 2 * tokens * rho
    return read / (layers * 2 * tokens)


def _bytes_case(name, *args, **kwargs) -> Case:
    return Case(name, args, kwargs, expect=_bytes_by_counting(*args, **kwargs), rtol=1e-9,
                atol=1e-12)


def _bytes_groups() -> list[Group]:
    return [
        Group("to choose and to attend", 1, "What is read to choose comes on top of what is read "
              "to attend.",
              [_bytes_case("published", "kv", 0.52), _bytes_case("K alone", "k", 0.25),
               _bytes_case("full", "none", 1.0), _bytes_case("in memory", "resident", 0.3),
               _bytes_case("nothing attended", "kv", 0.0)]),
        Group("pages", 1, "Two rows a page, of 2 · page_size rows of K and V.",
              [_bytes_case(f"pages of {p}", "pages", 0.4, p) for p in (1, 8, 32)]),
        Group("shared estimates", 1, "An estimate that several layers share is read once for all "
              "of them; what they attend is read by each.",
              [_bytes_case(f"{e} for {n} layers", e, 0.5, 16, n)
               for e, n in (("kv", 32), ("k", 4), ("pages", 2), ("none", 8))]
              + [_bytes_case("by name", "k", 0.5, layers=5)]),
        Group("arguments", 1, "An unknown estimate, and a rho below 0 or above 1, have no answer: "
              "raise ValueError.",
              [Case("unknown", ("keys", 0.5), raises=ValueError),
               Case("rho above 1", ("kv", 1.5), raises=ValueError),
               Case("rho below 0", ("none", -0.1), raises=ValueError)]),
    ]


def _bytes_mutant(kappa=None, combine=lambda kappa, rho, layers: kappa / layers + rho,
                  checks=("estimate", "rho")):
    shares = {"none": lambda p: 0.0, "kv": lambda p: 1.0, "k": lambda p: 0.5,
              "pages": lambda p: 1 / p, "resident": lambda p: 0.0, **(kappa or {})}

    def run(estimate, rho, page_size=16, layers=1):
        if ("estimate" in checks and estimate not in shares) or \
                ("rho" in checks and not 0 <= rho <= 1):
            raise ValueError("no")
        return combine(shares.get(estimate, shares["none"])(page_size), rho, layers)
    return run


HIDDEN = [
    Hidden("d14.a1", groups=_merge_groups, alternative=_merge_by_logaddexp, mutants={
        "no maximum subtracted": _no_maximum,
        "one maximum for all rows": _one_maximum_for_all,
        "plain mean": _plain_mean,
        "weights are the LSEs": _weighs_by_the_logarithm,
        "not divided": _forgets_to_divide,
        "M missing in the LSE": _forgets_the_maximum_in_the_lse,
        "LSE is the larger one": _larger_lse_is_the_result,
        "base 2": _base_two,
        "empty rows not handled": _empty_rows_unguarded,
        "0 times NaN": _zero_times_nan_leaks,
        "empty is -1e30": _empty_is_minus_1e30,
        "empty is -10000": _empty_is_a_small_number,
        "drops a faint part": _drops_a_faint_part,
        "changes its input": _merges_in_place,
        "one empty part empties both": _drops_the_row_of_one_empty_part,
    }),
    Hidden("d14.a2", groups=_ring_groups, alternative=_ring_by_end_times, mutants={
        "overwrites a slot in use": _ring_mutant(free=lambda plan, i, slots: 0),
        "frees when computing begins": _ring_mutant(
            free=lambda plan, i, slots: plan[i - slots][3] if i >= slots else 0),
        "frees when loaded": _ring_mutant(
            free=lambda plan, i, slots: plan[i - slots][2] if i >= slots else 0),
        "one slot too few": _ring_mutant(
            free=lambda plan, i, slots: plan[i - slots + 1][4] if i >= max(slots, 2) else 0),
        "one slot too many": _ring_mutant(
            free=lambda plan, i, slots: plan[i - slots - 1][4] if i > slots else 0),
        "many readers": _ring_mutant(reader=lambda plan: 0),
        "many computers": _ring_mutant(computer=lambda plan: 0),
        "the reader waits for the computer": _ring_mutant(reader=lambda plan: plan[-1][4]),
        "lowest free slot": _ring_mutant(slot=_lowest_free),
        "at most four slots": _four_slots_at_most,
        "whole units only": _whole_units,
        "all slots together": _ring_mutant(free=_in_rounds),
        "always slot 0": _ring_mutant(slot=lambda plan, i, slots: 0),
        "no checks": _ring_mutant(checks=False, slot=lambda plan, i, slots: i % max(slots, 1)),
    }),
    Hidden("d14.a3", groups=_bytes_groups, alternative=_bytes_by_counting, mutants={
        "the larger of the two": _bytes_mutant(
            combine=lambda kappa, rho, layers: max(kappa / layers, rho)),
        "only the rest is attended": _bytes_mutant(
            combine=lambda kappa, rho, layers: kappa / layers + rho * (1 - kappa)),
        "estimate forgotten": _bytes_mutant(combine=lambda kappa, rho, layers: rho),
        "K counts as all": _bytes_mutant(kappa={"k": lambda p: 1.0}),
        "one row a page": _bytes_mutant(kappa={"pages": lambda p: 0.5 / p}),
        "pages against K alone": _bytes_mutant(kappa={"pages": lambda p: 2 / p}),
        "pages are always 16": _bytes_mutant(kappa={"pages": lambda p: 1 / 16}),
        "rho shared too": _bytes_mutant(combine=lambda kappa, rho, layers: (kappa + rho) / layers),
        "layers ignored": _bytes_mutant(combine=lambda kappa, rho, layers: kappa + rho),
        "any estimate": _bytes_mutant(checks=("rho",)),
        "any rho": _bytes_mutant(checks=("estimate",)),
    }),
]

LSE, CHUNKED = "course_lib/prefill/lse.py", "course_lib/prefill/chunked.py"
RING, DENSITY = "course_lib/prefill/ring.py", "course_lib/prefill/density.py"

READINGS = {
    "d14.b1": {
        "flags": Lines(LSE, first="fresh, absent = lse == -np.inf", symbol="merge_into"),
        "cases": Lines(LSE, first="out[...] = np.where(both", symbol="merge_into"),
        "no_nan_warning": Lines(LSE, first='with np.errstate(invalid="ignore"):  # -inf',
                                symbol="merge_into"),
        "blind_rows": [Lines(LSE, first="seeing = np.flatnonzero(visible)", symbol="_attend_tile"),
                       Lines(LSE, first="if not len(seeing):", symbol="_attend_tile")],
        "itself_last": Lines(CHUNKED, first="attend_part(q, own, np.arange(1",
                             symbol="ChunkedPrefill._attend"),
        "exp_of_minus_inf": 0,
    },
    "d14.b2": {
        "frees": Lines(RING, first="self._free.put(slot)  # only now", symbol="Ring.stream"),
        "takes": Lines(RING, first="slot = self._free.get()", symbol="Ring._read"),
        "announces": Lines(RING, first="self._ready.put(_Ready(slot, tokens))",
                           symbol="Ring._read"),
        "waits": [Lines(RING, first="ready = self._take()", symbol="Ring._wait"),
                  Lines(RING, first="return self._behind.pop()", symbol="Ring._take"),
                  Lines(RING, first="ready = self._wait()", symbol="Ring.stream")],
        "after_stop": Lines(RING, first="while not ended", last="self._free.put(left.slot)",
                            symbol="Ring.stream"),
        "ahead_1": 0,
        "ahead_4": 3,
        "wrong_answer": "numbers",
    },
    "d14.b3": {
        "layer0": Lines(DENSITY, first="if chunk.layer == 0 and chunk.available",
                        symbol="DensityStats.record"),
        "document": Lines(DENSITY, first='"overall_density": _share('),
        "bytes": Lines(DENSITY, first='"bytes_density": _share('),
        "any_head": Lines(CHUNKED, first="selected=int(reads.any(axis=1)",
                          symbol="ChunkedPrefill._attend"),
        "itself": Lines(CHUNKED, first="applied=cells + causal", symbol="ChunkedPrefill._attend"),
        "estimate_counted": False,
        "itself_counted": False,
        "published_bytes": 1.52,
    },
}
