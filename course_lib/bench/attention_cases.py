"""Attention of one decoded token over a cold KV cache: dense, block-sparse, and its two halves."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import numpy as np

from course_lib import attention, sparse
from course_lib.arrays import F32, LayerRows
from course_lib.bench.groups import Bench, Group, Kernel, Plan, Work
from course_lib.bench.memory import Rotation
from course_lib.kvcache import kv_bytes_per_token

NUM_HEADS, NUM_KV_HEADS, HEAD_DIM = 16, 8, 128
CONTEXTS = (512, 1024, 2048, 4096, 8192, 16384)
QUICK_CONTEXTS = (2048, 4096, 16384)
K_BLOCKS, BLOCK_SIZE, N_PROBE = 32, 32, 8
SHAPE = f"{NUM_HEADS} query heads, {NUM_KV_HEADS} KV heads, head_dim {HEAD_DIM}"


def plans() -> list[Plan]:
    """Every context in q8 and in f32 rows."""
    return [Plan("attention", f"attention {kv} {n}", partial(build, kv, n),
                 quick=n in QUICK_CONTEXTS)
            for kv in ("q8", "f32") for n in CONTEXTS]


def layers(bench: Bench, kv: str, n: int) -> Rotation:
    """Return the rows of as many layers as the arena holds."""
    shape = (NUM_KV_HEADS, n, HEAD_DIM)
    dtype = "int8" if kv == "q8" else "float32"
    if kv == "q8":
        bench.fill_int8()
    else:
        bench.fill_floats()
    half = int(np.prod(shape)) * np.dtype(dtype).itemsize

    def make(offset: int) -> LayerRows:
        k = bench.arena.array(offset, shape, dtype)
        v = bench.arena.array(offset + half, shape, dtype)
        if kv == "f32":
            return LayerRows(k, v)
        k_scale, v_scale = bench.rng.uniform(0.01, 0.02, (2, *shape[:2])).astype(F32)
        return LayerRows(k, v, k_scale, v_scale)

    return bench.arena.sets(make, 2 * half)


class Selections:
    """Room for what the selection of one shape returns: scores and lists of blocks."""

    def __init__(self, n: int) -> None:
        self.count = sparse.n_blocks(n, BLOCK_SIZE)
        chosen = min(K_BLOCKS, self.count)
        self.probe = np.zeros((NUM_HEADS, self.count), F32)
        self.order = np.zeros((NUM_HEADS, chosen), np.int32)
        self.ids = np.zeros((NUM_HEADS, chosen), np.int32)
        self.recency = np.zeros(NUM_HEADS, np.int32)
        self.evicted = np.zeros(NUM_HEADS, np.int32)

    @property
    def results(self) -> tuple[np.ndarray, ...]:
        """The outputs of select_blocks, in its order."""
        return self.order, self.ids, self.recency, self.evicted


def build(kv: str, n: int, bench: Bench) -> Group:
    """All decode kernels over n tokens of one kind of rows."""
    rows = layers(bench, kv, n)
    q = bench.normal(NUM_HEADS, HEAD_DIM)
    out = np.empty_like(q)
    importance = bench.rng.uniform(0, 1, n).astype(F32)
    sums = sparse.importance_sums(importance, BLOCK_SIZE)
    found = Selections(n)
    lists: dict[int, np.ndarray] = {}  # a layer's blocks, for attention over chosen blocks

    def dense(kernel: Kernel) -> None:
        r = rows.next()
        kernel(q, r.k, r.v, r.k_scale, r.v_scale, None, BLOCK_SIZE, out)

    def pruned(shared: bool, packed: bool, kernel: Kernel) -> None:
        r = rows.next()
        kernel(q, r.k, r.v, r.k_scale, r.v_scale, sums, K_BLOCKS, BLOCK_SIZE, N_PROBE, shared,
               out, found.probe, *found.results, *(samples[id(r)] if packed else ()))

    def probe(kernel: Kernel) -> None:
        r = rows.next()
        kernel(q, r.k, r.k_scale, BLOCK_SIZE, N_PROBE, found.probe)

    def choose(kernel: Kernel) -> None:
        kernel(found.probe, sums, K_BLOCKS, *found.results)

    def over_blocks(kernel: Kernel) -> None:
        r = rows.next()
        kernel(q, r.k, r.v, r.k_scale, r.v_scale, lists[id(r)], BLOCK_SIZE, out)

    samples = {id(r): packed_samples(r) for r in rows.all}
    for r in rows.all:
        lists[id(r)] = np.stack([s.ids for s in sparse.select_heads(
            bench.normal(NUM_HEADS, found.count), sums, K_BLOCKS)]).astype(np.int32)
    token = kv_bytes_per_token(NUM_KV_HEADS, HEAD_DIM, kv)
    probed = n // BLOCK_SIZE * min(N_PROBE, BLOCK_SIZE) * token // 2
    per_head = distinct_tokens(lists[id(rows.all[0])], NUM_KV_HEADS) * token // NUM_KV_HEADS
    shared = min(K_BLOCKS * BLOCK_SIZE, n) * token
    works = [Work("two_pass", dense, read_bytes=n * token, numpy="dense"),
             Work("single_pass", dense, read_bytes=n * token, numpy="dense")]
    if kv == "q8":
        works += [Work(name, dense, read_bytes=n * token, numpy="dense")
                  for name in ("single_pass_q8", "single_pass_q8_row")]
    works += [
        *(Work(name + suffix, partial(pruned, is_shared, packed), "sparse_attention",
               read_bytes=probed + attended, numpy="sparse")
          for name, is_shared, attended in (("sparse_attention", False, per_head),
                                            ("sparse_attention_shared", True, shared))
          for suffix, packed in (("", False), ("_packed", True))),
        Work("probe_scores", probe, read_bytes=probed, numpy="probe"),
        Work("select_blocks", choose, numpy="choose"),
        Work("two_pass_blocks", over_blocks, "two_pass", read_bytes=per_head, numpy="blocks"),
    ]
    return Group(works, numpy_calls(q, rows, importance, sums, lists), kv, n)


def packed_samples(rows: LayerRows) -> tuple[np.ndarray, np.ndarray | None]:
    """The K rows that the probe reads of all full blocks, copied together, and their scales."""
    full = rows.k.shape[1] // BLOCK_SIZE * BLOCK_SIZE
    step = BLOCK_SIZE // N_PROBE
    scale = rows.k_scale
    return (np.ascontiguousarray(rows.k[:, :full:step]),
            None if scale is None else np.ascontiguousarray(scale[:, :full:step]))


def distinct_tokens(ids: np.ndarray, num_kv_heads: int) -> int:
    """Tokens in the chosen full blocks, those that two query heads of a KV head share once."""
    groups = ids.reshape(num_kv_heads, -1)
    return sum(len(np.unique(group)) for group in groups) * BLOCK_SIZE


def numpy_calls(q: np.ndarray, rows: Rotation, importance: np.ndarray, sums: np.ndarray,
                lists: dict[int, np.ndarray]) -> dict[str, Callable[[], object]]:
    """The same in NumPy: the library's own reference (int8 cast to float, scales folded into
    scores and weights), and for q8 rows what one would write first."""
    scores = sparse.probe_heads(q, rows.all[0], BLOCK_SIZE, N_PROBE)

    def dense() -> None:
        attention.two_pass(q, *rows.next())

    def dequantized() -> None:
        r = rows.next()
        attention.two_pass(q, r.k * r.k_scale[..., None], r.v * r.v_scale[..., None])

    def pruned() -> None:
        sparse.sparse_attention(q, *rows.next(), k_blocks=K_BLOCKS, block_size=BLOCK_SIZE,
                                n_probe=N_PROBE, importance=importance)

    def probe() -> None:
        sparse.probe_heads(q, rows.next(), BLOCK_SIZE, N_PROBE)

    def choose() -> None:
        sparse.select_heads(scores, sums, K_BLOCKS)

    def blocks() -> None:
        r = rows.next()
        group = NUM_HEADS // NUM_KV_HEADS
        for h, ids in enumerate(lists[id(r)]):
            picked = sparse.gather_rows(r.head(h // group), ids, BLOCK_SIZE)
            attention.two_pass(q[h : h + 1], *picked.map(lambda a: a[None]))

    calls: dict[str, Callable[[], object]] = {
        "dense": dense, "sparse": pruned, "probe": probe, "choose": choose, "blocks": blocks}
    if rows.all[0].k_scale is not None:
        calls["dequantized"] = dequantized
    return calls
