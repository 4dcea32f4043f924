"""Attention over parts of a context and their merge, on every backend."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import kernels_pyx
from course_lib import backend
from course_lib.arrays import LayerRows, NotFiniteError
from course_lib.attention import causal_attention
from course_lib.prefill import lse as parts
from course_lib.prefill.lse import merge_attention_outputs, partial_attention
from tests.sharing import shared_among

F32 = np.float32
U = 2.0**-24
BACKENDS = ("numpy", *(v for v in kernels_pyx.VARIANTS if v != "portable-baseline"))
each_backend = pytest.mark.parametrize("name", BACKENDS)
compiled = pytest.mark.skipif(len(BACKENDS) == 1, reason="the kernels are not compiled here")


def made(heads=4, kv_heads=2, rows=29, n=150, d=24, seed=0, spread=1.0):
    rng = np.random.default_rng(seed)
    q = (rng.standard_normal((heads, rows, d)) * spread).astype(F32)
    k, v = rng.standard_normal((2, kv_heads, n, d)).astype(F32)
    return q, k, v


def exact(q, k, v, visible):
    """Output and LSE in float64; what a row may see is its first visible[i] tokens."""
    group = len(q) // len(k)
    out, lse = np.zeros(q.shape), np.full(q.shape[:2], -np.inf)
    for h in range(len(q)):
        for i, n in enumerate(visible):
            if n:
                scores = k[h // group, :n].astype(float) @ q[h, i] / math.sqrt(q.shape[2])
                e = np.exp(scores - scores.max())
                out[h, i] = e @ v[h // group, :n] / e.sum()
                lse[h, i] = scores.max() + np.log(e.sum())
    return out, lse


def slack(q, k, n):
    """A score of d products is off by (d + 6) u sum|q||k| / sqrt(d) = e, so an LSE by e and the sum
    of n weights, (n + 12) u; an output, relative to the largest |v|, by twice both."""
    d = q.shape[-1]
    e = (d + 6) * U * np.abs(q).max() * np.abs(k).sum(axis=-1).max() / math.sqrt(d)
    return e + (n + 12) * U


def bits(a):
    return a.tobytes()


@each_backend
@pytest.mark.parametrize("d", [1, 16, 24, 64])
def test_a_part_is_float64_s_within_roundings(name, d):
    q, k, v = made(d=d, seed=d, spread=3)
    for visible in (np.full(29, 150), np.arange(1, 30), np.arange(29) * 5):
        with backend.using(name):
            out, lse = partial_attention(q, k, v, visible)
        want, want_lse = exact(q, k, v, visible)
        assert out.dtype == F32 and lse.dtype == np.float64
        e = slack(q, k, 150)
        assert np.array_equal(lse == -np.inf, want_lse == -np.inf)
        seen = want_lse > -np.inf
        assert np.abs(lse[seen] - want_lse[seen]).max() <= e
        assert np.abs(out - want).max() <= 2 * math.expm1(2 * e) * np.abs(v).max()
        assert not out[:, visible == 0].any()


@each_backend
def test_a_chunk_without_history_is_causal_attention_to_the_bit(name):
    q, k, v = made(rows=70, n=70, d=32)
    with backend.using(name):
        out, _ = partial_attention(q, k, v, np.arange(1, 71))
        assert name == "numpy" or bits(out) == bits(causal_attention(q, k, v))
        assert np.allclose(out, causal_attention(q, k, v), atol=1e-6)


@each_backend
@settings(max_examples=15)
@given(cuts=st.lists(st.integers(0, 150), max_size=8), backwards=st.booleans(),
       spread=st.sampled_from([1, 4]))
def test_any_partition_and_any_order_merge_to_the_whole(name, cuts, backwards, spread):
    q, k, v = made(seed=1, spread=spread)
    edges = sorted({0, 150, *cuts})
    spans = list(zip(edges, edges[1:], strict=False))[:: -1 if backwards else 1]
    with backend.using(name):
        whole, whole_lse = partial_attention(q, k, v)
        out, lse = parts.empty_part(q)
        for first, end in spans:
            part = partial_attention(q, k[:, first:end], v[:, first:end])
            out, lse = merge_attention_outputs(out, lse, *part)
    # The kernel's scores have the same bits however the context is cut; those of NumPy's matmul do
    # not, and a score of 20 has an ulp of 2e-6.
    bound = 1e-6 if name != "numpy" or spread == 1 else slack(q, k, 150)
    assert np.abs(out - whole).max() < bound * np.abs(v).max()  # an output is a mean of V rows
    assert np.abs(lse - whole_lse).max() < bound


@each_backend
def test_blocks_are_merged_in_ascending_order_to_the_bit(name):
    """attend_part into what came before = partial_attention, then merge_attention_outputs."""
    q, k, v = made()
    with backend.using(name):
        got, got_lse = partial_attention(q, k, v, block_lists=[[0, 2, 4]], block_size=32)
        out, lse = parts.empty_part(q)
        for first in (0, 64, 128):
            part = slice(first, first + 32)
            out, lse = merge_attention_outputs(out, lse, *partial_attention(q, k[:, part],
                                                                            v[:, part]))
    assert bits(got) == bits(out) and bits(got_lse) == bits(lse)


@each_backend
def test_each_kv_head_reads_its_own_blocks(name):
    q, k, v = made()
    lists = ([0, 3], [1, 2, 4])
    with backend.using(name):
        out, lse = partial_attention(q, k, v, block_lists=lists, block_size=32)
        for kh, ids in enumerate(lists):
            heads = slice(2 * kh, 2 * kh + 2)
            alone = partial_attention(q[heads], k[kh : kh + 1], v[kh : kh + 1], block_lists=[ids],
                                      block_size=32)
            assert bits(out[heads]) == bits(alone[0]) and bits(lse[heads]) == bits(alone[1])
        nothing = partial_attention(q, k, v, block_lists=[[], [1]], block_size=32)
        assert not nothing[0][:2].any() and (nothing[1][:2] == -np.inf).all()
        assert nothing[0][2:].any()


@each_backend
def test_blocks_under_a_mask(name):
    q, k, v = made()
    visible = np.arange(29) * 5
    with backend.using(name):
        out, lse = partial_attention(q, k, v, visible, block_lists=[[1, 3]], block_size=32)
    for i, n in enumerate(visible):
        tokens = [t for t in (*range(32, 64), *range(96, 128)) if t < n]
        want, want_lse = exact(q[:, i : i + 1], k[:, tokens], v[:, tokens], [len(tokens)])
        assert np.allclose(out[:, i : i + 1], want, atol=1e-5)
        assert np.allclose(lse[:, i : i + 1], want_lse, atol=1e-5)


@compiled
@settings(max_examples=25)
@given(group=st.integers(1, 3), kv=st.integers(1, 3), rows=st.integers(1, 120),
       n=st.integers(1, 150), d=st.integers(1, 40), seed=st.integers(0, 99))
def test_the_same_bits_on_every_variant_and_any_number_of_threads(group, kv, rows, n, d, seed):
    q, k, v = made(group * kv, kv, rows, n, d, seed)
    visible = np.random.default_rng(seed).integers(0, n + 1, rows)
    results = []
    for threads, names in ((1, BACKENDS[1:]), (2, BACKENDS[1:2]), (5, BACKENDS[1:2])):
        for name in names:
            with backend.using(name), shared_among(threads):
                results.append(partial_attention(
                    q, k, v, visible, block_lists=[range(0, -(-n // 16), 2)], block_size=16))
    assert {(bits(out), bits(lse)) for out, lse in results} == {tuple(map(bits, results[0]))}


@compiled
@settings(max_examples=25)
@given(seed=st.integers(0, 999), apart=st.sampled_from([0, 1e-3, 1, 30, 800]))
def test_the_kernel_merges_with_numpy_s_bits(seed, apart):
    q, k, v = made(rows=40, n=16, d=20, seed=seed)
    rng = np.random.default_rng(seed)
    before, before_lse = rng.standard_normal(q.shape).astype(F32), rng.normal(0, 1, q.shape[:2])
    before_lse = before_lse * apart
    before_lse[rng.random(q.shape[:2]) < 0.2] = -np.inf
    before[before_lse == -np.inf] = 0
    visible = rng.integers(0, 17, 40)
    with backend.using(BACKENDS[1]):
        want = merge_attention_outputs(before, before_lse, *partial_attention(q, k, v, visible))
        parts.attend_part(q, LayerRows(k, v), visible, 16, None, before, before_lse)
    assert bits(before) == bits(want[0]) and bits(before_lse) == bits(want[1])


def test_exp_and_ln_are_nearly_the_exact_ones():
    x = -np.concatenate([np.linspace(0, 3, 1001), np.geomspace(1e-9, 690, 3001)])
    exact_exp = np.array([math.exp(a) for a in x])
    assert (np.abs(parts.exp(x) - exact_exp) <= 4e-16 * exact_exp).all()
    assert parts.exp(np.array([0.0, -701, -np.inf, np.nan])).tolist() == [1, 0, 0, 0]
    x = np.concatenate([np.linspace(1, 3, 1001), np.geomspace(1, 1e9, 3001)])
    exact_ln = np.array([math.log(a) for a in x])
    assert (np.abs(parts.ln(x) - exact_ln) <= 5e-16 * np.maximum(exact_ln, 1)).all()
    assert parts.ln(np.array([1.0]))[0] == 0


def test_merging_is_its_formula():
    rng = np.random.default_rng(0)
    o1, o2 = rng.standard_normal((2, 3, 5, 8)).astype(F32)
    l1, l2 = rng.normal(0, 9, (2, 3, 5))
    out, lse = merge_attention_outputs(o1, l1, o2, l2)
    w = 1 / (1 + np.exp(l2 - l1))[..., None]
    assert np.allclose(out, w * o1 + (1 - w) * o2, atol=1e-6)
    assert np.allclose(lse, np.logaddexp(l1, l2), rtol=1e-15, atol=1e-15)
    assert merge_attention_outputs(o1, l1.astype(F32), o2, l2.astype(F32))[1].dtype == F32
    assert merge_attention_outputs(o1, l1.astype(F32), o2, l2)[1].dtype == np.float64


def test_parts_without_tokens():
    o = np.array([[1.0, -0.0]], F32)
    nothing, never = np.zeros_like(o), np.array([-np.inf])
    for args in ((o, [3.0], nothing, never), (nothing, never, o, [3.0])):
        out, lse = merge_attention_outputs(*args)
        assert bits(out) == bits(o) and lse == [3.0]
    out, lse = merge_attention_outputs(nothing, never, nothing, never)
    assert not out.any() and lse == [-np.inf]


@each_backend
@pytest.mark.parametrize(("what", "value", "message"), [
    ("k", np.nan, "score"), ("k", 3e38, "score"), ("v", np.inf, "output is not finite"),
])
def test_numbers_that_are_not_finite(name, what, value, message):
    q, k, v = made()
    {"k": k, "v": v}[what][1, 7, 3] = value
    if value == 3e38:
        k[1, 7], q[2:] = value, 9
    with backend.using(name), pytest.raises(NotFiniteError, match=message):
        partial_attention(q, k, v)
    with backend.using(name):  # what nobody reads may hold anything
        partial_attention(q, k, v, np.full(29, 7))
        partial_attention(q, k, v, block_lists=[[1, 2]], block_size=16)


@each_backend
def test_rows_that_lie_token_after_token_give_the_same_bits(name):
    q, k, v = made()
    apart = [np.ascontiguousarray(a.transpose(1, 0, 2)).transpose(1, 0, 2) for a in (k, v)]
    with backend.using(name):
        want, got = partial_attention(q, k, v), partial_attention(q, *apart)
    assert np.allclose(got[0], want[0], atol=1e-6) and np.allclose(got[1], want[1], atol=1e-6)
    assert name == "numpy" or list(map(bits, got)) == list(map(bits, want))


@each_backend
def test_an_output_is_refused_whichever_row_alone_sees_what_spoils_it(name):
    q, k, v = made()
    v[1, 149, 3] = np.inf
    with backend.using(name):
        for row in range(29):
            with pytest.raises(NotFiniteError, match="output is not finite"):
                partial_attention(q, k, v, np.where(np.arange(29) == row, 150, 149))


@compiled
@pytest.mark.parametrize("threads", [1, 2])
def test_of_several_bad_rows_the_first_head_s_is_named(threads):
    """By its number in all blocks; each head's query rows are several pieces of work."""
    q, k, v = made(rows=300)
    k[0, 140], k[1, 7] = np.nan, np.nan
    with backend.using(BACKENDS[1]), shared_among(threads):
        with pytest.raises(NotFiniteError, match="K row 140 "):
            partial_attention(q, k, v, block_lists=[range(5)], block_size=32)


@pytest.mark.parametrize(("change", "message"), [
    (dict(visible=[1, 2]), "29 whole numbers"), (dict(visible=np.full(29, 1.0)), "whole numbers"),
    (dict(visible=np.full(29, 151)), "0 to 150"), (dict(visible=np.full(29, -1)), "0 to 150"),
    (dict(block_lists=[[0]] * 3, block_size=32), "one for each of the 2, not 3"),
    (dict(block_lists=[[1, 0]], block_size=32), "ascending"),
    (dict(block_lists=[[1, 1]], block_size=32), "each once"),
    (dict(block_lists=[[5]], block_size=32), "blocks 0 to 4"),
    (dict(block_lists=[[-1]], block_size=32), "blocks 0 to 4"),
    (dict(block_lists=[[0.5]], block_size=32), "whole numbers"),
    (dict(block_lists=[[0]], block_size=0), "block_size"),
])
def test_wrong_arguments(change, message):
    with pytest.raises(ValueError, match=message):
        partial_attention(*made(), **change)


def test_a_block_size_is_needed():
    with pytest.raises(TypeError, match="block_size"):
        partial_attention(*made(), block_lists=[[0]])


@pytest.mark.parametrize(("change", "message"), [
    (dict(o2=np.zeros((3, 4), F32)), "one shape"),
    (dict(lse1=np.zeros(3)), r"lse1 must have shape \(2,\)"),
    (dict(lse2=np.zeros(2, int)), "lse2 must be floats"), (dict(lse1=np.array([0, np.nan])), "NaN"),
    (dict(lse2=np.array([0, np.inf])), "-inf marks"),
])
def test_wrong_arguments_of_merging(change, message):
    arguments = dict(o1=np.zeros((2, 4), F32), lse1=np.zeros(2), o2=np.zeros((2, 4), F32),
                     lse2=np.zeros(2)) | change
    with pytest.raises(ValueError, match=message):
        merge_attention_outputs(**arguments)
