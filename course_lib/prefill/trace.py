"""Why each block of history is read, or not: the trace of one choice."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from course_lib.selection import ranks

REASONS = ("not_selected", "sink", "threshold", "vote", "budget", "safety_first", "safety_last",
           "short_query", "all")
"""The diagonal lies in the chunk, which is always read, and so in no choice."""


@dataclass(frozen=True)
class BlockTrace:
    """One block of history in one choice.

    head: the KV head whose list this is about, None where all share one. score: the block's mean
    share of the softmax, or the policy's own score; rank: 1 = highest, ties to the lower block.
    mass_before: scores of the blocks ranked before it; need: what scores had to reach. votes:
    share of (KV head, query block) pairs that kept it. NaN where the policy has no such number.
    """

    block: int
    head: int | None
    score: float
    rank: int
    mass_before: float
    need: float
    votes: float
    reason: str

    @property
    def selected(self) -> bool:
        return self.reason != "not_selected"


@dataclass(frozen=True, eq=False)
class Trace(Sequence[BlockTrace]):
    """The BlockTraces of a choice, list after list, kept as columns: most are never looked at.

    scores, votes float64 and reasons (places in REASONS) int8, all [lists, blocks]; a list is one
    KV head's, or the only one. sums: whether adding scores up means anything.
    """

    scores: np.ndarray
    votes: np.ndarray
    reasons: np.ndarray
    need: float = float("nan")
    sums: bool = True

    def __len__(self) -> int:
        return self.scores.size

    def __getitem__(self, index: Any) -> Any:
        return tuple(self)[index]

    def __iter__(self) -> Iterator[BlockTrace]:
        for head in range(len(self.scores)):
            yield from self._of_list(head)

    def _of_list(self, head: int) -> Iterator[BlockTrace]:
        scores, places = self.scores[head], ranks(self.scores[head])
        before = np.full(len(scores), np.nan)
        if self.sums:
            order = np.argsort(places)
            before[order] = np.concatenate(([0.0], np.cumsum(scores[order])[:-1]))[: len(scores)]
        for block, place in enumerate(places.tolist()):
            yield BlockTrace(
                block, head if len(self.scores) > 1 else None, float(scores[block]), place,
                float(before[block]), self.need, float(self.votes[head, block]),
                REASONS[self.reasons[head, block]],
            )


def reason_codes(chosen: np.ndarray, reason: str) -> np.ndarray:
    """`reason` for every block that bool `chosen` [lists, blocks] holds, int8 places in REASONS."""
    return np.where(chosen, REASONS.index(reason), 0).astype(np.int8)
