"""How GGUF files store tensors: the types that the engine reads, and their values."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from course_lib.half_floats import half_to_f32
from course_lib.weight_blocks import dequantize_q4_0, dequantize_q8_0


class TensorKind(NamedTuple):
    """A type: `items` values of a row lie together in `nbytes` bytes."""

    name: str
    items: int
    nbytes: int


KINDS = {
    0: TensorKind("F32", 1, 4),
    1: TensorKind("F16", 1, 2),
    2: TensorKind("Q4_0", 32, 18),
    3: TensorKind("Q4_1", 32, 20),
    8: TensorKind("Q8_0", 32, 34),
    30: TensorKind("BF16", 1, 2),
}
"""Number of a type in the file -> what it is."""

OTHER_KINDS = {
    6: "Q5_0", 7: "Q5_1", 9: "Q8_1", 10: "Q2_K", 11: "Q3_K", 12: "Q4_K", 13: "Q5_K", 14: "Q6_K",
    15: "Q8_K", 16: "IQ2_XXS", 17: "IQ2_XS", 18: "IQ3_XXS", 19: "IQ1_S", 20: "IQ4_NL", 21: "IQ3_S",
    22: "IQ2_S", 23: "IQ4_XS", 24: "I8", 25: "I16", 26: "I32", 27: "I64", 28: "F64", 29: "IQ1_M",
    34: "TQ1_0", 35: "TQ2_0", 39: "MXFP4",
}
"""The same for types that are not read, to name them."""


def values(raw: np.ndarray, kind: str) -> np.ndarray:
    """Stored bytes uint8 `[rows, bytes]` of a kind as float32 `[rows, columns]`.

    Bit for bit what gguf.dequantize gives. Raises ValueError where a scale is NaN or infinite.
    """
    raw = np.ascontiguousarray(raw)
    if kind == "F32":
        return raw.view("<f4").astype(np.float32, copy=False)
    if kind == "F16":
        return raw.view("<f2").astype(np.float32)
    if kind == "BF16":
        return half_to_f32(raw.view("<u2"), "bf16")
    return {"Q8_0": dequantize_q8_0, "Q4_0": dequantize_q4_0, "Q4_1": dequantize_q4_1}[kind](raw)


def dequantize_q4_1(blocks: np.ndarray) -> np.ndarray:
    """Values d · code + m of Q4_1 blocks uint8 `[rows, bytes]`, float32 `[rows, columns]`.

    A block of 32: float16 d, float16 m, 16 bytes with code j in the low half of byte j and
    code j + 16 in the high half. Raises ValueError where d or m is NaN or infinite.
    """
    parts = blocks.reshape(len(blocks), -1, 20)
    d, m = np.moveaxis(np.ascontiguousarray(parts[..., :4]).view("<f2").astype(np.float32), -1, 0)
    if not (np.isfinite(d).all() and np.isfinite(m).all()):
        raise ValueError("a scale is NaN or infinity.")
    bytes_ = parts[..., 4:]
    codes = np.concatenate((bytes_ & 15, bytes_ >> 4), axis=-1).astype(np.float32)
    return (d[..., None] * codes + m[..., None]).reshape(len(blocks), -1)
