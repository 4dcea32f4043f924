"""The text of `./course bench --engine`: one line a row, ratios, where the time goes."""

from __future__ import annotations

from collections.abc import Iterable

from course_lib.bench.engine_profile import Profile
from course_lib.bench.engine_records import EngineRecord

HEADINGS = ("task", "engine", "kv", "blocks", "thr", "tokens/s", "of read", "outside")
RATIOS = ("llama f16", "llama q8_0")

LEGEND = """\
tokens/s: from the median, the ways in turn. of read: bytes of weights and KV rows that a token must
read, a second, as a part of what as many threads read in the same rounds. outside: part of the time
outside the kernels, in Python and NumPy, from extra runs with a clock around every kernel."""

RATIO_LEGEND = """\
llama f16, llama q8_0: how many times faster than llama.cpp with those KV rows."""

MOST_KERNELS = 4


def table(records: list[EngineRecord]) -> str:
    """Aligned columns; those of llama.cpp only where it was measured."""
    ratios = RATIOS if any(r.engine == "llama" for r in records) else ()
    grid = [(*HEADINGS, *ratios)]
    grid += [cells(record) + ratio_cells(record, records)[: len(ratios)] for record in records]
    widths = [max(len(row[i]) for row in grid) for i in range(len(grid[0]))]
    left = 4  # columns of words
    return "\n".join("  ".join(
        cell.ljust(width) if i < left else cell.rjust(width)
        for i, (cell, width) in enumerate(zip(row, widths, strict=True))).rstrip() for row in grid)


def cells(r: EngineRecord) -> tuple[str, ...]:
    """The texts of one row, in the order of HEADINGS."""
    blocks = "all" if r.sparse_k is None else str(r.sparse_k)
    return (task_text(r), r.engine, r.kv, blocks, str(r.threads), f"{r.tokens_per_s:.1f}",
            percent(r.bandwidth_fraction), percent(r.python_fraction))


def ratio_cells(record: EngineRecord, records: Iterable[EngineRecord]) -> tuple[str, ...]:
    """How many times faster than llama.cpp at the same task, for each kind of its KV rows."""
    found = []
    for heading in RATIOS:
        kv = heading.split()[1]
        other = [r for r in records if (r.engine, r.kv) == ("llama", kv)
                 and task_of(r) == task_of(record)]
        known = record.engine == "course" and other
        found.append(f"{record.tokens_per_s / other[0].tokens_per_s:.2f}x" if known else "")
    return tuple(found)


def task_of(r: EngineRecord) -> tuple[str, int, int, int]:
    """What rows have in common that may be compared."""
    return r.phase, r.n, r.depth, r.threads


def task_text(r: EngineRecord) -> str:
    """A task in words."""
    return f"prompt {r.n:,}" if r.phase == "pp" else f"token at {r.depth:,}"


def percent(value: float | None) -> str:
    """A part of 1 in per cent."""
    return "" if value is None else f"{100 * value:.0f} %"


def shares_text(profiles: list[tuple[EngineRecord, Profile]]) -> str:
    """Where the time goes, called layer by layer: the kernels that take most of it."""
    lines = ["Where the time goes, called layer by layer (extra runs; outside: more than in one)"]
    for record, profile in profiles:
        shares = profile.shares()
        shown = [f"{name} {percent(share)}" for name, share in shares[:MOST_KERNELS]]
        rest = sum(share for _, share in shares[MOST_KERNELS:])
        shown += [f"other kernels {percent(rest)}"] if shares[MOST_KERNELS:] else []
        way = "" if record.sparse_k is None else f", blocks {record.sparse_k}"
        lines.append(f"  {task_text(record)}, {record.kv}{way}, {record.threads} thread"
                     f"{'s' * (record.threads > 1)}: {', '.join(shown)}; outside "
                     f"{percent(profile.outside)}")
    return "\n".join(lines)
