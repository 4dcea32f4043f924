"""Lesson 10's cost model: the multiply-adds of block-sparse decode, and what they do to a token.

Counted are the products of q . k and of weight . v, which grow with the context; not the softmax,
the sums over importance or the sorting of blocks.
"""

from __future__ import annotations

from collections.abc import Mapping

from course_lib.arrays import positive_int
from course_lib.sparse import n_blocks, probe_positions, sparse_decode_gate


def decode_cost(
    n: int, k_blocks: int, head_dim: int = 128, block_size: int = 32, n_probe: int = 8
) -> dict[str, int]:
    """Multiply-adds of one query head for one decoded token over n cached tokens.

    Returns {"dense", "probe", "attend"}: exact attention; the probes; attention over k_blocks
    full blocks (an upper bound where the last, short block is among them). Where the engine's gate
    stays shut nothing is probed and "attend" equals "dense". Raises ValueError for an argument
    below 1. Derived from article 10-2 and the engine rule.
    """
    n, head_dim = positive_int(n, "n"), positive_int(head_dim, "head_dim")
    k_blocks = positive_int(k_blocks, "k_blocks")
    last = n_blocks(n, block_size) - 1  # every block before it is full
    probed = last * len(probe_positions(0, n, block_size, n_probe))
    probed += len(probe_positions(last, n, block_size, n_probe))
    dense = 2 * n * head_dim
    if not sparse_decode_gate(n, k_blocks, block_size):
        return {"dense": dense, "probe": 0, "attend": dense}
    return {
        "dense": dense,
        "probe": probed * head_dim,
        "attend": 2 * k_blocks * block_size * head_dim,
    }


def end_to_end_change(
    profile: Mapping[str, float], cost: Mapping[str, float]
) -> dict[str, float]:
    """What sparse decode does to a whole token, in percent of its time; negative is faster.

    profile: time of each part with exact attention, one of them "attention", any unit. cost: as
    decode_cost returns it; attention's time is taken to scale with its multiply-adds, the probes
    included, and nothing else changes. Returns {"change", "ceiling"}: the predicted change, and
    the change if attention cost nothing (Amdahl's bound). Raises ValueError without "attention",
    for a negative time and for a total of zero.
    """
    total = sum(profile.values())
    if "attention" not in profile or total <= 0 or min(profile.values()) < 0:
        raise ValueError("profile needs an 'attention' part, no negative time and a positive sum.")
    ratio = (cost["probe"] + cost["attend"]) / cost["dense"]
    share = profile["attention"] / total
    return {"change": 100 * share * (ratio - 1), "ceiling": -100 * share}
