"""The header of a GGUF file: its metadata and the table of its tensors.

Read here and not by the gguf package's GGUFReader, which takes 3 s for a vocabulary of 49,152 and
believes every length: an array that claims 2^60 bytes keeps it busy for ever. Here every length is
held against what is left of the file before anything is read.
Layout: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md
"""

from __future__ import annotations

import math
import os
import struct
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import numpy as np

from course_lib.engine.config_keys import shown
from course_lib.engine.gguf_types import KINDS, OTHER_KINDS
from course_lib.errors import CourseError

REMEDY = "copy the file again from where the model came from"
VERSIONS = (2, 3)
DEFAULT_ALIGNMENT = 32
MAX_DIMENSIONS = 4
LONGEST_NAME = 200
# Far above what models have (a vocabulary of 256,000, a tokenizer.json of 20 MB), far below memory.
MAX_ITEMS, MAX_STRING = 2**22, 2**26

STRING, ARRAY, BOOL = 8, 9, 7
NUMBERS: dict[int, str] = {
    0: "<u1", 1: "<i1", 2: "<u2", 3: "<i2", 4: "<u4", 5: "<i4", 6: "<f4", 10: "<u8", 11: "<i8",
    12: "<f8", BOOL: "?",
}
"""Number of a metadata type -> NumPy's name of it."""


class GgufTensor(NamedTuple):
    """Where and how a file holds a tensor: `shape` with the rows first, `offset` in the file."""

    kind: str
    shape: tuple[int, ...]
    offset: int
    nbytes: int


class GgufHeader(NamedTuple):
    """Metadata (numbers, strings, lists of either), and the tensors by their names in the file,
    all of which end before the file does; `size` bytes lie before the first tensor."""

    metadata: dict[str, Any]
    tensors: dict[str, GgufTensor]
    size: int


def read_header(path: Path, file: BinaryIO) -> GgufHeader:
    """The header of a GGUF file that is open at its beginning; `path` stands in errors.

    Raises CourseError naming the file and the remedy: no GGUF, another version or byte order,
    damaged, truncated, or with tensors of another type than those of `gguf_types.KINDS`.
    """
    return _Reader(path, file).header()


class _Reader:
    """Reads from the front of a file; the position never passes the end."""

    def __init__(self, path: Path, file: BinaryIO):
        self.path, self.file = path, file
        self.left = self.length = os.fstat(file.fileno()).st_size

    def header(self) -> GgufHeader:
        if self.left < 4 or self.bytes(4) != b"GGUF":
            raise CourseError(f"{self.path} is not a GGUF file: choose a model in that format")
        version = self.number("<u4")
        if version not in VERSIONS:
            big = version and not version & 0xFFFF
            what = "is in big-endian byte order" if big else f"has GGUF version {version}"
            raise CourseError(f"{self.path} {what}, readable are versions 2 and 3 in little-endian "
                              "order: convert the model again with a current llama.cpp")
        tensor_count, field_count = self.number("<u8"), self.number("<u8")
        self.fits(tensor_count, 24, "tensors")  # name length, dimensions, type, offset
        self.fits(field_count, 12, "fields of metadata")
        metadata: dict[str, Any] = {}
        for _ in range(field_count):
            key = self.name()
            if key in metadata:
                raise self.damaged(f"{key} is there twice")
            metadata[key] = self.value(self.number("<u4"), key)
        table = [self.tensor_info() for _ in range(tensor_count)]
        alignment = metadata.get("general.alignment", DEFAULT_ALIGNMENT)
        if not isinstance(alignment, int) or alignment < 1 or alignment & (alignment - 1):
            raise self.damaged(f"general.alignment is {shown(alignment)}, not a power of two")
        begin = end = -(-(self.length - self.left) // alignment) * alignment
        tensors: dict[str, GgufTensor] = {}
        for name, kind, shape, offset in table:
            if name in tensors:
                raise self.damaged(f"tensor {name} is there twice")
            tensors[name] = tensor = self.tensor(name, kind, shape, begin + offset)
            if tensor.offset != end:  # a flipped bit would have it read another one's numbers
                raise self.damaged(f"tensor {name} does not begin where the one before ends")
            end += -(-tensor.nbytes // alignment) * alignment
        return GgufHeader(metadata, tensors, begin)

    def tensor_info(self) -> tuple[str, int, tuple[int, ...], int]:
        name, dimensions = self.name(), self.number("<u4")
        if not 1 <= dimensions <= MAX_DIMENSIONS:
            raise self.damaged(f"tensor {name} has {dimensions} dimensions")
        # The file counts from the innermost dimension, NumPy from the outermost.
        shape = tuple(self.number("<u8") for _ in range(dimensions))[::-1]
        return name, self.number("<u4"), shape, self.number("<u8")

    def tensor(self, name: str, number: int, shape: tuple[int, ...], offset: int) -> GgufTensor:
        kind = KINDS.get(number)
        if kind is None:
            found = OTHER_KINDS.get(number, f"type {number}")
            raise CourseError(
                f"{self.path}: tensor {name} is stored as {found}, readable are "
                f"{', '.join(kind.name for kind in KINDS.values())}: choose a file in one of these"
            )
        count = math.prod(shape)
        if count < 1 or shape[-1] % kind.items:
            raise self.damaged(f"tensor {name} of {kind.name} has shape {list(shape)}")
        nbytes = count // kind.items * kind.nbytes
        if offset + nbytes > self.length:
            raise CourseError(
                f"{self.path} is truncated: tensor {name} ends at byte {offset + nbytes}, the file "
                f"has {self.length}: {REMEDY}"
            )
        return GgufTensor(kind.name, shape, offset, nbytes)

    def value(self, kind: int, key: str) -> Any:
        if kind == STRING:
            return self.string()
        if kind in NUMBERS:
            return self.number(NUMBERS[kind])
        if kind != ARRAY:
            raise self.damaged(f"{key} has the unknown type {kind}")
        item, count = self.number("<u4"), self.number("<u8")
        if item == STRING:
            self.fits(count, 8, f"strings in {key}")
            return [self.string() for _ in range(count)]
        if item not in NUMBERS:
            raise self.damaged(f"{key} is a list of the unknown type {item}")
        dtype = np.dtype(NUMBERS[item])
        self.fits(count, dtype.itemsize, f"numbers in {key}")
        return np.frombuffer(self.bytes(count * dtype.itemsize), dtype).tolist()

    def number(self, dtype: str) -> Any:
        return np.frombuffer(self.bytes(np.dtype(dtype).itemsize), dtype)[0].item()

    def string(self) -> str:
        (length,) = struct.unpack("<Q", self.bytes(8))
        if length > MAX_STRING:
            raise self.damaged(f"a string of {length} bytes")
        try:
            return self.bytes(length).decode("utf-8")
        except UnicodeDecodeError:
            raise self.damaged("a string is not UTF-8") from None

    def name(self) -> str:
        text = self.string()
        if not text.isprintable() or not 0 < len(text) <= LONGEST_NAME:
            raise self.damaged(f"a key or tensor is named {text[:40]!a}")
        return text

    def bytes(self, count: int) -> bytes:
        if count > self.left:
            raise self.damaged("it ends inside its header")
        data = self.file.read(count)
        self.left -= count
        if len(data) < count:  # it became shorter while being read
            raise self.damaged("it ends inside its header")
        return data

    def fits(self, count: int, least: int, what: str) -> None:
        """CourseError unless `count` things of at least so many bytes can follow."""
        if count > MAX_ITEMS or count * least > self.left:
            raise self.damaged(f"{count} {what} do not fit in it")

    def damaged(self, what: str) -> CourseError:
        return CourseError(f"{self.path} is damaged or truncated ({what}): {REMEDY}")
