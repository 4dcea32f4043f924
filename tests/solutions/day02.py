"""Solutions of day 2: one function per A item, one model answer with rubric per B item."""

from __future__ import annotations

import json
import math

import numpy as np


def read_tensor(path, name):
    with open(path, "rb") as file:
        raw = file.read()
    size = int.from_bytes(raw[:8], "little")
    if 8 + size > len(raw):
        raise ValueError("the header is longer than the file")
    header = json.loads(raw[8 : 8 + size])
    header.pop("__metadata__", None)
    entry = header[name]
    data = raw[8 + size :]
    begin, end = entry["data_offsets"]
    if not 0 <= begin <= end <= len(data):
        raise ValueError("the offsets are not inside the data")
    width = {"F32": 4, "F16": 2, "BF16": 2}.get(entry["dtype"])
    if width is None:
        raise ValueError(f"dtype {entry['dtype']} is not read")
    if end - begin != math.prod(entry["shape"]) * width or min(entry["shape"], default=0) < 0:
        raise ValueError("shape and offsets do not fit")
    part = data[begin:end]
    if entry["dtype"] == "BF16":
        values = (np.frombuffer(part, "<u2").astype(np.uint32) << 16).view(np.float32)
    else:
        stored_as = {"F32": "<f4", "F16": "<f2"}[entry["dtype"]]
        values = np.frombuffer(part, stored_as).astype(np.float32)
    return values.reshape(entry["shape"])


def resident_bytes(size, accesses, page=4096, around=16):
    if page < 1 or around < 1:
        raise ValueError("page and around begin at 1")
    groups = set()
    for offset, length in accesses:
        if offset < 0 or length < 0 or offset + length > size:
            raise ValueError("not inside the file")
        if length:
            first, last = offset // page // around, (offset + length - 1) // page // around
            groups |= set(range(first, last + 1))
    pages = -(-size // page)
    return sum(min(around, pages - group * around) for group in groups) * page


def f32_to_half(x, kind):
    bits = x.view(np.uint32)
    size = bits & np.uint32(0x7FFFFFFF)
    if kind == "f16":
        with np.errstate(over="ignore", invalid="ignore"):
            half = x.astype(np.float16).view(np.uint16)
        nan, infinite = 0x7E00, 0x7C00
    elif kind == "bf16":
        odd = bits >> np.uint32(16) & np.uint32(1)
        half = (bits + np.uint32(0x7FFF) + odd >> np.uint32(16)).astype(np.uint16)
        nan, infinite = 0x7FC0, 0x7F80
    else:
        raise ValueError(f"unknown kind {kind!r}")
    half = np.where(size > 0x7F800000, np.uint16(nan), half)
    small = half & np.uint16(0x7FFF)
    return half, {"overflow": int(((small == infinite) & (size < 0x7F800000)).sum()),
                  "underflow": int(((small == 0) & (size > 0)).sum())}


ANSWERS = {
    "d02.b1": "A header of 2^60 bytes is caught by the constant before anything is read. One of "
    "999 bytes passes the constant; the package sees that the file is shorter, and _read_bytes "
    "compares once more before memory is reserved, for the file may have been replaced. The "
    "constant alone would let a small file ask for 32 MiB, the file's size alone would let a "
    "large file ask for gigabytes of header. Offsets and shape are checked for each tensor in "
    "_place. Tensors that overlap or leave gaps are refused by the safetensors package, which "
    "opens the file once in _check_layout only for that. "
    "Rubric: 1 point: both limits with what each alone would let through; 1 point: overlaps are "
    "the package's to find, because it checks the whole layout.",
    "d02.b2": "np.empty reserves addresses only; the pages of the result come when `piece` is "
    "written, a quarter of a million numbers at a time, so the RSS grows piece by piece while "
    "read runs. raw, the scratch of at most 512 KiB for f16, is filled by readinto from the page "
    "cache and used again for every piece. So the peak is the result plus half a megabyte. The "
    "engine's own cache file is mapped instead and the system told to read ahead. "
    "Rubric: 1 point: the RSS grows when the result is written, not when it is reserved; 1 point: "
    "the scratch memory is small and used again, and no second copy of the file is held.",
    "d02.b3": "13 bits are cut off, half of the last kept bit is 0x1000. Below half, adding 0xfff "
    "or 0x1000 does not carry: down. Above half, both carry: up. Exactly half, 0x1000 + 0xfff "
    "does not carry, and with the last kept bit 1 it does: an even one stays, an odd one goes up "
    "to the next, which is even. In NumPy the scales become f16 by astype, which does the same. "
    "65520 is the first f32 that becomes infinite, for it is a tie and 65504 is odd. 0x3F818000 "
    "is a tie between 0x3F81 and 0x3F82 and goes to 0x3F82 = 16258. "
    "Rubric: 1 point: just below and just above half; 1 point: exactly half with an even last "
    "bit; 1 point: exactly half with an odd one.",
}
