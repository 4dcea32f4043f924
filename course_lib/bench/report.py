"""A whole run of `./course bench`: progress, table and files."""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Sequence, Set
from typing import TextIO

import numpy as np
from tqdm import tqdm

from course_lib import backend, decode_gate
from course_lib.bench import table
from course_lib.bench.groups import Plan, chosen
from course_lib.bench.machine import (
    WINDOW,
    WINDOWS,
    Kernels,
    Reader,
    machine_text,
    on_fast_cores,
    peaks,
)
from course_lib.bench.memory import (
    ARENA_BYTES,
    Arena,
    arena_bytes,
    available_bytes,
    take_room_of_blas,
)
from course_lib.bench.records import csv_text, json_text, write
from course_lib.bench.run import Run, all_plans, run, steps
from course_lib.errors import CourseError

QUICK_SECONDS = 25
"""No group is begun later than this with --quick; the longest takes a few seconds."""


def bench(out: TextIO, *, quick: bool = False, parts: Set[str] = frozenset(),
          threads: Sequence[int] = (), csv_path: str | None = None, json_path: str | None = None,
          plans: list[Plan] | None = None, arena_size: int | None = None) -> int:
    """Measure, print the table to `out`, write the files; return the exit code.

    0: all was measured; 1: there was not enough memory for some of it; 130: interrupted. What was
    measured is kept; where that is nothing, no file is written, and without an interrupt it is a
    CourseError.

    parts: those of the bench, all if empty. threads: counts to measure, one and all fast cores if
    empty. plans and arena_size stand in for the whole bench and the memory that is rotated.
    """
    begun = time.monotonic()
    kernels = Kernels()
    counts = kernels.thread_counts(threads)
    if quick and not threads:
        counts = counts[:1]
    everything = all_plans() if plans is None else plans
    todo = chosen(everything, parts, quick)
    take_room_of_blas()
    size = arena_bytes(available_bytes()) if arena_size is None else arena_size
    with on_fast_cores(max(counts)) as remark:
        print(f"{machine_text()}{remark and '; ' + remark}", file=out)
        print(about(kernels, size), file=out, flush=True)
        try:
            state = Run(kernels, Arena(size), Reader(kernels, min(WINDOW, size // WINDOWS)))
        except MemoryError:
            raise CourseError(f"bench: there are not {size // 2**20} MB of memory to rotate; close "
                              "other programs, or raise the limit (ulimit -v).") from None
        finished, late = measure_all(state, todo, counts, out,
                                     begun + QUICK_SECONDS if quick else math.inf)
    print_results(state, out)
    found = table.automatic_crossings(state.measured)
    if found and finished and plans is None and kernels.chosen is not None:  # NumPy has no choice
        print(remembered_text(kernels.info.variant, found), file=out)
    if quick:
        print(quick_text(chosen(everything, parts, False), todo, late), file=out)
    if state.measured:
        for path, text in ((csv_path, csv_text), (json_path, json_text)):
            if path is not None:
                write(path, text([one.record for one in state.measured]))
    return ended(state, finished)


def ended(state: Run, finished: bool) -> int:
    """Say what cut the run short, and return its exit code."""
    count = len(state.measured)
    kept = f"kept {count} rows" if count else "nothing was measured, so no file is written"
    short = f"not enough memory for {', '.join(state.too_large)}"
    if not finished:
        print(f"course: interrupted; {kept}", file=sys.stderr)
        return 130
    if not state.measured:
        why = short if state.too_large else "there is nothing of these parts here"
        raise CourseError(f"bench: {why}; {kept}.")
    if state.too_large:
        print(f"course: bench: {short}; {kept}", file=sys.stderr)
        return 1
    return 0


def quick_text(everything: list[Plan], todo: list[Plan], late: list[Plan]) -> str:
    """What --quick left out, by plan and because time was short."""
    left_out = [plan.title for plan in everything if plan not in todo or plan in late]
    text = f"\n--quick left out {len(left_out)} of {len(everything)} groups: {', '.join(left_out)}"
    if late:
        text += f" (the last {len(late)} because this machine is slow or busy)"
    return text + "; and more threads, unless named with --threads."


def about(kernels: Kernels, size: int) -> str:
    """What is measured, and with what."""
    text = f"kernels: {kernels.info.variant} ({kernels.info.reason}); NumPy {np.__version__}"
    if kernels.chosen is None:
        text += "; there are no compiled kernels here, so only NumPy is measured"
    text += f", on one thread; {size // 2**20} MB of caches in rotation"
    if size < ARENA_BYTES:
        text += f" (not {ARENA_BYTES // 2**20}: a third of the free memory)"
    return text


def measure_all(state: Run, plans: list[Plan], counts: list[int], out: TextIO,
                until: float) -> tuple[bool, list[Plan]]:
    """Probe the machine and measure the plans until a time; False if interrupted, and the plans
    that were not begun."""
    total = sum(len(each) for _, each in steps(plans, counts))
    try:
        for count in counts:
            state.peaks[count] = peaks(state.kernels, state.reader, count)
        print(table.peaks_text(state.peaks), file=out, flush=True)
        with tqdm(total=total, unit="group", file=sys.stderr, leave=False,
                  disable=not sys.stderr.isatty()) as bar:
            def finished(title: str) -> None:
                bar.set_postfix_str(title)
                bar.update()

            return True, run(state, plans, counts, finished, until)
    except KeyboardInterrupt:
        return False, []
    except MemoryError:
        state.too_large.append("the probe of the machine")
        return True, []
    finally:
        state.kernels.set_threads(backend.threads())


def print_results(state: Run, out: TextIO) -> None:
    """The table, the crossover, and what the build lacks."""
    if state.measured:
        print(f"\n{table.attention_heading()}\n\n{table.table(state.measured)}\n\n{table.LEGEND}",
              file=out)
    crossings = table.crossings_text(state.measured)
    if crossings:
        print(f"\n{crossings}", file=out)
    if state.missing:
        print(f"\nnot in this build: {', '.join(state.missing)}", file=out)


def remembered_text(variant: str, found: dict[int, dict[str, int | None]]) -> str:
    """Remember the crossovers for the engine's own choice, and say so."""
    if sys.prefix == sys.base_prefix:
        return "(not remembered: this Python is not an environment of the course)"
    try:
        for threads, by_kv in found.items():
            decode_gate.remember(variant, threads, by_kv)
    except OSError as error:
        return f"(not remembered: {error})"
    return 'remembered for decode_k="auto": one selection per query head, probed rows of q8 packed'
