"""XAttention's estimate for whole prompts: scores, block masses and the mask in one call."""

import math
from typing import Any

import numpy as np

from course_lib.arrays import F32, positive_int
from course_lib.prefill.find_blocks import COMPATS, check_threshold, find_blocks_chunked
from course_lib.prefill.scores import (
    check_heads,
    flat_group_gemm_fuse_reshape,
    padded,
    softmax_fuse_block_sum,
)

BAND = 512  # tokens of queries scored at once: few scores in memory, little of the future computed


def xattn_estimate(
    q: Any, k: Any, *, stride: int, block_size: int, threshold: Any, chunk_size: int | None = None,
    causal: bool = True, compat: str = "exact", accumulate: str = "float64",
) -> tuple[np.ndarray, np.ndarray]:
    """Estimate the attention mass of every block and choose blocks until the threshold is reached.

    q float32 [H, Lq, d], k float32 [Hkv, Lk, d]; query head h reads KV head h * Hkv // H; with
    ``causal`` the queries are those of the last Lq keys. stride divides block_size; threshold is
    one number or one per head. Returns (block_sums float32 [H, Qb, Kb], mask bool [H, Qb, Kb]),
    nothing kept above the diagonal; Qb = ceil(Lq / block_size), Kb = ceil(Lk / block_size).

    "exact": any length; padding is neither seen nor counted; the result does not depend on
    chunk_size, which only bounds the queries scored at once. Causal queries that begin inside a
    key block are cut where key blocks are: the first query block is short, and there may be one
    more.
    "upstream": the original's result, trimmed to the blocks there are. Both sides are padded with
    zeros to whole chunks (so queries move if the two paddings differ), each chunk chooses by
    itself, and without causal key padding is seen. ``accumulate`` as in find_blocks_chunked.
    chunk_size None is upstream's formula. Raises ValueError for what does not fit, NaN, infinity.
    """
    q, k = check_heads(q, k)
    stride, block = check_blocks(stride, block_size)
    check_threshold(threshold, compat)
    if compat not in COMPATS:
        raise ValueError(f"compat must be one of {', '.join(COMPATS)}, not {compat!r}.")
    if causal and q.shape[1] > k.shape[1]:
        raise ValueError(f"{q.shape[1]} queries do not fit behind {k.shape[1]} keys; causal "
                         "queries are those of the last keys.")
    chunk = default_chunk_size(k.shape[1]) if chunk_size is None else positive_int(
        chunk_size, "chunk_size")
    if chunk_size is None:
        chunk = -(-chunk // block) * block
    if chunk % block:
        raise ValueError(f"chunk_size {chunk} must be a multiple of block_size {block}.")
    options = {"threshold": threshold, "causal": causal, "compat": compat,
               "accumulate": accumulate}
    if compat == "upstream":
        return _upstream(q, k, stride, block, chunk, options)
    return _exact(q, k, stride, block, chunk, options)


def default_chunk_size(k_len: int) -> int:
    """Return upstream's chunk for k_len keys: fewer queries at once for very many keys."""
    up = 1 << (positive_int(k_len, "k_len") - 1).bit_length()
    return max(min(max(2048, up), 128 * 1024 * 2048 // up), 2048)


def base_2_scale(stride: int, head_dim: int, norm: float = 1.0) -> float:
    """Return upstream's scale: of a sum of ``stride`` products to a power of two."""
    return math.log2(math.e) / (stride * math.sqrt(head_dim) * norm)


def check_blocks(stride: Any, block_size: Any) -> tuple[int, int]:
    """Return both as int; ValueError unless stride divides block_size."""
    stride, block_size = positive_int(stride, "stride"), positive_int(block_size, "block_size")
    if block_size % stride:
        raise ValueError(f"stride {stride} must divide block_size {block_size}.")
    return stride, block_size


def _exact(q: np.ndarray, k: np.ndarray, stride: int, block: int, chunk: int,
           options: dict) -> tuple[np.ndarray, np.ndarray]:
    causal, scale = options["causal"], base_2_scale(stride, q.shape[2])
    start = k.shape[1] - q.shape[1] if causal else 0  # position of the first query
    front = start % block
    q = padded(q, 0, front)
    first_block = start // block
    band = min(chunk, -(-BAND // block) * block)
    k_blocks = -(-k.shape[1] // block)
    sums = np.zeros((len(q), -(-q.shape[1] // block), k_blocks), F32)
    for begin in range(0, q.shape[1], band):
        row, at = begin // block, first_block * block + begin
        seen = min(k.shape[1], at + band) if causal else k.shape[1]
        part = softmax_fuse_block_sum(
            flat_group_gemm_fuse_reshape(q[:, begin : begin + band], k[:, :seen], stride),
            block // stride, scale=scale, chunk_start=at // stride, is_causal=causal,
            first_q=(first_block * block + front) // stride)
        sums[:, row : row + part.shape[1], : part.shape[2]] = part
    return sums, find_blocks_chunked(sums, first_block, **options)


def _upstream(q: np.ndarray, k: np.ndarray, stride: int, block: int, chunk: int,
              options: dict) -> tuple[np.ndarray, np.ndarray]:
    causal, scale = options["causal"], base_2_scale(stride, q.shape[2])
    q_blocks, k_blocks = -(-q.shape[1] // block), -(-k.shape[1] // block)
    real = -(-k.shape[1] // stride)
    q, k = padded(q, -q.shape[1] % chunk), padded(k, -k.shape[1] % chunk)
    if q.shape[1] > k.shape[1]:
        raise ValueError("compat='upstream' takes no more chunks of queries than of keys.")
    first_block = (k.shape[1] - q.shape[1]) // block
    sums, masks = [], []
    for begin in range(0, q.shape[1], chunk):
        at = first_block * block + begin
        scores = flat_group_gemm_fuse_reshape(q[:, begin : begin + chunk], k, stride)
        sums.append(softmax_fuse_block_sum(scores, block // stride, scale=scale, is_causal=causal,
                                           chunk_start=at // stride, real_q_len=real))
        masks.append(find_blocks_chunked(sums[-1], at // block, **options))
    mask = np.concatenate(masks, axis=1)
    if causal:
        row, column = np.ogrid[: mask.shape[1], : mask.shape[2]]
        mask &= column <= row + first_block
    return np.concatenate(sums, axis=1)[:, :q_blocks, :k_blocks], mask[:, :q_blocks, :k_blocks]
