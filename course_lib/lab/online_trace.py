"""Online softmax written down token by token: what it holds after each, and when it rescales."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from course_lib.arrays import F32, as_float32
from course_lib.attention_common import quiet

ORDERS = ("as they come", "sorted", "reversed", "random")


@dataclass(frozen=True)
class OnlineTrace:
    """The state after every token: float32 arrays over the n tokens in the order read.

    max, total: the running maximum M and sum S; acc [n, d]: the accumulator A; shrink: what S and
    A were multiplied by before the token was added, 1 where the maximum did not grow; weight: what
    was then added to S, 0 for a masked token; grew: whether the maximum grew.
    """

    scores: np.ndarray
    max: np.ndarray
    total: np.ndarray
    acc: np.ndarray
    shrink: np.ndarray
    weight: np.ndarray
    grew: np.ndarray

    @property
    def rescales(self) -> int:
        """Tokens whose score was larger than all before it, the first one included."""
        return int(self.grew.sum())

    @property
    @quiet
    def so_far(self) -> np.ndarray:
        """A / S after every token, float32 [n, d]; NaN while every token was masked."""
        return self.acc / self.total[:, None]

    @property
    def out(self) -> np.ndarray:
        """The result, float32 [d]; zeros where every token is masked."""
        return self.acc[-1] / self.total[-1] if self.total[-1] > 0 else self.acc[-1]


@quiet
def trace_online_softmax(scores: Any, v: Any) -> OnlineTrace:
    """Run attention.online_softmax over scores [n] and values [n, d], n >= 1, keeping every state.

    A score of -inf marks a masked token. The same operations in the same order, so the same bits.
    Raises ValueError for shapes that do not fit and for a score that is NaN or +inf.
    """
    scores, v = as_float32(scores, "scores", 1), as_float32(v, "v", 2)
    if len(scores) != len(v) or not len(scores):
        raise ValueError("scores [n] and v [n, d] must hold the same number of tokens, at least "
                         f"one, not {len(scores)} and {len(v)}.")
    if np.isnan(scores).any() or (scores == np.inf).any():
        raise ValueError("scores must be numbers or -inf.")
    n, (running, total), acc = len(scores), (F32(-np.inf), F32(0)), np.zeros(v.shape[1], F32)
    held = OnlineTrace(scores, np.empty(n, F32), np.empty(n, F32), np.empty(v.shape, F32),
                       np.ones(n, F32), np.zeros(n, F32), np.zeros(n, bool))
    for t, score in enumerate(scores):
        if score != -np.inf:
            if score > running:
                held.shrink[t], held.grew[t] = np.exp(running - score), True
                total, acc, running = total * held.shrink[t], acc * held.shrink[t], score
            held.weight[t] = np.exp(score - running)
            total, acc = total + held.weight[t], acc + held.weight[t] * v[t]
        held.max[t], held.total[t], held.acc[t] = running, total, acc
    return held


def arrange(scores: Sequence[float] | np.ndarray, order: str, seed: int = 0) -> np.ndarray:
    """The order in which tokens are read: indices int [n].

    order: one of ORDERS; "sorted" has the smallest score first, equal ones by index, "reversed"
    is its mirror image, "random" is drawn with `seed`. Raises ValueError for another word.
    """
    n = len(scores)
    if order not in ORDERS:
        raise ValueError(f"order {order!r} is unknown; use one of {', '.join(ORDERS)}.")
    if order == "as they come":
        return np.arange(n)
    if order == "random":
        return np.random.default_rng(seed).permutation(n)
    ascending = np.argsort(scores, kind="stable")
    return ascending if order == "sorted" else ascending[::-1]


def expected_rescales(n: int) -> float:
    """1 + 1/2 + … + 1/n: new maxima on average, when n different scores come in random order."""
    return float(sum(1 / i for i in range(1, n + 1)))
