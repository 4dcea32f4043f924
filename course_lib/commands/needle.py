"""`./course needle`: the flagship experiment in the terminal, here or on a server."""

from __future__ import annotations

import argparse

from course_lib.commands.needle_local import run_local
from course_lib.commands.policy_values import policy, require_policy, threshold
from course_lib.commands.values import fraction, k_list, megabytes, positive, seconds
from course_lib.engine.prefill import IMPORTANCE_RULES
from course_lib.errors import CourseError
from course_lib.kvcache import CACHE_DTYPES
from course_lib.lab.needle import MAX_NEW_TOKENS, NeedleOptions
from course_lib.lab.policy_options import PolicyOptions
from course_lib.lab.prompts import TEMPLATES
from course_lib.prefill import AGGREGATORS

HELP = "exact against block-sparse decode on needle prompts: recall, text, attention time"
DEFAULT_KS = (32, 1)
WEIGHT_KINDS = ("f32", "q8_0", "q4_0")
CHUNKED = ("--sparse-threshold", "--aggregate", "--chunk", "--offload", "--ram-budget")
"""Options of --policy."""
OURS = ("--k", "--kv", "--prefill-k", "--prefill-group", "--one-flag", "--importance", "--window",
        "--weights", "--policy", *CHUNKED)
"""Options of our engine: a server was started with its own."""
THEIRS = ("--served-model", "--timeout")
"""Options of a server."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--k", type=k_list, nargs="+", metavar="K",
        help="decode k of each sparse arm, in blocks of 32 tokens, or auto (default 32,1); exact "
             "runs first")
    add("--prompts", type=positive, default=1, metavar="N", help="number of prompts (default 1)")
    add("--tokens", type=positive, default=2061, metavar="N", help="tokens of every prompt (2061)")
    add("--position", type=fraction, default=0.5, metavar="P",
        help="where the needle stands: 0 first line, 1 last (default 0.5)")
    phase = parser.add_mutually_exclusive_group()
    phase.add_argument("--prefill-k", type=positive, metavar="K",
                       help="sparse prefill with K blocks for every arm but exact")
    phase.add_argument("--one-flag", action="store_true",
                       help="prefill k = decode k, as in the published run of article 10-2")
    phase.add_argument("--policy", type=policy, metavar="NAME",
                       help="prefill in chunks by a policy (full, quest, xattn) for every arm but "
                            "exact; decode is exact but for --k, which then goes without "
                            "importance")
    add("--sparse-threshold", type=threshold, metavar="T",
        help="mass that --policy xattn keeps, above 0 to 1 (default 0.9)")
    add("--aggregate", choices=tuple(AGGREGATORS),
        help="how --policy xattn makes one list of many heads' (default majority)")
    add("--chunk", type=positive, metavar="N",
        help="tokens of a chunk of --policy, a multiple of 128 (default 1024)")
    add("--offload", action="store_true", help="with --policy: keep K and V in a file meanwhile")
    add("--ram-budget", type=megabytes, metavar="MB",
        help="of the --offload file's K and V, how much may be in memory (default eight blocks)")
    add("--prefill-group", type=positive, metavar="G",
        help="sparse prefill chooses blocks for G tokens at a time (default 256)")
    add("--template", choices=TEMPLATES,
        help="chat: what the shipped model was trained on; instruct: with instructions, for other "
             "models; bare: a completion, which a chat model may not answer (default: by model)")
    add("--importance", choices=IMPORTANCE_RULES, help="(default all_queries)")
    add("--window", type=positive, metavar="N",
        help="queries that --importance last_window counts (default: tokens mod 256)")
    add("--kv", choices=CACHE_DTYPES, help="rows of the KV cache (default f32)")
    add("--model", metavar="DIR",
        help="a checkpoint folder, a .gguf file, or smollm2 where it is installed (default: the "
             "shipped model); with --url only its "
             "tokenizer is used, to size the prompts")
    add("--weights", choices=WEIGHT_KINDS, help="weights in memory (default f32)")
    add("--url", metavar="URL",
        help="ask an OpenAI-compatible server, such as http://127.0.0.1:8080, instead of an engine "
             "here; its key is taken from COURSE_API_KEY; any place in the text counts for recall")
    add("--served-model", metavar="NAME", help="the model's name at --url (default: its only one)")
    add("--timeout", type=seconds, metavar="S",
        help="seconds without text until --url is given up (default 1800)")
    add("--seed", type=int, default=0, help="another set of prompts (default 0)")
    add("--unseen", action="store_true", help="made-up names and values never seen in training")
    add("--max-new-tokens", type=positive, default=MAX_NEW_TOKENS, metavar="N",
        help=f"longest answer ({MAX_NEW_TOKENS}); here, the first token comes from prefill and "
             "does not count for recall")
    add("--json", action="store_true", help="print one JSON object, nothing else, on stdout")


def options_of(args: argparse.Namespace) -> NeedleOptions:
    ks = tuple(dict.fromkeys(k for group in args.k for k in group)) if args.k else (
        DEFAULT_KS if args.policy is None else ())
    return NeedleOptions(
        tokens=args.tokens, prompts=args.prompts, ks=ks, position=args.position,
        prefill_k=args.prefill_k, prefill_group=args.prefill_group, one_flag=args.one_flag,
        template=args.template or "chat", importance=args.importance or "all_queries",
        window=args.window, kv=args.kv or "f32", seed=args.seed, unseen=args.unseen,
        max_new_tokens=args.max_new_tokens, policy=policy_options(args),
    )


def policy_options(args: argparse.Namespace) -> PolicyOptions | None:
    """How --policy is to be run; None without it."""
    if args.policy is None:
        return None
    given = {"threshold": args.sparse_threshold, "aggregate": args.aggregate, "chunk": args.chunk,
             "offload": args.offload, "ram_budget": args.ram_budget}
    options = PolicyOptions(args.policy, **{k: v for k, v in given.items() if v is not None})
    require_policy(options)
    return options


def check_together(args: argparse.Namespace) -> None:
    """CourseError for options that do not go together."""
    def given(names: tuple[str, ...]) -> list[str]:
        return [n for n in names if getattr(args, n.strip("-").replace("-", "_"))]

    if args.url is not None:
        if wrong := given(OURS):
            raise CourseError(f"needle: {wrong[0]} is for an engine here, and --url asks a server, "
                              f"which was started with its own: leave {wrong[0]} out")
        if args.template == "bare":
            raise CourseError("needle: --url sends chat messages, --template bare is no chat: "
                              "choose chat or instruct")
    elif wrong := given(THEIRS):
        raise CourseError(f"needle: {wrong[0]} is about a server: give its --url too")
    if args.policy is None and (wrong := given(CHUNKED)):
        raise CourseError(f"needle: {wrong[0]} is about --policy: give one, such as --policy xattn")
    for name in ("--sparse-threshold", "--aggregate"):
        if args.policy not in (None, "xattn") and given((name,)):
            raise CourseError(f"needle: {name} is about --policy xattn: leave it out")
    if args.ram_budget is not None and not args.offload:
        raise CourseError("needle: --ram-budget needs --offload")
    if args.policy is not None and args.importance not in (None, "none"):
        raise CourseError(f"needle: --importance {args.importance} needs the softmax over the "
                          "whole prompt, and --policy has only parts of it: leave one of them out")
    if args.window is not None and args.importance != "last_window":
        raise CourseError("needle: --window needs --importance last_window")
    if args.prefill_group is not None and not (args.prefill_k or args.one_flag):
        raise CourseError("needle: --prefill-group is about sparse prefill: give --prefill-k too")
    if args.one_flag and args.k and any("auto" in group for group in args.k):
        raise CourseError("needle: --one-flag needs a number as --k, not auto")


def run(args: argparse.Namespace) -> int:
    check_together(args)
    options = options_of(args)
    if args.url is not None:
        from course_lib.commands.needle_server import run_server  # httpx costs a moment

        return run_server(args, options)
    return run_local(args, options)
