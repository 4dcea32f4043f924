"""Two 16-bit formats for numbers, f16 and bf16: from float32 with a report, and back."""

from __future__ import annotations

from typing import Any

import numpy as np

from course_lib.arrays import F32

KINDS = ("f16", "bf16")
ONE_NAN = {"f16": np.uint16(0x7E00), "bf16": np.uint16(0x7FC0)}  # what every NaN becomes
MAGNITUDE = np.uint32(0x7FFFFFFF)
INFINITE = np.uint32(0x7F800000)


def f32_to_half(x: Any, kind: str) -> tuple[np.ndarray, dict[str, int]]:
    """Round float32 to the nearest number of `kind`, ties to the one with an even last bit.

    x: float32 of any shape. Returns the bits, uint16 of that shape, and how many numbers were
    lost: "overflow", finite ones that became infinite, and "underflow", others that became 0. Each
    NaN becomes the same quiet NaN, so equal inputs give equal files. ValueError for another kind.
    """
    _check(kind)
    x = np.asarray(x, F32)
    bits = x.view(np.uint32)
    if kind == "f16":
        with np.errstate(over="ignore", invalid="ignore"):
            half = x.astype(np.float16).view(np.uint16)
    else:
        last_kept = bits >> np.uint32(16) & np.uint32(1)
        rounded = bits + np.uint32(0x7FFF) + last_kept
        half = (rounded >> np.uint32(16)).astype(np.uint16)
    magnitude = bits & MAGNITUDE
    half = np.where(magnitude > INFINITE, ONE_NAN[kind], half)
    small = half & np.uint16(0x7FFF)
    infinite = np.uint16(0x7C00 if kind == "f16" else 0x7F80)
    return half, {"overflow": int(((small == infinite) & (magnitude < INFINITE)).sum()),
                  "underflow": int(((small == 0) & (magnitude > 0)).sum())}


def half_to_f32(bits: Any, kind: str) -> np.ndarray:
    """The float32 numbers that uint16 `bits` stand for; exact, for every one is a float32."""
    _check(kind)
    bits = np.asarray(bits, np.uint16)
    if kind == "f16":
        with np.errstate(invalid="ignore"):
            return bits.view(np.float16).astype(F32)
    return (bits.astype(np.uint32) << np.uint32(16)).view(F32)


def _check(kind: str) -> None:
    if kind not in KINDS:
        raise ValueError(f"kind must be one of {', '.join(KINDS)}, not {kind!r}.")
