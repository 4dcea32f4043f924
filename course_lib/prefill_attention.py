"""Exact prefill attention: many queries at once, each over the tokens up to its own.

Arrays, head map and score as in course_lib.attention.
"""

import math
from typing import Any

import numpy as np

from course_lib.arrays import F32, LayerRows, require_finite
from course_lib.attention_common import (
    check_query,
    check_rows,
    finite_output,
    kv_head,
    quiet,
    softmax,
)

QUERY_TILE = 128  # query rows per tile of prefill scores: 1 MB at 2K tokens


@quiet
def causal_attention(q: Any, k: Any, v: Any, *, start: int = 0,
                     importance: np.ndarray | None = None, importance_from: int = 0) -> np.ndarray:
    """Exact prefill attention: query row i is position start + i and sees tokens up to itself.

    q float32 [num_heads, Lq, head_dim]; k, v float32 [num_kv_heads, n, head_dim] with
    n >= start + Lq (later rows are not read). Returns float32 [num_heads, Lq, head_dim]. If
    ``importance`` (float32 [>= start + Lq]) is given, the softmax weights of query positions >=
    importance_from are added to it in place, in the order head, query. Works in tiles of 128
    queries, so the extra memory is about 1 kB per context token. Raises ValueError for shapes
    that do not fit, NaN or infinity; importance is then as before.
    """
    q, rows, added = check_prefill(q, k, v, start, importance)
    out = np.empty_like(q)
    tokens = np.arange(start + q.shape[1])
    for h in range(q.shape[0]):
        head = rows.head(kv_head(h, q.shape[0], rows.k.shape[0]))
        for first in range(0, q.shape[1], QUERY_TILE):
            part = slice(first, first + QUERY_TILE)
            out[h, part] = attend_tile(q[h, part], start + first, head, tokens, added,
                                       importance_from)
    if importance is not None:
        importance[:] = added
    return out


def attend_tile(q: np.ndarray, first: int, rows: LayerRows, tokens: np.ndarray,
                importance: np.ndarray | None, importance_from: int) -> np.ndarray:
    """Attention of query rows [t, d] at positions first, first + 1, ... over rows of one KV head.

    Row j of ``rows`` is token tokens[j] (ascending, tokens[0] <= first); each query sees the
    tokens up to its own position. Returns float32 [t, d] and adds the weights to ``importance``.
    """
    positions = np.arange(first, first + len(q))
    visible = int(np.searchsorted(tokens, first + len(q)))
    scores = q @ rows.k[:visible].T
    scores *= F32(1 / math.sqrt(q.shape[1]))
    own = int(np.searchsorted(tokens, first))  # tokens before it are seen by every row
    scores[:, own:][tokens[own:visible] > positions[:, None]] = -np.inf
    weights = softmax(scores, out=scores)
    if importance is not None:
        counted = weights[max(0, importance_from - first):]
        everything = int(tokens[visible - 1]) == visible - 1  # ascending, so no token is left out
        seen = importance[:visible] if everything else importance[tokens[:visible]]
        for row in counted:  # one query after the other: the order is part of the definition
            seen += row
        if not everything:
            importance[tokens[:visible]] = seen
    return finite_output(weights @ rows.v[:visible])


def check_prefill(q: Any, k: Any, v: Any, start: int,
                  importance: np.ndarray | None) -> tuple[np.ndarray, LayerRows, np.ndarray | None]:
    """Check the arguments of causal_attention; returns q, rows and a copy of importance."""
    q = check_query(q, ndim=3)
    end = start + q.shape[1]
    rows = check_rows(q, k, v)
    if start < 0 or rows.k.shape[1] < end:
        raise ValueError(f"k and v hold {rows.k.shape[1]} tokens, but the queries are positions "
                         f"{start} to {end - 1}.")
    rows = rows.upto(end)
    require_finite(rows.k, "k")
    require_finite(rows.v, "v")
    if importance is None:
        return q, rows, None
    if not isinstance(importance, np.ndarray) or importance.dtype != F32 \
            or importance.ndim != 1 or len(importance) < end:
        raise ValueError(f"importance must be a float32 array of at least {end} tokens.")
    if not np.isfinite(importance).all():
        raise ValueError("importance holds NaN or infinity; start from zeros.")
    return q, rows, importance.copy()
