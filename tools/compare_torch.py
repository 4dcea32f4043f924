"""Dense float32 decode attention: the compiled kernels beside PyTorch, in one run.

    PYTHON_WITH_TORCH tools/compare_torch.py [--contexts 2048 16384] [--threads 1]

Needs a Python that has torch and NumPy and the version that the kernels were compiled for; torch is
no requirement of the course. Both sides get the same cold caches in turn; what is printed are
ratios of medians.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from course_lib.bench import attention_cases, machine, memory, timing  # noqa: E402
from course_lib.bench.groups import Bench  # noqa: E402


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--contexts", type=int, nargs="+", default=[2048, 4096, 8192, 16384])
    parser.add_argument("--threads", type=int, default=1)
    args = parser.parse_args()
    try:
        import numpy as np
        import torch
    except ImportError as error:
        print(f"compare_torch: {error}; run it with a Python that has torch and NumPy",
              file=sys.stderr)
        return 2
    kernels = machine.Kernels()
    if kernels.chosen is None:
        print(f"compare_torch: no compiled kernels ({kernels.info.reason}) for Python "
              f"{sys.version.split()[0]}", file=sys.stderr)
        return 2
    torch.set_num_threads(args.threads)
    kernels.set_threads(args.threads)
    reader = machine.Reader(kernels)
    bench = Bench(memory.Arena(memory.arena_bytes(memory.available_bytes())))
    print(f"{machine.machine_text()}; torch {torch.__version__}, kernels {kernels.info.variant}, "
          f"{args.threads} thread{'s' * (args.threads > 1)}\n"
          f"float32, {attention_cases.SHAPE}\n")
    print(f"{'context':>8} {'torch ms':>9} {'ours ms':>8} {'ratio':>6} {'of read':>8} "
          f"{'difference':>11}")
    with torch.inference_mode():
        for n in args.contexts:
            print(line(bench, kernels, reader, n, torch, np), flush=True)
    return 0


def line(bench, kernels, reader, n, torch, np) -> str:
    rows = attention_cases.layers(bench, "f32", n)
    q = bench.normal(attention_cases.NUM_HEADS, attention_cases.HEAD_DIM)
    out = np.empty_like(q)
    query = torch.from_numpy(q)[None, :, None]
    attend = torch.nn.functional.scaled_dot_product_attention
    two_pass = kernels.chosen["two_pass"]

    def theirs(r):
        k, v = torch.from_numpy(r.k)[None], torch.from_numpy(r.v)[None]
        return attend(query, k, v, enable_gqa=True)

    def ours(r):
        two_pass(q, r.k, r.v, None, None, None, attention_cases.BLOCK_SIZE, out)

    difference = float(np.abs(theirs(rows.all[0])[0, :, 0].numpy() - (ours(rows.all[0]), out)[1])
                       .max())
    times = timing.interleaved({
        "torch": lambda: theirs(rows.next()), "ours": lambda: ours(rows.next()),
        "read": reader}, seconds=1.0)
    read = reader.nbytes / times["read"]
    fraction = rows.all[0].k.nbytes * 2 / times["ours"] / read
    return (f"{n:>8,} {1e3 * times['torch']:>9.3f} {1e3 * times['ours']:>8.3f} "
            f"{times['torch'] / times['ours']:>5.2f}x {100 * fraction:>6.0f} % {difference:>11.1e}")


if __name__ == "__main__":
    sys.exit(main())
