"""What a prefill policy reads, as a share of what full attention reads: K and V of all history.

A policy reads kappa to choose its blocks, then the chosen ones, a share rho of all. Where reading
decides the time, it wins only if kappa + rho < 1.
"""

from __future__ import annotations

from course_lib.arrays import positive_int

ESTIMATES = ("none", "kv", "k", "pages", "resident")
"""What is read to choose: nothing, as full attention; K and V of every block, as the published
policy; K alone; the min and max of each page's keys, as Quest; notes that stay in memory."""


def estimate_share(estimate: str, page_size: int = 16, layers: int = 1) -> float:
    """kappa: the share of full attention's bytes that is read to choose.

    page_size: tokens that share one min and one max, of "pages". layers: how many layers use one
    estimate, made in the first of them. ValueError for an unknown estimate.
    """
    page_size, layers = positive_int(page_size, "page_size"), positive_int(layers, "layers")
    shares = {"none": 0.0, "kv": 1.0, "k": 0.5, "pages": 1 / page_size, "resident": 0.0}
    if estimate not in shares:
        raise ValueError(f"estimate must be one of {', '.join(ESTIMATES)}, not {estimate!r}.")
    return shares[estimate] / layers


def bytes_read(estimate: str, rho: float, page_size: int = 16, layers: int = 1) -> float:
    """kappa + rho: bytes read, of full attention's. rho: share of the blocks that is attended.

    Other arguments as `estimate_share`. ValueError for a rho outside 0 to 1.
    """
    if not 0 <= rho <= 1:
        raise ValueError(f"rho must be 0 to 1, not {rho!r}.")
    return estimate_share(estimate, page_size, layers) + rho


def break_even(estimate: str, page_size: int = 16, layers: int = 1) -> float:
    """The rho below which less is read than full attention reads; 0: at no rho."""
    return max(0.0, 1 - estimate_share(estimate, page_size, layers))
