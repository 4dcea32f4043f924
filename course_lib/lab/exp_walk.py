"""Every float32 of a range through the kernels' exponential function, a stretch at a time."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import Any

import numpy as np

from course_lib import backend
from course_lib.exponential import HIGHEST, LOWEST, exp_poly, ulp_error

STRETCH = 2**23  # floats of one record: those with one exponent and one sign
_PIECE = 2**18  # floats in memory at a time


@dataclass(frozen=True)
class ExpWalk:
    """The range walked: all float32 from `low` (below 0) to `high` (above 0)."""

    low: float = LOWEST
    high: float = HIGHEST

    @property
    def prompts(self) -> int:
        """How many stretches there are."""
        return sum(_stretches(end) for end in (self.low, self.high))

    def arms(self) -> tuple[None]:
        """One record a stretch."""
        return (None,)


def bits(end: float) -> int:
    """The bits of |end| as float32; positive floats are ordered as their bits are."""
    return int(np.array(abs(end), np.float32).view(np.int32))


def _stretches(end: float) -> int:
    return bits(end) // STRETCH + 1


def stretch(walk: ExpWalk, index: int) -> tuple[int, int, bool]:
    """Bits of the first magnitude of a stretch, how many there are, and whether they are negative.

    The stretches of both signs begin at 0, in the order of magnitude; the negative ones come first.
    """
    negative = index < _stretches(walk.low)
    first = STRETCH * (index if negative else index - _stretches(walk.low))
    last = bits(walk.low if negative else walk.high)
    return first, min(STRETCH, last + 1 - first), negative


def stretch_of(walk: ExpWalk, x: float) -> int:
    """The stretch in which a float32 other than 0 lies; ValueError outside the range."""
    if not walk.low <= x <= walk.high:
        raise ValueError(f"{x} is not in the range from {walk.low} to {walk.high}.")
    return bits(x) // STRETCH + (0 if x < 0 else _stretches(walk.low))


def floats(first: int, count: int, negative: bool, every: int = 1) -> np.ndarray:
    """The float32 whose bits are first, first + every, … below first + count, of that sign."""
    x = np.arange(first, first + count, every, dtype=np.int32).view(np.float32)
    return -x if negative else x


def exp_records(engine: Any, walk: ExpWalk, index: int, every: int = 1) -> list[dict[str, Any]]:
    """One stretch: how many floats, the largest error in ulp and where, how many results are the
    float32 nearest to the exact value, and the digest of all results.

    Computed by every compiled variant of this machine, and by the NumPy definition where there is
    none; RuntimeError where two of them differ in a bit. ``every`` walks a sample. (`engine` is not
    needed.)
    """
    first, count, negative = stretch(walk, index)
    ways = list(backend.variants()) or ["numpy"]
    digest, correct, worst, worst_x = hashlib.sha256(), 0, -1.0, 0.0
    for start in range(first, first + count, _PIECE * every):
        x = floats(start, min(_PIECE * every, first + count - start), negative, every)
        results = [compute(way, x) for way in ways]
        for way, other in zip(ways, results, strict=True):
            if other.tobytes() != results[0].tobytes():
                raise RuntimeError(f"{way} and {ways[0]} differ near x = {x[0]}")
        digest.update(np.ascontiguousarray(results[0], "<f4").tobytes())
        error = np.abs(ulp_error(results[0], x))
        correct += int((np.exp(x.astype(np.float64)).astype(np.float32) == results[0]).sum())
        top = int(error.argmax())
        if error[top] > worst:
            worst, worst_x = float(error[top]), float(x[top])
    low, high = sorted(float(floats(end, 1, negative)[0]) for end in (first, first + count - 1))
    return [{"index": index, "from": low, "to": high, "floats": len(range(0, count, every)),
             "max_ulp": round(worst, 4), "worst_x": worst_x, "correct": correct,
             "variants": ways, "digest": digest.hexdigest()[:16]}]


def compute(way: str, x: np.ndarray) -> np.ndarray:
    """exp of float32 x by a compiled variant, or by the definition: "numpy"."""
    if way == "numpy":
        return exp_poly(x)
    out = np.empty_like(x)
    with backend.using(way):
        kernel = backend.kernel("exp")
    assert kernel is not None  # a compiled variant has every kernel
    kernel(x, out)
    return out


def exp_summary(records: list[dict[str, Any]]) -> dict[str, Any]:
    """What the whole walk found, over all floats and over those up to 0 (a softmax's)."""
    summary: dict[str, Any] = {"variants": sorted({v for r in records for v in r["variants"]})}
    for name, rows in (("all", records), ("up_to_0", [r for r in records if r["to"] <= 0])):
        worst = max(rows, key=lambda r: r["max_ulp"])
        floats_seen = sum(r["floats"] for r in rows)
        summary[name] = {"floats": floats_seen, "from": min(r["from"] for r in rows),
                         "to": max(r["to"] for r in rows), "max_ulp": worst["max_ulp"],
                         "worst_x": worst["worst_x"],
                         "correct_share": round(sum(r["correct"] for r in rows) / floats_seen, 6)}
    return summary
