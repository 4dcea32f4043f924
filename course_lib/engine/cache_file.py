"""The file that keeps packed weights: what is where in it, and whether one is as it should be.

A safetensors file: eight bytes with the length of the header, the header in JSON, the arrays one
after the other. Every array begins at a multiple of 4,096 bytes, so that it can be used where it is
mapped; the format knows no gaps, so arrays called padding fill them. All numbers of the header but
two checksums follow from the model's config, the kind and the fingerprint of the checkpoint.
"""

from __future__ import annotations

import json
import mmap
import os
import zlib
from io import BufferedReader
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

import course_lib
from course_lib.engine.arena import Arena
from course_lib.engine.config import ModelConfig
from course_lib.engine.weights import Slot, Weights, assemble, slots_of
from course_lib.linear import PANEL, PackedMatrix
from course_lib.memory import available
from course_lib.weight_blocks import BLOCK, Kind

FORMAT = "packed weights, version 1"
PAGE = 4096
PIECE = 1 << 24  # bytes read at a time: between two of them Ctrl-C takes effect
DTYPES: dict[str, np.dtype] = {
    "I8": np.dtype(np.int8),
    "U8": np.dtype(np.uint8),
    "F16": np.dtype("<f2"),
    "F32": np.dtype("<f4"),
}
CODES, SCALES = ".codes", ".scales"


class Stored(NamedTuple):
    """An array in the file: its type's name, its shape, and where it begins after the header."""

    dtype: str
    shape: tuple[int, ...]
    begin: int

    @property
    def nbytes(self) -> int:
        return int(np.prod(self.shape, dtype=np.int64)) * DTYPES[self.dtype].itemsize


class CacheFileError(Exception):
    """Why a file is not used: a part of a sentence."""


class Layout:
    """What the file of a model's weights holds. `arrays`: name -> Stored; `size`: bytes in all."""

    def __init__(self, config: ModelConfig, kind: Kind, fingerprint: str):
        self.config, self.kind, self.fingerprint = config, kind, fingerprint
        self.arrays: dict[str, Stored] = {}
        self._entries: dict[str, Any] = {}
        end = 0
        for slot in slots_of(config):
            for name, (dtype, shape) in arrays_of(slot, kind).items():
                if end % PAGE:
                    end = self._add(f"padding.{len(self._entries)}", "U8", (-end % PAGE,), end)
                self.arrays[name] = Stored(dtype, shape, end)
                end = self._add(name, dtype, shape, end)
        self.data = len(self.header(0, 0))
        self.size = self.data + end

    def _add(self, name: str, dtype: str, shape: tuple[int, ...], begin: int) -> int:
        end = begin + Stored(dtype, shape, begin).nbytes
        self._entries[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [begin, end]}
        return end

    def header(self, codes_sum: int, others_sum: int) -> bytes:
        """The file's first bytes, as many for any checksums."""
        facts = {
            "format": FORMAT,
            "kind": self.kind,
            "fingerprint": self.fingerprint,
            "codes_crc32": f"{codes_sum:08x}",
            "others_crc32": f"{others_sum:08x}",
            "made_by": f"course_lib {course_lib.__version__}",
        }
        text = json.dumps({"__metadata__": facts} | self._entries).encode()
        text += b" " * (-(8 + len(text)) % PAGE)
        return len(text).to_bytes(8, "little") + text

    def require(self, header: Any) -> dict[str, str]:
        """The metadata of a file's header; CacheFileError unless it is the one of this layout."""
        facts = header.pop("__metadata__", None) if isinstance(header, dict) else None
        if not isinstance(facts, dict) or facts.get("format") != FORMAT:
            raise CacheFileError("is of another format")
        if facts.get("kind") != self.kind:
            raise CacheFileError(f"does not hold {self.kind}")
        if facts.get("fingerprint") != self.fingerprint:
            raise CacheFileError("was made from another state of the checkpoint")
        if header != self._entries:
            raise CacheFileError("is of a model of another shape")
        return facts


def arrays_of(slot: Slot, kind: Kind) -> dict[str, tuple[str, tuple[int, ...]]]:
    """Name -> type and shape of what the file holds of one slot."""
    if not slot.packed:
        return {slot.name: ("F32", slot.shape)}
    panels, cols = -(-slot.shape[0] // PANEL), slot.shape[1]
    dtype, fours = ("I8", cols // 4) if kind == "q8_0" else ("U8", cols // 8)
    return {
        slot.name + CODES: (dtype, (panels, fours, PANEL, 4)),
        slot.name + SCALES: ("F16", (panels, cols // BLOCK, PANEL)),
    }


def open_file(path: Path, layout: Layout) -> Weights:
    """The weights in a file of this layout, read-only: read into memory on large pages, or mapped
    where they would take more than half of the memory that is free.

    A mapped file never gets large pages, from which a core reads a fifth faster; but its pages come
    in as they are used, and the system can drop them. While it is mapped nobody may shorten the
    file in place: the system ends a process that reads a page that is gone. Replacing it is fine.
    All is checked but the codes, which are nine tenths and more of the file and of which any bytes
    are valid; `check_codes` does that. CacheFileError for a file that is not of this layout,
    truncated or damaged.
    """
    with open(path, "rb", opener=_without_waiting) as file:
        if os.fstat(file.fileno()).st_size != layout.size:
            raise CacheFileError("is truncated or of another model")
        if int.from_bytes(file.read(8), "little") != layout.data - 8:
            raise CacheFileError("is of another format")
        try:
            header = json.loads(file.read(layout.data - 8))
        except (ValueError, RecursionError):
            raise CacheFileError("is damaged") from None
        facts = layout.require(header)
        free = available()
        small = free is None or layout.size <= free // 2
        content = read_all(file, layout.size) if small else map_all(file, layout.size)
    array = arrays_in(content, layout)
    total = 0
    for name in layout.arrays:
        if not name.endswith(CODES):
            total = zlib.crc32(array(name), total)
    if facts.get("others_crc32") != f"{total:08x}":
        raise CacheFileError("is damaged")

    def fill(slot: Slot) -> Any:
        if not slot.packed:
            return array(slot.name)
        rows, cols = slot.shape
        return PackedMatrix(rows, cols, layout.kind, array(slot.name + CODES),
                            array(slot.name + SCALES))

    return assemble(layout.config, fill)


def _without_waiting(path: str, flags: int) -> int:
    """Open a file; a pipe of that name, whose writer may never come, at once too."""
    return os.open(path, flags | os.O_NONBLOCK)


def read_all(file: BufferedReader, size: int) -> np.ndarray:
    """The bytes of an open file in memory of large pages; CacheFileError where there are fewer."""
    content = Arena(size).empty((size,), np.uint8)
    file.seek(0)
    for begin in range(0, size, PIECE):
        piece = content[begin : begin + PIECE]
        if file.readinto(piece.data) != len(piece):
            raise CacheFileError("is truncated")
    return content


def map_all(file: BufferedReader, size: int) -> np.ndarray:
    """The bytes of an open file, mapped; the system is told to read ahead, not page by page."""
    mapped = mmap.mmap(file.fileno(), size, access=mmap.ACCESS_READ)
    if hasattr(mmap, "MADV_WILLNEED"):
        mapped.madvise(mmap.MADV_WILLNEED)
    return np.frombuffer(mapped, np.uint8)


def arrays_in(content: np.ndarray, layout: Layout) -> Any:
    """A function from an array's name to that array in a file's bytes."""
    raw = content.view()
    raw.flags.writeable = False

    def array(name: str) -> np.ndarray:
        stored = layout.arrays[name]
        begin = layout.data + stored.begin
        part = raw[begin : begin + stored.nbytes].view(DTYPES[stored.dtype])
        return part.reshape(stored.shape)

    return array


def check_codes(path: Path, layout: Layout) -> None:
    """CacheFileError unless the codes in a file of this layout have their checksum; reads all."""
    with open(path, "rb", opener=_without_waiting) as file:
        file.seek(8)
        facts = layout.require(json.loads(file.read(layout.data - 8)))
        total = 0
        for name, stored in layout.arrays.items():
            if name.endswith(CODES):
                file.seek(layout.data + stored.begin)
                left = stored.nbytes
                while left:
                    piece = file.read(min(left, 1 << 22))
                    if not piece:
                        raise CacheFileError("is truncated")
                    total, left = zlib.crc32(piece, total), left - len(piece)
    if facts.get("codes_crc32") != f"{total:08x}":
        raise CacheFileError("is damaged")


class Writer:
    """Fills a file of a layout, each array in order and in pieces; then the header."""

    def __init__(self, handle: int, layout: Layout):
        self._handle, self._layout = handle, layout
        self._codes_sum = self._others_sum = 0
        if hasattr(os, "posix_fallocate"):  # a full disk says so now, not at the last layer
            os.posix_fallocate(handle, 0, layout.size)
        else:
            os.truncate(handle, layout.size)

    def write(self, name: str, offset: int, piece: np.ndarray) -> None:
        """Write a piece of an array at `offset` bytes in it."""
        data = memoryview(np.ascontiguousarray(piece).data).cast("B")
        if name.endswith(CODES):
            self._codes_sum = zlib.crc32(data, self._codes_sum)
        else:
            self._others_sum = zlib.crc32(data, self._others_sum)
        self._put(data, self._layout.data + self._layout.arrays[name].begin + offset)

    def finish(self) -> None:
        """Write the header and wait until the disk holds all: a header is never without data."""
        self._put(memoryview(self._layout.header(self._codes_sum, self._others_sum)), 0)
        os.fsync(self._handle)

    def _put(self, data: memoryview, position: int) -> None:
        while data:
            written = os.pwrite(self._handle, data, position)
            data, position = data[written:], position + written
