"""The paged cache holds the rows of the contiguous one, takes memory by pages, guards its ends."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from course_lib.attention import two_pass
from course_lib.errors import CourseError
from course_lib.kvcache import KVCache
from course_lib.paged_cache import (
    CANARY,
    GUARD,
    PAGE,
    BlockNotStoredError,
    PagedCache,
    audit,
    blocks_needed,
    row_offset,
)

F32 = np.float32


def made(tokens=70, heads=2, d=8, block_size=16, room=200, seed=0):
    rows = np.random.default_rng(seed).standard_normal((2, heads, tokens, d)).astype(F32)
    cache = PagedCache(heads, d, room, block_size=block_size)
    cache.append(*rows)
    return cache, rows


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(0, 40), max_size=6), st.sampled_from([1, 3, 16]), st.integers(1, 3))
def test_appends_of_any_size_hold_the_contiguous_caches_rows(sizes, block_size, heads):
    rng = np.random.default_rng(len(sizes))
    paged, plain = PagedCache(heads, 4, 240, block_size=block_size), KVCache(1, heads, 4)
    for size in sizes:
        k, v = rng.standard_normal((2, heads, size, 4)).astype(F32)
        paged.append(k, v)
        plain.append(0, k, v)
    assert paged.length == plain.length == sum(sizes)
    assert len(paged.table) == blocks_needed(sum(sizes), block_size)
    for mine, theirs in zip(paged.gather()[:2], plain.rows(0)[:2], strict=True):
        assert mine.tobytes() == theirs.tobytes()
    assert paged.damaged() == []
    if paged.length:
        q = rng.standard_normal((2 * heads, 4)).astype(F32)
        assert np.array_equal(two_pass(q, *paged.gather()[:2]), two_pass(q, *plain.rows(0)[:2]))


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 69), st.integers(0, 1))
def test_a_row_lies_where_its_address_says(token, head):
    cache, (k, _) = made()
    at = cache.row_address(token, head)
    assert cache.memory[at : at + 32].tobytes() == k[head, token].tobytes()


def test_addresses_go_through_the_table():
    table = [2, None, 0]
    block = 2 * 2 * 4 * 8 * 4  # K and V, 2 heads, 4 tokens, 8 values
    assert row_offset(table, 0, 0, 2, 8, 4) == 2 * block
    assert row_offset(table, 3, 1, 2, 8, 4) == 2 * block + (4 + 3) * 32
    assert row_offset(table, 8, 0, 2, 8, 4) == 0
    with pytest.raises(BlockNotStoredError, match="block 1 of token 5"):
        row_offset(table, 5, 0, 2, 8, 4)
    for token, head in ((12, 0), (-1, 0), (0, 2), (0, -1)):
        with pytest.raises(ValueError):
            row_offset(table, token, head, 2, 8, 4)


def test_memory_comes_page_by_page_and_goes_back():
    cache = PagedCache(8, 128, 1024)
    assert cache.own_pages() == 0 == cache.allocated_bytes
    assert cache.reserved_bytes == 32 * cache.slot_bytes
    rows = np.ones((2, 8, 1, 128), F32)
    cache.append(*rows)
    assert cache.allocated_bytes == cache.slot_bytes
    one = cache.own_pages()
    assert 16 <= one <= 18  # a page in each head's K and V, at most two more for the guards
    for _ in range(63):
        cache.append(*rows)
    assert cache.own_pages() == 2 * cache.slot_bytes // PAGE == cache.allocated_bytes // PAGE
    cache.evict(0)
    assert cache.own_pages() == cache.slot_bytes // PAGE and cache.table == [None, 1]
    assert float(cache.memory[9 * cache.slot_bytes :].view(F32).sum()) == 0  # reading takes none
    assert cache.own_pages() == cache.slot_bytes // PAGE


def test_an_evicted_block_is_missed_by_all_who_ask():
    cache, rows = made(tokens=40)
    cache.evict(1)
    for ask in (lambda: cache.rows(1), lambda: cache.row_address(17, 0), cache.gather,
                lambda: cache.evict(1)):
        with pytest.raises(BlockNotStoredError, match="block 1"):
            ask()
    assert np.array_equal(cache.rows(2).k, rows[0][:, 32:])
    cache.append(*rows[:, :, :10])  # goes on in block 2 and takes the free slot
    assert cache.table == [0, None, 2, 1] and cache.damaged() == []
    cache.evict(3)
    before = cache.length
    with pytest.raises(BlockNotStoredError, match="block 3"):
        cache.append(*rows[:, :, :1])
    assert cache.length == before


def test_canaries_see_what_crosses_them_and_nothing_else():
    cache, _ = made()
    slot = cache.memory[cache.slot_bytes :]
    slot[GUARD - 4 : GUARD] = 0  # one value before the first row
    assert cache.damaged() == [(1, "front")]
    slot[:GUARD] = CANARY
    slot[cache._back] ^= 1
    assert cache.damaged() == [(1, "back")]
    slot[cache._back] ^= 1
    cache._rows(1)[0].reshape(-1)[:] = 7  # all of K, up to V
    assert cache.damaged() == []


def test_what_does_not_fit_writes_nothing():
    cache, rows = made(tokens=20, room=32)
    bad = rows.copy()
    bad[1, 1, 3, 0] = np.nan
    for wrong, kind in ((bad, "v holds NaN or infinity at head 1, token 23"),
                        (rows[:, :, :, :4], "must both have shape")):
        with pytest.raises(ValueError, match=kind):
            cache.append(*wrong)
    with pytest.raises(CourseError, match="40 tokens do not fit"):
        cache.append(*rows)
    assert cache.length == 20 and len(cache.table) == 2
    with pytest.raises(ValueError):
        cache.rows(0).k[:] = 0
    for block in (2, -1):
        with pytest.raises(ValueError, match="never begun"):
            cache.rows(block)
    with pytest.raises(ValueError, match="token 20 is not stored"):
        cache.row_address(20, 0)
    for wrong in ((0, 4, 4), (1, 0, 4), (1, 4, 0)):
        with pytest.raises(ValueError, match="at least 1"):
            PagedCache(*wrong)
    assert [blocks_needed(n) for n in (0, 1, 32, 33)] == [0, 1, 1, 2]
    with pytest.raises(ValueError):
        blocks_needed(-1)


def test_an_audit_tells_what_is_needed_missing_and_broken():
    canary = np.arange(1, 5, dtype=np.uint8)
    memory = np.zeros((4, 20), np.uint8)
    memory[:, :4] = memory[:, -4:] = canary
    memory[2, 3] = memory[0, 16] = memory[0, 0] = 0
    memory[1, 4:16] = 9
    before = memory.copy()
    found = audit(memory, [1, None, 2, 0], 100, canary)
    assert found == {"needed": 4, "missing": [1],
                     "damaged": [[2, "front"], [3, "front"], [3, "back"]]}
    assert audit(memory, [1], 33, canary) == {"needed": 2, "missing": [1], "damaged": []}
    assert audit(memory, [3, 1], 0, canary)["needed"] == 0
    assert np.array_equal(memory, before)
    for table, tokens in (([1, 1], 3), ([1], -1)):
        with pytest.raises(ValueError):
            audit(memory, table, tokens, canary)
