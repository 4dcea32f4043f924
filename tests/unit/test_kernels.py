"""The compiled kernels against the NumPy definitions, bit by bit, and their checks of arguments."""

from __future__ import annotations

import os
import re

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

import kernels_pyx
from course_lib import backend, quant
from course_lib.paths import ROOT
from course_lib.quant import ROUNDING_RULES
from tests.spoiled import misaligned, read_only

F32 = np.float32
needs_kernels = pytest.mark.skipif(
    not kernels_pyx.VARIANTS and os.environ.get("COURSE_REQUIRE_KERNELS") != "1",
    reason="the kernels are not compiled here",
)
variants = pytest.mark.parametrize("variant", kernels_pyx.VARIANTS or ("portable",))


def reference(x, rule):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(backend, "kernel", lambda name: None)
        return quant.quantize_rows(x, rule)


def compiled(x, rule, variant="portable"):
    q, scale = np.full(x.shape, 99, np.int8), np.full(x.shape[0], np.nan, F32)
    code = ROUNDING_RULES.index(rule)
    kernels_pyx.kernels(variant)["quantize_rows"](x, code, q, scale)
    return q, scale


def assert_same_bits(x, variant):
    for rule in ROUNDING_RULES:
        (q, scale), (expected_q, expected_scale) = compiled(x, rule, variant), reference(x, rule)
        np.testing.assert_array_equal(q, expected_q, err_msg=rule)
        np.testing.assert_array_equal(scale.view(np.uint32), expected_scale.view(np.uint32))


@needs_kernels
@variants
@given(arrays(F32, st.tuples(st.integers(0, 5), st.integers(1, 70)),
              elements=st.floats(width=32, allow_nan=False, allow_infinity=False)))
def test_any_finite_rows(variant, x):
    assert_same_bits(x, variant)


@needs_kernels
@variants
def test_rows_full_of_ties_and_their_neighbours(variant):
    # With a largest magnitude of 127 the factor is 1, and the values are what is rounded.
    ties = np.arange(-127, 127, dtype=F32) + F32(0.5)
    x = np.stack([ties, np.nextafter(ties, F32(0)), np.nextafter(ties, F32(1000))])
    x = np.concatenate([x, np.full((3, 1), 127, F32)], axis=1)
    assert_same_bits(x, variant)


@needs_kernels
@variants
def test_every_exponent_and_every_length_around_a_vector(variant):
    rng = np.random.default_rng(20)
    for exponent in range(-45, 39):
        assert_same_bits((rng.uniform(-1, 1, (4, 33)) * 10.0**exponent).astype(F32), variant)
    for d in range(1, 70):
        assert_same_bits(rng.standard_normal((3, d), F32), variant)


@needs_kernels
@variants
def test_the_guard_for_tiny_rows_starts_where_the_definition_says(variant):
    edge = F32(1e-6)
    x = np.array([[np.nextafter(edge, F32(0))], [edge], [np.nextafter(edge, F32(1))], [0]], F32)
    assert_same_bits(x, variant)
    assert_same_bits(-x, variant)


@needs_kernels
@variants
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_a_bad_row_is_named_and_nothing_is_written(variant, bad):
    x = np.ones((5, 40), F32)
    x[3, 39] = bad
    q, scale = np.full(x.shape, 99, np.int8), np.full(5, 7, F32)
    with pytest.raises(ValueError, match="NaN or infinity in row 3"):
        kernels_pyx.kernels(variant)["quantize_rows"](x, 0, q, scale)
    assert (q == 99).all() and (scale == 7).all()


def good():
    return [np.ones((4, 8), F32), 0, np.zeros((4, 8), np.int8), np.zeros(4, F32)]


@needs_kernels
@variants
def test_read_only_input_is_taken(variant):
    arguments = good()
    arguments[0] = read_only(arguments[0])
    kernels_pyx.kernels(variant)["quantize_rows"](*arguments)
    assert (arguments[2] == 127).all()


WRONG = [
    (0, lambda x: [[1.0]], TypeError, "x must be a float32 array"),
    (0, lambda x: None, TypeError, "x must be a float32 array"),
    (0, lambda x: b"12345678", TypeError, "x must be a float32 array"),
    (0, lambda x: x.astype(np.float64), TypeError, "x must be a float32 array"),
    (0, lambda x: x.astype(np.int32), TypeError, "x must be a float32 array"),
    (0, lambda x: x.astype(">f4"), TypeError, "x must be .*native byte order"),
    (0, lambda x: x[::2], ValueError, "x must be C-contiguous"),
    (0, lambda x: np.asfortranarray(x), ValueError, "x must be C-contiguous"),
    (0, lambda x: x[0], ValueError, "x must be .* 2 axes"),
    (0, lambda x: x[None], ValueError, "x must be .* 2 axes"),
    (0, lambda x: misaligned(x), ValueError, "x is misaligned"),
    (0, lambda x: x[:, :0], ValueError, "x must have at least one value"),
    (1, lambda code: 4, ValueError, "rule_code"),
    (1, lambda code: -1, ValueError, "rule_code"),
    (1, lambda code: 2**40, (ValueError, OverflowError), None),
    (1, lambda code: "half_up", TypeError, None),
    (2, lambda q: q.astype(np.uint8), TypeError, "out_q must be a writable int8"),
    (2, lambda q: q[:3], ValueError, "out_q must have shape"),
    (2, lambda q: q[:, :7].copy(), ValueError, "out_q must have shape"),
    (2, lambda q: read_only(q), ValueError, "out_q must be .*read-only"),
    (3, lambda scale: scale[:3], ValueError, "out_scale must have shape"),
    (3, lambda scale: scale[:, None], ValueError, "out_scale must be .* 1 axes"),
    (3, lambda scale: read_only(scale), ValueError, "out_scale must be .*read-only"),
    (3, lambda scale: np.zeros(8, F32)[::2], ValueError, "out_scale must be C-contiguous"),
]


@needs_kernels
@variants
@pytest.mark.parametrize(("index", "spoil", "error", "message"), WRONG)
def test_wrong_arguments_are_named(variant, index, spoil, error, message):
    arguments = good()
    arguments[index] = spoil(arguments[index])
    with pytest.raises(error, match=message):
        kernels_pyx.kernels(variant)["quantize_rows"](*arguments)
    assert not arguments[2].any() and not arguments[3].any()


@needs_kernels
def test_the_backend_uses_the_kernel(monkeypatch):
    monkeypatch.setenv("COURSE_KERNEL", "portable")
    assert backend.kernel("quantize_rows") is kernels_pyx.kernels("portable")["quantize_rows"]


HEADERS = sorted((ROOT / "kernels_pyx" / "c").glob("*.h"))
TABLES = [(path.with_suffix(".c"), struct, body) for path in HEADERS for struct, body in re.findall(
    r"^struct (\w*kernels) \{\n(.*?)^\};", path.read_text(), re.DOTALL | re.MULTILINE)
    if struct != "kernels"]


@pytest.mark.parametrize(("source", "struct", "body"), TABLES, ids=[row[1] for row in TABLES])
def test_every_entry_of_a_table_is_filled(source, struct, body):
    """C fills what a table leaves out with NULL, and says nothing."""
    entries = re.findall(r"\(\*(\w+)\)\(|\w+_function \*(\w+);", re.sub(r"/\*.*?\*/", "", body,
                                                                     flags=re.DOTALL))
    table = re.search(rf"struct {struct} {struct} = \{{\n(.*?)\}};", source.read_text(), re.DOTALL)
    assert table
    filled = re.findall(r"^    \.(\w+) = \w+,$", table[1], re.MULTILINE)
    assert filled == [function or typed for function, typed in entries] != []


def test_every_family_has_a_table():
    assert {struct for _, struct, _ in TABLES} == set(
        re.findall(r"&(\w+_kernels)", (ROOT / "kernels_pyx/c/variant.h").read_text())) != set()
