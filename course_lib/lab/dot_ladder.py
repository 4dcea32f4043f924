"""One product, w · x with int8 blocks, as Python, as NumPy, and the instruction that does four at
once. The compiled rungs of this ladder are the kernels (`course_lib.linear`).

data/bench/dot_ladder.json holds instructions and bytes of every rung on arm64, counted by
tools/arm64/ladder.py.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import numpy as np

from course_lib.fused import fused_multiply_add
from course_lib.paths import DATA

F32 = np.float32
BLOCK = 32


def python_product(x_codes: Sequence[int], x_scales: Sequence[float],
                   w_codes: Sequence[Sequence[int]],
                   w_scales: Sequence[Sequence[float]]) -> list[float]:
    """One number per row of w, by a loop over plain Python numbers."""
    out = []
    for codes, scales in zip(w_codes, w_scales, strict=True):
        acc = 0.0
        for b, scale in enumerate(scales):
            total = 0
            for i in range(BLOCK * b, BLOCK * b + BLOCK):
                total += x_codes[i] * codes[i]
            acc += scale * x_scales[b] * total
        out.append(acc)
    return out


def numpy_product(x_codes: np.ndarray, x_scales: np.ndarray, w_codes: np.ndarray,
                  w_scales: np.ndarray) -> np.ndarray:
    """The same for arrays int8 [cols], float32 [cols / 32], int8 [rows, cols], float16 [rows,
    cols / 32]: whole blocks at a time, the codes widened to int32 first."""
    x = x_codes.reshape(-1, BLOCK).astype(np.int32)
    w = w_codes.reshape(len(w_codes), -1, BLOCK).astype(np.int32)
    totals = (w * x).sum(axis=-1)
    return (w_scales.astype(F32) * x_scales * totals).sum(axis=-1, dtype=F32)


def q8_dot(x_codes: np.ndarray, x_scales: np.ndarray, w_codes: np.ndarray,
           w_scales: np.ndarray) -> np.float32:
    """One row, with the kernels' bits: exact sums of a block, one fused multiply-add a block."""
    acc = np.zeros(1, F32)
    for b in range(len(x_scales)):
        block = slice(BLOCK * b, BLOCK * b + BLOCK)
        total = x_codes[block].astype(np.int64) @ w_codes[block].astype(np.int64)
        scale = F32(w_scales[b]) * F32(x_scales[b])
        acc = fused_multiply_add(np.array([scale]), np.array([total]), acc)
    return acc[0]


def sdot(acc: np.ndarray, a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """What vdotq_s32 does: int32 [4], lane i plus the four products 4 i … 4 i + 3 of a and b.

    acc int32 [4], a and b int8 [16]. Sums wrap around at 2**31, as the instruction's do.
    """
    products = a.astype(np.int64) * b.astype(np.int64)
    total = acc.astype(np.int64) + products.reshape(4, 4).sum(axis=1)
    return ((total + 2**31) % 2**32 - 2**31).astype(np.int32)


def recorded_counts() -> dict[str, Any]:
    """data/bench/dot_ladder.json: the command, programs and date, and one record per rung."""
    return json.loads((DATA / "bench" / "dot_ladder.json").read_text(encoding="utf-8"))
