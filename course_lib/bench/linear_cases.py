"""Products with weights: one row of activations (GEMV, memory-bound) and 256 of them (GEMM)."""

from __future__ import annotations

from functools import partial
from typing import NamedTuple

import numpy as np

from course_lib.arrays import F32
from course_lib.bench.groups import Bench, Group, Kernel, Plan, Work

COLS_ROWS = ((4096, 14336), (2048, 6144))
"""Inputs and outputs: the widest product of an 8B and of a 1.7B model."""

BATCH = 256
BLOCK, PANEL = 32, 16
FORMATS = ("q8_0", "q4_0", "f32")


class Weights(NamedTuple):
    """The arrays of one weight matrix, as the kernel takes them."""

    arrays: tuple[np.ndarray, ...]


def plans() -> list[Plan]:
    """GEMV of every format and shape; GEMM of the smaller one."""
    gemv = [Plan("linear", f"gemv {form} {cols}x{rows}", partial(build, form, cols, rows, 1),
                 quick=form == "q8_0")
            for cols, rows in COLS_ROWS for form in FORMATS]
    cols, rows = COLS_ROWS[-1]
    gemm = [Plan("linear", f"gemm {form} {cols}x{rows}", partial(build, form, cols, rows, BATCH),
                 quick=form == "q8_0")
            for form in FORMATS]
    return gemv + gemm


def build(form: str, cols: int, rows: int, batch: int, bench: Bench) -> Group:
    """One product, its weights cold."""
    if form == "f32":
        bench.fill_floats()
    else:
        bench.fill_int8()
    shapes = {"f32": ((rows, cols), "float32"),
              "q8_0": ((rows // PANEL, cols // 4, PANEL, 4), "int8"),
              "q4_0": ((rows // PANEL, cols // 8, PANEL, 4), "uint8")}
    shape, dtype = shapes[form]
    nbytes = int(np.prod(shape)) * np.dtype(dtype).itemsize

    def make(offset: int) -> Weights:
        values = bench.arena.array(offset, shape, dtype)
        if form == "f32":
            return Weights((values,))
        scales = bench.rng.uniform(0.001, 0.002, (rows // PANEL, cols // BLOCK, PANEL))
        return Weights((values, scales.astype(np.float16)))

    weights = bench.arena.sets(make, nbytes)
    x = bench.normal(batch, cols)
    out = np.empty((batch, rows), F32)

    def product(kernel: Kernel) -> None:
        kernel(x, *weights.next().arrays, out)

    kind = "gemv" if batch == 1 else f"gemm{batch}"
    works = [Work(
        f"{kind}_{form} {cols}x{rows}", product, f"linear_{form}", numpy="product",
        read_bytes=sum(a.nbytes for a in weights.all[0].arrays) if batch == 1 else None,
        operations=2.0 * batch * cols * rows, peak="float" if form == "f32" else "int8")]

    def numpy_f32() -> None:
        np.matmul(x, weights.next().arrays[0].T, out=out)

    def numpy_blocks() -> None:
        codes, scales = weights.next().arrays
        if form == "q4_0":
            codes = np.stack((codes & 15, codes >> 4), axis=-1).view(np.int8) - np.int8(8)
        # The panels' order of rows and columns is left as it is: that changes no time.
        wide = codes.reshape(rows, cols // BLOCK, BLOCK) * scales.astype(F32).reshape(
            rows, cols // BLOCK, 1)
        np.matmul(x, wide.reshape(rows, cols).T, out=out)

    return Group(works, {"product": numpy_f32 if form == "f32" else numpy_blocks})
