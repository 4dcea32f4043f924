"""Prefill attention and antidiagonal scores by their definitions, on every variant."""

from __future__ import annotations

import math
import os

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import kernels_pyx
from course_lib import attention, backend
from course_lib.prefill.lse import merge_into
from course_lib.prefill.scores import softmax_fuse_block_sum
from course_lib.prefill_attention import attend_prefixes, causal_attention
from course_lib.sparse_prefill import sparse_prefill_attention
from tests.sharing import shared_among

F32 = np.float32
U = 2.0**-24
pytestmark = pytest.mark.skipif(
    not kernels_pyx.VARIANTS and os.environ.get("COURSE_REQUIRE_KERNELS") != "1",
    reason="the kernels are not compiled here",
)
FAST = tuple(v for v in kernels_pyx.VARIANTS if v != "portable-baseline")
variants = pytest.mark.parametrize("variant", FAST or ("portable",))
best = next(iter(FAST), "portable")


def made(num_heads=4, num_kv_heads=2, rows=29, n=70, d=32, seed=0, spread=1.0):
    rng = np.random.default_rng(seed)
    q = (rng.standard_normal((num_heads, rows, d)) * spread).astype(F32)
    k, v = rng.standard_normal((2, num_kv_heads, n, d)).astype(F32)
    return q, k, v, rng.integers(0, n + 1, rows)


def prefill(variant, q, k, v, visible, importance=None, first=0):
    out = np.full(q.shape, np.nan, F32)
    kernel = kernels_pyx.kernels(variant)["prefill_attention"]
    kernel(q, k, v, np.asarray(visible, np.int64), out, importance, first)
    return out


def bits(a):
    return np.ascontiguousarray(a).view(np.uint32)


def same(a, b):
    return np.array_equal(bits(a), bits(b))


def fma(a, b, c):
    """a * b + c rounded once: the product of two float32 is exact in float64, and of the sum the
    part that float64 drops decides where float32 would see a tie."""
    product = a.astype(np.float64) * b.astype(np.float64)
    c = c.astype(np.float64)
    total = product + c
    part = total - product
    lost = (product - (total - part)) + (c - part)
    # Round to odd: an inexact sum is never one that float32 takes for a tie.
    even = (total.view(np.int64) & 1) == 0
    towards = np.where(lost > 0, np.inf, -np.inf)
    return np.where((lost != 0) & even, np.nextafter(total, towards), total).astype(F32)


def halves(lanes):
    """Sum of 16 lanes: lanes i and i + 8, then i and i + 4, ..."""
    for half in (8, 4, 2, 1):
        lanes = lanes[..., :half] + lanes[..., half : 2 * half]
    return lanes[..., 0]


def padded(a):
    """Zeros behind the last axis up to a multiple of 16."""
    return np.pad(a, [(0, 0)] * (a.ndim - 1) + [(0, -a.shape[-1] % 16)])


def dot(q, rows):
    """16 sums, lane j over the elements j, j + 16, ..., then added by halves."""
    q, rows = padded(q), padded(rows)
    lanes = np.zeros((*rows.shape[:-1], 16), F32)
    for i in range(0, q.shape[-1], 16):
        lanes = fma(np.broadcast_to(q[i : i + 16], lanes.shape), rows[..., i : i + 16], lanes)
    return halves(lanes)


def exp(x):
    out = np.empty_like(x)
    kernels_pyx.kernels("portable")["exp"](x, out)
    return out


def literal_row(q, k, v):
    """One query over the rows k, v [n, d], as kernels_pyx/c/prefill.c states it."""
    scores = dot(q, k) * (F32(1) / np.sqrt(F32(q.size)))
    e = exp(scores - scores.max())
    lanes = np.zeros(16, F32)
    for chunk in padded(e).reshape(-1, 16):
        lanes = lanes + chunk
    weights = e / halves(lanes)
    out = np.zeros(v.shape[1], F32)
    for w, row in zip(weights, v, strict=True):
        out = fma(np.broadcast_to(w, row.shape), row, out)
    return out, weights


@variants
@pytest.mark.parametrize("d", [1, 15, 16, 17, 40, 64, 128])
def test_every_row_is_its_literal_definition(variant, d):
    q, k, v, visible = made(2, 1, 9, 75, d, seed=d)
    visible[:4] = 75, 0, 1, 64
    importance = np.random.default_rng(d).uniform(0, 1, (2, 75)).astype(F32)
    sums = importance.copy()
    got = prefill(variant, q, k, v, visible, importance, 2)
    for h in range(2):
        for i, n in enumerate(visible):
            if n == 0:
                assert same(got[h, i], np.zeros(d, F32))
                continue
            want, weights = literal_row(q[h, i], k[0, :n], v[0, :n])
            assert same(got[h, i], want), (h, i)
            if i >= 2:
                sums[h, :n] += weights
    assert same(importance, sums)


@variants
@pytest.mark.parametrize("shape", [(4, 2, 37, 301, 128), (2, 2, 70, 130, 64), (3, 1, 8, 33, 20),
                                   (6, 2, 1, 1, 16), (1, 1, 30, 64, 8)])
def test_every_row_is_the_decode_kernel_s_two_pass(variant, shape):
    for spread in (1, 20):
        q, k, v, visible = made(*shape, seed=sum(shape), spread=spread)
        visible[-1] = shape[3]
        got = prefill(variant, q, k, v, visible)
        for i, n in enumerate(visible):
            if n:
                want = np.empty((len(q), q.shape[2]), F32)
                kernels_pyx.kernels(variant)["two_pass"](
                    np.ascontiguousarray(q[:, i]), k[:, :n], v[:, :n], None, None, None, 32, want)
                assert same(got[:, i], want), (i, n)


@settings(max_examples=40)
@given(group=st.integers(1, 3), kv=st.integers(1, 3), rows=st.integers(0, 60),
       n=st.integers(0, 200), d=st.integers(1, 70), seed=st.integers(0, 99), data=st.data())
def test_any_shape_has_the_same_bits_on_every_variant_and_any_number_of_threads(
        group, kv, rows, n, d, seed, data):
    q, k, v, visible = made(group * kv, kv, rows, n, d, seed)
    if data.draw(st.booleans(), label="ascending"):
        visible.sort()
    first = data.draw(st.integers(0, rows + 1))
    results = []
    for threads, names in ((1, FAST), (3, FAST[:1])):
        with shared_among(threads):
            for variant in names:
                importance = np.zeros((group * kv, n), F32)
                results.append((prefill(variant, q, k, v, visible, importance, first), importance))
    for out, importance in results:
        assert np.isfinite(out).all()
        assert same(out, results[0][0]) and same(importance, results[0][1])
    counted = group * kv * np.count_nonzero(visible[first:])
    assert results[0][1].sum(dtype=float) == pytest.approx(counted, rel=1e-5)


@variants
@pytest.mark.parametrize("n", [1, 23, 24, 64, 129, 200])
def test_it_equals_the_numpy_definition_within_roundings(variant, n):
    """A score of d products is off by at most (d + 6) u sum|q||k| / sqrt(d) = e on each side, so a
    weight by a factor of exp(+-4e), and the sums over n tokens by n u each."""
    q, k, v, _ = made(4, 2, n, n, 64, seed=n, spread=2)
    visible = np.arange(1, n + 1)
    want, sums = np.empty_like(q), np.zeros((4, n), F32)
    got_sums = np.zeros((4, n), F32)
    with backend.using("numpy"):
        rows = attention.check_rows(q, k, v)
        attend_prefixes(q, rows, visible, want, sums, 0)
    got = prefill(variant, q, k, v, visible, got_sums)
    for h in range(4):
        e = 70 * U * (np.abs(q[h]).max() * np.abs(k[h // 2]).sum(axis=1).max()) / 8
        slack = math.expm1(4 * e) + (4 * n + 40) * U
        assert np.abs(got[h] - want[h]).max() <= slack * np.abs(v[h // 2]).max()
        assert (np.abs(got_sums[h] - sums[h]) <= slack * sums[h] + 1e-30).all()


@variants
def test_a_prompt_may_be_cut_anywhere(variant):
    q, k, v, _ = made(4, 2, 150, 150, 64)
    with backend.using(variant):
        whole = causal_attention(q, k, v)
        for cuts in ((0, 1, 150), (0, 24, 25, 100, 150), tuple(range(0, 151, 6))):
            parts = [causal_attention(q[:, a:b], k, v, start=a)
                     for a, b in zip(cuts, cuts[1:], strict=False)]
            assert same(np.concatenate(parts, axis=1), whole)


@variants
@pytest.mark.parametrize("options", [{}, {"group": 8}, {"minibatch": 100}])
def test_sparse_prefill_on_the_kernel(variant, options):
    q, k, v, _ = made(4, 2, 330, 330, 32, seed=3)
    results = []
    for name in (variant, "numpy"):
        with backend.using(name):
            importance = np.zeros(330, F32)
            out, trace = sparse_prefill_attention(q, k, v, k_blocks=2, importance=importance,
                                                  **options)
        results.append((out, importance, trace))
    (out, importance, trace), (want, want_importance, want_trace) = results
    assert np.array_equal(trace.visible, want_trace.visible)
    assert not out[~trace.visible].any()
    assert np.allclose(out, want, rtol=1e-4, atol=1e-5)
    assert np.allclose(importance, want_importance, rtol=1e-4, atol=1e-5)


@variants
def test_views_of_a_longer_cache_and_read_only_arrays(variant):
    q, k, v, visible = made()
    want = prefill(variant, q, k, v, visible)
    cache = np.full((2, 2, 99, 32), np.nan, F32)
    cache[0, :, :70], cache[1, :, :70] = k, v
    cache.flags.writeable = q.flags.writeable = False
    assert same(prefill(variant, q, cache[0, :, :70], cache[1, :, :70], visible), want)


@variants
@pytest.mark.parametrize("bad", [np.nan, np.inf, 3e38])
@pytest.mark.parametrize("what", ["q", "k", "v"])
def test_numbers_that_are_not_finite_change_nothing(variant, bad, what):
    arrays = dict(zip(("q", "k", "v"), made(4, 2, 30, 70, 16)[:3], strict=True))
    visible = np.arange(41, 71)
    arrays[what][1, -1, 3] = bad
    if what == "v" and bad == 3e38:
        arrays["v"][1, -2:, 3] = bad
        arrays["k"][1], arrays["v"][1, :, 3] = 0, F32(3.4028235e38)  # a mean of largest floats
        visible[:] = 69
    importance, out = np.ones((4, 70), F32), np.ones((4, 30, 16), F32)
    arguments = (*arrays.values(), visible, out, importance, 0)
    kernel = kernels_pyx.kernels(variant)["prefill_attention"]
    try:
        kernel(*arguments)
    except ValueError as error:
        assert "not finite" in str(error)
        assert (importance == 1).all() and (out == 1).all()
    else:
        assert np.isfinite(out).all() and bad == 3e38


@variants
def test_what_no_row_reads_may_hold_anything(variant):
    q, k, v, visible = made(n=70)
    visible = np.minimum(visible, 40)
    want = prefill(variant, q, k, v, visible)
    k[:, 40:], v[:, 40:] = np.nan, np.inf
    assert same(prefill(variant, q, k, v, visible), want)


def good():
    q, k, v, visible = made(4, 2, 5, 9, 8)
    return {"q": q, "k": k, "v": v, "visible": visible, "out": np.zeros_like(q),
            "importance": np.zeros((4, 9), F32), "importance_from_row": 0}


WRONG = [
    ("q", lambda a: a.astype(float), TypeError, "q must be a float32 array of 3 axes"),
    ("q", lambda a: a[:3], ValueError, "the 3 heads of q must divide over the 2 of k"),
    ("q", lambda a: a[:0], ValueError, "the 0 heads of q"),
    ("q", lambda a: a[:, :, :0], ValueError, "q must have at least one value"),
    ("q", lambda a: a[:, ::2], ValueError, "q must be C-contiguous"),
    ("k", lambda a: a[:, :, :4].copy(), ValueError, "k must have shape"),
    ("k", lambda a: a[:, ::2], ValueError, "k must be C-contiguous"),
    ("v", lambda a: a[:, :8], ValueError, r"v must have shape \(2, 9, 8\) like k"),
    ("v", lambda a: a[0], ValueError, "v must be .* 3 axes"),
    ("visible", lambda a: a[:4].copy(), ValueError, "visible must have shape"),
    ("visible", lambda a: a.astype(np.int32), TypeError, "visible must be a int64 array"),
    ("visible", lambda a: np.array([0, 1, 10, 3, 4]), ValueError, "0 to 9.* row 2 has 10"),
    ("visible", lambda a: np.array([0, 1, -1, 3, 4]), ValueError, "row 2 has -1"),
    ("out", lambda a: a[:, :4].copy(), ValueError, "out must have shape"),
    ("importance", lambda a: a[:2], ValueError, "importance must have shape"),
    ("importance", lambda a: a[0], ValueError, "importance must be .* 2 axes"),
    ("importance_from_row", lambda a: -1, ValueError, "importance_from_row"),
    ("importance_from_row", lambda a: 1.5, TypeError, "importance_from_row"),
]


@pytest.mark.parametrize(("name", "spoil", "error", "message"), WRONG)
def test_wrong_arguments_are_named(name, spoil, error, message):
    arguments = good()
    arguments[name] = spoil(arguments[name])
    with pytest.raises(error, match=message):
        kernels_pyx.kernels(best)["prefill_attention"](**arguments)
    assert not np.any(arguments["out"]) and not np.any(arguments["importance"])


# --- antidiagonal scores -------------------------------------------------------------------------


def antidiagonal(variant, q, k, stride):
    out = np.full((len(q), q.shape[1] // stride, k.shape[1] // stride), np.nan, F32)
    kernels_pyx.kernels(variant)["antidiagonal_scores"](q, k, stride, out)
    return out


@variants
@pytest.mark.parametrize("shape", [(2, 1, 12, 20, 5, 4), (4, 2, 32, 48, 16, 8), (1, 1, 3, 3, 7, 3),
                                   (3, 3, 70, 140, 16, 2), (2, 2, 5, 80, 9, 1)])
def test_antidiagonal_scores_are_their_definition(variant, shape):
    num_heads, num_kv_heads, q_rows, k_rows, d, stride = shape
    q, _, _, _ = made(num_heads, num_kv_heads, q_rows, k_rows, d)
    _, k, _, _ = made(num_heads, num_kv_heads, q_rows, k_rows, d, seed=1)
    got = antidiagonal(variant, q, k, stride)
    for h in range(num_heads):
        keys = k[h * num_kv_heads // num_heads].reshape(-1, stride * d)
        for m in range(q_rows // stride):
            long_query = q[h, m * stride : (m + 1) * stride][::-1].ravel()
            assert same(got[h, m], dot(long_query, keys))
            for n in range(k_rows // stride):
                want = sum(q[h, m * stride + stride - 1 - i].astype(float)
                           @ k[h * num_kv_heads // num_heads, n * stride + i].astype(float)
                           for i in range(stride))
                assert got[h, m, n] == pytest.approx(want, abs=1e-4)


@pytest.mark.parametrize("variant", FAST)
@pytest.mark.parametrize("threads", (2, 3, 8))
def test_threads_are_started_and_change_no_bit(variant, threads):
    q, k, v, visible = made(6, 3, 70, 150, 40)
    longer = made(6, 3, 72, 152, 40)[:2]
    results = []
    for count in (1, threads):
        importance = np.zeros((6, 150), F32)
        with shared_among(count, started=count > 1):
            out = prefill(variant, q, k, v, visible, importance, 5)
        with shared_among(count, started=count > 1):
            scores = antidiagonal(variant, *longer, 4)
        results.append((out, importance, scores))
    assert all(map(same, *results))


@settings(max_examples=30)
@given(group=st.integers(1, 3), kv=st.integers(1, 2), m=st.integers(0, 20), n=st.integers(0, 80),
       d=st.integers(1, 40), stride=st.integers(1, 9))
def test_antidiagonal_scores_have_the_same_bits_everywhere(group, kv, m, n, d, stride):
    q, k, _, _ = made(group * kv, kv, m * stride, n * stride, d)
    results = [antidiagonal(variant, q, k, stride) for variant in FAST]
    with shared_among(3):
        results.append(antidiagonal(best, q, k, stride))
    longer = [np.concatenate([x, x[:, ::-1], x], axis=1) for x in (q, k)]
    first = q.shape[1] * 2, k.shape[1] * 2
    views = [x[:, at:] for x, at in zip(longer, first, strict=True)]
    results += [antidiagonal(variant, *views, stride) for variant in FAST]
    assert all(same(result, results[0]) for result in results)


def test_antidiagonal_scores_refuse_what_does_not_fit():
    q, k, _, _ = made(4, 2, 12, 20, 8)
    kernel = kernels_pyx.kernels(best)["antidiagonal_scores"]
    out = np.zeros((4, 3, 5), F32)
    infinite = k.copy()
    infinite[1, 19, 7] = np.inf
    for arguments, message in (((q, k, 3, out), "stride must divide the 12 rows of q and the 20"),
                               ((q, k, 0, out), "stride"),
                               ((q[:3], k, 4, out), "3 heads"),
                               ((q, k[:, :, :7].copy(), 4, out), "k must have shape"),
                               ((q, k, 4, out[:, :, :4].copy()), "out must have shape"),
                               ((q, infinite, 4, out), "not finite")):
        with pytest.raises(ValueError, match=message):
            kernel(*arguments)
    assert not out.any()


# --- the mass of blocks --------------------------------------------------------------------------


def block_sums(variant, scores, size, rate=0.25, seen=None, causal_from=-1, rows=None):
    heads, m, n = scores.shape
    out = np.full((heads, -(-m // size), -(-n // size)), np.nan, F32)
    kernels_pyx.kernels(variant)["block_sums"](
        scores, size, rate, n if seen is None else seen, causal_from, *(rows or (0, m)), out)
    return out


def made_scores(heads, rows, columns, seed=0, spread=8.0):
    rng = np.random.default_rng(seed)
    return (spread * rng.standard_normal((heads, rows, columns))).astype(F32)


shapes = pytest.mark.parametrize("shape, size, options", [
    ((2, 12, 40), 4, {}), ((1, 7, 33), 16, {"causal_from": 26}), ((3, 9, 50), 8, {"seen": 37}),
    ((2, 16, 16), 8, {"causal_from": 0, "rows": (3, 13)}), ((1, 1, 1), 5, {}),
    ((1, 5, 70), 100, {"causal_from": 3}), ((1, 4, 300), 32, {"rows": (4, 4)})])


@variants
@shapes
def test_the_mass_of_blocks_is_its_definition(variant, shape, size, options):
    """A weight is off by 3 ulp of exp here and 4 there, a tile by its additions in two orders; what
    is divided and added in float64 adds one rounding to float32."""
    scores = made_scores(*shape)
    got = block_sums(variant, scores, size, **options)
    first, last = options.get("rows", (0, shape[1]))
    causal_from = options.get("causal_from", -1)
    start = max(causal_from, 0)
    with backend.using("numpy"):
        want = softmax_fuse_block_sum(
            scores, size, scale=0.25 / math.log(2), chunk_start=start, first_q=start + first,
            real_q_len=start + last, is_causal=causal_from >= 0, real_k_len=options.get("seen"))
    bound = 2 * (7 + 1 + 2 * size) * 2 * U
    np.testing.assert_allclose(got, want, rtol=bound, atol=1e-30)
    assert got.sum() == pytest.approx(shape[0] * (last - first), rel=1e-6)


@settings(max_examples=30)
@given(heads=st.integers(1, 3), rows=st.integers(0, 20), columns=st.integers(1, 90),
       size=st.integers(1, 40), seen=st.integers(1, 90), causal_from=st.integers(-1, 60))
def test_the_mass_of_blocks_has_the_same_bits_everywhere(heads, rows, columns, size, seen,
                                                         causal_from):
    scores = made_scores(heads, rows, columns)
    options = {"size": size, "seen": min(seen, columns), "causal_from": causal_from}
    results = [block_sums(variant, scores, **options) for variant in FAST]
    with shared_among(3):
        results.append(block_sums(best, scores, **options))
    assert all(same(result, results[0]) for result in results)


def test_threads_share_the_mass_of_blocks():
    scores = made_scores(2, 40, 60)
    with shared_among(2, started=True):
        shared = block_sums(best, scores, 8)
    assert same(shared, block_sums(best, scores, 8))


@variants
def test_the_mass_of_blocks_does_not_see_what_is_hidden(variant):
    """Columns behind `seen` and above the diagonal, and rows that do not count, change no bit."""
    scores = made_scores(1, 8, 24)
    want = block_sums(variant, scores, 4, seen=20, causal_from=10, rows=(2, 7))
    scores[:, :, 20:] = 1e30
    scores[:, :2] = scores[:, 7:] = -1e30
    scores[np.broadcast_to(np.arange(24) > np.arange(8)[:, None] + 10, scores.shape)] = 1e30
    assert same(block_sums(variant, scores, 4, seen=20, causal_from=10, rows=(2, 7)), want)


def test_the_mass_of_blocks_refuses_what_does_not_fit():
    scores, out = made_scores(2, 6, 10), np.zeros((2, 2, 3), F32)
    kernel = kernels_pyx.kernels(best)["block_sums"]
    right = {"scores": scores, "size": 4, "rate": 0.5, "seen": 10, "causal_from": -1,
             "first_row": 0, "last_row": 6, "out": out}
    infinite = scores.copy()
    infinite[1, 5, 9] = np.inf
    for wrong, message in (({"size": 0}, "size must be 1"), ({"rate": 0.0}, "rate must be above 0"),
                           ({"rate": 1e39}, "rate must be finite"), ({"seen": 0}, "seen must be 1"),
                           ({"seen": 11}, "seen must be 1 to 10"), ({"causal_from": -2}, "causal"),
                           ({"first_row": 7}, "first_row"), ({"last_row": 7}, "last_row"),
                           ({"out": out[:, :, :2].copy()}, "out must have shape"),
                           ({"scores": infinite}, "NaN or infinity"),
                           ({"scores": scores[:, :, :0].copy()}, "at least one column")):
        with pytest.raises(ValueError, match=message):
            kernel(**right | wrong)
    with pytest.raises(TypeError, match="float32"):
        kernel(**right | {"scores": scores.astype(float)})
    assert not out.any()


# --- merging parts -------------------------------------------------------------------------------


def made_parts(rows, d, seed=0):
    """Two parts with LSEs, some of them of rows without tokens."""
    rng = np.random.default_rng(seed)
    outs = rng.standard_normal((2, rows, d)).astype(F32)
    lse = 5 * rng.standard_normal((2, rows))
    lse[0, ::5], lse[1, 1::3] = -np.inf, -np.inf
    outs[0, ::5], outs[1, 1::3] = 0, 0
    return outs, lse


@variants
@pytest.mark.parametrize("rows, d", [(1, 1), (29, 40), (100, 64), (7, 130)])
def test_merged_parts_have_the_bits_of_numpy(variant, rows, d):
    (want, part), (want_lse, part_lse) = made_parts(rows, d)
    out, lse = want.copy(), want_lse.copy()
    with shared_among(2):
        kernels_pyx.kernels(variant)["merge_parts"](part, part_lse, out, lse)
    merge_into(want, want_lse, part, part_lse)
    assert same(out, want) and lse.tobytes() == want_lse.tobytes()


def test_merging_refuses_what_does_not_fit():
    (out, part), (lse, part_lse) = made_parts(6, 8)
    kernel, before = kernels_pyx.kernels(best)["merge_parts"], out.copy()
    right = {"part": part, "part_lse": part_lse, "out": out, "lse": lse}
    for wrong, message in (({"part_lse": part_lse[:5].copy()}, "part_lse must have shape"),
                           ({"out": out[:, :7].copy()}, "out must have shape"),
                           ({"lse": lse[:5].copy()}, "lse must have shape"),
                           ({"part": out}, "share memory"),
                           ({"part_lse": np.full(6, np.nan)}, "part_lse must not hold NaN"),
                           ({"lse": np.full(6, np.inf)}, "lse must not hold NaN"),
                           ({"part": part[:, :0].copy()}, "at least one value")):
        with pytest.raises(ValueError, match=message):
            kernel(**right | wrong)
    with pytest.raises(TypeError, match="float64"):
        kernel(**right | {"lse": lse.astype(F32)})
    assert same(out, before)


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_a_bad_lse_is_refused_wherever_it_is_and_nothing_is_written(bad):
    (out, part), (lse, part_lse) = made_parts(6, 8)
    kernels, before = kernels_pyx.kernels(best), out.copy()
    for row in range(6):
        spoilt = [np.where(np.arange(6) == row, bad, each) for each in (lse, part_lse)]
        for arguments in ((part, part_lse, out, spoilt[0]), (part, spoilt[1], out, lse)):
            with pytest.raises(ValueError, match="lse must not hold NaN or"):
                kernels["merge_parts"](*arguments)
        with pytest.raises(ValueError, match="lse must not hold NaN or"):
            kernels["partial_attention"](part[None], part[None], part[None], np.full(6, 6), 4, None,
                                         out[None], spoilt[0][None])
    assert same(out, before)
