"""Attention kernels against a float64 oracle with derived bounds, their borders and errors."""

import math
import tracemalloc

import numpy as np
import pytest

import kernels_pyx
from course_lib import backend
from course_lib.attention import (
    causal_attention,
    kv_head,
    online,
    online_softmax,
    single_pass_q8,
    softmax,
    two_pass,
)
from course_lib.quant import quantize_blocks, quantize_rows

F32 = np.float32
U = 2.0**-24  # unit roundoff of float32
LENGTHS = (1, 2, 31, 32, 33, 64, 95, 257)


def made(num_heads=4, num_kv_heads=2, n=70, d=32, seed=0, spread=1.0):
    rng = np.random.default_rng(seed)
    q = (rng.standard_normal((num_heads, d)) * spread).astype(F32)
    k, v = rng.standard_normal((2, num_kv_heads, n, d)).astype(F32)
    return q, k, v


def quantized(k, v):
    (kq, k_scale), (vq, v_scale) = quantize_rows(k), quantize_rows(v)
    return kq, vq, k_scale, v_scale


def oracle(q, k, v, k_scale=None, v_scale=None):
    """Output in float64, and a bound on what float32 may differ from it.

    A score of d products, two scalings and a subtraction is off by at most (d + 6) u sum|q||k| /
    sqrt(d) = e, so a weight by a factor of exp(+-2e), and the sums over n tokens by n u each.
    """
    q, k, v = (a.astype(np.float64) for a in (q, k, v))
    if k_scale is not None:
        k = k * k_scale[..., None].astype(np.float64)
        v = v * v_scale[..., None].astype(np.float64)
    num_heads, d = q.shape
    n = k.shape[1]
    out, bound = np.empty_like(q), np.empty_like(q)
    for h in range(num_heads):
        kh = int(h // (num_heads / k.shape[0]))
        scores = k[kh] @ q[h] / math.sqrt(d)
        weights = np.exp(scores - scores.max())
        weights /= weights.sum()
        off = (d + 6) * U * (np.abs(k[kh]) @ np.abs(q[h])).max() / math.sqrt(d)
        out[h] = weights @ v[kh]
        bound[h] = (math.expm1(2 * off) + (2 * n + 16) * U) * (weights @ np.abs(v[kh])) + 1e-30
    return out, bound


@pytest.mark.parametrize("kernel", [two_pass, online])
@pytest.mark.parametrize("n", LENGTHS)
@pytest.mark.parametrize("heads", [(4, 2), (1, 1), (6, 2), (3, 3), (5, 1)])
def test_float_rows_equal_the_oracle_within_its_bound(kernel, n, heads):
    for spread in (1, 30):
        q, k, v = made(*heads, n, seed=n, spread=spread)
        want, bound = oracle(q, k, v)
        got = kernel(q, k, v)
        assert got.dtype == F32 and got.shape == q.shape
        assert (np.abs(got - want) <= bound).all()


@pytest.mark.parametrize("kernel", [two_pass, online])
@pytest.mark.parametrize("n", LENGTHS)
def test_q8_rows_equal_the_oracle_within_its_bound(kernel, n):
    q, k, v = made(n=n, seed=n)
    k[1] *= 7  # scales must differ between heads and rows to matter
    v[:, ::2] *= 5
    rows = quantized(k, v)
    want, bound = oracle(q, *rows)
    got = kernel(q, *rows)
    assert got.dtype == F32
    assert (np.abs(got - want) <= bound).all()


def test_query_head_h_reads_kv_head_h_times_nkv_over_nh():
    assert [kv_head(h, 6, 2) for h in range(6)] == [0, 0, 0, 1, 1, 1]
    assert [kv_head(h, 8, 8) for h in range(8)] == list(range(8))
    q, k, _ = made(6, 2)
    v = np.broadcast_to(np.array([10, 20], F32)[:, None, None], k.shape)
    rows = quantized(k, v)
    for out in (two_pass(q, k, v), online(q, k, v), two_pass(q, *rows),
                single_pass_q8(q, rows[0], rows[2], rows[1], rows[3]),
                causal_attention(np.repeat(q[:, None], 3, 1), k, v)[:, 2]):
        assert np.allclose(out[:3], 10, atol=1e-4) and np.allclose(out[3:], 20, atol=1e-4)


def test_scores_that_overflow_exp_are_safe_because_the_maximum_is_subtracted():
    q, k, v = made(1, 1, 3, 4)
    k[0] = np.array([[0] * 4, [1] * 4, [2] * 4])
    q[0] = 1e4
    for kernel in (two_pass, online):
        assert np.array_equal(kernel(q, k, v)[0], v[0, 2])


def test_online_meets_rising_falling_and_equal_scores():
    q, k, v = made(1, 1, 64, 32, seed=3)
    order = np.argsort(k[0] @ q[0])
    for rows in (order, order[::-1], np.zeros(64, int)):
        want, bound = oracle(q, k[:, rows], v)
        assert (np.abs(online(q, k[:, rows], v) - want) <= bound).all()


def test_online_softmax_skips_masked_tokens():
    _, _, v = made(1, 1, 5, 8)
    scores = np.array([-np.inf, 1.0, -np.inf, 3.0, -np.inf], F32)
    seen = np.isfinite(scores)
    assert np.array_equal(online_softmax(scores, v[0]), online_softmax(scores[seen], v[0][seen]))
    masked = online_softmax(np.full(5, -np.inf, F32), v[0])
    assert masked.dtype == F32 and np.array_equal(masked, np.zeros(8))
    assert np.array_equal(online_softmax(np.empty(0, F32), v[0, :0]), np.zeros(8))


def test_softmax_masks_normalises_and_can_work_in_place():
    scores = np.array([[0, 0, -np.inf], [88, 89, -3e4]], F32)
    before = scores.copy()
    weights = softmax(scores)
    assert weights.dtype == F32 and np.array_equal(scores, before)
    assert weights[0].tolist() == [0.5, 0.5, 0]
    assert weights[1, 1] == pytest.approx(1 / (1 + math.exp(-1)), rel=1e-6) and weights[1, 2] == 0
    assert softmax(scores, out=scores) is scores and np.array_equal(scores, weights)


query_scales_of_both_kinds = pytest.mark.parametrize("query_scales", ["group", "row"])


def single_pass_oracle(q, kq, k_scale, vq, v_scale, query_scales="group"):
    """Float64 attention after the one rounding of q that belongs to the single pass."""
    group = 32 if query_scales == "group" else q.shape[-1]
    q_int, q_scale = quantize_blocks(q, group)
    rounded = q_int * np.repeat(q_scale.astype(np.float64), group, axis=-1)
    return oracle(rounded, kq, vq, k_scale, v_scale)


@query_scales_of_both_kinds
@pytest.mark.parametrize("n", LENGTHS)
@pytest.mark.parametrize("d", [32, 64, 96])
def test_single_pass_is_exact_but_for_the_rounding_of_q(n, d, query_scales):
    for order in (slice(None), slice(None, None, -1)):
        q, k, v = made(n=n, d=d, seed=n + d, spread=3)
        q[:, :32] *= 20  # each 32 values have their own scale
        rank = np.argsort(k[0] @ q[0])[order]  # rising scores rescale in every block
        kq, vq, k_scale, v_scale = quantized(k[:, rank], v)
        want, bound = single_pass_oracle(q, kq, k_scale, vq, v_scale, query_scales)
        got = single_pass_q8(q, kq, k_scale, vq, v_scale, query_scales=query_scales)
        assert got.dtype == F32 and got.shape == q.shape
        assert (np.abs(got - want) <= bound).all()


@query_scales_of_both_kinds
def test_single_pass_stays_near_two_pass_by_the_rounding_of_q(query_scales):
    q, k, v = made(n=200, d=64, seed=9)
    kq, vq, k_scale, v_scale = quantized(k, v)
    groups = 2 if query_scales == "group" else 1
    _, q_scale = quantize_blocks(q, 64 // groups)
    got = single_pass_q8(q, kq, k_scale, vq, v_scale, query_scales=query_scales)
    exact = two_pass(q, kq, vq, k_scale, v_scale)
    for h in range(4):
        # |q - q'| <= scale/2 in each value moves a score by at most e, the output by
        # (exp(2e) - 1) times the largest |V|.
        values = np.abs(kq[h // 2] * k_scale[h // 2, :, None]).reshape(200, groups, -1).sum(axis=2)
        e = (values @ (q_scale[h] / 2)).max() / 8
        reach = np.abs(vq[h // 2] * v_scale[h // 2, :, None]).max()
        assert np.abs(got[h] - exact[h]).max() <= math.expm1(2 * e) * reach
    assert not np.array_equal(got, exact), "an int8 query must leave a trace"


def test_one_scale_is_the_group_s_for_a_group_and_its_outlier_s_for_a_row():
    """A value 300 times the others leaves them 0 where it sets their scale."""
    rng = np.random.default_rng(4)
    k, v = rng.standard_normal((2, 1, 40, 64)).astype(F32)
    kq, vq, k_scale, v_scale = quantized(k, v)
    rows = (kq, k_scale, vq, v_scale)
    q = rng.uniform(0.5, 1, (1, 64)).astype(F32)
    first = q[:, :32], kq[..., :32], k_scale, vq[..., :32], v_scale
    assert np.array_equal(single_pass_q8(*first), single_pass_q8(*first, query_scales="row"))
    q[0, 40] = 300
    outlier = np.zeros_like(q)
    outlier[0, 40] = 300
    row, alone = (single_pass_q8(x, *rows, query_scales="row") for x in (q, outlier))
    assert np.array_equal(row, alone)
    assert not np.array_equal(single_pass_q8(q, *rows), alone)


@pytest.mark.parametrize("d", [1056, 132096])
def test_the_int32_sum_of_a_row_is_exact_and_rounded_once(d):
    """Sums above 2**24, which not every float holds, up to the longest row that is taken."""
    q = np.full((1, d), -2, F32)
    q[0, 0] = -1  # code -64: the sum is no multiple of a power of two that hides a rounding
    kq = np.full((1, 3, d), -128, np.int8)
    kq[0, 1, 1:] = 127
    kq[0, 2, 1::2] = -127
    vq = np.zeros((1, 3, d), np.int8)
    vq[0, range(3), range(3)] = 100
    codes, scale = quantize_blocks(q[0], d)
    sums = kq[0].astype(np.int64) @ codes
    assert 2**24 < sums.max() <= 2**31 - 1 and codes[0] == -64
    k_scale = np.full((1, 3), 1e-5 / d, F32)
    scores = sums.astype(F32) * scale * k_scale[0] / math.sqrt(d)
    weights = np.exp(scores - scores.max(), dtype=np.float64)
    for name in ("numpy", *kernels_pyx.VARIANTS[:1]):
        with backend.using(name):
            got = single_pass_q8(q, kq, k_scale, vq, np.ones((1, 3), F32), query_scales="row")
        assert np.allclose(got[0, :3], 100 * weights / weights.sum(), rtol=1e-6)


def test_single_pass_takes_int8_rows_and_heads_of_whole_32s():
    q, k, v = made(d=48)
    kq, vq, k_scale, v_scale = quantized(k, v)
    with pytest.raises(TypeError, match="kq must be int8"):
        single_pass_q8(q, k, k_scale, vq, v_scale)
    with pytest.raises(TypeError, match="vq must be int8"):
        single_pass_q8(q, kq, k_scale, v, v_scale)
    for query_scales in ("group", "row"):
        with pytest.raises(ValueError, match="multiple of 32"):
            single_pass_q8(q, kq, k_scale, vq, v_scale, query_scales=query_scales)
    for other in ("head", None, 1, ["row"]):
        with pytest.raises(ValueError, match="query_scales must be"):
            single_pass_q8(q, kq, k_scale, vq, v_scale, query_scales=other)
    long = np.ones((1, 132128), F32)
    rows = np.ones((1, 1, 132128), np.int8), np.ones((1, 1), F32)
    with pytest.raises(ValueError, match="at most 132096 values a row, not 132128: the int32 sum"):
        single_pass_q8(long, *rows, *rows, query_scales="row")
    with backend.using("numpy"), pytest.raises(ValueError, match="at most 132096 values a row"):
        single_pass_q8(long, *rows, *rows, query_scales="row")
    assert np.array_equal(single_pass_q8(long, *rows, *rows), long)


def calls_of(kernel):
    """One-query call taking q and rows as two_pass does."""
    if kernel is single_pass_q8:
        return lambda q, k, v, ks, vs: single_pass_q8(q, k, ks, v, vs)
    return kernel


@pytest.mark.parametrize("kernel", [two_pass, online, single_pass_q8])
def test_bad_arguments_of_one_query(kernel):
    call = calls_of(kernel)
    q, k, v = made()
    kq, vq, ks, vs = quantized(k, v)
    bad = q.copy()
    bad[2, 5] = np.nan
    cases = [
        ("empty", (q, kq[:, :0], vq[:, :0], ks[:, :0], vs[:, :0])),
        ("at least one query", (q[:0], kq, vq, ks, vs)),
        ("q holds NaN", (bad, kq, vq, ks, vs)),
        ("q must have 2 dimensions", (q[0], kq, vq, ks, vs)),
        ("k and v must both have shape", (q, kq[0], vq[0], ks, vs)),
        ("k and v must both have shape", (q, kq[:, 1:], vq, ks, vs)),
        ("k and v must both have shape", (q[:, :16], kq, vq, ks, vs)),
        ("divide", (q[:3], kq, vq, ks, vs)),
        ("need k_scale", (q, kq, vq, None, vs)),
        ("need k_scale", (q, kq, vq, ks, None)),
        ("k_scale and v_scale must have shape", (q, kq, vq, ks[0], vs)),
        ("k_scale and v_scale must have shape", (q, kq, vq, ks, vs[:, 1:])),
    ]
    for message, arguments in cases:
        with pytest.raises(ValueError, match=message):
            call(*arguments)


@pytest.mark.parametrize("kernel", [two_pass, online])
def test_scales_belong_to_int8_rows(kernel):
    q, k, v = made()
    kq, vq, ks, vs = quantized(k, v)
    with pytest.raises(ValueError, match="leave them out"):
        kernel(q, k, v, ks, vs)
    with pytest.raises(ValueError, match="both be int8"):
        kernel(q, kq, v, ks, vs)
    with pytest.raises(TypeError, match="real numbers"):
        kernel(q, k, np.zeros(v.shape, complex))


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("kernel", [two_pass, online, single_pass_q8])
def test_a_bad_row_or_scale_is_an_error_without_a_warning(kernel, bad, recwarn):
    call = calls_of(kernel)
    q, k, v = made(n=40, spread=40)  # a weight of row 7 may well be 0: it must not hide the row
    rows = quantized(k, v)
    for i in (2, 3):
        scales = [a.copy() for a in rows]
        scales[i][1, 7] = bad
        with pytest.raises(ValueError, match="not finite"):
            call(q, *scales)
    if kernel is not single_pass_q8:
        for i in (0, 1):
            floats = [k.copy(), v.copy()]
            floats[i][0, 7, 3] = bad
            with pytest.raises(ValueError, match="not finite"):
                call(q, *floats)
    assert not recwarn.list


def test_kernels_leave_their_inputs_alone_and_take_views_and_float64():
    q, k, v = made(n=50, seed=5)
    whole_k, whole_v = np.zeros((2, 2, 80, 32), F32)
    whole_k[:, :50], whole_v[:, :50] = k, v
    want = two_pass(q, k, v)
    view_k, view_v = whole_k[:, :50], whole_v[:, :50]
    for a in (q, view_k, view_v):
        a.flags.writeable = False
    assert np.array_equal(two_pass(q, view_k, view_v), want)
    token_major = [np.ascontiguousarray(a.swapaxes(0, 1)).swapaxes(0, 1) for a in (k, v)]
    assert np.array_equal(two_pass(q, *token_major), want)
    doubles = two_pass(*(a.astype(np.float64) for a in (q, k, v)))
    assert doubles.dtype == F32 and np.array_equal(doubles, want)


def prefill_made(num_heads=4, num_kv_heads=2, n=300, d=32, seed=0):
    rng = np.random.default_rng(seed)
    q = rng.standard_normal((num_heads, n, d)).astype(F32)
    k, v = rng.standard_normal((2, num_kv_heads, n, d)).astype(F32)
    return q, k, v


@pytest.mark.parametrize("n", [1, 127, 128, 129, 300])
def test_prefill_equals_one_query_at_a_time(n):
    q, k, v = prefill_made(n=n)
    got = causal_attention(q, k, v)
    assert got.dtype == F32 and got.flags.c_contiguous
    for p in sorted({0, 1, 126, 127, 128, 255, 256, n - 1} & set(range(n))):
        want, bound = oracle(q[:, p], k[:, : p + 1], v[:, : p + 1])
        assert (np.abs(got[:, p] - want) <= bound).all(), p


def test_a_later_chunk_gives_the_rows_of_the_whole():
    q, k, v = prefill_made()
    whole = causal_attention(q, k, v)
    importance, chunked = np.zeros((2, 300), F32)
    causal_attention(q, k, v, importance=importance)
    for start, end in ((0, 100), (100, 231), (231, 300)):
        part = causal_attention(q[:, start:end], k, v, start=start, importance=chunked)
        assert np.allclose(part, whole[:, start:end], atol=1e-5)
    assert np.allclose(importance, chunked, rtol=1e-4)


def test_importance_holds_the_weights_of_the_counted_queries():
    q, k, v = prefill_made(n=200)
    want = np.zeros(200)
    for p in range(150, 200):
        for h in range(4):
            scores = (k[h // 2, : p + 1].astype(float) @ q[h, p]) / math.sqrt(32)
            weights = np.exp(scores - scores.max())
            want[: p + 1] += weights / weights.sum()
    importance = np.zeros(200, F32)
    causal_attention(q, k, v, importance=importance, importance_from=150)
    assert np.allclose(importance, want, rtol=1e-4, atol=1e-6)
    assert importance.sum() == pytest.approx(4 * 50, rel=1e-5)
    nothing = np.zeros(200, F32)
    causal_attention(q, k, v, importance=nothing, importance_from=200)
    assert not nothing.any()


def test_importance_is_added_one_query_after_the_other():
    """From 0 in each head, then head after head. With q = 0 the weights are known exactly:
    1/(p + 1), so the order shows in the bits."""
    n, heads = 300, 2
    _, k, v = prefill_made(heads, 1, n)
    importance = np.random.default_rng(1).uniform(0, 3, n).astype(F32)
    want, backwards, in_one_row = importance.copy(), importance.copy(), importance.copy()
    weights = np.tril(np.repeat(F32(1) / np.arange(1, n + 1, dtype=F32)[:, None], n, axis=1))
    for _ in range(heads):
        of_head = np.zeros(n, F32)
        for p in range(n):
            of_head += weights[p]
            in_one_row += weights[p]
        want += of_head
        for p in reversed(range(n)):
            backwards += weights[p]
    causal_attention(np.zeros((heads, n, 32), F32), k, v, importance=importance)
    assert np.array_equal(importance, want)
    for other in (backwards, in_one_row):
        assert not np.array_equal(other, want), "the sample must tell the orders apart"


def test_prefill_memory_is_bounded_by_its_tiles():
    q, k, v = prefill_made(n=2061, d=64)
    importance = np.zeros(2061, F32)
    tracemalloc.start()
    causal_attention(q, k, v, importance=importance)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < q.nbytes + 4e6, "the output and a few tiles of 1 MB"
    assert importance.sum() == pytest.approx(4 * 2061, rel=1e-4)


def test_bad_arguments_of_prefill_leave_importance_alone():
    q, k, v = prefill_made(n=40)
    importance = np.ones(40, F32)
    overflow = q.copy()
    overflow[3, 39] = 3e38
    late_nan = v.copy()
    late_nan[1, 39] = np.nan
    cases = [
        ("q holds NaN", (np.where(q == q[3, 9, 9], F32(np.nan), q), k, v), {}),
        ("v holds NaN or infinity at head 1, token 39", (q, k, late_nan), {}),
        ("k holds NaN or infinity at head 1, token 39", (q, late_nan, v), {}),
        ("not finite", (overflow, k, v), {}),
        ("positions 1 to 40", (q, k, v), {"start": 1}),
        ("positions -1 to 38", (q, k, v), {"start": -1}),
        ("3 dimensions", (q[0], k, v), {}),
        ("at least one query", (q[:, :0], k, v), {}),
        ("divide", (q[:3], k, v), {}),
        ("need k_scale", (q, *quantized(k, v)[:2]), {}),
    ]
    for message, arguments, more in cases:
        with pytest.raises(ValueError, match=message):
            causal_attention(*arguments, importance=importance, **more)
    assert np.array_equal(importance, np.ones(40))
    for wrong in (np.ones(39, F32), np.ones(40), np.ones((1, 40), F32), [0.0] * 40):
        with pytest.raises(ValueError, match="importance must be a float32 array"):
            causal_attention(q, k, v, importance=wrong)
    for bad in (np.nan, np.inf):
        spoiled = np.zeros(41, F32)
        spoiled[40] = bad
        with pytest.raises(ValueError, match="importance holds NaN or infinity"):
            causal_attention(q, k, v, importance=spoiled)


def test_rows_after_the_last_query_are_not_read():
    q, k, v = prefill_made(n=40)
    spoiled_k, spoiled_v = k.copy(), v.copy()
    spoiled_k[:, 30:], spoiled_v[:, 30:] = np.nan, np.inf
    assert np.array_equal(causal_attention(q[:, :30], spoiled_k, spoiled_v),
                          causal_attention(q[:, :30], k[:, :30], v[:, :30]))
