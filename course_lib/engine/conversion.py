"""Weights read from a checkpoint and, where asked for, packed into blocks on the way."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from course_lib.arrays import F32
from course_lib.engine.arena import LINE, Arena
from course_lib.engine.config import ModelConfig
from course_lib.engine.tensor_source import TensorSource
from course_lib.engine.weights import (
    WEIGHT_KINDS,
    Slot,
    Weights,
    assemble,
    check_tensors,
    check_tied,
    slots_of,
)
from course_lib.errors import CourseError
from course_lib.linear import PANEL, PackedMatrix, empty_panels
from course_lib.weight_blocks import BLOCK, BLOCK_BYTES, Kind

PIECE = 1 << 20  # values converted at a time: small enough for a cache, large enough for NumPy

Progress = Callable[[int, int], None]
"""Called with bytes of weights done and of all."""


def load_weights(
    source: TensorSource,
    config: ModelConfig,
    kind: str = "f32",
    on_progress: Progress | None = None,
) -> Weights:
    """Read the weights of `source` as `kind` into memory: the result's bytes and 30 MB.

    Matrices become float32 or PackedMatrix; norm gains and routers stay float32. A tied checkpoint
    may repeat the embedding as `lm_head.weight`. `on_progress(done, total)` counts bytes of the
    result. Raises CourseError naming the file, the tensor and the remedy: tensor missing, unknown,
    of another shape, NaN or infinite, with rows that do not divide into blocks or values too large
    for them; ValueError for an unknown kind.
    """
    check_kind(kind)
    check_tensors(source, config)
    check_columns(source, config, kind)
    check_tied(source, config)
    count = Counter(config, kind, on_progress)
    arena = Arena(count.total + 2 * LINE * len(slots_of(config)))

    def fill(slot: Slot) -> Any:
        if not slot.packed:
            array = source.read(slot.tensors[0])
            count.add(array.nbytes)
            return array
        return f32_matrix(slot) if kind == "f32" else packed_matrix(slot)

    def f32_matrix(slot: Slot) -> np.ndarray:
        matrix = arena.empty(slot.shape, F32)
        for first, rows in pieces_f32(source, slot):
            matrix[first : first + len(rows)] = rows
            count.add(rows.nbytes)
        return matrix

    def packed_matrix(slot: Slot) -> PackedMatrix:
        codes, scales = empty_panels(slot.shape, kind, arena.empty)  # type: ignore[arg-type]
        for first, piece in pieces_packed(source, slot, kind):  # type: ignore[arg-type]
            codes[first : first + len(piece.codes)] = piece.codes
            scales[first : first + len(piece.scales)] = piece.scales
            count.add(piece.nbytes)
        rows, cols = slot.shape
        return PackedMatrix(rows, cols, kind, codes, scales)  # type: ignore[arg-type]

    return assemble(config, fill)


class Counter:
    """Tells `on_progress` how many of a model's bytes are done."""

    def __init__(self, config: ModelConfig, kind: str, on_progress: Progress | None):
        self.total = weight_bytes(config, kind)
        self.done = 0
        self._tell = on_progress

    def add(self, bytes_done: int) -> None:
        self.done += bytes_done
        if self._tell is not None:
            self._tell(self.done, self.total)


def weight_bytes(config: ModelConfig, kind: str) -> int:
    """Bytes of all arrays of a model's weights as `kind`; a tied embedding counts once."""
    return sum(slot_bytes(slot, kind) for slot in slots_of(config))


def slot_bytes(slot: Slot, kind: str) -> int:
    """Bytes of one array, the padding of its last panel included."""
    if slot.packed and kind != "f32":
        blocks = -(-slot.shape[0] // PANEL) * PANEL * (slot.shape[1] // BLOCK)
        return blocks * BLOCK_BYTES[kind]  # type: ignore[index]
    return 4 * int(np.prod(slot.shape, dtype=np.int64))


def pieces_f32(source: TensorSource, slot: Slot) -> Iterator[tuple[int, np.ndarray]]:
    """The rows of a matrix, some at a time: (first row, float32 `[rows, columns]`)."""
    start, step = 0, max(1, PIECE // slot.shape[1])
    for tensor in slot.tensors:
        rows = source.stored[tensor].shape[0]
        for first in range(0, rows, step):
            last = min(first + step, rows)
            yield start + first, source.read_rows(tensor, first, last)
        start += rows


def pieces_packed(
    source: TensorSource, slot: Slot, kind: Kind
) -> Iterator[tuple[int, PackedMatrix]]:
    """The panels of a matrix, some at a time: (first panel, the rows of these panels).

    A tensor that the file stores in blocks of this kind keeps its blocks; of others the values are
    quantized.
    """
    stored = {tensor: source.blocks(tensor, kind) for tensor in slot.tensors}
    step = max(1, PIECE // (PANEL * slot.shape[1])) * PANEL
    for first in range(0, slot.shape[0], step):
        parts = list(spans(source, slot, first, min(first + step, slot.shape[0])))
        if any(stored[tensor] is not None for tensor, _, _ in parts):
            yield first // PANEL, from_blocks(source, parts, stored, kind)
        else:
            values = [source.read_rows(*part) for part in parts]
            joined = values[0] if len(values) == 1 else np.concatenate(values)
            yield first // PANEL, quantized(source, parts[0][0], joined, kind)


def spans(
    source: TensorSource, slot: Slot, first: int, last: int
) -> Iterator[tuple[str, int, int]]:
    """Which rows of which tensors rows first … last - 1 of a matrix are: (tensor, begin, end)."""
    for tensor in slot.tensors:
        rows = source.stored[tensor].shape[0]
        begin, end = max(first, 0), min(last, rows)
        if begin < end:
            yield tensor, begin, end
        first, last = first - rows, last - rows


def from_blocks(
    source: TensorSource,
    parts: list[tuple[str, int, int]],
    stored: dict[str, np.ndarray | None],
    kind: Kind,
) -> PackedMatrix:
    """Rows of tensors of which one or more are stored in blocks of this kind."""
    blocks = []
    for tensor, begin, end in parts:
        kept = stored[tensor]
        blocks.append(
            quantized(source, tensor, source.read_rows(tensor, begin, end), kind).to_blocks()
            if kept is None else kept[begin:end])
    try:
        return PackedMatrix.from_blocks(np.concatenate(blocks), kind)
    except ValueError:
        raise CourseError(
            f"{source.path}: tensor {parts[0][0]} has a scale that is NaN or infinite: copy the "
            "file again from where the checkpoint came from"
        ) from None


def quantized(source: TensorSource, tensor: str, values: np.ndarray, kind: Kind) -> PackedMatrix:
    """Rows of a tensor packed; CourseError for values that are beyond the kind's scales."""
    try:
        return PackedMatrix.quantize(values, kind)
    except ValueError:
        raise CourseError(
            f"{source.path}: tensor {tensor} holds values up to {np.abs(values).max():.3g}, too "
            f"large for {kind}: load the weights as f32, or choose another checkpoint"
        ) from None


def check_kind(kind: str) -> None:
    """ValueError unless `kind` is one of WEIGHT_KINDS."""
    if kind not in WEIGHT_KINDS:
        raise ValueError(f"weights must be one of {', '.join(WEIGHT_KINDS)}, not {kind!r}")


def check_columns(source: TensorSource, config: ModelConfig, kind: str) -> None:
    """CourseError unless the rows of every matrix divide into blocks."""
    if kind == "f32":
        return
    for slot in slots_of(config):
        if slot.packed and slot.shape[1] % BLOCK:
            raise CourseError(
                f"{source.path}: tensor {slot.tensors[0]} has rows of {slot.shape[1]} values, "
                f"{kind} needs a multiple of {BLOCK}: load the weights as f32"
            )
