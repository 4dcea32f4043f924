"""Running the bench: each group on each number of threads, and what came of it."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from course_lib import backend
from course_lib.bench import attention_cases, linear_cases, model_cases, prefill_cases
from course_lib.bench.groups import Bench, Group, Kernel, Plan, Work
from course_lib.bench.machine import Kernels, Operations, Peaks, Reader
from course_lib.bench.memory import Arena
from course_lib.bench.records import Record
from course_lib.bench.timing import interleaved

SECONDS = 0.3
"""Time for the rounds of a group beyond the first seven."""


@dataclass(frozen=True)
class Measured:
    """A record, and what only the table shows: times faster than NumPy that first makes float rows
    of int8 ones, than the same kernel on one thread, and the part of the peak of arithmetic."""

    record: Record
    vs_dequantized: float | None = None
    vs_one_thread: float | None = None
    peak_fraction: float | None = None


@dataclass
class Run:
    """What a run is, and what it has measured so far: kept when it is interrupted. too_large: the
    titles of groups for which there was not enough memory."""

    kernels: Kernels
    arena: Arena
    reader: Reader
    peaks: dict[int, Peaks] = field(default_factory=dict)
    measured: list[Measured] = field(default_factory=list)
    missing: list[str] = field(default_factory=list)
    too_large: list[str] = field(default_factory=list)


def all_plans() -> list[Plan]:
    """Every group of the bench, in the order of the table."""
    return [*attention_cases.plans(), *linear_cases.plans(), *prefill_cases.plans(),
            *model_cases.plans()]


def steps(plans: list[Plan], threads: list[int]) -> list[tuple[Plan, list[int]]]:
    """Each plan with the thread counts that it is measured on."""
    return [(plan, threads if plan.all_threads else threads[:1]) for plan in plans]


def run(state: Run, plans: list[Plan], threads: list[int],
        finished: Callable[[str], object] = lambda title: None,
        until: float = math.inf) -> list[Plan]:
    """Measure every plan into `state`; `finished` is called after each group.

    Returns the plans that were not begun because time.monotonic() had come to `until`.
    """
    bench = Bench(state.arena)
    for i, (plan, counts) in enumerate(steps(plans, threads)):
        if time.monotonic() > until:
            return plans[i:]
        try:
            group = plan.build(bench)
            for count in counts:
                measure(state, group, count)
                finished(plan.title)
        except MemoryError:  # a smaller group after it may find enough
            state.too_large.append(plan.title)
    return []


def measure(state: Run, group: Group, threads: int) -> None:
    """Time one group on one number of threads; nothing is kept of a group that is interrupted."""
    kernels = state.kernels
    kernels.set_threads(threads)
    works = [work for work in group.works if there(state, work)]
    calls: dict[tuple[str, str], Callable[[], object]] = {
        ("read", ""): state.reader}
    for work in works:
        for kind, operations in (("chosen", kernels.chosen), ("portable", kernels.portable)):
            if operations is not None:
                variant = kernels.info.variant if kind == "chosen" else kind
                calls[kind, work.kernel] = compiled_call(work, variant, operations)
    # NumPy has one thread: beside more of them it would be no comparison.
    used = {work.numpy for work in works} | {"dequantized"}
    if threads == 1:
        calls |= {("numpy", name): numpy_call(call) for name, call in group.numpy.items()
                  if name in used}
    # In a decode, what ran before is the same kernel on another layer's rows.
    reading = [("chosen", work.kernel) for work in works if work.read_bytes is not None]
    times = interleaved(calls, SECONDS, settled=[("read", ""), *reading])
    gb_per_s = state.reader.nbytes / times["read", ""] / 1e9
    state.measured += [
        measured_of(state, group, work, threads, times, gb_per_s) for work in works]


def there(state: Run, work: Work) -> bool:
    """Whether the build has the operation of a work; what it lacks is said once."""
    chosen = state.kernels.chosen
    if chosen is None or work.whole_model or work.name in chosen:
        return True
    if work.name not in state.missing:
        state.missing.append(work.name)
    return False


def compiled_call(work: Work, variant: str, operations: Operations) -> Callable[[], object]:
    """A call of one variant's operation, or of the library on that variant."""
    if not work.whole_model:
        operation: Kernel = operations[work.name]
        return lambda: work.call(operation)

    def call() -> None:
        with backend.using(variant):
            work.call()

    return call


def numpy_call(call: Callable[[], object]) -> Callable[[], object]:
    """The library's own code with the kernels off."""
    def without_kernels() -> None:
        with backend.using("numpy"):
            call()

    return without_kernels


def measured_of(state: Run, group: Group, work: Work, threads: int,
                times: dict[tuple[str, str], float], read: float) -> Measured:
    """One row from the medians of its group; `read` is the bandwidth measured among them."""
    numpy = times.get(("numpy", work.numpy or ""))
    dense = work.numpy == "dense"
    dequantized = times.get(("numpy", "dequantized")) if dense else None
    portable = times.get(("portable", work.kernel))
    if state.kernels.chosen is None:
        assert numpy is not None
        seconds, numpy = numpy, None
    else:
        seconds = times["chosen", work.kernel]

    def ratio(other: float | None) -> float | None:
        return None if other is None else other / seconds

    gb_per_s = None if work.read_bytes is None else work.read_bytes / seconds / 1e9
    peak = state.peaks[threads]
    best = peak.int8_operations if work.peak == "int8" else peak.float_operations
    fraction = None
    if work.operations is not None and best is not None:
        fraction = work.operations / seconds / 1e9 / best
    record = Record(
        work.kernel, state.kernels.info.variant, group.kv, group.context, threads, seconds * 1e3,
        gb_per_s, None if gb_per_s is None else gb_per_s / read, ratio(numpy), ratio(portable))
    return Measured(record, ratio(dequantized), one_thread(state.measured, record), fraction)


def one_thread(measured: list[Measured], record: Record) -> float | None:
    """How many times faster a record is than the same work on one thread, if that was measured."""
    for other in measured:
        same = other.record
        if same.threads == 1 < record.threads and (same.kernel, same.kv, same.context) == (
                record.kernel, record.kv, record.context):
            return same.ms / record.ms
    return None
