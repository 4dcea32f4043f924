"""Timing a whole engine: its ways take turns, a few tokens each, medians over all rounds."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from statistics import median

from course_lib.bench.engine_cases import Arm, Peer, Task, arms_of
from course_lib.bench.engine_profile import Profile, profiled
from course_lib.bench.engine_records import EngineRecord
from course_lib.bench.machine import Kernels, Reader
from course_lib.engine.model import Model

ROUNDS, QUICK_ROUNDS = 3, 1
"""Of prompts; each takes seconds. Where one has to be enough, none is profiled either."""

TOKEN_ROUNDS, TOKENS = 3, 3
"""Nine tokens to take the median of; before each three, one that does not count: the way before it
has left its threads awake and its rows in the caches."""

PROFILED_TOKENS = 5
READS = 8  # probes of the bandwidth in a round


@dataclass
class EngineRun:
    """What a run is, and what it has measured so far: kept when it is interrupted."""

    kernels: Kernels
    reader: Reader
    model: Model
    peer: Peer | None = None
    quick: bool = False
    records: list[EngineRecord] = field(default_factory=list)
    profiles: list[tuple[EngineRecord, Profile]] = field(default_factory=list)
    gb_per_s: dict[int, list[float]] = field(default_factory=dict)


def measure(run: EngineRun, task: Task, threads: int,
            finished: Callable[[], object] = lambda: None) -> None:
    """Time every arm of a task; nothing is kept of a task that is interrupted. `finished` is called
    after each round."""
    run.kernels.set_threads(threads)
    if run.peer is not None:
        for context in run.peer.contexts.values():
            context.set_threads(threads)
    arms = arms_of(task, run.model, run.peer)
    token = task.phase == "tg"
    times: list[list[float]] = [[] for _ in arms]
    reads: list[float] = []
    for _ in range(rounds_of(task, run.quick)):
        reads += timed(run.reader, 1, READS)
        for arm, found in zip(arms, times, strict=True):
            found += timed(arm.call, 1, TOKENS) if token else timed(arm.call, 0, 1)
        finished()
    profiled_calls = PROFILED_TOKENS if token else 0 if run.quick else 1
    profiles = [profile_of(arm, profiled_calls) for arm in arms]
    splits = profiles if not token else [profile_of(arm, profiled_calls, layer_by_layer=True)
                                         for arm in arms]
    gb_per_s = run.reader.nbytes / median(reads) / 1e9
    records = [record_of(task, arm, threads, median(found), gb_per_s, profile)
               for arm, found, profile in zip(arms, times, profiles, strict=True)]
    run.records += records
    run.gb_per_s.setdefault(threads, []).append(gb_per_s)
    run.profiles += [(record, split) for record, split in zip(records, splits, strict=True)
                     if split is not None]


def rounds_of(task: Task, quick: bool) -> int:
    """How often each arm has its turn."""
    return TOKEN_ROUNDS if task.phase == "tg" else QUICK_ROUNDS if quick else ROUNDS


def timed(call: Callable[[], object], before: int, count: int) -> list[float]:
    """Seconds of each of `count` calls, after `before` calls that do not count."""
    for _ in range(before):
        call()
    times = []
    for _ in range(count):
        start = time.perf_counter()
        call()
        times.append(time.perf_counter() - start)
    return times


def profile_of(arm: Arm, count: int, *, layer_by_layer: bool = False) -> Profile | None:
    """Where the time of `count` of the engine's own calls goes, which are not among the timed."""
    if arm.engine != "course" or not count:
        return None
    with profiled(layer_by_layer=layer_by_layer) as profile:
        for _ in range(count):
            arm.call()
    return profile


def record_of(task: Task, arm: Arm, threads: int, seconds: float, gb_per_s: float,
              profile: Profile | None) -> EngineRecord:
    """The row of one arm."""
    fraction = None if arm.read_bytes is None else arm.read_bytes / seconds / 1e9 / gb_per_s
    return EngineRecord(arm.engine, task.phase, task.n, task.depth, arm.kv, arm.sparse_k, threads,
                        task.n / seconds, fraction, None if profile is None else profile.outside)
