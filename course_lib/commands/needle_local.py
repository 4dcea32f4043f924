"""`./course needle` on an engine in this process."""

from __future__ import annotations

import argparse
import json
import sys
from contextlib import closing
from dataclasses import replace

from tqdm import tqdm

from course_lib import backend
from course_lib.commands.loading import load_with_bar
from course_lib.commands.phase_bar import PhaseBar
from course_lib.commands.shown import shown
from course_lib.engine import Engine
from course_lib.errors import CourseError
from course_lib.lab.needle import Arm, NeedleOptions, Trial, prompt_of, run_trials
from course_lib.lab.needle_results import ArmResult, as_json, results_of
from course_lib.lab.prompts import default_template
from course_lib.paths import MODELS, relative

DEFAULT_MODEL = MODELS / "needle-qwen3"


def run_local(args: argparse.Namespace, options: NeedleOptions) -> int:
    """Load, run, print; 130 if Ctrl-C left prompts or arms out."""
    backend.info()  # a wrong COURSE_KERNEL is said before the work, not after it
    model = DEFAULT_MODEL if args.model is None else args.model
    weights = args.weights or "f32"
    engine = load_with_bar(model, weights)
    if args.template is None:
        options = replace(options, template=default_template(engine))
    limit = engine.config.max_position_embeddings
    if options.tokens + options.max_new_tokens > limit:
        raise CourseError(
            f"--tokens {options.tokens} and --max-new-tokens {options.max_new_tokens} do not fit "
            f"the model's context of {limit}; lower one of them."
        )
    finished, whole = _run_with_bar(engine, options)
    if not finished:
        return 130
    results = results_of(options, finished)
    if args.json:
        record = as_json(relative(model), options, results, weights)
        print(json.dumps(record, ensure_ascii=False))
    else:
        _print_report(engine, options, results, f"{relative(model)}, weights {weights}")
    return 0 if whole else 130


def _run_with_bar(engine: Engine, options: NeedleOptions) -> tuple[list[list[Trial]], bool]:
    """The trials, and whether they are all.

    After Ctrl-C they are those of every finished prompt; if there is none, of the finished arms of
    the first one.
    """
    finished: list[list[Trial]] = []
    in_order: list[Trial] = []  # while no prompt is finished, those of the first one
    arms = options.arms()
    bar = tqdm(total=options.prompts * len(arms), unit="run", file=sys.stderr,
               disable=not sys.stderr.isatty())

    def on_trial(index: int, arm: Arm, trial: Trial) -> None:
        in_order.append(trial)
        bar.set_postfix_str(f"prompt {index} k={arm.k} {'hit' if trial.recalled else 'miss'}")
        bar.update()

    try:
        with bar, closing(PhaseBar(options.tokens)) as phase:
            for trials in run_trials(engine, options, on_trial, phase if not bar.disable else None):
                finished.append(trials)
    except KeyboardInterrupt:
        kept = f"{len(finished)} of {options.prompts} prompts"
        if not finished and in_order:
            finished, kept = [in_order], f"{len(in_order)} of {len(arms)} arms of one prompt"
        print(f"course: interrupted; kept {kept}", file=sys.stderr)
        return finished, False
    return finished, True


def _print_report(
    engine: Engine, options: NeedleOptions, results: list[ArmResult], model: str
) -> None:
    prompt = prompt_of(engine, options, 0)
    count = len(results[0].texts)
    print(f"{model}: {count} prompt{'s' * (count > 1)} of {options.tokens} tokens, "
          f"kv {options.kv}, importance {options.importance}, template {options.template}")
    print(f"first needle: {prompt.fact.sentence!r}  question: {prompt.question!r}\n")
    prefill = "prefill k" if options.policy is None else "prefill"
    print(f"{'k':>6} {prefill:>9} {'recall':>7} {'= exact':>8} {'attn ms/token':>14} "
          f"{'blocks read':>12}   text of the first prompt")
    for arm in results:
        ran = arm.policy or ("exact" if arm.prefill_k is None else arm.prefill_k)
        print(f"{arm.k:>6} {ran:>9} {arm.recall:>7.3f} {arm.identical_to_exact:>8.3f} "
              f"{arm.attn_ms_per_token:>14.2f} {arm.blocks_read_per_token:>12.1f}   "
              f"{shown(arm.texts[0])}")
    sparse = next((arm for arm in results if arm.policy is not None), None)
    if (chunked := options.policy) is not None and sparse is not None:
        where = "offloaded to a file" if chunked.offload else "in memory"
        print(f"\n{chunked.name}: chunks of {chunked.chunk}, rows {where}; attention computed "
              f"{sparse.applied_density:.3f} of full attention's cells, "
              f"{sparse.bytes_density:.3f} of its bytes were read")
