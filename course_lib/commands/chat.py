"""`./course chat`: a conversation with a model in the terminal."""

from __future__ import annotations

import argparse
import sys

from course_lib import backend
from course_lib.commands.chat_terminal import answer_lines, answer_one, converse
from course_lib.commands.loading import load_with_bar
from course_lib.commands.values import k_value, positive
from course_lib.engine import Conversation, Engine, Sampler
from course_lib.engine.weights import WEIGHT_KINDS
from course_lib.errors import CourseError
from course_lib.kvcache import CACHE_DTYPES
from course_lib.paths import MODELS

HELP = "talk to a model: one answer to PROMPT, or a conversation; text comes as it is made"
SHIPPED = (
    "the shipped model finds facts again that stand in its prompt, it is no chat model: give a "
    "chat model with --model DIR"
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("prompt", nargs="?", metavar="PROMPT",
        help="the question; without it a conversation: /reset starts anew, /exit or the end of the "
             "input leaves, Ctrl-C ends an answer, which stays in the conversation, twice leaves "
             "(130); if the input is no terminal, each of its lines is a question")
    add("--model", metavar="DIR",
        help="a checkpoint folder, a .gguf file, or smollm2 where it is installed (default: the "
             "shipped model, no chat model)")
    add("--weights", choices=WEIGHT_KINDS, default="f32", help="weights in memory (default f32)")
    add("--kv", choices=CACHE_DTYPES, default="f32", help="rows of the KV cache (default f32)")
    add("--k", type=k_value, metavar="K",
        help="sparse decode with K blocks of 32 tokens, or auto (default: all rows); the whole "
             "conversation is then run again for each answer, for its importance")
    add("--temperature", type=float, default=0.0, metavar="T",
        help="0 takes the best token (default); above, tokens are drawn")
    add("--top-k", type=int, metavar="N", help="draw from the N best tokens (default: all)")
    add("--top-p", type=float, metavar="P",
        help="draw from the fewest tokens whose probabilities reach P (default 1: all)")
    add("--min-p", type=float, metavar="P",
        help="draw no token less probable than P times the best (default 0)")
    add("--seed", type=int, metavar="N", help="of the draws (default 0)")
    add("--max-new-tokens", type=positive, default=512, metavar="N",
        help="longest answer (default 512)")
    add("--system", metavar="TEXT", help="a system message before the conversation")
    add("--think", action="store_true", help="let a model think that has this switch (Qwen3)")
    add("--trace", action="store_true",
        help="a line on stderr for every token: margin, times, the blocks that most heads read; "
             "the text follows at its end")


def run(args: argparse.Namespace) -> int:
    sampler = sampler_of(args)
    for name in ("prompt", "system"):
        if getattr(args, name) is not None:
            check_text(getattr(args, name), "PROMPT" if name == "prompt" else "--system")
    backend.info()  # a wrong COURSE_KERNEL is said before the work, not after it
    if args.model is None:
        print(f"course: {SHIPPED}", file=sys.stderr)
    engine = load_with_bar(
        MODELS / "needle-qwen3" if args.model is None else args.model, args.weights)
    check_template(engine, args.think)
    talk = Conversation(
        engine, args.system, max_new_tokens=args.max_new_tokens, decode_k=args.k, kv=args.kv,
        sampler=sampler, enable_thinking=args.think, trace=args.trace,
    )
    if args.prompt is not None:
        return answer_one(talk, args.prompt, args.trace)
    if sys.stdin is not None and sys.stdin.isatty():
        return converse(talk, args.trace)
    return answer_lines(talk, args.trace)


def sampler_of(args: argparse.Namespace) -> Sampler:
    """The sampler that the options ask for; CourseError names the option that is wrong."""
    given = {name: getattr(args, name) for name in ("top_k", "top_p", "min_p", "seed")
             if getattr(args, name) is not None}
    try:
        sampler = Sampler(args.temperature, **given)
    except ValueError as error:
        name, _, problem = str(error).partition(" ")
        raise CourseError(f"chat: argument --{name.replace('_', '-')}: {problem}") from None
    if given and not args.temperature:
        name = next(iter(given)).replace("_", "-")
        raise CourseError(
            f"chat: --{name} needs --temperature above 0; without it the best token is taken"
        )
    return sampler


def check_text(text: str, name: str) -> None:
    """CourseError unless `text` says something in Unicode."""
    if not text.strip():
        raise CourseError(f"chat: {name} is empty; write the text in quotes")
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        raise CourseError(f"chat: {name} is not UTF-8 text; write it in UTF-8") from None


def check_template(engine: Engine, think: bool) -> None:
    """CourseError unless the model has a chat template, with a switch if it shall think."""
    template = engine.tokenizer.chat_template
    if template is None:
        raise CourseError(
            "chat: this checkpoint has no chat template (chat_template.jinja, or chat_template in "
            "tokenizer_config.json): copy that file too, or choose an instruct or chat checkpoint"
        )
    if think and not template.knows_thinking:
        raise CourseError("chat: this model's template has no switch for thinking; omit --think")
