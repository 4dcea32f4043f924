"""The KV cache: what it stores, how it grows, what a bad append leaves, and the byte ledger."""

import copy

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from course_lib.attention import two_pass
from course_lib.kvcache import KVCache, kv_bytes_per_token, kv_ledger
from course_lib.quant import ROUNDING_RULES, quantize_rows

F32 = np.float32


def rows_made(t, heads=2, d=8, seed=0):
    return np.random.default_rng(seed).standard_normal((2, heads, t, d)).astype(F32)


def filled(t=50, dtype="f32", layers=1, **options):
    cache = KVCache(layers, 2, 8, dtype=dtype, **options)
    for layer in range(layers):
        cache.append(layer, *rows_made(t, seed=layer))
    return cache


def snapshot(cache, layer=0):
    return [None if a is None else a.copy() for a in cache.rows(layer)]


def same(a, b):
    return all((x is None) == (y is None) and (x is None or np.array_equal(x, y))
               for x, y in zip(a, b, strict=True))


def test_float_rows_come_back_bit_for_bit_as_read_only_views():
    k, v = rows_made(70)
    cache = KVCache(3, 2, 8)
    for first, end in ((0, 33), (33, 34), (34, 34), (34, 70)):
        cache.append(1, k[:, first:end], v[:, first:end])
    rows = cache.rows(1)
    assert np.array_equal(rows.k, k) and np.array_equal(rows.v, v)
    assert rows.k_scale is None and rows.v_scale is None
    assert rows.k.dtype == F32 and rows.k.base is not None
    assert rows.k[0].flags.c_contiguous, "all rows of a head lie one after the other"
    with pytest.raises(ValueError, match="read-only"):
        rows.k[0, 0, 0] = 1
    assert cache.layer_length(1) == 70 and cache.layer_length(0) == 0 and cache.length == 0


@pytest.mark.parametrize("rule", ROUNDING_RULES)
def test_q8_rows_are_those_of_quantize_rows(rule):
    k, v = rows_made(40)
    v *= 9
    cache = KVCache(1, 2, 8, dtype="q8", rule=rule)
    cache.append(0, k[:, :39], v[:, :39])
    cache.append(0, k[:, 39:], v[:, 39:])
    rows = cache.rows(0)
    for got, want in zip((rows.k, rows.k_scale, rows.v, rows.v_scale),
                         (*quantize_rows(k, rule), *quantize_rows(v, rule)), strict=True):
        assert got.dtype == want.dtype and np.array_equal(got, want)
    with pytest.raises(ValueError, match="read-only"):
        rows.k_scale[0, 0] = 1


def test_memory_comes_in_whole_blocks_and_only_when_tokens_do():
    for dtype in ("f32", "q8"):
        cache = KVCache(2, 2, 64, dtype=dtype, block_size=16)
        assert cache.nbytes == 0 and cache.length == 0
        per_token = kv_bytes_per_token(2, 64, dtype)
        cache.append(0, *rows_made(1, d=64))
        assert cache.nbytes == 16 * per_token, "one block, in the layer that was written"
        cache.append(0, *rows_made(15, d=64))
        assert cache.nbytes == 16 * per_token
        cache.append(1, *rows_made(33, d=64))
        assert cache.nbytes == (16 + 48) * per_token
        cache.append(1, *rows_made(0, d=64))
        assert cache.layer_length(1) == 33


def test_appending_token_by_token_copies_rarely():
    cache = KVCache(1, 1, 4, block_size=8)
    one = rows_made(1, heads=1, d=4)
    sizes = set()
    for _ in range(3000):
        cache.append(0, *one)
        sizes.add(cache.nbytes)
        spare = cache.nbytes // kv_bytes_per_token(1, 4, "f32") - cache.length
        assert 0 <= spare <= cache.length / 8 + 8
    assert len(sizes) < 60


@pytest.mark.parametrize("dtype", ["f32", "q8"])
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("spoiled", ["k", "v"])
def test_a_bad_row_is_named_and_nothing_is_written(dtype, bad, spoiled):
    cache = filled(50, dtype)
    before = snapshot(cache)
    canaries = [a.base for a in cache.rows(0) if a is not None]
    for buffer in canaries:
        buffer[:, 50:] = 77
    k, v = rows_made(5, seed=1)
    {"k": k, "v": v}[spoiled][1, 3, 2] = bad
    with pytest.raises(ValueError, match=f"{spoiled} holds NaN or infinity at head 1, token 53;"):
        cache.append(0, k, v)
    assert cache.layer_length(0) == 50 and same(snapshot(cache), before)
    assert all((buffer[:, 50:] == 77).all() for buffer in canaries), "K must not be written first"
    size = cache.nbytes
    many = np.repeat(v, 40, axis=1)
    with pytest.raises(ValueError, match="NaN or infinity"):
        cache.append(0, np.repeat(k, 40, axis=1), many)
    assert cache.nbytes == size


def test_wrong_shapes_and_names_are_refused():
    cache = filled(3)
    k, v = rows_made(4)
    for a, b in ((k, v[:, :3]), (k[:1], v[:1]), (k[:, :, :7], v[:, :, :7]), (k[:, :2], v)):
        with pytest.raises(ValueError, match="must both have shape"):
            cache.append(0, a, b)
    with pytest.raises(ValueError, match="3 dimensions"):
        cache.append(0, k[0], v[0])
    with pytest.raises(TypeError, match="real numbers"):
        cache.append(0, k, v.astype(complex))
    for layer in (-1, 1):
        for call in (lambda n: cache.append(n, k, v), cache.rows, cache.layer_length):
            with pytest.raises(ValueError, match="layer"):
                call(layer)
    assert cache.length == 3
    with pytest.raises(ValueError, match="f32, q8"):
        KVCache(1, 2, 8, dtype="f16")
    with pytest.raises(ValueError, match="half_up"):
        KVCache(1, 2, 8, rule="nearest")
    for sizes in ((0, 2, 8), (1, 0, 8), (1, 2, 0)):
        with pytest.raises(ValueError, match="at least 1"):
            KVCache(*sizes)
    with pytest.raises(ValueError, match="block_size"):
        KVCache(1, 2, 8, block_size=0)


def test_truncate_drops_the_tail_and_what_a_failed_step_left():
    cache = filled(50, layers=3)
    before = snapshot(cache, 2)
    for layer in (0, 1):
        cache.append(layer, *rows_made(1, seed=9))
    assert cache.length == 50 and cache.layer_length(0) == 51
    cache.truncate(cache.length)
    assert [cache.layer_length(n) for n in range(3)] == [50] * 3
    size = cache.nbytes
    cache.truncate(20)
    assert cache.length == 20 and cache.nbytes == size
    assert np.array_equal(cache.rows(2).k, before[0][:, :20])
    new_k, new_v = rows_made(2, seed=5)
    cache.append(2, new_k, new_v)
    assert np.array_equal(cache.rows(2).v, np.concatenate((before[1][:, :20], new_v), axis=1))
    for n in (-1, 21):
        with pytest.raises(ValueError, match="cannot truncate"):
            cache.truncate(n)
    with pytest.raises(TypeError):
        cache.truncate(2.5)
    length = np.array(7)
    cache.truncate(length)
    length[()] = 9
    assert cache.length == 7 and type(cache.length) is int


@pytest.mark.parametrize("duplicate", [KVCache.copy, copy.deepcopy])
@pytest.mark.parametrize("dtype", ["f32", "q8"])
def test_a_copy_is_independent(duplicate, dtype):
    cache = filled(10, dtype, layers=2, rule="trunc", block_size=4)
    other = duplicate(cache)
    before = snapshot(cache)
    assert same(snapshot(other), before)
    assert (other.dtype, other.rule, other.block_size) == (dtype, "trunc", 4)
    for _ in range(2):
        for layer in (0, 1):
            other.append(layer, *rows_made(4, seed=8))
        assert cache.length == 10 and same(snapshot(cache), before)
        other.truncate(3)
    assert other.length == 3 and cache.length == 10


@pytest.mark.parametrize("duplicate", [KVCache.copy, copy.deepcopy])
@pytest.mark.parametrize("dtype", ["f32", "q8"])
def test_a_copy_shares_no_spare_memory(duplicate, dtype):
    """Both append within the capacity they have, so neither moves to a new array."""
    cache = filled(10, dtype, layers=2)
    other = duplicate(cache)
    size = cache.nbytes
    for layer in (0, 1):
        cache.append(layer, *rows_made(4, seed=20 + layer))
        other.append(layer, *rows_made(4, seed=30 + layer))
    assert cache.nbytes == other.nbytes == size
    for layer in (0, 1):
        for seed, held in ((20, cache), (30, other)):
            fresh = KVCache(1, 2, 8, dtype=dtype)
            fresh.append(0, *rows_made(4, seed=seed + layer))
            tail = [None if a is None else a[:, 10:] for a in held.rows(layer)]
            assert same(tail, fresh.rows(0))


@pytest.mark.parametrize("dtype", ["f32", "q8"])
def test_a_row_address_leads_to_the_row(dtype):
    cache = filled(40, dtype, layers=2, block_size=16)
    k = cache.rows(1).k
    memory = k.base.tobytes()
    for token, head in ((0, 0), (15, 1), (16, 0), (39, 1)):
        address = cache.row_address(token, head, layer=1)
        assert (address.block, address.slot) == (token // 16, token % 16)
        row = np.frombuffer(memory, k.dtype, 8, address.offset)
        assert np.array_equal(row, k[head, token])
    for token, head in ((40, 0), (-1, 0)):
        with pytest.raises(ValueError, match="not stored"):
            cache.row_address(token, head)
    for head in (-1, 2):
        with pytest.raises(ValueError, match="head"):
            cache.row_address(0, head)


def test_attention_reads_the_cache_without_a_copy():
    cache = filled(50, "q8")
    cache.append(0, *rows_made(3, seed=3))
    q = rows_made(4)[0, :, 0]
    contiguous = [a.copy() for a in cache.rows(0)]
    assert np.array_equal(two_pass(q, *cache.rows(0)), two_pass(q, *contiguous))


@settings(max_examples=60, deadline=None)
@given(st.lists(st.one_of(st.tuples(st.just("append"), st.integers(0, 1), st.integers(0, 40)),
                          st.tuples(st.just("truncate"), st.integers(0, 100), st.just(0))),
                max_size=12),
       st.sampled_from(["f32", "q8"]), st.sampled_from([1, 3, 32]))
def test_any_sequence_of_appends_and_truncates_keeps_the_rows(steps, dtype, block_size):
    cache = KVCache(2, 1, 2, dtype=dtype, block_size=block_size)
    kept = [[], []]
    value = 0
    for name, a, b in steps:
        if name == "append":
            fresh = [float(value + i) for i in range(1, b + 1)]
            value += b
            k = np.repeat(np.array(fresh, F32).reshape(1, b, 1), 2, axis=2)
            cache.append(a, k, -k)
            kept[a] += fresh
        else:
            n = a % (cache.length + 1)
            cache.truncate(n)
            kept = [rows[:n] for rows in kept]
    for layer, want in enumerate(kept):
        rows = cache.rows(layer)
        k, v = rows.k.astype(F32), rows.v.astype(F32)
        if dtype == "q8":
            k, v = k * rows.k_scale[..., None], v * rows.v_scale[..., None]
        assert np.allclose(k[0, :, 1], want, rtol=1e-6)
        assert np.allclose(v[0, :, 0], [-x for x in want], rtol=1e-6)
    assert cache.length == min(map(len, kept))


def test_bytes_per_token_of_the_article():
    got = [kv_bytes_per_token(8, 128, dtype) for dtype in ("f32", "f16", "q8", "q4")]
    assert got == [8192, 4096, 2112, 1280]
    assert round(2112 / 4096, 3) == 0.516
    assert [kv_bytes_per_token(2, 64, d) for d in ("f32", "q8", "q4")] == [1024, 272, 160]
    with pytest.raises(ValueError, match="f32, f16, q8, q4"):
        kv_bytes_per_token(8, 128, "f64")
    with pytest.raises(ValueError, match="64 divides"):
        kv_bytes_per_token(8, 96, "q4")
    for sizes in ((0, 128), (8, 0)):
        with pytest.raises(ValueError, match="at least 1"):
            kv_bytes_per_token(*sizes, "f32")


def test_the_ledger_tells_bandwidth_from_memory():
    lines = {line.name: line for line in kv_ledger(36, 8, 128, 1000)}
    assert list(lines) == ["f32", "f16", "q8", "q4", "q8 + probe keys", "q8 + f32 mirror"]
    sampled = lines["q8 + probe keys"]
    assert sampled.scan_bytes == lines["q8"].scan_bytes
    # Every fourth of 992 rows (31 whole blocks), K alone, which is half of a row's 2112 bytes.
    assert sampled.memory_bytes == 36 * (1000 * 2112 + 992 // 4 * 1056)
    assert lines["q8"].scan_bytes == lines["q8"].memory_bytes == 36 * 1000 * 2112
    mirror = lines["q8 + f32 mirror"]
    assert mirror.scan_bytes == 36 * 1000 * 2112
    assert mirror.memory_bytes == 36 * 1000 * 10_304
    assert round(mirror.scan_vs_f16, 3) == 0.516 and mirror.memory_vs_f16 > 2.5
    assert "q4" not in {line.name for line in kv_ledger(1, 1, 32, 1)}
    with pytest.raises(ValueError, match="tokens"):
        kv_ledger(1, 1, 32, 0)


def test_probe_keys_follow_the_cache_through_growth_truncation_and_other_probes():
    rng = np.random.default_rng(4)
    cache = KVCache(2, 2, 8, dtype="q8", block_size=4)
    plain = cache.nbytes

    def append(tokens):
        for layer in range(2):
            cache.append(layer, *rng.standard_normal((2, 2, tokens, 8), np.float32))

    def require_current(n_probe):
        for layer in range(2):
            rows, keys = cache.rows(layer), cache.probe_keys(layer, n_probe)
            full = rows.k.shape[1] // 4 * 4
            step = max(1, 4 // n_probe)
            sampled = [t for t in range(full) if t % 4 % step == 0]
            np.testing.assert_array_equal(keys.arrays[0], rows.k[:, sampled])
            np.testing.assert_array_equal(keys.arrays[1], rows.k_scale[:, sampled])

    append(9)
    require_current(4)
    append(3)
    require_current(4)
    assert cache.nbytes > plain, "they are part of the cache's memory"
    cache.truncate(6)
    append(7)
    require_current(4)
    require_current(2)
    held = cache.nbytes
    require_current(2)
    assert cache.nbytes == held
    assert cache.copy().nbytes < held, "a copy makes its own when it needs them"


@pytest.mark.parametrize("rule", ROUNDING_RULES)
def test_rows_appended_in_any_portions_are_those_of_quantize_rows(rule):
    rng = np.random.default_rng(5)
    k, v = rng.standard_normal((2, 3, 90, 20)).astype(np.float32)
    cache = KVCache(1, 3, 20, dtype="q8", rule=rule)
    for first, end in ((0, 1), (1, 40), (40, 40), (40, 41), (41, 90)):
        cache.append(0, k[:, first:end], v[:, first:end])
    rows = cache.rows(0)
    for stored, scale, rows_given in ((rows.k, rows.k_scale, k), (rows.v, rows.v_scale, v)):
        want, want_scale = quantize_rows(rows_given, rule)
        assert np.array_equal(stored, want) and np.array_equal(scale, want_scale)
