"""Instructions and bytes per KV row of the attention kernels on arm64, counted under emulation.

    python tools/arm64/counts.py [--csv FILE] [--show LOOP] [--check]

For each variant and loop, per row of 128 values: instructions, bytes loaded and stored, the bytes
that the row itself has, and, where llvm-mca has its Neoverse N1 model (LLVM 16 or later), the
cycles that this relative of the board's Cortex-A76 needs for the loop's hottest block. Counts are
the difference between two runs of count_rows.c that differ only in the number of rows, so they
are exact and the same on every machine. Needs aarch64-linux-gnu-gcc and qemu-aarch64; --show LOOP
prints the hottest block's instructions; --check only compiles, without code.
"""

from __future__ import annotations

import argparse
import csv
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

TOOLS = Path(__file__).resolve().parent
ROOT = TOOLS.parents[1]
KERNELS = ROOT / "kernels_pyx" / "c"
COMPILED_ONCE = KERNELS / "parallel.c", KERNELS / "workspace.c"
CROSS = "aarch64-linux-gnu-"
VARIANTS = ("dotprod", "neon", "portable")
FEW, MANY = 1024, 2048

# Loop -> (bytes of the rows it reads per token, what it is).
LOOPS = {
    "score-q8-q8": (128, "scores: int8 query, int8 rows, one query head"),
    "score-q8-q8-2": (128, "scores: int8 query, int8 rows, two query heads"),
    "score-q8-q8-row": (128, "the same with one query scale a row, one query head"),
    "score-q8-q8-row-2": (128, "the same with one query scale a row, two query heads"),
    "score-q8": (128, "scores: float query, int8 rows, one query head"),
    "score-q8-2": (128, "scores: float query, int8 rows, two query heads"),
    "score-f32": (512, "scores: float rows, one query head"),
    "score-f32-2": (512, "scores: float rows, two query heads"),
    "sum-q8": (128, "sums of V: int8 rows, one query head"),
    "sum-q8-2": (128, "sums of V: int8 rows, two query heads"),
    "sum-f32": (512, "sums of V: float rows, one query head"),
    "sum-f32-2": (512, "sums of V: float rows, two query heads"),
    "single_pass_q8": (256 + 8, "the whole operation, K and V, two query heads"),
    "single_pass_q8_row": (256 + 8, "the whole operation, K and V, two query heads"),
    "single_pass-q8": (256 + 8, "the whole operation, K and V, two query heads"),
    "two_pass-q8": (256 + 8, "the whole operation, K and V, two query heads"),
    "two_pass-f32": (1024, "the whole operation, K and V, two query heads"),
}
HEADER = ("variant", "loop", "instructions", "loaded", "stored", "data", "n1_cycles")


def run(*command: object, **options) -> str:
    """Run a program and return its output; SystemExit with its messages if it fails."""
    command = tuple(str(part) for part in command)
    if shutil.which(command[0]) is None:
        raise SystemExit(f"counts.py: there is no {command[0]}; sudo apt install gcc qemu-user "
                         "gcc-aarch64-linux-gnu libc6-dev-arm64-cross")
    result = subprocess.run(command, capture_output=True, text=True, **options)
    if result.returncode:
        raise SystemExit(f"{' '.join(command)}\n{result.stdout}{result.stderr}")
    return result.stdout + result.stderr


def compile_flags() -> list[str]:
    """Return setup.py's flags for arm64, which are the ones the kernels are compiled with."""
    import runpy

    import setuptools

    setuptools.setup = lambda **arguments: None
    return runpy.run_path(str(ROOT / "setup.py"))["compile_flags"]("aarch64-linux-gnu")


def build_plugin(folder: Path) -> Path:
    """Compile count.c for this machine's qemu: version 9 raised the oldest version it accepts."""
    version = re.search(r"version (\d+)\.", run("qemu-aarch64", "--version"))
    plugin = folder / "count.so"
    number = 1 if version is None or int(version[1]) < 9 else 2
    run("gcc", "-O2", "-Wall", "-shared", "-fPIC", f"-DQEMU_PLUGIN_VERSION={number}", "-o", plugin,
        TOOLS / "count.c")
    return plugin


def build_program(folder: Path, variant: str) -> Path:
    program = folder / f"count_rows_{variant}"
    compile_program(variant, *COMPILED_ONCE, "-static", "-lm", "-o", program)
    return program


def compile_program(variant: str, *more: object) -> None:
    """Compile count_rows.c; SystemExit with one sentence if it and the kernels no longer fit."""
    strict = ("implicit-function-declaration", "incompatible-pointer-types", "int-conversion")
    try:
        run(f"{CROSS}gcc", *compile_flags(), *(f"-Werror={name}" for name in strict),
            f"-I{KERNELS}", f'-DVARIANT="variants/{variant}.c"', TOOLS / "count_rows.c", *more)
    except SystemExit as error:
        first = re.search(r"count_rows\.c:(\d+):.* error: (.*?)(;.*)?( \[-W.*)?$", str(error),
                          re.MULTILINE)
        if first is None:
            raise
        raise SystemExit(f"counts.py: the kernels have changed and tools/arm64/count_rows.c has "
                         f"not: line {first[1]}, {first[2]}") from None


def count(plugin: Path, program: Path, loop: str, rows: int):
    """Return instructions, loaded and stored bytes, and {(address, length): runs} of blocks."""
    output = run("qemu-aarch64", "-cpu", "cortex-a76", "-plugin", plugin, "-d", "plugin", program,
                 loop, rows)
    blocks = re.findall(r"^block (0x[0-9a-f]+) (\d+) (\d+)$", output, re.MULTILINE)
    return (totals(output),
            {(int(address, 16), int(length)): int(runs) for address, length, runs in blocks})


def totals(output: str) -> list[int]:
    """Instructions, loaded and stored bytes of a whole run, in what the plugin printed."""
    found = re.search(r"^total (\d+) (\d+) (\d+)$", output, re.MULTILINE)
    if found is None:
        raise SystemExit(f"counts.py: the emulator counted nothing:\n{output[-500:]}")
    return [int(n) for n in found.groups()]


def hottest(few: dict, many: dict) -> tuple[int, int, float]:
    """Return address, length and runs per row of the block in which the loop spends most. The
    emulator cuts a block where a page ends: parts that follow each other and run equally often
    are one."""
    more = {}
    for (address, length), runs in sorted(many.items()):
        runs = (runs - few.get((address, length), 0)) / (MANY - FEW)
        if more:
            (before, size), same = list(more.items())[-1]
            if before + 4 * size == address and same == runs:
                del more[before, size]
                address, length = before, size + length
        more[address, length] = runs
    address, length = max(more, key=lambda key: key[1] * more[key])
    return address, length, more[address, length]


def listing(program: Path, address: int, length: int) -> list[str]:
    """Disassemble a block: one instruction a line, as assemblers read it."""
    text = run(f"{CROSS}objdump", "-d", "--no-show-raw-insn", f"--start-address={address}",
               f"--stop-address={address + 4 * length}", program)
    found = re.findall(r"^\s+[0-9a-f]+:\t(.*)$", text, re.MULTILINE)
    return [re.sub(r"\s*(<.*>)?\s*(//.*)?$", "", line) for line in found]


def n1_model() -> str | None:
    """Return the newest llvm-mca that has a model of the N1, or None. Older ones take the name
    and silently use the model of the A57."""
    names = ["llvm-mca", *(f"llvm-mca-{version}" for version in range(16, 40))]
    for name in filter(shutil.which, reversed(names)):
        if "N1Unit" in mca(name, ["add x0, x0, #1"]):
            return name
    return None


def mca(program: str, instructions: list[str]) -> str:
    # A branch's target is a number here and a label there; it does not matter to the model.
    code = [re.sub(r"^(b\.\w+|b|cbn?z \w+,|tbn?z .*,)\s+[0-9a-f]+$", r"\1 #4",
                   line.replace("\t", " ")) for line in instructions]
    code = [re.sub(r"^(adrp? \w+,) [0-9a-f]+$", r"\1 #4096", line) for line in code]
    return run(program, "-mtriple=aarch64", "-mcpu=neoverse-n1", "-mattr=+dotprod",
               "-iterations=200", input="\n".join(code) + "\n")


def cycles(program: str, instructions: list[str]) -> float:
    return int(re.search(r"Total Cycles:\s+(\d+)", mca(program, instructions))[1]) / 200


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--csv", type=Path, metavar="FILE", help="also write the table there")
    parser.add_argument("--show", choices=LOOPS, metavar="LOOP", help="print its hottest block")
    parser.add_argument("--check", action="store_true",
                        help="only check that the kernels have what is to be counted")
    arguments = parser.parse_args()
    if arguments.check:
        for variant in VARIANTS:
            compile_program(variant, "-fsyntax-only")
        return
    model = n1_model()
    print("N1 cycles by", model or "nothing: no llvm-mca with the Neoverse N1's model (LLVM 16)")
    rows = []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        plugin = build_plugin(folder)
        print("  ".join(f"{title:>12}" for title in HEADER))
        for variant in VARIANTS:
            program = build_program(folder, variant)
            for loop in [arguments.show] if arguments.show else LOOPS:
                few, few_blocks = count(plugin, program, loop, FEW)
                many, many_blocks = count(plugin, program, loop, MANY)
                per_row = [(m - f) / (MANY - FEW) for m, f in zip(many, few, strict=True)]
                address, length, runs = hottest(few_blocks, many_blocks)
                code = listing(program, address, length)
                n1 = round(cycles(model, code) * runs, 2) if model else ""
                whole = loop.startswith(("single", "two"))  # many blocks: none speaks for it
                row = (variant, loop, *(round(n, 2) for n in per_row), LOOPS[loop][0],
                       "" if whole else n1)
                rows.append(row)
                print("  ".join(f"{value!s:>12}" for value in row), flush=True)
                if arguments.show:
                    print(f"{length} instructions, run {runs:g} times per row:")
                    print(*code, sep="\n")
    if arguments.csv:
        sys.path.insert(0, str(ROOT))
        from course_lib.atomic import write_atomically

        text = tempfile.SpooledTemporaryFile(mode="w+", newline="")
        csv.writer(text, lineterminator="\n").writerows([HEADER, *rows])
        text.seek(0)
        write_atomically(arguments.csv, text.read())


if __name__ == "__main__":
    main()
