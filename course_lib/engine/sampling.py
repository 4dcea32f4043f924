"""Choosing the next token from its logits: greedy, or drawn from what temperature and filters keep.

The filters are those that `transformers` applies, in its order: temperature, top-k, top-p, min-p.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from course_lib import backend
from course_lib.arrays import as_float32, whole_number
from course_lib.engine.checks import check_count
from course_lib.engine.layers import argmax

SMALLEST_EXPONENT = -87.0
"""Below it exp is 0, as in the kernels: 1e-38 of the best token's weight is never drawn."""


@dataclass(frozen=True)
class Sampler:
    """How a token is chosen; it has no state: seed, position and logits alone decide.

    * temperature 0 (default) is greedy: the largest logit, the lowest id on ties; the filters,
      which always keep that token, change nothing. Else a token weighs exp((logit - max)/T).
    * top_k: the k largest logits stay; of equal ones the lower ids. None: all.
    * top_p: of these the fewest of the heaviest whose weights add up to top_p of the sum stay
      (equal logits: lower ids first). 1: all.
    * min_p: tokens lighter than min_p times the heaviest go. 0: none.

    The draw for a position inverts the cumulative weights, in the order of ids, at a number that
    depends on seed and position only (Philox, a counter-based generator: Salmon et al. 2011).

    Promised: greedy, the same id on every backend. A drawn one, the same for the same logits, seed
    and position on every compiled variant and machine: exp is the kernels' own, sums are float64
    from left to right, divisions and comparisons are IEEE's. On NumPy exp may differ in its last
    bits, and with it the token whose border a draw hits.
    """

    temperature: float = 0.0
    top_k: int | None = None
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("temperature", "top_p", "min_p"):
            _check_number(name, getattr(self, name))
        if self.temperature != 0 and not 1e-30 <= self.temperature <= 1e30:
            raise ValueError(
                f"temperature must be 0 (greedy) or from 1e-30 to 1e30, not {self.temperature!r}"
            )
        check_count("top_k", self.top_k, optional=True)
        if not 0 < self.top_p <= 1:
            raise ValueError(f"top_p must be above 0 and at most 1, not {self.top_p!r}")
        if not 0 <= self.min_p <= 1:
            raise ValueError(f"min_p must be from 0 to 1, not {self.min_p!r}")
        if isinstance(self.seed, bool) or not 0 <= whole_number(self.seed, "seed") < 2**64:
            raise ValueError(f"seed must be an integer from 0 to 2^64 - 1, not {self.seed!r}")

    def __call__(self, logits: np.ndarray, position: int) -> int:
        """The token at `position` (the number of tokens before it) with these float32 `[vocab]`.

        Raises ValueError for NaN, +infinity, or nothing but -infinity, which masks a token.
        """
        if self.temperature == 0:
            return argmax(_checked(logits))
        ids, weights = self.kept(logits)
        sums = _running_sums(weights)
        # The largest draw times the sum may round up to the sum, which no token's share holds.
        aim = min(self._uniform(position) * sums[-1], np.nextafter(sums[-1], 0))
        return int(ids[np.searchsorted(sums, aim, side="right")])

    def kept(self, logits: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Ids of the tokens that may be drawn, ascending, and their float32 weights (the best: 1).

        For temperature 0 that is one token. Raises ValueError as a call does.
        """
        logits = _checked(logits)
        if self.temperature == 0:
            return np.array([argmax(logits)]), np.ones(1, np.float32)
        ids = np.arange(len(logits)) if self.top_k is None else _best(logits, self.top_k)
        logits = logits if self.top_k is None else logits[ids]
        weights = self._weights(logits)
        if self.top_p < 1:
            stay = _best(logits, self._nucleus(logits, weights))
            ids, weights = ids[stay], weights[stay]
        if self.min_p > 0:
            heavy = weights >= np.float64(self.min_p)
            ids, weights = ids[heavy], weights[heavy]
        return ids, weights

    def _weights(self, logits: np.ndarray) -> np.ndarray:
        """exp((logit - max)/temperature); difference and quotient are rounded to float32."""
        with np.errstate(over="ignore"):  # a tiny temperature makes infinities: weight 0
            quotient = (logits - logits.max()) / np.float32(self.temperature)
        return _exp(np.maximum(quotient, np.float32(2 * SMALLEST_EXPONENT), out=quotient))

    def _nucleus(self, logits: np.ndarray, weights: np.ndarray) -> int:
        """How many of the heaviest tokens it takes to reach top_p of the sum of all."""
        total = _running_sums(weights)[-1]
        # All that are lighter than this make up less than what top_p leaves out: do not sort them.
        light = (1 - self.top_p) * total / len(weights)
        sums = _running_sums(self._weights(np.sort(logits[weights >= light])[::-1]))
        return int(np.searchsorted(sums, self.top_p * total)) + 1

    def _uniform(self, position: int) -> float:
        """A number in [0, 1), a multiple of 2^-53: the top bits of one word of Philox."""
        word = np.random.Philox(key=self.seed, counter=whole_number(position, "position"))
        return (int(word.random_raw()) >> 11) * 2.0**-53


def greedy(logits: np.ndarray) -> tuple[int, float]:
    """The best token (the lowest id on ties) and its margin over the second best."""
    best = argmax(logits)
    return best, margin(logits, best)


def margin(logits: np.ndarray, best: int) -> float:
    """By how much the largest logit, at `best`, exceeds the second largest; inf if it is alone."""
    rest = [part.max() for part in (logits[:best], logits[best + 1 :]) if len(part)]
    return float(logits[best] - max(rest)) if rest else math.inf


def _best(logits: np.ndarray, count: int) -> np.ndarray:
    """Indexes of the `count` largest, ascending; of equal ones the lower indexes."""
    if count >= len(logits):
        return np.arange(len(logits))
    last = np.partition(logits, -count)[-count]
    chosen = logits > last
    chosen[np.flatnonzero(logits == last)[: count - np.count_nonzero(chosen)]] = True
    return np.flatnonzero(chosen)


def _running_sums(weights: np.ndarray) -> np.ndarray:
    """Sums of the first 1, 2, … weights in float64, from left to right on every machine."""
    sums = weights.astype(np.float64)
    return np.cumsum(sums, out=sums)


def _exp(x: np.ndarray) -> np.ndarray:
    """exp of float32 numbers up to 0; 0 below -87."""
    if (compiled := backend.kernel("exp")) is None:
        return np.where(x < SMALLEST_EXPONENT, np.float32(0), np.exp(x))
    compiled(x, out := np.empty_like(x))
    return out


def _checked(logits: np.ndarray) -> np.ndarray:
    logits = np.ascontiguousarray(as_float32(logits, "logits", 1))
    if not len(logits):
        raise ValueError("logits must hold at least one number")
    top = logits.max()  # NaN if any of them is
    if not np.isfinite(top):
        what = "nothing but -infinity" if top < 0 else "NaN" if np.isnan(top) else "infinity"
        raise ValueError(f"logits hold {what}: check the step that produced them")
    return logits


def _check_number(name: str, value: float) -> None:
    number = isinstance(value, (int, float, np.integer, np.floating))
    if isinstance(value, bool) or not number or not -math.inf < value < math.inf:
        raise ValueError(f"{name} must be a finite number, not {value!r}")
