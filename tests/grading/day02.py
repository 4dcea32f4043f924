"""Hidden cases of day 2."""

from __future__ import annotations

import json
import math
import struct
from fractions import Fraction

import numpy as np

from course_lib.classroom.exercises import Case
from course_lib.classroom.exercises.day02 import bf16_of, file_of
from course_lib.classroom.hidden import Group, Hidden
from course_lib.classroom.sealed import Lines
from course_lib.lab.weight_file import Tensor, put_together

F32 = np.float32

# --- d02.a1 ------------------------------------------------------------------------------------


def _value(bits, kind):
    """What 16 bits mean, by the formula of the lesson; finite ones only."""
    exponent_bits, bias, fraction_bits = {"F16": (5, 15, 10), "BF16": (8, 127, 7)}[kind]
    sign = -1 if bits >> 15 else 1
    e, f = bits >> fraction_bits & (1 << exponent_bits) - 1, bits & (1 << fraction_bits) - 1
    scaled = Fraction(f, 1 << fraction_bits) + (e > 0)
    return F32(sign * float(scaled * Fraction(2) ** (max(e, 1) - bias)))


def _finite_bits(seed, count, kind):
    bits = np.random.default_rng(seed).integers(0, 65536, 4 * count)
    top = {"F16": 0x7C00, "BF16": 0x7F80}[kind]
    return bits[(bits & top) != top][:count]


def _tensor(seed, shape, kind):
    """A made-up tensor as stored, and the float32 it stands for."""
    count = math.prod(shape)
    if kind == "F32":
        values = np.random.default_rng(seed).standard_normal(count).astype(F32)
        data = struct.pack(f"<{count}f", *values.tolist())
    else:
        bits = _finite_bits(seed, count, kind).tolist()
        values = np.array([_value(b, kind) for b in bits], F32)
        data = struct.pack(f"<{count}H", *bits)
    return Tensor(kind, shape, data), values.reshape(shape)


def _many():
    made = {"a.weight": _tensor(1, (5, 7), "F16"), "b": _tensor(2, (4,), "F32"),
            "a.bias": _tensor(3, (3, 2, 2), "BF16"), "z": _tensor(4, (64, 3), "BF16"),
            "none": _tensor(5, (0, 3), "F16"), "one": _tensor(6, (), "F16")}
    return {n: t for n, (t, _) in made.items()}, {n: v for n, (_, v) in made.items()}


def _reads(name, content, tensor, expect):
    return Case(name, (content, tensor), expect=expect, dtype=True)


def _lie(name, change, data=bytes(12), longer=0):
    """A file with a wrong entry, or with a header that claims to be `longer` than it is."""
    header = {"x": {"dtype": "BF16", "shape": [2, 3], "data_offsets": [0, 12]} | change}
    content = file_of(header, data, size=len(json.dumps(header)) + longer)
    return Case(name, (content, "x"), raises=ValueError)


def _read_groups() -> list[Group]:
    tensors, values = _many()
    content = put_together(tensors)
    size = int.from_bytes(content[:8], "little")
    header, data = json.loads(content[8 : 8 + size]), content[8 + size :]
    backwards = file_of({"__metadata__": {"by": "hand"}, **dict(reversed(header.items()))},
                        data, pad=37)
    infinite = file_of({"x": {"dtype": "BF16", "shape": [3], "data_offsets": [0, 6]}},
                       bf16_of(0x7F80, 0xFF80, 0x8000))
    return [
        Group("values", 3, "Offsets count from the end of the header; every dtype has its own way "
              "to become float32; the result has the tensor's shape.",
              [_reads(f"tensor {name} of six", content, name, values[name]) for name in tensors]
              + [_reads("infinity and minus zero", infinite, "x",
                        np.array([np.inf, -np.inf, -0.0], F32))]),
        Group("headers", 1, "The order of the entries says nothing; metadata is no tensor; a "
              "header may be padded.",
              [_reads(f"tensor {name}, header backwards", backwards, name, values[name])
               for name in ("a.weight", "z", "one")]
              + [Case("metadata is no tensor", (backwards, "__metadata__"), raises=KeyError),
                 Case("part of a name", (content, "a"), raises=KeyError)]),
        Group("lies", 2, "Check every number of the header before you believe it: length, "
              "offsets, shape, dtype.",
              [_lie("too many numbers for the bytes", {"shape": [2, 4]}),
               _lie("too few numbers for the bytes", {"shape": [5]}),
               _lie("offsets backwards", {"data_offsets": [12, 0], "shape": [0]}),
               _lie("offsets behind the data", {"data_offsets": [2, 14]}),
               _lie("a negative offset", {"data_offsets": [-6, 6]}),
               _lie("two negative offsets", {"data_offsets": [-12, -6], "shape": [3]}),
               _lie("a size of minus one", {"shape": [-1]}),
               _lie("two negative sizes", {"shape": [-2, -3]}),
               _lie("an unknown dtype", {"dtype": "I16"}),
               _lie("a header of a terabyte", {}, longer=1 << 40),
               _lie("a header of four gigabytes more", {}, longer=1 << 32),
               _lie("a header that goes on behind the file", longer=1, data=b"",
                    change={"shape": [0], "data_offsets": [0, 0]})]),
    ]


def _read_with(path, name, *, base=None, widen=None, checks=True, shape=True, dtype=True,
               offsets=None, metadata=True, length_bytes=8, length=True, front=True, sizes=True):
    """The right answer with one part replaced."""
    with open(path, "rb") as file:
        raw = file.read()
    size = int.from_bytes(raw[:length_bytes], "little")
    if checks and length and 8 + size > len(raw):
        raise ValueError("lie")
    header = json.loads(raw[8 : 8 + size])
    if metadata:
        header.pop("__metadata__", None)
    entry = header[name]
    data = raw[8 + size if base is None else base(size) :]
    begin, end = entry["data_offsets"] if offsets is None else offsets(header, name)
    width = {"F32": 4, "F16": 2, "BF16": 2}.get(entry["dtype"])
    if checks:
        if width is None or front and begin < 0 or not begin <= end <= len(data):
            raise ValueError("lie")
        if sizes and (end - begin != math.prod(entry["shape"]) * width
                      or min(entry["shape"], default=0) < 0):
            raise ValueError("lie")
    part = data[begin:end]
    if entry["dtype"] == "F32":
        values = np.frombuffer(part, "<f4")
    elif entry["dtype"] == "F16" or widen is None and entry["dtype"] != "BF16":
        values = np.frombuffer(part, "<f2")
    else:
        values = (widen or (lambda p: (np.frombuffer(p, "<u2").astype(np.uint32) << 16)
                            .view(F32)))(part)
    values = values.astype(F32) if dtype else values
    return values.reshape(entry["shape"]) if shape else values


def _offsets_from_the_header(path, name):
    return _read_with(path, name, base=lambda size: size)


def _offsets_from_byte_eight(path, name):
    return _read_with(path, name, base=lambda size: 8)


def _bf16_is_f16(path, name):
    return _read_with(path, name, widen=lambda p: np.frombuffer(p, "<f2"))


def _big_endian(path, name):
    return _read_with(path, name, widen=lambda p: (np.frombuffer(p, ">u2").astype(np.uint32) << 16)
                      .view(F32))


def _number_not_bits(path, name):
    return _read_with(path, name, widen=lambda p: np.frombuffer(p, "<u2").astype(F32))


def _believes_everything(path, name):
    return _read_with(path, name, checks=False)


def _length_unchecked(path, name):
    return _read_with(path, name, length=False)


def _length_of_four_bytes(path, name):
    return _read_with(path, name, length_bytes=4)


def _offsets_may_be_negative(path, name):
    return _read_with(path, name, front=False)


def _leaves_the_shape_to_reshape(path, name):
    return _read_with(path, name, sizes=False)


def _flat(path, name):
    return _read_with(path, name, shape=False)


def _as_stored(path, name):
    return _read_with(path, name, dtype=False)


def _in_header_order(path, name):
    def offsets(header, name):
        at = 0
        for other, entry in header.items():
            size = entry["data_offsets"][1] - entry["data_offsets"][0]
            if other == name:
                return at, at + size
            at += size
        raise KeyError(name)
    return _read_with(path, name, offsets=offsets)


def _metadata_is_a_tensor(path, name):
    try:
        return _read_with(path, name, metadata=False)
    except KeyError as error:
        if "data_offsets" in str(error):
            raise ValueError("no tensor") from None
        raise


def _read_alternative(path, name):
    """By seeking, number by number."""
    with open(path, "rb") as file:
        (size,) = struct.unpack("<Q", file.read(8))
        file.seek(0, 2)
        room = file.tell() - 8 - size
        if room < 0:
            raise ValueError("no room for the header")
        file.seek(8)
        header = json.loads(file.read(size).decode())
        if name == "__metadata__" or name not in header:
            raise KeyError(name)
        entry = header[name]
        width = {"F32": 4, "F16": 2, "BF16": 2}.get(entry["dtype"], 0)
        begin, end = entry["data_offsets"]
        count = 1
        for side in entry["shape"]:
            if side < 0:
                raise ValueError("negative")
            count *= side
        if not width or begin < 0 or end > room or end - begin != width * count:
            raise ValueError("lie")
        file.seek(8 + size + begin)
        data = file.read(end - begin)
    if entry["dtype"] == "BF16":  # the two zero bytes of each number stand in front of it
        data = b"".join(b"\0\0" + data[i : i + 2] for i in range(0, len(data), 2))
    code = "e" if entry["dtype"] == "F16" else "f"
    numbers = struct.unpack(f"<{count}{code}", data)
    return np.array(numbers, np.float32).reshape(entry["shape"])


# --- d02.a2 ------------------------------------------------------------------------------------


def _resident_truth(size, accesses, page=4096, around=16):
    """Page by page: touching one brings every page of its group that the file has."""
    pages = -(-size // page)
    present = [False] * pages
    for offset, length in accesses:
        for p in range(pages):
            if max(offset, p * page) < min(offset + length, (p + 1) * page):
                for other in range(p - p % around, p - p % around + around):
                    if other < pages:
                        present[other] = True
    return page * sum(present)


def _resident(name, *args):
    return Case(name, args, expect=_resident_truth(*args))


def _resident_groups() -> list[Group]:
    rng = np.random.default_rng(2)
    some = [(int(o), int(n)) for o, n in zip(rng.integers(0, 900_000, 9),
                                             rng.integers(0, 40_000, 9), strict=True)]
    return [
        Group("pages", 2, "A touched page counts once and whole, and brings its aligned group.",
              [_resident("nine reads", 1_000_000, some),
               _resident("small pages and groups", 1000, [(130, 60), (700, 1)], 16, 4),
               _resident("the last byte of a group and the first of the next", 500_000,
                         [(65_535, 2)]),
               _resident("a whole group and no more", 500_000, [(65_536, 65_536)])]),
        Group("once", 1, "What is resident already does not come again.",
              [_resident("the same byte three times", 1_000_000, [(5, 1), (5, 1), (5, 1)]),
               _resident("overlapping reads", 1_000_000, [(0, 100_000), (50_000, 100_000)])]),
        Group("ends", 1, "The last page counts whole, the last group ends with the file.",
              [_resident("a file of one byte", 1, [(0, 1)]),
               _resident("the last byte", 200_001, [(200_000, 1)]),
               _resident("a small file on large pages", 1000, [(10, 1)], 16_384, 1),
               _resident("everything", 300_000, [(0, 300_000)]),
               _resident("a file of whole pages", 8192, [(8191, 1)], 4096, 1)]),
        Group("borders", 1, "A read of no bytes touches nothing; impossible arguments are "
              "refused.",
              [_resident("nothing", 1000, []),
               _resident("no bytes in the middle and at the end", 1000, [(500, 0), (1000, 0)]),
               Case("a byte behind the end", (1000, [(999, 2)]), raises=ValueError),
               Case("no page and no access", (1000, [], 0), raises=ValueError),
               Case("a negative offset", (1000, [(-1, 5)]), raises=ValueError),
               Case("a negative length", (1000, [(10, -5)]), raises=ValueError),
               Case("no page", (1000, [(0, 1)], 0), raises=ValueError),
               Case("no group", (1000, [(0, 1)], 4096, 0), raises=ValueError)]),
    ]


def _checked(size, accesses, page, around):
    if page < 1 or around < 1:
        raise ValueError("below 1")
    for offset, length in accesses:
        if offset < 0 or length < 0 or offset + length > size:
            raise ValueError("outside")


def _sum_of_reads(size, accesses, page=4096, around=16):
    _checked(size, accesses, page, around)
    return sum(_resident_alternative(size, [access], page, around) for access in accesses)


def _only_pages(size, accesses, page=4096, around=16):
    _checked(size, accesses, page, around)
    return _resident_alternative(size, accesses, page, 1)


def _whole_groups(size, accesses, page=4096, around=16):
    _checked(size, accesses, page, around)
    return _resident_alternative(10 * page * around + size, accesses, page, around)


def _ends_with_the_file(size, accesses, page=4096, around=16):
    return min(size, _resident_alternative(size, accesses, page, around))


def _one_byte_too_many(size, accesses, page=4096, around=16):
    _checked(size, accesses, page, around)
    longer = [(o, min(n + 1, size - o) if n else 0) for o, n in accesses]
    return _resident_alternative(size, longer, page, around)


def _nothing_touches_a_page(size, accesses, page=4096, around=16):
    _checked(size, accesses, page, around)
    least = [(min(o, size - 1), max(n, 1)) for o, n in accesses]
    return _resident_alternative(size, least, page, around)


def _groups_where_they_are_touched(size, accesses, page=4096, around=16):
    _checked(size, accesses, page, around)
    pages, present = -(-size // page), set()
    for offset, length in accesses:
        for p in range(offset // page, -(-(offset + length) // page) if length else 0):
            present |= set(range(p, min(p + around, pages)))
    return page * len(present)


def _checks_at_the_first_access(size, accesses, page=4096, around=16):
    return _resident_alternative(size, accesses, page, around) if accesses else 0


def _to_the_end_of_the_last_page(size, accesses, page=4096, around=16):
    _checked(-(-size // page) * page, accesses, page, around)
    inside = [(o, min(n, size - o)) for o, n in accesses]
    return _resident_alternative(size, inside, page, around)


def _refuses_no_access(size, accesses, page=4096, around=16):
    inside = [(max(0, o), max(0, min(n, size - max(0, o)))) for o, n in accesses]
    return _resident_alternative(size, inside, page, around)


def _resident_alternative(size, accesses, page=4096, around=16):
    _checked(size, accesses, page, around)
    present = np.zeros((size + page - 1) // page, bool)
    group = page * around
    for offset, length in accesses:
        if length > 0:
            first = offset // group * around
            last = (offset + length - 1) // group * around + around
            present[first:last] = True
    return int(present.sum()) * page


# --- d02.a3 ------------------------------------------------------------------------------------

_FORMATS = {"f16": (10, -14, 15, 0x7C00, 0x7E00), "bf16": (7, -126, 127, 0x7F80, 0x7FC0)}


def _nearest_bits(x, kind):
    """The definition, in exact fractions: the nearest number, ties to the even one."""
    fraction, lowest, highest, infinite, nan = _FORMATS[kind]
    if math.isnan(x):
        return nan
    sign = 0x8000 if math.copysign(1, x) < 0 else 0
    if math.isinf(x):
        return sign | infinite
    size = Fraction(abs(x))
    exponent = max(lowest, math.frexp(abs(x))[1] - 1) if x else lowest
    steps = size / Fraction(2) ** (exponent - fraction)
    whole, rest = divmod(steps, 1)
    whole += rest > Fraction(1, 2) or rest == Fraction(1, 2) and whole % 2
    # Counted from 0 in steps, numbers and their bits have the same order.
    bits = int(whole) + (exponent - lowest) * (1 << fraction)
    return sign | (infinite if Fraction(2) ** (exponent - fraction) * whole
                   >= Fraction(2) ** (highest + 1) else bits)


def _half_truth(x, kind):
    bits = np.array([_nearest_bits(float(v), kind) for v in x.ravel()], np.uint16).reshape(x.shape)
    small, infinite = bits & 0x7FFF, _FORMATS[kind][3]
    return bits, {"overflow": int(((small == infinite) & np.isfinite(x)).sum()),
                  "underflow": int(((small == 0) & (x != 0)).sum())}


def _half(name, x, kind):
    return Case(name, (x, kind), expect=_half_truth(x, kind), dtype=True)


def _from_bits(*bits):
    return np.array(bits, np.uint32).view(F32)


def _half_groups() -> list[Group]:
    rng = np.random.default_rng(22)
    normal = (rng.standard_normal((20, 15)) * 0.1).astype(F32)
    wild = rng.integers(0, 0x7F800000, 300, dtype=np.uint32).view(F32)
    halves = rng.integers(0, 0x7C00, 200).astype(np.uint16).view(np.float16).astype(F32)
    middle = _from_bits(*(0x3F800000 + 0x8000 * k for k in range(40)))
    f16_middle = (np.arange(2048, 2090, dtype=F32)) * F32(-1)
    small = (np.arange(-12, 13) * 2.0**-26).astype(F32)
    # Quiet ones: comparing the argument before and after would raise on signalling ones.
    nans = _from_bits(0x7FC00001, 0xFFE12345, 0x7FFFFFFF, 0xFFFFFFFF, 0xFFC00000, 0x3F800000)
    edges = np.array([65503, 65504, 65519, 65519.996, 65520, 70000, -65520, np.inf, -np.inf], F32)
    huge = _from_bits(0x7F7F0000, 0x7F7F7FFF, 0x7F7F8000, 0x7F7FFFFF, 0xFF7FFFFF, 0x7F800000)
    tiny = _from_bits(0x00000001, 0x00008000, 0x00008001, 0x80007FFF, 0x00018000, 0x80000000, 0)
    return [
        Group("nearest", 2, "Each number must go to the nearest one of the format.",
              [_half("f16, weights", normal, "f16"), _half("bf16, weights", normal, "bf16"),
               _half("bf16, any size", wild, "bf16"), _half("f16, any size", wild, "f16")]),
        Group("ties", 1, "Exactly halfway, the number with the even last bit wins.",
              [_half("bf16", middle, "bf16"), _half("f16", f16_middle, "f16"),
               _half("bf16 from f16", halves, "bf16")]),
        Group("small", 1, "Below the smallest normal number the steps stay equal, down to 0, "
              "which keeps its sign.",
              [_half("f16", small, "f16"), _half("bf16", tiny, "bf16")]),
        Group("large and NaN", 2, "Mind what becomes infinite and what already was, and that every "
              "NaN becomes the one NaN.",
              [_half("edges of f16", edges, "f16"), _half("edges of bf16", huge, "bf16"),
               _half("NaN to f16", nans, "f16"), _half("NaN to bf16", nans, "bf16"),
               Case("a kind in capitals", (normal, "F16"), raises=ValueError)]),
    ]


def _half_with(x, kind, *, bf16=None, f16=None, nan=True, report=None):
    """The right answer with one part replaced."""
    if kind not in _FORMATS:
        raise ValueError("kind")
    u = x.view(np.uint32)
    with np.errstate(all="ignore"):
        if kind == "f16":
            bits = (f16 or (lambda v: v.astype(np.float16).view(np.uint16)))(x)
        else:
            even = np.uint32(0x7FFF) + (u >> np.uint32(16) & np.uint32(1))
            bits = ((bf16 or (lambda b: b + even))(u) >> np.uint32(16)).astype(np.uint16)
    if nan:
        bits = np.where(np.isnan(x), np.uint16(_FORMATS[kind][4]), bits)
    small, infinite = bits & np.uint16(0x7FFF), _FORMATS[kind][3]
    counted = {"overflow": int(((small == infinite) & np.isfinite(x)).sum()),
               "underflow": int(((small == 0) & (x != 0)).sum())}
    return bits, (report(counted, small, x) if report else counted)


def _cuts_off(x, kind):
    return _half_with(x, kind, bf16=lambda u: u)


def _ties_away(x, kind):
    return _half_with(x, kind, bf16=lambda u: u + np.uint32(0x8000))


def _any_nan(x, kind):
    return _half_with(x, kind, nan=False)


def _flushes(x, kind):
    def f16(v):
        bits = v.astype(np.float16).view(np.uint16)
        return np.where(bits & 0x7C00, bits, bits & np.uint16(0x8000))
    return _half_with(x, kind, f16=f16)


def _saturates(x, kind):
    return _half_with(x, kind, f16=lambda v: np.clip(v, -65504, 65504).astype(np.float16)
                      .view(np.uint16))


def _bf16_by_way_of_f16(x, kind):
    if kind == "bf16":
        with np.errstate(all="ignore"):
            bits, _ = _half_with(x.astype(np.float16).astype(F32), kind)
        return bits, _half_with(x, kind)[1]
    return _half_with(x, kind)


def _infinity_counts_as_lost(x, kind):
    return _half_with(x, kind, report=lambda c, small, x: c | {
        "overflow": int((small == _FORMATS[kind][3]).sum())})


def _zero_counts_as_lost(x, kind):
    return _half_with(x, kind, report=lambda c, small, x: c | {
        "underflow": int((small == 0).sum())})


def _forgets_the_sign_of_zero(x, kind):
    bits, report = _half_with(x, kind)
    return np.where(bits == 0x8000, np.uint16(0), bits), report


def _flat_result(x, kind):
    bits, report = _half_with(x, kind)
    return bits.ravel(), report


def _cleans_its_argument(x, kind):
    found = _half_with(x, kind)
    x[np.isnan(x)] = 0
    x[0] = 0
    return found


def _half_alternative(x, kind):
    """Both kinds by the same scaling: how many steps of the format is each number?"""
    if kind not in ("f16", "bf16"):
        raise ValueError(kind)
    fraction, lowest, _, infinite, nan = _FORMATS[kind]
    wide = np.abs(x.astype(np.float64))
    finite = np.isfinite(wide)
    safe = np.where(finite, wide, 0.0)
    exponent = np.where(safe > 0, np.maximum(np.frexp(safe)[1] - 1, lowest), lowest)
    steps = np.rint(np.ldexp(safe, fraction - exponent)).astype(np.int64)
    bits = np.minimum(steps + (exponent - lowest) * (1 << fraction), infinite)
    bits = np.where(np.isnan(x), nan, np.where(np.isinf(x), infinite, bits))
    signed = bits | np.where(np.signbit(x) & ~np.isnan(x), 0x8000, 0)
    lost = {"overflow": int(((bits == infinite) & finite).sum()),
            "underflow": int(((bits == 0) & (wide > 0)).sum())}
    return signed.astype(np.uint16), lost


HIDDEN = [
    Hidden("d02.a1", _read_groups, alternative=_read_alternative, mutants={
        "forgets the first eight bytes": _offsets_from_the_header,
        "forgets the header": _offsets_from_byte_eight,
        "bf16 read as f16": _bf16_is_f16,
        "big-endian": _big_endian,
        "the number of the bits": _number_not_bits,
        "believes everything": _believes_everything,
        "length unchecked": _length_unchecked,
        "length of four bytes": _length_of_four_bytes,
        "offsets may be negative": _offsets_may_be_negative,
        "leaves the shape to reshape": _leaves_the_shape_to_reshape,
        "flat": _flat,
        "as stored": _as_stored,
        "tensors in the order of the header": _in_header_order,
        "metadata is a tensor": _metadata_is_a_tensor,
    }),
    Hidden("d02.a2", _resident_groups, alternative=_resident_alternative, mutants={
        "sum of reads": _sum_of_reads,
        "only the touched pages": _only_pages,
        "last group beyond the file": _whole_groups,
        "last page ends with the file": _ends_with_the_file,
        "one byte too many": _one_byte_too_many,
        "a read of nothing touches": _nothing_touches_a_page,
        "groups begin where they are touched": _groups_where_they_are_touched,
        "refuses no access": _refuses_no_access,
        "checks at the first access": _checks_at_the_first_access,
        "reads to the end of the last page": _to_the_end_of_the_last_page,
    }),
    Hidden("d02.a3", _half_groups, alternative=_half_alternative, mutants={
        "cuts off": _cuts_off,
        "ties away from zero": _ties_away,
        "any NaN": _any_nan,
        "flushes subnormals": _flushes,
        "saturates": _saturates,
        "bf16 by way of f16": _bf16_by_way_of_f16,
        "infinity counts as lost": _infinity_counts_as_lost,
        "zero counts as lost": _zero_counts_as_lost,
        "zero without sign": _forgets_the_sign_of_zero,
        "flat result": _flat_result,
        "changes its argument": _cleans_its_argument,
    }),
]

_LOADER = "course_lib/engine/safetensors_file.py"
_CACHE = "course_lib/engine/cache_file.py"

READINGS = {
    "d02.b1": {
        "huge_header": Lines(_LOADER, "if size > LARGEST_HEADER:",
                             symbol="SafetensorsFile.__init__"),
        "outside": Lines(_LOADER, "if not 0 <= begin <= end <= available",
                         symbol="SafetensorsFile._place"),
        "wrong_size": Lines(_LOADER, "end - begin != math.prod(shape)",
                            symbol="SafetensorsFile._place"),
        "widens": Lines(_LOADER, "np.left_shift(part, np.uint32(16)",
                        symbol="SafetensorsFile.read"),
        "largest_header": 32,
        "first_number": 2_564_152,
    },
    "d02.b2": {
        "reserves": Lines(_LOADER, "values = np.empty(count, np.float32)",
                          symbol="SafetensorsFile.read"),
        "reads": Lines(_LOADER, "got = self._file.readinto(target)",
                       symbol="SafetensorsFile._fill"),
        "first_touch": Lines(_LOADER, "piece[:] = part", symbol="SafetensorsFile.read"),
        "maps": Lines(_CACHE, "mapped = mmap.mmap(", symbol="map_all"),
        "asks_ahead": Lines(_CACHE, "mapped.madvise(mmap.MADV_WILLNEED)", symbol="map_all"),
        "scratch": 524_288,
    },
    "d02.b3": {
        "normal": Lines("kernels_pyx/c/pack.c", "bits += 0xfff + (bits >> 13 & 1);"),
        "subnormal": Lines("kernels_pyx/c/pack.c", "shifted += 0.5f;"),
        "in_python": Lines("course_lib/weight_blocks.py", 'stored = d.astype("<f2")',
                           symbol="_quantize"),
        "bf16": Lines("course_lib/half_floats.py", "rounded = bits + np.uint32(0x7FFF)",
                      symbol="f32_to_half"),
        "nan": Lines("course_lib/half_floats.py", "half = np.where(magnitude > INFINITE",
                     symbol="f32_to_half"),
        "first_infinite": 65520,
        "tie": 0x3F82,
    },
}
