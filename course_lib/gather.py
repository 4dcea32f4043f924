"""Rows of chosen blocks, copied together for kernels that read consecutive rows."""

import numpy as np

from course_lib.arrays import LayerRows


def gather_blocks(rows: np.ndarray, ids: np.ndarray, block_size: int = 32) -> np.ndarray:
    """Return the rows [n, ...] of the given blocks (ascending ids) as one contiguous array.

    Blocks that follow each other are not copied: the result is then a view.
    """
    first, last = int(ids[0]), int(ids[-1])
    if last - first + 1 == len(ids):
        return rows[first * block_size : (last + 1) * block_size]
    full = len(rows) // block_size
    whole = ids[:-1] if last == full else ids  # a short last block, if chosen, comes last
    size = len(whole) * block_size
    tail = rows[full * block_size :] if last == full else rows[:0]
    out = np.empty((size + len(tail), *rows.shape[1:]), rows.dtype)
    blocks = rows[: full * block_size].reshape(full, block_size, *rows.shape[1:])
    np.take(blocks, whole, axis=0, out=out[:size].reshape(len(whole), *blocks.shape[1:]),
            mode="clip")  # "raise" would go through a second buffer; the ids are in range
    out[size:] = tail
    return out


def gather_rows(head: LayerRows, ids: np.ndarray, block_size: int = 32) -> LayerRows:
    """Return the rows of one KV head in the given blocks; see gather_blocks."""
    return head.map(lambda a: gather_blocks(a, ids, block_size))
