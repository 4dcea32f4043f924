"""Calls of every compiled operation with inputs that are the same on every machine.

Inputs come from integers: raw bits of a counter-based generator, scaled by powers of two. A normal
sampler or a library's exp would differ in a last bit somewhere. `CASES` are the calls whose result
digests `golden/kernel_digests.json` holds; the fuzz tests spoil the arguments of small ones.
"""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Callable
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
        fresh = {name: np.full_like(self.arguments[name], 0) for name in self.outputs}
        for array in fresh.values():
            array.view(np.uint8)[...] = POISON
        returned = Call(self.operation, self.arguments | fresh, self.outputs)(variant)
        digest = hashlib.sha256(repr(returned).encode())
        for name, array in fresh.items():
            digest.update(f"{name} {array.dtype.str} {array.shape}".encode())
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
