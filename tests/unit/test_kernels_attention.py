"""Decode attention kernels: equal to their definition to the bit on every variant, near the oracle.

`literal` states the definition in Python. A fused multiply-add is float64 arithmetic rounded once
more: the product of two float32 is exact there.
"""

from __future__ import annotations

import math
import os

import numpy as np
import pytest

import kernels_pyx
from course_lib import attention, backend
from course_lib.arrays import LayerRows, NotFiniteError
from course_lib.quant import quantize_blocks, quantize_rows
from tests.sharing import shared_among
from tests.spoiled import misaligned, read_only
from tests.unit.test_attention import oracle, single_pass_oracle

F32 = np.float32
pytestmark = pytest.mark.skipif(
    not kernels_pyx.VARIANTS and os.environ.get("COURSE_REQUIRE_KERNELS") != "1",
    reason="the kernels are not compiled here",
)
variants = pytest.mark.parametrize("variant", kernels_pyx.VARIANTS or ("portable",))
others = pytest.mark.parametrize("variant", [v for v in kernels_pyx.VARIANTS if v != "portable"])
OPERATIONS = ("two_pass", "single_pass", "single_pass_q8", "single_pass_q8_row")
Q8_QUERY = {"single_pass_q8": "group", "single_pass_q8_row": "row"}
"""Operations with an int8 query -> the library's `query_scales`."""
operations = pytest.mark.parametrize("name", OPERATIONS)
CASES = [(name, dtype) for name in OPERATIONS for dtype in ("f32", "q8")
         if name not in Q8_QUERY or dtype == "q8"]
cases = pytest.mark.parametrize(("name", "dtype"), CASES)


def made(group=2, num_kv_heads=2, n=70, d=32, seed=0, dtype="q8", spread=1.0):
    """q and rows, which are views of a longer cache whose other rows hold NaN."""
    rng = np.random.default_rng(seed)
    q = (rng.standard_normal((group * num_kv_heads, d)) * spread).astype(F32)
    k, v = rng.standard_normal((2, num_kv_heads, n + 3, d)).astype(F32)
    if dtype == "f32":
        k[:, n:] = v[:, n:] = np.nan
        return q, LayerRows(k, v).upto(n)
    (k, k_scale), (v, v_scale) = quantize_rows(k), quantize_rows(v * 3)
    k_scale[:, n:] = v_scale[:, n:] = np.nan
    return q, LayerRows(k, v, k_scale, v_scale).upto(n)


def run(variant, name, q, rows, blocks=None, block_size=32):
    out = np.full_like(q, np.nan)
    kernels_pyx.kernels(variant)[name](q, *rows, blocks, block_size, out)
    return out


def assert_same_bits(a, b, message=""):
    np.testing.assert_array_equal(a.view(np.uint32), b.view(np.uint32), err_msg=message)


def block_lists(rng, lists, n, block_size):
    """Blocks in any order, as many in each list."""
    n_blocks = -(-n // block_size)
    count = int(rng.integers(1, n_blocks + 1))
    return np.stack([rng.permutation(n_blocks)[:count] for _ in range(lists)]).astype(np.int32)


def fma(a, b, c):
    return (np.asarray(a, np.float64) * b + c).astype(F32)


def tree(lanes):
    """v16_sum: halves added to halves."""
    lanes = lanes.copy()
    for half in (8, 4, 2, 1):
        lanes[:half] += lanes[half : 2 * half]
    return lanes[0]


def padded(x):
    return np.concatenate([x, np.zeros(-len(x) % 16, x.dtype)])


def kernel_exp(x):
    out = np.empty_like(x)
    kernels_pyx.kernels("portable")["exp"](x, out)
    return out


def literal_scores(name, q, rows):
    scores = []
    group = len(q) if name == "single_pass_q8_row" else 32
    codes, scales = quantize_blocks(q, group) if name in Q8_QUERY else (None, None)
    for t, key in enumerate(rows.k):
        if codes is not None:
            dot = F32(0)
            for g, scale in enumerate(scales):
                part = slice(group * g, group * (g + 1))
                dot = fma(scale, F32(int(codes[part].astype(int) @ key[part].astype(int))), dot)
        else:
            acc = np.zeros(16, F32)
            wide = padded(key.astype(F32))
            for c in range(0, len(wide), 16):
                acc = fma(padded(q)[c : c + 16], wide[c : c + 16], acc)
            dot = tree(acc)
        if rows.k_scale is not None:
            dot = F32(dot * rows.k_scale[t])
        scores.append(F32(dot * (F32(1) / np.sqrt(F32(len(q))))))
    return np.array(scores, F32)


def literal(name, q, rows):
    """One query [d] over rows of one head, token after token."""
    scores = literal_scores(name, q, rows)
    out = np.zeros(len(q), F32)
    step = len(scores) if name == "two_pass" else 32
    running, total = F32(-np.inf), F32(0)
    for first in range(0, len(scores), step):
        block = scores[first : first + step]
        largest = max(running, block.max())
        if name != "two_pass" and largest > running:
            shrink = kernel_exp(np.array([running - largest], F32))[0]
            out, total = out * shrink, F32(total * shrink)
        running = largest
        weights = kernel_exp(block - running)
        lanes = np.zeros(16, F32)
        for chunk in padded(weights).reshape(-1, 16):
            lanes = lanes + chunk
        total = F32(total + tree(lanes))
        if name == "two_pass":
            weights = weights / total
        if rows.v_scale is not None:
            weights = weights * rows.v_scale[first : first + step]
        for w, value in zip(weights, rows.v[first : first + step], strict=True):
            out = fma(w, value, out)
    return out if name == "two_pass" else out / total


@cases
@pytest.mark.parametrize(("n", "d"), [(1, 32), (5, 64), (33, 32), (70, 128), (100, 96), (40, 160)])
def test_portable_is_the_definition(name, dtype, n, d):
    q, rows = made(3, 2, n, d, seed=n + d, dtype=dtype, spread=3)
    got = run("portable", name, q, rows)
    for h in range(6):
        assert_same_bits(got[h], literal(name, q[h], rows.head(h // 3)), f"head {h}")


@pytest.mark.parametrize("dtype", ["f32", "q8"])
@pytest.mark.parametrize("name", ["two_pass", "single_pass"])
@pytest.mark.parametrize("d", [1, 7, 15, 17, 31, 100])
def test_portable_is_the_definition_for_any_length_of_row(name, dtype, d):
    q, rows = made(1, 2, 37, d, seed=d, dtype=dtype, spread=2)
    got = run("portable", name, q, rows)
    for h in range(2):
        assert_same_bits(got[h], literal(name, q[h], rows.head(h)))


def shapes():
    """d, n, group, KV heads: every length of row, every remainder of tokens and queries."""
    for d in range(1, 131):
        yield d, d * 7 % 37 + 1, d % 8 + 1, 1
    for n in range(1, 66):
        yield (64, 128)[n % 2], n, n % 3 + 1, 2
    for n in (96, 129, 200):
        yield 128, n, 2, 2


@others
@cases
def test_every_variant_has_the_bits_of_portable(variant, name, dtype):
    rng = np.random.default_rng(6)
    for d, n, group, num_kv_heads in list(shapes())[:: 9 if variant == "portable-baseline" else 1]:
        if name in Q8_QUERY:
            d = -(-d // 32) * 32
        q, rows = made(group, num_kv_heads, n, d, seed=d + n, dtype=dtype, spread=3)
        block_size = int(rng.choice([1, 8, 16, 32, 33, 500]))
        lists = int(rng.choice([1, group])) * num_kv_heads
        for blocks in (None, block_lists(rng, lists, n, block_size)):
            assert_same_bits(run(variant, name, q, rows, blocks, block_size),
                             run("portable", name, q, rows, blocks, block_size),
                             f"d {d}, n {n}, group {group}, block_size {block_size}")


@variants
@operations
def test_the_lowest_int8_that_only_foreign_rows_hold(variant, name):
    q, rows = made(n=40, d=64)
    lowest = np.full(rows.k.shape, -128, np.int8)
    for codes in (lowest, np.where(np.arange(64) % 3 == 0, lowest, rows.k)):
        spoiled = rows._replace(k=codes, v=codes)
        q[0] = F32(127)  # every product of a group at its largest
        got = run(variant, name, q, spoiled)
        for h in range(4):
            assert_same_bits(got[h], literal(name, q[h], spoiled.head(h // 2)))


@variants
@cases
@pytest.mark.parametrize("n", [1, 31, 64, 257])
@pytest.mark.parametrize("spread", [1, 30])
def test_near_the_oracle_and_numpy(variant, name, dtype, n, spread):
    """The bound that test_attention derives for float32 holds for the kernels too: their sums have
    no more roundings than it counts, and its 16 u cover the 3 ulp of the exponential function."""
    if variant == "portable-baseline" and n > 100:
        pytest.skip("slow")
    q, rows = made(2, 2, n, 64, seed=n, dtype=dtype, spread=spread)
    numpy_name = {"single_pass": "online"}.get(name, name)
    options = {}
    if name in Q8_QUERY:
        arguments = (q, rows.k, rows.k_scale, rows.v, rows.v_scale)
        numpy_name, options = "single_pass_q8", {"query_scales": Q8_QUERY[name]}
        want, bound = single_pass_oracle(*arguments, **options)
    else:
        arguments = (q, *rows)
        want, bound = oracle(*arguments)
    got = run(variant, name, q, rows)
    assert (np.abs(got - want) <= bound).all()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(backend, "kernel", lambda name: None)
        reference = getattr(attention, numpy_name)(*arguments, **options)
    assert (np.abs(got.astype(float) - reference) <= 2 * bound).all()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(backend, "kernel", lambda name: kernels_pyx.kernels(variant)[name])
        assert_same_bits(getattr(attention, numpy_name)(*arguments, **options), got)


@variants
@cases
def test_the_number_of_threads_changes_no_bit(variant, name, dtype):
    q, rows = made(3, 5, 90, 64, dtype=dtype)
    lists = block_lists(np.random.default_rng(1), 15, 90, 16)
    results = []
    for count in (1, 2, 3, 8):
        result = []
        for arguments in ((q, rows), (q, rows, lists, 16)):
            with shared_among(count, started=count > 1):
                result.append(run(variant, name, *arguments))
        results.append(result)
    for result in results[1:]:
        for a, b in zip(result, results[0], strict=True):
            assert_same_bits(a, b)


@variants
@cases
@pytest.mark.parametrize("n", [1, 32, 77])
def test_all_blocks_in_order_are_dense_attention(variant, name, dtype, n):
    q, rows = made(2, 3, n, 32, dtype=dtype)
    dense = run(variant, name, q, rows)
    for block_size in (1, 7, 16, 32, 77, 1000, 2**62):
        ids = np.arange(-(-n // block_size), dtype=np.int32)
        for lists in (3, 6):
            assert_same_bits(run(variant, name, q, rows, np.tile(ids, (lists, 1)), block_size),
                             dense, f"block_size {block_size}, {lists} lists")


@variants
@cases
def test_tokens_are_read_in_the_order_of_each_list(variant, name, dtype):
    n, block_size = 75, 8
    q, rows = made(3, 2, n, 32, dtype=dtype)
    for lists in (2, 6):
        blocks = block_lists(np.random.default_rng(lists), lists, n, block_size)
        got = run(variant, name, q, rows, blocks, block_size)
        for h in range(6):
            tokens = [t for b in blocks[h * lists // 6]
                      for t in range(b * block_size, min((b + 1) * block_size, n))]
            own = rows.map(lambda a, h=h, tokens=tokens:
                           np.ascontiguousarray(a[h // 3 : h // 3 + 1, tokens]))
            assert_same_bits(got[h : h + 1], run(variant, name, q[h : h + 1], own))


@variants
def test_foreign_layouts_are_copied_and_views_are_not(variant, monkeypatch):
    q, rows = made(2, 2, 50, 64)
    monkeypatch.setattr(backend, "kernel", lambda name: kernels_pyx.kernels(variant)[name])
    want = attention.two_pass(q, *rows)
    token_major = rows.map(lambda a: np.ascontiguousarray(a.swapaxes(0, 1)).swapaxes(0, 1))
    backwards = rows.map(lambda a: np.ascontiguousarray(a[::-1])[::-1])
    for other in (token_major, backwards):
        assert not other.k[0].flags.c_contiguous or other.k.strides[0] < 0
        assert_same_bits(attention.two_pass(q, *other), want)
    same = np.broadcast_to(rows.k[:1], rows.k.shape)
    assert_same_bits(attention.two_pass(q, same, *rows[1:]),
                     attention.two_pass(q, same.copy(), *rows[1:]))
    assert attention.whole_heads(rows.k) is rows.k


@variants
@cases
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_a_bad_row_is_named(variant, name, dtype, bad, monkeypatch):
    q, rows = made(2, 2, 70, 32, dtype=dtype, spread=40)
    monkeypatch.setattr(backend, "kernel", lambda name: kernels_pyx.kernels(variant)[name])
    for part, message in (("k", "the score of K row 41 "), ("v", "a V row or its scale is bad")):
        field = part if dtype == "f32" else f"{part}_scale"
        array = getattr(rows, field).copy()
        array[1, 41] = bad
        spoiled = rows._replace(**{field: array})
        with pytest.raises(ValueError, match=message):
            run(variant, name, q, spoiled)
        with pytest.raises(ValueError, match=message):  # block 20 of 2 tokens, read first
            run(variant, name, q, spoiled, np.array([[1, 20], [20, 1]], np.int32), 2)
        if name not in Q8_QUERY:
            with pytest.raises(NotFiniteError, match=rf"{message}.*\.$"):
                getattr(attention, {"single_pass": "online"}.get(name, name))(q, *spoiled)
        run(variant, name, q, spoiled, np.array([[1, 20], [21, 1]], np.int32), 2)  # not read


@variants
@cases
def test_of_several_bad_rows_the_first_head_s_is_named(variant, name, dtype):
    q, rows = made(2, 2, 70, 32, dtype=dtype)
    field, other = ("v", "k") if dtype == "f32" else ("v_scale", "k_scale")
    values, keys = getattr(rows, field).copy(), getattr(rows, other).copy()
    values[0, 3] = np.nan
    keys[1, 5] = keys[1, 9] = keys[1, 69] = np.inf  # the last one is not read with the others
    with pytest.raises(ValueError, match="V row"):
        run(variant, name, q, rows._replace(**{field: values, other: keys}))
    with pytest.raises(ValueError, match="K row 5 "):
        run(variant, name, q, rows._replace(**{other: keys}))
    with pytest.raises(ValueError, match="K row 9 "):
        run(variant, name, q, rows._replace(**{other: keys}),
            np.array([[2, 1], [2, 1]], np.int32), 4)


def with_value(array, value):
    array = array.copy()
    array[1, 1] = value
    return array


NAMES = ("q", "k", "v", "k_scale", "v_scale", "blocks", "block_size", "out")
WRONG = [
    ("q", lambda a: a.tolist(), TypeError, "q must be a float32 array"),
    ("q", lambda a: a.astype(np.float64), TypeError, "q must be a float32"),
    ("q", lambda a: a.astype(">f4"), TypeError, "q must be .* native"),
    ("q", lambda a: a[0], ValueError, "q must be .* 2 axes"),
    ("q", lambda a: np.asfortranarray(a), ValueError, "q must be C-contiguous"),
    ("q", misaligned, ValueError, "q is misaligned"),
    ("q", lambda a: a[:0], ValueError, "q must hold at least one query"),
    ("q", lambda a: a[:, :0], ValueError, "q must hold at least one query"),
    ("q", lambda a: a[:3], ValueError, "q has 3 heads, which do not divide over the 2"),
    ("q", lambda a: np.zeros((4, 64), F32), ValueError, "k must have shape .* to fit q"),
    ("q", lambda a: with_value(a, np.nan), ValueError, "q holds NaN or infinity in row 1"),
    ("q", lambda a: with_value(a, -np.inf), ValueError, "q holds NaN or infinity in row 1"),
    ("k", lambda a: a.astype(np.uint8), TypeError, "k must be a int8"),
    ("k", lambda a: a.astype(F32), TypeError, "k must be a int8"),
    ("k", lambda a: a[0], ValueError, "k must be .* 3 axes"),
    ("k", lambda a: a[:, :0], ValueError, "the context is empty"),
    ("k", lambda a: a[:0], ValueError, "the context is empty"),
    ("k", lambda a: a[:, ::2], ValueError, "k must be C-contiguous"),
    ("k", lambda a: a[::-1], ValueError, "k must be C-contiguous"),
    ("k", lambda a: np.broadcast_to(a[:1], a.shape), ValueError, "k must be C-contiguous"),
    ("v", lambda a: a[:, 1:], ValueError, "v must have shape .* like k"),
    ("v", lambda a: a.astype(F32), TypeError, "v must be a int8"),
    ("k_scale", lambda a: None, TypeError, "k_scale"),
    ("v_scale", lambda a: None, TypeError, "v_scale"),
    ("k_scale", lambda a: a[:, 1:], ValueError, "k_scale must have shape"),
    ("v_scale", lambda a: a[0], ValueError, "v_scale must be .* 2 axes"),
    ("v_scale", misaligned, ValueError, "v_scale is misaligned"),
    ("blocks", lambda a: a.astype(np.int64), TypeError, "blocks must be a int32"),
    ("blocks", lambda a: a[0], ValueError, "blocks must be .* 2 axes"),
    ("blocks", lambda a: a[:1], ValueError, "blocks must have a list for each of 4 query heads"),
    ("blocks", lambda a: a[:, :0], ValueError, "at least one block in each list"),
    ("blocks", lambda a: with_value(a, 3), ValueError, "blocks holds 3 in list 1.* 0 to 2"),
    ("blocks", lambda a: with_value(a, -1), ValueError, "blocks holds -1 in list 1"),
    ("blocks", lambda a: with_value(a, 1), ValueError, "blocks holds 1 twice in list 1"),
    ("block_size", lambda a: 0, ValueError, "block_size must be 1 to"),
    ("block_size", lambda a: 2**70, ValueError, "block_size must be 1 to"),
    ("block_size", lambda a: 32.0, TypeError, "block_size must be a whole number"),
    ("out", read_only, ValueError, "out must be a writable"),
    ("out", lambda a: a[:3], ValueError, "out must have shape"),
    ("out", lambda a: a.astype(np.float64), TypeError, "out must be a writable float32"),
    ("out", lambda a: np.zeros((8, 32), F32)[::2], ValueError, "out must be C-contiguous"),
]


@variants
@operations
@pytest.mark.parametrize(("argument", "spoil", "error", "message"), WRONG)
def test_wrong_arguments_are_named(variant, name, argument, spoil, error, message):
    q, rows = made()
    blocks = np.array([[0, 2], [1, 0]], np.int32)
    arguments = [q, *rows, blocks, 32, np.zeros_like(q)]
    position = NAMES.index(argument)
    arguments[position] = spoil(arguments[position])
    with pytest.raises(error, match=message):
        kernels_pyx.kernels(variant)[name](*arguments)
    assert not np.any(arguments[-1])


@variants
def test_more_wrong_arguments(variant):
    q, rows = made()
    kernel = kernels_pyx.kernels(variant)
    with pytest.raises(ValueError, match="out must not share memory with q"):
        kernel["two_pass"](q, *rows, None, 32, q)
    _, floats = made(dtype="f32")
    short, short_rows = made(d=48)
    for name in Q8_QUERY:
        with pytest.raises(TypeError, match=f"{name} takes int8 rows only"):
            kernel[name](q, *floats, None, 32, np.zeros_like(q))
        with pytest.raises(ValueError, match="q must have a multiple of 32"):
            kernel[name](short, *short_rows, None, 32, np.zeros_like(short))
    long, long_rows = made(1, 1, 1, 132128)
    with pytest.raises(ValueError, match="q must have at most 132096 values a row, not 132128: "
                                         "the int32 sum of a row's products could overflow"):
        kernel["single_pass_q8_row"](long, *long_rows, None, 32, np.zeros_like(long))


@variants
@pytest.mark.parametrize("d", [1056, 1280, 132096])
def test_a_long_row_s_sum_is_exact_and_rounded_once(variant, d):
    """Sums above 2**24, which no float holds, up to the largest of an int32."""
    q, rows = made(2, 1, 21, d, seed=d)
    q = np.abs(q) + F32(1)
    q[1] = 3
    codes = np.abs(rows.k)
    codes[:, 5:15] = -128
    codes[:, 10, ::3] = 127
    rows = rows._replace(k=codes, k_scale=rows.k_scale / 10000)
    got = run(variant, "single_pass_q8_row", q, rows)
    largest = (quantize_blocks(q, d)[0].astype(np.int64) @ codes[0].T.astype(np.int64))
    assert 2**24 < abs(largest).max() == d * 127 * 128
    for h in range(2):
        assert_same_bits(got[h], literal("single_pass_q8_row", q[h], rows.head(0)))


@variants
def test_read_only_arrays_are_taken(variant):
    q, rows = made()
    for name in OPERATIONS:
        assert_same_bits(run(variant, name, read_only(q), rows.map(read_only)),
                         run(variant, name, q, rows))


def floats_between(low, high, count):
    """Evenly spaced bit patterns of one sign: every exponent has its share."""
    bits = np.array([low, high], F32).view(np.int32)
    return np.linspace(*bits, count).astype(np.int32).view(F32)


@variants
def test_exp_is_within_3_ulp_and_has_the_same_bits(variant):
    count = 20_001 if variant == "portable-baseline" else 300_001
    x = np.concatenate([
        floats_between(-1e-30, -87.0, count), floats_between(1e-30, 88.0, count),
        np.linspace(-87, 88, count, dtype=F32), np.array([0, -0.0, -87, 88, 1e-45, -1e-45], F32)])
    got = np.full_like(x, np.nan)
    kernels_pyx.kernels(variant)["exp"](x, got)
    exact = np.exp(x.astype(np.float64))
    ulp = np.spacing(np.maximum(exact, np.finfo(F32).tiny).astype(F32)).astype(np.float64)
    assert (np.abs(got - exact) < 3 * ulp).all()
    assert_same_bits(got, kernel_exp(x))
    assert kernel_exp(np.zeros(1, F32))[0] == 1


@variants
def test_exp_below_its_range_is_0_and_above_it_an_error(variant):
    exp = kernels_pyx.kernels(variant)["exp"]
    x = np.array([np.nextafter(F32(-87), F32(-88)), -87.3, -104, -3e38, -np.inf], F32)
    exp(x, x)
    assert not x.any() and not np.signbit(x).any()
    for bad in (np.nextafter(F32(88), F32(89)), np.inf, np.nan):
        x, out = np.array([1, bad, 2], F32), np.zeros(3, F32)
        with pytest.raises(ValueError, match=r"x\[1\] is .* at most 88"):
            exp(x, out)
        assert not out.any()
    with pytest.raises(ValueError, match="out must have shape"):
        exp(np.zeros(3, F32), np.zeros(2, F32))
    both = np.zeros(4, F32)
    with pytest.raises(ValueError, match="share memory"):
        exp(both[:3], both[1:])
    assert math.isclose(kernel_exp(np.array([1], F32))[0], math.e, rel_tol=3e-7)
