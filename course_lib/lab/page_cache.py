"""Which bytes of a file are in memory, and whose memory: the system's page cache and a process.

Standard library only, for the measuring process must be small. Measured by Linux's own books
(/proc, mincore); elsewhere, what is not known is 0 or None.
"""

from __future__ import annotations

import ctypes
import json
import mmap
import os
import subprocess
import sys
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

PAGE = mmap.PAGESIZE
AROUND = 16  # pages that Linux maps together where a mapped file is touched (fault-around)


class Memory(NamedTuple):
    """Bytes of a process: its own pages, pages of files mapped into it, and its peak of both."""

    own: int
    mapped: int
    peak: int


def memory_now() -> Memory:
    """Memory of this process now; zeros where the system does not say.

    From the page tables where the system adds them up (smaps_rollup): the counters in `status` may
    lag behind by some dozen pages.
    """
    pages, status = _table("smaps_rollup"), _table("status")
    own = pages.get("Anonymous", status.get("RssAnon", 0))
    mapped = status.get("RssFile", 0) + status.get("RssShmem", 0)
    if "Rss" in pages:
        mapped = pages["Rss"] - own
    return Memory(own, mapped, status.get("VmHWM", 0))


def _table(name: str) -> dict[str, int]:
    """Name -> bytes of the lines such as "Rss:   123 kB" of a file about this process."""
    try:
        lines = Path("/proc/self", name).read_text(encoding="ascii", errors="replace").splitlines()
    except OSError:
        return {}
    pairs = (line.partition(":") for line in lines if line.endswith(" kB"))
    return {key: int(rest.split()[0]) * 1024 for key, _, rest in pairs}


def in_page_cache(path: str | Path) -> int | None:
    """Bytes of a file's pages that the system holds in memory; None where it does not say."""
    size = os.path.getsize(path)
    if size == 0 or not hasattr(ctypes.CDLL(None), "mincore"):
        return 0 if size == 0 else None
    with open(path, "rb") as file:
        # A private mapping that may be written is the one whose address ctypes gives; nothing is.
        with mmap.mmap(file.fileno(), size, access=mmap.ACCESS_COPY) as mapped:
            first = ctypes.c_char.from_buffer(mapped)
            pages = (ctypes.c_ubyte * -(-size // PAGE))()
            failed = ctypes.CDLL(None).mincore(
                ctypes.c_void_p(ctypes.addressof(first)), ctypes.c_size_t(size), pages)
            del first  # a mapping of which an address is out cannot be closed
    return None if failed else PAGE * sum(page & 1 for page in pages)


def drop_from_page_cache(path: str | Path) -> bool:
    """Ask the system to forget a file's pages; whether it did, as far as it says."""
    if not hasattr(os, "posix_fadvise"):
        return False
    with open(path, "rb") as file:
        os.fsync(file.fileno())  # pages that are not on the disk yet cannot be dropped
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    return in_page_cache(path) == 0


def resident_bytes(size: int, accesses: Iterable[tuple[int, int]], page: int = 4096,
                   around: int = AROUND) -> int:
    """Estimated memory of a mapped file of `size` bytes after some (offset, length) were read.

    Memory comes in whole pages; the first touch of a page brings its group of `around` pages,
    which begins at a multiple of `around` and ends with the file. Raises ValueError for an access
    that is not inside the file, and for page or around below 1.
    """
    if page < 1 or around < 1:
        raise ValueError("page and around must be at least 1.")
    groups: set[int] = set()
    for offset, length in accesses:
        if offset < 0 or length < 0 or offset + length > size:
            raise ValueError(f"{length} bytes at {offset} are not inside a file of {size} bytes.")
        if length:
            first, last = offset // page, (offset + length - 1) // page
            groups.update(range(first // around, last // around + 1))
    pages = -(-size // page)
    return page * sum(min((group + 1) * around, pages) - group * around for group in groups)


def touch(path: str, way: str, accesses: Sequence[Sequence[int]]) -> dict[str, Any]:
    """Read parts of a file one `way` and say what that took: the body of `measured`.

    way: "read" (the whole file at once), "part" (only the parts, by seek and read) or "map" (the
    parts of a mapping). Gives bytes "own", "mapped" and "peak" gained, and "ms".
    """
    before = memory_now()
    begin = time.perf_counter()
    with open(path, "rb", buffering=0) as file:
        if way == "map":
            held: Any = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
            for offset, length in accesses:
                for at in range(offset, offset + length, PAGE):
                    held[at]
                held[offset + length - 1]
        elif way == "read":
            held = file.read()
        else:
            held = []
            for offset, length in accesses:
                file.seek(offset)
                held.append(file.read(length))
        spent = time.perf_counter() - begin
    after = memory_now()
    return {"own": after.own - before.own, "mapped": after.mapped - before.mapped,
            "peak": after.peak - before.peak, "ms": spent * 1e3}


def measured(path: str | Path, way: str, accesses: Iterable[Sequence[int]] = ()) -> dict[str, Any]:
    """`touch` in a fresh process, so that nothing that was read before counts."""
    root = Path(__file__).resolve().parents[2]
    words = [sys.executable, "-m", __name__, str(Path(path).resolve()), way,
             json.dumps([list(access) for access in accesses])]
    done = subprocess.run(words, cwd=root, env={**os.environ, "PYTHONPATH": str(root)},
                          capture_output=True, text=True, timeout=60, check=True)
    return json.loads(done.stdout)


if __name__ == "__main__":
    print(json.dumps(touch(sys.argv[1], sys.argv[2], json.loads(sys.argv[3]))))
