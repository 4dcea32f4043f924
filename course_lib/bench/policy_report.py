"""`./course bench --prefill`: policies on the shipped model's own queries and keys."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from statistics import median
from typing import TextIO

from tqdm import tqdm

from course_lib import backend
from course_lib.bench import prefill_speed_report, records
from course_lib.bench.machine import Kernels
from course_lib.bench.policy_cases import (
    BLOCK,
    CHUNK,
    COLUMNS,
    CURES,
    LOW_THRESHOLD,
    POLICIES,
    STORES,
    THRESHOLD,
    PolicyRecord,
    one_pass,
    recall,
    run_way,
)
from course_lib.bench.prefill_speed import SpeedRecord
from course_lib.engine import Engine
from course_lib.lab.captured import Layer, captured
from course_lib.paths import MODELS

TOKENS, QUICK_TOKENS = (2048, 4032), (1024,)
ROUNDS, QUICK_ROUNDS = 3, 1


@dataclass
class PolicyRun:
    """What has been measured: kept when a run is interrupted."""

    policies: list[PolicyRecord] = field(default_factory=list)
    cures: list[PolicyRecord] = field(default_factory=list)
    one_pass_ms: dict[tuple[int, int], float] = field(default_factory=dict)
    slow: dict[tuple[int, int], float] = field(default_factory=dict)
    speed: list[SpeedRecord] = field(default_factory=list)


def bench_policies(out: TextIO, *, quick: bool, threads: list[int], csv_path: str | None,
                   json_path: str | None) -> int:
    """Measure, print, write; 130 if Ctrl-C left something out."""
    kernels, run = Kernels(), PolicyRun()
    counts = kernels.thread_counts(threads or [backend.threads()])
    lengths = QUICK_TOKENS if quick else TOKENS
    engine, code = Engine.load(MODELS / "needle-qwen3"), 0
    rounds = QUICK_ROUNDS if quick else ROUNDS
    steps = rounds * (1 + len(POLICIES) * len(STORES) + len(CURES))
    measured = list(prefill_speed_report.prompts(engine, quick=quick))
    turns = QUICK_ROUNDS if quick else prefill_speed_report.ROUNDS
    try:
        with tqdm(total=len(counts) * (len(lengths) * steps + len(measured) * turns), unit="run",
                  file=sys.stderr, disable=not sys.stderr.isatty()) as bar:
            for tokens in lengths:
                layers = captured(engine, tokens)
                for count in counts:
                    kernels.set_threads(count)
                    measure(run, layers, count, rounds, bar.update)
            for prompt in measured:
                for count in counts:
                    kernels.set_threads(count)
                    run.speed += prefill_speed_report.measure(prompt, count, turns, bar.update)
    except KeyboardInterrupt:
        print("course: interrupted; kept what was finished", file=sys.stderr)
        code = 130
    finally:
        kernels.set_threads(backend.threads())
    if not run.policies:
        return code
    report(out, run)
    prefill_speed_report.report(out, run.speed)
    rows = run.policies + run.cures
    if csv_path:
        records.write(csv_path, records.csv_text(rows, COLUMNS))
    if json_path:
        records.write(json_path, records.json_text([*rows, *run.speed]))
    return code


def measure(run: PolicyRun, layers: Sequence[Layer], threads: int, rounds: int, done) -> None:
    """Every policy on every store, then the cures, in turns; medians. Slow storage is one that
    reads full attention's blocks in the time that computing takes."""
    key = layers[0].q.shape[1], threads
    heads = len(layers[0].k)
    for _ in range(2):  # the first one is slower
        first, _ = run_way(layers, "full", POLICIES["full"], "memory", threads, 1.0)
    chunks = key[0] // CHUNK
    read = sum(8 * layer.k[:, :CHUNK].size for layer in layers) * chunks * (chunks - 1) // 2
    speed = read / (first.ms / 1e3)
    ways = [(name, kind) for kind in STORES for name in POLICIES]
    found: dict[tuple[str, str], list[PolicyRecord]] = {way: [] for way in ways}
    cures: dict[str, list[PolicyRecord]] = {name: [] for name in CURES}
    whole = []
    for _ in range(rounds):
        whole.append(one_pass(layers))
        done()
        for name, kind in ways:
            record, _ = run_way(layers, name, POLICIES[name], kind, threads, speed)
            found[name, kind].append(record)
            done()
        plain = None
        for name, make in CURES.items():
            record, choices = run_way(layers, name, make, "memory", threads, speed)
            plain = plain or choices
            cures[name].append(replace(record, recall=recall(plain, choices, heads)))
            done()
    run.policies += [middle(some) for some in found.values()]
    run.cures += [middle(some) for some in cures.values()]
    run.one_pass_ms[key], run.slow[key] = 1e3 * median(whole), speed


def middle(some: list[PolicyRecord]) -> PolicyRecord:
    """The medians of the times of some runs of the same way."""
    times = {name: median(getattr(record, name) for record in some)
             for name in ("ms", "estimate_ms", "load_ms", "wait_ms")}
    return replace(some[0], **times)


def report(out: TextIO, run: PolicyRun) -> None:
    print(f"attention of the shipped model's prompt, all layers, chunks of {CHUNK}, blocks of "
          f"{BLOCK}, threshold {THRESHOLD}", file=out)
    for tokens, threads in run.one_pass_ms:
        rows = [r for r in run.policies if (r.tokens, r.threads) == (tokens, threads)]
        print(f"\n{tokens} tokens, {threads} thread{'s' * (threads > 1)}; exact in one pass "
              f"{run.one_pass_ms[tokens, threads]:.0f} ms; slow file "
              f"{run.slow[tokens, threads] / 1e6:.0f} MB/s\n\n"
              f"{'store':>10} {'policy':>15} {'ms':>7} {'/ full':>7} {'estimate':>9} {'load':>7} "
              f"{'wait':>7} {'mask':>6} {'applied':>8} {'bytes':>6}", file=out)
        for row in rows:
            full = next(r for r in rows if (r.policy, r.store) == ("full", row.store))
            print(f"{row.store:>10} {row.policy:>15} {row.ms:>7.0f} {row.ms / full.ms:>7.2f} "
                  f"{row.estimate_ms:>9.0f} {row.load_ms:>7.0f} {row.wait_ms:>7.0f} "
                  f"{row.mask:>6.2f} {row.applied:>8.2f} {row.bytes:>6.2f}", file=out)
        slow = {r.policy: r for r in rows if r.store == "slow file"}
        for row in slow.values():
            if row.policy != "full":
                line = 1 - row.estimate_share
                wins = f"below {line:.2f} wins" if line > 0 else "nothing wins"
                print(f"break-even where reading decides, {row.policy}: {row.estimate_share:.2f} "
                      f"of full's bytes choose, so {wins}; {row.load_share:.2f} measured, "
                      f"{row.ms / slow['full'].ms:.2f} of full's time", file=out)
        print(f"\ncheaper estimates, in memory, threshold {LOW_THRESHOLD}\n"
              f"{'estimate':>18} {'ms':>7} {'estimate':>9} "
              f"{'to choose':>10} {'applied':>8} {'recall':>7}", file=out)
        for row in run.cures:
            if (row.tokens, row.threads) == (tokens, threads) and row.recall is not None:
                print(f"{row.policy:>18} {row.ms:>7.0f} {row.estimate_ms:>9.0f} "
                      f"{row.estimate_share:>10.2f} {row.applied:>8.2f} {row.recall:>7.3f}",
                      file=out)
    print("\nestimate, load, wait in ms; load runs beside computing. mask, applied, bytes: cells "
          "that the policy's\nmask keeps, cells computed, bytes read, of full attention's. to "
          "choose: bytes read for the estimate.\nrecall: of the blocks that the first line "
          "chooses, those that this line chooses too.", file=out)
