"""Products with weights: every compiled variant gives the bits of the definition, for any shape."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import kernels_pyx
from course_lib import backend
from course_lib.fused import fused_multiply_add
from course_lib.linear import PackedMatrix, linear
from course_lib.weight_blocks import (
    dequantize_q4_0,
    dequantize_q8_0,
    linear_q4_0_reference,
    linear_q8_0_reference,
    quantize_activations,
    quantize_q4_0,
    quantize_q8_0,
)
from tests.sharing import shared_among

F32 = np.float32
KINDS = ("q8_0", "q4_0")
REFERENCE = {"q8_0": linear_q8_0_reference, "q4_0": linear_q4_0_reference}
QUANTIZE = {"q8_0": quantize_q8_0, "q4_0": quantize_q4_0}
DEQUANTIZE = {"q8_0": dequantize_q8_0, "q4_0": dequantize_q4_0}
needs_kernels = pytest.mark.skipif(not kernels_pyx.VARIANTS,
                                   reason="the kernels are not compiled here")
variants = pytest.mark.parametrize("variant", kernels_pyx.VARIANTS or ("portable",))
each_kind = pytest.mark.parametrize("kind", KINDS)


def literal_f32(x, w):
    """The definition: 16 chains over the columns, each step rounded once, then sums by halves."""
    n, rows = len(x), len(w)
    padding, chunks = -x.shape[1] % 16, -(-x.shape[1] // 16)
    x = np.pad(x, ((0, 0), (0, padding))).reshape(n, 1, chunks, 16)
    w = np.pad(w, ((0, 0), (0, padding))).reshape(1, rows, chunks, 16)
    lanes = np.zeros((n, rows, 16), F32)
    for chunk in range(x.shape[2]):
        lanes = fused_multiply_add(x[:, :, chunk], w[:, :, chunk], lanes)
    while lanes.shape[-1] > 1:
        half = lanes.shape[-1] // 2
        lanes = lanes[..., :half] + lanes[..., half:]
    return lanes[..., 0]


def run(variant, kind, x, w):
    """The kernel on float32 weights or a PackedMatrix, into an output between two guards."""
    rows = w.rows if isinstance(w, PackedMatrix) else len(w)
    memory = np.full(len(x) * rows + 32, 77, F32)
    out = memory[16:-16].reshape(len(x), rows)
    operation = kernels_pyx.kernels(variant)[f"linear_{kind}"]
    if isinstance(w, PackedMatrix):
        operation(x, w.codes, w.scales, out)
    else:
        operation(x, w, out)
    assert (memory[:16] == 77).all() and (memory[-16:] == 77).all()
    return out


def assert_same_bits(found, expected):
    np.testing.assert_array_equal(found.view(np.uint32), expected.view(np.uint32))


def numbers(shape, seed=0, spread=6):
    """Both signs and many exponents, so that sums cancel and round at every step."""
    rng = np.random.default_rng(seed)
    return np.ldexp(rng.uniform(-1, 1, shape), rng.integers(-spread, spread, shape)).astype(F32)


def packed(kind, rows, cols, seed=1):
    return PackedMatrix.quantize(numbers((rows, cols), seed), kind)


def random_blocks(kind, rows, cols, seed=2):
    """GGUF blocks with any codes, -128 among them, and any finite scales."""
    rng = np.random.default_rng(seed)
    size = 34 if kind == "q8_0" else 18
    blocks = rng.integers(0, 256, (rows, cols // 32, size), dtype=np.uint8)
    scales = rng.integers(0, 2**16, (rows, cols // 32)).astype("<u2")
    scales = np.where((scales & 0x7C00) == 0x7C00, scales & 0x83FF, scales).astype("<u2")
    blocks[..., :2] = scales[..., None].view(np.uint8)
    return blocks.reshape(rows, cols // 32 * size)


@needs_kernels
@variants
@settings(max_examples=15)
@given(st.integers(0, 9), st.integers(0, 70), st.integers(0, 15), st.integers(0, 99))
def test_float32_is_the_literal_definition(variant, n, cols, rows, seed):
    x, w = numbers((n, cols), seed), numbers((rows, cols), seed + 1)
    assert_same_bits(run(variant, "f32", x, w), literal_f32(x, w))


@needs_kernels
@variants
@each_kind
@settings(max_examples=15)
@given(st.integers(0, 17), st.integers(1, 4), st.integers(0, 40), st.integers(0, 99))
def test_blocks_are_the_reference(variant, kind, n, blocks, rows, seed):
    x, raw = numbers((n, 32 * blocks), seed), random_blocks(kind, rows, 32 * blocks, seed)
    found = run(variant, kind, x, PackedMatrix.from_blocks(raw, kind))
    assert_same_bits(found, REFERENCE[kind](x, raw))


@needs_kernels
@variants
@pytest.mark.parametrize("sign", [1, -1])
def test_weights_of_minus_128_against_the_largest_activations(variant, sign):
    # Both at their limit in every column: 32 * 128 * 127, where 16-bit sums would saturate.
    blocks = np.zeros((17, 2, 34), np.uint8)
    blocks[..., :2] = np.array([1], "<f2").view(np.uint8)
    blocks[..., 2:] = 0x80
    matrix = PackedMatrix.from_blocks(blocks.reshape(17, -1), "q8_0")
    x = np.full((9, 64), 127 * sign, F32)
    x[1::2, ::2] *= -1
    out = run(variant, "q8_0", x, matrix)
    assert (out[::2] == -sign * 2 * 32 * 128 * 127).all()
    assert not out[1::2].any()


@needs_kernels
@variants
@each_kind
def test_the_largest_codes_of_either_sign(variant, kind):
    raw = random_blocks(kind, 32, 64)
    codes = raw.reshape(32, 2, -1)[..., 2:]
    codes[:16], codes[16:] = (127, 0x81) if kind == "q8_0" else (0xFF, 0)
    x = np.array([[1.0] * 64, [-1.0] * 64, [1.0, -1.0] * 32], F32)
    found = run(variant, kind, x, PackedMatrix.from_blocks(raw, kind))
    assert_same_bits(found, REFERENCE[kind](x, raw))


@needs_kernels
@variants
@each_kind
def test_every_float16_is_converted_exactly(variant, kind):
    scales = np.arange(2**16, dtype=np.uint16).view(np.float16)
    codes = np.zeros((4096, 8 if kind == "q8_0" else 4, 16, 4), np.int8)
    codes[:, 0, :, 0] = 1
    if kind == "q4_0":
        codes = (codes + (0x88 - 256)).view(np.uint8)
    x = np.zeros((1, 32), F32)
    x[0, 0] = 127  # scale 1
    out = np.empty((1, 2**16), F32)
    arguments = (codes, scales.reshape(4096, 1, 16), out)
    kernels_pyx.kernels(variant)[f"linear_{kind}"](x, *arguments)
    with np.errstate(invalid="ignore"):
        expected = scales.astype(F32) * 127
    finite = np.isfinite(expected)
    np.testing.assert_array_equal(out[0][finite], expected[finite])
    np.testing.assert_array_equal(np.isnan(out[0]), np.isnan(expected))
    np.testing.assert_array_equal(out[0][np.isinf(expected)], expected[np.isinf(expected)])


@needs_kernels
@variants
@each_kind
@pytest.mark.parametrize("exponent", [-140, -126, -100, -24, 0, 60, 105])
def test_activations_of_any_size(variant, kind, exponent):
    x = np.ldexp(numbers((3, 64)), exponent).astype(F32)
    raw = random_blocks(kind, 16, 64)
    found = run(variant, kind, x, PackedMatrix.from_blocks(raw, kind))
    assert_same_bits(found, REFERENCE[kind](x, raw))


@needs_kernels
@variants
def test_quantized_activations_are_the_reference(variant):
    rows = [numbers((40, 128), 3), np.ldexp(numbers((4, 128)), -24), np.zeros((1, 128))]
    ties = np.concatenate([[127], np.arange(-63.5, 63.5)])  # with 127 the values are rounded
    edge = F32(1e-6)
    near = np.tile([np.nextafter(edge, F32(0)), edge, -edge, 0], 32)
    x = np.concatenate([*rows, [np.resize(ties, 128)], [near]]).astype(F32)
    x[-2].reshape(4, 32)[:, 0] = 127
    q, scale = np.full(x.shape, 99, np.int8), np.full((len(x), 4), np.nan, F32)
    kernels_pyx.kernels(variant)["quantize_activations"](x, q, scale)
    expected_q, expected_scale = quantize_activations(x)
    np.testing.assert_array_equal(q, expected_q)
    assert_same_bits(scale, expected_scale)


@needs_kernels
@variants
@pytest.mark.parametrize("kind", ["f32", *KINDS])
@pytest.mark.parametrize(("cols", "rows"), [(96, 37), (4128, 7)])
def test_a_row_has_the_same_bits_alone_and_among_any_others(variant, kind, cols, rows):
    x = numbers((21, cols), 4)
    w = numbers((rows, cols), 5) if kind == "f32" else packed(kind, rows, cols)
    alone = np.concatenate([run(variant, kind, x[i : i + 1], w) for i in range(len(x))])
    for n in (2, 3, 5, 8, 15, 21):
        assert_same_bits(run(variant, kind, x[:n], w), alone[:n])
        assert_same_bits(run(variant, kind, x[21 - n :], w), alone[21 - n :])


@needs_kernels
@variants
@pytest.mark.parametrize(("kind", "n", "cols"), [("f32", 70, 4099), ("q8_0", 40, 2**16),
                                                 ("q4_0", 40, 2**16)])
def test_more_rows_than_are_copied_at_a_time(variant, kind, n, cols):
    x = np.repeat(numbers((1, cols), 6), n, axis=0)
    x *= np.ldexp(F32(1), np.arange(n) % 5)[:, None].astype(F32)  # every row differs, exactly
    w = numbers((3, cols), 7) if kind == "f32" else packed(kind, 3, cols)
    first = run(variant, kind, x[:1], w)
    expected = first * np.ldexp(F32(1), np.arange(n) % 5)[:, None].astype(F32)
    assert_same_bits(run(variant, kind, x, w), expected)


@needs_kernels
@variants
@pytest.mark.parametrize("kind", ["f32", *KINDS])
def test_the_number_of_threads_changes_no_bit(variant, kind):
    x = numbers((5, 256), 8)
    w = numbers((501, 256), 9) if kind == "f32" else packed(kind, 501, 256)
    one = [run(variant, kind, x[:n], w) for n in (1, 5)]
    for count in (2, 3, 64):
        for n, expected in zip((1, 5), one, strict=True):
            with shared_among(count, started=True):
                got = run(variant, kind, x[:n], w)
            assert_same_bits(got, expected)


@needs_kernels
@variants
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_a_row_that_is_not_finite_is_named_and_nothing_is_written(variant, bad):
    x = np.ones((7, 64), F32)
    x[5, 63] = bad
    bound = kernels_pyx.kernels(variant)
    out = np.full((7, 3), 9, F32)
    with pytest.raises(ValueError, match="x holds NaN or infinity in row 5"):
        bound["linear_f32"](x, np.ones((3, 64), F32), out)
    for kind in KINDS:
        matrix = packed(kind, 3, 64)
        with pytest.raises(ValueError, match="x holds NaN or infinity in row 5"):
            bound[f"linear_{kind}"](x, matrix.codes, matrix.scales, out)
    q, scale = np.full((7, 64), 9, np.int8), np.full((7, 2), 9, F32)
    with pytest.raises(ValueError, match="x holds NaN or infinity in row 5"):
        bound["quantize_activations"](x, q, scale)
    assert all((a == 9).all() for a in (out, q, scale))


@needs_kernels
@variants
def test_a_sum_beyond_float32_is_infinite_as_float_arithmetic_has_it(variant):
    x = np.full((2, 16), 3e38, F32)
    out = run(variant, "f32", x, np.full((3, 16), 2, F32))
    assert np.isposinf(out).all()


def good(kind):
    x, out = np.ones((4, 64), F32), np.zeros((4, 20), F32)
    if kind == "f32":
        return {"x": x, "w": np.ones((20, 64), F32), "out": out}
    matrix = packed(kind, 20, 64)
    return {"x": x, "codes": matrix.codes, "scales": matrix.scales, "out": out}


WRONG = [
    ("f32", "x", lambda a: a.astype(np.float64), TypeError, "x must be a float32 array of 2 axes"),
    ("f32", "x", lambda a: a[0], ValueError, "x must be .* of 2 axes"),
    ("f32", "x", lambda a: a[:, :-1], ValueError, "x must be C-contiguous"),
    ("f32", "w", lambda a: a[:, :60].copy(), ValueError, r"w must have shape \(20, 64\)"),
    ("f32", "w", lambda a: np.asfortranarray(a), ValueError, "w must be C-contiguous"),
    ("f32", "w", lambda a: a.astype(np.float16), TypeError, "w must be a float32"),
    ("f32", "out", lambda a: a[:, :19].copy(), ValueError, r"out must have shape \(4, 20\)"),
    ("f32", "out", lambda a: a[:3], ValueError, r"out must have shape \(4, 20\)"),
    ("q8_0", "x", lambda a: a[:, :48].copy(), ValueError, "multiple of 32 values, not 48"),
    ("q8_0", "x", lambda a: a[:, :0], ValueError, "multiple of 32 values, not 0"),
    ("q8_0", "x", lambda a: a[:, :32].copy(), ValueError, "codes must have shape .*32 columns"),
    ("q8_0", "codes", lambda a: a.view(np.uint8), TypeError, "codes must be a int8"),
    ("q8_0", "codes", lambda a: a[:1], ValueError, "codes must have shape .*20 outputs"),
    ("q8_0", "scales", lambda a: a.astype(F32), TypeError, "scales must be a float16"),
    ("q8_0", "scales", lambda a: a[:, :1].copy(), ValueError, "scales must have shape"),
    ("q8_0", "out", lambda a: np.zeros((4, 33), F32), ValueError, "codes must have shape"),
    ("q8_0", "out", lambda a: a[:3], ValueError, r"out must have shape \(4, 20\)"),
    ("q4_0", "codes", lambda a: a.view(np.int8), TypeError, "codes must be a uint8"),
    ("q4_0", "codes", lambda a: np.repeat(a, 2, axis=1), ValueError, "codes must have shape"),
    ("q4_0", "scales", lambda a: a[..., ::2], ValueError, "scales must be C-contiguous"),
]


@needs_kernels
@variants
@pytest.mark.parametrize(("kind", "name", "spoil", "error", "message"), WRONG)
def test_wrong_arguments_are_named(variant, kind, name, spoil, error, message):
    arguments = good(kind)
    arguments[name] = spoil(arguments[name])
    with pytest.raises(error, match=message):
        kernels_pyx.kernels(variant)[f"linear_{kind}"](**arguments)
    assert not arguments["out"].any()


@needs_kernels
@variants
def test_wrong_outputs_of_quantize_activations_are_named(variant):
    quantize = kernels_pyx.kernels(variant)["quantize_activations"]
    x, q, scale = np.ones((2, 64), F32), np.zeros((2, 64), np.int8), np.zeros((2, 2), F32)
    with pytest.raises(ValueError, match=r"out_q must have shape \(2, 64\)"):
        quantize(x, q[:1], scale)
    with pytest.raises(ValueError, match=r"out_scale must have shape \(2, 2\)"):
        quantize(x, q, scale[:, :1].copy())
    with pytest.raises(ValueError, match="multiple of 32 values, not 33"):
        quantize(np.ones((2, 33), F32), q, scale)


# --- course_lib.linear ---------------------------------------------------------------------------


@each_kind
@settings(max_examples=20)
@given(st.integers(0, 40), st.integers(1, 3))
def test_packing_loses_nothing(kind, rows, count):
    raw = random_blocks(kind, rows, 32 * count)
    matrix = PackedMatrix.from_blocks(raw, kind)
    assert (matrix.rows, matrix.cols, matrix.kind) == (rows, 32 * count, kind)
    np.testing.assert_array_equal(matrix.to_blocks(), raw)
    assert_same_bits(matrix.dequantize(), DEQUANTIZE[kind](raw))
    padded = -(-rows // 16) * 16
    assert matrix.nbytes == padded * count * (34 if kind == "q8_0" else 18)


def test_where_a_weight_lies_in_a_panel():
    blocks = np.zeros((18, 2, 34), np.uint8)
    blocks[17, 1, 2 + 6] = 5  # row 17, column 32 + 6
    matrix = PackedMatrix.from_blocks(blocks.reshape(18, -1), "q8_0")
    assert np.argwhere(matrix.codes).tolist() == [[1, (32 + 6) // 4, 1, 2]]
    blocks = np.zeros((18, 2, 18), np.uint8)
    blocks[17, 1, 2 + 6] = 0x50  # row 17, column 32 + 16 + 6
    matrix = PackedMatrix.from_blocks(blocks.reshape(18, -1), "q4_0")
    assert np.argwhere(matrix.codes).tolist() == [[1, 4 + 1, 1, 2]]


@pytest.mark.parametrize("kernel", ("numpy", *kernels_pyx.VARIANTS))
@each_kind
def test_linear_with_packed_weights_has_the_same_bits_without_kernels(kernel, kind, monkeypatch):
    monkeypatch.setenv("COURSE_KERNEL", kernel)
    x, w = numbers((2, 3, 64), 10), numbers((21, 64), 11)
    out = linear(x, PackedMatrix.quantize(w, kind))
    assert out.shape == (2, 3, 21) and out.dtype == F32
    assert_same_bits(out.reshape(6, 21), REFERENCE[kind](x.reshape(6, 64), QUANTIZE[kind](w)))


@pytest.mark.parametrize("kernel", ("numpy", *kernels_pyx.VARIANTS))
def test_linear_with_float32_weights(kernel, monkeypatch):
    monkeypatch.setenv("COURSE_KERNEL", kernel)
    x, w = numbers((2, 3, 50), 12), numbers((21, 50), 13)
    out = linear(x, w)
    assert out.shape == (2, 3, 21) and out.dtype == F32
    exact = x.astype(np.float64) @ w.T.astype(np.float64)
    # 50 roundings of partial sums, none larger than the sum of magnitudes.
    bound = 50 * 2.0**-24 * (np.abs(x).astype(np.float64) @ np.abs(w).T)
    assert (np.abs(out - exact) <= bound).all()
    assert linear(x[0, 0], w).shape == (21,)
    assert linear(x[:0], w).shape == (0, 3, 21)
    assert linear(x, w[:0]).shape == (2, 3, 0)
    assert not linear(np.zeros((2, 0), F32), np.zeros((3, 0), F32)).any()


@pytest.mark.parametrize("kernel", ("numpy", *kernels_pyx.VARIANTS))
def test_linear_names_what_is_wrong(kernel, monkeypatch):
    monkeypatch.setenv("COURSE_KERNEL", kernel)
    x, w = np.ones((2, 64), F32), np.ones((5, 64), F32)
    with pytest.raises(ValueError, match=r"x must have 64 columns.* not shape \(2, 32\)"):
        linear(x[:, :32], w)
    with pytest.raises(TypeError, match="w must be a float32 array .*not float64"):
        linear(x, w.astype(np.float64))
    with pytest.raises(TypeError, match="w must be .*not list"):
        linear(x, w.tolist())
    for weights in (w, PackedMatrix.quantize(w)):
        bad = x.copy()
        bad[1, 7] = np.nan
        with pytest.raises(ValueError, match="x holds NaN or infinity at token 1"):
            linear(bad, weights)


@needs_kernels
def test_linear_uses_the_kernels(monkeypatch):
    used = []

    def kernel(name):
        used.append(name)
        return kernels_pyx.kernels(kernels_pyx.VARIANTS[0])[name]

    monkeypatch.setattr(backend, "kernel", kernel)
    x = np.ones((1, 32), F32)
    linear(x, np.ones((2, 32), F32))
    for kind in KINDS:
        linear(x, PackedMatrix.quantize(np.ones((2, 32)), kind))
    assert used == ["linear_f32", "pack_q8_0", "linear_q8_0", "pack_q4_0", "linear_q4_0"]


@pytest.mark.parametrize("kind", ["q8_0", "q4_0"])
def test_rows_are_taken_without_the_others(kind):
    matrix = PackedMatrix.quantize(numbers((37, 96), 5), kind)
    whole = matrix.dequantize()
    for ids in ([36, 0, 16, 15, 0], np.array([5], np.uint8), [], range(37)):
        found = matrix.take(ids)
        assert found.dtype == np.float32 and found.flags.c_contiguous
        np.testing.assert_array_equal(found, whole[np.asarray(ids, int)])
    for bad in ([37], [-1], [1.0], 3, [[1]], np.array([2**63], np.uint64)):
        with pytest.raises(IndexError, match="ids must be"):
            matrix.take(bad)
