"""Quest: from the smallest and largest key value of each channel, what a page can hold at most.

Source: Tang et al. 2024 (mit-han-lab/Quest). ``max(q . kmin, q . kmax)``, seen elsewhere, is no
bound: the largest key of a page takes some channels from kmin and others from kmax.
"""

from typing import Any, NamedTuple

import numpy as np

from course_lib.arrays import F32, as_float32, positive_int, require_finite
from course_lib.attention_common import check_query
from course_lib.prefill.find_blocks import descending


class PageBounds(NamedTuple):
    """Smallest and largest value of each channel in each page, float32 [num_kv_heads, pages, d]."""

    low: np.ndarray
    high: np.ndarray


def page_bounds(k: Any, page_size: int = 16) -> PageBounds:
    """Return the bounds of keys float32 [num_kv_heads, n, d], rotated; the last page may be short.

    All that Quest keeps of the keys: 2 / page_size of their size. Raises ValueError for no key,
    NaN or infinity.
    """
    k, page_size = as_float32(k, "k", 3), positive_int(page_size, "page_size")
    if k.size == 0:
        raise ValueError(f"k must hold at least one token, not shape {k.shape}.")
    require_finite(k, "k")
    starts = np.arange(0, k.shape[1], page_size)
    return PageBounds(np.minimum.reduceat(k, starts, axis=1),
                      np.maximum.reduceat(k, starts, axis=1))


def page_scores(q: Any, low: Any, high: Any) -> np.ndarray:
    """Return the sum over channels of max(q * low, q * high), float32 [H, pages].

    q float32 [H, d]; low, high as page_bounds; query head h reads KV head h * Hkv // H. No key of
    a page has a larger q . k: the sum is float64 and rounded up. Raises ValueError for shapes that
    do not fit, NaN or infinity in q, and a score beyond float32.
    """
    q, low, high = check_query(q), as_float32(low, "low", 3), as_float32(high, "high", 3)
    if low.shape != high.shape or low.shape[2] != q.shape[1]:
        raise ValueError(f"low and high must both have shape [num_kv_heads, pages, {q.shape[1]}], "
                         f"not {low.shape} and {high.shape}.")
    if not len(low) or len(q) % len(low):
        raise ValueError(f"{len(q)} query heads do not divide over {len(low)} KV heads.")
    grouped = q.astype(np.float64).reshape(len(low), -1, 1, q.shape[1])
    # Where q is positive the largest value decides, else the smallest: two dots, no max.
    bound = np.vecdot(np.maximum(grouped, 0), high[:, None].astype(np.float64))
    bound += np.vecdot(np.minimum(grouped, 0), low[:, None].astype(np.float64))
    with np.errstate(over="ignore"):
        scores = bound.astype(F32)
        np.nextafter(scores, F32(np.inf), out=scores, where=scores < bound)
    scores = scores.reshape(len(q), -1)
    require_finite(scores, "page scores")
    return scores


def quest_page_scores(q: Any, k: Any, page_size: int = 16) -> np.ndarray:
    """Return an upper bound of q . k in every page of page_size tokens, float32 [H, pages].

    q float32 [H, d], k float32 [Hkv, Lk, d] after RoPE; see page_bounds and page_scores.
    """
    return page_scores(q, *page_bounds(k, page_size))


def top_pages(scores: Any, budget: int, *, keep_last: bool = True) -> np.ndarray:
    """Return which pages are read, bool of the shape of scores float32 [..., pages].

    The last page, whose tokens are the newest, and the best budget - 1 of the others; ties go to
    the lower page. keep_last=False: the best budget, as Quest's evaluation code has it. Raises
    ValueError for a budget below 1.
    """
    scores, budget = as_float32(scores, "scores"), positive_int(budget, "budget")
    if not scores.ndim or not scores.shape[-1]:
        raise ValueError(f"scores must hold at least one page, not shape {scores.shape}.")
    last = np.arange(scores.shape[-1]) == scores.shape[-1] - 1
    order = descending(scores, last if keep_last else None)
    chosen = np.zeros(scores.shape, bool)
    np.put_along_axis(chosen, order[..., :budget], True, axis=-1)
    return chosen
