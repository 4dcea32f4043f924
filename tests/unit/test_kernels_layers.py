"""RMSNorm, RoPE, heads, SiLU gate, softmax, argmax: compiled, against their definitions."""

from __future__ import annotations

import math
import os

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

import kernels_pyx
from course_lib import backend
from course_lib.arrays import NotFiniteError
from course_lib.engine import layers
from tests.sharing import shared_among

F32 = np.float32
U = 2.0**-24
pytestmark = pytest.mark.skipif(
    not kernels_pyx.VARIANTS and os.environ.get("COURSE_REQUIRE_KERNELS") != "1",
    reason="the kernels are not compiled here",
)
variants = pytest.mark.parametrize("variant", kernels_pyx.VARIANTS or ("portable",))
best = next(iter(kernels_pyx.VARIANTS), "portable")
lengths = pytest.mark.parametrize("d", [1, 2, 15, 16, 17, 48, 64, 100, 160])


def run(variant, operation, *arguments, shape=None):
    """Call an operation whose last argument is its output; return that."""
    out = np.full(arguments[0].shape if shape is None else shape, np.nan, F32)
    kernels_pyx.kernels(variant)[operation](*arguments, out)
    return out


def everywhere(operation, *arguments):
    """The result of an operation, after a look that every variant gives the same bits."""
    results = [run(variant, operation, *arguments) for variant in kernels_pyx.VARIANTS]
    for result in results:
        assert np.array_equal(result.view(np.uint32), results[0].view(np.uint32))
    return results[0]


def spread(shape, seed=0, factor=3.0):
    return (np.random.default_rng(seed).standard_normal(shape) * factor).astype(F32)


# --- RMSNorm -------------------------------------------------------------------------------------


@lengths
@pytest.mark.parametrize("eps", [1e-6, 0.1, 0.0])
def test_rms_norm_is_its_formula_within_roundings(d, eps):
    x, gain = spread((7, d), d), spread(d, 1)
    wide = x.astype(float)
    exact = wide / np.sqrt((wide**2).mean(axis=-1, keepdims=True) + F32(eps)) * gain
    got = everywhere("rms_norm", x, gain, eps)
    # A sum of d squares in 16 lanes: d/16 + 4 roundings; then /, +, sqrt, /, *: half of those under
    # the root count half.
    np.testing.assert_allclose(got, exact, rtol=(d / 16 + 12) * U)


@variants
def test_rms_norm_of_a_row_does_not_depend_on_the_others(variant):
    x, gain = spread((9, 40)), spread(40, 1)
    whole = run(variant, "rms_norm", x, gain, 1e-6)
    for r in range(9):
        assert np.array_equal(run(variant, "rms_norm", x[r : r + 1], gain, 1e-6)[0], whole[r])


@variants
@pytest.mark.parametrize("bad", [3e38, -1e20, np.inf, -np.inf, np.nan])
def test_rms_norm_refuses_a_mean_square_that_is_not_finite(variant, bad):
    x, out = np.ones((5, 20), F32), np.ones((5, 20), F32)
    x[3, 18] = bad
    kernel = kernels_pyx.kernels(variant)["rms_norm"]
    with pytest.raises(ValueError, match="mean square of row 3 of x"):
        kernel(x, np.ones(20, F32), 1e-6, out)
    with pytest.raises(ValueError, match="gain holds NaN"):
        kernel(out + 1, np.full(20, bad if abs(bad) == np.inf else np.nan, F32), 1e-6, out)
    with pytest.raises(ValueError, match="row 0 .* is 0"):
        kernel(np.zeros((5, 20), F32), np.ones(20, F32), 0.0, out)
    with pytest.raises(ValueError, match="eps must be at least 0"):
        kernel(out + 1, np.ones(20, F32), -1e-6, out)
    assert (out == 1).all()
    with backend.using(variant), pytest.raises(NotFiniteError, match="mean square"):
        layers.rms_norm(x, np.ones(20, F32), 1e-6)


# --- RoPE ----------------------------------------------------------------------------------------


def tables(variant, positions, pairs, theta):
    cos, sin = np.full((2, len(positions), pairs), np.nan, F32)
    kernels_pyx.kernels(variant)["rope_tables"](np.asarray(positions, np.int64), theta, cos, sin)
    return cos, sin


def numpy_angles(positions, pairs, theta):
    """Angles as layers.rope_tables defines them."""
    exponent = np.arange(0, 2 * pairs, 2, dtype=F32) / F32(2 * pairs)
    frequency = F32(1.0) / np.power(F32(theta), exponent)
    return np.asarray(positions).astype(F32)[:, None] * frequency


@pytest.mark.parametrize("theta", [1e5, 1e6, 1e4, 50.0, 1.0, 0.3])
@pytest.mark.parametrize("pairs", [1, 4, 32, 64])
def test_rope_tables_are_within_an_ulp_of_the_angle_s_cosine(theta, pairs):
    positions = [*range(50), 2061, 4095, 40959, 131071, 10**6]
    angle = numpy_angles(positions, pairs, theta)
    # The frequency may be a float beside NumPy's; each column has one of three angles.
    power = np.power(F32(theta), np.arange(0, 2 * pairs, 2, dtype=F32) / F32(2 * pairs))
    at = np.asarray(positions).astype(F32)[:, None]
    nearby = [at * (F32(1) / np.nextafter(power, F32(to))) for to in (0, np.inf)]
    results = [tables(variant, positions, pairs, theta) for variant in kernels_pyx.VARIANTS]
    for result in results:
        assert np.array_equal(np.stack(result).view(np.uint32),
                              np.stack(results[0]).view(np.uint32))
    errors = []
    for angles in (angle, *nearby):
        columns = [np.abs(got - exact(angles.astype(float))) / np.spacing(np.abs(got))
                   for got, exact in zip(results[0], (np.cos, np.sin), strict=True)]
        errors.append(np.max(columns, axis=(0, 1)))
    assert (np.min(errors, axis=0) <= 0.5001).all()


def test_frequencies_are_correctly_rounded():
    """Unlike NumPy's float32 power, which is off by a last bit for a fifth of them."""
    for theta in (1e4, 1e5, 1e6, 5e5, 12345.0, 1.5, 3e38):
        for pairs in (16, 32, 40, 64, 128):
            exponent = np.arange(0, 2 * pairs, 2, dtype=F32) / F32(2 * pairs)
            power = np.power(float(F32(theta)), exponent.astype(float)).astype(F32)
            angle = (F32(1) / power).astype(float)
            cos, sin = tables(best, [1], pairs, theta)
            assert np.array_equal(cos[0], np.cos(angle).astype(F32))
            assert np.array_equal(sin[0], np.sin(angle).astype(F32))


@settings(max_examples=200)
@given(position=st.integers(-(2**31) + 128, 2**31 - 128))
def test_any_angle_below_2_to_the_31(position):
    """Also where cos or sin is nearly 0: 3 decimals more than NumPy's float64 would not show it."""
    cos, sin = tables(best, [position], 1, 1.0)
    angle = float(F32(position))
    for got, want in ((cos[0, 0], math.cos(angle)), (sin[0, 0], math.sin(angle))):
        assert abs(float(got) - want) <= 0.5001 * np.spacing(np.abs(got))


def test_the_float32_nearest_to_a_zero_of_cosine():
    """These angles are the closest to a multiple of pi/2, where most digits cancel."""
    for position in (11, 22, 33, 355, 710, 103993, 104348, 208341, 312689, 833719, 1146408):
        cos, sin = tables(best, [position], 1, 1.0)
        assert abs(float(sin[0, 0]) - math.sin(position)) <= 0.5001 * np.spacing(np.abs(sin[0, 0]))
        assert abs(float(cos[0, 0]) - math.cos(position)) <= 0.5001 * np.spacing(np.abs(cos[0, 0]))


def test_rope_tables_refuse_what_they_cannot():
    kernel = kernels_pyx.kernels(best)["rope_tables"]
    cos, sin = np.zeros((2, 2, 4), F32)
    for positions, theta, message in (([0, 2**31], 1e4, "position 2147483648"),
                                      ([1, -2**63], 1e4, "position -9223372036854775808"),
                                      ([0, 1], 0.0, "theta"), ([0, 1], -1.0, "theta"),
                                      ([0, 1], np.nan, "theta"), ([0, 1], 1e39, "theta"),
                                      ([0, 1, 2], 1e4, "out_cos must have shape")):
        with pytest.raises(ValueError, match=message):
            kernel(np.array(positions, np.int64), theta, cos, sin)
    with pytest.raises(ValueError, match="out_sin must have shape"):
        kernel(np.arange(2), 1e4, cos, sin[:, :3].copy())
    with pytest.raises(ValueError, match="memory"):
        kernel(np.arange(2), 1e4, cos, cos)
    assert not cos.any() and not sin.any()


@pytest.mark.parametrize("d", [2, 6, 32, 34, 64, 128])
def test_rope_has_the_bits_of_numpy(d):
    x = spread((5, 3, d), d)
    with backend.using("numpy"):
        cos, sin = layers.rope_tables(np.arange(5) * 97, d, 1e5)
        want = layers.rope(x, cos, sin)
    got = everywhere("rope", x, cos, sin)
    assert np.array_equal(got.view(np.uint32), want.view(np.uint32))


@variants
@pytest.mark.parametrize("bad", [np.nan, np.inf, 3e38])
def test_rope_refuses_results_that_are_not_finite(variant, bad):
    x, out = np.ones((4, 2, 6), F32), np.zeros((4, 2, 6), F32)
    x[2, 1, 5] = bad
    cos = np.full((4, 3), 2, F32)
    kernel = kernels_pyx.kernels(variant)["rope"]
    with pytest.raises(ValueError, match="at token 2"):
        kernel(x, cos, cos, out)
    with pytest.raises(ValueError, match="even length"):
        kernel(x[:, :, :5].copy(), cos, cos, out)
    with pytest.raises(ValueError, match="cos must have shape"):
        kernel(x, cos[:3], cos, out)
    assert not out.any()
    with backend.using(variant), pytest.raises(NotFiniteError, match="token 2"):
        layers.rope(x, cos, cos)


# --- scaled RoPE ---------------------------------------------------------------------------------


def test_angles_of_the_default_frequencies_are_the_default_tables():
    positions = np.array([0, 1, 77, 40_959, 2**30], np.int64)
    for theta, pairs in ((1e6, 64), (1e4, 17), (0.5, 4)):
        powers = np.empty(pairs, F32)
        cos, sin = np.empty((2, 5, pairs), F32)
        for variant in kernels_pyx.VARIANTS:
            kernels = kernels_pyx.kernels(variant)
            kernels["rope_powers"](theta, powers)
            kernels["rope_angles"](positions, F32(1) / powers, 1.0, cos, sin)
            want = tables(variant, positions, pairs, theta)
            assert np.array_equal(np.stack((cos, sin)), np.stack(want))
            kernels["rope_angles"](positions, F32(1) / powers, 1.3, cos, sin)
            assert np.array_equal(cos, want[0] * F32(1.3))
            assert np.array_equal(sin, want[1] * F32(1.3))


def test_powers_are_correctly_rounded():
    for theta in (1e4, 1e6, 5e5, 12345.0):
        powers = np.empty(64, F32)
        kernels_pyx.kernels(best)["rope_powers"](theta, powers)
        exponent = np.arange(0, 128, 2, dtype=F32) / F32(128)
        assert np.array_equal(powers, np.power(theta, exponent.astype(float)).astype(F32))


def test_rope_angles_refuse_what_they_cannot():
    kernel = kernels_pyx.kernels(best)["rope_angles"]
    cos, sin = np.zeros((2, 2, 3), F32)
    rates = np.ones(3, F32)
    spoiled = rates.copy()
    spoiled[1] = np.nan
    for positions, frequencies, factor, message in (
            ([0, 2**31], rates, 1.0, "position 2147483648"),
            ([0, 1], spoiled, 1.0, "position 0"), ([0, 1], rates, np.inf, "factor"),
            ([0, 1], rates[:2].copy(), 1.0, "out_cos must have shape")):
        with pytest.raises(ValueError, match=message):
            kernel(np.array(positions, np.int64), frequencies, factor, cos, sin)
    with pytest.raises(ValueError, match="memory"):
        kernel(np.arange(2), rates, 1.0, cos, cos)
    assert not cos.any() and not sin.any()


# --- heads ---------------------------------------------------------------------------------------


def heads_of(tokens, heads, kv_heads, d, seed=0):
    """stacked, gains of q and k, cos and sin."""
    return (spread((tokens, heads + 2 * kv_heads, d), seed), spread(d, 1), spread(d, 2),
            *spread((2, tokens, d // 2), 3))


@pytest.mark.parametrize("d", [2, 16, 30, 64, 128])
@pytest.mark.parametrize("normed", [(True, True), (False, False), (True, False), (False, True)])
@variants
def test_split_heads_has_the_bits_of_norm_and_rope(variant, normed, d):
    tokens, heads, kv_heads, eps = 5, 4, 2, 1e-6
    stacked, q_gain, k_gain, cos, sin = heads_of(tokens, heads, kv_heads, d, d)
    q_gain, k_gain = (g if on else None for g, on in zip((q_gain, k_gain), normed, strict=True))
    longer = [np.full((count, 9, d), np.nan, F32) for count in (heads, kv_heads, kv_heads)]
    with backend.using(variant):
        layers.split_heads(stacked, q_gain, k_gain, eps, cos, sin, *(a[:, 3:8] for a in longer))
        want = []
        for part, gain in zip(np.split(stacked, (heads, heads + kv_heads), axis=1),
                              (q_gain, k_gain, None), strict=True):
            rows = part if gain is None else layers.rms_norm(part, gain, eps)
            want.append((layers.rope(rows, cos, sin) if len(want) < 2 else rows)
                        .transpose(1, 0, 2))
    for got, rows in zip(longer, want, strict=True):
        assert np.array_equal(got[:, 3:8].view(np.uint32), np.ascontiguousarray(rows)
                              .view(np.uint32))
        assert np.isnan(got[:, :3]).all() and np.isnan(got[:, 8:]).all()  # the other tokens


def test_the_numpy_definition_of_split_heads():
    arguments = heads_of(6, 4, 2, 16)
    results = []
    for name in ("numpy", best):
        out = [np.empty((count, 6, 16), F32) for count in (4, 2, 2)]
        with backend.using(name):
            layers.split_heads(*arguments[:3], 1e-6, *arguments[3:], *out)
        results.append(out)
    for reference, got in zip(*results, strict=True):
        np.testing.assert_allclose(got, reference, rtol=0, atol=32 * U * np.abs(reference).max())
    assert np.array_equal(results[0][2], results[1][2])


@variants
@pytest.mark.parametrize("threads", [1, 3])
def test_split_heads_of_many_tokens_is_that_of_each(variant, threads):
    stacked, q_gain, k_gain, cos, sin = heads_of(67, 2, 1, 16)
    kernel = kernels_pyx.kernels(variant)["split_heads"]
    whole = [np.empty((count, 67, 16), F32) for count in (2, 1, 1)]
    with shared_among(threads, started=threads > 1):
        kernel(stacked, q_gain, k_gain, 0.1, cos, sin, *whole)
    for t in range(67):
        one = [np.empty((count, 1, 16), F32) for count in (2, 1, 1)]
        at = slice(t, t + 1)
        kernel(stacked[at], q_gain, k_gain, 0.1, cos[at], sin[at], *one)
        assert all(np.array_equal(a[:, 0], b[:, t]) for a, b in zip(one, whole, strict=True))


@variants
@pytest.mark.parametrize("head", [0, 3, 4, 5])
@pytest.mark.parametrize("bad", [np.nan, np.inf, 1e20])
def test_split_heads_names_the_first_token_whose_numbers_leave_the_range(variant, head, bad):
    stacked, q_gain, k_gain, cos, sin = heads_of(80, 4, 2, 8)
    stacked[61, head, 3] = stacked[79, 0, 0] = bad
    out = [np.empty((count, 80, 8), F32) for count in (4, 2, 2)]
    with backend.using(variant), shared_among(3), pytest.raises(NotFiniteError, match="token 61"):
        layers.split_heads(stacked, q_gain, k_gain, 1e-6, cos, sin, *out)
    if np.isfinite(bad):  # without a norm it is no number too large
        kernels_pyx.kernels(variant)["split_heads"](stacked, None, None, 1e-6, cos, sin, *out)
    zeros = np.zeros_like(stacked)
    with pytest.raises(ValueError, match="token 0"):
        kernels_pyx.kernels(variant)["split_heads"](zeros, None, k_gain, 0.0, cos, sin, *out)


def test_split_heads_refuses_arguments_that_do_not_fit():
    stacked, q_gain, k_gain, cos, sin = heads_of(3, 4, 2, 8)
    q, k, v = (np.zeros((count, 3, 8), F32) for count in (4, 2, 2))
    good = dict(stacked=stacked, q_gain=q_gain, k_gain=k_gain, eps=0.1, cos=cos, sin=sin,
                q=q, k=k, v=v)
    bad_gain = np.full(8, np.inf, F32)
    for change, message in (
            (dict(q_gain=bad_gain), "q_gain holds NaN"), (dict(k_gain=bad_gain), "k_gain holds"),
            (dict(k_gain=k_gain[:6]), "k_gain must have shape"), (dict(eps=-1.0), "eps"),
            (dict(q=q[:3]), "stacked must have shape"), (dict(v=q), "v must have shape"),
            (dict(cos=cos[:2]), "cos must have"), (dict(sin=sin[:, :3].copy()), "sin must have"),
            (dict(v=k), "memory"), (dict(stacked=stacked[..., :7].copy()), "even length")):
        with pytest.raises(ValueError, match=message):
            kernels_pyx.kernels(best)["split_heads"](**good | change)
    assert not q.any() and not k.any() and not v.any()


# --- softmax -------------------------------------------------------------------------------------


@settings(max_examples=100)
@given(arrays(F32, st.tuples(st.integers(0, 3), st.integers(1, 70)),
              elements=st.floats(-300, 300, width=32)))
def test_softmax_is_its_formula_within_roundings(x):
    wide = np.exp(x.astype(float) - x.max(axis=-1, keepdims=True, initial=-1e4))
    exact = wide / wide.sum(axis=-1, keepdims=True)
    got = everywhere("softmax", x)
    # A difference of two numbers up to 300 is off by 300 U, exp by 6, the sum by 9, / by 1; below
    # -87 the kernel's exp is 0.
    np.testing.assert_allclose(got, exact, rtol=(600 + 20) * U, atol=2e-38)
    assert np.abs(got.sum(axis=-1, dtype=float) - 1).max(initial=0) < 1e-5


@variants
def test_softmax_of_a_row_does_not_depend_on_the_others(variant):
    x = spread((9, 40))
    whole = run(variant, "softmax", x)
    for r in range(9):
        assert np.array_equal(run(variant, "softmax", x[r : r + 1])[0], whole[r])
    with backend.using(variant):
        assert np.array_equal(layers.softmax(x), whole)


@variants
def test_softmax_refuses_what_is_not_finite(variant):
    x, out = np.ones((3, 20), F32), np.zeros((3, 20), F32)
    kernel = kernels_pyx.kernels(variant)["softmax"]
    for bad in (np.nan, np.inf, -np.inf):
        x[2, 19] = bad
        with pytest.raises(ValueError, match="x holds NaN"):
            kernel(x, out)
        for name in ("numpy", variant):
            with backend.using(name), pytest.raises(NotFiniteError):
                layers.softmax(x)
    with pytest.raises(ValueError, match="at least one"):
        kernel(x[:, :0].copy(), out[:, :0].copy())
    assert not out.any()


# --- SiLU gate -----------------------------------------------------------------------------------


@settings(max_examples=100)
@given(arrays(F32, st.tuples(st.integers(0, 3), st.integers(1, 40)),
              elements=st.floats(-300, 300, width=32)))
def test_silu_mul_is_its_formula_within_roundings(gate):
    up = np.linspace(-2, 2, gate.size, dtype=F32).reshape(gate.shape)
    wide = gate.astype(float)
    exact = wide / (1 + np.exp(-wide)) * up
    got = everywhere("silu_mul", gate, up)
    # v16_exp is within 3 ulp; then *, +, / and *. Below -87 the kernel's exp is 0.
    np.testing.assert_allclose(got, exact, rtol=12 * 2 * U, atol=1e-35)


@variants
def test_silu_mul_refuses_what_is_not_finite_and_what_does_not_fit(variant):
    gate, out = np.ones((3, 20), F32), np.zeros((3, 20), F32)
    bad = gate.copy()
    bad[2, 19] = np.nan
    kernel = kernels_pyx.kernels(variant)["silu_mul"]
    for arguments, message in (((bad, gate, out), "gate holds NaN"),
                               ((gate, bad * 2, out), "up holds NaN"),
                               ((gate, gate[:2] + 1, out), "up must have shape"),
                               ((gate, gate + 1, gate), "memory")):
        with pytest.raises(ValueError, match=message):
            kernel(*arguments)
    assert not out.any()
    with backend.using(variant), pytest.raises(NotFiniteError, match="gate"):
        layers.silu_mul(bad, gate)


@variants
@pytest.mark.parametrize("threads", [1, 3])
def test_silu_mul_reads_columns_of_wider_rows(variant, threads):
    stacked = spread((7, 90))
    gate, up = stacked[:, :45], stacked[:, 45:]
    want = run(variant, "silu_mul", gate.copy(), up.copy())
    with shared_among(threads, started=threads > 1):
        assert np.array_equal(run(variant, "silu_mul", gate, up), want)
    bad = stacked.copy()
    bad[6, 89] = np.inf
    with pytest.raises(ValueError, match="up holds NaN"):
        run(variant, "silu_mul", bad[:, :45], bad[:, 45:])


# --- argmax --------------------------------------------------------------------------------------


@given(arrays(F32, st.integers(1, 70), elements=st.one_of(
    st.floats(width=32, allow_nan=False), st.sampled_from([0.0, -0.0]))))
def test_argmax_is_the_lowest_index_of_the_largest(x):
    for variant in kernels_pyx.VARIANTS:
        assert kernels_pyx.kernels(variant)["argmax"](x) == int(np.argmax(x))


@variants
def test_argmax_on_ties_and_what_it_refuses(variant):
    kernel = kernels_pyx.kernels(variant)["argmax"]
    x = np.zeros(1000, F32)
    x[[311, 700]] = 5
    assert kernel(x) == 311 and kernel(-x) == 0 and kernel(np.full(3, -np.inf, F32)) == 0
    x[999] = np.nan
    for bad in (x, -x):
        with pytest.raises(ValueError, match="x holds NaN"):
            kernel(bad)
    with pytest.raises(ValueError, match="at least one"):
        kernel(x[:0])
    with pytest.raises(TypeError, match="float32"):
        kernel(x.astype(float))
