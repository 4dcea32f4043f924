"""Solutions of day 7: one function per A item, one model answer with its rubric per B item."""

from __future__ import annotations

import math

import numpy as np


def gqa_attention(q, k, v):
    heads, kv_heads = len(q), len(k)
    if heads % kv_heads:
        raise ValueError(f"{heads} query heads do not divide over {kv_heads} KV heads")
    out = np.empty_like(q)
    for h in range(heads):
        kh = h * kv_heads // heads
        scores = k[kh] @ q[h] / np.float32(math.sqrt(q.shape[1]))
        weights = np.exp(scores - scores.max())
        out[h] = weights / weights.sum() @ v[kh]
    return out


def online_softmax_attention(tokens):
    top, total, acc, rescales = -np.inf, np.float32(0), None, 0
    for score, value in tokens:
        if acc is None:
            acc = np.zeros_like(value)
        if score == -np.inf:
            continue
        if score > top:
            shrink = np.exp(top - score)
            total, acc, top, rescales = total * shrink, acc * shrink, score, rescales + 1
        weight = np.exp(score - top)
        total, acc = total + weight, acc + weight * value
    return {"out": acc / total if total > 0 else acc, "max": float(top), "sum": float(total),
            "rescales": rescales}


def exp_poly(x):
    f = np.float32
    used = np.maximum(x, f(-87))
    n = np.rint(used * f(1 / math.log(2)))
    r = used - n * f(0.693359375) - n * f(math.log(2) - 0.693359375)
    p = np.full_like(r, f(1 / math.factorial(7)))
    for i in range(6, -1, -1):
        p = p * r + f(1 / math.factorial(i))
    power = ((n.astype(np.int32) + 127) << 23).view(f)
    return np.where(x >= f(-87), p * power, f(0))


ANSWERS = {
    "d07.b1": """
The definition is h * num_kv_heads // num_heads; the loop goes the other way,
from a KV head to the consecutive query heads that it serves, which is the same map. Neighbours are
grouped because the projection's rows, and so the checkpoint, were laid out and trained that way:
query head h learned to ask the keys of KV head h * G // H. It also means that the heads of a group
lie next to each other in memory and are served from rows read once. An engine that maps them by
h % G computes with the right shapes and the wrong keys: no error, and a model that has lost what
it knew (9 nats a token instead of 0.001 in the lesson). To use the other map one would have to
reorder the rows of the query projection (and the columns of the output projection) once.
Rubric: 2 points: the training of the checkpoint decided the map (1 of them if only "it is faster
in memory"); 1 point: nothing fails visibly, the answers are wrong.
""",
    "d07.b2": """
At the first token M is -infinity and S and A are 0, so the first score is larger than M and shrinks
what was there by exp(-inf - s) = 0: zero times zero, harmless, and no special case is needed. In C
the first tile does the same; v16_exp gives exactly 0 below -87, also for -infinity. A masked token
must not reach exp(score - M) as long as M is -infinity itself: -inf - (-inf) is NaN, and NaN stays
in S for good; so online_softmax skips it. Later, with a finite M, exp(-inf - M) = 0 adds nothing,
so there the skip only saves work.
Rubric: 1 point: 0 times empty is harmless at the start; 1 point: -inf - (-inf) is NaN when the
first token is masked; 1 point: with a finite M the weight is 0 anyway.
""",
    "d07.b3": """
IEEE 754 says that addition, multiplication and the fused multiply-add return the float nearest to
the exact result. _mm256_fmadd_ps and vfmaq_f32 are both that one operation, lane by lane, in
the same order with the same constants, so each of the ten steps has one possible result. The
compiler must not fuse or split on its own (-ffp-contract=off), and -ffast-math would allow it to
reorder, to fuse and to replace divisions: other roundings. A sum of many exponentials has an
order, and float addition is not associative: two correct programs that add in another order (a
chain, a tree, 16 lanes) get other last bits from equal terms.
Rubric: 1 point: each operation is rounded correctly by the standard, so it has one result; 1 point:
what -ffast-math would permit; 1 point: the order of a sum is a choice.
""",
}
