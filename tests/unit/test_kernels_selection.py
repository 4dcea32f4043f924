"""Block selection kernels: every variant with the same bits, the choice equal to NumPy's rule."""

from __future__ import annotations

import os

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

import kernels_pyx
from course_lib import backend, sparse
from course_lib.arrays import LayerRows, NotFiniteError
from course_lib.probe_keys import ProbeKeys
from course_lib.quant import quantize_rows
from tests.sharing import shared_among

F32 = np.float32
needs_kernels = pytest.mark.skipif(
    not kernels_pyx.VARIANTS and os.environ.get("COURSE_REQUIRE_KERNELS") != "1",
    reason="the kernels are not compiled here",
)
pytestmark = needs_kernels
variants = pytest.mark.parametrize("variant", kernels_pyx.VARIANTS or ("portable",))
others = pytest.mark.parametrize("variant", [v for v in kernels_pyx.VARIANTS if v != "portable"])
row_types = pytest.mark.parametrize("dtype", ["f32", "q8"])


def made(num_heads=4, num_kv_heads=2, n=300, d=32, seed=0, dtype="f32", room=0):
    """q, rows and importance; the rows are views of a cache with `room` for more tokens."""
    rng = np.random.default_rng(seed)
    q = rng.standard_normal((num_heads, d)).astype(F32)
    k, v = rng.standard_normal((2, num_kv_heads, n + room, d)).astype(F32)
    k[:, n:] = v[:, n:] = np.nan if dtype == "f32" else 0
    rows = LayerRows(k, v)
    if dtype == "q8":
        (k, k_scale), (v, v_scale) = quantize_rows(k), quantize_rows(v)
        k_scale[:, n:] = v_scale[:, n:] = np.nan
        rows = LayerRows(k, v, k_scale, v_scale)
    return q, rows.upto(n), rng.uniform(0, 1, n).astype(F32)


def probe(variant, q, rows, block_size=32, n_probe=8):
    out = np.full((len(q), sparse.n_blocks(rows.k.shape[1], block_size)), np.nan, F32)
    kernels_pyx.kernels(variant)["probe_scores"](q, rows.k, rows.k_scale, block_size, n_probe, out)
    return out


def empty_choice(num_heads, n_blocks, k_blocks):
    k = min(k_blocks, n_blocks)
    order, ids = np.full((2, num_heads, k), -7, np.int32)
    recency, evicted = np.full((2, num_heads), -7, np.int32)
    return order, ids, recency, evicted


def choose(variant, scores, importance, k_blocks):
    choice = empty_choice(*scores.shape, k_blocks)
    kernels_pyx.kernels(variant)["select_blocks"](scores, importance, k_blocks, *choice)
    return choice


def attend(variant, q, rows, importance=None, k_blocks=4, block_size=32, n_probe=8, shared=False,
           samples=(None, None)):
    """out, probe scores, and the choice."""
    n_blocks = sparse.n_blocks(rows.k.shape[1], block_size)
    out, scores = np.full(q.shape, np.nan, F32), np.full((len(q), n_blocks), np.nan, F32)
    choice = empty_choice(len(q), n_blocks, k_blocks)
    sums = None if importance is None else sparse.importance_sums(importance, block_size)
    kernels_pyx.kernels(variant)["sparse_attention"](
        q, *rows, sums, k_blocks, block_size, n_probe, shared, out, scores, *choice, *samples)
    return out, scores, *choice


def assert_same_bits(a, b):
    assert len(a) == len(b)
    for x, y in zip(a, b, strict=True):
        np.testing.assert_array_equal(x.view(np.uint32), y.view(np.uint32))


def with_numpy(function, *arguments, **options):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(backend, "kernel", lambda name: None)
        return function(*arguments, **options)


# Probe scores.


@row_types
@others
def test_probe_scores_have_the_same_bits_on_every_variant(variant, dtype):
    rng = np.random.default_rng(5)
    for seed in range(100):
        num_kv_heads, group, d = rng.integers(1, 4), rng.integers(1, 5), rng.integers(1, 131)
        n, block_size, n_probe = rng.integers(1, 400), rng.integers(1, 71), rng.integers(1, 41)
        q, rows, _ = made(num_kv_heads * group, num_kv_heads, n, d, seed, dtype, seed % 3)
        sizes = int(block_size), int(n_probe)
        assert_same_bits([probe(variant, q, rows, *sizes)], [probe("portable", q, rows, *sizes)])


@row_types
@variants
def test_probe_scores_are_the_largest_exact_dots_up_to_rounding(variant, dtype):
    """Rounding: d products and sums, each off by at most 2**-24 of the sum of magnitudes."""
    rng = np.random.default_rng(6)
    for seed in range(40):
        d, n = int(rng.integers(1, 131)), int(rng.integers(1, 300))
        block_size, n_probe = int(rng.integers(1, 71)), int(rng.integers(1, 41))
        q, rows, _ = made(2, 1, n, d, seed, dtype)
        k = rows.k[0].astype(float)
        if dtype == "q8":
            k *= rows.k_scale[0, :, None]
        scores = probe(variant, q, rows, block_size, n_probe)
        for b in range(scores.shape[1]):
            sampled = k[sparse.probe_positions(b, n, block_size, n_probe)]
            bound = (d + 2) * 2.0**-24 * (np.abs(sampled) @ np.abs(q.T.astype(float))).max()
            exact = (sampled @ q.T.astype(float)).max(axis=0)
            np.testing.assert_allclose(scores[:, b], exact, rtol=0, atol=bound)


@row_types
@variants
def test_only_sampled_rows_are_read(variant, dtype):
    for n, block_size, n_probe in ((100, 32, 8), (31, 32, 8), (61, 7, 3), (70, 10, 40)):
        q, rows, _ = made(n=n, dtype=dtype)
        scores = probe(variant, q, rows, block_size, n_probe)
        unread = np.ones(n, bool)
        for b in range(scores.shape[1]):
            unread[sparse.probe_positions(b, n, block_size, n_probe)] = False
        spoiled = rows.map(np.copy)
        if dtype == "q8":
            spoiled.k_scale[:, unread] = np.nan
        else:
            spoiled.k[:, unread] = np.nan
        assert_same_bits([scores], [probe(variant, q, spoiled, block_size, n_probe)])


@row_types
@variants
def test_equal_rows_have_equal_scores_wherever_they_lie(variant, dtype):
    rng = np.random.default_rng(8)
    for d in (1, 16, 47, 64, 128):
        q, rows, _ = made(3, 1, 1, d, d, dtype)
        n = int(rng.integers(60, 200))
        same = rows.map(lambda a, n=n: np.repeat(a, n, axis=1))
        assert len({tuple(column) for column in probe(variant, q, same).T.tolist()}) == 1
        # One query twice: heads that are served together or apart say the same.
        several = probe(variant, np.repeat(q[:1], 5, axis=0), same)
        assert (several == several[0, 0]).all()


@row_types
@variants
def test_a_sampled_row_that_is_not_finite_names_its_block(variant, dtype):
    for value in (np.nan, np.inf, -np.inf):
        for token, block in ((0, 0), (36, 1), (96, 3), (99, 3)):
            q, rows, _ = made(n=100, dtype=dtype)
            rows = rows.map(np.copy)
            if dtype == "q8":
                rows.k_scale[1, token] = value
            else:
                rows.k[1, token, 5] = value
            with pytest.raises(ValueError, match=f"probe score of block {block} is not finite"):
                probe(variant, q, rows)
            with pytest.raises(NotFiniteError, match=f"probe score of block {block} is not fin"):
                with_numpy(sparse.probe_heads, q, rows, 32, 8)


# The choice.


def tied(values):
    return st.sampled_from([F32(x) for x in values])


@st.composite
def score_lists(draw):
    num_heads, n_blocks = draw(st.integers(1, 3)), draw(st.integers(1, 40))
    few = tied([0.0, -0.0, 1.0, -1.0, 2.5, 1e-45, -1e-45, 3e38, -3e38])
    any_score = st.floats(width=32, allow_nan=False, allow_infinity=False)
    elements = draw(st.sampled_from([few, tied([0.0, -0.0]), any_score]))
    scores = draw(arrays(F32, (num_heads, n_blocks), elements=elements, fill=st.nothing()))
    importance = draw(st.none() | arrays(F32, n_blocks, elements=elements, fill=st.nothing()))
    return scores, importance, draw(st.integers(1, 2 * n_blocks + 2))


def assert_chosen_as_the_rule_says(variant, scores, importance, k_blocks):
    order, ids, recency, evicted = choose(variant, scores, importance, k_blocks)
    for h, want in enumerate(sparse.select_heads(scores, importance, k_blocks)):
        assert order[h].tolist() == want.order.tolist()
        assert ids[h].tolist() == want.ids.tolist()
        assert recency[h] == (-1 if want.recency is None else want.recency)
        assert evicted[h] == (-1 if want.evicted is None else want.evicted)


@variants
@settings(max_examples=100)
@given(score_lists())
def test_the_choice_is_that_of_the_numpy_rule(variant, case):
    assert_chosen_as_the_rule_says(variant, *case)


@variants
def test_the_choice_among_many_blocks(variant):
    rng = np.random.default_rng(9)
    for n_blocks in (64, 65, 512, 1000):
        for scores in (rng.standard_normal((3, n_blocks)), rng.integers(0, 9, (3, n_blocks)),
                       np.sort(rng.standard_normal((3, n_blocks)))):
            scores = scores.astype(F32)
            for k_blocks in (1, 2, 3, 4, 31, 32, n_blocks // 2, n_blocks - 1, n_blocks, 2**62):
                for importance in (None, scores[0, ::-1].copy(), np.zeros(n_blocks, F32)):
                    assert_chosen_as_the_rule_says(variant, scores, importance, k_blocks)


@variants
def test_selections_of_course_lib_are_the_kernel_s(variant):
    rng = np.random.default_rng(10)
    for seed in range(30):
        scores = rng.integers(-3, 3, (3, 20)).astype(F32)
        importance = rng.integers(0, 3, 20).astype(F32) if seed % 2 else None
        with backend.using(variant):
            got = sparse.choose_heads(scores, importance, seed % 7 + 1)
        want = sparse.select_heads(scores, importance, seed % 7 + 1)
        for a, b in zip(got, want, strict=True):
            assert a.reason == b.reason and a.num_importance == b.num_importance
            assert a.ids.dtype == a.order.dtype == np.int64
            assert a.ids.tolist() == b.ids.tolist() and a.order.tolist() == b.order.tolist()
            assert (a.recency, a.evicted) == (b.recency, b.evicted)
            assert np.array_equal(a.probe, b.probe) and (a.importance is None) == (not seed % 2)


# Importance sums.


@variants
def test_importance_sums_are_numpy_s(variant):
    rng = np.random.default_rng(11)
    for seed in range(100):
        n, block_size = int(rng.integers(1, 300)), int(rng.integers(1, 71))
        importance = np.exp(rng.uniform(-8, 8, n)).astype(F32) * F32(1 - 2 * (seed % 2))
        sums = np.full(sparse.n_blocks(n, block_size), np.nan, F32)
        kernels_pyx.kernels(variant)["importance_sums"](importance, block_size, sums)
        assert_same_bits([sums], [with_numpy(sparse.importance_sums, importance, block_size)])
    for bad in (np.nan, np.inf, 3e38):
        with pytest.raises(ValueError, match="NaN or infinity in block 1"):
            values = np.ones(70, F32)
            values[40:42] = bad
            kernels_pyx.kernels(variant)["importance_sums"](values, 32, np.empty(3, F32))


# Sparse attention.


def same_choice(probe_scores, importance, k_blocks, block_size):
    sums = None if importance is None else sparse.importance_sums(importance, block_size)
    return choose("portable", probe_scores, sums, k_blocks)


@row_types
@variants
def test_sparse_attention_is_probe_choice_and_two_pass_over_the_chosen_blocks(variant, dtype):
    rng = np.random.default_rng(12)
    for seed in range(60):
        num_kv_heads, group, d = (int(x) for x in rng.integers(1, (4, 5, 131)))
        n, block_size, n_probe = (int(x) for x in rng.integers(1, (400, 71, 41)))
        k_blocks, shared = int(rng.integers(1, 12)), bool(seed % 2)
        q, rows, importance = made(num_kv_heads * group, num_kv_heads, n, d, seed, dtype, seed % 3)
        importance = importance if seed % 4 < 2 else None
        got = attend(variant, q, rows, importance, k_blocks, block_size, n_probe, shared)
        scores = probe("portable", q, rows, block_size, n_probe)
        if shared:
            by_group = scores.reshape(num_kv_heads, group, -1)
            scores = np.repeat(by_group.max(axis=1), group, axis=0)
        choice = same_choice(scores, importance, k_blocks, block_size)
        out = np.empty_like(q)
        kernels_pyx.kernels("portable")["two_pass"](q, *rows, choice[1], block_size, out)
        assert_same_bits(got, (out, scores, *choice))


def packed(rows, block_size, n_probe, n_blocks):
    """The sampled rows and scales of the first full blocks, copied together."""
    n = rows.k.shape[1]
    places = np.concatenate([np.zeros(0, int), *(
        sparse.probe_positions(b, n, block_size, n_probe) for b in range(n_blocks))])
    scale = None if rows.k_scale is None else np.ascontiguousarray(rows.k_scale[:, places])
    return np.ascontiguousarray(rows.k[:, places]), scale


@row_types
@variants
def test_packed_samples_give_the_same_bits(variant, dtype):
    rng = np.random.default_rng(13)
    for seed in range(40):
        n, block_size, n_probe = (int(x) for x in rng.integers(1, (400, 71, 41)))
        q, rows, importance = made(4, 2, n, 40, seed, dtype, seed % 3)
        want = attend(variant, q, rows, importance, 3, block_size, n_probe)
        have = int(rng.integers(0, n // block_size + 1))
        samples = packed(rows, block_size, n_probe, have)
        got = attend(variant, q, rows, importance, 3, block_size, n_probe, samples=samples)
        assert_same_bits(got, want)
        if have:  # they are what is read
            other = np.zeros_like(samples[0])
            got = attend(variant, q, rows, importance, 3, block_size, n_probe,
                         samples=(other, samples[1]))
            assert (got[1][:, :have] == 0).all()


@row_types
@variants
def test_all_blocks_are_bit_equal_to_dense(variant, dtype):
    for n in (1, 31, 32, 33, 100):
        q, rows, importance = made(n=n, d=24, dtype=dtype)
        dense = np.empty_like(q)
        kernels_pyx.kernels("portable")["two_pass"](q, *rows, None, 32, dense)
        for shared in (False, True):
            out = attend(variant, q, rows, importance, sparse.n_blocks(n) + n % 2, shared=shared)
            assert_same_bits(out[:1], [dense])


@row_types
@variants
def test_threads_change_no_bit(variant, dtype):
    q, rows, importance = made(12, 6, 500, 48, dtype=dtype)
    want = attend(variant, q, rows, importance)
    one_list = attend(variant, q, rows, importance, shared=True)
    for count in (2, 3, 8):
        for shared, expected in ((False, want), (True, one_list)):
            with shared_among(count, started=True):
                got = attend(variant, q, rows, importance, shared=shared)
            assert_same_bits(got, expected)
        with shared_among(count, started=True):
            scores = probe(variant, q, rows)
        assert_same_bits([scores], [want[1]])


@row_types
@variants
def test_only_sampled_and_chosen_rows_are_read_and_a_bad_one_is_named(variant, dtype):
    q, rows, importance = made(n=300, dtype=dtype)
    out, scores, order, ids, *_ = attend(variant, q, rows, importance, 3)
    read = np.zeros((2, 300), bool)
    for b in range(10):
        read[:, sparse.probe_positions(b, 300)] = True
    chosen = np.zeros((2, 300), bool)
    for h in range(4):
        chosen[h // 2, np.add.outer(ids[h] * 32, np.arange(32)).clip(max=299)] = True
    spoiled = rows.map(np.copy)
    k_values, v_values = spoiled[2:] if dtype == "q8" else spoiled[:2]
    k_values[~(read | chosen)] = v_values[~chosen] = np.nan
    assert_same_bits(attend(variant, q, spoiled, importance, 3)[:2], (out, scores))
    token = int(np.flatnonzero(chosen[1] & ~read[1])[0])
    spoiled = rows.map(np.copy)
    (spoiled.k_scale if dtype == "q8" else spoiled.k)[1, token] = np.inf
    with pytest.raises(ValueError, match=f"the score of K row {token} is not finite"):
        attend(variant, q, spoiled, importance, 3)
    spoiled = rows.map(np.copy)
    (spoiled.v_scale if dtype == "q8" else spoiled.v)[0, int(ids[0, 1]) * 32] = np.nan
    with pytest.raises(ValueError, match="output is not finite; a V row"):
        attend(variant, q, spoiled, importance, 3)
    # What the probe meets comes first, in whichever head.
    (spoiled.k_scale if dtype == "q8" else spoiled.k)[1, 64] = np.nan
    with pytest.raises(ValueError, match="the probe score of block 2 is not finite"):
        attend(variant, q, spoiled, importance, 3)


@row_types
@variants
def test_sparse_attention_of_course_lib_uses_the_kernel(variant, dtype):
    q, rows, importance = made(n=301, dtype=dtype)
    for shared in (False, True):
        with backend.using(variant):
            out, selections = sparse.sparse_attention(q, *rows, importance=importance, k_blocks=5,
                                                      shared_selection=shared)
        want = attend("portable", q, rows, importance, 5, shared=shared)
        assert_same_bits([out], want[:1])
        reference, by_numpy = with_numpy(sparse.sparse_attention, q, *rows, importance=importance,
                                         k_blocks=5, shared_selection=shared)
        np.testing.assert_allclose(out, reference, rtol=1e-4, atol=1e-5)
        for a, b in zip(selections, by_numpy, strict=True):
            assert a.reason == b.reason and a.order.tolist() == b.order.tolist()
            np.testing.assert_allclose(a.probe, b.probe, rtol=1e-4, atol=1e-5)
        for first in (0, 2):  # the heads of a group
            same = selections[first].order.tolist() == selections[first + 1].order.tolist()
            assert same == shared


@row_types
def test_probe_keys_follow_a_growing_cache_and_change_nothing(dtype):
    for block_size, n_probe in ((32, 8), (7, 3), (4, 9)):
        q, rows, importance = made(n=200, dtype=dtype, room=1)
        keys = ProbeKeys(block_size, n_probe)
        options = dict(k_blocks=3, block_size=block_size, n_probe=n_probe)
        for n in (1, 3, 31, 32, 33, 64, 70, 129, 200):
            part = rows.upto(n)
            keys.update(part)
            places = [p for b in range(n // block_size)
                      for p in sparse.probe_positions(b, n, block_size, n_probe)]
            samples, scale = keys.arrays
            if not places:
                assert samples is None and keys.nbytes == 0
                continue
            assert np.array_equal(samples, part.k[:, places])
            assert dtype == "f32" or np.array_equal(scale, part.k_scale[:, places])
            assert keys.nbytes == len(places) * 2 * (36 if dtype == "q8" else 128)
            out, chosen = sparse.sparse_attention(q, *part, importance=importance[:n],
                                                  probe_keys=keys, **options)
            plain, want = sparse.sparse_attention(q, *part, importance=importance[:n], **options)
            assert_same_bits([out], [plain])
            assert [s.order.tolist() for s in chosen] == [s.order.tolist() for s in want]
        with pytest.raises(ValueError, match="probe_keys samples blocks of"):
            sparse.sparse_attention(q, *rows, probe_keys=keys, block_size=9)
        with pytest.raises(ValueError, match="full blocks"):  # of a longer cache
            sparse.sparse_attention(q, *rows.upto(100), probe_keys=keys, **options)


def test_bad_arguments_of_sparse_attention():
    q, rows, importance = made(n=100)
    _, q8, _ = made(n=100, dtype="q8")
    run = kernels_pyx.kernels("portable")["sparse_attention"]
    sums = sparse.importance_sums(importance)
    results = [np.empty((4, 32), F32), np.empty((4, 4), F32), *empty_choice(4, 4, 2)]
    sizes = 2, 32, 8, False
    cases = [
        (ValueError, "v must have shape", (q, rows.k, rows.v[:, :99], None, None, sums, *sizes)),
        (TypeError, "v must be", (q, rows.k, None, None, None, sums, *sizes)),
        (ValueError, "belong together", (q, q8.k, q8.v, q8.k_scale, None, sums, *sizes)),
        (TypeError, "v must be a int8", (q, q8.k, rows.v, *q8[2:], sums, *sizes)),
        (ValueError, "v_scale must have", (q, *q8[:3], q8.v_scale[:, 1:], sums, *sizes)),
        (ValueError, "importance_sums must have shape", (q, *rows, sums[1:], *sizes)),
        (ValueError, "k_blocks must be 1", (q, *rows, sums, 0, *sizes[1:])),
        (ValueError, "context is empty", (q, *rows.upto(0), None, *sizes)),
    ]
    for error, message, arguments in cases:
        with pytest.raises(error, match=message):
            run(*arguments, *results)
    k8, s8 = np.ascontiguousarray(q8.k[:, :8]), np.ascontiguousarray(q8.k_scale[:, :8])
    samples = np.ascontiguousarray(rows.k[:, :8])
    for error, message, cache, packs in (
        (ValueError, "samples must hold 8 rows for each of at", rows, (rows.k[:, :7], None)),
        (ValueError, "for each of at most 3 full blocks", rows, (rows.k[:, :32], None)),
        (ValueError, "samples must have shape", rows, (samples[:1], None)),
        (TypeError, "samples must be a float32", rows, (k8, None)),
        (ValueError, "sample_scale belongs", rows, (samples, s8)),
        (ValueError, "sample_scale belongs", rows, (None, s8)),
        (ValueError, "sample_scale belongs", q8, (k8, None)),
        (ValueError, "sample_scale must have", q8, (k8, q8.k_scale)),
    ):
        with pytest.raises(error, match=message):
            run(q, *cache, sums, *sizes, *results, *packs)
    for place, name in ((0, "out"), (1, "probe"), (2, "order"), (5, "evicted")):
        spoiled = list(results)
        spoiled[place] = np.empty((9,) * results[place].ndim, results[place].dtype)
        with pytest.raises(ValueError, match=f"{name} must have shape"):
            run(q, *rows, sums, *sizes, *spoiled)
    with pytest.raises(ValueError, match="out must not share memory with q"):
        run(q, *rows, sums, *sizes, q, *results[1:])


# Bad arguments.


def test_bad_arguments_of_the_probe():
    q, rows, _ = made(n=100)
    _, q8, _ = made(n=100, dtype="q8")
    run, out = kernels_pyx.kernels("portable")["probe_scores"], np.empty((4, 4), F32)
    bad_q = q.copy()
    bad_q[1, 2] = np.nan
    big_endian = q.astype(">f4")
    cases = [
        (TypeError, "q must be", (q.astype(float), rows.k, None, 32, 8, out)),
        (TypeError, "native byte order", (big_endian, rows.k, None, 32, 8, out)),
        (ValueError, "q holds NaN or infinity", (bad_q, rows.k, None, 32, 8, out)),
        (ValueError, "q must hold heads", (q[:3], rows.k, None, 32, 8, out[:3])),
        (ValueError, "q must hold heads", (q[:0], rows.k, None, 32, 8, out[:0])),
        (ValueError, "rows of 31 values", (np.ascontiguousarray(q[:, :31]), rows.k, None, 32, 8,
                                           out)),
        (TypeError, "k must be a float32", (q, q8.k, None, 32, 8, out)),
        (TypeError, "k must be a int8", (q, rows.k, q8.k_scale, 32, 8, out)),
        (ValueError, "context is empty", (q, rows.k[:, :0], None, 32, 8, out)),
        (ValueError, "C-contiguous", (q, rows.k[:, ::2], None, 32, 8, out)),
        (ValueError, "C-contiguous", (q, rows.k[::-1], None, 32, 8, out)),
        (ValueError, "k_scale must have shape", (q, q8.k, q8.k_scale[:, :99], 32, 8, out)),
        (ValueError, "out must have shape", (q, rows.k, None, 32, 8, out[:, :3].copy())),
        (ValueError, "out must be", (q, rows.k, None, 32, 8, out.T[0])),
        (ValueError, "share memory", (out[:1], np.ones((1, 9, 4), F32), None, 32, 8, out[:1, :1])),
        (ValueError, "block_size must be 1", (q, rows.k, None, 0, 8, out)),
        (ValueError, "n_probe must be 1", (q, rows.k, None, 32, -1, out)),
        (TypeError, "block_size must be a whole number", (q, rows.k, None, 3.5, 8, out)),
        (ValueError, "n_probe must be 1", (q, rows.k, None, 32, 10**30, out)),
    ]
    for error, message, arguments in cases:
        with pytest.raises(error, match=message):
            run(*arguments)
    one = np.empty((4, 1), F32)
    run(q, rows.k, None, 2**62, 2**62, one)  # one block, every row
    assert np.array_equal(one[:, 0], probe("portable", q, rows, 1, 1).max(axis=1))


def test_bad_arguments_of_the_choice():
    run, scores = kernels_pyx.kernels("portable")["select_blocks"], np.arange(12, dtype=F32)
    scores = scores.reshape(2, 6)
    good = empty_choice(2, 6, 3)
    bad = scores.copy()
    bad[1, 4] = np.inf
    wide = np.empty((2, 4), np.int32)
    cases = [
        (ValueError, "probe holds NaN or infinity at place 10", (bad, None, 3, *good)),
        (ValueError, "importance_sums holds NaN", (scores, bad[1].copy(), 3, *good)),
        (ValueError, "importance_sums must have shape", (scores, scores[0, :5], 3, *good)),
        (ValueError, "at least one block", (scores[:, :0], None, 3, *good)),
        (ValueError, "k_blocks must be 1", (scores, None, 0, *good)),
        (ValueError, "order must have shape", (scores, None, 3, wide, *good[1:])),
        (ValueError, "ids must have shape", (scores, None, 3, good[0], wide, *good[2:])),
        (ValueError, "recency must have shape", (scores, None, 3, *good[:2], wide[0], good[3])),
        (ValueError, "evicted must have shape", (scores, None, 3, *good[:3], wide[0])),
        (ValueError, "share memory", (scores, None, 3, good[0], good[0], *good[2:])),
        (TypeError, "order must be", (scores, None, 3, good[0].astype(np.int64), *good[1:])),
    ]
    for error, message, arguments in cases:
        with pytest.raises(error, match=message):
            run(*arguments)
    good[0].flags.writeable = False
    with pytest.raises(ValueError, match="order must be a writable"):
        run(scores, None, 3, *good)
