"""What a checkpoint's tensors come from: one interface over safetensors and GGUF files."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple, Protocol

import numpy as np

from course_lib.weight_blocks import Kind


class Stored(NamedTuple):
    """How a file holds a tensor: the name of its type there, and its shape."""

    dtype: str
    shape: tuple[int, ...]


class TensorSource(Protocol):
    """The tensors of a checkpoint under the names that Hugging Face gives those of Qwen3 and Llama.

    Nothing is read before it is asked for, and nothing that was read is kept. `path`: the file or
    folder that errors name. `stored`: every tensor there.
    """

    path: Path
    stored: dict[str, Stored]

    def read(self, name: str) -> np.ndarray:
        """A tensor as finite float32 of its stored shape; CourseError naming file and tensor."""
        ...

    def read_rows(self, name: str, first: int, last: int) -> np.ndarray:
        """Rows first … last - 1 of a matrix as finite float32 `[last - first, columns]`.

        So a large matrix is read in pieces. CourseError as `read`; ValueError unless the tensor
        has two dimensions and 0 <= first <= last <= rows.
        """
        ...

    def blocks(self, name: str, kind: Kind) -> np.ndarray | None:
        """A matrix as uint8 blocks `[rows, bytes]` where the file stores it in that very kind."""
        ...

    def fingerprint(self) -> str:
        """Hex digits that change when the checkpoint does."""
        ...


def check_rows(stored: Stored, name: str, first: int, last: int) -> None:
    """ValueError unless `first` … `last` are rows of a stored matrix."""
    if len(stored.shape) != 2:
        raise ValueError(f"{name} has shape {list(stored.shape)}: only a matrix has rows")
    if not 0 <= first <= last <= stored.shape[0]:
        raise ValueError(f"{name} has rows 0 … {stored.shape[0]}, not {first} … {last}")
