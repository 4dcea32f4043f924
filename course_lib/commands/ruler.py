"""`./course ruler`: needle, multi-key and variable tasks under prefill policies."""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import asdict

from tqdm import tqdm

from course_lib import backend
from course_lib.commands.loading import load_with_bar
from course_lib.commands.policy_values import policies, require_policy, threshold
from course_lib.commands.shown import shown
from course_lib.commands.values import choices_of, positive
from course_lib.engine import Engine
from course_lib.errors import CourseError
from course_lib.lab.policy_options import PolicyOptions
from course_lib.lab.prompts import default_template
from course_lib.lab.ruler import RULE, Cell, RulerOptions, run_ruler
from course_lib.lab.ruler_tasks import TASKS
from course_lib.paths import MODELS, relative
from course_lib.prefill import AGGREGATORS

HELP = "RULER's needle, multi-key and variable tasks under prefill policies: score, density, time"
DEFAULT_MODEL = MODELS / "needle-qwen3"
DEFAULT = RulerOptions()


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--tasks", type=choices_of(*TASKS), default=TASKS, metavar="TASK,…",
        help=f"some of {', '.join(TASKS)} (default all)")
    add("--lengths", type=lengths, default=DEFAULT.lengths, metavar="N,…",
        help="tokens of a prompt (default 512,1024,2048)")
    add("--policy", type=policies, default=DEFAULT.policies, metavar="NAME,…",
        help="prefill policies: full, quest, xattn (default all)")
    add("--samples", type=positive, default=DEFAULT.samples, metavar="N",
        help=f"prompts of each task and length (default {DEFAULT.samples})")
    add("--sparse-threshold", type=threshold, default=DEFAULT.threshold, metavar="T",
        help=f"mass that xattn keeps, above 0 to 1 (default {DEFAULT.threshold})")
    add("--aggregate", choices=tuple(AGGREGATORS), default=DEFAULT.aggregate,
        help=f"how xattn makes one list of many heads' (default {DEFAULT.aggregate})")
    add("--chunk", type=positive, default=DEFAULT.chunk, metavar="N",
        help=f"tokens of a prefill chunk, which is always read whole (default {DEFAULT.chunk})")
    add("--block-size", type=positive, default=DEFAULT.block_size, metavar="N",
        help=f"tokens of a block of history (default {DEFAULT.block_size})")
    add("--model", default=DEFAULT_MODEL, metavar="DIR",
        help="a checkpoint folder or .gguf file (default: the shipped model, which has not learned "
             "chains of variables)")
    add("--weights", choices=("f32", "q8_0", "q4_0"), default="f32",
        help="weights in memory (default f32)")
    add("--max-new-tokens", type=positive, default=DEFAULT.max_new_tokens, metavar="N",
        help=f"longest answer ({DEFAULT.max_new_tokens})")
    add("--seed", type=int, default=0, help="other prompts (default 0)")
    add("--json", action="store_true", help="print one JSON object, nothing else, on stdout")


def lengths(text: str) -> tuple[int, ...]:
    """Token counts separated by commas."""
    return tuple(dict.fromkeys(positive(part.strip()) for part in text.split(",")))


def run(args: argparse.Namespace) -> int:
    """Load, run, print; 130 if Ctrl-C left cells out."""
    for name in args.policy:
        require_policy(PolicyOptions(name, args.sparse_threshold, args.aggregate, args.chunk,
                                     args.block_size))
    backend.info()  # a wrong COURSE_KERNEL is said before the work, not after it
    engine = load_with_bar(args.model, args.weights)
    options = RulerOptions(
        tasks=args.tasks, lengths=args.lengths, policies=args.policy, samples=args.samples,
        seed=args.seed, threshold=args.sparse_threshold, aggregate=args.aggregate,
        chunk=args.chunk, block_size=args.block_size, template=default_template(engine),
        max_new_tokens=args.max_new_tokens,
    )
    limit = engine.config.max_position_embeddings
    if max(options.lengths) + options.max_new_tokens > limit:
        raise CourseError(
            f"--lengths {max(options.lengths)} and --max-new-tokens {options.max_new_tokens} do "
            f"not fit the model's context of {limit}; lower one of them."
        )
    finished, whole = _run_with_bar(engine, options)
    if finished and args.json:
        print(json.dumps({
            "model": relative(args.model), "weights": args.weights, "backend": backend.info().name,
            **asdict(options), "rule": RULE, "cells": [cell.as_row() for cell in finished],
        }, ensure_ascii=False))
    elif finished:
        _print_report(f"{relative(args.model)}, weights {args.weights}", options, finished)
    return 0 if whole else 130


def _run_with_bar(engine: Engine, options: RulerOptions) -> tuple[list[Cell], bool]:
    """The finished cells, and whether they are all."""
    finished: list[Cell] = []
    cells = len(options.cells())
    bar = tqdm(total=cells * options.samples, unit="run", file=sys.stderr,
               disable=not sys.stderr.isatty())

    def on_sample(cell: Cell) -> None:
        bar.set_postfix_str(f"{cell.task} {cell.length} {cell.policy}")
        bar.update()

    try:
        with bar:
            for cell in run_ruler(engine, options, on_sample):
                finished.append(cell)
    except KeyboardInterrupt:
        print(f"course: interrupted; kept {len(finished)} of {cells} rows", file=sys.stderr)
        return finished, False
    return finished, True


def _print_report(model: str, options: RulerOptions, cells: list[Cell]) -> None:
    print(f"{model}: {options.samples} prompt{'s' * (options.samples > 1)} of each task and "
          f"length, chunks of {options.chunk}, blocks of {options.block_size}, xattn keeps "
          f"{options.threshold:g} by {options.aggregate}, decode exact")
    print(f"score: {RULE}\n")
    print(f"{'task':18} {'tokens':>6} {'policy':>7} {'all':>6} {'any':>6} {'applied':>8} "
          f"{'bytes':>7} {'prefill ms':>11}   first answer")
    for cell in cells:
        row = cell.as_row()
        print(f"{cell.task:18} {cell.length:>6} {cell.policy:>7} {row['all']:>6.3f} "
              f"{row['any']:>6.3f} {row['applied_density']:>8.3f} {row['bytes_density']:>7.3f} "
              f"{1e3 * row['prefill_s']:>11.1f}   {shown(row['texts'][0])}")
    print("\napplied, bytes: attention computed and rows read, of what full attention computes "
          "and reads")
