"""The ring: blocks in order, reading ahead, no slot overwritten in use, errors in their place."""

from __future__ import annotations

import sys
import threading
import time
from contextlib import closing

import numpy as np
import pytest

from course_lib.errors import CourseError
from course_lib.prefill import ring as ring_module
from course_lib.prefill.file_store import BlockFile
from course_lib.prefill.ring import Ring
from course_lib.prefill.store import BlockStore, Slot

F32 = np.float32
SLOTS = pytest.mark.parametrize("slots", [1, 2, 3, 4])


class Watched(BlockStore):
    """A store whose blocks hold their number; it is never resident, and watches its slots."""

    def __init__(self, blocks=12, spoilt=None):
        super().__init__(1, 2, 3, block_size=2)
        self.loaded, self.done, self.in_use = [], threading.Semaphore(0), set()
        self.spoilt, self.overwritten = spoilt, False
        for block in range(blocks):
            self.append(0, *np.full((2, 2, 2, 3), block, F32))

    def make_slots(self, count):
        return Slot.side_by_side(count, self.block_shape)

    def resident(self, layer, block):
        return None

    def load(self, layer, block, slot, heads=None):
        if block == self.spoilt:
            raise CourseError("this block is bad.")
        self.overwritten |= slot.number in self.in_use
        tokens = super().load(layer, block, slot, heads)
        self.loaded.append(block)
        self.done.release()
        return tokens


def every(n):
    return [(block, None) for block in range(n)]


def slot_of(ring, rows):
    return next(slot for slot in ring.slots if np.shares_memory(slot.k, rows.k))


@SLOTS
def test_blocks_come_in_order_and_no_slot_in_use_is_overwritten(slots):
    store = Watched()
    with Ring(store, slots) as ring:
        for _ in range(3):
            seen = []
            with closing(ring.stream(0, every(12))) as blocks:
                for (block,), rows in blocks:
                    number = slot_of(ring, rows).number
                    store.in_use.add(number)
                    assert (rows.k == block).all() and rows.k.shape == (2, 2, 3)
                    if slots > 1 and block < 11:  # the next one is read meanwhile
                        while len(store.loaded) < block + 2:
                            assert store.done.acquire(timeout=10)
                    assert (rows.k == block).all() and (rows.v == block).all()
                    seen.append(block)
                    store.in_use.discard(number)
            assert seen == list(range(12)) == store.loaded
            store.loaded.clear()
    assert not store.overwritten
    assert ring.load_seconds > 0 and ring.compute_seconds > 0


@SLOTS
def test_no_more_is_read_ahead_than_there_are_slots(slots):
    """With one slot nothing: reading and computing take turns."""
    store = Watched()
    with Ring(store, slots) as ring, closing(ring.stream(0, every(12))) as blocks:
        next(blocks)
        for _ in range(slots):
            assert store.done.acquire(timeout=10)
        threading.Event().wait(0.02)  # time to read one too many
        assert store.loaded == list(range(slots))


@SLOTS
def test_something_else_is_done_while_the_first_blocks_are_read(slots):
    store, calls = Watched(), []

    def meanwhile():
        for _ in range(slots):  # read without a block having been asked for
            assert store.done.acquire(timeout=10)
        calls.append(list(store.loaded))

    with Ring(store, slots) as ring:
        seen = [block for (block,), _ in ring.stream(0, every(12), meanwhile)]
        assert seen == list(range(12)) and calls == [list(range(slots))]
        assert not list(ring.stream(0, [], lambda: calls.append([]))) and len(calls) == 2
        with pytest.raises(ZeroDivisionError):
            list(ring.stream(0, every(12), lambda: 1 // 0))
        assert [block for (block,), _ in ring.stream(0, [(3, None), (7, None)])] == [3, 7]


@SLOTS
def test_an_error_comes_in_its_block_s_place_and_the_ring_goes_on(slots):
    store = Watched(spoilt=5)
    with Ring(store, slots) as ring:
        for _ in range(2):
            seen = []
            with pytest.raises(CourseError, match="this block is bad"):
                for (block,), _ in ring.stream(0, every(12)):
                    seen.append(block)
            assert seen == [0, 1, 2, 3, 4]
        assert [block for (block,), _ in ring.stream(0, [(3, None), (7, None)])] == [3, 7]


@SLOTS
@pytest.mark.parametrize("stop", [0, 1, 5, 11])
def test_a_caller_that_stops_leaves_every_slot_free(slots, stop):
    store = Watched()
    with Ring(store, slots) as ring:
        with pytest.raises(ZeroDivisionError):
            with closing(ring.stream(0, every(12))) as blocks:
                for (block,), _ in blocks:
                    1 // (block != stop)
        assert ring._free.qsize() == slots
        assert len(store.loaded) <= stop + slots + 1  # and the others are not read
        assert [block for (block,), _ in ring.stream(0, every(12))] == list(range(12))


def test_blocks_in_memory_need_no_slot_and_no_thread():
    with BlockStore(1, 2, 3, block_size=2) as store, Ring(store, 4) as ring:
        k, v = np.random.default_rng(0).standard_normal((2, 2, 7, 3)).astype(F32)
        store.append(0, k, v)
        got = [rows.k.copy() for _, rows in ring.stream(0, every(4))]
        assert np.array_equal(np.concatenate(got, axis=1), k)
        assert store.bytes_read == 2 * k.nbytes
        assert ring.slots == () and ring._reader is None
        assert list(ring.stream(0, [])) == []


def test_some_blocks_in_memory_and_some_in_the_file(tmp_path):
    k, v = np.random.default_rng(0).standard_normal((2, 2, 20, 3)).astype(F32)
    with BlockFile(1, 2, 3, capacity=20, block_size=2, folder=tmp_path,
                   ram_budget=5 * 96) as store, Ring(store, 2, trace=True) as ring:
        store.append(0, k, v)
        kept = [store.resident(0, block) is not None for block in range(10)]
        assert sum(kept) == 3
        order = [9, 0, 4, 1, 8]
        heads = np.array([False, True])
        for (block,), rows in ring.stream(0, [(block, heads) for block in order]):
            assert np.array_equal(rows.v[1], v[1, 2 * block : 2 * block + 2])
        assert store.bytes_read == 5 * 2 * 4 * 2 * 3
        loads = [e for e in ring.timeline if e.what == "load"]
        computes = [e for e in ring.timeline if e.what == "compute"]
        assert [e.block for e in computes] == order
        assert [e.block for e in loads] == [b for b in order if not kept[b]]
        assert {e.slot for e in computes if kept[e.block]} == {-1}
        for load in loads:  # a slot is computed on after its load, and loaded after that
            compute = next(e for e in computes if e.block == load.block)
            assert load.slot == compute.slot and load.end <= compute.start <= compute.end


def test_the_timeline_shows_one_user_of_a_slot_at_a_time():
    store = Watched()
    with Ring(store, 3, trace=True) as ring:
        for _ in ring.stream(0, every(12)):
            pass
        for slot in range(3):
            mine = sorted((e for e in ring.timeline if e.slot == slot), key=lambda e: e.start)
            assert [e.what for e in mine] == ["load", "compute"] * (len(mine) // 2)
            assert all(a.end <= b.start for a, b in zip(mine, mine[1:], strict=False))


def test_a_ring_ends_its_thread():
    before = threading.active_count()
    ring = Ring(Watched(), 2)
    for _ in ring.stream(0, every(3)):
        pass
    assert threading.active_count() == before + 1
    ring.close()
    ring.close()
    assert threading.active_count() == before
    with pytest.raises(ValueError, match="slots must be at least 1"):
        Ring(Watched(), 0)


def test_waiting_and_computing_are_parts_of_the_time_of_a_stream():
    with Ring(Watched(), 4, together=2) as ring:
        start = time.perf_counter()
        for _ in ring.stream(0, every(12)):
            threading.Event().wait(0.002)
        took = time.perf_counter() - start
    assert ring.wait_seconds > 0 and ring.compute_seconds >= 6 * 0.002
    assert ring.wait_seconds + ring.compute_seconds <= took


@SLOTS
def test_a_second_stream_of_a_ring_is_refused_until_the_first_is_ended(slots):
    with Ring(Watched(), slots) as ring:
        first = ring.stream(0, every(12))
        next(first)
        with pytest.raises(RuntimeError, match="another stream"):
            next(ring.stream(0, [(3, None)]))
        assert next(first)[0] == [1]
        first.close()
        assert [block for (block,), _ in ring.stream(0, [(3, None)])] == [3]
        with pytest.raises(ValueError, match="block 99 is not stored"):
            with Ring(BlockStore(1, 2, 3), slots) as empty:
                next(empty.stream(0, [(99, None)]))


@SLOTS
def test_a_block_may_be_wanted_twice(slots):
    with Ring(Watched(), slots) as ring:
        assert [(block, rows.k.max()) for (block,), rows in
                ring.stream(0, [(3, None), (3, None), (0, None)])] == [(3, 3), (3, 3), (0, 0)]


@pytest.mark.parametrize("together", [1, 2, 3, 9])
@pytest.mark.parametrize("slots", [1, 2, 4, 7])
def test_blocks_that_are_ready_are_handed_over_as_one(slots, together):
    store, handed, seen = Watched(), [], []

    def filled(count):
        while len(store.loaded) < count:
            assert store.done.acquire(timeout=10)
        threading.Event().wait(0.002)  # loaded, and put where it can be taken

    with Ring(store, slots, together=together, trace=True) as ring:
        for _ in range(3):
            with closing(ring.stream(0, every(12), lambda: filled(slots))) as stream:
                for blocks, rows in stream:
                    used = {slot.number for slot in ring.slots
                            if np.shares_memory(slot.k, rows.k)}
                    store.in_use |= used
                    filled(min(len(seen) % 12 + slots, 12))  # slots in use are not read into
                    assert len(used) == len(blocks) <= min(together, max(slots // 2, 1))
                    want = np.repeat(blocks, 2)[None, :, None]
                    assert rows.k.shape[1] == len(want[0])
                    assert (rows.k == want).all() and (rows.v == want).all()
                    seen += blocks
                    handed.append(len(blocks))
                    store.in_use -= used
            store.loaded.clear()
        computes = [e.block for e in ring.timeline if e.what == "compute"]
    assert seen == computes == 3 * list(range(12)) and not store.overwritten
    assert handed[0] == min(together, max(slots // 2, 1))


def test_slots_come_back_in_order_so_that_half_of_them_always_lie_side_by_side():
    def filled():
        for _ in range(10_000):
            if ring._ready.qsize() >= 2:
                return
            threading.Event().wait(0.001)

    handed = []
    with Ring(Watched(), 4, together=2) as ring:
        for blocks, _ in ring.stream(0, every(12), filled):
            handed.append(len(blocks))
            if blocks[-1] < 11:
                filled()
    assert handed == [2] * 6


def test_only_blocks_that_lie_side_by_side_are_handed_over_as_one(tmp_path):
    """Not with one that is in memory between them, and nothing behind the short last block."""
    k, v = np.random.default_rng(0).standard_normal((2, 2, 19, 3)).astype(F32)
    with BlockFile(1, 2, 3, capacity=19, block_size=2, folder=tmp_path, ram_budget=8 * 96) as store:
        store.append(0, k, v)
        ring = Ring(store, 5, together=5)
        kept = {block for block in range(10) if store.resident(0, block) is not None}
        assert len(kept) == 3
        order = [9, 5, 0, 6, 7, 8, 1, 5, 9, 3, 4]
        for _ in range(20):
            seen = []
            for blocks, rows in ring.stream(0, [(block, None) for block in order]):
                assert len(blocks) == 1 or not kept & set(blocks) and 9 not in blocks[:-1]
                whole = [k[:, 2 * block : 2 * block + 2] for block in blocks]
                assert np.array_equal(rows.k, np.concatenate(whole, axis=1))
                seen += blocks
            assert seen == order
        ring.close()


def test_slots_that_lie_apart_are_handed_over_one_by_one():
    class Apart(Watched):
        def make_slots(self, count):
            return tuple(Slot(i, self.block_shape) for i in range(count))

    with Ring(Apart(), 4, together=4) as ring:
        for blocks, rows in ring.stream(0, every(12)):
            assert len(blocks) == 1 and (rows.k == blocks[0]).all()
            threading.Event().wait(0.002)


def struck(call, ring, wanted):
    """Whether a KeyboardInterrupt came where the ring's code calls something or has just called it,
    counted from the start of a stream: there Python looks for signals."""
    left = [call]

    def profile(frame, event, arg):
        if frame.f_code.co_filename == ring_module.__file__ and event in ("c_call", "c_return"):
            left[0] -= 1
            if left[0] == 0:
                raise KeyboardInterrupt

    before = sys.getprofile()
    sys.setprofile(profile)
    try:
        with closing(ring.stream(0, wanted)) as blocks:
            for _ in blocks:
                pass
    except KeyboardInterrupt:
        return True
    finally:
        sys.setprofile(before)
    return False


@pytest.mark.parametrize(("slots", "together"), [(1, 1), (2, 1), (4, 2)])
def test_ctrl_c_at_any_call_loses_no_slot_and_hangs_nowhere(slots, together):
    """In a thread, which can be left behind if it hangs."""
    seen = []

    def work():
        with Ring(Watched(6), slots, together=together) as ring:
            while struck(len(seen) + 1, ring, every(6)):
                seen.append([b for some, _ in ring.stream(0, every(6)) for b in some])
            assert ring._free.qsize() == slots
            seen.append(list(range(6)))

    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    thread.join(30)
    assert not thread.is_alive(), f"hangs after call {len(seen)}"
    assert len(seen) > 100 and all(blocks == list(range(6)) for blocks in seen)
