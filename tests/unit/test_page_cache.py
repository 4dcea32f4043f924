"""What a mapping keeps in memory, estimated and by the system's books."""

import mmap
import sys

import pytest

from course_lib.lab import page_cache
from course_lib.lab.page_cache import PAGE, resident_bytes

LINUX = pytest.mark.skipif(sys.platform != "linux", reason="measured by Linux's books")


@pytest.fixture(scope="module")
def file(tmp_path_factory):
    path = tmp_path_factory.mktemp("pages") / "file"
    path.write_bytes(b"x" * (8 << 20) + b"end")
    return path


def test_an_estimate_counts_groups_of_pages():
    assert resident_bytes(10**6, [(70_000, 1)]) == 65536
    assert resident_bytes(70_000, [(69_999, 1)]) == 8192
    assert resident_bytes(100, [(0, 0)]) == 0 == resident_bytes(0, [])
    assert resident_bytes(10**6, [(0, 65536), (65535, 2), (0, 1)]) == 131072
    assert resident_bytes(10**6, [(0, 10**6)]) == -(-(10**6) // 4096) * 4096
    assert resident_bytes(1000, [(100, 1)], 16, 1) == 16


@pytest.mark.parametrize("bad", [(10, [(9, 2)]), (10, [(-1, 1)]), (10, [(1, -1)]),
                                 (10, [], 0), (10, [], 1, 0)])
def test_an_impossible_access_is_refused(bad):
    with pytest.raises(ValueError):
        resident_bytes(*bad)


@LINUX
def test_the_books_know_what_a_process_touches(file):
    size = file.stat().st_size
    before = page_cache.memory_now()
    assert before.own > 0 and before.mapped > 0 and before.peak > 0
    # A mapping of its own: what read() returns may lie where earlier tests freed memory.
    with mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS) as own:
        own.write(file.read_bytes())
        assert page_cache.memory_now().own - before.own > 0.9 * size
    with open(file, "rb") as opened, mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_READ) as m:
        begin = page_cache.memory_now().mapped
        assert sum(m[at] for at in range(0, size, PAGE)) > 0
        assert page_cache.memory_now().mapped - begin > 0.9 * size


@LINUX
def test_a_fresh_process_measures_a_part_and_the_whole(file):
    size = file.stat().st_size
    part = page_cache.measured(file, "map", [(3 << 20, 100)])
    whole = page_cache.measured(file, "read")
    assert 0 < part["mapped"] < 0.5 * size and part["own"] < 0.1 * size
    assert whole["own"] > 0.9 * size and whole["ms"] > 0


@LINUX
def test_the_page_cache_holds_what_was_read_and_forgets_where_it_can(file):
    file.read_bytes()
    held = page_cache.in_page_cache(file)
    assert held is None or held >= file.stat().st_size
    assert page_cache.drop_from_page_cache(file) == (page_cache.in_page_cache(file) == 0)
