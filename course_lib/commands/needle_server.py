"""`./course needle --url`: the same prompts, asked of a server."""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import asdict, replace
from itertools import count

from tqdm import tqdm

from course_lib.commands.needle_local import DEFAULT_MODEL
from course_lib.commands.shown import shown
from course_lib.engine.checkpoint import open_checkpoint
from course_lib.engine.client import TIMEOUT, Client
from course_lib.engine.tokenizer import Tokenizer
from course_lib.errors import CourseError
from course_lib.lab.needle import NeedleOptions, prompt_of
from course_lib.lab.prompts import default_template
from course_lib.lab.server_needle import (
    ServerResult,
    ServerTrial,
    run_server_trials,
    server_result,
)
from course_lib.paths import relative


def run_server(args: argparse.Namespace, options: NeedleOptions) -> int:
    """Ask, print; what was finished is kept after Ctrl-C (130) and after a failure (1)."""
    model = DEFAULT_MODEL if args.model is None else args.model
    with Client(args.url, args.served_model, timeout=args.timeout or TIMEOUT) as client:
        tokenizer = open_checkpoint(model).tokenizer
        if args.template is None:
            # Without --model the tokenizer is only a ruler: the server's model is another.
            template = default_template(tokenizer) if args.model else "instruct"
            options = replace(options, template=template)
        trials, code = _run_with_bar(client, tokenizer, options)
        if not trials:
            return code
        result, served = server_result(trials), client.model
    if args.json:
        print(json.dumps({
            "url": client.base, "served_model": served, "tokenizer": relative(model),
            "tokens": options.tokens, "prompts": len(trials), "seed": options.seed,
            "template": options.template, "position": options.position, "unseen": options.unseen,
            "max_new_tokens": options.max_new_tokens, "arms": [asdict(result)],
        }, ensure_ascii=False))
    else:
        _print_report(client.base, served, tokenizer, relative(model), options, result)
    return code


def _run_with_bar(
    client: Client, tokenizer: Tokenizer, options: NeedleOptions
) -> tuple[list[ServerTrial], int]:
    """The finished prompts and the exit code; CourseError if the first prompt fails."""
    trials: list[ServerTrial] = []
    bar = tqdm(total=options.prompts, unit="prompt", file=sys.stderr,
               disable=not sys.stderr.isatty())
    pieces = count(1)

    def on_piece(index: int, text: str) -> None:
        bar.set_postfix_str(f"{next(pieces)} pieces of text")

    try:
        with bar:
            for trial in run_server_trials(client, tokenizer, options, on_piece):
                trials.append(trial)
                bar.update()
    except KeyboardInterrupt:
        print(f"course: interrupted; kept {len(trials)} of {options.prompts} prompts",
              file=sys.stderr)
        return trials, 130
    except CourseError as error:
        if not trials:
            raise
        print(f"course: {error} (kept {len(trials)} of {options.prompts} prompts)",
              file=sys.stderr)
        return trials, 1
    return trials, 0


def _print_report(
    url: str, served: str | None, tokenizer: Tokenizer, ruler: str, options: NeedleOptions,
    result: ServerResult,
) -> None:
    prompt, number = prompt_of(tokenizer, options, 0), len(result.texts)
    theirs = result.prompt_tokens[0]
    print(f"{shown(served or 'a model')} at {url}: {number} prompt{'s' * (number > 1)}, template "
          f"{options.template}")
    print(f"tokens of a prompt: {options.tokens} by the tokenizer of {ruler}, "
          f"{'unknown' if theirs is None else theirs} by the server's own count")
    print(f"first needle: {prompt.fact.sentence!r}  question: {prompt.question!r}\n")
    print(f"{'k':>6} {'recall':>7} {'first token s':>14} {'tokens/s':>9}   "
          "text of the first prompt")
    first, rate = (
        "-" if value is None else f"{value:.2f}"
        for value in (result.first_token_s, result.tokens_per_s)
    )
    print(f"{result.k:>6} {result.recall:>7.3f} {first:>14} {rate:>9}   {shown(result.texts[0])}")
