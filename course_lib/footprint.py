"""Where the bytes of a model are: its numbers by what they are for, and its KV cache."""

from __future__ import annotations

import math
import operator
from collections.abc import Mapping, Sequence

from course_lib.kvcache import kv_bytes_per_token

PARTS = ("embedding", "attention", "MLP", "norms")


def kv_bytes(layers: int, kv_heads: int, head_dim: int, tokens: int, dtype: str) -> int:
    """Bytes of the K and V rows of `tokens` tokens in all layers, stored as `dtype`.

    dtype as `kv_bytes_per_token`. Raises ValueError for counts below 1 (tokens below 0) and for an
    unknown dtype.
    """
    layers, tokens = operator.index(layers), operator.index(tokens)
    if layers < 1 or tokens < 0:
        raise ValueError(f"layers must be at least 1, tokens at least 0, not {layers}, {tokens}.")
    return layers * tokens * kv_bytes_per_token(kv_heads, head_dim, dtype)


def numbers_by_part(shapes: Mapping[str, Sequence[int]]) -> dict[str, int]:
    """How many numbers of a checkpoint belong to each of PARTS; `shapes`: tensor name -> shape."""
    counts = dict.fromkeys(PARTS, 0)
    for name, shape in shapes.items():
        counts[part_of(name)] += math.prod(shape)
    return counts


def part_of(name: str) -> str:
    """Which of PARTS a tensor belongs to, by the name that Hugging Face gives it."""
    if "norm" in name:
        return "norms"
    if ".self_attn." in name:
        return "attention"
    return "MLP" if ".mlp." in name else "embedding"
