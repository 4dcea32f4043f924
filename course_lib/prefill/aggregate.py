"""From the masks of all heads and query blocks to the list of blocks that is read.

Whole blocks are read for all heads at once, so what each head keeps must become one list, or one
per KV head. How this is done decides what gets lost: with ``majority``, the rule of the policy's
design document, a block that one KV head needs is outvoted by those that do not.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from course_lib.arrays import as_float32, positive_int
from course_lib.prefill.find_blocks import check_threshold, descending, mass_before
from course_lib.prefill.trace import REASONS, Trace, reason_codes


class Aggregated(NamedTuple):
    """by_head: ascending int64 blocks, one array for all KV heads or one for each. trace: why."""

    by_head: tuple[np.ndarray, ...]
    trace: Trace


@dataclass(frozen=True, eq=False)
class Ballot:
    """What an aggregator is given.

    votes: int64 [Hkv, blocks], in how many of ``rows`` query blocks at least one query head of the
    group keeps the block. mass: float64 [Hkv, blocks], the attention mass of its heads and rows, or
    None. need: the share of the mass to reach, or NaN.
    """

    votes: np.ndarray
    rows: int
    mass: np.ndarray | None
    need: float


Aggregator = Callable[[Ballot], tuple[np.ndarray, str]]
"""Returns which blocks are kept, bool [lists, blocks], and the reason; lists is 1 or Hkv."""


def any_head(ballot: Ballot) -> tuple[np.ndarray, str]:
    """Keep what some head keeps for some query block: nothing is lost, little is saved."""
    return np.asarray(ballot.votes.sum(axis=0, keepdims=True) > 0), "vote"


def majority(ballot: Ballot) -> tuple[np.ndarray, str]:
    """Keep what more than half of all (KV head, query block) pairs keep. Source: seed policy."""
    votes = ballot.votes.sum(axis=0, keepdims=True)
    return 2 * votes > len(ballot.votes) * ballot.rows, "vote"


def mean_score(ballot: Ballot) -> tuple[np.ndarray, str]:
    """Keep the blocks with the largest mean mass until the threshold is reached; no votes."""
    if ballot.mass is None or np.isnan(ballot.need):
        raise ValueError("mean_score needs block_sums and threshold.")
    mass = ballot.mass.sum(axis=0, keepdims=True)
    order = descending(mass)
    before, total = mass_before(np.take_along_axis(mass, order, axis=1))
    kept = np.empty(mass.shape, bool)
    np.put_along_axis(kept, order, (before < ballot.need * total) | (ballot.need == 1), axis=1)
    return kept, "threshold"


def per_head(ballot: Ballot) -> tuple[np.ndarray, str]:
    """Each KV head reads what its own query heads keep."""
    return ballot.votes > 0, "vote"


AGGREGATORS: dict[str, Aggregator] = {
    "majority": majority, "any": any_head, "mean_score": mean_score, "per_head": per_head,
}


def aggregate(
    masks: Any, rule: str, *, num_kv_heads: int, block_sums: Any = None, threshold: Any = None,
    real_rows: Any = None, sink: bool = False,
) -> Aggregated:
    """Make one list of blocks, or one per KV head, of the masks of heads and query blocks.

    masks bool [H, Qb, Kb] over blocks of history; rule one of AGGREGATORS. block_sums float32
    [H, Qb, Kb] and threshold, as given to find_blocks_chunked, are needed by mean_score and fill
    the trace; of thresholds per head the mean counts. real_rows bool [Qb]: query blocks that are
    not padding; the others do not vote. sink: the masks were made to hold block 0 (compat="exact"),
    which is its reason then. The first and the last block are always in each list. Raises
    ValueError for an unknown rule and what does not fit.
    """
    if not isinstance(rule, str) or rule not in AGGREGATORS:
        raise ValueError(f"aggregate must be one of {', '.join(AGGREGATORS)}, not {rule!r}.")
    masks, num_kv_heads = np.asarray(masks), positive_int(num_kv_heads, "num_kv_heads")
    if masks.dtype != bool or masks.ndim != 3 or masks.size == 0:
        raise ValueError(f"masks must be bool [heads, query blocks, blocks] and not empty, not "
                         f"{masks.dtype} {masks.shape}.")
    if len(masks) % num_kv_heads:
        raise ValueError(f"{len(masks)} query heads do not divide over {num_kv_heads} KV heads.")
    rows = np.ones(masks.shape[1], bool) if real_rows is None else np.asarray(real_rows)
    if rows.dtype != bool or rows.shape != masks.shape[1:2] or not rows.any():
        raise ValueError(f"real_rows must be bool [{masks.shape[1]}] with at least one true row.")
    grouped = (num_kv_heads, -1, int(rows.sum()), masks.shape[2])
    votes = masks[:, rows].reshape(grouped).any(axis=1).sum(axis=1)
    mass = None
    if block_sums is not None:
        sums = as_float32(block_sums, "block_sums", 3)
        if sums.shape != masks.shape:
            raise ValueError(f"block_sums must have the shape of masks, {masks.shape}, "
                             f"not {sums.shape}.")
        mass = sums[:, rows].reshape(grouped).sum(axis=(1, 2), dtype=np.float64)
    need = float("nan") if threshold is None else float(check_threshold(threshold).mean())
    ballot = Ballot(votes, grouped[2], mass, need)
    kept, reason = AGGREGATORS[rule](ballot)
    reasons = reason_codes(kept, reason)
    if sink:
        reasons[kept[:, 0], 0] = REASONS.index("sink")
    return _listed(reasons, ballot)


def _listed(reasons: np.ndarray, ballot: Ballot) -> Aggregated:
    """Put the first and the last block into each list; fill the trace."""
    for block, why in ((0, "safety_first"), (-1, "safety_last")):
        missing = reasons[:, block] == 0
        reasons[missing, block] = REASONS.index(why)
    lists, blocks = reasons.shape
    pairs = len(ballot.votes) * ballot.rows
    votes = ballot.votes.reshape(lists, -1, blocks).sum(axis=1) / (pairs // lists)
    if ballot.mass is None:
        shares = np.full(reasons.shape, np.nan)
    else:
        mass = ballot.mass.reshape(lists, -1, blocks).sum(axis=1)
        total = mass.sum(axis=1, keepdims=True)
        shares = np.divide(mass, total, out=np.zeros_like(mass), where=total > 0)
    by_head = tuple(np.flatnonzero(codes) for codes in reasons)
    trace = Trace(shares, votes, reasons, ballot.need, sums=ballot.mass is not None)
    return Aggregated(by_head, trace)
