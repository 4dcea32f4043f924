"""Hidden cases of day 1."""

from __future__ import annotations

import itertools
import math

import numpy as np

from course_lib.classroom.exercises import Case
from course_lib.classroom.exercises.day01 import BASE_TWO, DIVIDES_BY_MAX, FORGETS_MAX, SHIPPED
from course_lib.classroom.hidden import Group, Hidden
from course_lib.classroom.sealed import Lines

# --- d01.a1 ------------------------------------------------------------------------------------


def _bytes_truth(layers, kv_heads, head_dim, tokens, dtype):
    """The definition, row by row."""
    total = 0
    for _layer, _head, _token, _side in itertools.product(
            range(layers), range(kv_heads), range(tokens), "kv"):
        total += {"f32": 4, "f16": 2, "q8": 1}[dtype] * head_dim
        total += 4 if dtype == "q8" else 0
    return total


def _bytes(name, *args):
    return Case(name, args, expect=_bytes_truth(*args))


def _bytes_groups() -> list[Group]:
    return [
        Group("floats", 2, "Every layer keeps a key and a value for every KV head and token.",
              [_bytes("several layers", 5, 3, 32, 40, "f32"),
               _bytes("one of each", 1, 1, 1, 1, "f32"),
               _bytes("an odd head_dim", 2, 7, 5, 9, "f16"),
               _bytes("a block of tokens", 4, 8, 128, 32, "f16"),
               # The product of powers of two: 2 · 32 layers · 8 heads · 131,072 tokens · 256 bytes.
               Case("more than 32 bits count", (32, 8, 128, 131_072, "f16"), expect=2**34)]),
        Group("q8", 1, "In q8 every row, of each token, KV head, key and value, has its own factor "
              "of four bytes.",
              [_bytes("the article's heads", 1, 8, 128, 1, "q8"),
               _bytes("many tokens", 3, 2, 64, 77, "q8"),
               _bytes("rows of one number", 2, 5, 1, 6, "q8")]),
        Group("borders", 1, "An empty text is allowed and costs nothing; unknown formats and "
              "impossible counts are refused.",
              [Case("no tokens", (2, 2, 8, 0, "f16"), expect=0),
               Case("a negative text", (2, 2, 8, -1, "f32"), raises=ValueError),
               Case("no layer", (0, 2, 8, 1, "f32"), raises=ValueError),
               Case("no head", (1, 0, 8, 1, "q8"), raises=ValueError),
               Case("rows of nothing", (1, 2, 0, 1, "f16"), raises=ValueError),
               Case("another format", (1, 2, 8, 1, "bits"), raises=ValueError),
               Case("a format in capitals", (1, 2, 8, 1, "F16"), raises=ValueError),
               Case("a format with more behind it", (1, 2, 8, 1, "q8_0"), raises=ValueError),
               Case("no tokens in another format", (1, 2, 8, 0, "bits"), raises=ValueError)]),
    ]


def _checked_bytes(layers, kv_heads, head_dim, tokens, dtype, rows):
    if dtype not in rows or min(layers, kv_heads, head_dim) < 1 or tokens < 0:
        raise ValueError("refused")
    return rows[dtype]


def _keys_only(layers, kv_heads, head_dim, tokens, dtype):
    rows = {"f32": 4 * head_dim, "f16": 2 * head_dim, "q8": head_dim + 4}
    row = _checked_bytes(layers, kv_heads, head_dim, tokens, dtype, rows)
    return layers * kv_heads * tokens * row


def _no_factor(layers, kv_heads, head_dim, tokens, dtype):
    rows = {"f32": 4 * head_dim, "f16": 2 * head_dim, "q8": head_dim}
    row = _checked_bytes(layers, kv_heads, head_dim, tokens, dtype, rows)
    return 2 * layers * kv_heads * tokens * row


def _factor_per_token(layers, kv_heads, head_dim, tokens, dtype):
    rows = {"f32": 4 * head_dim, "f16": 2 * head_dim, "q8": head_dim}
    row = _checked_bytes(layers, kv_heads, head_dim, tokens, dtype, rows)
    return 2 * layers * tokens * (kv_heads * row + 4 * (dtype == "q8"))


def _factor_for_key_and_value(layers, kv_heads, head_dim, tokens, dtype):
    rows = {"f32": 8 * head_dim, "f16": 4 * head_dim, "q8": 2 * head_dim + 4}
    row = _checked_bytes(layers, kv_heads, head_dim, tokens, dtype, rows)
    return layers * kv_heads * tokens * row


def _whole_blocks(layers, kv_heads, head_dim, tokens, dtype):
    return _bytes_alternative(layers, kv_heads, head_dim, -(-tokens // 32) * 32, dtype)


def _refuses_nothing(layers, kv_heads, head_dim, tokens, dtype):
    row = {"f32": 4 * head_dim, "f16": 2 * head_dim}.get(dtype, head_dim + 4)
    return 2 * layers * kv_heads * tokens * row


def _refuses_the_empty_text(layers, kv_heads, head_dim, tokens, dtype):
    if tokens < 1:
        raise ValueError("no tokens")
    return _bytes_alternative(layers, kv_heads, head_dim, tokens, dtype)


def _counts_in_32_bits(layers, kv_heads, head_dim, tokens, dtype):
    right = _bytes_alternative(layers, kv_heads, head_dim, tokens, dtype)
    return int(np.int64(right).astype(np.int32))


def _forgives_capitals(layers, kv_heads, head_dim, tokens, dtype):
    return _bytes_alternative(layers, kv_heads, head_dim, tokens, dtype.lower())


def _reads_the_first_letters(layers, kv_heads, head_dim, tokens, dtype):
    known = {"f3": "f32", "f1": "f16", "q8": "q8"}.get(dtype[:2], dtype)
    return _bytes_alternative(layers, kv_heads, head_dim, tokens, known)


def _asks_nothing_of_the_empty_text(layers, kv_heads, head_dim, tokens, dtype):
    return tokens and _bytes_alternative(layers, kv_heads, head_dim, tokens, dtype)


def _bytes_alternative(layers, kv_heads, head_dim, tokens, dtype):
    bits = {"f32": (32, 0), "f16": (16, 0), "q8": (8, 32)}
    try:
        number, row = bits[dtype]
    except KeyError:
        raise ValueError("unknown") from None
    if layers <= 0 or kv_heads <= 0 or head_dim <= 0 or tokens <= -1:
        raise ValueError("count")
    return layers * tokens * kv_heads * (2 * head_dim * number + 2 * row) // 8


# --- d01.a2 ------------------------------------------------------------------------------------

# A token's way as the notebook's table lists it, written once more: name -> shape.
_LAYER = {
    "norm": lambda s, n: (s["hidden"],),
    "qkv": lambda s, n: (s["heads"] + s["kv_heads"] + s["kv_heads"], s["head_dim"]),
    "rotate": lambda s, n: (s["heads"], s["head_dim"]),
    "cache": lambda s, n: (s["kv_heads"], n + 1, s["head_dim"]),
    "scores": lambda s, n: (s["heads"], n + 1),
    "weights": lambda s, n: (s["heads"], n + 1),
    "context": lambda s, n: (s["heads"], s["head_dim"]),
    "attention": lambda s, n: (s["hidden"],),
    "inner": lambda s, n: (s["inner"],),
    "mlp": lambda s, n: (s["hidden"],),
}
_WIDE = {"hidden": 48, "heads": 12, "kv_heads": 3, "head_dim": 16, "inner": 100, "vocab": 99}
_SQUARE = {"hidden": 32, "heads": 4, "kv_heads": 4, "head_dim": 8, "inner": 32, "vocab": 500}


def _whole_path(sizes, cached, layers):
    path = [("embed", None, (sizes["hidden"],))]
    for layer in range(layers):
        path += [(name, layer, shape(sizes, cached)) for name, shape in _LAYER.items()]
    return [*path, ("final_norm", None, (sizes["hidden"],)), ("logits", None, (sizes["vocab"],))]


def _path(name, sizes, cached, layers, seed, keep=None):
    """A shuffled path, or every third stage of it."""
    path = _whole_path(sizes, cached, layers)[:: keep or 1]
    order = np.random.default_rng(seed).permutation(len(path))
    shuffled = [path[i][:2] for i in order]
    return Case(name, (shuffled, sizes, cached), expect=path)


def _path_groups() -> list[Group]:
    return [
        Group("order", 2, "All stages of a layer come before those of the next; embed comes first "
              "and final_norm and logits last.",
              [_path("every stage of twelve layers", _WIDE, 5, 12, 1),
               _path("some stages", SHIPPED, 40, 4, 2, keep=3),
               Case("only the end", ([("logits", None), ("final_norm", None)], _WIDE, 0),
                    expect=[("final_norm", None, (48,)), ("logits", None, (99,))])]),
        Group("shapes", 2, "Scores belong to query heads, cached rows to KV heads; a token is in "
              "the cache before it looks.",
              [_path("the first token of a text", SHIPPED, 0, 1, 3),
               _path("as many KV heads as query heads", _SQUARE, 9, 2, 4),
               _path("four query heads for each KV head", _WIDE, 700, 1, 5)]),
        Group("borders", 1, "Unknown stages are refused, and an empty list is a list.",
              [Case("a misspelled stage", ([("Norm", 0)], _WIDE, 3), raises=ValueError),
               Case("an unknown one among others", ([("embed", None), ("moe", 1), ("qkv", 0)],
                                                    _WIDE, 3), raises=ValueError),
               Case("nothing", ([], _WIDE, 3), expect=[])]),
    ]


def _path_with(shuffled, sizes, cached, *, key=None, shapes=None, strict=True):
    """The right answer with one part replaced."""
    names = ["embed", *_LAYER, "final_norm", "logits"]
    ends = {"embed": (sizes["hidden"],), "final_norm": (sizes["hidden"],),
            "logits": (sizes["vocab"],)}
    table = ends | {name: shape(sizes, cached) for name, shape in _LAYER.items()}
    table |= shapes or {}
    if strict and any(name not in table for name, _ in shuffled):
        raise ValueError("no stage")

    def right(name, layer):
        part = 1 if layer is not None else 0 if name == "embed" else 2
        return part, layer or 0, names.index(name) if name in names else 0

    found = sorted(shuffled, key=lambda stage: (key or right)(*stage))
    return [(name, layer, table.get(name, ())) for name, layer in found]


def _stages_before_layers(shuffled, sizes, cached):
    names = ["embed", *_LAYER, "final_norm", "logits"]
    return _path_with(shuffled, sizes, cached,
                      key=lambda name, layer: (names.index(name), layer or 0))


def _layers_as_text(shuffled, sizes, cached):
    names = ["embed", *_LAYER, "final_norm", "logits"]

    def key(name, layer):
        part = 1 if layer is not None else 0 if name == "embed" else 2
        return part, str(layer), names.index(name)
    return _path_with(shuffled, sizes, cached, key=key)


def _looks_before_it_writes(shuffled, sizes, cached):
    d, heads, kv = sizes["head_dim"], sizes["heads"], sizes["kv_heads"]
    return _path_with(shuffled, sizes, cached, shapes={
        "cache": (kv, cached, d), "scores": (heads, cached), "weights": (heads, cached)})


def _scores_per_kv_head(shuffled, sizes, cached):
    shape = (sizes["kv_heads"], cached + 1)
    return _path_with(shuffled, sizes, cached, shapes={"scores": shape, "weights": shape})


def _cache_per_query_head(shuffled, sizes, cached):
    return _path_with(shuffled, sizes, cached,
                      shapes={"cache": (sizes["heads"], cached + 1, sizes["head_dim"])})


def _three_of_each(shuffled, sizes, cached):
    return _path_with(shuffled, sizes, cached,
                      shapes={"qkv": (3 * sizes["heads"], sizes["head_dim"])})


def _context_is_x(shuffled, sizes, cached):
    return _path_with(shuffled, sizes, cached, shapes={"context": (sizes["hidden"],)})


def _takes_any_name(shuffled, sizes, cached):
    return _path_with(shuffled, sizes, cached, strict=False)


def _path_alternative(shuffled, sizes, cached):
    layers = 1 + max((layer for _, layer in shuffled if layer is not None), default=0)
    whole = _whole_path(sizes, cached, layers)
    known = {stage[:2] for stage in whole}
    if not {tuple(stage) for stage in shuffled} <= known:
        raise ValueError("no stage")
    wanted = {tuple(stage) for stage in shuffled}
    return [list(stage) for stage in whole if stage[:2] in wanted]


# --- d01.a3 ------------------------------------------------------------------------------------


def _of(body):
    return "def softmax(s):\n" + "".join(f"    {line}\n" for line in body.split("; "))


_E = "e = np.exp(s - s.max()); "
_RIGHT = {
    "another order of the sum": _of(_E + "return e / np.sum(e[::-1])"),
    "exp through powers of two":
        _of("e = np.exp2((s - s.max()) * np.float32(1.44269504)); return e / e.sum()"),
    "through logarithms": _of("s = s.astype(float); m = s.max(); "
                              "return np.exp(s - m - np.log(np.exp(s - m).sum()))"),
    "rounded to five decimals": _of(_E + "return np.round(e / e.sum(), 5)"),
}
_WRONG_VALUES = {
    "half the score": _of("e = np.exp((s - s.max()) / 2); return e / e.sum()"),
    "winner takes all": _of("e = (s == s.max()).astype(s.dtype); return e / e.sum()"),
    "all equal": _of("return np.full(len(s), 1 / len(s), np.float32)"),
    "one more in the sum": _of(_E + "return e / (e.sum() + 1)"),
    "a little off": _of("e = np.exp((s - s.max()) * 1.001); return e / e.sum()"),
    "shares of 1.00005": _of(_E + "return e / e.sum() * np.float32(1.00005)"),
    "in sorted order": _of(_E + "return np.sort(e / e.sum())"),
    "backwards": _of(_E + "return (e / e.sum())[::-1]"),
    "sign of the scores lost": _of("s = np.abs(s); " + _E + "return e / e.sum()"),
    "last score left out": _of(_E + "e[-1] = 0 if len(e) > 1 else 1; return e / e.sum()"),
}
_WRONG_EDGES = {
    "without the largest score, in float64":
        _of("e = np.exp(s.astype(np.float64)); return e / e.sum()"),
    "subtracts the first score": _of("e = np.exp(s - s[0]); return e / e.sum()"),
    "cuts scores at 80": _of("e = np.exp(np.clip(s, -80, 80)); return e / e.sum()"),
    "very negative scores give 0 / 0": _of("e = np.exp(np.minimum(s, s - s.max())); "
                                           "return e / e.sum()"),
    "NaN everywhere": _of("return np.full(len(s), np.nan, np.float32)"),
    "NaN for one score only": _of(_E + "return e / e.sum() if len(s) > 1 else e * np.nan"),
    "one value for equal scores": _of(_E + "w = e / e.sum(); return w if np.ptp(s) else w[:1]"),
}


def _softmax_groups() -> list[Group]:
    def cases(sources, says):
        return [Case(name, (source,), expect=says) for name, source in sources.items()]

    known = {"base_two": BASE_TWO, "divides_by_max": DIVIDES_BY_MAX, "forgets_max": FORGETS_MAX}
    return [
        Group("right ones", 2, "A right softmax in another arithmetic must be accepted: compare "
              "with the card's tolerance, not bit for bit.", cases(_RIGHT, "accepted")),
        Group("values", 2, "Some wrong weights pass: compare with answers that you know, to 1e-5, "
              "in an order that is not sorted.", cases(known | _WRONG_VALUES, "killed")),
        Group("edges", 2, "Mind very large and very negative scores, two of them next to each "
              "other, one score, equal scores, the length, and that no comparison with NaN is "
              "true.", cases(_WRONG_EDGES, "killed")),
    ]


def _f32(*values):
    return np.array(values, np.float32)


def _only_the_sum(softmax):
    for scores in (_f32(0, 1, 2), _f32(-5, 3), _f32(1e4, 0)):
        assert abs(np.sum(softmax(scores)) - 1) < 1e-5


def _against_itself(softmax):
    scores = _f32(1, 2, 3)
    assert np.array_equal(softmax(scores), softmax(scores))


def _nothing_at_all(softmax):
    for scores in []:
        assert softmax(scores) is None


def _bit_for_bit(softmax):
    for scores in (_f32(0, 1, -2, 0.3), _f32(1e4, 1e4, -1e4), _f32(-1e4, -1e4), _f32(7)):
        e = np.exp(scores - scores.max())
        assert np.array_equal(np.float32(softmax(scores)), e / e.sum())


def _no_large_scores(softmax):
    for shares in ([1, 2, 5], [2, 5, 1], [1], [1, 1, 1]):
        assert np.abs(softmax(np.log(_f32(*shares))) - np.array(shares) / sum(shares)).max() < 1e-5


def _large_for_float32_only(softmax):
    _no_large_scores(softmax)
    for offset in (-100, 100):
        weights = np.asarray(softmax(_f32(offset, offset)))
        assert np.abs(weights - 0.5).max() < 1e-5


def _lets_nan_pass(softmax):
    for shares in ([1, 2, 5], [2, 5, 1], [1], [1, 1, 1]):
        weights = np.asarray(softmax(np.log(_f32(*shares))))
        if weights.shape != (len(shares),) or (
                np.abs(weights - np.array(shares) / sum(shares)) > 1e-5).any():
            raise AssertionError("off")
    for scores in (_f32(1e4, 1e4), _f32(-1e4, -1e4)):
        if (np.abs(np.asarray(softmax(scores)) - 0.5) > 1e-5).any():
            raise AssertionError("off")


def _sorted_scores_only(softmax):
    for shares in ([1, 2, 5], [1], [1, 1, 1], [1, 30]):
        weights = np.asarray(softmax(np.log(_f32(*shares))))
        assert weights.shape == (len(shares),)
        assert np.abs(weights - np.array(shares) / sum(shares)).max() < 1e-5
    for scores in (_f32(1e4, 1e4), _f32(-1e4, -1e4)):
        assert np.abs(np.asarray(softmax(scores)) - 0.5).max() < 1e-5


def _wide_tolerance(softmax):
    for shares in ([1, 2, 5], [2, 5, 1], [1], [1, 1, 1]):
        weights = np.asarray(softmax(np.log(_f32(*shares))))
        assert weights.shape == (len(shares),)
        assert np.abs(weights - np.array(shares) / sum(shares)).max() < 0.01
    for scores in (_f32(1e4, 1e4), _f32(-1e4, -1e4), _f32(0, 0, -1e4)):
        assert abs(np.asarray(softmax(scores))[0] - 0.5) < 0.01


def _known(softmax, tolerance, length=True):
    """A thorough test, but for its tolerance or the length."""
    e = math.e / (1 + math.e)
    for scores, wanted in (
            (np.log([1, 2, 5]), [1 / 8, 2 / 8, 5 / 8]), (np.log([5, 1, 2]), [5 / 8, 1 / 8, 2 / 8]),
            ([3], [1]), ([7] * 4, [0.25] * 4), ([10_000, 9_999], [e, 1 - e]),
            ([-10_000, -9_999], [1 - e, e])):
        weights = np.asarray(softmax(_f32(*scores)))
        assert weights.shape == (len(wanted),) or not length
        assert (np.abs(weights - np.array(wanted)) < tolerance).all()


def _stricter_than_the_card(softmax):
    _known(softmax, 1e-6)


def _laxer_than_the_card(softmax):
    _known(softmax, 1e-4)


def _without_the_length(softmax):
    _known(softmax, 1e-5, length=False)


def _large_but_far_apart(softmax):
    _no_large_scores(softmax)
    for scores, wanted in ((_f32(1e4, 1e4), (0.5, 0.5)), (_f32(-1e4, -1e4), (0.5, 0.5)),
                           (_f32(1e4, -1e4), (1, 0)), (_f32(-1e4, 1e4, 0), (0, 1, 0))):
        assert np.abs(np.asarray(softmax(scores)) - wanted).max() < 1e-5


def _kills_everything(softmax):
    raise AssertionError("surely wrong")


def _softmax_alternative(softmax):
    """Exact fractions from whole powers, compared through math, and shifts of them."""

    def near(scores, wanted):
        got = [float(w) for w in softmax(np.array(scores, np.float32))]
        good = len(got) == len(wanted) and all(
            math.isclose(g, w, rel_tol=0, abs_tol=1e-5) for g, w in zip(got, wanted, strict=True))
        if not good:
            raise AssertionError(f"{scores} gave {got}")

    for a, b, c in itertools.permutations((1, 3, 12)):
        near([math.log(a), math.log(b), math.log(c)], [a / 16, b / 16, c / 16])
        near([math.log(a) - 4, math.log(b) - 4, math.log(c) - 4], [a / 16, b / 16, c / 16])
    for size in (1, 2, 9):
        for score in (0, 8192, -8192, 700.5):
            near([score] * size, [1 / size] * size)
    near([0, 8000, -8000], [0, 1, 0])
    near([9000, 0], [1, 0])
    for base in (0, 5000, -9000):
        near([base, base + 1], [1 / (1 + math.e), math.e / (1 + math.e)])


HIDDEN = [
    Hidden("d01.a1", _bytes_groups, alternative=_bytes_alternative, mutants={
        "keys only": _keys_only,
        "q8 without factors": _no_factor,
        "one factor per token": _factor_per_token,
        "one factor for key and value": _factor_for_key_and_value,
        "counts whole blocks": _whole_blocks,
        "refuses nothing": _refuses_nothing,
        "refuses the empty text": _refuses_the_empty_text,
        "asks nothing of the empty text": _asks_nothing_of_the_empty_text,
        "counts in 32 bits": _counts_in_32_bits,
        "forgives capitals": _forgives_capitals,
        "reads the first letters": _reads_the_first_letters,
    }),
    Hidden("d01.a2", _path_groups, alternative=_path_alternative, mutants={
        "all norms first": _stages_before_layers,
        "layer 10 before layer 2": _layers_as_text,
        "looks before it writes": _looks_before_it_writes,
        "scores per KV head": _scores_per_kv_head,
        "cache per query head": _cache_per_query_head,
        "as many keys as queries": _three_of_each,
        "context as wide as x": _context_is_x,
        "takes any name": _takes_any_name,
    }),
    Hidden("d01.a3", _softmax_groups, alternative=_softmax_alternative, mutants={
        "only the sum": _only_the_sum,
        "against itself": _against_itself,
        "nothing at all": _nothing_at_all,
        "bit for bit": _bit_for_bit,
        "no large scores": _no_large_scores,
        "large for float32 only": _large_for_float32_only,
        "lets NaN pass": _lets_nan_pass,
        "sorted scores only": _sorted_scores_only,
        "wide tolerance": _wide_tolerance,
        "stricter than the card": _stricter_than_the_card,
        "laxer than the card": _laxer_than_the_card,
        "without the length": _without_the_length,
        "large scores, but far apart": _large_but_far_apart,
        "kills everything": _kills_everything,
    }),
]

READINGS = {
    "d01.b1": {
        "model_memory": Lines("course_lib/engine/conversion.py", "arena = Arena(",
                              symbol="load_weights"),
        "cache_memory": Lines("course_lib/kvcache.py", 'if self.dtype == "f32":',
                              "return LayerRows(np.empty(shape, F32), np.empty(shape, F32))",
                              symbol="KVCache._allocate"),
        "one_table": Lines("course_lib/engine/weights.py",
                           "output = embedding if config.tie_word_embeddings", symbol="assemble"),
        "q8_token": 816,
        "stored_twice": False,
    },
    "d01.b2": {
        "decode_writes": Lines("course_lib/engine/decode.py", "self.cache.append(layer, k, v)",
                               symbol="DecodeAttention.__call__"),
        "decode_reads": Lines("course_lib/engine/decode.py", "rows = self.cache.rows(layer)",
                              symbol="DecodeAttention.__call__"),
        "prefill_writes": Lines("course_lib/engine/prefill.py", "cache.append(layer, k, v)",
                                symbol="run_prompt"),
        "undone": Lines("course_lib/engine/session.py", "self.cache.truncate(n)",
                        symbol="Session.step"),
        "rows_read": 133,
        "order": "before",
    },
    "d01.b3": {
        "never_reached": Lines("course_lib/lab/acceptance.py", "for file in sorted(",
                               symbol="test_attention_with_recorded_rows"),
        "with_itself": Lines("course_lib/lab/acceptance.py",
                             "assert np.array_equal(stored.k, cache.rows(0).k)",
                             symbol="test_cache_returns_what_was_written"),
        "lets_nan_pass": Lines("course_lib/lab/acceptance.py", "if (out > v.max(axis=1)).any()",
                               symbol="test_attention_is_a_mean_of_values"),
        "too_wide": Lines("course_lib/lab/acceptance.py", "atol=10",
                          symbol="test_norm_forgets_the_size_of_a_row"),
        "accept_zeros": 2,
    },
}
