"""对拍: two runs of what should be the same, compared bit by bit, stage by stage."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

Stages = Sequence[tuple[str, np.ndarray]]


def different_bits(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """Where two arrays of one shape and dtype differ in bits, as booleans of that shape.

    NaN equals a NaN with the same bits; 0.0 and -0.0 differ.
    """
    a, b = np.asarray(a, order="C"), np.asarray(b, order="C")
    shape = a.shape
    as_bytes = [x.reshape(-1, 1).view(np.uint8) for x in (a, b)]
    return (as_bytes[0] != as_bytes[1]).any(axis=1).reshape(shape)


def first_difference(stages_a: Stages, stages_b: Stages) -> tuple | None:
    """Name and index of the first number, in the order of computation, whose bits differ.

    Returns (name, index), index a tuple of integers; (name, None) where a stage's shape or dtype
    differs; None where all bits are equal. Raises ValueError unless both runs have the same
    stages in the same order.
    """
    if [name for name, _ in stages_a] != [name for name, _ in stages_b]:
        raise ValueError("the two runs do not have the same stages in the same order.")
    for (name, a), (_, b) in zip(stages_a, stages_b, strict=True):
        if a.shape != b.shape or a.dtype != b.dtype:
            return name, None
        wrong = different_bits(a, b)
        if wrong.any():
            return name, tuple(int(i) for i in np.argwhere(wrong)[0])
    return None
