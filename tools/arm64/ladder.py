"""Instructions and bytes of one dot product on arm64, from a Python loop to SDOT, counted.

    python tools/arm64/ladder.py [--check]

Writes data/bench/dot_ladder.json: per row of a Q8_0 matrix of 160 columns times one row of x, for
course_lib.lab.dot_ladder's Python and NumPy, and for the C kernels as plain C, NEON and SDOT. A
count is the difference between two runs that differ only in the number of rows, under qemu's
emulation: nothing is timed. Needs what counts.py needs and the arm64 Python that
tools/arm64_test.sh makes in .venv-arm64 (`--python FOLDER`: another place). --check only compiles.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import sys
import tempfile
from pathlib import Path

import counts

ROOT = Path(__file__).resolve().parents[2]
COLS = 160
VERSIONS = "import sys, numpy; print(sys.version.split()[0], numpy.__version__)"
# Rung -> (what runs, the fewer and the more rows).
RUNGS = {"python": ("Python loop", 64, 128), "numpy": ("NumPy", 1024, 2048),
         "portable": ("C", 1024, 2048), "neon": ("NEON", 1024, 2048),
         "dotprod": ("SDOT", 1024, 2048)}


def compile_c(variant: str, *more: object) -> None:
    """Compile count_linear.c with the kernels' own flags."""
    counts.run(f"{counts.CROSS}gcc", *counts.compile_flags(), f"-I{counts.KERNELS}",
               "-Werror=implicit-function-declaration", f'-DVARIANT="variants/{variant}.c"',
               counts.TOOLS / "count_linear.c", *more)


def count_c(plugin: Path, folder: Path, variant: str, rows: int) -> list[int]:
    program = folder / f"count_linear_{variant}"
    if not program.exists():
        compile_c(variant, *counts.COMPILED_ONCE, "-static", "-lm", "-o", program)
    return counts.totals(counts.run("qemu-aarch64", "-cpu", "cortex-a76", "-plugin",
                                    f"{plugin},totals=on", "-d", "plugin", program, rows))


def count_python(plugin: Path, python: Path, rung: str, rows: int) -> list[int]:
    environment = {**os.environ, "PYTHONHASHSEED": "0", "OPENBLAS_NUM_THREADS": "1",
                   "COURSE_KERNEL": "numpy",
                   "QEMU_OPTIONS": f"-plugin {plugin},totals=on -d plugin"}
    return counts.totals(counts.run(python, counts.TOOLS / "count_rung.py", rung, rows,
                                    env=environment))


def count_rungs(rungs: dict, python: Path | None) -> list[dict]:
    """One record per rung: per row of w, instructions, bytes loaded and stored."""
    records = []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        plugin = counts.build_plugin(folder)
        for rung, (title, few, many) in rungs.items():
            if rung in ("python", "numpy"):
                one, two = (count_python(plugin, python, rung, rows) for rows in (few, many))
            else:
                one, two = (count_c(plugin, folder, rung, rows) for rows in (few, many))
            per_row = [round((b - a) / (many - few), 2) for a, b in zip(one, two, strict=True)]
            names = ("instructions", "loaded", "stored")
            records.append({"rung": rung, "what": title, **dict(zip(names, per_row, strict=True))})
            print(records[-1], flush=True)
    return records


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--python", type=Path, default=ROOT / ".venv-arm64", metavar="FOLDER",
                        help="the folder of the arm64 Python")
    parser.add_argument("--check", action="store_true",
                        help="only check that the kernels have what is to be counted")
    arguments = parser.parse_args()
    if arguments.check:
        for variant in counts.VARIANTS:
            compile_c(variant, "-fsyntax-only")
        return
    python = arguments.python / "python-cortex-a76"
    if not python.exists():
        raise SystemExit(f"ladder.py: there is no {python}; make it with tools/arm64_test.sh")
    sys.path.insert(0, str(ROOT))
    from course_lib.atomic import write_atomically

    table = {
        "command": "python tools/arm64/ladder.py",
        "date": datetime.date.today().isoformat(),
        "compiler": counts.run(f"{counts.CROSS}gcc", "--version").splitlines()[0],
        "emulator": counts.run("qemu-aarch64", "--version").splitlines()[0],
        "python": counts.run(python, "-c", VERSIONS).strip(),
        "cols": COLS,
        "records": count_rungs(RUNGS, python),
    }
    path = ROOT / "data" / "bench" / "dot_ladder.json"
    write_atomically(path, json.dumps(table, indent=1, ensure_ascii=False) + "\n")
    print(path.relative_to(ROOT))


if __name__ == "__main__":
    main()
