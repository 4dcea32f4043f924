"""Hidden cases of day 13."""

from __future__ import annotations

import numpy as np

from course_lib.classroom.exercises import Case
from course_lib.classroom.exercises.day13 import bound_case
from course_lib.classroom.hidden import Group, Hidden
from course_lib.classroom.sealed import Lines
from course_lib.prefill.aggregate import aggregate

# 13-1: page scores. Whole numbers, so that no order of additions matters.


def _by_pages(q, k, page_size=16):
    """The definition: page by page, channel by channel."""
    if page_size < 1:
        raise ValueError("page_size")
    group, starts = len(q) // len(k), range(0, k.shape[1], page_size)
    out = np.zeros((len(q), len(starts)), np.float32)
    for h in range(len(q)):
        for page, first in enumerate(starts):
            keys = k[h // group, first : first + page_size]
            for c in range(q.shape[1]):
                out[h, page] += max(q[h, c] * keys[:, c].min(), q[h, c] * keys[:, c].max())
    return out


def _page_case(name, seed, heads, kv_heads, keys, d, page_size) -> Case:
    rng = np.random.default_rng(seed)
    q = rng.integers(-5, 6, (heads, d)).astype(np.float32)
    k = rng.integers(-5, 6, (kv_heads, keys, d)).astype(np.float32)
    return Case(name, (q, k, page_size), expect=_by_pages(q, k, page_size), dtype=True)


def _page_groups() -> list[Group]:
    rng = np.random.default_rng(0)
    negative = -rng.integers(1, 9, (1, 20, 3)).astype(np.float32)
    return [
        Group("bound", 2, "Per channel the larger of q * low and q * high, then the sum: the max "
              "stands inside.",
              [_page_case("one head", 1, 1, 1, 64, 8, 16),
               _page_case("pages of 4", 2, 1, 1, 32, 5, 4),
               bound_case("2,000 keys", 2, 1, 2000, 16, 16, 3)]),
        Group("low and high", 1, "Low and high are those of the page, whatever the signs.",
              [Case("negative keys", (np.float32([[1, -2, 3]]), negative, 5),
                    expect=_by_pages(np.float32([[1, -2, 3]]), negative, 5)),
               Case("negative query", (np.float32([[-1, -1, -4]]), negative, 5),
                    expect=_by_pages(np.float32([[-1, -1, -4]]), negative, 5))]),
        Group("KV heads", 1, "Query head h reads KV head h * Hkv // H.",
              [_page_case("4 over 2", 4, 4, 2, 32, 4, 8),
               _page_case("6 over 3", 5, 6, 3, 16, 3, 16),
               bound_case("8 over 2", 8, 2, 200, 8, 16, 6)]),
        Group("last page", 1, "The last page may be short; every key belongs to a page.",
              [_page_case("17 keys", 7, 2, 1, 17, 4, 16), _page_case("3 keys", 8, 1, 1, 3, 4, 16),
               _page_case("33 keys, pages of 8", 9, 1, 1, 33, 2, 8)]),
        Group("argument", 1, "A page of less than one key is an error.",
              [Case("0", (np.ones((1, 2), np.float32), np.ones((1, 4, 2), np.float32), 0),
                    raises=ValueError),
               Case("-1", (np.ones((1, 2), np.float32), np.ones((1, 4, 2), np.float32), -1),
                    raises=ValueError)]),
    ]


def _low_high(k, page_size):
    if page_size < 1:
        raise ValueError("page_size")
    starts = np.arange(0, k.shape[1], page_size)
    return np.minimum.reduceat(k, starts, axis=1), np.maximum.reduceat(k, starts, axis=1)


def _over_heads(q, low, high, score, heads=None):
    heads = np.arange(len(q)) * len(low) // len(q) if heads is None else heads
    return np.stack([score(q[h], low[g], high[g]) for h, g in enumerate(heads)]).astype(np.float32)


def _quest(q, low, high):
    return np.maximum(q * low, q * high).sum(axis=-1)


def _max_outside(q, k, page_size=16):
    return _over_heads(q, *_low_high(k, page_size),
                       lambda q, low, high: np.maximum(low @ q, high @ q))


def _high_only(q, k, page_size=16):
    return _over_heads(q, *_low_high(k, page_size), lambda q, low, high: high @ q)


def _largest_magnitude(q, k, page_size=16):
    return _over_heads(q, *_low_high(k, page_size), lambda q, low, high: np.maximum(
        np.abs(low), np.abs(high)) @ np.abs(q))


def _true_maximum(q, k, page_size=16):
    if page_size < 1:
        raise ValueError("page_size")
    starts = np.arange(0, k.shape[1], page_size)
    products = np.stack([k[h * len(k) // len(q)] @ q[h] for h in range(len(q))])
    return np.maximum.reduceat(products, starts, axis=1).astype(np.float32)


def _kv_heads_in_turn(q, k, page_size=16):
    return _over_heads(q, *_low_high(k, page_size), _quest, np.arange(len(q)) % len(k))


def _drops_the_short_page(q, k, page_size=16):
    if k.shape[1] < page_size:
        return _by_pages(q, k, page_size)
    return _by_pages(q, k[:, : k.shape[1] // max(page_size, 1) * page_size] if page_size > 0 else k,
                     page_size)


def _pads_with_zeros(q, k, page_size=16):
    if page_size < 1:
        raise ValueError("page_size")
    return _by_pages(q, np.pad(k, ((0, 0), (0, -k.shape[1] % page_size), (0, 0))), page_size)


def _any_page_size(q, k, page_size=16):
    return _by_pages(q, k, max(page_size, 1))


def _pages_in_float64(q, k, page_size=16):
    return _by_pages(q, k, page_size).astype(np.float64)


def _two_dots(q, k, page_size=16):
    """Where q is positive high decides, else low."""
    return _over_heads(q, *_low_high(k, page_size), lambda q, low, high: high @ np.maximum(
        q, 0) + low @ np.minimum(q, 0))


# 13-2: one list


def _joined(masks, rule, kv_heads, sums=None, threshold=None):
    """The library's lists."""
    lists = aggregate(masks, rule, num_kv_heads=kv_heads, block_sums=sums,
                      threshold=threshold).by_head
    return [ids.tolist() for ids in lists]


def _list_case(name, masks, rule, kv_heads, sums=None, threshold=None) -> Case:
    args = (masks, rule, kv_heads) + (() if sums is None else (sums, threshold))
    return Case(name, args, expect=_joined(masks, rule, kv_heads, sums, threshold))


def _some(seed, heads, rows, blocks, share=0.5):
    return np.random.default_rng(seed).random((heads, rows, blocks)) < share


def _mass(seed, heads, rows, blocks):
    return np.random.default_rng(seed).integers(0, 9, (heads, rows, blocks)).astype(np.float32)


def _list_groups() -> list[Group]:
    half = np.zeros((4, 2, 6), bool)
    half[:2, :, 2] = half[:, 0, 3] = True  # by two KV heads of four; by one row of two
    half[:3, :, 4] = True
    one = _mass(5, 2, 2, 7)
    ties = np.ones((1, 1, 8), np.float32)
    yes = np.ones((1, 1, 8), bool)
    return [
        Group("majority", 2, "Strictly more than half of all (KV head, row) pairs; exactly half is "
              "not enough.",
              [_list_case("exactly half", half, "majority", 4),
               _list_case("8 ballots", _some(1, 2, 4, 12), "majority", 2),
               _list_case("15 ballots", _some(2, 5, 3, 12), "majority", 5)]),
        Group("groups", 2, "Any query head of a KV head makes its ballot; neighbours are a group.",
              [_list_case("4 heads, 2 KV heads", _some(3, 4, 3, 12, 0.4), "majority", 2),
               _list_case("8 heads, 2 KV heads", _some(4, 8, 2, 16, 0.2), "majority", 2),
               _list_case("per head", _some(6, 6, 2, 12, 0.15), "per_head", 3)]),
        Group("any and per head", 1, "Any: one ballot is enough. Per head: each KV head its own "
              "list.",
              [_list_case("any", _some(7, 4, 2, 16, 0.08), "any", 2),
               _list_case("own lists", _some(8, 4, 2, 10, 0.1), "per_head", 4)]),
        Group("mean score", 1, "Masses are added over heads and rows; the largest first, ties to "
              "the lower, while the mass before is less than threshold times the whole.",
              [_list_case(f"τ = {t}", _some(9, 2, 2, 7), "mean_score", 2, one, t)
               for t in (0.25, 0.5, 0.8)]
              + [_list_case("sums, not maxima", yes.repeat(2, axis=1), "mean_score", 1,
                            np.float32([[[0, 3, 0, 2, 0, 2, 0, 1], [0, 0, 0, 2, 0, 2, 0, 1]]]),
                            0.6)]
              + [_list_case("equal masses", yes, "mean_score", 1, ties, 0.5),
                 _list_case("τ = 1 and zeros", yes, "mean_score", 1, np.eye(8, dtype=np.float32)[
                     :1][None], 1.0)]),
        Group("ends and errors", 1, "First and last block are in every list; another rule is an "
              "error.",
              [_list_case(f"nobody, {rule}", np.zeros((2, 2, 5), bool), rule, 2)
               for rule in ("any", "majority", "per_head")]
              + [_list_case("a single block", yes[:, :, :1], "any", 1),
                 Case("unknown", (yes, "all", 1), raises=ValueError)]),
    ]


def _lists(masks, rule, kv_heads, sums=None, threshold=None, *, half=lambda v, n: 2 * v > n,
           group=np.any, ends=(0, -1), neighbours=True, of=None, ties=1, strict=True, one=True):
    """The definition with the mistakes of the mutants as options."""
    if rule not in ("any", "majority", "mean_score", "per_head"):
        raise ValueError(rule)
    heads, rows, blocks = masks.shape
    shape = (kv_heads, -1) if neighbours else (-1, kv_heads)
    ballots = group(masks.reshape(*shape, rows, blocks), axis=1 if neighbours else 0)
    pairs = kv_heads * rows
    if rule == "per_head":
        kept = ballots.any(axis=1)
    elif rule == "any":
        kept = ballots.any(axis=(0, 1))[None]
    elif rule == "majority":
        votes = ballots.sum(axis=(0, 1)) if of is None else of(ballots, masks)
        kept = half(votes, pairs if of is None else of(np.ones_like(ballots),
                                                      np.ones_like(masks)).max())[None]
    else:
        mass = sums.sum(axis=(0, 1), dtype=np.float64)
        order = sorted(range(blocks), key=lambda b: (-mass[b], ties * b))
        kept, before = np.zeros((1, blocks), bool), 0.0
        for b in order:
            need = threshold * mass.sum()
            kept[0, b] = (before < need if strict else before <= need) or (one and threshold == 1)
            before += mass[b]
    for end in ends:
        kept[:, end] = True
    return [np.flatnonzero(row).tolist() for row in kept]


def _wrong(**changes):
    def mutant(masks, rule, kv_heads, sums=None, threshold=None):
        return _lists(masks, rule, kv_heads, sums, threshold, **changes)
    return mutant


def _any_rule_is_any(masks, rule, kv_heads, sums=None, threshold=None):
    known = rule in ("any", "majority", "mean_score", "per_head")
    return _lists(masks, rule if known else "any", kv_heads, sums, threshold)


def _block_0_twice(masks, rule, kv_heads, sums=None, threshold=None):
    lists, last = _lists(masks, rule, kv_heads, sums, threshold), masks.shape[2] - 1
    return [[0, *(b for b in ids if 0 < b < last), last] for ids in lists]


def _largest_mass(masks, rule, kv_heads, sums=None, threshold=None):
    mass = None if sums is None else sums.max(axis=(0, 1), keepdims=True)
    return _lists(masks, rule, kv_heads, mass, threshold)


def _one_list_for_all(masks, rule, kv_heads, sums=None, threshold=None):
    lists = _lists(masks, rule, kv_heads, sums, threshold)
    return [sorted(set().union(*lists))] if rule == "per_head" else lists


# 13-3: scores


def _scored(texts, references, rule):
    """The definition."""
    if rule not in ("all", "any", "pass", "exact") or len(texts) != len(references) or not texts:
        raise ValueError("rule or lengths")
    total = 0.0
    for text, refs in zip(texts, references, strict=True):
        if not refs:
            raise ValueError("a sample without references")
        found = len([r for r in refs if r.lower() in text.lower()])
        total += {"all": found / len(refs), "any": float(found > 0),
                  "pass": float(2 * found >= len(refs)), "exact": float(found == len(refs))}[rule]
    return total / len(texts)


_TEXTS = ["VAR zamu, VAR qiro, VAR hafe.", "VAR ZAMU.", "lobenuri", "", "the answer is sati"]
_REFS = [["zamu", "qiro", "hafe"], ["Zamu", "qiro", "hafe"], ["lobe", "nuri"], ["moka"],
         ["sati", "moka"]]


def _run_case(name, texts, refs, rule) -> Case:
    return Case(name, (texts, refs, rule), expect=_scored(texts, refs, rule), rtol=1e-12)


def _run_groups() -> list[Group]:
    return [
        Group("all", 1, "A sample's score is the share of its references; the run's is the mean "
              "over samples, not over references.",
              [_run_case("five samples", _TEXTS, _REFS, "all"),
               _run_case("of unequal size", ["a", "x"], [["a"], ["a", "b", "c", "d"]], "all")]),
        Group("any, pass, exact", 2, "One found, at least half found, all found.",
              [_run_case(rule, _TEXTS, _REFS, rule) for rule in ("any", "pass", "exact")]
              + [_run_case("exactly half", ["b d"], [["a", "b", "c", "d"]], "pass"),
                 _run_case("a third", ["a"], [["a", "b", "c"]], "pass")]),
        Group("anywhere", 1, "A reference counts inside a word too, in upper or lower case.",
              [_run_case("capitals", ["RAMEN!"], [["ramen"]], "all"),
               _run_case("capital reference", ["ramen"], [["Ramen"]], "exact"),
               _run_case("inside a word", ["ramenshop"], [["ramen"]], "any"),
               _run_case("second sentence", ["I looked. It is ramen."], [["ramen"]], "all")]),
        Group("errors", 1, "Another rule, no sample, no reference, or lists of unequal length.",
              [Case("rule", (["a"], [["a"]], "most"), raises=ValueError),
               Case("no sample", ([], [], "exact"), raises=ValueError),
               *(Case(f"no reference, {rule}", (["a", "b"], [["a"], []], rule), raises=ValueError)
                 for rule in ("all", "any", "exact")),
               Case("more texts", (["a", "b"], [["a"]], "any"), raises=ValueError),
               Case("more references", (["a"], [["a"], ["b"]], "any"), raises=ValueError)]),
    ]


def _checked_shares(texts, references, rule, found):
    if rule not in ("all", "any", "pass", "exact") or len(texts) != len(references) or not texts:
        raise ValueError("rule or lengths")
    shares = []
    for text, refs in zip(texts, references, strict=True):
        if not refs:
            raise ValueError("no reference")
        shares.append(sum(found(r, text) for r in refs) / len(refs))
    return shares


def _folded(r, text):
    return r.lower() in text.lower()


def _by_rule(shares, rule, pass_at=lambda s: s >= 0.5, exact=lambda s: s == 1):
    if rule == "all":
        return sum(shares) / len(shares)
    good = {"any": lambda s: s > 0, "pass": pass_at, "exact": exact}[rule]
    return sum(map(good, shares)) / len(shares)


def _case_matters(texts, references, rule):
    return _by_rule(_checked_shares(texts, references, rule, lambda r, t: r in t), rule)


def _lowers_the_text_only(texts, references, rule):
    return _by_rule(_checked_shares(texts, references, rule, lambda r, t: r in t.lower()), rule)


def _whole_words(texts, references, rule):
    return _by_rule(_checked_shares(texts, references, rule, lambda r, t: r.lower() in
                                    t.lower().replace(",", " ").replace(".", " ").split()), rule)


def _more_than_half(texts, references, rule):
    return _by_rule(_checked_shares(texts, references, rule, _folded), rule, lambda s: s > 0.5)


def _pass_is_any(texts, references, rule):
    return _by_rule(_checked_shares(texts, references, rule, _folded), rule, lambda s: s > 0)


def _mean_over_references(texts, references, rule):
    shares = _checked_shares(texts, references, rule, _folded)
    if rule != "all":
        return _by_rule(shares, rule)
    found = sum(s * len(refs) for s, refs in zip(shares, references, strict=True))
    return found / sum(map(len, references))


def _percent(texts, references, rule):
    return 100 * _scored(texts, references, rule)


def _shorter_list(texts, references, rule):
    n = min(len(texts), len(references))
    return _scored(texts[:n], references[:n], rule)


def _first_sentence(texts, references, rule):
    return _scored([text.split(".")[0] for text in texts], references, rule)


def _checks_more_texts_only(texts, references, rule):
    if len(texts) > len(references):
        raise ValueError("texts")
    return _scored(texts, references[: len(texts)], rule)


def _divides_only_for_shares(texts, references, rule):
    """Of a sample without references, any() is false and all() is true: no error."""
    if rule in ("any", "exact") and texts and len(texts) == len(references):
        some = {"any": any, "exact": all}[rule]
        return sum(some(_folded(r, text) for r in refs)
                   for text, refs in zip(texts, references, strict=True)) / len(texts)
    return _scored(texts, references, rule)


def _skips_empty(texts, references, rule):
    pairs = [(t, r) for t, r in zip(texts, references, strict=False) if r]
    if len(texts) != len(references):
        raise ValueError("lengths")
    return _scored([t for t, _ in pairs], [r for _, r in pairs], rule)


def _by_counts(texts, references, rule):
    shares = _checked_shares(texts, references, rule, lambda r, t: t.lower().count(r.lower()) > 0)
    return float(np.mean(shares)) if rule == "all" else float(np.mean(
        [{"any": s > 0, "pass": s >= 0.5, "exact": s >= 1}[rule] for s in shares]))


HIDDEN = [
    Hidden("d13.a1", groups=_page_groups, alternative=_two_dots, mutants={
        "the max outside the sum": _max_outside,
        "high only": _high_only,
        "largest magnitudes": _largest_magnitude,
        "the true maximum": _true_maximum,
        "KV heads in turn": _kv_heads_in_turn,
        "drops the short page": _drops_the_short_page,
        "pads the short page with zeros": _pads_with_zeros,
        "accepts a page of 0": _any_page_size,
        "float64": _pages_in_float64,
    }),
    Hidden("d13.a2", groups=_list_groups, alternative=_wrong(), mutants={
        "half is enough": _wrong(half=lambda v, n: 2 * v >= n),
        "all of a group must keep": _wrong(group=np.all),
        "query heads vote": _wrong(of=lambda ballots, masks: masks.sum(axis=(0, 1))),
        "only KV heads vote": _wrong(of=lambda ballots, masks: ballots.any(axis=1).sum(axis=0)),
        "heads of a group in turn": _wrong(neighbours=False),
        "no first block": _wrong(ends=(-1,)),
        "no last block": _wrong(ends=(0,)),
        "mean score at most": _wrong(strict=False),
        "ties to the higher": _wrong(ties=-1),
        "threshold 1 like any other": _wrong(one=False),
        "a single block twice": _block_0_twice,
        "largest masses, not sums": _largest_mass,
        "one list per head joined": _one_list_for_all,
        "unknown rules are any": _any_rule_is_any,
    }),
    Hidden("d13.a3", groups=_run_groups, alternative=_by_counts, mutants={
        "case matters": _case_matters,
        "lowers the text only": _lowers_the_text_only,
        "whole words": _whole_words,
        "more than half passes": _more_than_half,
        "one found passes": _pass_is_any,
        "mean over references": _mean_over_references,
        "percent": _percent,
        "cuts the longer list": _shorter_list,
        "skips samples without references": _skips_empty,
        "first sentence only": _first_sentence,
        "refuses more texts only": _checks_more_texts_only,
        "no error without references": _divides_only_for_shares,
    }),
]

POLICIES, XATTN = "course_lib/prefill/policies.py", "course_lib/prefill/xattn_policy.py"
AGGREGATE, RULER = "course_lib/prefill/aggregate.py", "course_lib/lab/ruler.py"

READINGS = {
    "d13.b1": {
        "quest_notes": Lines(POLICIES, first="kept[block:] = [page_bounds(k, self.page_size)]"),
        "quest_late": Lines(POLICIES, first="self.on_block_written(layer, block, store.keys("),
        "xattn_reads": Lines(XATTN, first="return store.keys(layer, block)"),
        "rounded_up": Lines("course_lib/prefill/quest.py", first="np.nextafter(scores"),
        "notes_share": 6.25,
        "not_for_decode": "xattn",
    },
    "d13.b2": {
        "more_than_half": Lines(AGGREGATE, first="2 * votes > len(ballot.votes) * ballot.rows"),
        "group_any": Lines(AGGREGATE, first=".any(axis=1).sum(axis=1)"),
        "always": Lines(AGGREGATE, first='for block, why in ((0, "safety_first")'),
        "asking_share": 12.5,
        "hides": "ruler_niah",
    },
    "d13.b3": {
        "decode_exact": Lines(RULER, first="generate_from(session, max_new_tokens)"),
        "own_chunk": Lines("course_lib/prefill/chunked.py", first="attend_part(q, own, "),
        "short_chunk": Lines(XATTN, first='return everything(blocks, "short_query")'),
        "anywhere": Lines(RULER, first="reference.lower() in text.lower()"),
        "blind_up_to": 256,
        "failures_allowed": 71,
    },
}
