"""`./course doctor`: what this machine has, what a missing thing costs, what installs it."""

from __future__ import annotations

import argparse

from course_lib.errors import CourseError

HELP = "say what this machine has, what is missing and what to do about it"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--model", metavar="PATH",
        help="say instead what this checkpoint (a folder or a .gguf file) needs in memory")
    add("--context", type=int, metavar="N", help="with so many tokens (default 4096)")


def run(args: argparse.Namespace) -> int:
    """Print one line per thing; 1 if something that the course cannot do without is missing, or if
    the model does not fit."""
    if args.model is not None:
        from course_lib.commands import doctor_model

        return doctor_model.report(args.model, args.context)
    if args.context is not None:
        raise CourseError("--context belongs to --model: say which checkpoint")
    from course_lib.launcher.machine import findings

    found = findings()
    width = max(len(f.name) for f in found)
    for finding in found:
        mark = "ok" if finding.ok else "MISSING" if finding.needed else "--"
        print(f"{mark:8}{finding.name:{width}}  {finding.detail}")
        if not finding.ok:
            print(f"{'':8}{'':{width}}  costs: {finding.cost}")
            print(f"{'':8}{'':{width}}  remedy: {finding.remedy}")
    return 1 if any(f.needed and not f.ok for f in found) else 0
