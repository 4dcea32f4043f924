#!/usr/bin/env python3
"""Write what the gguf package makes of some weights, so that tests can compare without it.

    python tools/make_weight_golden.py            # extra `real`: gguf

`tests/oracle/golden/weight_blocks.npz` holds weights `w` float32 [rows, cols], their Q8_0 and Q4_0
blocks and the values of those blocks.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from course_lib.launcher.extras import need  # noqa: E402

if __name__ == "__main__":  # before what needs the extra
    argparse.ArgumentParser(description=__doc__.splitlines()[0]).parse_args()
    need("real", "gguf")

import gguf  # noqa: E402
import numpy as np  # noqa: E402

GOLDEN = ROOT / "tests" / "oracle" / "golden" / "weight_blocks.npz"


def weights() -> np.ndarray:
    """Rows of many magnitudes: ordinary, full of ties, zeros, tied largest values, tiny, huge."""
    rng = np.random.default_rng(32)
    rows = [rng.standard_normal(96) * 10.0**exponent for exponent in range(-9, 5)]
    rows += [rng.integers(-254, 255, 96) / 2, rng.integers(-16, 17, 96) / 2]
    rows += [np.zeros(96), np.tile([1.0, -1.0, 0.5], 32), np.tile([-1.0, 1.0, 0.0], 32)]
    rows += [np.full(96, 524_000.0), np.full(96, -524_000.0), np.r_[np.zeros(64), np.ones(32)]]
    return np.array(rows, np.float32)


def main() -> None:
    w = weights()
    arrays = {"w": w}
    for name, kind in (("q8_0", gguf.GGMLQuantizationType.Q8_0),
                       ("q4_0", gguf.GGMLQuantizationType.Q4_0)):
        arrays[name] = gguf.quants.quantize(w, kind)
        arrays[f"{name}_values"] = gguf.quants.dequantize(arrays[name], kind)
    np.savez_compressed(GOLDEN, **arrays)
    print(f"{GOLDEN.name}: {len(w)} rows, {GOLDEN.stat().st_size} bytes")


if __name__ == "__main__":
    main()
