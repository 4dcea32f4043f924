"""Memory for weights: arrays side by side in one mapping, which lives as long as the last."""

from __future__ import annotations

import mmap

import numpy as np
import pytest

from course_lib.engine import arena
from course_lib.engine.arena import LINE, PAGE, Arena


def test_arrays_lie_side_by_side_and_begin_on_cache_lines():
    room = Arena(3 * PAGE)
    first = room.empty((5, 7), np.int8)
    second = room.empty((3, 4), np.float32)
    third = room.empty((0, 4), np.float16)
    assert first.ctypes.data % PAGE == 0
    assert second.ctypes.data == first.ctypes.data + LINE
    assert (first.shape, second.shape, third.shape) == ((5, 7), (3, 4), (0, 4))
    assert (second.dtype, third.dtype) == (np.float32, np.float16)
    for array in (first, second):
        assert array.flags.c_contiguous and array.flags.writeable
    first[:], second[:] = 1, 2
    assert (first == 1).all() and (second == 2).all()


def test_all_of_the_room_is_there_and_no_more():
    room = Arena(PAGE)
    whole = room.empty((PAGE,), np.uint8)
    whole[:] = 3
    more = room.empty((LINE,), np.uint8)
    more[:] = 4
    assert (whole == 3).all() and not np.shares_memory(whole, more)


def test_arrays_outlive_the_arena():
    array = Arena(PAGE).empty((1000,), np.int64)
    array[:] = np.arange(1000)
    assert array.sum() == 499_500


@pytest.mark.skipif(not hasattr(mmap, "MADV_HUGEPAGE"), reason="not of this system")
def test_large_pages_are_asked_for_and_can_be_refused(monkeypatch):
    asked = []

    class Refusing(mmap.mmap):
        def madvise(self, *arguments):
            asked.append(arguments)
            raise OSError(22, "Invalid argument")

    monkeypatch.setattr(arena.mmap, "mmap", Refusing)
    Arena(PAGE).empty((10,), np.int8)[:] = 1
    assert asked == [(mmap.MADV_HUGEPAGE,)]


def test_memory_that_is_not_there_is_a_memory_error():
    with pytest.raises(MemoryError, match="bytes of memory are not there"):
        Arena(2**61)
