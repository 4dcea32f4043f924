"""`./course bench`: the kernels beside NumPy, plain C and this machine's own limits."""

from __future__ import annotations

import argparse
import os
import sys
from contextlib import nullcontext

from course_lib.errors import CourseError
from course_lib.launcher.extras import need

HELP = "kernels against NumPy and this machine's own memory bandwidth, as ratios of one run"

PARTS = ("attention", "linear", "prefill", "model")
PEERS = ("llama",)
THREADS_PER_CORE = 4


def threads(text: str) -> int:
    """A number of threads."""
    if not (text.isascii() and text.isdigit() and 1 <= int(text) <= 1024):
        raise argparse.ArgumentTypeError(f"must be a number from 1 to 1024, not {text!r}")
    return int(text)


def check_threads(counts: list[int]) -> None:
    """CourseError for far more threads than cores: they tell nothing, and where the system does
    not grant them the process is ended."""
    known = hasattr(os, "sched_getaffinity")
    cores = len(os.sched_getaffinity(0)) if known else os.cpu_count() or 1
    most = THREADS_PER_CORE * cores
    if max(counts, default=1) > most:
        raise CourseError(f"bench: --threads {max(counts)} is more than {THREADS_PER_CORE} threads "
                          f"for each core that may be used here; name at most {most}.")


def check_options(args: argparse.Namespace) -> None:
    """CourseError for options that do not go together."""
    if args.peer and not args.engine:
        raise CourseError("bench: --peer stands beside the engine as a whole; add --engine.")
    if args.grading and (args.engine or args.only or args.variant or args.csv):
        raise CourseError("bench: --grading goes with --quick, --threads and --json only.")
    if args.prefill and (args.engine or args.grading or args.only):
        raise CourseError("bench: --prefill is a bench of its own; leave --engine, --grading and "
                          "--only out.")
    if args.engine and args.only:
        raise CourseError("bench: --only names a part of the kernels' bench, which --engine does "
                          "not run; leave one of the two out.")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--quick", action="store_true",
        help="a selection that ends within 40 seconds, with --engine within 60")
    add("--engine", action="store_true",
        help="the engine as a whole instead: prompts and tokens of a Qwen3-0.6B with random "
             "weights, in tokens a second")
    add("--prefill", action="store_true",
        help="prefill policies instead: estimate, load and compute, densities, in memory and from "
             "a file, and what cheaper estimates find again")
    add("--grading", action="store_true",
        help="how fast submissions are graded instead, with as many jobs as --threads says")
    add("--peer", choices=PEERS, metavar="NAME",
        help=f"with --engine: beside another engine ({', '.join(PEERS)}), in turns")
    add("--only", choices=PARTS, action="append", default=[], metavar="PART",
        help=f"one part: {', '.join(PARTS)}; may be repeated (default: all)")
    add("--threads", type=threads, action="append", default=[], metavar="N",
        help="threads of the kernels; may be repeated (default: 1, and COURSE_THREADS or all fast "
             "cores; with --engine the latter)")
    add("--variant", metavar="NAME",
        help="kernels to measure, as in COURSE_KERNEL (default: the best that this CPU runs)")
    add("--csv", metavar="FILE", help="also write the rows as CSV")
    add("--json", metavar="FILE", help="also write the rows as a JSON array")


def run(args: argparse.Namespace) -> int:
    if "numpy" not in sys.modules:
        # NumPy is compared on one thread; its library reads this when it is loaded.
        for name in ("OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "VECLIB_MAXIMUM_THREADS"):
            os.environ[name] = "1"
    from course_lib import backend
    from course_lib.bench.records import check_targets
    from course_lib.bench.report import bench

    check_options(args)
    check_targets(args.csv, args.json)
    check_threads(args.threads)
    if args.grading:
        from course_lib.bench.grading import bench_grading

        return bench_grading(sys.stdout, quick=args.quick, json_path=args.json,
                             jobs=max(args.threads or [len(backend.usable_cores())]))
    backend.threads()  # a COURSE_THREADS that is no number is refused before the first minute
    with backend.using(args.variant) if args.variant else nullcontext():
        if args.prefill:
            from course_lib.bench.policy_report import bench_policies

            return bench_policies(sys.stdout, quick=args.quick, threads=args.threads,
                                  csv_path=args.csv, json_path=args.json)
        if args.engine:
            if args.peer:
                need("peer", "gguf", "llama_cpp")
            from course_lib.bench.engine_report import bench_engine

            return bench_engine(sys.stdout, quick=args.quick, peer=args.peer is not None,
                                threads=args.threads, csv_path=args.csv, json_path=args.json)
        return bench(sys.stdout, quick=args.quick, parts=set(args.only), threads=args.threads,
                     csv_path=args.csv, json_path=args.json)
