"""Calls of every compiled operation with inputs that are the same on every machine.

Inputs come from integers: raw bits of a counter-based generator, scaled by powers of two. A normal
sampler or a library's exp would differ in a last bit somewhere. `CASES` are the calls whose result
digests `golden/kernel_digests.json` holds; the fuzz tests spoil the arguments of small ones.
"""

from __future__ import annotations

import copy
import functools
import hashlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

import kernels_pyx

F32 = np.float32
POISON = 0x5A
"""What every byte of an output holds before a call: what is not written shows in the digest."""


class Bits:
    """Inputs made from the raw bits of Philox, a generator that only adds, multiplies and shifts.

    `key` is any text; the same text gives the same inputs.
    """

    def __init__(self, key: str):
        number = int.from_bytes(hashlib.sha256(key.encode()).digest()[:16], "little")
        self.generator = np.random.Philox(key=number, counter=0)

    def raw(self, shape) -> np.ndarray:
        return np.asarray(self.generator.random_raw(int(np.prod(shape)))).reshape(shape)

    def whole(self, shape, least: int, most: int, dtype=np.int64) -> np.ndarray:
        """Whole numbers from `least` to `most`."""
        width = np.uint64(most - least + 1)
        return ((self.raw(shape) >> np.uint64(16)) % width).astype(np.int64).astype(dtype) + \
            np.asarray(least, dtype)

    def floats(self, shape, exponent: int = 0, spread: int = 0) -> np.ndarray:
        """24-bit fractions from -1 to 1, times 2**exponent, each times another power of two up to
        2**spread larger or smaller."""
        exponents = self.whole(shape, exponent - spread, exponent + spread) - 23
        return np.ldexp(self.whole(shape, -2**23, 2**23).astype(F32), exponents).astype(F32)

    def scales(self, shape, exponent: int = -7) -> np.ndarray:
        """Positive factors of about 2**exponent, as a row's scale is."""
        return np.ldexp(self.whole(shape, 1, 2**23).astype(F32), exponent - 23).astype(F32)


def arrays_of(name: str, value: Any) -> Iterator[tuple[str, np.ndarray]]:
    """The arrays of an argument: itself, or those in a tuple of tuples."""
    if isinstance(value, np.ndarray):
        yield name, value
    elif isinstance(value, tuple | list):
        for i, one in enumerate(value):
            yield from arrays_of(f"{name}[{i}]", one)


@dataclass(frozen=True)
class Call:
    """An operation's arguments by name; `outputs` names those that receive the result."""

    operation: str
    arguments: dict[str, Any]
    outputs: tuple[str, ...]

    def __call__(self, variant: str) -> Any:
        return kernels_pyx.kernels(variant)[self.operation](**self.arguments)

    def digest(self, variant: str) -> str:
        """Run with fresh outputs on one variant; return the SHA-256 of all that comes out."""
        fresh = {name: copy.deepcopy(self.arguments[name]) for name in self.outputs}
        returned = Call(self.operation, self.arguments | fresh, self.outputs)(variant)
        if self.operation == "decoder_layers":
            returned, _ = returned  # the other is a time
        digest = hashlib.sha256(repr(returned).encode())
        for name, array in (pair for item in fresh.items() for pair in arrays_of(*item)):
            digest.update(f"{name} {array.dtype.str} {array.shape}".encode())
            if array.dtype.kind == "f":  # NaN has many forms, and each machine its own
                array[np.isnan(array)] = np.nan
            digest.update(array.astype(array.dtype.newbyteorder("<")).tobytes())
        return digest.hexdigest()


MAKERS: dict[str, Callable[..., Call]] = {}
"""Operation -> function of (Bits, **dimensions) that returns a good call of that size."""

SIZES: dict[str, list[dict[str, int]]] = {}
"""Operation -> the dimensions of its cases; the first is small, for the fuzz tests."""

MEASURING = ("read_words", "read_blocks", "compute_float", "compute_int8")
"""Operations of ./course bench that have no result to compare."""


LIMITS: dict[str, dict[str, tuple[int, int]]] = {}
"""Operation -> the least and largest value of each dimension that is worth drawing."""


def outputs(**arrays) -> dict[str, np.ndarray]:
    """Outputs as `name=(dtype, shape)`, filled with POISON."""
    made = {}
    for name, (dtype, shape) in arrays.items():
        made[name] = np.empty(shape, dtype)
        made[name].view(np.uint8)[...] = POISON
    return made


def maker(*sizes: dict[str, int], **limits: tuple[int, int]):
    """Register a function under its name, with the sizes of its cases and the least and largest
    value of each dimension for the fuzz tests."""

    def register(function):
        MAKERS[function.__name__] = function
        SIZES[function.__name__] = list(sizes)
        LIMITS[function.__name__] = limits
        return function

    return register


def make(operation: str, seed: int = 0, **size: int) -> Call:
    """A good call of an operation; the same arguments give the same bits."""
    text = " ".join(f"{name}={value}" for name, value in size.items())
    inputs, receivers = MAKERS[operation](Bits(f"{operation} {text} {seed}"), **size)
    return Call(operation, inputs | receivers, tuple(receivers))


@functools.cache
def cases(operation: str) -> dict[str, Call]:
    """Every case of an operation by name."""
    return {f"{operation}({','.join(f'{name}={value}' for name, value in size.items())})#{seed}":
            make(operation, seed, **size) for size in SIZES[operation] for seed in range(2)}


# --- quantize ------------------------------------------------------------------------------------

ODD_LENGTHS = (17, 1, 15, 33, 64, 127, 128, 200)


@maker(*(dict(rows=3, d=d, rule_code=rule, exponent=exponent, spread=spread)
         for exponent, spread, lengths in ((0, 0, ODD_LENGTHS), (-22, 12, (37,)), (100, 20, (37,)))
         for d in lengths for rule in range(4)),
       rows=(0, 5), d=(1, 70), rule_code=(0, 3), exponent=(-40, 100), spread=(0, 20))
def quantize_rows(bits, rows, d, rule_code=0, exponent=0, spread=0):
    return (dict(x=bits.floats((rows, d), exponent, spread), rule_code=rule_code),
            outputs(out_q=(np.int8, (rows, d)), out_scale=(F32, rows)))


# --- attention and selection ---------------------------------------------------------------------


def cache(bits, kvh, n, d, q8, room=0, exponent=0, least=-128):
    """k, v and their scales (None with float rows); with `room`, views of a longer cache."""
    if not q8:
        k, v = (bits.floats((kvh, n + room, d), exponent, 2)[:, :n] for _ in range(2))
        return dict(k=k, v=v, k_scale=None, v_scale=None)
    k, v = (bits.whole((kvh, n + room, d), least, 127, np.int8)[:, :n] for _ in range(2))
    k_scale, v_scale = (bits.scales((kvh, n + room), exponent - 7)[:, :n] for _ in range(2))
    return dict(k=k, v=v, k_scale=k_scale, v_scale=v_scale)


def block_lists(bits, lists, n, count, block_size):
    """Up to `count` blocks for each list, none twice, in any order; None for a count of 0."""
    if count == 0:
        return None
    n_blocks = -(-n // block_size)
    order = np.argsort(bits.raw((lists, n_blocks)), axis=1, kind="stable")
    return np.ascontiguousarray(order[:, :count], np.int32)


def attention(bits, kvh, group, n, d, q8, count, block_size, shared=0, room=0, exponent=0):
    heads = kvh * group
    return (dict(q=bits.floats((heads, d), exponent + 1, 2), **cache(bits, kvh, n, d, q8, room),
                 blocks=block_lists(bits, kvh if shared else heads, n, count, block_size),
                 block_size=block_size),
            outputs(out=(F32, (heads, d))))


def attention_sizes(**always):
    small = dict(kvh=2, group=2, n=37, d=32, q8=1, count=3, block_size=8) | always
    for change in (
        {}, dict(q8=0), dict(count=0), dict(count=0, q8=0), dict(shared=1), dict(shared=1, q8=0),
        dict(group=1), dict(group=4), dict(group=3, q8=0), dict(group=5, count=0), dict(group=8),
        dict(n=1, count=1), dict(n=1, count=0, q8=0), dict(n=15, count=0), dict(n=16, count=0),
        dict(n=17, count=0, q8=0), dict(n=31, count=0), dict(n=32, count=0), dict(n=33, count=0),
        dict(n=65, count=0, q8=0), dict(n=200, count=0, d=128), dict(n=200, count=0, d=128, q8=0),
        dict(n=300, count=7, block_size=32, d=128), dict(n=300, count=7, block_size=32, d=64, q8=0),
        dict(n=300, count=19, block_size=16, d=128, shared=1, group=1),
        dict(count=1, block_size=64), dict(count=37, block_size=1), dict(count=99, block_size=5),
        dict(count=2, block_size=33),
        dict(room=3), dict(room=5, q8=0), dict(room=1, count=0), dict(exponent=-40),
        dict(exponent=-40, q8=0), dict(exponent=40), dict(exponent=40, q8=0, count=0), dict(kvh=1),
        dict(kvh=5, count=0), dict(d=96), dict(d=160, q8=0), dict(d=256, group=4, count=0),
        dict(d=1), dict(d=1, q8=0), dict(d=15), dict(d=17), dict(d=24, q8=0), dict(d=40, count=0),
        dict(d=100, n=70, count=0), dict(d=100, n=70, count=0, q8=0),
    ):
        size = small | change
        if always.keys() <= change.keys() | always.keys() and all(
                size[name] == value for name, value in always.items()):
            yield size


ATTENTION_LIMITS = dict(kvh=(1, 3), group=(1, 5), n=(1, 70), d=(1, 70), q8=(0, 1), count=(0, 4),
                        block_size=(1, 40), shared=(0, 1), room=(0, 2), exponent=(-20, 20))


@maker(*attention_sizes(), **ATTENTION_LIMITS)
def two_pass(bits, **size):
    return attention(bits, **size)


@maker(*attention_sizes(), **ATTENTION_LIMITS)
def single_pass(bits, **size):
    return attention(bits, **size)


Q8_SIZES = [size | dict(d32=size.pop("d") // 32) for size in attention_sizes(q8=1)
            if size["d"] % 32 == 0]
Q8_LIMITS = {name: limits for name, limits in ATTENTION_LIMITS.items()
             if name not in ("d", "q8")} | dict(d32=(1, 5))


@maker(*Q8_SIZES, **Q8_LIMITS)
def single_pass_q8(bits, d32, q8=1, **size):
    return attention(bits, d=32 * d32, q8=q8, **size)


@maker(*Q8_SIZES, Q8_SIZES[0] | dict(d32=40), **Q8_LIMITS)
def single_pass_q8_row(bits, d32, q8=1, **size):
    return attention(bits, d=32 * d32, q8=q8, **size)


@maker(*(dict(n=n, exponent=exponent) for n, exponent in (
    (37, 0), (1, 4), (15, -3), (16, -12), (17, 6), (1000, 5), (33, -40), (64, 7), (64, 9))),
       n=(0, 50), exponent=(-30, 20))
def exp(bits, n, exponent):
    return dict(x=-np.abs(bits.floats(n, exponent, 2))), outputs(out=(F32, n))


@maker(*(dict(kvh=2, group=2, n=37, d=24, q8=1, block_size=8, n_probe=3) | change for change in (
    {}, dict(q8=0), dict(n=1), dict(n=8), dict(n=9), dict(block_size=1), dict(block_size=40),
    dict(n_probe=1), dict(n_probe=2, q8=0), dict(n_probe=8), dict(n_probe=50), dict(group=1),
    dict(group=4), dict(group=3, q8=0), dict(d=1), dict(d=16), dict(d=17, q8=0), dict(d=128),
    dict(d=128, q8=0, n=300, block_size=32, n_probe=4), dict(d=128, n=300, block_size=32),
    dict(d=100, n=200, block_size=16, n_probe=5), dict(room=3), dict(room=3, q8=0),
    dict(exponent=-60), dict(exponent=60), dict(kvh=1, group=8), dict(kvh=5, group=1, q8=0))),
       kvh=(1, 3), group=(1, 5), n=(1, 70), d=(1, 70), q8=(0, 1), block_size=(1, 40),
       n_probe=(1, 10), room=(0, 2), exponent=(-40, 40))
def probe_scores(bits, kvh, group, n, d, q8, block_size, n_probe, room=0, exponent=0):
    rows = cache(bits, kvh, n, d, q8, room)
    return (dict(q=bits.floats((kvh * group, d), exponent, 2), k=rows["k"],
                 k_scale=rows["k_scale"], block_size=block_size, n_probe=n_probe),
            outputs(out=(F32, (kvh * group, -(-n // block_size)))))


@maker(*(dict(n=n, block_size=size) for n, size in (
    (37, 8), (1, 1), (1, 8), (8, 8), (9, 8), (200, 32), (200, 33), (50, 1), (50, 1000))),
       n=(1, 80), block_size=(1, 40))
def importance_sums(bits, n, block_size):
    return (dict(importance=np.abs(bits.floats(n, 0, 6)), block_size=block_size),
            outputs(out=(F32, -(-n // block_size))))


@maker(*(dict(heads=4, n_blocks=9, k_blocks=4, ties=ties, importance=importance) | change
         for ties in (0, 1) for importance in (1, 0) for change in (
             {}, dict(k_blocks=1), dict(k_blocks=9), dict(k_blocks=20), dict(n_blocks=1),
             dict(n_blocks=2, k_blocks=1), dict(n_blocks=100, k_blocks=32), dict(heads=1),
             dict(n_blocks=33, k_blocks=7), dict(n_blocks=64, k_blocks=63))),
       heads=(0, 4), n_blocks=(1, 40), k_blocks=(1, 45), ties=(0, 1), importance=(0, 1))
def select_blocks(bits, heads, n_blocks, k_blocks, ties, importance):
    """With `ties` the scores are small whole numbers, so that many are equal."""
    def scores(shape):
        return bits.whole(shape, -2, 2).astype(F32) if ties else bits.floats(shape, 0, 3)

    k = min(k_blocks, n_blocks)
    places, one = (np.int32, (heads, k)), (np.int32, heads)
    return (dict(probe=scores((heads, n_blocks)),
                 importance_sums=scores(n_blocks) if importance else None, k_blocks=k_blocks),
            outputs(order=places, ids=places, recency=one, evicted=one))


@maker(*(dict(kvh=2, group=2, n=37, d=24, q8=1, block_size=8, k_blocks=3) | change for change in (
    {}, dict(packed=4), dict(q8=0), dict(shared=1), dict(shared=1, q8=0), dict(n=1),
    dict(n=9, k_blocks=1), dict(importance=0), dict(importance=0, shared=1, q8=0),
    dict(k_blocks=50), dict(group=1),
    dict(n=200, d=128, block_size=16, k_blocks=5, group=4, shared=1), dict(room=3, shared=1),
    dict(n=300, d=128, block_size=32, k_blocks=4),
    dict(n=300, d=64, block_size=32, k_blocks=4, q8=0), dict(n_probe=1),
    dict(n_probe=50), dict(block_size=1), dict(d=17, q8=0), dict(d=1),
    dict(kvh=5, group=3), dict(exponent=-30), dict(exponent=30, q8=0),
    dict(packed=2, q8=0, room=2), dict(packed=4, shared=1, n=40), dict(packed=9, n_probe=5))),
       kvh=(1, 3), group=(1, 5), n=(1, 70), d=(1, 70), q8=(0, 1), block_size=(1, 40),
       k_blocks=(1, 12), n_probe=(1, 6), shared=(0, 1), importance=(0, 1), room=(0, 2),
       exponent=(-20, 20), packed=(0, 6))
def sparse_attention(bits, kvh, group, n, d, q8, block_size, k_blocks, n_probe=3, shared=0,
                     importance=1, room=0, exponent=0, packed=0):
    """`packed`: of how many full blocks, at most, the sampled rows are passed as a copy too."""
    heads, n_blocks = kvh * group, -(-n // block_size)
    places, one = (np.int32, (heads, min(k_blocks, n_blocks))), (np.int32, heads)
    rows = cache(bits, kvh, n, d, q8, room)
    if packed and block_size <= n:
        sampled = np.arange(0, block_size, max(1, block_size // min(n_probe, n)))
        first = np.arange(min(packed, n // block_size)) * block_size
        where = (first[:, None] + sampled).ravel()
        rows["samples"] = np.ascontiguousarray(rows["k"][:, where])
        rows["sample_scale"] = np.ascontiguousarray(rows["k_scale"][:, where]) if q8 else None
    return (dict(q=bits.floats((heads, d), exponent + 1, 2), **rows,
                 importance_sums=np.abs(bits.floats(n_blocks)) if importance else None,
                 k_blocks=k_blocks, block_size=block_size, n_probe=n_probe, shared=bool(shared)),
            outputs(out=(F32, (heads, d)), probe=(F32, (heads, n_blocks)), order=places, ids=places,
                    recency=one, evicted=one))


# --- linear --------------------------------------------------------------------------------------


@maker(*(dict(n=n, cols=cols, rows=rows, exponent=exponent) for n, cols, rows, exponent in (
    (3, 37, 5, 0), (1, 37, 17, 0), (1, 128, 64, 0), (2, 16, 16, 0), (4, 15, 3, 0), (5, 17, 33, 0),
    (1, 1, 1, 0), (2, 0, 3, 0), (16, 64, 48, 0), (17, 100, 50, 0), (37, 48, 31, 0), (70, 33, 21, 0),
    (1, 500, 40, 0), (9, 300, 40, 0), (3, 37, 5, -50), (3, 37, 5, 50), (130, 20, 70, 0),
    (1, 1030, 272, 0), (70, 40, 100, 0), (300, 515, 5, 0))),
       n=(0, 20), cols=(0, 60), rows=(0, 40), exponent=(-30, 30))
def linear_f32(bits, n, cols, rows, exponent):
    return (dict(x=bits.floats((n, cols), exponent, 3), w=bits.floats((rows, cols), 0, 3)),
            outputs(out=(F32, (n, rows))))


BLOCKED = ((3, 2, 5, 0), (1, 1, 1, 0), (1, 2, 16, 0), (1, 3, 17, 0), (1, 4, 100, 0), (2, 2, 15, 0),
           (4, 1, 33, 0), (5, 5, 32, 0), (8, 3, 40, 0), (17, 4, 50, 0), (37, 2, 31, 0),
           (70, 1, 48, 0), (130, 3, 20, 0), (1, 17, 64, 0), (3, 2, 5, -30), (3, 2, 5, 60),
           (1, 33, 272, 0), (40, 4, 100, 0), (530, 130, 5, 0))
BLOCKED_SIZES = [dict(n=n, blocks=blocks, rows=rows, exponent=exponent)
                 for n, blocks, rows, exponent in BLOCKED]
BLOCKED_LIMITS = dict(n=(0, 20), blocks=(1, 4), rows=(0, 40), exponent=(-30, 30))


def blocked(bits, n, blocks, rows, exponent, dtype, width):
    """Weights in panels of 16 rows, any bytes at all, with scales of both signs."""
    panels = -(-rows // 16)
    low, high = np.iinfo(dtype).min, np.iinfo(dtype).max
    codes = bits.whole((panels, blocks * width, 16, 4), low, high, dtype)
    codes[..., 0] = low  # -128 is what a saturating instruction gets wrong
    scales = np.ldexp(bits.whole((panels, blocks, 16), -1023, 1023).astype(F32), -13)
    return (dict(x=bits.floats((n, blocks * 32), exponent, 3), codes=codes,
                 scales=scales.astype(np.float16)),
            outputs(out=(F32, (n, rows))))


@maker(*BLOCKED_SIZES, **BLOCKED_LIMITS)
def linear_q8_0(bits, **size):
    return blocked(bits, **size, dtype=np.int8, width=8)


@maker(*BLOCKED_SIZES, **BLOCKED_LIMITS)
def linear_q4_0(bits, **size):
    return blocked(bits, **size, dtype=np.uint8, width=4)


@maker(*(dict(n=n, blocks=blocks, exponent=exponent) for n, blocks, exponent in (
    (3, 2, 0), (1, 1, 0), (5, 3, 0), (2, 7, -22), (2, 7, -19), (2, 3, 100))),
       n=(0, 6), blocks=(1, 5), exponent=(-40, 100))
def quantize_activations(bits, n, blocks, exponent):
    return (dict(x=bits.floats((n, 32 * blocks), exponent, 4)),
            outputs(out_q=(np.int8, (n, 32 * blocks)), out_scale=(F32, (n, blocks))))


# --- steps of a layer, of one token --------------------------------------------------------------


def weights(bits, name, rows, cols, kind):
    """Weights of one kind, 0 for Q8_0, 1 for float32, 2 for Q4_0, of about unit gain."""
    if kind == 1:
        return {name: bits.floats((rows, cols), -(cols.bit_length() // 2)), f"{name}_scales": None}
    dtype, width = (np.int8, 8) if kind == 0 else (np.uint8, 4)
    panels, low, high = -(-rows // 16), np.iinfo(dtype).min, np.iinfo(dtype).max
    scales = np.ldexp(bits.whole((panels, cols // 32, 16), -1023, 1023).astype(F32), -20)
    return {name: bits.whole((panels, cols // 32 * width, 16, 4), low, high, dtype),
            f"{name}_scales": scales.astype(np.float16)}


@maker(*(dict(heads=2, kv_heads=1, d16=1, blocks=2, kind=0, gains=3, exponent=0) | change
         for change in (
             {}, dict(kind=1), dict(kind=2), dict(gains=0), dict(gains=1, kind=1), dict(gains=2),
             dict(heads=16, kv_heads=8, d16=8, blocks=5), dict(heads=3, kv_heads=3, d16=3, kind=2),
             dict(d16=4, blocks=130, kind=1), dict(exponent=-30), dict(exponent=30, kind=1))),
       heads=(1, 5), kv_heads=(1, 3), d16=(1, 5), blocks=(1, 5), kind=(0, 2), gains=(0, 3),
       exponent=(-30, 30))
def attention_input(bits, heads, kv_heads, d16, blocks, kind, gains, exponent):
    """`gains`: 1 for that of q, 2 for that of k, 3 for both."""
    d, cols = 16 * d16, 32 * blocks
    return (dict(x=bits.floats((1, cols), exponent, 2), gain=bits.floats(cols, 1), eps=2.0**-20,
                 **weights(bits, "w", (heads + 2 * kv_heads) * d, cols, kind),
                 q_gain=bits.floats(d, 1) if gains & 1 else None,
                 k_gain=bits.floats(d, 1) if gains & 2 else None,
                 cos=bits.floats((1, d // 2)), sin=bits.floats((1, d // 2))),
            outputs(q=(F32, (heads, 1, d)), k=(F32, (kv_heads, 1, d)), v=(F32, (kv_heads, 1, d))))


@maker(*(dict(rows=37, blocks=2, kind=0, exponent=0) | change for change in (
    {}, dict(kind=1), dict(kind=2), dict(rows=1), dict(rows=16), dict(rows=300, blocks=3),
    dict(rows=300, kind=2), dict(rows=300, blocks=130, kind=1), dict(exponent=-30),
    dict(exponent=30, kind=1))),
       rows=(1, 70), blocks=(1, 5), kind=(0, 2), exponent=(-30, 30))
def attention_output(bits, rows, blocks, kind, exponent):
    """x is added to: it is an argument that receives the result."""
    inputs = dict(context=bits.floats((1, 32 * blocks), exponent, 2),
                  **weights(bits, "w", rows, 32 * blocks, kind))
    return inputs, dict(x=bits.floats((1, rows), exponent, 2))


@maker(*(dict(blocks=2, inner=3, kind=0, other=0, exponent=0) | change for change in (
    {}, dict(kind=1, other=1), dict(kind=2, other=2), dict(kind=1), dict(other=1),
    dict(kind=2, inner=1), dict(blocks=1, inner=7, other=2), dict(blocks=5, inner=40),
    dict(blocks=9, inner=20, kind=2, other=2), dict(blocks=130, inner=2, kind=1, other=1),
    dict(blocks=2, inner=130, kind=1, other=1), dict(exponent=-30), dict(exponent=30))),
       blocks=(1, 4), inner=(1, 6), kind=(0, 2), other=(0, 2), exponent=(-30, 30))
def swiglu(bits, blocks, inner, kind, other, exponent):
    """`kind` of gate and up, `other` of down. x is added to, as in attention_output."""
    hidden, inner = 32 * blocks, 32 * inner
    inputs = dict(gain=bits.floats(hidden, 1), eps=2.0**-20,
                  **weights(bits, "gate_up", 2 * inner, hidden, kind),
                  **weights(bits, "down", hidden, inner, other))
    return inputs, dict(x=bits.floats((1, hidden), exponent, 2))


@maker(*(dict(layers=2, heads=2, kv_heads=1, d16=1, blocks=2, inner=1, n=12, kind=0, q8=1, k=0)
         | change for change in (
             {}, dict(k=2), dict(k=2, q8=0), dict(q8=0, kind=1), dict(kind=2, layers=1),
             dict(heads=4, kv_heads=2, d16=2, k=3, n=50), dict(gains=0, k=1), dict(n=0),
             dict(n=0, k=1, q8=0), dict(k=9, n_probe=50), dict(k=2, packed=3, n=31),
             dict(k=2, packed=3, n=32, q8=0), dict(k=3, importance=0), dict(rule=3, room=2),
             dict(layers=3, heads=16, kv_heads=8, d16=8, blocks=4, inner=5, n=70, k=4, packed=8),
             dict(exponent=-30), dict(exponent=20, kind=1))),
       layers=(1, 2), heads=(1, 4), kv_heads=(1, 2), d16=(1, 3), blocks=(1, 2), inner=(1, 2),
       n=(0, 40), kind=(0, 2), q8=(0, 1), k=(0, 5), n_probe=(1, 9), packed=(0, 4), room=(0, 2),
       gains=(0, 3), importance=(0, 1), rule=(0, 3), exponent=(-20, 20))
def decoder_layers(bits, layers, heads, kv_heads, d16, blocks, inner, n, kind, q8, k, n_probe=3,
                   packed=0, room=1, gains=3, importance=1, rule=0, exponent=0, block_size=8):
    """Sizes as those of the steps and of sparse_attention; k = 0 reads all rows. `heads` is for
    each KV head, doubled where the heads together would not fill blocks of 32."""
    d, hidden, inner = 16 * d16, 32 * blocks, 32 * inner
    heads *= kv_heads * (2 if heads * kv_heads * d16 % 2 else 1)
    n_blocks = -(-(n + 1) // block_size)
    size = min(block_size, n + 1)

    def layer():
        w = (weights(bits, "qkv", (heads + 2 * kv_heads) * d, hidden, kind),
             weights(bits, "o", hidden, heads * d, kind),
             weights(bits, "gate_up", 2 * inner, hidden, kind),
             weights(bits, "down", hidden, inner, kind))
        qkv, o, gate_up, down = (tuple(one.values()) for one in w)
        return (bits.floats(hidden, 1), *qkv, bits.floats(d, 1) if gains & 1 else None,
                bits.floats(d, 1) if gains & 2 else None, *o, bits.floats(hidden, 1), *gate_up,
                *down)

    caches = tuple(tuple(None if a is None else a.copy() for a in cache(
        bits, kv_heads, n + 1 + room, d, q8).values()) for _ in range(layers))
    samples = ()
    if packed and k:
        sampled = np.arange(0, size, max(1, size // min(n_probe, n + 1)))
        first = np.arange(min(packed, n // block_size)) * block_size
        where = (first[:, None] + sampled).ravel()
        samples = tuple((np.ascontiguousarray(rows[0][:, where]),
                         np.ascontiguousarray(rows[2][:, where]) if q8 else None)
                        for rows in caches) if len(where) else ()
    inputs = dict(eps=2.0**-20, cos=bits.floats((1, d // 2)), sin=bits.floats((1, d // 2)),
                  heads=heads, weights=tuple(layer() for _ in range(layers)), n=n, rule_code=rule,
                  importance_sums=None, k_blocks=None, block_size=None, n_probe=None,
                  samples=None, probe=None, order=None, ids=None, recency=None, evicted=None)
    results = dict(x=bits.floats((1, hidden), exponent, 2), caches=caches)
    if k:
        chosen = (np.int32, (layers, heads, min(k, n_blocks)))
        for name in ("probe", "order", "ids", "recency", "evicted"):
            del inputs[name]
        inputs |= dict(k_blocks=k, block_size=block_size, n_probe=n_probe, samples=samples,
                       importance_sums=np.abs(bits.floats(n_blocks)) if importance else None)
        results |= outputs(probe=(F32, (layers, heads, n_blocks)), order=chosen, ids=chosen,
                           recency=(np.int32, (layers, heads)), evicted=(np.int32, (layers, heads)))
    return inputs, results


# --- weights quantized into panels ---------------------------------------------------------------

PACKED_SIZES = (dict(rows=3, blocks=2, exponent=0), dict(rows=16, blocks=1, exponent=0),
                dict(rows=37, blocks=3, exponent=0), dict(rows=5, blocks=3, exponent=-19),
                dict(rows=17, blocks=2, exponent=-138), dict(rows=2, blocks=1, exponent=14))
PACKED_LIMITS = dict(rows=(0, 40), blocks=(1, 4), exponent=(-145, 14))


def packed(bits, rows, blocks, exponent, dtype, words):
    """Weights that reach subnormal scales and, for Q4_0, nearly the largest ones."""
    panels = -(-rows // 16)
    return (dict(x=bits.floats((rows, 32 * blocks), exponent, 4)),
            outputs(out_codes=(dtype, (panels, words * blocks, 16, 4)),
                    out_scales=(np.float16, (panels, blocks, 16))))


@maker(*PACKED_SIZES, **PACKED_LIMITS)
def pack_q8_0(bits, **size):
    return packed(bits, **size, dtype=np.int8, words=8)


@maker(*PACKED_SIZES, **PACKED_LIMITS)
def pack_q4_0(bits, **size):
    return packed(bits, **size, dtype=np.uint8, words=4)


# --- prefill and layers --------------------------------------------------------------------------


@maker(*(dict(kvh=2, group=2, rows=5, n=37, d=24) | change for change in (
    {}, dict(importance=1), dict(importance=1, first=2), dict(importance=1, first=9), dict(rows=1),
    dict(rows=37), dict(rows=37, importance=1), dict(rows=70, n=70, d=128, group=1),
    dict(rows=33, n=200, d=64, group=4, importance=1), dict(rows=16, n=16, d=16),
    dict(rows=17, n=17, d=17), dict(rows=15, n=31, d=1), dict(rows=100, n=100, d=32, kvh=1),
    dict(anywhere=1), dict(rows=40, n=65, anywhere=1, importance=1), dict(room=3), dict(kvh=5),
    dict(rows=8, n=300, d=128, importance=1), dict(exponent=-40), dict(exponent=40, importance=1))),
       kvh=(1, 3), group=(1, 4), rows=(1, 20), n=(1, 50), d=(1, 40), importance=(0, 1),
       first=(0, 12), anywhere=(0, 1), room=(0, 2), exponent=(-20, 20))
def prefill_attention(bits, kvh, group, rows, n, d, importance=0, first=0, anywhere=0, room=0,
                      exponent=0):
    """Causal, as in a chunk at the end of a context; `anywhere`: prefixes of any length."""
    heads = kvh * group
    k, v = (bits.floats((kvh, n + room, d), 0, 2)[:, :n] for _ in range(2))
    visible = (bits.whole(rows, 0, n) if anywhere
               else np.clip(np.arange(n - rows + 1, n + 1, dtype=np.int64), 0, n))
    receivers = outputs(out=(F32, (heads, rows, d)))
    inputs = dict(q=bits.floats((heads, rows, d), exponent + 1, 2), k=k, v=v, visible=visible)
    if importance:  # what is added to: never negative
        receivers["importance"] = np.abs(bits.floats((heads, n)))
    else:
        inputs["importance"] = None
    return inputs | dict(importance_from_row=first), receivers


@maker(*(dict(kvh=2, group=2, rows=5, n=37, d=24, block=16, before=1) | change for change in (
    {}, dict(flags=13), dict(flags=45), dict(before=0), dict(block=37), dict(block=99),
    dict(rows=37, d=16), dict(anywhere=1), dict(rows=100, n=128, d=64, block=64),
    dict(rows=100, n=260, d=64, block=128, before=0), dict(rows=37, d=17, block=1),
    dict(rows=97, n=33, d=1, group=1), dict(rows=40, n=200, d=128, block=64, anywhere=1),
    dict(room=3), dict(kvh=5, flags=11, rows=30), dict(exponent=-40), dict(exponent=6),
    dict(before=40), dict(before=200))),
       kvh=(1, 3), group=(1, 4), rows=(1, 20), n=(1, 50), d=(1, 40), block=(1, 60), before=(0, 30),
       flags=(0, 99), anywhere=(0, 1), room=(0, 2), exponent=(-20, 6))
def partial_attention(bits, kvh, group, rows, n, d, block, before=0, flags=0, anywhere=0, room=0,
                      exponent=0):
    """Without a mask, or `anywhere`: prefixes of any length. The bits of `flags`, again and again,
    say which KV heads read which block (0: no flags, all read). `before`: how far the LSEs of the
    parts before are apart, 0 if there are none; a row in eight has none in any case."""
    heads, blocks = kvh * group, -(-n // block)
    k, v = (bits.floats((kvh, n + room, d), 0, 2)[:, :n] for _ in range(2))
    visible = bits.whole(rows, 0, n) if anywhere else np.full(rows, n, np.int64)
    out, lse = np.zeros((heads, rows, d), F32), np.full((heads, rows), -np.inf)
    if before:
        some = bits.whole((heads, rows), 0, 7) > 0
        lse[some] = (bits.floats((heads, rows), 0).astype(np.float64) * before)[some]
        out[some] = bits.floats((heads, rows, d), 0, 2)[some]
    reads = np.array([flags >> i % 7 & 1 for i in range(blocks * kvh)], np.uint8)
    return (dict(q=bits.floats((heads, rows, d), exponent + 1, 2), k=k, v=v, visible=visible,
                 block_size=block, reads=reads.reshape(blocks, kvh) if flags else None),
            dict(out=out, lse=lse))


@maker(*(dict(kvh=2, group=2, q_squares=3, k_squares=4, stride=4, d=24) | change for change in (
    {}, dict(stride=1), dict(stride=8, d=128), dict(stride=16, d=64, k_squares=7), dict(d=1),
    dict(d=17), dict(q_squares=1, k_squares=1), dict(group=1, q_squares=9), dict(group=4),
    dict(k_squares=20, d=16), dict(room=3), dict(exponent=-40), dict(exponent=40))),
       kvh=(1, 3), group=(1, 3), q_squares=(1, 5), k_squares=(1, 5), stride=(1, 6), d=(1, 40),
       room=(0, 2), exponent=(-20, 20))
def antidiagonal_scores(bits, kvh, group, q_squares, k_squares, stride, d, room=0, exponent=0):
    n = k_squares * stride
    return (dict(q=bits.floats((kvh * group, q_squares * stride, d), exponent, 2),
                 k=bits.floats((kvh, n + room, d), 0, 2)[:, :n], stride=stride),
            outputs(out=(F32, (kvh * group, q_squares, k_squares))))


@maker(*(dict(rows=5, d=20) | changed for changed in (
    {}, dict(d=1), dict(rows=30, d=64), dict(d=16, spread=9), dict(d=130, empty=2))),
       rows=(0, 40), d=(1, 40), spread=(0, 10), empty=(0, 3))
def merge_parts(bits, rows, d, spread=3, empty=0):
    lse = [bits.whole(rows, -2**20, 2**20) * 2.0**(spread - 20) for _ in range(2)]
    lse[0][:empty], lse[1][1 : 1 + empty] = -np.inf, -np.inf
    return (dict(part=bits.floats((rows, d), 0, 2), part_lse=lse[0]),
            dict(out=bits.floats((rows, d), 0, 2), lse=lse[1]))


@maker(*(dict(heads=2, rows=6, columns=20, size=4) | changed for changed in (
    {}, dict(size=1), dict(size=30), dict(seen=17), dict(causal_from=14), dict(rows=17, size=8),
    dict(columns=1), dict(columns=200, size=16), dict(columns=33, causal_from=0, first=2, last=5),
    dict(exponent=-30), dict(exponent=60), dict(first=6))),
       heads=(0, 3), rows=(0, 9), columns=(1, 40), size=(1, 20), seen=(1, 40),
       causal_from=(-1, 40), first=(0, 9), last=(0, 9), exponent=(-20, 30))
def block_sums(bits, heads, rows, columns, size, seen=None, causal_from=-1, first=0, last=None,
               exponent=3):
    return (dict(scores=bits.floats((heads, rows, columns), exponent, 2), size=size, rate=0.25,
                 seen=columns if seen is None else min(seen, columns), causal_from=causal_from,
                 first_row=min(first, rows), last_row=rows if last is None else min(last, rows)),
            outputs(out=(F32, (heads, -(-rows // size), -(-columns // size)))))


@maker(*(dict(rows=3, d=d, exponent=exponent, eps=eps) for d, exponent, eps in (
    (37, 0, -20), (1, 0, -20), (15, 0, -20), (16, 0, -20), (17, 0, -10), (128, 3, -20),
    (1000, 0, -20), (33, -40, -20), (33, -40, -100), (33, 50, -20))),
       rows=(0, 5), d=(1, 70), exponent=(-30, 40), eps=(-30, 0))
def rms_norm(bits, rows, d, exponent, eps):
    return (dict(x=bits.floats((rows, d), exponent, 3), gain=bits.floats(d, 1), eps=2.0**eps),
            outputs(out=(F32, (rows, d))))


@maker(*(dict(n=5, pairs=pairs, most=most, theta=theta) for pairs, most, theta in (
    (12, 100, 10_000), (1, 5, 10_000), (64, 40_000, 1_000_000), (64, 2**30, 1_000_000),
    (16, 4_000, 500_000), (7, 1000, 2))),
       n=(0, 8), pairs=(1, 40), most=(0, 2**30), theta=(1, 2_000_000))
def rope_tables(bits, n, pairs, most, theta):
    return (dict(positions=bits.whole(n, 0, most), theta=float(theta)),
            outputs(out_cos=(F32, (n, pairs)), out_sin=(F32, (n, pairs))))


@maker(*(dict(tokens=tokens, heads=heads, pairs=pairs, exponent=exponent)
         for tokens, heads, pairs, exponent in (
             (3, 2, 12, 0), (1, 1, 1, 0), (2, 4, 64, 0), (5, 3, 8, 0), (4, 1, 17, 0),
             (70, 3, 16, 0), (3, 2, 12, -60), (3, 2, 12, 60))),
       tokens=(0, 5), heads=(1, 4), pairs=(1, 40), exponent=(-40, 60))
def rope(bits, tokens, heads, pairs, exponent):
    return (dict(x=bits.floats((tokens, heads, 2 * pairs), exponent, 2),
                 cos=bits.floats((tokens, pairs)), sin=bits.floats((tokens, pairs))),
            outputs(out=(F32, (tokens, heads, 2 * pairs))))


@maker(*(dict(pairs=pairs, theta=theta) for pairs, theta in (
    (12, 10_000), (1, 5), (64, 1_000_000), (32, 100_000), (7, 2))),
       pairs=(0, 40), theta=(1, 2_000_000))
def rope_powers(bits, pairs, theta):
    return dict(theta=float(theta)), outputs(out=(F32, pairs))


@maker(*(dict(n=5, pairs=pairs, most=most, exponent=exponent, factor=factor)
         for pairs, most, exponent, factor in (
             (12, 100, -3, 4), (1, 5, 0, 4), (64, 40_000, -9, 4), (64, 2**30, -4, 5),
             (16, 4_000, 0, 3), (7, 1000, 2, 4))),
       n=(0, 8), pairs=(0, 40), most=(0, 2**24), exponent=(-20, 4), factor=(0, 20))
def rope_angles(bits, n, pairs, most, exponent, factor):
    """`factor` counts quarters."""
    return (dict(positions=bits.whole(n, 0, most), frequencies=bits.floats(pairs, exponent),
                 factor=factor / 4),
            outputs(out_cos=(F32, (n, pairs)), out_sin=(F32, (n, pairs))))


@maker(*(dict(tokens=3, heads=4, kv_heads=2, pairs=pairs, gains=gains, exponent=exponent)
         for pairs, gains, exponent in (
             (12, 3, 0), (1, 3, 0), (64, 3, 2), (8, 0, 0), (17, 3, 0), (32, 1, -3), (24, 2, 4),
             (12, 0, -60), (12, 3, 20))),
       dict(tokens=70, heads=6, kv_heads=3, pairs=16, gains=3, exponent=0),
       dict(tokens=1, heads=16, kv_heads=8, pairs=64, gains=3, exponent=0),
       tokens=(0, 5), heads=(1, 4), kv_heads=(1, 4), pairs=(1, 40), gains=(0, 3),
       exponent=(-20, 30))
def split_heads(bits, tokens, heads, kv_heads, pairs, gains, exponent):
    """`gains`: 1 for that of q, 2 for that of k, 3 for both."""
    d = 2 * pairs
    return (dict(stacked=bits.floats((tokens, heads + 2 * kv_heads, d), exponent, 2),
                 q_gain=bits.floats(d, 1) if gains & 1 else None,
                 k_gain=bits.floats(d, 1) if gains & 2 else None, eps=2.0**-20,
                 cos=bits.floats((tokens, pairs)), sin=bits.floats((tokens, pairs))),
            outputs(q=(F32, (heads, tokens, d)), k=(F32, (kv_heads, tokens, d)),
                    v=(F32, (kv_heads, tokens, d))))


@maker(*(dict(rows=rows, d=d, exponent=exponent) for rows, d, exponent in (
    (3, 37, 2), (1, 1, 0), (2, 16, 3), (3, 15, 5), (2, 128, 3), (1, 1000, 2), (3, 37, -40),
    (3, 37, 100), (5, 33, 6))),
       rows=(0, 4), d=(1, 60), exponent=(-30, 120))
def softmax(bits, rows, d, exponent):
    return dict(x=bits.floats((rows, d), exponent, 2)), outputs(out=(F32, (rows, d)))


@maker(*(dict(rows=rows, d=d, exponent=exponent) for rows, d, exponent in (
    (3, 37, 2), (1, 1, 0), (2, 16, 4), (3, 15, 6), (2, 128, 3), (1, 1000, 2), (3, 37, -40),
    (3, 37, 20), (5, 33, 7))),
       rows=(0, 4), d=(1, 60), exponent=(-30, 30))
def silu_mul(bits, rows, d, exponent):
    return (dict(gate=bits.floats((rows, d), exponent, 2), up=bits.floats((rows, d), 1, 2)),
            outputs(out=(F32, (rows, d))))


@maker(*(dict(n=n, bad=bad) for n in (37, 1, 16, 100) for bad in (0, 1)),
       n=(1, 80), bad=(0, 1))
def all_finite(bits, n, bad):
    x = bits.floats(n, 100, 20)
    if bad:
        x[bits.whole(1, 0, n - 1)] = np.inf
    return dict(x=x), {}


@maker(*(dict(n=n, ties=ties) for ties in (1, 0) for n in (37, 1, 15, 16, 17, 128, 1000)),
       n=(1, 80), ties=(0, 1))
def argmax(bits, n, ties):
    return dict(x=bits.whole(n, -9, 3).astype(F32) if ties else bits.floats(n, 0, 20)), {}
