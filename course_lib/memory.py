"""How much memory a process may still use: the machine's, or less in a container. Standard library
only."""

from __future__ import annotations

import resource
from collections.abc import Iterator
from pathlib import Path

MEMINFO = Path("/proc/meminfo")
STATUS = Path("/proc/self/status")
OWN_GROUPS = Path("/proc/self/cgroup")
GROUPS = Path("/sys/fs/cgroup")


def available() -> int | None:
    """Bytes that this process may use without swapping; None where the system does not say.

    Linux's MemAvailable, which counts file pages that can be dropped; or what is left of the limit
    of a control group (a container, a service) or of addresses (ulimit -v), where that is less.
    """
    table = _table(MEMINFO)
    if "MemAvailable" not in table:
        return None
    return max(0, min([table["MemAvailable"], *_left_in_groups(), *_left_of_addresses()]))


def own() -> int:
    """Bytes of memory that this process holds now, without pages of files; 0 if not known."""
    return _table(STATUS).get("RssAnon", 0)


def gigabytes(count: float) -> str:
    """Bytes as a text: 1.83 GB."""
    return f"{count / 1e9:.2f} GB"


def _table(path: Path) -> dict[str, int]:
    """Name -> bytes of a file of the kernel with lines such as "MemFree:   123 kB"."""
    values = {}
    for line in _read(path).splitlines():
        name, _, rest = line.partition(":")
        words = rest.split()
        if len(words) == 2 and words[1] == "kB" and words[0].isdigit():
            values[name] = int(words[0]) * 1024
    return values


def _left_of_addresses() -> Iterator[int]:
    limit, _ = resource.getrlimit(resource.RLIMIT_AS)
    if limit != resource.RLIM_INFINITY:
        yield limit - _table(STATUS).get("VmSize", 0)


def _left_in_groups() -> Iterator[int]:
    """What is left of every limit that holds for this process: those of its group and above."""
    for line in _read(OWN_GROUPS).splitlines():
        number, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if number == "0" and not controllers:
            yield from _left(GROUPS, path, "memory.max", "memory.current", "")
        elif "memory" in controllers.split(","):
            yield from _left(GROUPS / "memory", path, "memory.limit_in_bytes",
                             "memory.usage_in_bytes", "total_")


def _left(root: Path, path: str, limit: str, usage: str, prefix: str) -> Iterator[int]:
    folder = root / path.lstrip("/")
    for group in (folder, *folder.parents):
        if not group.is_relative_to(root):
            return
        most, used = _read(group / limit).strip(), _read(group / usage).strip()
        if most.isdigit() and used.isdigit():  # not "max", and there
            statistics = dict(line.split()[:2] for line in _read(group / "memory.stat").splitlines()
                              if len(line.split()) == 2)
            files = sum(int(statistics.get(f"{prefix}{age}_file", 0))
                        for age in ("inactive", "active"))
            yield int(most) - max(0, int(used) - files)


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""
