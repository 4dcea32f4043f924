"""Solutions of day 12: one function per A item, one model answer with rubric per B item."""

from __future__ import annotations

import numpy as np


def antidiagonal_scores(q, k, stride):
    def squares(x):
        x = np.pad(x, ((0, 0), (0, -x.shape[1] % stride), (0, 0)))
        return x.reshape(len(x), -1, stride, x.shape[2])

    long_q = squares(q)[:, :, ::-1]
    long_k = np.repeat(squares(k), len(q) // len(k), axis=0)
    long_q = long_q.reshape(*long_q.shape[:2], -1)
    long_k = long_k.reshape(*long_k.shape[:2], -1)
    return (long_q @ long_k.swapaxes(1, 2)).astype(np.float32)


def keep_blocks(sums, first, threshold):
    if not 0 < threshold <= 1:
        raise ValueError("threshold must be above 0 and at most 1")
    mask = np.zeros(sums.shape, bool)
    for r, row in enumerate(sums):
        diagonal = first + r
        mass = [float(x) for x in row[: diagonal + 1]]
        order = sorted(range(diagonal + 1), key=lambda b: (b not in (0, diagonal), -mass[b], b))
        need, before = threshold * sum(mass[b] for b in order), 0.0
        for b in order:
            mask[r, b] = b in (0, diagonal) or threshold == 1 or before < need
            before += mass[b]
    return mask


def masses_with_an_extra_block(rows, first, threshold):
    if first > 0 or rows < 3 or threshold == 1:
        return None
    masses = np.tri(rows, dtype=np.float32)
    masses[2:, :][:, 1] = 2  # the largest beside the diagonal, and not the sink
    np.fill_diagonal(masses, 4 * rows / (1 - threshold))
    return masses[None]


ANSWERS = {
    "d12.b1": (
        "The reversal is the [:, :, ::-1] over the stride axis of the reshaped queries; the "
        "group's heads stand in one row by the reshape to [num_kv_heads, -1, 1, stride * d]; "
        "padded() fills both sides. Of 64 products 8 are computed. Reversing the keys instead "
        "pairs the same queries and keys, so the scores are the same. The query at offset 5 meets "
        "key offset 2. i -> S-1-i is a bijection of 0 … S-1: each i names one query and one key, "
        "and no two i name the same. A key that all queries look at is therefore met in every "
        "square of its column; a fact that one query looks for is met only if it stands at that "
        "query's partner offset, one offset in S. Rubric: 1 point: the pairing is one-to-one, "
        "with i and S-1-i; 1 point: the guarantee is per square, for a key (or query), not for a "
        "given pair."
    ),
    "d12.b2": (
        "`before < need` decides; `kind=\"stable\"` in descending breaks ties; `share == 1` keeps "
        "blocks without mass at 1; np.where(visible, sums, 0.0) takes the future out; in "
        "scores.py shares of rows outside first_q … last_q are set to 0. With at most, the row at "
        "0.8125 keeps all five. Example: masses 8, 4, 4 (sink, block, diagonal) at tau = 0.75: "
        "need 12, sink and diagonal hold 12, so strict stops and not strict takes the block: 16 "
        "of 16. The strict rule is the shortest list: what is held already reaches tau. Rubric: 1 "
        "point: a row where the mass before equals need exactly; 1 point: strict keeps the "
        "promise, since the list without the block already reaches tau."
    ),
    "d12.b3": (
        "The mask may hold blocks of the future inside the chunk: `mask &= column <= row + "
        "first_block` clears them; the grid is padded to whole chunks and is cut back in the "
        "return line. The list `before` is concatenated with two zeros in front; np.where(…, "
        "order, 0) sends what is not taken to block 0. Of 10 rows 8 can have an extra block: in "
        "row 0 sink and diagonal are the same, in row 1 they are all there is to see. Up to two "
        "rows the modes agree, since every visible block is sink or diagonal. A caller who trusts "
        "the mask attends to the future, and to padding. A property that catches the accident: "
        "dropping the lightest kept block that is not forced must leave less than tau, or: the "
        "mask must not depend on the chunk size. Rubric: 1 point: two duties of the caller "
        "(future, padding or the grid); 1 point: a property such as minimality of the list or "
        "independence of the chunk size."
    ),
}
