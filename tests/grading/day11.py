"""Hidden cases of day 11."""

from __future__ import annotations

import numpy as np

from course_lib.classroom.exercises import Case
from course_lib.classroom.hidden import Group, Hidden
from course_lib.classroom.sealed import Lines
from course_lib.lab.intervals import wilson

# 11-1: the critical k


def _records(counts, seed=0) -> list[dict]:
    """Shuffled records from {k: (hits, trials)}."""
    rows = [{"k": k, "recalled": bool(i < hits), "index": i}
            for k, (hits, trials) in counts.items() for i in range(trials)]
    np.random.default_rng(seed).shuffle(rows)
    return rows


def _critical(records, floor=0.9, z=1.96, *, passes=None, from_above=True, exact_counts=False,
              strictly=False, last=False):
    """The definition; the options are the mistakes of the mutants."""
    ks = sorted({r["k"] for r in records if r["k"] != "exact"})
    if not ks:
        raise ValueError("no k")

    def good(k):
        rows = [r["recalled"] for r in records
                if r["k"] == k or (exact_counts and r["k"] == "exact")]
        low = (passes or (lambda hits, n: wilson(hits, n, z)[0]))(sum(rows), len(rows))
        return low > floor if strictly else low >= floor

    if not from_above:
        return next((k for k in ks if good(k)), None)
    found = [k for i, k in enumerate(ks) if all(good(other) for other in ks[i:])]
    return (max(found) if last else min(found)) if found else None


def _k_case(name, counts, *args, seed=0) -> Case:
    records = _records(counts, seed)
    return Case(name, (records, *args), expect=_critical(records, *args))


def _critical_groups() -> list[Group]:
    cliff = {"exact": (200, 200), 32: (198, 200), 16: (196, 200), 8: (195, 200), 4: (188, 200),
             2: (4, 200), 1: (0, 200)}
    return [
        Group("interval", 2, "A share is not enough: the lower end of Wilson's interval has to "
              "reach the floor.",
              [_k_case("sweep", cliff), _k_case("few prompts", {8: (30, 30), 4: (29, 30)}),
               _k_case("sixty", {8: (60, 60), 4: (59, 60), 2: (56, 60)}),
               _k_case("all right, few", {4: (34, 34), 2: (35, 35), 1: (34, 34)}),
               _k_case("many", {4: (2000, 2000), 2: (1830, 2000), 1: (1815, 2000)})]),
        Group("every larger k", 2, "A k is critical only if every larger k passes too, whatever "
              "the smaller ones do.",
              [_k_case("hole", {32: (100, 100), 16: (70, 100), 8: (100, 100), 4: (100, 100)}),
               _k_case("largest fails", {32: (50, 100), 8: (100, 100)}),
               _k_case("no powers of two", {48: (90, 90), 12: (90, 90), 7: (90, 90),
                                            5: (10, 90), 3: (90, 90)}),
               _k_case("two holes", {64: (100, 100), 32: (100, 100), 16: (1, 100), 8: (100, 100),
                                     4: (2, 100), 2: (100, 100)}, 0.8)]),
        Group("arguments", 1, "floor and z are arguments, and trials differ from k to k.",
              [_k_case("floor", cliff, 0.8), _k_case("z", {8: (40, 40), 4: (38, 40)}, 0.9, 1.0),
               _k_case("strict z", {8: (60, 60), 4: (60, 60)}, 0.9, 3.0),
               _k_case("floor 0", {4: (0, 5), 1: (0, 3)}, 0.0),
               _k_case("trials differ", {8: (200, 200), 4: (9, 9), 2: (200, 200)}, 0.8)]),
        Group("records", 1, "Records come in any order, exact does not count, and without a k "
              "there is no answer.",
              [_k_case("shuffled", {16: (90, 90), 2: (90, 90), 8: (90, 90)}, seed=5),
               _k_case("bad exact", {"exact": (0, 300), 4: (100, 100)}),
               _k_case("good exact", {"exact": (5000, 5000), 4: (20, 20)}),
               Case("empty", ([],), raises=ValueError),
               Case("exact alone", (_records({"exact": (9, 9)}),), raises=ValueError)]),
    ]


def _plain_share(records, floor=0.9, z=1.96):
    return _critical(records, floor, z, passes=lambda hits, n: hits / n)


def _textbook_interval(records, floor=0.9, z=1.96):
    def low(hits, n):
        share = hits / n
        return share - z * (share * (1 - share) / n) ** 0.5

    return _critical(records, floor, z, passes=low)


def _upper_end(records, floor=0.9, z=1.96):
    return _critical(records, floor, z, passes=lambda hits, n: wilson(hits, n, z)[1])


def _z_fixed(records, floor=0.9, z=1.96):
    return _critical(records, floor, 1.96)


def _smallest_that_passes(records, floor=0.9, z=1.96):
    return _critical(records, floor, z, from_above=False)


def _largest_that_passes(records, floor=0.9, z=1.96):
    return _critical(records, floor, z, last=True)


def _exact_counts(records, floor=0.9, z=1.96):
    return _critical(records, floor, z, exact_counts=True)


def _powers_of_two(records, floor=0.9, z=1.96):
    usual = (1, 2, 4, 8, 16, 32, 64)
    known = [r for r in records if r["k"] in usual]
    if not known and any(r["k"] != "exact" for r in records):
        return None
    return _critical(known, floor, z)


def _none_without_a_k(records, floor=0.9, z=1.96):
    try:
        return _critical(records, floor, z)
    except ValueError:
        return None


def _strictly_above(records, floor=0.9, z=1.96):
    return _critical(records, floor, z, strictly=True)


def _critical_by_arrays(records, floor=0.9, z=1.96):
    ks = np.array([r["k"] for r in records if r["k"] != "exact"], int)
    hits = np.array([r["recalled"] for r in records if r["k"] != "exact"], bool)
    if not ks.size:
        raise ValueError("no k")
    best = None
    for k in np.unique(ks)[::-1]:
        n = int((ks == k).sum())
        p = hits[ks == k].mean()
        middle, half = p + z * z / (2 * n), z * np.sqrt(p * (1 - p) / n + z * z / (4 * n * n))
        # The ends are exact but for a rounding where all or none were right.
        low = 0.0 if p == 0 else (middle - half) / (1 + z * z / n)
        if low < floor:
            return best
        best = int(k)
    return best


# 11-2: the blind share


def _blind(selections, batch, n, block_size=32):
    """The definition: ask every position whether some chosen token is not after it."""
    if batch < 1 or n < 1 or len(selections) != len(range(0, n, batch)):
        raise ValueError("selections")
    blind = 0
    for p in range(n):
        blocks = selections[p // batch]
        seen = blocks is None or any(t <= p for b in blocks
                                     for t in range(b * block_size, (b + 1) * block_size))
        blind += not seen
    return blind / n


def _blind_case(name, *args) -> Case:
    # One division of two whole numbers; a sum of shares may differ by roundings.
    return Case(name, args, expect=_blind(*args), rtol=1e-12, atol=1e-15)


def _blind_groups() -> list[Group]:
    rng = np.random.default_rng(11)

    def drawn(n, batch, block, most):
        result = []
        for end in [min(s + batch, n) for s in range(0, n, batch)]:
            blocks = -(-end // block)
            count = int(rng.integers(1, min(most, blocks) + 1))
            result.append(rng.permutation(blocks)[:count].tolist())
        return result

    published = [[(min(s + 256, 2061) - 1) // 32] for s in range(0, 2061, 256)]
    return [
        Group("the published set-up", 2, "One block per mini-batch, its own last: every position "
              "before it is blind, and the last, short mini-batch sees.",
              [_blind_case("2061", published, 256, 2061),
               _blind_case("2048", published[:8], 256, 2048)]),
        Group("clipped causally", 2, "A block in the middle of the mini-batch helps only the "
              "positions from its first token on; one before the mini-batch helps all.",
              [_blind_case(f"draw {i}", drawn(900 + i, 128, 32, 3), 128, 900 + i)
               for i in range(3)]
              + [_blind_case("inside a block", [[1]], 64, 40), _blind_case("far", [[3], [0]], 128,
                                                                           200),
                 _blind_case("after the mini-batch", [[9], [0]], 256, 512),
                 _blind_case("begins inside a block", [[0], [2], [3]], 48, 144)]),
        Group("exact and empty", 1, "None is a mini-batch in which everybody sees; an empty list "
              "one in which nobody does.",
              [_blind_case("all exact", [None, None], 64, 100),
               _blind_case("empty", [[], [0], None], 50, 140),
               _blind_case("nothing seen", [[]], 8, 5)]),
        Group("sizes", 1, "batch, n and block_size are arguments; selections must fit them.",
              [_blind_case("small blocks", drawn(61, 12, 4, 2), 12, 61, 4),
               _blind_case("batch of one", [[0], [0], [2]], 1, 3, 1),
               _blind_case("block across mini-batches", [[0], [0], [1]], 5, 13, 8),
               Case("too many", ([[0], [0]], 256, 256), raises=ValueError),
               Case("batch 0", ([[0]], 0, 5), raises=ValueError),
               Case("n 0", ([], 256, 0), raises=ValueError)]),
    ]


def _checked(selections, batch, n):
    if batch < 1 or n < 1 or len(selections) != -(-n // batch):
        raise ValueError("selections")


def _last_block_counts(selections, batch, n, block_size=32):
    _checked(selections, batch, n)
    return _blind([s and [max(s)] for s in selections], batch, n, block_size)


def _unread_tokens(selections, batch, n, block_size=32):
    _checked(selections, batch, n)
    read = sum(min(batch, n - i * batch) if s is None else
               sum(max(0, min(n, (b + 1) * block_size, (i + 1) * batch)
                       - max(b * block_size, i * batch)) for b in s)
               for i, s in enumerate(selections))
    return (n - read) / n


def _full_mini_batches(selections, batch, n, block_size=32):
    _checked(selections, batch, n)
    padded = _blind(selections, batch, len(selections) * batch, block_size)
    return padded * len(selections) * batch / n


def _mean_of_shares(selections, batch, n, block_size=32):
    _checked(selections, batch, n)
    shares = []
    for i, s in enumerate(selections):
        rows = range(i * batch, min((i + 1) * batch, n))
        shares.append(np.mean([s is not None and (not s or min(s) * block_size > p)
                               for p in rows]))
    return float(np.mean(shares))


def _first_listed(selections, batch, n, block_size=32):
    _checked(selections, batch, n)
    return _blind([s and s[:1] for s in selections], batch, n, block_size)


def _none_is_blind(selections, batch, n, block_size=32):
    _checked(selections, batch, n)
    return _blind([[] if s is None else s for s in selections], batch, n, block_size)


def _empty_is_exact(selections, batch, n, block_size=32):
    _checked(selections, batch, n)
    return _blind([s or None for s in selections], batch, n, block_size)


def _blocks_of_32(selections, batch, n, block_size=32):
    return _blind(selections, batch, n)


def _counts_not_shares(selections, batch, n, block_size=32):
    return _blind(selections, batch, n, block_size) * n


def _no_questions_asked(selections, batch, n, block_size=32):
    rows = [selections[min(p // max(batch, 1), len(selections) - 1)] for p in range(n)]
    return sum(s is not None and (not s or min(s) * block_size > p)
               for p, s in enumerate(rows)) / max(n, 1)


def _not_clipped(selections, batch, n, block_size=32):
    """Counts up to the earliest block, be it after the mini-batch."""
    _checked(selections, batch, n)
    return sum(0 if s is None else max(0, min(s) * block_size - i * batch) if s
               else min(batch, n - i * batch) for i, s in enumerate(selections)) / n


def _whole_blocks(selections, batch, n, block_size=32):
    """Takes every mini-batch to begin with a block."""
    _checked(selections, batch, n)
    blind = 0
    for i, s in enumerate(selections):
        length = min(batch, n - i * batch)
        if s is not None:
            before = min(s) - i * batch // block_size if s else length
            blind += min(length, max(0, before) * block_size)
    return blind / n


def _off_by_one(selections, batch, n, block_size=32):
    _checked(selections, batch, n)
    return sum(s is not None and (not s or min(s) * block_size >= p)
               for p in range(n) for s in [selections[p // batch]]) / n


def _blind_by_mask(selections, batch, n, block_size=32):
    if min(batch, n) < 1 or len(selections) * batch < n or (len(selections) - 1) * batch >= n:
        raise ValueError("selections")
    starts = [0 if s is None else min(s) * block_size if s else n for s in selections]
    positions = np.arange(n)
    return float(np.mean(positions < np.array(starts)[positions // batch]))


# 11-3: the importance map


def _weights(layers, heads, n, seed) -> np.ndarray:
    w = np.tril(np.random.default_rng(seed).random((layers, heads, n, n)))
    return (w / w.sum(axis=-1, keepdims=True)).astype(np.float32)


def _map(weights, window=None, block_size=32):
    """The definition, one weight after the other, in float64."""
    layers, heads, n, _ = weights.shape
    if block_size < 1 or (window is not None and window < 1):
        raise ValueError("window")
    out = np.zeros((layers, -(-n // block_size)))
    for layer in range(layers):
        for head in range(heads):
            for i in range(n):
                if window is None or i >= n - window:
                    for t in range(n):
                        out[layer, t // block_size] += float(weights[layer, head, i, t])
    return out.astype(np.float32)


def _map_case(name, *args, dtype=False) -> Case:
    # A sum of at most 400 float32 weights: order costs less than 400 · 6e-8.
    return Case(name, args, expect=_map(*args), rtol=5e-5, atol=1e-6, dtype=dtype)


def _map_groups() -> list[Group]:
    return [
        Group("sums", 2, "Sum over heads and queries, layer by layer; nothing is averaged.",
              [_map_case("two layers", _weights(2, 3, 8, 0), None, 4),
               _map_case("one block", _weights(3, 2, 6, 1), None, 6, dtype=True),
               _map_case("tokens", _weights(1, 4, 7, 2), None, 1)]),
        Group("window", 2, "Only the last queries count: rows of the matrix, not columns.",
              [_map_case(f"window {w}", _weights(2, 2, 9, w), w, 4) for w in (1, 3, 8, 9, 10, 99)]),
        Group("blocks", 1, "The last block may be short, and the block may be longer than the "
              "prompt.",
              [_map_case("short", _weights(2, 1, 10, 3), 2, 4),
               _map_case("long", _weights(2, 2, 5, 4), None),
               _map_case("default block", _weights(1, 1, 40, 5), 5)]),
        Group("arguments", 1, "window and block_size below 1 have no map, and weights stay as "
              "they are.",
              [Case("window 0", (_weights(1, 1, 4, 6), 0, 2), raises=ValueError),
               Case("window -1", (_weights(1, 1, 4, 6), -1, 2), raises=ValueError),
               Case("block 0", (_weights(1, 1, 4, 6), None, 0), raises=ValueError),
               Case("block -1", (_weights(1, 1, 4, 6), None, -1), raises=ValueError),
               _map_case("left alone", _weights(1, 2, 6, 7), 2, 3)]),
    ]


def _guard(window, block_size):
    if block_size < 1 or (window is not None and window < 1):
        raise ValueError("window")


def _by_block(received, block_size):
    return np.add.reduceat(received, range(0, received.shape[-1], block_size), axis=-1)


def _mean_over_heads(weights, window=None, block_size=32):
    return _map(weights, window, block_size) / np.float32(weights.shape[1])


def _columns_for_rows(weights, window=None, block_size=32):
    return _map(np.ascontiguousarray(np.swapaxes(weights, 2, 3)), window, block_size)


def _window_of_positions(weights, window=None, block_size=32):
    _guard(window, block_size)
    received = weights.sum(axis=(1, 2))
    if window is not None:
        received = received.copy()
        received[:, : max(0, weights.shape[-1] - window)] = 0
    return _by_block(received, block_size)


def _first_queries(weights, window=None, block_size=32):
    _guard(window, block_size)
    return _by_block(weights[:, :, :window].sum(axis=(1, 2)), block_size)


def _full_blocks_only(weights, window=None, block_size=32):
    n = weights.shape[-1]
    whole = _map(weights, window, block_size)
    return whole[:, : max(1, n // block_size)]


def _window_zero_is_all(weights, window=None, block_size=32):
    return _map(weights, None if window is not None and window < 1 else window, block_size)


def _small_windows_only(weights, window=None, block_size=32):
    _guard(window, block_size)
    n = weights.shape[-1]
    first = 0 if window is None else n - window  # negative for a window beyond n
    return _by_block(weights[:, :, first:].sum(axis=(1, 2)), block_size)


def _block_unchecked(weights, window=None, block_size=32):
    """range refuses a step of 0 with a ValueError, but not one of -1."""
    if window is not None and window < 1:
        raise ValueError("window")
    counted = weights[:, :, -min(window or weights.shape[-1], weights.shape[-1]) :]
    return _by_block(counted.sum(axis=(1, 2)), block_size)


def _double(weights, window=None, block_size=32):
    return _map(weights, window, block_size).astype(np.float64)


def _layers_summed(weights, window=None, block_size=32):
    return _map(weights, window, block_size).sum(axis=0, keepdims=True)


def _scales_what_it_is_given(weights, window=None, block_size=32):
    out = _map(weights, window, block_size)
    weights *= 2
    return out


def _map_by_einsum(weights, window=None, block_size=32):
    _guard(window, block_size)
    n = weights.shape[-1]
    counts = np.ones(n, np.float32)
    if window is not None:
        counts[: max(0, n - window)] = 0
    received = np.einsum("lhit,i->lt", weights, counts)
    blocks = [received[:, b : b + block_size].sum(axis=1) for b in range(0, n, block_size)]
    return np.stack(blocks, axis=1).astype(np.float32)


HIDDEN = [
    Hidden("d11.a1", groups=_critical_groups, alternative=_critical_by_arrays, mutants={
        "plain share": _plain_share,
        "textbook interval": _textbook_interval,
        "upper end": _upper_end,
        "z fixed": _z_fixed,
        "smallest that passes": _smallest_that_passes,
        "largest that passes": _largest_that_passes,
        "exact counts": _exact_counts,
        "powers of two": _powers_of_two,
        "None without a k": _none_without_a_k,
        "strictly above": _strictly_above,
    }),
    Hidden("d11.a2", groups=_blind_groups, alternative=_blind_by_mask, mutants={
        "last block counts": _last_block_counts,
        "unread tokens": _unread_tokens,
        "full mini-batches": _full_mini_batches,
        "mean of shares": _mean_of_shares,
        "first listed block": _first_listed,
        "None is blind": _none_is_blind,
        "empty is exact": _empty_is_exact,
        "blocks of 32": _blocks_of_32,
        "counts, not shares": _counts_not_shares,
        "no questions asked": _no_questions_asked,
        "not clipped": _not_clipped,
        "whole blocks": _whole_blocks,
        "off by one": _off_by_one,
    }),
    Hidden("d11.a3", groups=_map_groups, alternative=_map_by_einsum, mutants={
        "mean over heads": _mean_over_heads,
        "columns for rows": _columns_for_rows,
        "window of positions": _window_of_positions,
        "first queries": _first_queries,
        "full blocks only": _full_blocks_only,
        "window 0 is all": _window_zero_is_all,
        "small windows only": _small_windows_only,
        "block unchecked": _block_unchecked,
        "float64 leak": _double,
        "layers summed": _layers_summed,
        "scales its input": _scales_what_it_is_given,
    }),
]

PREFILL, SPARSE = "course_lib/prefill_attention.py", "course_lib/sparse.py"
BATCHES = "course_lib/sparse_prefill.py"

READINGS = {
    "d11.b1": {
        "reserved": Lines(SPARSE, first="first = _descending(importance)", symbol="select_heads"),
        "no_place": Lines(SPARSE, first="fill = rest[", symbol="select_heads"),
        "no_recency": Lines(SPARSE, first="if reserved < order.shape[1] < count",
                            symbol="select_heads"),
        "places_k3": 1,
        "sure_k": 4,
    },
    "d11.b2": {
        "last_chooses": Lines(BATCHES, first="chosen = [_choose(q[:, end - 1 - start]"),
        "clipped": Lines(BATCHES, first="seen = np.searchsorted(tokens, np.arange(first, end)"),
        "zeros": Lines(PREFILL, first="out = np.zeros_like(q)", symbol="_attend_tile"),
        "locked": True,
        "tail": False,
        "needle_suffices": False,
        "one_block_too_few": False,
        "decode_alone": False,
    },
    "d11.b3": {
        "window_rule": Lines("course_lib/engine/prefill.py", first="n % MINIBATCH or MINIBATCH"),
        "group_splits": Lines(BATCHES, first="pairs += [(g, min(g + size, batch_end))"),
        "group_pays": [Lines(BATCHES, first="return select_heads(probe_heads(q, rows"),
                       Lines(BATCHES, first="chosen = [_choose(q[:, end - 1 - start]")],
        "g8_extra": 13.8,
        "selections_g8": 258,
    },
}
