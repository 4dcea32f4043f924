"""Stored results of XAttention's and Quest's own functions, and the inputs they belong to.

golden/xattn/README.md says what each file holds.
"""

import functools
import hashlib
import json
from pathlib import Path

import numpy as np
import pytest

from course_lib.lab import planted

FOLDER = Path(__file__).parent / "golden" / "xattn"
F32 = np.float32


def names(group):
    """The files of a group, by the letter that their names begin with."""
    return sorted(path.stem for path in FOLDER.glob(f"{group}*.npz"))


class Golden:
    """One file: ``meta``, and arrays by name with boolean ones unpacked."""

    def __init__(self, name):
        with np.load(FOLDER / f"{name}.npz", allow_pickle=False) as file:
            self.arrays = {key: file[key] for key in file.files}
        self.meta = json.loads(str(self.arrays.pop("meta")))

    def __getitem__(self, name):
        shape = self.meta.get("bool_shapes", {}).get(name)
        array = self.arrays[name]
        if shape is None:
            return array
        return np.unpackbits(array)[: np.prod(shape)].astype(bool).reshape(shape)

    def at(self, kind, threshold):
        return self[f"{kind}_t{round(threshold * 100):03d}"]


@functools.cache
def load(name):
    return Golden(name)


@functools.lru_cache(maxsize=8)  # all of group S, which several tests read
def inputs(name):
    """q, k, v of a file; a machine whose NumPy draws other numbers skips the test."""
    meta = load(name).meta
    n = meta["Lk"] if "Lk" in meta else meta["hist_blocks"] * meta["cpu_block"] + meta["Lq"]
    arrays = GENERATORS[meta["kind"]](meta["seed"], meta["H"], meta["Hk"], meta["Lq"], n,
                                      meta["d"], **meta["gen"])
    if "zero_query_rows_from" in meta:
        arrays[0][:, meta["zero_query_rows_from"] :] = 0
    same_digest(b"".join(a.tobytes() for a in arrays), meta["sha256_qkv"])
    return arrays


def block_sums_input(name):
    """block_sums of an F file."""
    meta = load(name).meta
    rng, shape = np.random.default_rng(meta["seed"]), (meta["H"], meta["Q"], meta["K"])
    sums = {"exp2": lambda: rng.exponential(size=shape) ** 2,
            "int": lambda: rng.integers(0, 4, size=shape),
            "zero": lambda: np.zeros(shape), "flat": lambda: np.ones(shape)}[meta["input"]]()
    sums = sums.astype(F32)
    if meta["causal"]:
        row, column = np.ogrid[: meta["Q"], : meta["K"]]
        sums = (sums * (column <= row + meta["current_index"])).astype(F32)
    same_digest(sums.tobytes(), meta["sha256_block_sums"])
    return sums


def same_digest(data, expected):
    if hashlib.sha256(data).hexdigest() != expected:
        pytest.skip("this NumPy draws other numbers from the seed")


def gauss(seed, H, Hk, Lq, Lk, d):  # noqa: N803
    rng = np.random.default_rng(seed)
    return tuple(rng.standard_normal(shape, dtype=F32)
                 for shape in ((H, Lq, d), (Hk, Lk, d), (Hk, Lk, d)))


def needle(*shape, blk, pos, **options):
    return planted.needle(*shape, place=blk + pos, seekers=options.pop("heads"), **options)


def per_head_needle(*shape, blk, pos, **options):
    return planted.per_head_needle(*shape, block=blk, offset=pos, **options)


GENERATORS = {"gauss": gauss, "topic": planted.topic, "needle": needle,
              "per_head_needle": per_head_needle}
