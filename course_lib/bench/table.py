"""The text of a run: the machine, one line a kernel, where block-sparse decode begins to pay."""

from __future__ import annotations

from collections.abc import Mapping

from course_lib.bench.attention_cases import K_BLOCKS, SHAPE
from course_lib.bench.machine import Peaks
from course_lib.bench.run import Measured
from course_lib.bench.timing import Crossing, crossing

HEADINGS = ("kernel", "kv", "context", "thr", "ms", "GB/s", "of read", "of peak", "NumPy",
            "dequant", "portable", "1 thr")

LEGEND = """\
ms: median of a call, caches cold. of read: part of the bandwidth that as many threads read in the
same rounds. of peak: part of the measured peak of float or int8 operations. Then how many times
faster than NumPy on one thread, than NumPy that first turns q8 rows into float rows, than the
portable C kernels on as many threads, and than itself on one thread."""


def peaks_text(peaks: Mapping[int, Peaks]) -> str:
    """One line for each number of threads."""
    lines = []
    for threads, peak in peaks.items():
        parts = [f"reads {peak.gb_per_s:.1f} GB/s"]
        if peak.float_operations is not None:
            parts.append(f"{peak.float_operations:.0f} GFLOP/s float32")
        if peak.int8_operations is not None:
            parts.append(f"{peak.int8_operations:.0f} Gop/s int8")
        lines.append(f"{threads} thread{'s' * (threads > 1)}: {', '.join(parts)}")
    return "\n".join(lines)


def table(measured: list[Measured]) -> str:
    """Aligned columns; a column that is empty everywhere is left out."""
    rows = [cells(one) for one in measured]
    shown = [i for i in range(len(HEADINGS)) if i < 1 or any(row[i] for row in rows)]
    grid = [[row[i] for i in shown] for row in (HEADINGS, *rows)]
    widths = [max(len(row[i]) for row in grid) for i in range(len(shown))]
    return "\n".join(
        "  ".join(cell.rjust(width) if i else cell.ljust(width)
                  for i, (cell, width) in enumerate(zip(row, widths, strict=True))).rstrip()
        for row in grid)


def cells(one: Measured) -> tuple[str, ...]:
    """The texts of one row, in the order of HEADINGS."""
    r = one.record

    def number(value: float | None, digits: int, unit: str = "") -> str:
        return "" if value is None else f"{value:.{digits}f}{unit}"

    def percent(value: float | None) -> str:
        return "" if value is None else f"{100 * value:.0f} %"

    def times(value: float | None) -> str:
        return number(value, 1 if value is None or value >= 9.95 else 2, "x")

    return (r.kernel, r.kv or "", "" if r.context is None else f"{r.context:,}", str(r.threads),
            number(r.ms, 3), number(r.gb_per_s, 1), percent(r.bandwidth_fraction),
            percent(one.peak_fraction), times(r.vs_numpy), times(one.vs_dequantized),
            times(r.vs_portable), times(one.vs_one_thread))


def decode_times(measured: list[Measured]) -> dict[tuple[str, int, str], dict[int, float]]:
    """(kv, threads, kernel) -> context -> milliseconds."""
    times: dict[tuple[str, int, str], dict[int, float]] = {}
    for one in measured:
        r = one.record
        if r.context is not None and r.kv is not None:
            times.setdefault((r.kv, r.threads, r.kernel), {})[r.context] = r.ms
    return times


LONG_CONTEXT = 8192
CONTEXTS_NEEDED = 3
"""A crossover decides for every later prompt: it is read off at least so many contexts, one of them
as long as this or longer, else "never" might only mean "not at the two short ones"."""


ENGINE_KERNEL = {"q8": "sparse_attention_packed", "f32": "sparse_attention"}
"""What the engine's own choice runs: packing the probed rows pays for q8 rows only."""


def automatic_crossings(measured: list[Measured]) -> dict[int, dict[str, int | None]]:
    """Threads -> kv -> where the engine's own choice begins to read blocks only, None for never.

    The engine keeps the probed rows packed and selects per query head. A run over few or only
    short contexts finds nothing.
    """
    times = decode_times(measured)
    found: dict[int, dict[str, int | None]] = {}
    for (kv, threads, kernel), pruned in times.items():
        dense = times.get((kv, threads, "two_pass"), {})
        enough = len(pruned) >= CONTEXTS_NEEDED and max(pruned) >= LONG_CONTEXT
        if kernel == ENGINE_KERNEL[kv] and dense.keys() == pruned.keys() and enough:
            at = crossing(dense, pruned)
            found.setdefault(threads, {})[kv] = at.faster if at.slower is None else at.estimate
    return found


def crossings_text(measured: list[Measured]) -> str:
    """Where block-sparse decode, its selection included, becomes faster than dense decode."""
    times = decode_times(measured)
    lines = []
    ways = (("sparse_attention", "one selection per query head"),
            ("sparse_attention_packed", "one per query head, probed rows packed"),
            ("sparse_attention_shared", "one selection per KV head"),
            ("sparse_attention_shared_packed", "one per KV head, probed rows packed"))
    for (kv, threads, kernel), dense in times.items():
        if kernel != "two_pass":
            continue
        for name, words in ways:
            pruned = times.get((kv, threads, name), {})
            if pruned and dense.keys() == pruned.keys():
                lines.append(f"  {kv}, {threads} thread{'s' * (threads > 1)}, {words}: "
                             + crossing_text(crossing(dense, pruned))
                             + at_longest(dense, pruned))
    if not lines:
        return ""
    return (f"Block-sparse decode (k = {K_BLOCKS}, selection included) is faster than dense "
            "two_pass\n(by the medians of this run; near the crossing they vary by some percent, "
            "on a busy machine by more)\n" + "\n".join(lines))


def crossing_text(found: Crossing) -> str:
    """One crossing in words."""
    if found.faster is None:
        return f"at none of these contexts, up to {found.slower:,} tokens"
    if found.slower is None:
        return f"from {found.faster:,} tokens on or fewer"
    return (f"from about {found.estimate:,} tokens on (slower at {found.slower:,}, faster at "
            f"{found.faster:,})")


def at_longest(dense: Mapping[int, float], pruned: Mapping[int, float]) -> str:
    """The ratio at the longest context."""
    n = max(dense)
    return f"; {dense[n] / pruned[n]:.2f}x at {n:,}"


def attention_heading() -> str:
    """What the decode rows are about."""
    return f"Decode attention: {SHAPE}; block-sparse with k = {K_BLOCKS} blocks of 32 tokens."
