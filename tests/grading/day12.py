"""Hidden cases of day 12."""

from __future__ import annotations

import numpy as np

from course_lib.classroom.exercises import Case
from course_lib.classroom.exercises.day12 import extra_case
from course_lib.classroom.hidden import Group, Hidden
from course_lib.classroom.sealed import Lines

# 12-1: antidiagonal scores. Whole numbers, so that every order of additions gives the same.


def _pairs(q, k, stride):
    """The definition: one product after the other."""
    heads, group = len(q), len(q) // len(k)
    m_squares, n_squares = -(-q.shape[1] // stride), -(-k.shape[1] // stride)
    out = np.zeros((heads, m_squares, n_squares), np.float32)
    for h in range(heads):
        for m in range(m_squares):
            for n in range(n_squares):
                for i in range(stride):
                    query, key = m * stride + stride - 1 - i, n * stride + i
                    if query < q.shape[1] and key < k.shape[1]:
                        out[h, m, n] += np.dot(q[h, query], k[h // group, key])
    return out


def _whole(seed, heads, kv_heads, queries, keys, d):
    rng = np.random.default_rng(seed)
    return (rng.integers(-4, 5, (heads, queries, d)).astype(np.float32),
            rng.integers(-4, 5, (kv_heads, keys, d)).astype(np.float32))


def _score_case(name, seed, heads, kv_heads, queries, keys, d, stride) -> Case:
    q, k = _whole(seed, heads, kv_heads, queries, keys, d)
    return Case(name, (q, k, stride), expect=_pairs(q, k, stride), dtype=True)


def _quarters() -> Case:
    """Scores that are no whole numbers, exact in float32 in every order."""
    q, k = _whole(12, 2, 1, 8, 8, 3)
    return Case("quarters", (q / 4, k, 4), expect=_pairs(q / 4, k, 4), dtype=True)


def _antidiagonal_groups() -> list[Group]:
    return [
        Group("pairs", 2, "In a square the query at offset S-1-i meets the key at offset i: "
              "reverse inside each square, nothing else.",
              [_score_case("one head", 1, 1, 1, 16, 24, 4, 4),
               _score_case("stride 8", 2, 1, 1, 32, 16, 3, 8),
               _score_case("stride 2", 3, 1, 1, 8, 8, 5, 2)]),
        Group("KV heads", 2, "Query head h reads KV head h * Hkv // H: neighbours share.",
              [_score_case("4 over 2", 4, 4, 2, 16, 16, 3, 4),
               _score_case("6 over 3", 5, 6, 3, 8, 8, 2, 4),
               _score_case("as many KV heads", 6, 3, 3, 8, 12, 2, 4)]),
        Group("lengths", 1, "Lengths are rounded up; rows beyond the end are zeros, none is "
              "cut off.",
              [_score_case("queries", 7, 2, 1, 13, 16, 3, 4),
               _score_case("keys", 8, 2, 1, 16, 9, 3, 4),
               _score_case("shorter than a square", 9, 1, 1, 3, 2, 4, 8)]),
        Group("plain numbers", 1, "Float32, not scaled, and your arguments unchanged.",
              [_score_case("one channel", 10, 1, 1, 8, 8, 1, 8),
               _score_case("many channels", 11, 2, 2, 8, 8, 64, 4), _quarters()]),
    ]


def _squares(x, stride):
    x = np.pad(x, ((0, 0), (0, -x.shape[1] % stride), (0, 0)))
    return x.reshape(len(x), -1, stride, x.shape[2])


def _joined(q, k, heads=None):
    if heads is None:
        heads = np.arange(len(q)) * len(k) // len(q)
    q, k = (x.reshape(*x.shape[:2], -1) for x in (q, k[heads]))
    return (q @ k.swapaxes(1, 2)).astype(np.float32)


def _same_offset(q, k, stride):
    return _joined(_squares(q, stride), _squares(k, stride))


def _reverses_everything(q, k, stride):
    squares = _squares(q, stride)
    return _joined(squares[:, ::-1, ::-1], _squares(k, stride))


def _reverses_channels_too(q, k, stride):
    return _joined(_squares(q, stride)[:, :, ::-1, ::-1], _squares(k, stride))


def _heads_in_turn(q, k, stride):
    heads = np.arange(len(q)) % len(k)
    return _joined(_squares(q, stride)[:, :, ::-1], _squares(k, stride), heads)


def _cuts_the_end_off(q, k, stride):
    if min(q.shape[1], k.shape[1]) < stride:
        return _pairs(q, k, stride)
    q, k = (x[:, : x.shape[1] // stride * stride] for x in (q, k))
    return _joined(_squares(q, stride)[:, :, ::-1], _squares(k, stride))


def _pads_in_front(q, k, stride):
    q, k = (np.pad(x, ((0, 0), (-x.shape[1] % stride, 0), (0, 0))) for x in (q, k))
    return _joined(_squares(q, stride)[:, :, ::-1], _squares(k, stride))


def _scaled(q, k, stride):
    return _pairs(q, k, stride) / np.float32(np.sqrt(q.shape[2]))


def _in_float64(q, k, stride):
    return _pairs(q, k, stride).astype(np.float64)


def _reverses_in_place(q, k, stride):
    out = _pairs(q, k, stride)
    q[:] = q[:, ::-1].copy()
    return out


def _whole_numbers_only(q, k, stride):
    return _pairs(q.astype(int), k.astype(int), stride)


def _reversed_keys(q, k, stride):
    """The same pairs, counted from the other end; einsum instead of long rows."""
    q, k = _squares(q, stride), _squares(k, stride)[:, :, ::-1]
    k = np.repeat(k, len(q) // len(k), axis=0)
    return np.einsum("hmid,hnid->hmn", q, k).astype(np.float32)


# 12-2: the threshold


def _kept(sums, first, threshold, *, before_counts=lambda before, need: before < need,
          ties=1, forced_first=True, forced=("sink", "diagonal"), one=True, future=False,
          need_of=None):
    """The definition, one block after the other; the options are the mistakes of the mutants."""
    if not 0 < threshold <= 1:
        raise ValueError("threshold")
    sums = np.asarray(sums)
    mask = np.zeros(sums.shape, bool)
    for r in range(len(sums)):
        diagonal = first + r
        seen = list(range(sums.shape[1] if future else diagonal + 1))
        mass = {b: float(sums[r, b]) for b in seen}
        must = {0} if "sink" in forced else set()
        must |= {diagonal} if "diagonal" in forced else set()
        order = sorted(seen, key=lambda b: ((b not in must) if forced_first else 0, -mass[b],
                                            ties * b))
        total = 0.0
        for b in order:
            total += mass[b]
        need = threshold * total if need_of is None else need_of(threshold, total)
        before = 0.0
        for b in order:
            if b in must or (one and threshold == 1) or before_counts(before, need):
                mask[r, b] = True
            before += mass[b]
        mask[r, diagonal + 1 :] = False
    return mask


def _keep_case(name, sums, first, threshold) -> Case:
    sums = np.array(sums, np.float32)
    return Case(name, (sums, first, threshold), expect=_kept(sums, first, threshold))


def _masses(seed, rows, first, high=9, future=False):
    """Whole numbers: no sum is rounded."""
    sums = np.random.default_rng(seed).integers(0, high, (rows, first + rows)).astype(np.float32)
    return sums if future else np.tril(sums, first)


def _keep_groups() -> list[Group]:
    return [
        Group("prefix", 2, "Largest first, and a block is kept while the mass before it is below "
              "threshold times the row's sum, added up in float64.",
              [_keep_case(f"τ = {t}", _masses(i, 12, 0, 1000), 0, t)
               for i, t in enumerate((0.1, 0.3, 0.55, 0.8, 0.93))]
              + [_keep_case("rows in the middle", _masses(9, 5, 11, 1000), 11, 0.7),
                 # in float32, 2 ** 24 and a few ones add up to 2 ** 24
                 _keep_case("a very heavy sink", [[2**24, 1, 1, 1, 1]], 4,
                            (2**24 + 1.5) / (2**24 + 4))]),
        Group("strict", 1, "Where the mass before equals need exactly, the share is reached: the "
              "block is not kept.",
              [_keep_case("a half", [[4, 2, 2, 4]], 3, 0.5 + 2 / 12),
               _keep_case("three quarters", [[8, 4, 4]], 2, 0.75),
               _keep_case("forced blocks reach it", [[4, 8, 4]], 2, 0.5)]),
        Group("sink and diagonal", 1, "Sink and diagonal are kept first, and their mass counts "
              "toward need.",
              [_keep_case("light ones", [[1, 9, 8, 7, 1]], 4, 0.3),
               _keep_case("heavy ones", [[50, 9, 8, 7, 60]], 4, 0.8),
               _keep_case("row 0", _masses(3, 4, 0), 0, 0.5)]),
        Group("ties", 1, "Equal masses go to the lower block.",
              [_keep_case(f"τ = {t}", np.tri(9, dtype=np.float32), 0, t) for t in (0.4, 0.7)]
              + [_keep_case("from few values", _masses(4, 9, 3, 3), 3, 0.6)]),
        Group("ends", 1, "A row of zeros keeps sink and diagonal; threshold 1 keeps everything "
              "visible; a threshold outside (0, 1] is refused.",
              [_keep_case("zeros", np.zeros((3, 6)), 3, 0.9),
               _keep_case("τ = 1 with zeros", [[3, 0, 0, 2, 0]], 4, 1.0),
               _keep_case("τ = 1, rows of zeros", np.zeros((2, 4)), 2, 1.0),
               _keep_case("nearly 1", [[3, 0, 0, 2, 0]], 4, 0.9999),
               Case("below 0", (np.ones((1, 2), np.float32), 1, -0.5), raises=ValueError),
               Case("0", (np.ones((1, 2), np.float32), 1, 0.0), raises=ValueError),
               Case("above 1", (np.ones((1, 2), np.float32), 1, 1.5), raises=ValueError)]),
        Group("future", 1, "What stands behind the diagonal is neither kept nor counted.",
              [_keep_case(f"τ = {t}", _masses(6, 6, 2, 50, future=True), 2, t)
               for t in (0.4, 0.8, 1.0)]),
    ]


def _mutant(**changes):
    return lambda sums, first, threshold: _kept(sums, first, threshold, **changes)


def _accepts_all_thresholds(sums, first, threshold):
    return _kept(sums, first, min(max(threshold, 1e-9), 1))


def _accepts_below_0(sums, first, threshold):
    return _kept(sums, first, threshold if threshold >= 0 else 1e-9)


def _nearly_1_is_1(sums, first, threshold):
    return _kept(sums, first, 1.0 if abs(threshold - 1) < 1e-3 else threshold)


def _in_float32(sums, first, threshold):
    if not 0 < threshold <= 1:
        raise ValueError("threshold")
    mask = np.zeros(sums.shape, bool)
    for r, row in enumerate(sums):
        seen = range(first + r + 1)
        need, before = np.float32(threshold) * row[: first + r + 1].sum(), np.float32(0)
        for b in sorted(seen, key=lambda b, row=row, d=first + r: (b not in (0, d), -row[b], b)):
            mask[r, b] = b in (0, first + r) or threshold == 1 or before < need
            before += row[b]
    return mask


def _one_too_many(sums, first, threshold):
    """Upstream's list with two places, for one forced block."""
    mask = _kept(sums, first, threshold)
    for r in range(len(mask)):
        left = [b for b in range(first + r + 1) if not mask[r, b]]
        if left and sums[r].any() and first == 0 and r:
            mask[r, max(left, key=lambda b: (sums[r, b], -b))] = True
    return mask


def _clears_the_future_in_place(sums, first, threshold):
    mask = _kept(sums, first, threshold)
    sums[:] = np.tril(sums, first)
    return mask


def _by_cumsum(sums, first, threshold):
    if not 0 < threshold <= 1:
        raise ValueError("threshold")
    rows, blocks = sums.shape
    mask = np.zeros((rows, blocks), bool)
    for r in range(rows):
        d = first + r
        mass = np.asarray(sums[r, : d + 1], np.float64)
        forced = np.isin(np.arange(d + 1), (0, d))
        order = np.lexsort((np.arange(d + 1), -mass, ~forced))
        before = np.concatenate(([0.0], np.cumsum(mass[order])[:-1]))
        keep = before < threshold * mass[order].sum()
        mask[r, order[keep]] = True
        mask[r, [0, d]] = True
        mask[r, : d + 1] |= threshold == 1
    return mask


# 12-3: masses for which upstream keeps a block more


def _extra_groups() -> list[Group]:
    return [
        Group("in general", 2, "The accident needs one forced block, so rows from 2 on of a first "
              "chunk, and a diagonal that reaches need alone.",
              [extra_case(f"{rows} rows, τ = {t}", rows, 0, t)
               for rows, t in ((4, 0.5), (7, 0.7), (20, 0.6))]),
        Group("high and low thresholds", 1, "The closer to 1 the threshold is, the heavier the "
              "diagonal must be.",
              [extra_case("τ = 0.999", 5, 0, 0.999), extra_case("τ = 0.01", 5, 0, 0.01),
               extra_case("3 rows, τ = 0.9999", 3, 0, 0.9999)]),
        Group("smallest", 1, "Three rows are enough: row 2 has a block beside sink and diagonal.",
              [extra_case("3 rows", 3, 0, 0.5), extra_case("3 rows, τ = 0.95", 3, 0, 0.95)]),
        Group("none", 2, "A later chunk has both forced blocks; one or two rows have nothing "
              "beside them; threshold 1 keeps all.",
              [Case("a later chunk", (6, 3, 0.5), expect=None),
               Case("one row", (1, 0, 0.5), expect=None), Case("τ = 1", (6, 0, 1.0), expect=None),
               Case("two rows", (2, 0, 0.3), expect=None),
               Case("one row later", (1, 5, 0.9), expect=None)]),
    ]


def _built(rows, first=0, diagonal=1e6, second=2.0):
    masses = np.tri(rows, first + rows, first, dtype=np.float32)
    masses[2:, 1] = second
    masses[np.arange(rows), first + np.arange(rows)] = diagonal
    return masses[None]


def _no_masses(rows, first, threshold):
    return first > 0 or rows < 3 or threshold == 1


def _diagonal_of_20(rows, first, threshold):
    return None if _no_masses(rows, first, threshold) else _built(rows, diagonal=8.0)


def _diagonal_of_10_000(rows, first, threshold):
    return None if _no_masses(rows, first, threshold) else _built(rows, diagonal=1e4)


def _in_every_chunk(rows, first, threshold):
    return None if rows < 3 or threshold == 1 else _built(rows, first)


def _at_every_threshold(rows, first, threshold):
    return None if first > 0 or rows < 3 else _built(rows)


def _two_rows_are_enough(rows, first, threshold):
    return None if first > 0 or rows < 2 or threshold == 1 else _built(rows)


def _needs_four_rows(rows, first, threshold):
    return None if first > 0 or rows < 4 or threshold == 1 else _built(rows)


def _always_six_rows(rows, first, threshold):
    return None if _no_masses(rows, first, threshold) else _built(6)


def _fills_the_future(rows, first, threshold):
    return None if _no_masses(rows, first, threshold) else np.maximum(_built(rows), 1)


def _never(rows, first, threshold):
    return None


def _last_row_only(rows, first, threshold):
    if first or rows <= 2 or threshold >= 1:
        return None
    masses = np.tril(np.full((rows, rows), 0.5, np.float32))
    masses[rows - 1, rows - 2] = 1
    masses[rows - 1, rows - 1] = 2 * rows / (1 - threshold)
    return masses[None]


HIDDEN = [
    Hidden("d12.a1", groups=_antidiagonal_groups, alternative=_reversed_keys, mutants={
        "same offset, no reversal": _same_offset,
        "reverses the whole sequence": _reverses_everything,
        "reverses the channels too": _reverses_channels_too,
        "KV heads in turn": _heads_in_turn,
        "cuts the end off": _cuts_the_end_off,
        "pads in front": _pads_in_front,
        "scaled": _scaled,
        "float64": _in_float64,
        "changes its argument": _reverses_in_place,
        "whole numbers only": _whole_numbers_only,
    }),
    Hidden("d12.a2", groups=_keep_groups, alternative=_by_cumsum, mutants={
        "at most, not less than": _mutant(before_counts=lambda before, need: before <= need),
        "ties to the higher block": _mutant(ties=-1),
        "forced blocks do not come first": _mutant(forced_first=False),
        "no sink": _mutant(forced=("diagonal",)),
        "no diagonal": _mutant(forced=("sink",)),
        "threshold 1 is like any other": _mutant(one=False),
        "counts the future": _mutant(future=True),
        "need is the threshold itself": _mutant(need_of=lambda threshold, total: threshold),
        "accepts every threshold": _accepts_all_thresholds,
        "accepts a threshold below 0": _accepts_below_0,
        "nearly 1 is 1": _nearly_1_is_1,
        "adds up in float32": _in_float32,
        "upstream's extra block": _one_too_many,
        "changes its argument": _clears_the_future_in_place,
    }),
    Hidden("d12.a3", groups=_extra_groups, alternative=_last_row_only, mutants={
        "a diagonal for middling thresholds": _diagonal_of_20,
        "one diagonal for every threshold": _diagonal_of_10_000,
        "later chunks too": _in_every_chunk,
        "threshold 1 too": _at_every_threshold,
        "two rows too": _two_rows_are_enough,
        "not for three rows": _needs_four_rows,
        "always six rows": _always_six_rows,
        "fills the future": _fills_the_future,
        "there is never one": _never,
    }),
]

SCORES, FIND = "course_lib/prefill/scores.py", "course_lib/prefill/find_blocks.py"
XATTN = "course_lib/prefill/xattn.py"

READINGS = {
    "d12.b1": {
        "reversal": Lines(SCORES, first="[:, :, ::-1]", symbol="_antidiagonal_scores"),
        "group": Lines(SCORES, first="long_q = reversed_q.reshape", symbol="_antidiagonal_scores"),
        "rows_beyond": Lines(SCORES, first="q, k = padded(q, -q.shape[1] % stride)",
                             symbol="flat_group_gemm_fuse_reshape"),
        "pairs": 8,
        "other_scores": False,
        "offset_of_5": 2,
    },
    "d12.b2": {
        "strict": Lines(FIND, first="before < need", symbol="threshold_blocks"),
        "ties": Lines(FIND, first="order = np.argsort(-mass", symbol="descending"),
        "tau_one": Lines(FIND, first="(share == 1)", symbol="threshold_blocks"),
        "visible_only": Lines(FIND, first="mass = np.where(visible, sums, 0.0)",
                              symbol="threshold_blocks"),
        "padding_rows": Lines(SCORES, first="shares[:, :first] = shares[:, last:] = 0.0",
                              symbol="softmax_fuse_block_sum"),
        "if_at_most": 5,
    },
    "d12.b3": {
        "future": Lines(XATTN, first="mask &= column <= row + first_block", symbol="_upstream"),
        "two_places": Lines(FIND, first="before = np.concatenate([np.zeros_like(kept)",
                            symbol="_upstream"),
        "index_0": Lines(FIND, first="chosen = np.where(", symbol="_upstream"),
        "extra_rows": 8,
        "none_at": 2,
    },
}
