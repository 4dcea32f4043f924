"""`./course perplexity`: what packed weights, q8 KV rows and sparse decode cost in perplexity."""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import asdict
from pathlib import Path

from tqdm import tqdm

from course_lib import backend
from course_lib.commands.loading import load_with_bar
from course_lib.commands.values import choices_of, k_value, positive
from course_lib.engine import Engine
from course_lib.engine.checkpoint import open_checkpoint
from course_lib.engine.checks import check_context
from course_lib.errors import CourseError
from course_lib.lab.experiments import perplexity_row
from course_lib.lab.held_out import Cost, Window, text_windows
from course_lib.lab.perplexity import (
    KVS,
    WEIGHTS,
    Arm,
    ArmPerplexity,
    PerplexityOptions,
    measure,
    results_of,
    windows_of,
)
from course_lib.paths import MODELS, relative

HELP = "perplexity of held-out text under packed weights, q8 KV rows and sparse decode"
DEFAULT_MODEL = MODELS / "needle-qwen3"
LONGEST = 16 << 20  # bytes of --text: more than any run here predicts
REMEDY = "give a UTF-8 text file"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--model", default=DEFAULT_MODEL, metavar="DIR",
        help="a checkpoint folder, a .gguf file, or smollm2 where it is installed (default: the "
             "shipped model)")
    add("--text", type=Path, metavar="FILE",
        help="a text, cut into windows (default: conversations in the course's own world)")
    add("--weights", type=choices_of(*WEIGHTS), default=WEIGHTS, metavar="KIND,…",
        help="weights in memory (default f32,q8_0,q4_0)")
    add("--kv", type=choices_of(*KVS), default=KVS, metavar="KIND,…",
        help="rows of the KV cache (default f32,q8)")
    add("--decode-k", type=decode_ks, default=(None,), metavar="K,…",
        help="blocks that decode reads: numbers, auto or exact (default exact)")
    add("--window", type=window, default=512, metavar="N",
        help="tokens of a window: the first half is context, the second is predicted (default 512)")
    add("--windows", type=positive, default=4, metavar="N", help="number of windows (default 4)")
    add("--seed", type=int, default=0, help="other conversations (default 0)")
    add("--json", action="store_true", help="print one JSON object, nothing else, on stdout")


def decode_ks(text: str) -> tuple[int | str | None, ...]:
    """Block counts, "auto" and "exact", separated by commas."""
    parts = dict.fromkeys(part.strip() for part in text.split(","))
    return tuple(None if part == "exact" else k_value(part) for part in parts)


def window(text: str) -> int:
    """An integer of at least 2: one token of context, one to predict."""
    value = positive(text)
    if value < 2:
        raise argparse.ArgumentTypeError(f"must be an integer of at least 2, not {text!r}")
    return value


def run(args: argparse.Namespace) -> int:
    options = PerplexityOptions(
        weights=args.weights, kvs=args.kv, ks=args.decode_k, window=args.window,
        windows=args.windows, seed=args.seed,
    )
    backend.info()  # a wrong COURSE_KERNEL is said before the work, not after it
    opened = open_checkpoint(args.model)
    check_context(options.window, opened.config.max_position_embeddings)
    if args.text is None:
        windows = windows_of(opened.tokenizer, options)
    else:
        windows = text_windows(
            opened.tokenizer, read(args.text), options.window, options.windows)
    del opened
    results, code = _measure_with_bar(args.model, options, windows)
    if not results:
        return code
    text = "the course's world" if args.text is None else args.text.name
    if args.json:
        print(json.dumps({
            "model": relative(args.model), "text": text, "backend": backend.info().name,
            "window": options.window, "seed": options.seed,
            "arms": [perplexity_row(result) for result in results],
        }, ensure_ascii=False))
    else:
        _print_report(relative(args.model), text, options, results)
    return code


def read(path: Path) -> str:
    """The text of a file; CourseError if it is none."""
    try:
        with path.open("rb") as file:  # a pipe is fine, and a device may never end
            data = file.read(LONGEST + 1)
        if len(data) > LONGEST:
            raise CourseError(f"{path} is longer than {LONGEST >> 20} MB: give a part of it")
        return data.decode("utf-8-sig")
    except OSError as error:
        raise CourseError(f"{path} cannot be read ({error.strerror}): {REMEDY}") from None
    except UnicodeDecodeError as error:
        raise CourseError(f"{path} is not UTF-8 at byte {error.start}: {REMEDY}") from None


def _measure_with_bar(
    model: str | Path, options: PerplexityOptions, windows: list[Window]
) -> tuple[list[ArmPerplexity], int]:
    """The results of finished windows, and the exit code: 130 after Ctrl-C, 1 if some weights
    could not be loaded after others were measured."""
    found: dict[Arm, list[Cost]] = {arm: [] for arm in options.arms()}
    bar = tqdm(total=len(found) * sum(len(w.ids) - w.cut for w in windows), unit="token",
               file=sys.stderr, disable=not sys.stderr.isatty())

    def engine_of(weights: str) -> Engine:
        return load_with_bar(model, weights)

    def on_cost(arm: Arm, cost: Cost) -> None:
        found[arm].append(cost)
        bar.set_postfix_str(f"{arm.weights} weights, {arm.kv} KV")
        bar.update(cost.tokens)

    try:
        with bar:
            measure(engine_of, options, windows, on_cost)
        return results_of(found), 0
    except KeyboardInterrupt:
        problem, code = "interrupted", 130
    except CourseError as error:
        if not any(found.values()):
            raise
        problem, code = str(error), 1
    done = sum(map(len, found.values()))
    print(f"course: {problem}; kept {done} of {len(found) * len(windows)} windows", file=sys.stderr)
    return results_of(found), code


def _print_report(
    model: str, text: str, options: PerplexityOptions, results: list[ArmPerplexity]
) -> None:
    print(f"{model} on {text}: windows of {options.window} tokens, the second half predicted by "
          "decode steps\n")
    answers = results[0].answer_perplexity is not None
    print(f"{'weights':>8} {'kv':>4} {'k':>6} {'windows':>8} {'tokens':>7} {'perplexity':>11} "
          f"{'ratio':>8}" + (f" {'of answers':>11} {'ratio':>8}" if answers else ""))
    for result in results:
        row = asdict(result.arm)
        k = "exact" if row["k"] is None else row["k"]
        line = (f"{row['weights']:>8} {row['kv']:>4} {k:>6} {result.windows:>8} "
                f"{result.cost.tokens:>7} {result.perplexity:>11.4f} {result.ratio:>8.5f}")
        if answers:
            line += f" {result.answer_perplexity:>11.6f} {result.answer_ratio:>8.5f}"
        print(line)
