"""Attention of one query over parts of its context, and their merge step by step."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from course_lib.arrays import F32
from course_lib.prefill.lse import exp, merge_into, partial_attention


@dataclass(frozen=True, eq=False)
class MergeStudy:
    """q float32 [d], one query; k, v float32 [n, d]; edges: part p holds tokens edges[p] to
    edges[p + 1] - 1; order: the parts in the order in which they are merged."""

    q: np.ndarray
    k: np.ndarray
    v: np.ndarray
    edges: tuple[int, ...]
    order: tuple[int, ...]

    @cached_property
    def parts(self) -> tuple[np.ndarray, np.ndarray]:
        """Every part's output float32 [parts, d], and LSE float64 [parts]."""
        pieces = [partial_attention(self.q[None, None], self.k[None, a:b], self.v[None, a:b])
                  for a, b in zip(self.edges, self.edges[1:], strict=False)]
        return (np.concatenate([out[0] for out, _ in pieces]),
                np.concatenate([lse[0] for _, lse in pieces]))

    @cached_property
    def exact(self) -> tuple[np.ndarray, float]:
        """The output and LSE of all tokens in one part."""
        out, lse = partial_attention(self.q[None, None], self.k[None], self.v[None])
        return out[0, 0], float(lse[0, 0])

    @cached_property
    def running(self) -> tuple[np.ndarray, np.ndarray]:
        """The output [parts, d] and LSE [parts] after each merge, in order."""
        out, lse = np.zeros((1, len(self.q)), F32), np.full(1, -np.inf)
        outs, lses = [], []
        part_outs, part_lses = self.parts
        for part in self.order:
            merge_into(out, lse, part_outs[part : part + 1], part_lses[part : part + 1])
            outs.append(out[0].copy())
            lses.append(float(lse[0]))
        return np.array(outs), np.array(lses)

    @cached_property
    def weights(self) -> np.ndarray:
        """e^(lse - M) of every part, M the largest LSE."""
        lses = self.parts[1]
        return exp(lses - lses.max())

    @property
    def shares(self) -> np.ndarray:
        """Every part's share of the attention: the weights, divided by their sum."""
        return self.weights / self.weights.sum()

    def token_shares(self) -> np.ndarray:
        """Every token's share of the attention, float64 [n]."""
        scores = (self.k.astype(np.float64) @ self.q) / np.sqrt(len(self.q))
        weights = np.exp(scores - scores.max())
        return weights / weights.sum()
