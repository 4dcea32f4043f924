"""The machine under the numbers: its cores, and what they can do at most."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from typing import Any

import numpy as np

from course_lib import backend
from course_lib.bench.memory import Arena
from course_lib.bench.timing import interleaved
from course_lib.launcher.machine import cpu_name, read

WINDOW = 32 * 2**20
"""Bytes of one probe of the bandwidth: at 30 GB/s a millisecond, as long as a kernel's call."""

WINDOWS = 4
"""Windows that take turns, in memory of their own: what a kernel has read is not in them."""

ROUNDS_OF_ARITHMETIC = 2**18

Operations = Mapping[str, Callable[..., Any]]


class Kernels:
    """The compiled kernels that are timed, and the portable ones beside them; None where NumPy is
    all there is."""

    def __init__(self) -> None:
        self.info = backend.info()
        self.chosen: Operations | None = None
        self.portable: Operations | None = None
        if self.info.name == "numpy":
            return
        self._package = import_module("kernels_pyx")
        self.chosen = self._package.kernels(self.info.variant)
        if self.info.variant != "portable" and "portable" in self._package.VARIANTS:
            self.portable = self._package.kernels("portable")

    def set_threads(self, count: int) -> None:
        """Let the kernels use up to `count` threads; NumPy has one."""
        if self.chosen is not None:
            self._package.set_num_threads(count)

    def thread_counts(self, asked: Sequence[int]) -> list[int]:
        """Return the thread counts to measure: those asked for, else one and all fast cores."""
        if self.chosen is None:
            return [1]
        return sorted(set(asked or (1, backend.threads())))


@dataclass(frozen=True)
class Peaks:
    """What `threads` threads can do: 10^9 bytes read, float and int8 operations a second."""

    threads: int
    gb_per_s: float
    float_operations: float | None
    int8_operations: float | None


class Reader:
    """Calls that read memory in order, the next `nbytes` of it each time."""

    def __init__(self, kernels: Kernels, nbytes: int = WINDOW) -> None:
        self.nbytes = nbytes
        arena = Arena(WINDOWS * nbytes)
        arena.bytes[:] = 1  # else every page would be the one page of zeros
        # NumPy's own sum keeps up with memory in words of eight bytes.
        dtype, size = ("int64", 8) if kernels.chosen is None else ("int32", 4)
        self._sum = np.add.reduce if kernels.chosen is None else kernels.chosen["read_words"]
        self._windows = arena.sets(lambda at: arena.array(at, (nbytes // size,), dtype), nbytes)

    def __call__(self) -> object:
        return self._sum(self._windows.next())


def peaks(kernels: Kernels, reader: Reader, threads: int) -> Peaks:
    """Measure the machine with `threads` threads, in about a tenth of a second."""
    kernels.set_threads(threads)
    calls: dict[str, Callable[[], object]] = {"read": reader}
    done: dict[str, float] = {}
    if kernels.chosen is not None:
        for name in ("compute_float", "compute_int8"):
            done[name] = kernels.chosen[name](ROUNDS_OF_ARITHMETIC)
            calls[name] = partial(kernels.chosen[name], ROUNDS_OF_ARITHMETIC)
    times = interleaved(calls)

    def giga(name: str) -> float | None:
        return done[name] / times[name] / 1e9 if name in done else None

    return Peaks(threads, reader.nbytes / times["read"] / 1e9, giga("compute_float"),
                 giga("compute_int8"))


def cores_text() -> str:
    """Return the cores with what Linux states of them: how many, governor, MHz now."""
    groups: dict[str, int] = {}
    infos = read("/proc/cpuinfo").splitlines()
    mhz = [line.partition(":")[2].strip() for line in infos if line.startswith("cpu MHz")]
    usable = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else []
    for core in usable or range(os.cpu_count() or 1):
        folder = f"/sys/devices/system/cpu/cpu{core}/cpufreq"
        governor = read(f"{folder}/scaling_governor").strip()
        khz = read(f"{folder}/scaling_cur_freq").strip()
        speed = f"{int(khz) // 1000} MHz" if khz.isdigit() else ""
        if not speed and core < len(mhz):
            speed = f"{float(mhz[core]):.0f} MHz"
        text = " ".join(word for word in (speed, governor) if word)
        groups[text] = groups.get(text, 0) + 1
    return ", ".join(f"{count} core{'s' * (count > 1)}{' at ' * bool(text)}{text}"
                     for text, count in groups.items())


def machine_text() -> str:
    """Return the CPU's name and cores."""
    return f"{cpu_name() or 'a CPU without a name'}: {cores_text()}"


@contextmanager
def on_fast_cores(threads: int) -> Iterator[str]:
    """Keep this process on the fast cores of a board with two kinds, if they are enough.

    Yields a remark, empty where nothing was done. Otherwise Linux may run one thread on a slow core
    in one round and on a fast one in the next.
    """
    fast = backend.performance_cores()
    before = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else set(fast)
    if len(fast) == len(before) or threads > len(fast):
        yield ""
        return
    os.sched_setaffinity(0, fast)
    try:
        yield f"on the {len(fast)} fast cores, number {', '.join(map(str, fast))}"
    finally:
        os.sched_setaffinity(0, before)
