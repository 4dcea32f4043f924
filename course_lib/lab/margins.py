"""On which prompts two programs must write the same text: how clear every choice is."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

CLEAR = 10.0
"""How many times the largest difference of a logit a margin must be."""


class Clearness(NamedTuple):
    """Of one prompt's steps: the smallest lead of the best logit over the second, and the largest
    difference of any logit between two programs."""

    margin: float
    difference: float

    @property
    def allows_comparison(self) -> bool:
        """Whether rounding cannot have decided a choice: the texts must be the same."""
        return self.margin > CLEAR * self.difference


def clearness(ours: np.ndarray, theirs: np.ndarray) -> Clearness:
    """How clear the choices are in logits `[steps, vocab]` that two programs gave the same ids."""
    second, best = np.moveaxis(np.partition(ours, -2, axis=-1)[..., -2:], -1, 0)
    return Clearness(float((best - second).min()), float(np.abs(ours - theirs).max()))
