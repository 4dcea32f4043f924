"""Queries and keys with something planted in them: what heads look for, and where it stands.

Spans of tokens share topics, the first keys are a sink, and on top of that chosen KV heads look
for a few marked keys. Made from a seed, so that a lesson can show how votes are lost without a
large model; what a real model does is measured beside it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np

from course_lib.arrays import F32

QKV = tuple[np.ndarray, np.ndarray, np.ndarray]


def topic(seed: int, heads: int, kv_heads: int, queries: int, keys: int, d: int, *,
          topics: int = 6, span: int = 64, a: float = 0.6, sink: float = 0.5) -> QKV:
    """q [heads, queries, d], k and v [kv_heads, keys, d]: spans of `span` tokens share one of some
    topics, `a` strong; the first four keys are a sink. float32."""
    rng = np.random.default_rng(seed)
    q, k, v, about, s = (rng.standard_normal(shape, dtype=F32) for shape in (
        (heads, queries, d), (kv_heads, keys, d), (kv_heads, keys, d), (kv_heads, topics, d),
        (kv_heads, d)))
    key_topic = rng.integers(0, topics, size=(keys + span - 1) // span)
    query_topic = rng.integers(0, topics, size=(queries + span - 1) // span)
    k += F32(a) * about[:, key_topic[np.arange(keys) // span]]
    k[:, :4] += s[:, None, :]
    group = heads // kv_heads
    q += F32(a) * np.repeat(about, group, axis=0)[:, query_topic[np.arange(queries) // span]]
    q += F32(sink) * np.repeat(s, group, axis=0)[:, None, :]
    return q, k, v


def needle(seed: int, heads: int, kv_heads: int, queries: int, keys: int, d: int, *, place: int,
           width: int, ak: float, aq: float, seekers: Sequence[int]) -> QKV:
    """`topic`, where the KV heads `seekers` look for the same `width` keys at `place`."""
    q, k, v = topic(seed, heads, kv_heads, queries, keys, d, a=0.3)
    mark = np.random.default_rng(seed + 100000).standard_normal(d, dtype=F32)
    group = heads // kv_heads
    for head in seekers:
        k[head, place : place + width] += F32(ak) * mark
        q[head * group : (head + 1) * group] += F32(aq) * mark
    return q, k, v


def per_head_needle(seed: int, heads: int, kv_heads: int, queries: int, keys: int, d: int, *,
                    block: int, offset: int, width: int, ak: float, aq: float) -> QKV:
    """`topic`, where KV head h looks for keys of its own, at `offset` in block h + 1."""
    q, k, v = topic(seed, heads, kv_heads, queries, keys, d, a=0.3)
    marks = np.random.default_rng(seed + 100000).standard_normal((kv_heads, d), dtype=F32)
    group = heads // kv_heads
    for head in range(kv_heads):
        place = (head + 1) * block + offset
        k[head, place : place + width] += F32(ak) * marks[head]
        q[head * group : (head + 1) * group] += F32(aq) * marks[head]
    return q, k, v


@dataclass(frozen=True, eq=False)
class Planted:
    """A chunk's queries, the keys before it, and what was planted.

    q float32 [heads, chunk, d]; k float32 [kv_heads, history, d]. needles: the block that each KV
    head looks for, None for one that looks for nothing. real_rows: queries that are not padding.
    """

    about: str
    q: np.ndarray
    k: np.ndarray
    block_size: int
    needles: tuple[int | None, ...]
    real_rows: int


HEADS, KV_HEADS, CHUNK, BLOCKS, HEAD_DIM = 8, 4, 1024, 6, 64
_SHAPE = HEADS, KV_HEADS, CHUNK, (BLOCKS + 1) * CHUNK, HEAD_DIM
_MARKS: dict[str, Any] = {"width": 16, "ak": 3.0, "aq": 1.0}


@cache
def planted(name: str) -> Planted:
    """One of PLANTED: 8 query heads, 4 KV heads, a chunk of 1,024 behind 6 blocks of 1,024.

    The same numbers as cases S03, S06 and S08 of tests/oracle/golden/xattn. ValueError for another
    name.
    """
    if name == "one KV head":
        q, k, _ = needle(503, *_SHAPE, place=3 * CHUNK + 500, seekers=(0,), **_MARKS)
        needles: tuple[int | None, ...] = (3, None, None, None)
    elif name == "each KV head its own":
        q, k, _ = per_head_needle(506, *_SHAPE, block=CHUNK, offset=500, **_MARKS)
        needles = (1, 2, 3, 4)
    elif name == "padded chunk":
        q, k, _ = per_head_needle(508, *_SHAPE, block=CHUNK, offset=500, **_MARKS)
        q[:, PADDED_FROM:] = 0
        needles = (1, 2, 3, 4)
    else:
        raise ValueError(f"planted data must be one of {', '.join(PLANTED)}, not {name!r}.")
    real = PADDED_FROM if name == "padded chunk" else CHUNK
    return Planted(name, q, k[:, : BLOCKS * CHUNK], CHUNK, needles, real)


PADDED_FROM = 600
PLANTED = ("one KV head", "each KV head its own", "padded chunk")
