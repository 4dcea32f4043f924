"""Weights in blocks of 32: Q8_0 and Q4_0 as GGUF files hold them, and products with them.

The layouts and quantizers are those of the ``gguf`` package, bit for bit; a matrix is uint8
``[rows, cols / 32 · bytes of a block]``. A block starts with its scale d as float16. Q8_0: 32 int8
follow, 34 bytes. Q4_0: 16 bytes follow, byte j holding element j in its low and j + 16 in its high
four bits, each code minus 8 times d; 18 bytes. Source: the GGUF format of llama.cpp.
"""

from collections.abc import Callable
from typing import Any, Literal

import numpy as np

from course_lib.arrays import F32, as_float32, require_finite
from course_lib.fused import fused_multiply_add
from course_lib.quant import TINY

Kind = Literal["q8_0", "q4_0"]

BLOCK = 32
BLOCK_BYTES: dict[Kind, int] = {"q8_0": 34, "q4_0": 18}


def quantize_q8_0(w: Any) -> np.ndarray:
    """Quantize weights to Q8_0: d = max|w| / 127, code = w · (1/d), ties away from zero.

    w: real numbers [rows, cols], cols a multiple of 32. Returns uint8 [rows, cols / 32 · 34].
    The codes come from d in float32; d is then stored as float16. Raises ValueError for other
    shapes, NaN or infinity, and for a block whose d is beyond float16 (max|w| above 8.3 million).
    """
    return _quantize(w, "q8_0", _q8_0_codes)


def quantize_q4_0(w: Any) -> np.ndarray:
    """Quantize weights to Q4_0: d = (the value of largest magnitude) / -8, so that value is code 0.

    w: real numbers [rows, cols], cols a multiple of 32. Returns uint8 [rows, cols / 32 · 18].
    code = min(trunc(w · (1/d) + 8.5), 15). Raises ValueError as quantize_q8_0 (|w| above 524,000).
    """
    return _quantize(w, "q4_0", _q4_0_codes)


def dequantize_q8_0(blocks: Any) -> np.ndarray:
    """Return float32 [rows, cols], code · d, of Q8_0 blocks uint8 [rows, cols / 32 · 34].

    TypeError for another dtype; ValueError for a wrong shape or a scale that is not finite.
    """
    scales, codes = split_blocks(blocks, "q8_0")
    return _values(scales, codes.view(np.int8))


def dequantize_q4_0(blocks: Any) -> np.ndarray:
    """Return float32 [rows, cols], (code - 8) · d, of Q4_0 blocks uint8 [rows, cols / 32 · 18].

    TypeError for another dtype; ValueError for a wrong shape or a scale that is not finite.
    """
    scales, codes = split_blocks(blocks, "q4_0")
    return _values(scales, _q4_0_signed(codes))


def require_kind(kind: Any) -> None:
    """ValueError unless kind is "q8_0" or "q4_0"."""
    if kind not in tuple(BLOCK_BYTES):
        raise ValueError(f"kind {kind!r} is unknown; use one of {', '.join(BLOCK_BYTES)}.")


def split_blocks(blocks: Any, kind: Kind) -> tuple[np.ndarray, np.ndarray]:
    """Return scales float16 [rows, cols / 32] and code bytes uint8 [rows, cols / 32, 32 or 16].

    TypeError for a dtype other than uint8; ValueError for an unknown kind, a wrong shape, and for a
    scale that is NaN or infinite, naming its row.
    """
    require_kind(kind)
    blocks, size = np.asarray(blocks), BLOCK_BYTES[kind]
    if blocks.dtype != np.uint8:
        raise TypeError(f"{kind} blocks must be uint8, not {blocks.dtype}.")
    if blocks.ndim != 2 or blocks.shape[1] == 0 or blocks.shape[1] % size:
        raise ValueError(f"{kind} blocks must have shape [rows, a multiple of {size}], "
                         f"not {blocks.shape}.")
    blocks = blocks.reshape(blocks.shape[0], blocks.shape[1] // size, size)
    scales = np.ascontiguousarray(blocks[..., :2]).view("<f2")[..., 0]
    bad = ~np.isfinite(scales).all(axis=1)
    if bad.any():
        raise ValueError(f"row {int(bad.argmax())} of the {kind} blocks has a scale that is NaN or "
                         "infinite; the file is damaged or not of this kind.")
    return scales.astype(np.float16, copy=False), np.ascontiguousarray(blocks[..., 2:])


def quantize_activations(x: Any) -> tuple[np.ndarray, np.ndarray]:
    """Quantize the other factor: int8 with one scale for each 32 values, ties to even.

    x: real numbers [n, cols], cols a multiple of 32. Returns q int8 [n, cols] and scale float32
    [n, cols / 32]: with m the largest magnitude of a block (1 where that is below 1e-6),
    scale = m / 127 and q = round(x · (127 / m)). Raises ValueError for other shapes, NaN, infinity.
    """
    groups = _blocks_of(x, "x")
    m = np.abs(groups).max(axis=-1)
    m = np.where(m < TINY, F32(1), m)
    q = np.rint(groups * (F32(127) / m)[..., None]).astype(np.int8)
    return q.reshape(len(q), q.shape[1] * BLOCK), m / F32(127)


def linear_q8_0_reference(x: Any, blocks: Any) -> np.ndarray:
    """x · wᵀ for Q8_0 blocks of w, as the kernels define it and with their bits; slow.

    x: real numbers [n, cols]; blocks: uint8 [rows, cols / 32 · 34]. Returns float32 [n, rows]. x
    is quantized by quantize_activations; the sum s of a block's integer products is exact; blocks
    are added in ascending order, acc = w_scale · x_scale · s + acc with one rounding for the
    product of the scales and one for the rest (a fused multiply-add).
    """
    scales, codes = split_blocks(blocks, "q8_0")
    return _product(x, scales, codes.view(np.int8))


def linear_q4_0_reference(x: Any, blocks: Any) -> np.ndarray:
    """x · wᵀ for Q4_0 blocks uint8 [rows, cols / 32 · 18] of w, as linear_q8_0_reference."""
    scales, codes = split_blocks(blocks, "q4_0")
    return _product(x, scales, _q4_0_signed(codes))


def _product(x: Any, w_scale: np.ndarray, w: np.ndarray) -> np.ndarray:
    """w_scale float16 [rows, blocks], w int8 [rows, blocks, 32]."""
    q, x_scale = quantize_activations(x)
    if x_scale.shape[1] != w_scale.shape[1]:
        raise ValueError(f"x has {q.shape[1]} columns, the weights have "
                         f"{w_scale.shape[1] * BLOCK}.")
    q = q.reshape(*x_scale.shape, BLOCK).astype(np.int32)
    acc = np.zeros((len(q), len(w)), F32)
    with np.errstate(over="ignore", invalid="ignore", under="ignore"):
        for b in range(x_scale.shape[1]):
            total = q[:, b] @ w[:, b].astype(np.int32).T
            scale = w_scale[:, b].astype(F32) * x_scale[:, b, None]
            acc = fused_multiply_add(scale, total, acc)
    return acc


def _blocks_of(w: Any, name: str) -> np.ndarray:
    w = as_float32(w, name, 2)
    if w.shape[1] == 0 or w.shape[1] % BLOCK:
        raise ValueError(f"{name} must have rows of a multiple of {BLOCK} values, "
                         f"not shape {w.shape}.")
    require_finite(w, name)
    return w.reshape(w.shape[0], w.shape[1] // BLOCK, BLOCK)


def _quantize(w: Any, kind: Kind, codes_of: Callable[[np.ndarray], Any]) -> np.ndarray:
    groups = _blocks_of(w, "w")
    out = np.empty((*groups.shape[:2], BLOCK_BYTES[kind]), np.uint8)
    for start in range(0, len(groups), 256):  # some rows at a time: the steps need memory
        d, out[start : start + 256, :, 2:] = codes_of(groups[start : start + 256])
        with np.errstate(over="ignore", under="ignore"):
            stored = d.astype("<f2")
        bad = np.isinf(stored).any(axis=1)
        if bad.any():
            raise ValueError(f"row {start + int(bad.argmax())} of w is too large for {kind}: the "
                             "scale of a block is beyond float16's 65,504.")
        out[start : start + 256, :, :2] = stored[..., None].view(np.uint8)
    return out.reshape(len(out), out.shape[1] * out.shape[2])


def _inverse(d: np.ndarray) -> np.ndarray:
    """1 / d, and 0 for a block of zeros or so near that 1 / d overflows (as float16, d is 0)."""
    with np.errstate(divide="ignore", over="ignore"):
        inverse = F32(1) / d
    return np.where(np.isfinite(inverse), inverse, F32(0))


def _q8_0_codes(groups: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    d = np.abs(groups).max(axis=-1) / F32(127)
    y = groups * _inverse(d)[..., None]
    whole = np.trunc(y)
    # y - whole is exact, so this is right for the float below one half too.
    codes = whole + np.copysign(np.abs(y - whole) >= F32(0.5), y)
    return d, codes.astype(np.int8).view(np.uint8)


def _q4_0_codes(groups: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    largest = np.abs(groups).argmax(axis=-1)[..., None]  # the first of equals
    d = np.take_along_axis(groups, largest, axis=-1)[..., 0] / F32(-8)
    codes = np.trunc(groups * _inverse(d)[..., None] + F32(8.5))
    codes = np.minimum(codes, 15).astype(np.uint8)
    return d, codes[..., :16] | codes[..., 16:] << 4


def _q4_0_signed(codes: np.ndarray) -> np.ndarray:
    """int8 [..., 32], from -8 to 7, of uint8 [..., 16]."""
    both = np.concatenate((codes & 15, codes >> 4), axis=-1)
    return both.astype(np.int8) - np.int8(8)


def _values(scales: np.ndarray, codes: np.ndarray) -> np.ndarray:
    values = codes.astype(F32) * scales.astype(F32)[..., None]
    return values.reshape(len(values), values.shape[1] * BLOCK)
