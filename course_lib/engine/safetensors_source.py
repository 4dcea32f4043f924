"""Tensors of a Hugging Face folder: model.safetensors, or the shards that an index names."""

from __future__ import annotations

import hashlib
import math
from pathlib import Path

import numpy as np

from course_lib.engine.files import is_there, read_bytes
from course_lib.engine.fingerprint import PAGES
from course_lib.engine.safetensors_file import REMEDY, SafetensorsFile, stored_tensors
from course_lib.engine.safetensors_index import open_weights
from course_lib.engine.tensor_names import parts_of
from course_lib.engine.tensor_source import Stored, check_rows
from course_lib.errors import CourseError
from course_lib.weight_blocks import Kind


class SafetensorsSource:
    """The TensorSource of a folder; F32, F16 and BF16 tensors are read.

    Each file is opened once, and a tensor is copied from it in small pieces: a read needs its
    result's memory and 1 MB, for a matrix that is stored transposed a second copy. Raises
    CourseError naming the file, the tensor and the remedy where something is absent, damaged, of
    another type, NaN or infinite.
    """

    def __init__(self, folder: Path):
        self._folder = folder
        self.path, self._files = open_weights(folder)
        self._file_of = {name: file for file in self._files for name in file.tensors}
        found: dict[str, Stored] = {}
        for file in self._files:
            found |= stored_tensors(file)
        try:
            self._parts = parts_of(found)
        except ValueError as error:
            raise CourseError(f"{self.path} holds a tensor twice ({error}): {REMEDY}") from None
        self.stored = {
            name: Stored(found[part.tensor].dtype, part.shape)
            for name, part in self._parts.items()
        }

    def read(self, name: str) -> np.ndarray:
        part = self._parts[name]
        if part.stride is not None:
            return self.read_rows(name, 0, part.shape[0])
        values = self._file_of[part.tensor].read(part.tensor, part.start, math.prod(part.shape))
        return values.reshape(part.shape)

    def read_rows(self, name: str, first: int, last: int) -> np.ndarray:
        check_rows(self.stored[name], name, first, last)
        part = self._parts[name]
        file: SafetensorsFile = self._file_of[part.tensor]
        columns = part.shape[1]
        if part.stride is None:
            start = part.start + first * columns
            values = file.read(part.tensor, start, (last - first) * columns)
            return values.reshape(last - first, columns)
        matrix = part.start // part.stride * part.stride  # its first stored row
        column = part.start - matrix + first
        rows = file.read(part.tensor, matrix, columns * part.stride).reshape(columns, part.stride)
        return np.ascontiguousarray(rows[:, column : column + last - first].T)

    def blocks(self, name: str, kind: Kind) -> np.ndarray | None:
        return None

    def fingerprint(self) -> str:
        """Hex digits from config.json, and of each file: header, size, time of change, 64 pages.

        The pages, 4 KiB each and fewer per file of a sharded checkpoint, are at even distances.
        """
        digest = hashlib.sha256()
        config = self._folder / "config.json"
        if is_there(config):
            digest.update(read_bytes(config, remedy=REMEDY))
        for file in self._files:
            file.add_to(digest, max(2, PAGES // len(self._files)))
        return digest.hexdigest()
