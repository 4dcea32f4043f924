"""Prefill and what surrounds attention: many rows at once, bound by arithmetic, not by memory."""

from __future__ import annotations

import math
from functools import partial

import numpy as np

from course_lib import backend, prefill_attention, quant
from course_lib.arrays import F32
from course_lib.bench.attention_cases import HEAD_DIM
from course_lib.bench.groups import Bench, Group, Kernel, Plan, Work
from course_lib.engine import layers
from course_lib.prefill.lse import merge_into
from course_lib.prefill.scores import softmax_fuse_block_sum

NUM_HEADS, NUM_KV_HEADS = 4, 2
"""A quarter of a layer of the decode figures: prefill costs the square of the context."""

CONTEXTS = (512, 1024, 2048, 4096)
STRIDE = 16
WIDTH, BATCH, FFN = 2048, 256, 6144


def plans() -> list[Plan]:
    """Exact attention at every context; scores, quantization and layers once."""
    attention = [Plan("prefill", f"prefill attention {n}", partial(build_attention, n),
                      quick=n == 2048)
                 for n in CONTEXTS]
    return [*attention,
            Plan("prefill", "antidiagonal scores", build_antidiagonal),
            Plan("prefill", "block sums", build_block_sums),
            Plan("prefill", "merge parts", build_merge),
            Plan("prefill", "quantize_rows", build_quantize, all_threads=False),
            Plan("prefill", "layers", build_layers, all_threads=False)]


def build_attention(n: int, bench: Bench) -> Group:
    """Causal attention of n queries over n tokens, with importance, as the engine calls it."""
    q = bench.normal(NUM_HEADS, n, HEAD_DIM)
    k, v = bench.normal(NUM_KV_HEADS, n, HEAD_DIM), bench.normal(NUM_KV_HEADS, n, HEAD_DIM)
    out = np.empty_like(q)
    visible = np.arange(1, n + 1, dtype=np.int64)
    received, importance = np.zeros((NUM_HEADS, n), F32), np.zeros(n, F32)

    def call(kernel: Kernel) -> None:
        kernel(q, k, v, visible, out, received, 0)

    def reference() -> None:
        prefill_attention.causal_attention(q, k, v, importance=importance)

    # A multiplication and an addition per value, in q.k and in w.v; softmax is not counted.
    operations = 4.0 * HEAD_DIM * NUM_HEADS * n * (n + 1) / 2
    work = Work(f"prefill_attention {NUM_HEADS}/{NUM_KV_HEADS} heads", call, "prefill_attention",
                operations=operations, numpy="prefill")
    return Group([work], {"prefill": reference}, "f32", n)


def build_antidiagonal(bench: Bench) -> Group:
    """Scores of blocks of 16 by 16 along their antidiagonals, 2,048 queries and keys."""
    n = 2048
    q, k = bench.normal(1, n, HEAD_DIM), bench.normal(1, n, HEAD_DIM)
    out = np.empty((1, n // STRIDE, n // STRIDE), F32)

    def call(kernel: Kernel) -> None:
        kernel(q, k, STRIDE, out)

    def reference() -> None:
        rows = q.reshape(-1, STRIDE, HEAD_DIM)[:, ::-1].reshape(-1, STRIDE * HEAD_DIM)
        np.matmul(rows, k.reshape(-1, STRIDE * HEAD_DIM).T, out=out[0])

    work = Work("antidiagonal_scores stride 16", call, "antidiagonal_scores",
                operations=2.0 * HEAD_DIM * n * n / STRIDE, numpy="scores")
    return Group([work], {"scores": reference}, "f32", n)


def build_block_sums(bench: Bench) -> Group:
    """The mass of blocks of 128 tokens from antidiagonal scores of 2,048 queries and keys."""
    n, size = 2048 // STRIDE, 128 // STRIDE
    scores = 8 * bench.normal(NUM_HEADS, n, n)
    out = np.empty((NUM_HEADS, n // size, n // size), F32)

    def call(kernel: Kernel) -> None:
        kernel(scores, size, 0.1, n, 0, 0, n, out)

    def reference() -> None:
        with backend.using("numpy"):
            softmax_fuse_block_sum(scores, size, scale=0.1 / math.log(2), is_causal=True)

    work = Work(f"block_sums stride {STRIDE}", call, "block_sums", numpy="mass")
    return Group([work], {"mass": reference}, "f32", 2048)


def build_merge(bench: Bench) -> Group:
    """The merge of two parts of attention, of 512 queries."""
    shape = NUM_HEADS * 512, HEAD_DIM
    part, out, part_lse, lse = (bench.normal(*shape), bench.normal(*shape),
                                np.zeros(shape[0]), np.zeros(shape[0]))
    work = Work(f"merge_parts {shape[0]}x{shape[1]}",
                lambda kernel: kernel(part, part_lse, out, lse), "merge_parts", numpy="merge")
    return Group([work], {"merge": lambda: merge_into(out, lse, part, part_lse)})


def build_quantize(bench: Bench) -> Group:
    """Rows of a KV cache to int8, cold."""
    bench.fill_floats()
    shape = (8 * 512, HEAD_DIM)
    nbytes = int(np.prod(shape)) * 4
    rows = bench.arena.sets(lambda offset: bench.arena.array(offset, shape, "float32"), nbytes)
    q, scale = np.empty(shape, np.int8), np.empty(shape[0], F32)

    def call(kernel: Kernel) -> None:
        kernel(rows.next(), 0, q, scale)

    def reference() -> None:
        quant.quantize_rows(rows.next())

    work = Work(f"quantize_rows {shape[0]}x{shape[1]}", call, "quantize_rows", read_bytes=nbytes,
                numpy="rows")
    return Group([work], {"rows": reference})


def build_layers(bench: Bench) -> Group:
    """RMSNorm, RoPE and the SiLU gate over 256 tokens."""
    x, gain = bench.normal(BATCH, WIDTH), bench.normal(WIDTH)
    heads = bench.normal(BATCH, WIDTH // HEAD_DIM, HEAD_DIM)
    gate, up = bench.normal(BATCH, FFN), bench.normal(BATCH, FFN)
    cos, sin = layers.rope_tables(np.arange(BATCH), HEAD_DIM, 1e6)
    normed, rotated, gated = np.empty_like(x), np.empty_like(heads), np.empty_like(gate)
    works = [
        Work(f"rms_norm {BATCH}x{WIDTH}", lambda kernel: kernel(x, gain, 1e-6, normed), "rms_norm",
             numpy="norm"),
        Work(f"rope {BATCH}x{WIDTH}", lambda kernel: kernel(heads, cos, sin, rotated), "rope",
             numpy="rope"),
        Work(f"silu_mul {BATCH}x{FFN}", lambda kernel: kernel(gate, up, gated), "silu_mul",
             numpy="silu"),
    ]
    return Group(works, {"norm": lambda: layers.rms_norm(x, gain, 1e-6),
                         "rope": lambda: layers.rope(heads, cos, sin),
                         "silu": lambda: layers.silu_mul(gate, up)})
