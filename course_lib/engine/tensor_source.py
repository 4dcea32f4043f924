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
    """The tensors of a checkpoint under the names that Hugging Face gives them.

    Nothing is read before it is asked for, and nothing that was read is kept. `path`: the file or
    folder that errors name. `stored`: every tensor there.
    """

    path: Path
    stored: dict[str, Stored]

    def read(self, name: str) -> np.ndarray:
        """A tensor as finite float32 of its stored shape; CourseError naming file and tensor."""
        ...

    def blocks(self, name: str, kind: Kind) -> np.ndarray | None:
        """A matrix as uint8 blocks `[rows, bytes]` where the file stores it in that very kind."""
        ...

    def fingerprint(self) -> str:
        """Hex digits that change when the checkpoint does."""
        ...
