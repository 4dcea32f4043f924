"""Compiled kernels beside other threads and processes: no number of them changes a bit, a child
made by fork does not wait for threads that it has not, and other Python threads go on."""

from __future__ import annotations

import subprocess
import sys
import threading
import time

import pytest

import kernels_pyx
from course_lib.launcher.runner import environ
from course_lib.paths import ROOT
from tests.oracle.kernel_cases import SIZES, make
from tests.sharing import shared_among

pytestmark = pytest.mark.skipif(not kernels_pyx.VARIANTS,
                                reason="the kernels are not compiled here")
VARIANT = next(iter(kernels_pyx.VARIANTS), "")

PARENT = """
import os, sys
import kernels_pyx
from kernels_pyx import compiled
from tests.oracle.kernel_cases import make

variant = kernels_pyx.VARIANTS[0]
call = make("two_pass", kvh=4, group=2, n=100, d=64, q8=0, count=0, block_size=8)
kernels_pyx.set_num_threads(2)
compiled.share_small_work(True)
expected = call.digest(variant)
assert compiled.parallel_regions() == (1 if compiled.HAS_THREADS else 0)
"""
FORK = PARENT + """
child = os.fork()
if child == 0:
    assert compiled.get_num_threads() == 1
    kernels_pyx.set_num_threads(2)  # as a backend would that is asked again
    assert compiled.get_num_threads() == 1
    os._exit(0 if call.digest(variant) == expected else 1)
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
assert compiled.get_num_threads() == (2 if compiled.HAS_THREADS else 1)
assert call.digest(variant) == expected
assert compiled.parallel_regions() == (2 if compiled.HAS_THREADS else 0)
"""
POOL = PARENT + """
import multiprocessing
with multiprocessing.get_context("fork").Pool(2) as pool:
    assert pool.map(call.digest, [variant] * 4) == [expected] * 4
"""


@pytest.mark.parametrize("code", (FORK, POOL), ids=("fork", "pool"))
def test_a_child_made_by_fork_finishes_with_the_same_bits(code):
    env = environ(PYTHONPATH=str(ROOT))
    result = subprocess.run([sys.executable, "-c", code], env=env, cwd=ROOT, timeout=60,
                            capture_output=True, text=True)
    assert result.returncode == 0, result.stderr


def test_python_threads_that_call_at_once_get_the_same_bits():
    calls = [make(operation, **SIZES[operation][0]) for operation in sorted(SIZES)]
    expected = [call.digest(VARIANT) for call in calls]
    got: list[list[str]] = []

    def run():
        for _ in range(3):
            got.append([call.digest(VARIANT) for call in calls])

    workers = [threading.Thread(target=run) for _ in range(3)]
    with shared_among(2, started=True):
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.join()
    assert got == [expected] * 9


def test_other_python_threads_go_on_during_a_call():
    compute = kernels_pyx.kernels(VARIANT)["compute_float"]
    progress = 0
    worker = threading.Thread(target=lambda: [compute(2**24) for _ in range(3)])
    worker.start()
    while worker.is_alive():
        progress += 1
        time.sleep(0.001)
    assert progress > 10  # one or two for each call that would keep the lock


@pytest.mark.parametrize("heads", [1, 2])
def test_two_pieces_of_work_are_shared_and_one_is_not(heads):
    with shared_among(2, started=heads > 1):
        make("two_pass", kvh=heads, group=1, n=8, d=16, q8=0, count=0, block_size=8)(VARIANT)


@pytest.mark.parametrize(("n", "started"), [(160, False), (512, True)])
def test_a_part_of_the_context_is_worth_two_threads_when_it_is_long(n, started):
    from kernels_pyx import compiled

    call = make("partial_attention", kvh=2, group=1, rows=32, n=n, d=64, block=128)
    before, count = compiled.get_num_threads(), compiled.parallel_regions()
    kernels_pyx.set_num_threads(2)
    try:
        call.digest(VARIANT)
    finally:
        kernels_pyx.set_num_threads(before)
    assert compiled.parallel_regions() - count == (started and compiled.HAS_THREADS)


def test_the_number_of_threads_has_limits():
    for wrong in (0, -1, 1025, 2**40, 2**100, -(2**100)):
        with pytest.raises(ValueError, match="the number of threads must be 1 to 1024"):
            kernels_pyx.set_num_threads(wrong)
    for wrong in ("2", 2.0, None):
        with pytest.raises(TypeError, match="the number of threads must be a whole number"):
            kernels_pyx.set_num_threads(wrong)
