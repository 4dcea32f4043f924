"""One open .safetensors file: where its tensors lie, and reading any part of one as float32."""

from __future__ import annotations

import hashlib
import json
import math
import os
import threading
import weakref
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from safetensors import SafetensorError, safe_open

from course_lib.engine.files import one_line, require_file
from course_lib.engine.fingerprint import add_sample
from course_lib.engine.tensor_source import Stored
from course_lib.errors import CourseError

REMEDY = "copy the file again from where the checkpoint came from"
# NumPy has no bfloat16: its 16 bits are read as integers and become the high half of a float32.
READ_AS: dict[str, np.dtype] = {
    "F32": np.dtype("<f4"),
    "F16": np.dtype("<f2"),
    "BF16": np.dtype("<u2"),
}
# Numbers that are converted at once: little enough for a CPU's cache, so a read needs no memory
# to speak of besides its result.
PIECE = 1 << 18
LONGEST_NAME = 200
# Some 150 bytes for each of 36,000 tensors (94 layers of 128 experts) are 5 MiB.
LARGEST_HEADER = 32 << 20


class Place(NamedTuple):
    """Where a tensor lies: its type, shape and first byte in the file."""

    dtype: str
    shape: tuple[int, ...]
    offset: int


class SafetensorsFile:
    """A .safetensors file, opened once; reading copies, so nothing is mapped.

    A mapped file that another program cuts short would end this one with SIGBUS; a read of it
    ends in a CourseError. Raises CourseError naming the file, the tensor and the remedy where
    something is absent, damaged or of a type that is not read.
    """

    def __init__(self, path: Path):
        self.path = path
        require_file(path, remedy=REMEDY)
        try:
            self._file = open(path, "rb", buffering=0)
        except OSError as error:
            raise CourseError(f"{path} cannot be read ({error.strerror}): {REMEDY}") from None
        weakref.finalize(self, self._file.close)
        self._lock = threading.Lock()
        size = int.from_bytes(self._read_bytes(0, 8, "the header"), "little")
        if size > LARGEST_HEADER:
            raise CourseError(f"{path} is damaged (its header would have {size} bytes): {REMEDY}")
        self._check_layout()
        self.data_offset = 8 + size
        self.header = bytes(self._read_bytes(8, size, "the header"))
        self.tensors = self._places()

    def _check_layout(self) -> None:
        """Sizes, gaps, overlaps: the safetensors package knows what a header may say."""
        try:
            with safe_open(str(self.path), framework="np"):
                pass
        except (SafetensorError, OSError, ValueError, OverflowError) as error:
            raise CourseError(
                f"{self.path} is damaged or truncated ({one_line(error)}): {REMEDY}"
            ) from None

    def add_to(self, digest: hashlib._Hash, pages: int) -> None:
        """Add name, header, size, time of change and some pages of the file to `digest`."""
        digest.update(f"{self.path.name} {len(self.header)}\n".encode() + self.header)
        try:
            with self._lock:
                add_sample(digest, self._file, pages)
        except OSError as error:
            raise CourseError(f"{self.path} cannot be read ({error.strerror}): {REMEDY}") from None

    def read(self, name: str, start: int, count: int) -> np.ndarray:
        """Numbers start … start + count - 1 of a tensor in the file's order, finite float32."""
        place = self.tensors[name]
        if place.dtype not in READ_AS:
            raise CourseError(
                f"{self.path}: tensor {name} is stored as {place.dtype}, readable are "
                f"{', '.join(READ_AS)}: choose an unquantized checkpoint"
            )
        stored_as = READ_AS[place.dtype]
        values = np.empty(count, np.float32)
        raw = np.empty(min(count, PIECE), stored_as)
        for first in range(0, count, PIECE):
            piece = values[first : first + PIECE]
            part = raw[: len(piece)]
            at = place.offset + (start + first) * stored_as.itemsize
            self._fill(part.view(np.uint8).data, at, f"tensor {name}")
            if place.dtype == "BF16":
                np.left_shift(part, np.uint32(16), out=piece.view(np.uint32), dtype=np.uint32)
            else:
                piece[:] = part
            if not np.isfinite(piece).all():
                raise CourseError(f"{self.path}: tensor {name} holds NaN or infinity: {REMEDY}")
        return values

    def _places(self) -> dict[str, Place]:
        """Name -> place of every tensor; the file may have been replaced since it was checked."""
        available = self._size() - self.data_offset
        try:
            entries = json.loads(self.header)
            entries.pop("__metadata__", None)
            return {name: self._place(name, entry, available) for name, entry in entries.items()}
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
            raise CourseError(
                f"{self.path} is damaged, its header cannot be read ({one_line(error)}): {REMEDY}"
            ) from None

    def _place(self, name: str, entry: dict[str, Any], available: int) -> Place:
        if not name.isprintable() or len(name) > LONGEST_NAME:
            raise ValueError(f"a tensor is named {name[:40]!a}")
        begin, end = entry["data_offsets"]
        shape = tuple(entry["shape"])
        if not 0 <= begin <= end <= available or any(size < 0 for size in shape):
            raise ValueError(f"tensor {name} lies outside the file")
        stored_as = READ_AS.get(entry["dtype"])
        if stored_as is not None and end - begin != math.prod(shape) * stored_as.itemsize:
            raise ValueError(f"tensor {name} has {end - begin} bytes for shape {list(shape)}")
        return Place(entry["dtype"], shape, self.data_offset + begin)

    def _size(self) -> int:
        return os.fstat(self._file.fileno()).st_size

    def _read_bytes(self, offset: int, count: int, what: str) -> bytearray:
        if count > self._size():  # before memory for a header that cannot be there
            raise CourseError(f"{self.path} is damaged or truncated (at {what}): {REMEDY}")
        data = bytearray(count)
        self._fill(memoryview(data), offset, what)
        return data

    def _fill(self, target: memoryview, offset: int, what: str) -> None:
        """Fill `target` with the bytes from `offset` on."""
        try:
            with self._lock:
                self._file.seek(offset)
                while target:
                    got = self._file.readinto(target)
                    if not got:
                        raise CourseError(
                            f"{self.path} is damaged or truncated (at {what}): {REMEDY}"
                        )
                    target = target[got:]
        except OSError as error:
            raise CourseError(
                f"{self.path} cannot be read ({error.strerror}, at {what}): {REMEDY}"
            ) from None


def stored_tensors(file: SafetensorsFile) -> dict[str, Stored]:
    """Name -> type and shape of every tensor of a file."""
    return {name: Stored(place.dtype, place.shape) for name, place in file.tensors.items()}
