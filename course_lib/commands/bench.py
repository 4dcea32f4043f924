"""`./course bench`: the kernels beside NumPy, plain C and this machine's own limits."""

from __future__ import annotations

import argparse
import os
import sys
from contextlib import nullcontext

HELP = "kernels against NumPy and this machine's own memory bandwidth, as ratios of one run"

PARTS = ("attention", "linear", "prefill", "model")


def threads(text: str) -> int:
    """A number of threads."""
    if not (text.isascii() and text.isdigit() and 1 <= int(text) <= 1024):
        raise argparse.ArgumentTypeError(f"must be a number from 1 to 1024, not {text!r}")
    return int(text)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--quick", action="store_true", help="a selection that ends within 40 seconds")
    add("--only", choices=PARTS, action="append", default=[], metavar="PART",
        help=f"one part: {', '.join(PARTS)}; may be repeated (default: all)")
    add("--threads", type=threads, action="append", default=[], metavar="N",
        help="threads of the kernels; may be repeated (default: 1, and COURSE_THREADS or all fast "
             "cores)")
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
    from course_lib.bench.records import check_target
    from course_lib.bench.report import bench

    check_target(args.csv, "--csv")
    check_target(args.json, "--json")
    with backend.using(args.variant) if args.variant else nullcontext():
        return bench(sys.stdout, quick=args.quick, parts=set(args.only), threads=args.threads,
                     csv_path=args.csv, json_path=args.json)
