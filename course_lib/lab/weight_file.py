"""A .safetensors file as bytes: taken apart, one tensor read, and put together again."""

from __future__ import annotations

import json
import math
import shutil
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from course_lib.engine.safetensors_file import SafetensorsFile


class Tensor(NamedTuple):
    """A stored tensor: the name of its type in the header, its shape, its bytes."""

    dtype: str
    shape: tuple[int, ...]
    data: bytes


def read_tensor(path: str | Path, name: str) -> np.ndarray:
    """A tensor of a file as float32 of its shape; by the engine's loader, with its checks.

    Raises KeyError for a name that is not there, CourseError for a file that is damaged.
    """
    file = SafetensorsFile(Path(path))
    place = file.tensors[name]
    return file.read(name, 0, math.prod(place.shape)).reshape(place.shape)


def take_apart(raw: bytes) -> tuple[dict[str, Any], bytes]:
    """The header of a file's bytes as a dict, without its metadata, and the data behind it."""
    (size,) = struct.unpack("<Q", raw[:8])
    header = json.loads(raw[8 : 8 + size])
    header.pop("__metadata__", None)
    return header, raw[8 + size :]


def tensors_of(raw: bytes) -> dict[str, Tensor]:
    """Every tensor of a file's bytes, in the order of its data."""
    header, data = take_apart(raw)
    found = {}
    for name, entry in sorted(header.items(), key=lambda item: item[1]["data_offsets"]):
        begin, end = entry["data_offsets"]
        found[name] = Tensor(entry["dtype"], tuple(entry["shape"]), data[begin:end])
    return found


def put_together(tensors: Mapping[str, Tensor]) -> bytes:
    """The bytes of a file that holds these tensors, in this order.

    The header is padded with spaces to a multiple of 8, so that numbers begin at an address that
    their size divides. The same tensors in the same order give the same bytes.
    """
    header, at = {}, 0
    for name, tensor in tensors.items():
        header[name] = {"dtype": tensor.dtype, "shape": list(tensor.shape),
                        "data_offsets": [at, at + len(tensor.data)]}
        at += len(tensor.data)
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return struct.pack("<Q", len(text)) + text + b"".join(t.data for t in tensors.values())


def folder_with(model: Path, target: str | Path, tensors: Mapping[str, Tensor]) -> Path:
    """A checkpoint folder at `target` like `model`, with these tensors as its weights."""
    target = Path(target)
    target.mkdir(parents=True, exist_ok=True)
    for file in sorted(model.iterdir()):
        if file.suffix in (".json", ".jinja"):
            shutil.copy(file, target)
    (target / "model.safetensors").write_bytes(put_together(tensors))
    return target
