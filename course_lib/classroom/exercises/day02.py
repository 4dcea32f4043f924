"""Public checks of day 2: reading a tensor, resident bytes of a mapping, 16-bit floats."""

from __future__ import annotations

import json
import struct
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from course_lib.classroom.exercises import Case, Exercise, Reading
from course_lib.lab.weight_file import Tensor, put_together

F32 = np.float32


def file_of(header: dict[str, Any], data: bytes, size: int | None = None, pad: int = 0) -> bytes:
    """A file's bytes from any header, also one that cannot be true; `size` is what it claims."""
    text = json.dumps(header).encode() + b" " * pad
    return struct.pack("<Q", len(text) if size is None else size) + text + data


def read_from(fn: Callable[..., Any], content: bytes, name: str) -> Any:
    """The answer called on a file that holds `content`."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "model.safetensors")
        path.write_bytes(content)
        return np.array(fn(str(path), name))


def bf16_of(*bits: int) -> bytes:
    """bf16 numbers as a file holds them."""
    return np.array(bits, "<u2").tobytes()


def _read_tensor_cases() -> list[Case]:
    six = Tensor("BF16", (2, 3), bf16_of(0x3F80, 0xC000, 0x3F00, 0x4049, 0x0000, 0x47C3))
    halves = np.array([1.5, -0.25, 1024.0, 6e-8], np.float16)
    two = put_together({"first": Tensor("F32", (3,), np.array([1, 2, 3], "<f4").tobytes()),
                        "second": Tensor("F16", (4,), halves.astype("<f2").tobytes())})
    metadata = file_of({"__metadata__": {"format": "np"},
                        "x": {"dtype": "F32", "shape": [], "data_offsets": [0, 4]}},
                       np.array([7.25], "<f4").tobytes())
    short = file_of({"x": {"dtype": "F16", "shape": [3], "data_offsets": [0, 6]}}, bytes(4))
    return [
        Case("six bf16 numbers", (put_together({"six": six}), "six"), dtype=True,
             expect=np.array([[1, -2, 0.5], [3.140625, 0, 99840]], F32)),
        Case("the second of two tensors, f16", (two, "second"), dtype=True,
             expect=halves.astype(F32)),
        Case("one number, and metadata", (metadata, "x"), dtype=True, expect=np.array(7.25, F32)),
        Case("a name that is not there", (two, "third"), raises=KeyError),
        Case("data that ends too early", (short, "x"), raises=ValueError),
    ]


def _resident_cases() -> list[Case]:
    return [
        Case("one byte", (1_000_000, [(70_000, 1)]), expect=65536),
        Case("at the end of the file", (70_000, [(69_999, 1)]), expect=8192),
        Case("two reads in one group, a third elsewhere",
             (1_000_000, [(0, 10), (60_000, 100), (700_000, 5000)]), expect=131072),
        Case("other pages", (100_000, [(16_384, 16_384)], 16_384, 1), expect=16384),
        Case("behind the file", (1000, [(900, 101)]), raises=ValueError),
    ]


def _half_cases() -> list[Case]:
    edges = np.array([65504, 65520, 2**-24, 2**-25, -0.0], F32)
    ties = np.array([0x3F808000, 0x3F818000, 0x3F808001, 0xBF807FFF], np.uint32).view(F32)
    nans = np.array([0x7FC00000, 0xFFC00001, 0x7FFFFFFF], np.uint32).view(F32)
    none = {"overflow": 0, "underflow": 0}

    def bits(*values: int) -> np.ndarray:
        return np.array(values, np.uint16)

    return [
        Case("edges of f16", (edges, "f16"), dtype=True,
             expect=(bits(0x7BFF, 0x7C00, 0x0001, 0x0000, 0x8000),
                     {"overflow": 1, "underflow": 1})),
        Case("ties in bf16", (ties, "bf16"), dtype=True,
             expect=(bits(0x3F80, 0x3F82, 0x3F81, 0xBF80), none)),
        Case("three NaN", (nans, "bf16"), dtype=True, expect=(bits(*[0x7FC0] * 3), none)),
        Case("a matrix", (np.array([[1, -2], [0.5, np.inf]], F32), "f16"), dtype=True,
             expect=(np.array([[0x3C00, 0xC000], [0x3800, 0x7C00]], np.uint16), none)),
        Case("another kind", (edges, "f8"), raises=ValueError),
    ]


EXERCISES: list[Exercise | Reading] = [
    Exercise("d02.a1", function="read_tensor", cases=_read_tensor_cases, call=read_from,
             replaces=("course_lib.lab.weight_file.read_tensor",
                       "course_lib.lab.weight_file.tensors_of",
                       "course_lib.lab.weight_file.take_apart"), seconds=3.0),
    Reading("d02.b1", parts=("huge_header", "outside", "wrong_size", "widens", "largest_header",
                             "first_number"), auto=2),
    Exercise("d02.a2", function="resident_bytes", cases=_resident_cases,
             replaces=("course_lib.lab.page_cache.resident_bytes",), seconds=3.0),
    Reading("d02.b2", parts=("reserves", "reads", "first_touch", "maps", "asks_ahead", "scratch"),
            auto=2),
    Exercise("d02.a3", function="f32_to_half", cases=_half_cases,
             replaces=("course_lib.half_floats.f32_to_half",), seconds=3.0),
    Reading("d02.b3", parts=("normal", "subnormal", "in_python", "bf16", "nan", "first_infinite",
                             "tie"), auto=2),
]
