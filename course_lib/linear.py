"""Products of activations with weight matrices, float32 or packed blocks, by the best kernel."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from course_lib import backend
from course_lib.arrays import F32, as_float32, require_finite, whole_number
from course_lib.weight_blocks import (
    BLOCK,
    BLOCK_BYTES,
    Kind,
    dequantize_q4_0,
    dequantize_q8_0,
    linear_q4_0_reference,
    linear_q8_0_reference,
    quantize_q4_0,
    quantize_q8_0,
    require_kind,
    split_blocks,
)

PANEL = 16  # rows that lie together, so that the lanes of a vector are outputs


def empty_panels(shape: tuple[int, ...], kind: Kind,
                 empty: Callable[..., np.ndarray] = np.empty) -> tuple[np.ndarray, np.ndarray]:
    """Return codes and scales of a PackedMatrix of ``shape`` [rows, cols], yet to be written.

    empty(shape, dtype): where their memory comes from.
    """
    panels, cols = -(-shape[0] // PANEL), shape[1]
    dtype, fours = (np.int8, cols // 4) if kind == "q8_0" else (np.uint8, cols // 8)
    return (empty((panels, fours, PANEL, 4), dtype),
            empty((panels, cols // BLOCK, PANEL), np.float16))


@dataclass(frozen=True, eq=False)
class PackedMatrix:
    """A Q8_0 or Q4_0 matrix [rows, cols] in the order in which the kernels read it.

    Rows lie in panels of 16, the last padded with zeros. codes: for "q8_0" int8
    [panels, cols / 4, 16, 4], for "q4_0" uint8 [panels, cols / 8, 16, 4]: four columns of row 0,
    the same four of row 1, …; of a Q4_0 byte the low half is column j of a block and the high half
    j + 16. scales: float16 [panels, cols / 32, 16]. TypeError for arrays of another dtype,
    ValueError for an unknown kind, sizes and shapes that do not belong together, arrays that are
    not C-contiguous, and a scale that is NaN or infinite.
    """

    rows: int
    cols: int
    kind: Kind
    codes: np.ndarray
    scales: np.ndarray

    def __post_init__(self) -> None:
        require_kind(self.kind)
        for name in ("rows", "cols"):
            object.__setattr__(self, name, whole_number(getattr(self, name), name))
        if self.rows < 0 or self.cols < BLOCK or self.cols % BLOCK:
            raise ValueError(f"a matrix in blocks of {BLOCK} has a multiple of {BLOCK} columns, "
                             f"not shape ({self.rows}, {self.cols}).")
        panels, fours = -(-self.rows // PANEL), self.cols // (4 if self.kind == "q8_0" else 8)
        for name, dtype, shape in (
                ("codes", np.int8 if self.kind == "q8_0" else np.uint8, (panels, fours, PANEL, 4)),
                ("scales", np.float16, (panels, self.cols // BLOCK, PANEL))):
            array = getattr(self, name)
            if not isinstance(array, np.ndarray) or array.dtype != dtype:
                found = getattr(array, "dtype", type(array).__name__)
                raise TypeError(f"{name} of {self.kind} must be an array of {np.dtype(dtype)}, "
                                f"not {found}.")
            if array.shape != shape or not array.flags.c_contiguous:
                raise ValueError(f"{name} of {self.kind} {self.rows} x {self.cols} must be "
                                 f"C-contiguous of shape {shape}, not {array.shape}.")
        if not np.isfinite(self.scales).all():
            raise ValueError("scales holds NaN or infinity.")

    @classmethod
    def from_blocks(cls, blocks: Any, kind: Kind) -> "PackedMatrix":
        """Pack GGUF blocks uint8 [rows, bytes]. ValueError for a shape or scale that is wrong."""
        scales, codes = split_blocks(blocks, kind)
        rows, count, size = codes.shape
        padding = -rows % PANEL
        if padding:
            scales = np.concatenate((scales, np.zeros((padding, count), np.float16)))
            codes = np.concatenate((codes, np.zeros((padding, count, size), np.uint8)))
        panels = (rows + padding) // PANEL
        fours = codes.reshape(panels, PANEL, count * size).view(np.int32).transpose(0, 2, 1)
        packed = np.ascontiguousarray(fours).view(np.int8 if kind == "q8_0" else np.uint8)
        packed = packed.reshape(panels, count * size // 4, PANEL, 4)
        scales = scales.reshape(panels, PANEL, count).transpose(0, 2, 1)
        return cls(rows, count * BLOCK, kind, packed, np.ascontiguousarray(scales))

    @classmethod
    def quantize(cls, w: Any, kind: Kind = "q8_0") -> "PackedMatrix":
        """Quantize and pack w [rows, cols]; ValueError as quantize_q8_0, or an unknown kind."""
        require_kind(kind)
        w = as_float32(w, "w", 2)
        compiled = backend.kernel(f"pack_{kind}")
        if compiled is not None and w.shape[1] and w.shape[1] % BLOCK == 0:
            codes, scales = empty_panels(w.shape, kind)
            try:
                compiled(np.ascontiguousarray(w), codes, scales)
            except ValueError:  # a value that the function below names
                pass
            else:
                return cls(w.shape[0], w.shape[1], kind, codes, scales)
        return cls.from_blocks({"q8_0": quantize_q8_0, "q4_0": quantize_q4_0}[kind](w), kind)

    @property
    def nbytes(self) -> int:
        """Bytes of codes and scales, padding included."""
        return self.codes.nbytes + self.scales.nbytes

    def to_blocks(self) -> np.ndarray:
        """Return the GGUF blocks uint8 [rows, bytes] that were packed."""
        return self._blocks_of(np.arange(self.rows))

    def _blocks_of(self, ids: np.ndarray) -> np.ndarray:
        panel, lane = np.divmod(ids, PANEL)
        count, size = self.cols // BLOCK, BLOCK_BYTES[self.kind] - 2
        fours = self.codes.view(np.int32)[panel, :, lane, 0]
        codes = fours.view(np.uint8).reshape(len(ids), count, size)
        scales = self.scales[panel, :, lane].astype("<f2").reshape(len(ids), count, 1)
        blocks = np.concatenate((scales.view(np.uint8), codes), axis=-1)
        return blocks.reshape(len(ids), count * (size + 2))

    def take(self, ids: Any) -> np.ndarray:
        """Return the values of some rows, float32 [len(ids), cols], in time that depends on them
        alone; IndexError unless ids are integers 0 ... rows - 1."""
        ids = np.asarray(ids)
        if ids.ndim != 1 or (ids.size and ids.dtype.kind not in "iu"):
            raise IndexError("ids must be a list of row numbers.")
        if ids.size and not 0 <= ids.min() <= ids.max() < self.rows:
            raise IndexError(f"ids must be row numbers 0 to {self.rows - 1}.")
        return self._dequantized(self._blocks_of(ids.astype(np.int64)))

    def dequantize(self) -> np.ndarray:
        """Return the values, float32 [rows, cols]."""
        return self._dequantized(self.to_blocks())

    def _dequantized(self, blocks: np.ndarray) -> np.ndarray:
        return {"q8_0": dequantize_q8_0, "q4_0": dequantize_q4_0}[self.kind](blocks)


def linear(x: Any, w: Any) -> np.ndarray:
    """x · wᵀ: x real numbers [..., cols], w float32 [rows, cols] or a PackedMatrix of that shape.

    Returns float32 [..., rows]. For a PackedMatrix x is quantized to int8 in blocks of 32 (see
    weight_blocks). A row of x gives the same bits alone and among others, on every kernel and
    number of threads, as long as the result is finite. Without compiled kernels a PackedMatrix
    gives the same bits too, slowly, but float32 weights are left to NumPy's ``x @ w.T``, whose
    bits depend on the machine and on the number of rows. Raises TypeError for other weights and
    ValueError for shapes that do not belong together, float32 weights that are not C-contiguous,
    and NaN or infinity in x.
    """
    x = as_float32(x, "x")
    rows, cols = (w.rows, w.cols) if isinstance(w, PackedMatrix) else _checked_shape(w)
    if x.ndim == 0 or x.shape[-1] != cols:
        raise ValueError(f"x must have {cols} columns, as the weights have, not shape {x.shape}.")
    flat = np.ascontiguousarray(x)
    if x.ndim != 2:
        flat = flat.reshape(math.prod(x.shape[:-1]), cols)
    out = np.empty((len(flat), rows), F32)
    try:
        _fill(out, flat, w)
    except ValueError:
        require_finite(x, "x")
        raise
    return out if x.ndim == 2 else out.reshape(*x.shape[:-1], rows)


def _checked_shape(w: Any) -> tuple[int, ...]:
    if not isinstance(w, np.ndarray) or w.dtype != F32 or w.ndim != 2:
        found = f"{w.dtype} {w.shape}" if isinstance(w, np.ndarray) else type(w).__name__
        raise TypeError(f"w must be a float32 array [rows, cols] or a PackedMatrix, not {found}.")
    return w.shape


def _fill(out: np.ndarray, x: np.ndarray, w: Any) -> None:
    packed = isinstance(w, PackedMatrix)
    compiled = backend.kernel(f"linear_{w.kind}" if packed else "linear_f32")
    if compiled is not None and packed:
        compiled(x, w.codes, w.scales, out)
    elif compiled is not None:
        compiled(x, w, out)
    elif packed:
        product = {"q8_0": linear_q8_0_reference, "q4_0": linear_q4_0_reference}[w.kind]
        out[...] = product(x, w.to_blocks())
    else:
        require_finite(x, "x")
        np.matmul(x, w.T, out=out)
