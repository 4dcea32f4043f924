"""What was chosen for one query head, and why."""

import functools
from dataclasses import dataclass

import numpy as np

REASONS = ("importance", "probe", "recency", "evicted_by_recency", "not_selected")


@dataclass(frozen=True, eq=False)
class Selection:
    """The blocks chosen for one query head, with the trace of reasons.

    ids: chosen blocks ascending, int64. order: the same blocks in order of choice (a recency
    block stands where the block that it replaced stood). probe, importance: float32 [n_blocks],
    the scores that decided (importance None if none was given). num_importance: how many blocks
    at the head of ``order`` were reserved by importance. recency, evicted: the block that recency
    put in and the one that it threw out, or None.
    """

    ids: np.ndarray
    order: np.ndarray
    probe: np.ndarray
    importance: np.ndarray | None
    num_importance: int
    recency: int | None = None
    evicted: int | None = None

    @functools.cached_property
    def probe_rank(self) -> np.ndarray:
        """Rank of every block by probe score, int64: 1 = highest, ties to the lower index."""
        return ranks(self.probe)

    @functools.cached_property
    def importance_rank(self) -> np.ndarray | None:
        """Rank of every block by importance sum, int64: 1 = highest; None without importance."""
        return None if self.importance is None else ranks(self.importance)

    @functools.cached_property
    def reason(self) -> tuple[str, ...]:
        """For every block one of REASONS."""
        reasons = ["not_selected"] * len(self.probe)
        for place, block in enumerate(self.order.tolist()):
            reasons[block] = "importance" if place < self.num_importance else "probe"
        if self.recency is not None and self.evicted is not None:
            reasons[self.recency] = "recency"
            reasons[self.evicted] = "evicted_by_recency"
        return tuple(reasons)

    def tokens(self, n: int, block_size: int = 32) -> np.ndarray:
        """Return the token positions of the chosen blocks in a context of n, int64 ascending."""
        tokens = (self.ids[:, None] * block_size + np.arange(block_size)).ravel()
        return tokens[: np.searchsorted(tokens, n)]


def ranks(scores: np.ndarray) -> np.ndarray:
    """Return the rank of every score, int64: 1 = highest, ties to the lower index."""
    places = np.empty(len(scores), np.int64)
    places[np.argsort(-scores, kind="stable")] = np.arange(1, len(scores) + 1)
    return places
