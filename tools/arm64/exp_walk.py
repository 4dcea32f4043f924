#!/usr/bin/env python3
"""Compare every float's exp on emulated NEON with data/runs/exp_all_floats.json.

    python tools/arm64/exp_walk.py                 all stretches: about half an hour
    python tools/arm64/exp_walk.py 132 133         some of them

From x86-64 Debian or Ubuntu with gcc-aarch64-linux-gnu, libc6-dev-arm64-cross and qemu-user. The
results go through a pipe; only their digests are compared. Ends with 1 where one differs.
"""

from __future__ import annotations

import argparse
import hashlib
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from tqdm import tqdm  # noqa: E402

from course_lib.lab.exp_walk import ExpWalk, stretch  # noqa: E402
from course_lib.lab.runs import load_run  # noqa: E402

COMPILER, EMULATOR = "aarch64-linux-gnu-gcc", "qemu-aarch64"


def build(folder: Path) -> Path:
    """Compile exp_walk.c for arm64, with the flags of the kernels."""
    program = folder / "exp_walk"
    subprocess.run([COMPILER, "-O3", "-ffp-contract=off", "-fno-math-errno", "-static",
                    f"-I{ROOT / 'kernels_pyx' / 'c'}", str(Path(__file__).with_suffix(".c")),
                    "-o", str(program), "-lm"], check=True)
    return program


def digest(program: Path, index: int) -> str:
    """The digest of a stretch's results, as the record holds it."""
    first, count, negative = stretch(ExpWalk(), index)
    found = hashlib.sha256()
    command = [EMULATOR, "-cpu", "cortex-a76", str(program), str(first), str(count),
               str(int(negative))]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as running:
        assert running.stdout is not None
        while piece := running.stdout.read(2**20):
            found.update(piece)
    if running.returncode:
        raise subprocess.CalledProcessError(running.returncode, command)
    return found.hexdigest()[:16]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("stretches", nargs="*", type=int, help="default: all")
    args = parser.parse_args()
    records = {r["index"]: r for r in load_run("exp_all_floats")["records"]}
    unknown = [index for index in args.stretches if index not in records]
    if unknown:
        print(f"exp_walk: no stretch {unknown[0]}; there are 0 to {max(records)}", file=sys.stderr)
        return 2
    for program in (COMPILER, EMULATOR):
        if shutil.which(program) is None:
            print(f"exp_walk: {program} is not installed", file=sys.stderr)
            return 2
    differ = []
    with tempfile.TemporaryDirectory() as folder:
        program = build(Path(folder))
        for index in tqdm(args.stretches or records, disable=not sys.stderr.isatty()):
            if digest(program, index) != records[index]["digest"]:
                differ.append(index)
    print(f"stretches compared on emulated NEON: {len(args.stretches or records)}, "
          f"that differ: {differ or 'none'}")
    return 1 if differ else 0


if __name__ == "__main__":
    raise SystemExit(main())
