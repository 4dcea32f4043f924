"""Arrays as kernels must refuse them, or must not write to them."""

from __future__ import annotations

import numpy as np


def read_only(array: np.ndarray) -> np.ndarray:
    """A copy that may not be written to."""
    array = array.copy()
    array.flags.writeable = False
    return array


def misaligned(array: np.ndarray) -> np.ndarray:
    """A copy that begins one byte beside where its dtype may begin."""
    memory = np.empty(array.nbytes + 1, np.uint8)[1:]
    memory[...] = np.frombuffer(array.tobytes(), np.uint8)
    return memory.view(array.dtype).reshape(array.shape)
