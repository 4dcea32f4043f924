"""Exact prefill attention: many queries at once, each over the tokens up to its own.

Arrays, head map and score as in course_lib.attention. The NumPy code is the definition; compiled
kernels make every query what the decode kernel two_pass makes of it, bit for bit, so that their
results do not depend on how a prompt is cut.
"""

import math
from typing import Any

import numpy as np

from course_lib import backend
from course_lib.arrays import F32, LayerRows, NotFiniteError, require_finite, whole_number
from course_lib.attention_common import (
    check_query,
    check_rows,
    finite_output,
    kv_head,
    quiet,
    softmax,
    whole_heads,
)

QUERY_TILE = 128  # query rows per tile of prefill scores: 1 MB at 2K tokens


def causal_attention(q: Any, k: Any, v: Any, *, start: int = 0,
                     importance: np.ndarray | None = None, importance_from: int = 0) -> np.ndarray:
    """Exact prefill attention: query row i is position start + i and sees tokens up to itself.

    q float32 [num_heads, Lq, head_dim]; k, v float32 [num_kv_heads, n, head_dim] with
    n >= start + Lq (later rows are not read). Returns float32 [num_heads, Lq, head_dim]. If
    ``importance`` (float32 [>= start + Lq]) is given, the softmax weights of query positions >=
    importance_from are added to it in place: those of a head are summed from 0 in the order of
    the queries, then the sums are added head after head. The extra memory is about 1 kB per
    context token. Raises ValueError for shapes that do not fit, NaN or infinity, also in the sums;
    importance is then as before.
    """
    start = whole_number(start, "start")
    q, rows = check_prefill(q, k, v, start, importance)
    out = np.empty_like(q)
    visible = np.arange(start, start + q.shape[1]) + 1
    received = None if importance is None else np.zeros((len(q), rows.k.shape[1]), F32)
    attend_prefixes(q, rows, visible, out, received,
                    first_counted(importance_from, start, q.shape[1]))
    add_heads(importance, received)
    return out


def first_counted(importance_from: int, start: int, count: int) -> int:
    """Return the first of ``count`` queries, of positions from start on, whose weights count;
    ``count`` if none does."""
    return min(max(0, whole_number(importance_from, "importance_from") - start), count)


def attend_prefixes(q: np.ndarray, rows: LayerRows, visible: np.ndarray, out: np.ndarray,
                    received: np.ndarray | None, counted_from: int) -> None:
    """Attention of query rows q [num_heads, Lq, d], each over its first visible[i] rows.

    visible int64 [Lq]; a query that sees nothing gives zeros. Writes ``out``, shaped like q, and
    adds the weights of rows from counted_from on to ``received`` [num_heads, n], row after row.
    Raises NotFiniteError.
    """
    compiled = backend.kernel("prefill_attention")
    if compiled is None:
        for h in range(len(q)):
            head = rows.head(kv_head(h, len(q), len(rows.k)))
            sums = None if received is None else received[h]
            for first in range(0, q.shape[1], QUERY_TILE):
                tile = slice(first, first + QUERY_TILE)
                out[h, tile] = _attend_tile(q[h, tile], head, visible[tile], sums,
                                            counted_from - first)
        return
    k, v = whole_heads(rows.k), whole_heads(rows.v)
    try:
        compiled(q, k, v, visible, out, received, counted_from)
    except ValueError as error:  # the arguments fit, so it is the numbers
        raise NotFiniteError(f"{error}.") from None


@quiet
def _attend_tile(q: np.ndarray, rows: LayerRows, visible: np.ndarray,
                 sums: np.ndarray | None, counted_from: int) -> np.ndarray:
    """The definition of attend_prefixes for query rows [t, d] of one head."""
    out = np.zeros_like(q)
    seeing = np.flatnonzero(visible)
    if not len(seeing):
        return out
    visible = visible[seeing]
    width, everyone = int(visible.max()), int(visible.min())
    scores = q[seeing] @ rows.k[:width].T
    scores *= F32(1 / math.sqrt(q.shape[1]))
    scores[:, everyone:][np.arange(everyone, width) >= visible[:, None]] = -np.inf
    weights = softmax(scores, out=scores)
    if sums is not None:
        for row in weights[seeing >= counted_from]:  # the order is part of the definition
            sums[:width] += row
    out[seeing] = finite_output(weights @ rows.v[:width])
    return out


@quiet
def add_heads(importance: np.ndarray | None, received: np.ndarray | None) -> None:
    """Add what each head's queries gave, received [num_heads, n], to importance, head by head.

    NotFiniteError, with importance as before, where a sum is beyond float32.
    """
    if importance is None or received is None:
        return
    total = importance[: received.shape[1]].copy()
    for head in received:
        total += head
    require_finite(total, "importance")
    importance[: len(total)] = total


def check_prefill(q: Any, k: Any, v: Any, start: int,
                  importance: np.ndarray | None) -> tuple[np.ndarray, LayerRows]:
    """Check the arguments of causal_attention; returns q and the rows that it may read."""
    q = check_query(q, ndim=3)
    end = start + q.shape[1]
    rows = check_rows(q, k, v)
    if start < 0 or rows.k.shape[1] < end:
        raise ValueError(f"k and v hold {rows.k.shape[1]} tokens, but the queries are positions "
                         f"{start} to {end - 1}.")
    rows = rows.upto(end)
    require_finite(rows.k, "k")
    require_finite(rows.v, "v")
    if importance is not None:
        if not isinstance(importance, np.ndarray) or importance.dtype != F32 \
                or importance.ndim != 1 or len(importance) < end:
            raise ValueError(f"importance must be a float32 array of at least {end} tokens.")
        if not np.isfinite(importance).all():
            raise ValueError("importance holds NaN or infinity; start from zeros.")
    return q, rows
