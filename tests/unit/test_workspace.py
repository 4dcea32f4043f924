"""The memory of kernels, which is kept for the next call: never two calls' at once, and bounded."""

from __future__ import annotations

import os
import resource
import subprocess
import sys
import threading

import numpy as np
import pytest

import kernels_pyx
from course_lib import backend, memory
from course_lib.paths import ROOT
from tests.oracle.kernel_cases import SIZES, make

F32 = np.float32
MEGABYTE = 1 << 20

pytestmark = [
    pytest.mark.skipif(backend.kernel("partial_attention") is None, reason="needs the kernels"),
    pytest.mark.skipif("COURSE_EXPECT_VARIANT" in os.environ,
                       reason="an emulated process counts the emulator's pages"),
]


def attention(n, rows=16, heads=2, d=64):
    """A call that packs 4 * heads * n * d bytes of keys, and the output that it writes anew."""
    some = np.random.default_rng(n).standard_normal((heads, max(rows, 1000), d), dtype=F32)
    q, k, v = (np.resize(some, (heads, m, d)) for m in (rows, n, n))
    out, lse = np.zeros_like(q), np.full(q.shape[:2], -np.inf)
    visible = np.full(rows, n, np.int64)
    partial_attention = backend.kernel("partial_attention")

    def call():
        out[...], lse[...] = 0, -np.inf
        partial_attention(q, k, v, visible, 128, None, out, lse)
        return out

    return call


def pages(call):
    """Pages that the system has to bring during a call."""
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    call()
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before


@pytest.mark.parametrize("n", [1024, 4096, 16384])
def test_the_next_call_gets_the_memory_of_the_last_one(n):
    call = attention(n)
    call(), call()
    assert min(pages(call) for _ in range(5)) < 2 * 64 * n * 4 / 4096 / 8


def test_of_calls_by_turns_each_finds_its_memory():
    calls = [attention(n) for n in (16384, 2048, 512)]
    for _ in range(3):
        for call in calls:
            call()
    assert min(sum(map(pages, calls)) for _ in range(5)) < 200


def test_larger_memory_goes_back_to_the_system():
    call = attention(200_000, rows=1)  # 100 MB of keys to pack
    before = memory.own()
    call()
    assert memory.own() - before < 70 * MEGABYTE


@pytest.mark.parametrize("operation", [
    "two_pass", "single_pass_q8", "prefill_attention", "partial_attention", "antidiagonal_scores",
    "block_sums"])
def test_calls_leave_nothing_behind(operation):
    """Small memory, which is not kept, too."""
    call, variant = make(operation, **SIZES[operation][0]), next(iter(kernels_pyx.VARIANTS))
    call(variant)
    before = memory.own()
    for _ in range(3000):
        call(variant)
    assert memory.own() - before < MEGABYTE


def test_what_gives_way_to_larger_memory_is_freed_and_what_is_kept_is_not_lost():
    """Calls of 12 to 16 MB, each more than the one before, and one whose memory is not kept."""
    rows, out, lse = np.ones((2, 40_000, 64), F32), np.zeros((2, 1, 64), F32), np.zeros((2, 1))

    def call(n=31_000):
        part = rows[:, :n]
        backend.kernel("partial_attention")(out, part, part, np.array([n]), 128, None, out.copy(),
                                            lse)

    before = memory.own()
    for n in range(24_000, 32_000, 1000):
        call(n)
    assert memory.own() - before < 80 * MEGABYTE  # of 112
    call(40_000)
    assert pages(call) < 200


KEPT_AND_ONE_MORE = """
import resource
import numpy as np
from course_lib import backend, memory
from course_lib.paths import ROOT

def call(n):
    q, k = np.zeros((1, 4, 64), np.float32), np.zeros((1, n, 64), np.float32)
    out, lse = np.zeros_like(q), np.full((1, 4), -np.inf)
    visible = np.full(4, n, np.int64)
    return lambda: backend.kernel("partial_attention")(q, k, k, visible, 128, None, out, lse)

first, second = call(60_000), call(70_000)  # 15 MB of keys, which are kept, and 18
now = memory._table(memory.STATUS)["VmSize"]
resource.setrlimit(resource.RLIMIT_AS, (now + 25 * 10**6, -1))
first()
second()
"""


def test_memory_that_is_kept_is_there_for_a_larger_call():
    env = os.environ | {"COURSE_THREADS": "1"}
    subprocess.run([sys.executable, "-c", KEPT_AND_ONE_MORE], env=env, cwd=ROOT, check=True)


def test_calls_at_the_same_time_share_nothing():
    calls = [attention(n, rows=32) for n in (3000, 3000, 2500, 900, 8000)]
    want = [call().copy() for call in calls]
    wrong = []

    def work(call, expected):
        for _ in range(20):
            if not np.array_equal(call(), expected):
                wrong.append(call)

    threads = [threading.Thread(target=work, args=pair) for pair in zip(calls, want, strict=True)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
