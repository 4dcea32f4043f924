"""Tensors of a Hugging Face folder: `model.safetensors`, memory-mapped."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import numpy as np
from safetensors import SafetensorError, safe_open

from course_lib.engine.files import is_there, require_file
from course_lib.engine.tensor_source import Stored
from course_lib.errors import CourseError
from course_lib.weight_blocks import Kind

REMEDY = "copy the file again from where the checkpoint came from"

# NumPy has no bfloat16: its 16 bits are read as integers and become the high half of a float32.
STORED_AS: dict[str, np.dtype] = {
    "F32": np.dtype("<f4"),
    "F16": np.dtype("<f2"),
    "BF16": np.dtype("<u2"),
}


class SafetensorsSource:
    """The TensorSource of a folder; F32, F16 and BF16 tensors are read.

    Raises CourseError naming the file, the tensor and the remedy where something is absent,
    damaged or of another type.
    """

    def __init__(self, folder: Path):
        self.path = folder / "model.safetensors"
        self.stored = _stored_tensors(self.path)
        with open(self.path, "rb") as file:
            header_size = int.from_bytes(file.read(8), "little")
            self._header = json.loads(file.read(header_size))
        self._raw = np.memmap(self.path, dtype=np.uint8, mode="r", offset=8 + header_size)

    def read(self, name: str) -> np.ndarray:
        entry = self._header[name]
        if entry["dtype"] not in STORED_AS:
            raise CourseError(
                f"{self.path}: tensor {name} is stored as {entry['dtype']}, readable are "
                f"{', '.join(STORED_AS)}: choose an unquantized checkpoint"
            )
        begin, end = entry["data_offsets"]
        stored = self._raw[begin:end].view(STORED_AS[entry["dtype"]])
        if entry["dtype"] == "BF16":
            bits: np.ndarray = stored.astype(np.uint32) << np.uint32(16)
            values = bits.view(np.float32)
        else:
            values = stored.astype(np.float32)
        if not np.isfinite(values).all():
            raise CourseError(f"{self.path}: tensor {name} holds NaN or infinity: {REMEDY}")
        return values.reshape(entry["shape"])

    def blocks(self, name: str, kind: Kind) -> np.ndarray | None:
        return None

    def fingerprint(self) -> str:
        facts = self.path.stat()
        return hashlib.sha256(
            f"{facts.st_size} {facts.st_mtime_ns} {json.dumps(self._header)}".encode()).hexdigest()


def _stored_tensors(path: Path) -> dict[str, Stored]:
    """Tensor name -> how it is stored; the safetensors package checks the file's layout."""
    index = path.with_name(path.name + ".index.json")
    if not is_there(path) and is_there(index):
        raise CourseError(
            f"{path} is missing and {index.name} says that the checkpoint is split into "
            "several files: choose a checkpoint with one model.safetensors, or save it as one"
        )
    require_file(path, remedy=REMEDY)
    try:
        with safe_open(str(path), framework="np") as file:
            return {
                name: Stored(file.get_slice(name).get_dtype(),
                             tuple(file.get_slice(name).get_shape()))
                for name in file.keys()
            }
    except (SafetensorError, OSError, ValueError) as error:
        raise CourseError(f"{path} is damaged or truncated ({error}): {REMEDY}") from None
