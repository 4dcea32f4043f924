"""q8 rows and rounding rules: worked examples, borders, and the compiled kernel's equality."""

import numpy as np
import pytest

from course_lib import backend
from course_lib.quant import (
    ROUNDING_RULES,
    dequantize_rows,
    quantize_blocks,
    quantize_rows,
    round_to_int,
)

F32 = np.float32
F32_MAX = np.finfo(F32).max
BELOW_HALF = np.nextafter(F32(0.5), F32(0))


@pytest.mark.parametrize(
    ("rule", "expected"),
    [
        ("half_up", [-2, -1, 0, 1, 2, 3, -1, 0, 1]),
        ("half_even", [-2, -2, 0, 0, 2, 2, -1, 0, 1]),
        ("half_away", [-3, -2, -1, 1, 2, 3, -1, 0, 1]),
        ("trunc", [-2, -1, 0, 1, 2, 3, 0, 0, 1]),
    ],
)
def test_ties_and_their_neighbours(rule, expected):
    y = [-2.5, -1.5, -0.5, 0.5, 1.5, 2.5, -0.75, -0.25, 0.75]
    rounded = round_to_int(y, rule)
    assert rounded.dtype == np.int32
    assert rounded.tolist() == expected


def test_half_up_adds_in_float32_but_half_away_is_exact():
    # 0.49999997 + 0.5 rounds to 1 in float32: the engine's rule says floor of that sum.
    assert round_to_int([BELOW_HALF], "half_up").tolist() == [1]
    assert round_to_int([BELOW_HALF, -BELOW_HALF], "half_away").tolist() == [0, 0]
    assert round_to_int([BELOW_HALF], "half_even").tolist() == [0]


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf, 2.0**31, -(2.0**31)])
def test_what_no_int32_can_hold_is_refused(bad):
    with pytest.raises(ValueError, match="finite"):
        round_to_int([0.0, bad])


def test_a_row_by_hand():
    # m = 2, 127/m = 63.5: 1 -> 63.5 -> 64, -1 -> -63.5 -> -63 (half up), 0.01 -> 0.635 -> 1.
    q, scale = quantize_rows(np.array([2.0, 1.0, -1.0, 0.01], F32))
    assert q.dtype == np.int8
    assert q.tolist() == [127, 64, -63, 1]
    assert scale.dtype == F32
    assert scale == F32(2) / F32(127)


def test_127_over_m_comes_first():
    rng = np.random.default_rng(0)
    x = rng.standard_normal((20_000, 64), F32)
    m = np.abs(x).max(axis=1, keepdims=True)
    q, scale = quantize_rows(x)
    assert np.array_equal(q, np.floor(x * (F32(127) / m) + F32(0.5)))
    assert np.array_equal(scale, (m / F32(127))[:, 0])
    divided = np.floor(x / (m / F32(127)) + F32(0.5))
    assert (q != divided).any(), "the sample must hold a value on which the two orders differ"


@pytest.mark.parametrize("rule", ROUNDING_RULES)
def test_zero_and_tiny_rows_are_zeros_with_scale_one_127th(rule):
    below = np.nextafter(F32(1e-6), F32(0))
    q, scale = quantize_rows(np.array([[0, 0], [-0.0, 0], [below, -below], [1e-45, 0]], F32), rule)
    assert not q.any()
    assert np.array_equal(scale, np.full(4, F32(1) / F32(127)))


def test_a_row_of_exactly_1e6th_is_not_tiny():
    q, scale = quantize_rows(np.array([1e-6, -1e-6], F32))
    assert q.tolist() == [127, -127]
    assert scale == F32(1e-6) / F32(127)


@pytest.mark.parametrize("rule", ROUNDING_RULES)
def test_the_largest_float_survives(rule):
    q, scale = quantize_rows(np.array([F32_MAX, 0, -F32_MAX], F32), rule)
    assert q[0] == 127 and q[1] == 0
    assert q[2] == (-126 if rule == "trunc" else -127)
    x = dequantize_rows(q, scale)
    assert np.isfinite(x).all()
    assert x[0] == F32_MAX


def test_trunc_is_one_step_too_high_on_negatives():
    x = -np.random.default_rng(1).uniform(0.1, 1, (200, 128)).astype(F32)
    for rule, low, high in (("trunc", 0.95, 1.05), ("half_up", -0.02, 0.02)):
        q, scale = quantize_rows(x, rule)
        steps = (dequantize_rows(q, scale) - x) / scale[:, None]
        assert low < steps.mean() < high, rule


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_a_bad_value_is_named(bad):
    x = np.ones((2, 5, 4), F32)
    x[1, 3, 2] = bad
    with pytest.raises(ValueError, match="x holds NaN or infinity at head 1, token 3;"):
        quantize_rows(x)
    with pytest.raises(ValueError, match="at token 3;"):
        quantize_rows(x[1])
    with pytest.raises(ValueError, match="x holds NaN or infinity;"):
        quantize_rows(x[1, 3])
    with pytest.raises(ValueError, match=r"at \[0, 1, 3\]"):
        quantize_rows(x[None])
    with pytest.raises(ValueError, match="x holds NaN or infinity"):
        quantize_blocks(x[1], block=4)


def test_a_float64_beyond_float32_is_an_error_and_not_a_warning(recwarn):
    with pytest.raises(ValueError, match="NaN or infinity"):
        quantize_rows([[1.0, 1e300]])
    assert not recwarn.list


@pytest.mark.parametrize("shape", [(), (0,), (3, 0)])
def test_rows_without_values_are_refused(shape):
    with pytest.raises(ValueError, match="x must have rows"):
        quantize_rows(np.zeros(shape, F32))


def test_no_rows_give_no_rows():
    q, scale = quantize_rows(np.zeros((2, 0, 64), F32))
    assert q.shape == (2, 0, 64) and scale.shape == (2, 0)


@pytest.mark.parametrize("rule", ["half", "", "HALF_UP", None])
def test_an_unknown_rule_lists_the_known(rule):
    for call in (lambda: quantize_rows(np.ones(4, F32), rule), lambda: round_to_int([1.0], rule)):
        with pytest.raises(ValueError, match="half_up, half_even, half_away, trunc"):
            call()


@pytest.mark.parametrize("x", [np.ones(4, complex), np.array(["a"]), np.ones(4, bool), [None]])
def test_what_is_not_real_numbers_is_a_type_error(x):
    with pytest.raises(TypeError, match="real numbers"):
        quantize_rows(x)


def test_other_real_dtypes_and_layouts_are_taken_as_float32():
    x = np.random.default_rng(2).standard_normal((6, 8, 4))
    want = quantize_rows(x.astype(F32))
    for other in (x, x.astype(F32).astype(">f4"), np.asfortranarray(x.astype(F32))):
        q, scale = quantize_rows(other)
        assert np.array_equal(q, want[0]) and np.array_equal(scale, want[1])
        assert scale.dtype == F32
    every_other = quantize_rows(x[::2].astype(F32))
    assert np.array_equal(every_other[0], want[0][::2])


def test_the_input_is_not_changed():
    x = np.random.default_rng(3).standard_normal((4, 32)).astype(F32)
    before = x.copy()
    x.flags.writeable = False
    quantize_rows(x)
    quantize_blocks(x)
    assert np.array_equal(x, before)


def test_dequantize_checks_what_it_gets():
    q, scale = quantize_rows(np.ones((2, 3, 4), F32))
    assert dequantize_rows(q, scale).dtype == F32
    with pytest.raises(TypeError, match="int8"):
        dequantize_rows(q.astype(np.int16), scale)
    with pytest.raises(ValueError, match="shape"):
        dequantize_rows(q, scale[0])
    with pytest.raises(ValueError, match="NaN or infinity"):
        dequantize_rows(q, np.full((2, 3), np.nan, F32))


def test_quantize_blocks_has_one_scale_per_32_and_rounds_half_away():
    x = np.zeros(64, F32)
    x[:3] = [2.0, -1.0, 1.0]  # m = 2: -63.5 and 63.5 are ties
    x[32] = 8.0
    q, scale = quantize_blocks(x)
    assert q.dtype == np.int8 and scale.dtype == F32
    assert q[:3].tolist() == [127, -64, 64] and q[32] == 127
    assert np.array_equal(scale, np.array([2, 8], F32) / F32(127))
    assert quantize_blocks(np.zeros((5, 96), F32))[1].shape == (5, 3)
    tiny = quantize_blocks(np.full(32, 9e-7, F32))
    assert not tiny[0].any() and tiny[1] == F32(1) / F32(127)


@pytest.mark.parametrize(("shape", "block"), [((33,), 32), ((0,), 32), ((), 32), ((4,), 3)])
def test_quantize_blocks_needs_whole_blocks(shape, block):
    with pytest.raises(ValueError, match="multiple"):
        quantize_blocks(np.ones(shape, F32), block)
    with pytest.raises(ValueError, match="block must be at least 1"):
        quantize_blocks(np.ones(32, F32), 0)


def test_a_compiled_kernel_gets_its_contract(monkeypatch):
    calls = []

    def fake(x, rule_code, out_q, out_scale):
        calls.append((x.shape, x.dtype, x.flags.c_contiguous, rule_code))
        out_q[:], out_scale[:] = 7, 0.5

    monkeypatch.setattr(backend, "kernel", {"quantize_rows": fake}.get)
    x = np.ones((2, 6, 4), F32)[:, ::2]
    q, scale = quantize_rows(x, "half_away")
    assert calls == [((6, 4), np.dtype(F32), True, 2)]
    assert q.shape == (2, 3, 4) and (q == 7).all()
    assert scale.shape == (2, 3) and (scale == 0.5).all()


@pytest.mark.parametrize("rule", ROUNDING_RULES)
def test_the_compiled_kernel_equals_numpy(rule, monkeypatch):
    if backend.kernel("quantize_rows") is None:
        pytest.skip(f"no compiled kernel: {backend.info().reason}")
    rng = np.random.default_rng(4)
    x = rng.standard_normal((4000, 37), F32) * np.exp(rng.uniform(-100, 80, (4000, 1))).astype(F32)
    ties = rng.integers(-254, 255, (4000, 37)).astype(F32) / F32(2)
    ties[:, 0] = 127  # 127/m = 1, so every half is an exact tie
    compiled = [quantize_rows(a, rule) for a in (x, ties)]
    monkeypatch.setenv("COURSE_KERNEL", "numpy")
    assert backend.kernel("quantize_rows") is None
    for (q, scale), a in zip(compiled, (x, ties), strict=True):
        want_q, want_scale = quantize_rows(a, rule)
        assert np.array_equal(q, want_q)
        assert np.array_equal(scale.view(np.uint32), want_scale.view(np.uint32))
