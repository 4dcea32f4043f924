"""From the mass of blocks to a mask: the fewest blocks that hold the share ``threshold``.

Per head and query block: blocks in order of mass, the largest first; a block is kept if the mass
before it is less than need = threshold * the row's sum. ``compat="exact"`` is this rule with the
sink (block 0) and the diagonal kept first; ``compat="upstream"`` is what the original computes,
with its own accidents, for comparison with it. Source: XAttention, find_blocks_chunked.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np

from course_lib.arrays import NotFiniteError, as_float32, whole_number

COMPATS = ("exact", "upstream")
REASONS = ("not_selected", "sink", "diagonal", "threshold", "all")


@dataclass(frozen=True, eq=False)
class ThresholdTrace:
    """Which blocks the threshold kept, and why.

    score float32 [H, Q, K], the sums that decided. order int64 [H, Q, K]: the blocks as they were
    taken; before float64 [H, Q, K]: the mass taken before each of these. need float64 [H, Q, 1].
    visible and mask bool [H, Q, K]. reason int8 [H, Q, K], an index into REASONS.
    """

    score: np.ndarray
    order: np.ndarray
    before: np.ndarray
    need: np.ndarray
    visible: np.ndarray
    mask: np.ndarray
    reason: np.ndarray

    @property
    def rank(self) -> np.ndarray:
        """The place of each block in the order, from 1 on, int64 [H, Q, K]."""
        return _in_place_of(self.order, np.arange(1, self.order.shape[2] + 1))

    @property
    def mass_before(self) -> np.ndarray:
        """The mass of the blocks taken before each block, float64 [H, Q, K]."""
        return _in_place_of(self.order, self.before)


def find_blocks_chunked(
    block_sums: Any, current_index: int, threshold: Any, *, decoding: bool = False,
    mode: str = "prefill", causal: bool, compat: str = "exact", accumulate: str = "float64",
) -> np.ndarray:
    """Return which blocks each head keeps for each query block, bool [H, Qb, Kb].

    block_sums float32 [H, Qb, Kb], masses, none negative; query block r is block
    current_index + r of the context; threshold one number or one per head [H], in (0, 1]
    (upstream: [0, 1]). ``mode="prefill"`` leaves decoding dense, ``mode="decode"`` prefill,
    "both" neither. With ``compat="upstream"`` and causal the result may hold blocks of the future
    inside the chunk: the caller clears them; ``accumulate="float32"`` is upstream's sums in that
    precision. Raises ValueError for other arguments, NaN and infinity.
    """
    if compat not in COMPATS:
        raise ValueError(f"compat must be one of {', '.join(COMPATS)}, not {compat!r}.")
    if mode not in ("prefill", "decode", "both"):
        raise ValueError(f"mode must be prefill, decode or both, not {mode!r}.")
    if accumulate not in ("float64", "float32") or (compat, accumulate) == ("exact", "float32"):
        raise ValueError(f"accumulate must be float64, or float32 with compat='upstream', "
                         f"not {accumulate!r}.")
    sums, need_share, current_index = _checked(block_sums, current_index, threshold, causal, compat)
    if (mode == "prefill" and decoding) or (mode == "decode" and not decoding):
        if compat == "upstream":
            return np.ones(sums.shape, bool)
        return _visible(sums.shape, current_index, causal).copy()
    if compat == "upstream":
        return _upstream(sums, current_index, need_share, causal, np.dtype(accumulate))
    return threshold_blocks(sums, current_index, threshold, causal=causal).mask


def threshold_blocks(block_sums: Any, current_index: int, threshold: Any, *,
                     causal: bool) -> ThresholdTrace:
    """Keep the sink, the diagonal (causal), then the largest blocks until the share is reached.

    Arguments and errors as find_blocks_chunked with compat="exact". Sums are float64 in the order
    of taking, ties go to the lower block. A row without mass keeps sink and diagonal only;
    threshold 1 keeps everything visible, blocks without mass too. Causal: a block after the
    diagonal is not visible, its sum counts nothing.
    """
    sums, share, current_index = _checked(block_sums, current_index, threshold, causal, "exact")
    visible = _visible(sums.shape, current_index, causal)
    forced = _forced(sums.shape, current_index, causal)
    mass = np.where(visible, sums, 0.0)
    order = descending(np.where(visible, mass, -1.0), forced)
    before, total = mass_before(np.take_along_axis(mass, order, axis=2))
    need = share * total
    taken = np.empty_like(visible)
    np.put_along_axis(taken, order, before < need, axis=2)
    mask = visible & (forced | taken | (share == 1))
    reason = np.where(mask, np.int8(REASONS.index("threshold")), np.int8(0))
    if causal:
        _, rows, columns = sums.shape
        reason[:, np.arange(rows), np.arange(rows) + current_index] = REASONS.index("diagonal")
    reason[:, :, 0] = REASONS.index("sink")
    return ThresholdTrace(sums, order, before, need, visible, mask, reason)


def descending(mass: np.ndarray, first: np.ndarray | None = None) -> np.ndarray:
    """Return the order of taking: ``first`` ones, then by mass; ties to the lower index."""
    order = np.argsort(-mass, axis=-1, kind="stable")
    if first is None:
        return order
    later = ~np.take_along_axis(np.broadcast_to(first, mass.shape), order, axis=-1)
    return np.take_along_axis(order, np.argsort(later, axis=-1, kind="stable"), axis=-1)


def mass_before(ordered: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the mass before each block, float64, and the whole [..., 1], added up in order."""
    sums = np.add.accumulate(ordered, axis=-1, dtype=np.float64)
    before = np.zeros_like(sums)
    before[..., 1:] = sums[..., :-1]
    return before, sums[..., -1:]


def check_threshold(threshold: Any, compat: str = "exact") -> np.ndarray:
    """Return the threshold as float64; ValueError for one outside (0, 1] (upstream: [0, 1])."""
    share = np.asarray(threshold)
    if share.dtype.kind not in "fiu":
        raise TypeError(f"threshold must be a number, not {share.dtype}.")
    share = share.astype(np.float64)
    high_enough = share >= 0 if compat == "upstream" else share > 0
    wrong = share[~(high_enough & (share <= 1))]
    if wrong.size:
        bounds = "[0, 1]" if compat == "upstream" else "(0, 1]"
        value = float(wrong[0])
        meant = value / (10 if value <= 10 else 100)
        hint = f"; did you mean {meant:g}?" if 1 < value <= 100 else "."
        raise ValueError(f"threshold must be in {bounds}, the share of attention mass to keep, "
                         f"not {value:g}{hint}")
    return share


def _checked(block_sums: Any, current_index: Any, threshold: Any, causal: bool,
             compat: str) -> tuple[np.ndarray, np.ndarray, int]:
    sums = as_float32(block_sums, "block_sums", 3)
    current_index = whole_number(current_index, "current_index")
    share = check_threshold(threshold, compat)
    heads, rows, columns = sums.shape
    if sums.size == 0:
        raise ValueError(f"block_sums must hold at least one block, not shape {sums.shape}.")
    if share.ndim and share.shape != (heads,):
        raise ValueError(f"threshold must be one number or one per head, shape ({heads},), "
                         f"not {share.shape}.")
    if causal and not 0 <= current_index <= columns - rows:
        raise ValueError(f"current_index {current_index} puts {rows} query blocks outside the "
                         f"{columns} key blocks; it must be from 0 to {columns - rows}.")
    if not np.isfinite(sums).all():
        raise NotFiniteError("block_sums holds NaN or infinity; check the scores.")
    if (sums < 0).any():
        raise ValueError("block_sums holds a negative mass; pass sums of softmax weights.")
    return sums, share.reshape(-1, 1, 1), current_index


def _visible(shape: tuple[int, ...], current_index: int, causal: bool) -> np.ndarray:
    row, column = np.ogrid[: shape[1], : shape[2]]
    rule = column <= row + current_index if causal else column < shape[2]
    return np.broadcast_to(rule, shape)


def _forced(shape: tuple[int, ...], current_index: int, causal: bool) -> np.ndarray:
    row, column = np.ogrid[: shape[1], : shape[2]]
    return (column == 0) | ((column == row + current_index) & causal)


def _in_place_of(order: np.ndarray, ordered: np.ndarray) -> np.ndarray:
    """Return values given in the order of taking at the place of their block."""
    out = np.empty(order.shape, ordered.dtype)
    np.put_along_axis(out, order, np.broadcast_to(ordered, order.shape), axis=-1)
    return out


def _upstream(sums: np.ndarray, current_index: int, share: np.ndarray, causal: bool,
              dtype: np.dtype) -> np.ndarray:
    """The original, step by step; where its order of equal masses is open, the lower index."""
    mass = sums.astype(dtype)
    need = _upstream_sum(mass) * share.astype(dtype)
    forced = np.zeros(sums.shape, bool)
    if causal:
        _, rows, columns = sums.shape
        forced[:, :, 0] = True
        # Over the sink, too, where the chunk is the first: only row 0 keeps it forced then.
        forced[:, :, current_index : current_index + rows] = np.eye(rows, dtype=bool)
        order = descending(mass, forced)
        others = -np.sort(-np.where(forced, 0, mass), axis=2)
        kept = _upstream_sum(np.where(forced, mass, 0))
        # Two places are kept for forced blocks, whether there are two or one: with one, what
        # stands before each later block is late by one, and the row keeps a block too many.
        before = np.concatenate([np.zeros_like(kept), np.zeros_like(kept), kept, others], axis=2)
    else:
        order = descending(mass)
        before = np.concatenate([np.zeros_like(need), -np.sort(-mass, axis=2)], axis=2)
    # The sum of float32 numbers runs in float64 and each partial sum is rounded, as torch.cumsum.
    before = np.add.accumulate(before, axis=2, dtype=np.float64)[:, :, : order.shape[2]]
    # What is not taken is written to block 0, so that every row keeps it.
    chosen = np.where(before.astype(dtype) < need, order, 0)
    mask = forced
    np.put_along_axis(mask, chosen, True, axis=2)
    if causal:
        mask[:, :, current_index + rows :] = False
    return mask


def _upstream_sum(mass: np.ndarray) -> np.ndarray:
    """Sums of rows [H, Q, 1] in their precision; float32 with the bits of torch.sum on x86.

    Eight lanes, each over four interleaved sums; the rest of a row comes before the lanes. At
    threshold 1 the last bit of the sum decides whether the last block is kept.
    """
    lanes = mass.shape[2] // 8 * 8
    if mass.dtype == np.float64 or not lanes:
        return np.add.accumulate(mass, axis=2)[:, :, -1:]
    vectors = mass[:, :, :lanes].reshape(*mass.shape[:2], -1, 8)
    whole = vectors.shape[2] // 4 * 4
    sums = np.zeros((*mass.shape[:2], 4, 8), mass.dtype)
    for i in range(0, whole, 4):
        sums += vectors[:, :, i : i + 4]
    for i in range(whole, vectors.shape[2]):
        sums[:, :, 0] += vectors[:, :, i]
    ordered = [mass[:, :, lanes:], np.add.accumulate(sums, axis=2)[:, :, -1]]
    return np.add.accumulate(np.concatenate(ordered, axis=2), axis=2)[:, :, -1:]
