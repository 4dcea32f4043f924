"""Block stores in memory and in a file, and what can go wrong with a file."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
import threading
import time
import weakref
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from course_lib.errors import CourseError
from course_lib.prefill import file_store, offload_file
from course_lib.prefill.file_store import BlockFile
from course_lib.prefill.store import BlockStore, Slot

F32 = np.float32
ROOT = Path(__file__).resolve().parents[2]


def rows(t, heads=2, d=5, seed=0):
    return np.random.default_rng(seed).standard_normal((2, heads, t, d)).astype(F32)


def block_file(folder, *, layers=2, heads=2, d=5, block_size=4, capacity=40, **options):
    return BlockFile(layers, heads, d, folder=folder, block_size=block_size, capacity=capacity,
                     **options)


def read_back(store, layer):
    """All rows of a layer, by loading every block into one slot."""
    slot, ks, vs = Slot(0, store.block_shape), [], []
    for block in range(store.n_blocks(layer)):
        tokens = store.load(layer, block, slot)
        ks.append(slot.k[:, :tokens].copy())
        vs.append(slot.v[:, :tokens].copy())
        assert np.array_equal(store.keys(layer, block), ks[-1])
    return np.concatenate(ks, axis=1), np.concatenate(vs, axis=1)


def left_in(folder):
    return sorted(p.name for p in Path(folder).iterdir())


@pytest.mark.parametrize("kind", ["memory", "memory taken at once", "file", "file with a budget"])
@settings(max_examples=20)
@given(sizes=st.lists(st.integers(0, 13), min_size=1, max_size=6), block_size=st.integers(1, 9),
       d=st.integers(1, 6))
def test_what_is_appended_is_what_is_read(tmp_path_factory, kind, sizes, block_size, d):
    total, options = max(1, sum(sizes)), {}
    if kind == "file with a budget":
        options = dict(ram_budget=3 * 2 * 4 * 2 * block_size * d)
    folder = tmp_path_factory.getbasetemp()
    capacity = {"memory": None, "memory taken at once": total // 2 + 1}
    with (BlockStore(2, 2, d, block_size=block_size, capacity=capacity[kind])
          if kind in capacity else
          block_file(folder, d=d, block_size=block_size, capacity=total, **options)) as store:
        k, v = rows(total, d=d)
        done = 0
        for size in sizes:
            part = slice(done, done + size)
            store.append(1, k[:, part], v[:, part])
            done += size
        assert store.length(1) == done and store.length(0) == 0
        assert store.n_blocks(1) == -(-done // block_size)
        if done:
            got_k, got_v = read_back(store, 1)
            assert np.array_equal(got_k, k[:, :done]) and np.array_equal(got_v, v[:, :done])
            assert store.bytes_read == 3 * got_k.nbytes
            together = store.all_keys(1)
            assert (together is None) == (kind not in capacity)
            if together is not None:
                assert np.array_equal(together, got_k) and not together.flags.writeable
                assert store.bytes_read == 4 * got_k.nbytes
                assert store.resident_bytes == store.n_blocks(1) * store.block_bytes
    assert not list(folder.glob("course-kv-*"))


def test_slots_of_one_row_lie_each_behind_the_one_before_and_no_other():
    shape = (2, 3, 4)
    one, other = Slot.side_by_side(4, shape), Slot.side_by_side(4, shape, 4)
    slots = [*one, *other, Slot(8, shape)]
    assert [slot.number for slot in slots] == list(range(9))
    behind = {(a.number, b.number) for a in slots for b in slots if b.is_behind(a)}
    assert behind == {(0, 1), (1, 2), (2, 3), (4, 5), (5, 6), (6, 7)}


def test_a_layer_that_grows_is_copied_a_few_times(monkeypatch):
    with BlockStore(1, 2, 5, block_size=4) as store:
        made, allocate = [], store._allocate
        monkeypatch.setattr(store, "_allocate", lambda *of: made.append(of) or allocate(*of))
        for _ in range(256):
            store.append(0, *rows(1))
        assert len(made) == 7  # 1, 2, 4, ... 64 blocks
    with BlockStore(1, 2, 5, block_size=4, capacity=7) as store:
        monkeypatch.setattr(store, "_allocate", None)  # its place is there
        store.append(0, *rows(7))
        monkeypatch.undo()


@pytest.mark.parametrize("make", [
    lambda folder: BlockStore(2, 2, 5, block_size=4),
    lambda folder: block_file(folder, ram_budget=2000)], ids=["memory", "file"])
def test_a_closed_store_has_given_its_memory_back(tmp_path, make):
    store = make(tmp_path)
    store.append(0, *rows(8))
    held = weakref.ref(store.resident(0, 0).k.base)
    assert held() is not None
    store.close()
    assert held() is None
    with pytest.raises(CourseError, match="is closed"):
        store.span(0)


def test_parts_of_whole_pages_need_nothing_between_them(tmp_path):
    k, v = rows(96, d=16)
    with block_file(tmp_path, d=16, block_size=32, capacity=96) as store:
        assert store.block_bytes == 2 * 4096
        store.append(0, k, v)
        assert store.path.stat().st_size == 4096 * (1 + 2 * 3 * 2)
        got = read_back(store, 0)
    assert np.array_equal(got[0], k) and np.array_equal(got[1], v)


def test_slots_of_two_rings_share_a_budget_and_no_number(tmp_path):
    with block_file(tmp_path, ram_budget=4 * 320) as store:
        numbers = [slot.number for count in (3, 9) for slot in store.make_slots(count)]
        assert numbers == [0, 1, 2, 3] and store.resident_bytes == 5 * 320
        with pytest.raises(CourseError, match="used up by 4 slots"):
            store.make_slots(1)


def test_bytes_that_threads_read_at_once_are_all_counted():
    class Slow(BlockStore):
        @property
        def bytes_read(self):
            read = self.read
            time.sleep(0.001)  # another thread may come in between
            return read

        @bytes_read.setter
        def bytes_read(self, read):
            self.read = read

    with Slow(1, 2, 5) as store:
        threads = [threading.Thread(target=store.count_rows, args=(1,)) for _ in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert store.bytes_read == 8 * 2 * 4 * 5


def test_some_kv_heads_alone_are_read(tmp_path):
    k, v = rows(8, heads=5)
    for store in (BlockStore(1, 5, 5, block_size=4), block_file(tmp_path, layers=1, heads=5)):
        with store:
            store.append(0, k, v)
            for wanted in ([0, 1, 4], [2], [], [0, 1, 2, 3, 4]):
                slot, heads = Slot(0, store.block_shape), np.isin(np.arange(5), wanted)
                before = store.bytes_read
                assert store.load(0, 1, slot, heads) == 4
                assert np.array_equal(slot.k[heads], k[heads, 4:])
                assert np.array_equal(slot.v[heads], v[heads, 4:])
                assert not slot.k[~heads].any() and not slot.v[~heads].any()
                assert store.bytes_read - before == 2 * 4 * 4 * 5 * len(wanted)


def test_the_layout_is_layer_block_k_then_v_in_whole_pages(tmp_path):
    with block_file(tmp_path, capacity=12) as store:
        k, v = rows(12)
        store.append(0, k, v)
        store.append(1, -k, -v)
        content = store.path.read_bytes()
        stride, part = 4096, 4 * 2 * 4 * 5
        assert len(content) == 4096 + 2 * 3 * 2 * stride
        for layer, sign in ((0, 1), (1, -1)):
            for block in range(3):
                for which, array in enumerate((k, v)):
                    place = 4096 + ((layer * 3 + block) * 2 + which) * stride
                    found = np.frombuffer(content[place : place + part], F32).reshape(2, 4, 5)
                    assert np.array_equal(found, sign * array[:, 4 * block : 4 * block + 4])
        assert content.startswith(offload_file.MAGIC)


def test_memory_is_within_the_budget_and_one_slot(tmp_path):
    block = 2 * 4 * 2 * 4 * 5
    k, v = rows(40)
    for budget, slots, kept in ((block, 1, 0), (3 * block, 2, 1), (5 * block + 1, 2, 3)):
        with block_file(tmp_path, ram_budget=budget) as store:
            assert store.block_bytes == block
            assert len(store.make_slots(2)) == slots
            store.append(0, k, v)
            store.append(1, k, v)
            assert store.resident_bytes == (slots + kept + 1) * block
            assert store.peak_resident_bytes <= budget + block
            assert sum(store.resident(layer, b) is not None
                       for layer in (0, 1) for b in range(10)) == kept
            assert np.array_equal(read_back(store, 1)[0], k)
            if slots + 1 > budget // block:
                with pytest.raises(CourseError, match="RAM budget of .* used up by .* slots"):
                    store.make_slots(5), store.make_slots(1)
    with block_file(tmp_path, ram_budget=4 * block) as store:  # blocks give way to slots
        store.append(0, k, v)
        assert store.resident_bytes == 5 * block
        assert len(store.make_slots(3)) == 3 and store.resident_bytes == 5 * block
        assert np.array_equal(read_back(store, 0)[0], k)
    with pytest.raises(CourseError, match="smaller than one block, 320 bytes; give a larger"):
        block_file(tmp_path, ram_budget=319)
    assert left_in(tmp_path) == []


@pytest.mark.parametrize("store", [lambda f: BlockStore(2, 2, 5, block_size=4), block_file])
def test_wrong_arguments_store_nothing(tmp_path, store):
    k, v = rows(6)
    with store(tmp_path) as made:
        made.append(0, k, v)
        spoiled = k.copy()
        spoiled[1, 3, 2] = np.nan
        for bad_k, bad_v in ((k[:1], v), (k, v[:, :5]), (k[0], v), (spoiled, v), (k, spoiled)):
            with pytest.raises(ValueError, match="must|NaN"):
                made.append(0, bad_k, bad_v)
        assert made.length(0) == 6 and np.array_equal(read_back(made, 0)[0], k)
        for call in (lambda: made.keys(0, 2), lambda: made.keys(0, -1), lambda: made.keys(2, 0),
                     lambda: made.load(1, 0, Slot(0, made.block_shape))):
            with pytest.raises(ValueError, match="block .* is not stored|layer 2 does not exist"):
                call()
        with pytest.raises(ValueError, match="read-only"):
            made.keys(0, 0)[...] = 0
    for call in (lambda: made.keys(0, 0), lambda: made.append(0, k, v)):
        with pytest.raises(CourseError, match="closed"):
            call()


def test_more_tokens_than_the_file_is_for(tmp_path):
    with block_file(tmp_path, capacity=10) as store:
        store.append(0, *rows(8))
        with pytest.raises(ValueError, match="3 tokens do not fit: layer 0 holds 8 of at most 10"):
            store.append(0, *rows(3))
        assert store.length(0) == 8


def fails_with(code):
    def call(*args):
        raise OSError(code, os.strerror(code))
    return call


@pytest.mark.parametrize(("code", "said"), [(errno.ENOSPC, "No space left"), (errno.EIO, "error")])
def test_a_disk_that_fills_up_while_running(tmp_path, monkeypatch, code, said):
    store = block_file(tmp_path)
    store.append(0, *rows(4))
    monkeypatch.setattr(os, "pwritev", fails_with(code))
    with pytest.raises(CourseError, match=f"cannot be written .*{said}.*free some space"):
        store.append(0, *rows(4))
    assert left_in(tmp_path) == []
    with pytest.raises(CourseError, match="closed"):
        store.keys(0, 0)


@pytest.mark.parametrize("call", ["posix_fallocate", "pwritev"])
def test_a_disk_that_is_full_at_the_start(tmp_path, monkeypatch, call):
    monkeypatch.setattr(os, call, fails_with(errno.ENOSPC))
    with pytest.raises(CourseError, match="cannot|No space left"):
        block_file(tmp_path)
    assert left_in(tmp_path) == []


def test_a_disk_that_takes_nothing_is_full(tmp_path, monkeypatch):
    store, answers = block_file(tmp_path), iter([0])
    monkeypatch.setattr(offload_file.os, "pwritev", lambda *_: next(answers))
    with pytest.raises(CourseError, match="cannot be written"):
        store.append(0, *rows(4))
    assert left_in(tmp_path) == []


def test_a_file_system_that_reserves_no_space(tmp_path, monkeypatch):
    monkeypatch.setattr(os, "posix_fallocate", fails_with(errno.EOPNOTSUPP))
    with block_file(tmp_path) as store:
        store.append(0, *rows(7))
        assert np.array_equal(read_back(store, 0)[1], rows(7)[1])


def test_short_reads_and_writes_are_gone_on_with(tmp_path, monkeypatch):
    preadv, pwritev = os.preadv, os.pwritev
    monkeypatch.setattr(os, "preadv", lambda fd, to, at: preadv(fd, [to[0][:7]], at))
    monkeypatch.setattr(os, "pwritev", lambda fd, data, at: pwritev(fd, [data[0][:33]], at))
    with block_file(tmp_path) as store:
        store.append(0, *rows(11))
        got = read_back(store, 0)
    assert np.array_equal(got[0], rows(11)[0]) and np.array_equal(got[1], rows(11)[1])


@pytest.mark.parametrize("most", [1, 2, 3])
def test_no_call_gets_more_buffers_than_the_system_takes(tmp_path, monkeypatch, most):
    preadv, pwritev, sizes = os.preadv, os.pwritev, []

    def counted(call):
        return lambda fd, buffers, at: (sizes.append(len(buffers)), call(fd, buffers, at))[1]

    monkeypatch.setattr(offload_file, "MOST_BUFFERS", most)
    monkeypatch.setattr(os, "preadv", counted(preadv))
    monkeypatch.setattr(os, "pwritev", counted(pwritev))
    with block_file(tmp_path) as store:
        store.append(0, *rows(11))
        got = read_back(store, 0)
    assert np.array_equal(got[0], rows(11)[0]) and np.array_equal(got[1], rows(11)[1])
    assert max(sizes) == most


@pytest.mark.parametrize("spoil", [
    lambda path: os.truncate(path, 4096 + 100), lambda path: os.truncate(path, 0),
])
def test_a_file_cut_short_while_running(tmp_path, spoil):
    store = block_file(tmp_path)
    store.append(0, *rows(8))
    spoil(store.path)
    with pytest.raises(CourseError, match="cut short while it was in use"):
        store.load(0, 0, Slot(0, store.block_shape))
    assert left_in(tmp_path) == []


@pytest.mark.parametrize("head", [0, 1])
@pytest.mark.parametrize("part", [0, 1])
def test_a_file_that_somebody_else_has_written_to(tmp_path, head, part):
    store = block_file(tmp_path)
    store.append(0, *rows(8))
    with open(store.path, "r+b") as file:
        file.seek(4096 + (2 + part) * 4096 + head * 80 + 40)
        file.write(b"x")
    store.load(0, 0, Slot(0, store.block_shape))
    other = np.arange(2) != head
    store.load(0, 1, Slot(0, store.block_shape), other)
    with pytest.raises(CourseError, match="no longer holds what was written: block 1 of layer 0"):
        store.load(0, 1, Slot(0, store.block_shape))
    assert left_in(tmp_path) == []


@pytest.mark.parametrize("head", [1, 2, 3])
def test_every_head_of_those_that_are_read_is_looked_at(tmp_path, head):
    store = block_file(tmp_path, heads=5)
    store.append(0, *rows(4, heads=5))
    with open(store.path, "r+b") as file:
        file.seek(4096 + head * 80 + 40)
        file.write(b"x")
    with pytest.raises(CourseError, match="no longer holds what was written"):
        store.load(0, 0, Slot(0, store.block_shape), np.isin(np.arange(5), [1, 2, 3]))


def test_keys_that_are_read_alone_are_those_that_were_written(tmp_path):
    store = block_file(tmp_path)
    store.append(0, *rows(8))
    with open(store.path, "r+b") as file:
        file.seek(4096 + 40)
        file.write(b"x")
    store.keys(0, 1)
    with pytest.raises(CourseError, match="no longer holds what was written"):
        store.keys(0, 0)


def test_a_read_that_fails(tmp_path, monkeypatch):
    store = block_file(tmp_path)
    store.append(0, *rows(8))
    monkeypatch.setattr(os, "preadv", fails_with(errno.EIO))
    with pytest.raises(CourseError, match="cannot be read .*error"):
        store.keys(0, 1)
    assert left_in(tmp_path) == []


def test_the_folder_must_be_one(tmp_path):
    (tmp_path / "file").write_text("mine")
    with pytest.raises(CourseError, match="file is a file; .* offloaded to a folder"):
        block_file(tmp_path / "file")
    with pytest.raises(CourseError, match="does not exist"):
        block_file(tmp_path / "nowhere")
    assert (tmp_path / "file").read_text() == "mine"


def test_a_link_with_the_name_of_an_abandoned_file_is_left_alone(tmp_path):
    folder, target = tmp_path / "folder", tmp_path / "target"
    folder.mkdir(), target.write_bytes(offload_file.MAGIC)
    (folder / "course-kv-1-x.blocks").symlink_to(target)
    offload_file.remove_abandoned(folder)
    assert left_in(folder) == ["course-kv-1-x.blocks"] and target.exists()


def test_a_file_put_in_its_place_is_left_alone(tmp_path):
    store = block_file(tmp_path)
    path = store.path
    path.unlink()
    path.write_text("somebody's")
    store.close()
    assert path.read_text() == "somebody's"


KILLED = """
import sys, time, numpy as np
from course_lib.prefill.file_store import BlockFile
store = BlockFile(1, 2, 5, folder=sys.argv[1], block_size=4, capacity=40)
store.append(0, *np.ones((2, 2, 8, 5), np.float32))
print(store.path.name, flush=True)
if sys.argv[2] == "wait":
    time.sleep(60)
elif sys.argv[2] == "raise":
    raise RuntimeError("on purpose")
"""


def other_process(folder, then):
    return subprocess.Popen([sys.executable, "-c", KILLED, str(folder), then], cwd=ROOT,
                            stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)


def test_a_killed_process_s_file_is_removed_at_the_next_start_and_a_living_one_s_is_not(tmp_path):
    (tmp_path / "course-kv-1-mine.blocks").write_text("not of the course: another content")
    os.symlink("/dev/zero", tmp_path / "course-kv-2-link.blocks")
    with other_process(tmp_path, "wait") as process:
        name = process.stdout.readline().strip()
        assert f"-{process.pid}-" in name
        with block_file(tmp_path) as store:  # two processes in one folder
            assert {name, store.path.name} <= set(left_in(tmp_path))
            store.append(0, *rows(9))
            assert np.array_equal(read_back(store, 0)[0], rows(9)[0])
        assert name in left_in(tmp_path)
        process.send_signal(signal.SIGKILL)
        process.wait()
        assert name in left_in(tmp_path)
        with block_file(tmp_path) as store:
            assert name not in left_in(tmp_path)
    assert left_in(tmp_path) == ["course-kv-1-mine.blocks", "course-kv-2-link.blocks"]


@pytest.mark.parametrize("then", ["end", "raise"])
def test_a_program_that_ends_without_close_leaves_nothing(tmp_path, then):
    with other_process(tmp_path, then) as process:
        assert process.stdout.readline()
    assert left_in(tmp_path) == []


def test_a_child_made_by_fork_does_not_remove_its_parent_s_file(tmp_path):
    with block_file(tmp_path) as store:
        store.append(0, *rows(8))
        child = os.fork()
        if child == 0:
            store.close()
            os._exit(0)
        os.waitpid(child, 0)
        assert np.array_equal(read_back(store, 0)[0], rows(8)[0]) and store.path.exists()


def test_a_declared_throttle_slows_reads_down(tmp_path, monkeypatch):
    slept = []
    monkeypatch.setattr(file_store.time, "sleep", slept.append)
    with block_file(tmp_path, throttle=1e4) as store:
        store.append(0, *rows(8))
        start = time.perf_counter()
        for _ in range(3):
            store.load(0, 0, Slot(0, store.block_shape))
        passed = time.perf_counter() - start
    size = 4096 + 160  # K, what is behind it in its page, and V
    assert sum(slept[-1:]) == pytest.approx(3 * size / 1e4, abs=passed)
    with pytest.raises(ValueError, match="throttle"):
        block_file(tmp_path, throttle=0)
