"""Memory that is cold at every call: far more of it than any cache of a CPU, used in rotation."""

from __future__ import annotations

import resource
from collections.abc import Callable
from typing import Any

import numpy as np

from course_lib.launcher.machine import read

ARENA_BYTES = 512 * 2**20
PAGE = 2 * 2**20  # arrays start on pages of this size, as large ones of NumPy do where it can


def available_bytes() -> int | None:
    """Return the memory that this process may still take, None if nothing says so: what Linux calls
    available, or what a limit of the shell (`ulimit -v`) leaves if that is less."""
    free = []
    for line in read("/proc/meminfo").splitlines():
        if line.startswith("MemAvailable:"):
            free.append(int(line.split()[1]) * 1024)
    limit, _ = resource.getrlimit(resource.RLIMIT_AS)
    if limit != resource.RLIM_INFINITY:
        pages = read("/proc/self/statm").split()
        taken = int(pages[0]) * resource.getpagesize() if pages else 0
        free.append(max(0, limit - taken))
    return min(free, default=None)


def take_room_of_blas() -> None:
    """Let NumPy's BLAS take the buffers that it keeps, before the memory left is counted: where it
    finds none later, it ends the process, and the rows measured by then are lost."""
    square = np.ones((512, 512), np.float32)
    np.matmul(square, square)
    np.matmul(square, square[0])


def arena_bytes(available: int | None) -> int:
    """Return how much memory to rotate: ARENA_BYTES, or a third of what is there if that is less:
    NumPy's own temporary arrays need room beside it."""
    if available is None:
        return ARENA_BYTES
    return min(ARENA_BYTES, max(available // 3, PAGE) // PAGE * PAGE)


class Arena:
    """One large block of memory, handed out as rotating sets of arrays.

    Distinct memory is what makes a read cold; the values in it repeat, a few megabytes of them
    over and over, so that filling it costs a fraction of a second.
    """

    def __init__(self, size: int) -> None:
        self.bytes = np.empty(size, np.uint8)
        self._filled_with = ""
        self._places: dict[str, int] = {}

    def fill(self, dtype: str, values: Callable[[int], np.ndarray]) -> None:
        """Fill the memory with values(count) of a dtype, repeated; nothing if it is so already."""
        if self._filled_with == dtype:
            return
        tile = values(2**20).astype(dtype)
        room = self.bytes[: self.bytes.size // tile.nbytes * tile.nbytes].view(dtype)
        room.reshape(-1, tile.size)[:] = tile
        rest = self.bytes[room.nbytes :].view(dtype)
        rest[:] = tile[: rest.size]
        self._filled_with = dtype

    def sets(self, make: Callable[[int], Any], nbytes: int) -> Rotation:
        """Return as many sets as fit, of `nbytes` each; make(offset) builds one of the memory from
        byte `offset` on. At least one: MemoryError for a set larger than the memory."""
        step = -(-nbytes // PAGE) * PAGE if nbytes >= PAGE else nbytes
        count = self.bytes.size // step
        if count == 0:
            raise MemoryError(f"a set of {nbytes} bytes does not fit {self.bytes.size} bytes.")
        return Rotation([make(i * step) for i in range(count)])

    def array(self, offset: int, shape: tuple[int, ...], dtype: str) -> np.ndarray:
        """Return a view of the memory from byte `offset` on."""
        count = int(np.prod(shape)) * np.dtype(dtype).itemsize
        return self.bytes[offset : offset + count].view(dtype).reshape(shape)


class Rotation:
    """Sets of arrays that follow each other: no call gets what the one before it has read."""

    def __init__(self, sets: list[Any]) -> None:
        self.all = sets
        self._next = 0

    def next(self) -> Any:
        """Return the next set."""
        chosen = self.all[self._next]
        self._next = (self._next + 1) % len(self.all)
        return chosen
