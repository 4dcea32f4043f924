"""`./course test`: every suite, with its time, and one closing line."""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Iterable

from course_lib.launcher import ahead
from course_lib.launcher.runner import Count
from course_lib.launcher.suites import SUITES, Suite

HELP = "run the tests"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    names = [suite.name for suite in SUITES]
    parser.add_argument("--only", choices=names, action="append", metavar="SUITE",
                        help=f"run this suite (may be repeated): {', '.join(names)}")
    parser.add_argument("--full", action="store_true",
                        help="also " + ", ".join(s.name for s in SUITES if s.needs == "full")
                        + " (they install packages; torch may be several GB)")
    parser.add_argument("--sanitize", action="store_true",
                        help="also the kernels under gcc's sanitizers")
    parser.add_argument("--arm64", action="store_true",
                        help="also the kernels on emulated arm64 (as root, installs Debian's "
                        "gcc-aarch64-linux-gnu and qemu-user)")
    parser.add_argument("--browser", action="store_true",
                        help="also pages in a real browser (Debian's chromium)")
    parser.add_argument("--backend", metavar="NAME", help="kernels to use, as COURSE_KERNEL")


def run(args: argparse.Namespace) -> int:
    """Run the chosen suites; 1 if any test failed. CourseError for a backend that is not there."""
    from course_lib import backend

    if args.backend:
        os.environ["COURSE_KERNEL"] = args.backend
    info = backend.info()
    print(f"backend: {info.variant} ({info.reason})", flush=True)
    suites = [s for s in SUITES
              if (s.name in args.only if args.only else not s.needs or getattr(args, s.needs))]
    more = [s for s in suites if s.needs]
    results: list[tuple[Suite, Count, float]] = []
    try:
        run_each((s for s in suites if not s.needs), results)
        # The first one shows how its own preparation goes on.
        with ahead.preparing([s.name for s in more[1:] if s.prepare]):
            run_each(more, results)
    finally:
        total = summarize(results)
    return 1 if total.failed else 0


def run_each(suites: Iterable[Suite], results: list[tuple[Suite, Count, float]]) -> None:
    """Run suites one after the other; append their results and times in seconds."""
    for suite in suites:
        print(f"\n== {suite.name}: {suite.about}", flush=True)
        start = time.monotonic()
        results.append((suite, suite.run(), time.monotonic() - start))


def summarize(results: list[tuple[Suite, Count, float]]) -> Count:
    """Print one line a suite and the closing line, which CI reads; return the total."""
    total = Count()
    print()
    for suite, count, seconds in results:
        note = f"   ({count.note})" if count.note else ""
        print(f"{suite.name:13}{seconds:7.1f} s   {count}{note}")
        total += count
    print(total, flush=True)
    return total
