"""The steps that a decoded token takes in one call each: the bits, the numbers that are refused and
the rows that are not taken are those of the functions that they put together."""

from __future__ import annotations

import os
from unittest.mock import patch

import numpy as np
import pytest

import kernels_pyx
from course_lib import backend
from course_lib.arrays import NotFiniteError
from course_lib.engine import layers
from course_lib.linear import PackedMatrix
from tests.sharing import shared_among

F32 = np.float32
EPS = 1e-6
pytestmark = pytest.mark.skipif(
    not kernels_pyx.VARIANTS and os.environ.get("COURSE_REQUIRE_KERNELS") != "1",
    reason="the kernels are not compiled here",
)
variants = pytest.mark.parametrize("variant", kernels_pyx.VARIANTS or ("portable",))
kinds = pytest.mark.parametrize("kind", ["f32", "q8_0", "q4_0"])
STEPS = {"attention_input", "attention_output", "swiglu"}


def spread(shape, seed=0):
    return np.random.default_rng(seed).standard_normal(shape).astype(F32)


def weights(rows, cols, kind, seed=0):
    w = spread((rows, cols), seed) / F32(np.sqrt(cols))
    return w if kind == "f32" else PackedMatrix.quantize(w, kind)


def heads_of(x, qkv, gains=(None, None), d=32, heads=4, kv_heads=2):
    n = len(x)
    angles = np.arange(n * d // 2, dtype=F32).reshape(n, -1)
    cos, sin = np.cos(angles), np.sin(angles)
    longer = np.full((heads + 2 * kv_heads, n + 3, d), np.nan, F32)
    q, k, v = np.split(longer[:, :n], (heads, heads + kv_heads))
    layers.project_heads(x, np.abs(spread(x.shape[1], 1)), EPS, qkv, *gains, cos, sin, q, k, v)
    assert np.isnan(longer[:, n:]).all()
    return np.ascontiguousarray(longer[:, :n])


def with_output(x, w):
    x = x.copy()
    layers.add_linear(x, spread((len(x), 96), 2), w)
    return x


def with_swiglu(x, gate_up, down):
    x = x.copy()
    layers.add_swiglu(x, np.abs(spread(x.shape[1], 1)), EPS, gate_up, down)
    return x


def calls(kind, inner=160):
    """A call of each step on rows x [n, 64]."""
    gains = spread(32, 5), spread(32, 6)
    qkv, out = weights(256, 64, kind), weights(64, 96, kind)
    gate_up, down = weights(2 * inner, 64, kind, 3), weights(64, inner, kind, 4)
    return {
        "attention_input": lambda x: heads_of(x, qkv, gains),
        "attention_output": lambda x: with_output(x, out),
        "swiglu": lambda x: with_swiglu(x, gate_up, down),
    }


def used():
    """What `backend.kernel` is asked for inside."""
    real, names = backend.kernel, []

    def kernel(name):
        names.append(name)
        return real(name)

    return patch.object(backend, "kernel", kernel), names


def composed():
    """The steps one after the other, as for several rows."""
    return patch.object(layers, "_one_row", lambda *arguments: None)


@kinds
@variants
@pytest.mark.parametrize("threads", [1, 2, 3])
def test_a_step_has_the_bits_of_its_parts(variant, kind, threads):
    x = spread((1, 64))
    for name, call in calls(kind).items():
        with backend.using(variant):
            with composed():
                expected = call(x)
            watch, names = used()
            with shared_among(threads, started=threads > 1), watch:
                got = call(x)
        assert names == [name]
        assert np.array_equal(got.view(np.uint32), expected.view(np.uint32)), name


@kinds
def test_gains_of_heads_may_be_missing(kind):
    x, qkv = spread((1, 64)), weights(256, 64, kind)
    for gains in ((None, None), (spread(32, 5), None), (None, spread(32, 6))):
        with composed():
            expected = heads_of(x, qkv, gains)
        got = heads_of(x, qkv, gains)
        assert np.array_equal(got.view(np.uint32), expected.view(np.uint32))


def test_several_rows_and_widths_of_no_whole_blocks_take_the_parts():
    for name, call in calls("q8_0").items():
        watch, names = used()
        with watch:
            call(spread((2, 64)))
        assert not STEPS & set(names), name
    x = spread((1, 64))
    for call in (lambda: heads_of(x, weights(64, 64, "q8_0"), d=8),
                 lambda: with_swiglu(x, weights(80, 64, "f32"), weights(64, 40, "f32")),
                 lambda: with_swiglu(spread((1, 60)), weights(64, 60, "f32"),
                                     weights(60, 32, "f32")),
                 lambda: layers.add_linear(spread((1, 20)), spread((1, 33)),
                                           weights(20, 33, "f32")),
                 lambda: heads_of(spread((1, 60)), weights(256, 60, "f32"))):
        watch, names = used()
        with watch:
            call()
        assert not STEPS & set(names)


@kinds
@pytest.mark.parametrize("name", sorted(STEPS - {"attention_output"}))
@pytest.mark.parametrize("value", [np.nan, np.inf, 3e38])
def test_a_row_that_is_not_finite_is_refused(kind, name, value):
    x = spread((1, 64))
    x[0, 17] = value
    with pytest.raises(NotFiniteError, match="the mean square of row 0 of x plus eps"):
        calls(kind)[name](x)


@kinds
@pytest.mark.parametrize("threads", [1, 3])
def test_what_overflows_on_the_way_is_refused_and_changes_nothing(kind, threads):
    x, huge = spread((1, 64)), np.full(64, 3e38, F32)
    with shared_among(threads):
        gate_up, down = weights(320, 64, kind, 3), weights(64, 160, kind, 4)
        before = x.copy()
        with pytest.raises(NotFiniteError, match="normed and times gain"):
            layers.add_swiglu(x * 3, huge, EPS, gate_up, down)
        with pytest.raises(NotFiniteError, match="a gate, a value of up or a product of both"):
            layers.add_swiglu(x, huge / 16, EPS, gate_up, down)
        with pytest.raises(NotFiniteError, match="a gate, a value of up or a product of both"):
            layers.add_swiglu(x, huge / 2**60, EPS, gate_up, down)  # only the product overflows
        with pytest.raises(NotFiniteError, match="context holds NaN or infinity"):
            layers.add_linear(x, np.full((1, 160), np.inf, F32), down)
        assert np.array_equal(x, before)
        cos = sin = np.ones((1, 16), F32)
        q, k, v = np.empty((4, 1, 32), F32), np.empty((2, 1, 32), F32), np.empty((2, 1, 32), F32)
        with pytest.raises(NotFiniteError, match="a query or key that is not finite"):
            layers.project_heads(x, huge / 4, EPS, weights(256, 64, kind) if kind == "f32" else
                                 PackedMatrix.quantize(spread((256, 64)) * 4, kind),
                                 None, None, cos, sin, q, k, v)
