"""A whole run of `./course bench --engine`: the model, the peer, progress, table and files."""

from __future__ import annotations

import math
import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import TextIO
from unittest.mock import patch

from tqdm import tqdm

from course_lib import backend
from course_lib.bench import engine_table
from course_lib.bench.engine_cases import Q8_0_BYTES, Task
from course_lib.bench.engine_peer import llama_peer
from course_lib.bench.engine_records import COLUMNS
from course_lib.bench.engine_run import EngineRun, measure, rounds_of
from course_lib.bench.engine_weights import KIND, QWEN3_0_6B, RandomSource, token_bytes
from course_lib.bench.machine import Kernels, Reader, machine_text, on_fast_cores
from course_lib.bench.memory import available_bytes
from course_lib.bench.records import csv_text, json_text, write
from course_lib.engine.config import ModelConfig
from course_lib.engine.conversion import load_weights, weight_bytes
from course_lib.engine.model import Model
from course_lib.engine.prefill import run_prompt
from course_lib.errors import CourseError
from course_lib.kvcache import CACHE_DTYPES, kv_bytes_per_token

TASKS = (Task("pp", 512, 0), Task("pp", 2048, 0),
         Task("tg", 1, 0), Task("tg", 1, 2048), Task("tg", 1, 4096))
QUICK_TASKS = tuple(task for task in TASKS if task.n <= 512 and task.depth != 2048)
QUICK_SECONDS = 40
"""No task but the first is begun later than this with --quick; the longest takes some ten."""


def bench_engine(out: TextIO, *, quick: bool = False, peer: bool = False,
                 threads: Sequence[int] = (), csv_path: str | None = None,
                 json_path: str | None = None, config: ModelConfig = QWEN3_0_6B,
                 tasks: Sequence[Task] | None = None) -> int:
    """Measure, print the table to `out`, write the files; return the exit code, 130 if interrupted.

    What was measured is kept. peer: llama.cpp takes part. threads: counts to measure, all fast
    cores if empty. CourseError without compiled kernels, and where memory or disk are too small.
    """
    begun = time.monotonic()
    until = begun + QUICK_SECONDS if quick else math.inf
    kernels = Kernels()
    if kernels.chosen is None:
        raise CourseError("bench: --engine needs the compiled kernels, which are not there "
                          f"({kernels.info.reason}); leave COURSE_KERNEL and --variant out, or "
                          "install a C compiler.")
    counts = sorted(set(threads)) or [backend.threads()]
    todo = list(tasks if tasks is not None else QUICK_TASKS if quick else TASKS)
    tokens = max(task.n + task.depth for task in todo)
    check_memory(needed_bytes(config, tokens, peer), available_bytes())
    run: EngineRun | None = None
    late: list[Task] = []
    try:
        with on_fast_cores(max(counts)) as remark, ExitStack() as stack:
            print(f"{machine_text()}{remark and '; ' + remark}", file=out)
            print(about(kernels, config) + busy_text(max(counts)), file=out, flush=True)
            source = RandomSource(config)
            with progress("random weights", "B") as step:
                model = Model(config, load_weights(source, config, KIND, step))
            run = EngineRun(kernels, Reader(kernels), model, quick=quick)
            if peer:
                with progress("GGUF file for llama.cpp", "tensor") as step:
                    run.peer, alike = stack.enter_context(
                        llama_peer(source, model, tokens, max(counts), step))
                print(f"llama.cpp computes the same model: logits correlate {alike:.4f}", file=out,
                      flush=True)
            late = measure_all(run, todo, counts, until)
        finished = True
    except KeyboardInterrupt:
        finished = False
    finally:
        kernels.set_threads(backend.threads())
    return written(run, finished, out, csv_path, json_path, late)


def needed_bytes(config: ModelConfig, tokens: int, peer: bool) -> int:
    """Memory that a run takes: weights, KV caches of both kinds with room to grow, the widest rows
    of a prompt; with a peer, its weights and caches too."""
    def cache(bytes_per_token: float) -> float:
        return config.num_hidden_layers * tokens * bytes_per_token

    heads, d = config.num_key_value_heads, config.head_dim
    rows = sum(kv_bytes_per_token(heads, d, kv) for kv in CACHE_DTYPES)
    wide = 4 * tokens * (6 * config.hidden_size + 4 * config.intermediate_size)
    need = weight_bytes(config, KIND) + 1.25 * cache(rows) + wide + 256 * 2**20
    if peer:
        need += weight_bytes(config, KIND) + cache(2 * heads * d * (2 + Q8_0_BYTES)) + 384 * 2**20
    return int(need)


def check_memory(need: int, free: int | None) -> None:
    """CourseError where less is free: the system would end the process in the midst of the run."""
    if free is not None and need > free:
        raise CourseError(f"bench: --engine needs {need / 1e9:.1f} GB of memory here, "
                          f"{free / 1e9:.1f} GB are free; close other programs, leave --peer out, "
                          "or raise the limit (ulimit -v).")


def about(kernels: Kernels, config: ModelConfig) -> str:
    """What is measured, and with what."""
    return (f"kernels: {kernels.info.variant} ({kernels.info.reason}); random weights: "
            f"{config.num_hidden_layers} layers, hidden {config.hidden_size:,}, "
            f"{config.num_attention_heads}/{config.num_key_value_heads} heads, head_dim "
            f"{config.head_dim}, ffn {config.intermediate_size:,}, vocabulary "
            f"{config.vocab_size:,}, {KIND.upper()}: {token_bytes(config) / 1e6:.0f} MB read for "
            "each token\nKV rows of a depth are random too: what they say changes no time")


def busy_text(threads: int) -> str:
    """A warning where other programs leave fewer cores than threads: a kernel waits for the slowest
    of its threads."""
    load = os.getloadavg()[0]
    cores = len(backend.usable_cores())
    if load + threads <= cores + 0.5:
        return ""
    return (f"\nother programs are busy here (load average {load:.1f} on {cores} cores): all "
            "numbers are too low, those of one row more than those of the next")


@contextmanager
def progress(title: str, unit: str) -> Iterator[Callable[[int, int], None]]:
    """A bar on a terminal; yields what to call with (done, total)."""
    with tqdm(desc=title, unit=unit, unit_scale=unit == "B", leave=False, file=sys.stderr,
              disable=not sys.stderr.isatty()) as bar:
        def step(done: int, total: int) -> None:
            bar.total = total
            bar.update(done - bar.n)

        yield step


def measure_all(run: EngineRun, tasks: Sequence[Task], counts: Sequence[int],
                until: float) -> list[Task]:
    """Measure every task on every number of threads; return those not begun, for it was late."""
    run_prompt(run.model, [0] * 32, kv="q8")  # the first call of a kernel loads its code
    with progress("engine", "round") as step:
        steps = [(task, count) for task in tasks for count in counts]
        total = sum(rounds_of(task, run.quick) for task, _ in steps)
        done = 0

        def finished() -> None:
            nonlocal done
            done += 1
            step(done, total)

        for i, (task, count) in enumerate(steps):
            if i and time.monotonic() > until:
                return list(dict.fromkeys(task for task, _ in steps[i:]))
            # The engine's own choice of blocks asks how many threads there are.
            with patch.dict(os.environ, {"COURSE_THREADS": str(count)}):
                measure(run, task, count, finished)
    return []


def written(run: EngineRun | None, finished: bool, out: TextIO, csv_path: str | None,
            json_path: str | None, late: Sequence[Task]) -> int:
    """Print what was measured, write the files, and return the exit code."""
    records = [] if run is None else run.records
    if run is not None and records:
        for threads, found in run.gb_per_s.items():
            print(f"{threads} thread{'s' * (threads > 1)}: reads {max(found):.1f} GB/s", file=out)
        print(f"\n{engine_table.table(records)}\n\n{engine_table.LEGEND}", file=out)
        if run.peer is not None:
            print(engine_table.RATIO_LEGEND, file=out)
        if run.profiles:
            print(f"\n{engine_table.shares_text(run.profiles)}", file=out)
        for path, text in ((csv_path, csv_text(records, COLUMNS)),
                           (json_path, json_text(records))):
            if path is not None:
                write(path, text)
    if late:
        print(f"\n--quick left out {', '.join(task.title for task in late)}: this machine is slow "
              "or busy.", file=out)
    if finished:
        return 0
    kept = f"kept {len(records)} rows" if records else "nothing was measured, so no file is written"
    print(f"course: interrupted; {kept}", file=sys.stderr)
    return 130
