"""`./course needle`: the flagship experiment in the terminal."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

from tqdm import tqdm

from course_lib import backend
from course_lib.engine import Engine
from course_lib.engine.prefill import IMPORTANCE_RULES
from course_lib.errors import CourseError
from course_lib.kvcache import CACHE_DTYPES
from course_lib.lab.needle import (
    MAX_NEW_TOKENS,
    Arm,
    ArmResult,
    NeedleOptions,
    Trial,
    as_json,
    prompt_of,
    results_of,
    run_trials,
)
from course_lib.lab.prompts import TEMPLATES
from course_lib.paths import MODELS, relative

HELP = "Exact against block-sparse decode on needle prompts: recall, text, attention time."
DEFAULT_MODEL = MODELS / "needle-qwen3"


def positive(text: str) -> int:
    """An integer of at least 1."""
    try:
        value = int(text)
    except ValueError:
        value = 0
    if value < 1:
        raise argparse.ArgumentTypeError(f"must be an integer of at least 1, not {text!r}")
    return value


def fraction(text: str) -> float:
    """A number from 0 to 1."""
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0.0 <= value <= 1.0:
        raise argparse.ArgumentTypeError(f"must be a number from 0 to 1, not {text!r}")
    return value


def k_list(text: str) -> tuple[int, ...]:
    """Block counts separated by commas."""
    return tuple(positive(part.strip()) for part in text.split(","))


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--k", type=k_list, nargs="+", default=[(32, 1)], metavar="K",
        help="decode k of each sparse arm, in blocks of 32 tokens (default 32,1); exact runs first")
    add("--prompts", type=positive, default=1, metavar="N", help="number of prompts (default 1)")
    add("--tokens", type=positive, default=2061, metavar="N", help="tokens of every prompt (2061)")
    add("--position", type=fraction, default=0.5, metavar="P",
        help="where the needle stands: 0 first line, 1 last (default 0.5)")
    phase = parser.add_mutually_exclusive_group()
    phase.add_argument("--prefill-k", type=positive, metavar="K",
                       help="sparse prefill with K blocks for every arm but exact")
    phase.add_argument("--one-flag", action="store_true",
                       help="prefill k = decode k, as in the published run of article 10-2")
    add("--template", choices=TEMPLATES, default="chat",
        help="chat, or a bare completion, which a chat model may not answer (default chat)")
    add("--importance", choices=IMPORTANCE_RULES, default="all_queries")
    add("--kv", choices=CACHE_DTYPES, default="f32", help="rows of the KV cache (default f32)")
    add("--model", type=Path, default=DEFAULT_MODEL, metavar="DIR",
        help="a Qwen3 checkpoint folder (default: the shipped model)")
    add("--seed", type=int, default=0, help="another set of prompts (default 0)")
    add("--unseen", action="store_true", help="made-up names and values never seen in training")
    add("--max-new-tokens", type=positive, default=MAX_NEW_TOKENS, metavar="N",
        help=f"longest answer ({MAX_NEW_TOKENS}); the first token comes from prefill and does not "
             "count for recall")
    add("--json", action="store_true", help="print one JSON object, nothing else, on stdout")


def options_of(args: argparse.Namespace) -> NeedleOptions:
    ks = tuple(dict.fromkeys(k for group in args.k for k in group))
    return NeedleOptions(
        tokens=args.tokens, prompts=args.prompts, ks=ks, position=args.position,
        prefill_k=args.prefill_k, one_flag=args.one_flag, template=args.template,
        importance=args.importance, kv=args.kv, seed=args.seed, unseen=args.unseen,
        max_new_tokens=args.max_new_tokens,
    )


def run(args: argparse.Namespace) -> int:
    options = options_of(args)
    backend.info()  # a wrong COURSE_KERNEL is said before the work, not after it
    engine = Engine.load(args.model)
    limit = engine.config.max_position_embeddings
    if options.tokens + options.max_new_tokens > limit:
        raise CourseError(
            f"--tokens {options.tokens} and --max-new-tokens {options.max_new_tokens} do not fit "
            f"the model's context of {limit}; lower one of them."
        )
    finished = _run_with_bar(engine, options)
    if not finished:
        return 130
    results = results_of(options, finished)
    if args.json:
        print(json.dumps(as_json(relative(args.model), options, results), ensure_ascii=False))
    else:
        _print_report(engine, options, results, relative(args.model))
    return 0 if len(finished) == options.prompts else 130


def _run_with_bar(engine: Engine, options: NeedleOptions) -> list[list[Trial]]:
    """The trials of every finished prompt: of fewer prompts than asked for after Ctrl-C."""
    finished: list[list[Trial]] = []
    bar = tqdm(total=options.prompts * len(options.arms()), unit="run", file=sys.stderr,
               disable=not sys.stderr.isatty())

    def on_trial(index: int, arm: Arm, trial: Trial) -> None:
        bar.update()
        bar.set_postfix_str(f"prompt {index} k={arm.k} {'hit' if trial.recalled else 'miss'}")

    try:
        with bar:
            for trials in run_trials(engine, options, on_trial):
                finished.append(trials)
    except KeyboardInterrupt:
        print(f"course: interrupted; kept {len(finished)} of {options.prompts} prompts",
              file=sys.stderr)
    return finished


def _print_report(
    engine: Engine, options: NeedleOptions, results: list[ArmResult], model: str
) -> None:
    prompt = prompt_of(engine, options, 0)
    count = len(results[0].texts)
    print(f"{model}: {count} prompt{'s' * (count > 1)} of {options.tokens} tokens, "
          f"kv {options.kv}, importance {options.importance}, template {options.template}")
    print(f"first needle: {prompt.fact.sentence!r}  question: {prompt.question!r}\n")
    print(f"{'k':>6} {'prefill k':>9} {'recall':>7} {'= exact':>8} {'attn ms/token':>14} "
          f"{'blocks read':>12}   text of the first prompt")
    for arm in results:
        prefill_k = "exact" if arm.prefill_k is None else arm.prefill_k
        text = arm.texts[0].replace("\n", "⏎")
        print(f"{arm.k:>6} {prefill_k:>9} {arm.recall:>7.3f} {arm.identical_to_exact:>8.3f} "
              f"{arm.attn_ms_per_token:>14.2f} {arm.blocks_read_per_token:>12.1f}   {text}")
