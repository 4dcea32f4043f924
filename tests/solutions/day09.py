"""Solutions of day 9: one function per A item, one model answer with its rubric per B item."""

from __future__ import annotations

import math

import numpy as np


def kv_quantize_per_head(x):
    x = np.asarray(x, np.float32)
    if not np.isfinite(x).all():
        place = [int(i) for i in np.argwhere(~np.isfinite(x))[0]]
        token = f"token {place[0]}, " if x.ndim == 3 else ""
        raise ValueError(f"x holds NaN or infinity at {token}head {place[-2]}")
    m = np.abs(x).max(axis=-1, keepdims=True)
    m = np.where(m < np.float32(1e-6), np.float32(1), m)
    codes = np.floor(x * (np.float32(127) / m) + np.float32(0.5))
    return np.clip(codes, -127, 127).astype(np.int8), (m / np.float32(127))[..., 0]


def single_pass_q8_attention(q, kq, k_scale, vq, v_scale):
    groups = q.reshape(-1, 32)
    m = np.abs(groups).max(axis=1)
    m = np.where(m < 1e-6, np.float32(1), m)
    y = groups * (np.float32(127) / m)[:, None]
    q_int = (np.sign(y) * np.floor(np.abs(y) + np.float32(0.5))).astype(np.int32)
    q_scale = m / np.float32(127)
    root = np.float32(1 / math.sqrt(q.size))
    top, total, acc = np.float32(-np.inf), np.float32(0), np.zeros(vq.shape[1], np.float32)
    epsilon = largest_v = 0.0
    for k_row, ks, v_row, vs in zip(kq, k_scale, vq, v_scale, strict=True):
        k_row = k_row.reshape(-1, 32).astype(np.int32)
        dots = (k_row * q_int).sum(axis=1)
        score = (dots * q_scale).sum(dtype=np.float32) * ks * root
        if score > top:
            shrink = np.exp(top - score)
            top, total, acc = score, total * shrink, acc * shrink
        weight = np.exp(score - top)
        total += weight
        acc += weight * vs * v_row
        epsilon = max(epsilon, float((np.abs(k_row).sum(axis=1) * q_scale / 2).sum() * ks * root))
        largest_v = max(largest_v, float(np.abs(v_row.astype(np.float32)).max() * vs))
    return acc / total, math.expm1(2 * epsilon) * largest_v


def bias_test(errors):
    errors = np.asarray(errors)
    if np.isnan(errors).any():
        raise ValueError("errors hold NaN")
    positive, negative = int((errors > 0).sum()), int((errors < 0).sum())
    n = positive + negative
    tail = sum(math.comb(n, i) for i in range(min(positive, negative) + 1))
    return {"n": n, "positive": positive, "p": min(1.0, 2 * tail / 2**n)}


ANSWERS = {
    "d09.b1": """
One scale per head: a score is a sum over the values of one head, so a scale that is the same for
all of them leaves the sum, s * sum(q_i * code_i), and costs one multiply a row; a scale per value
would have to stay inside the sum. A scale shared by several heads would leave it too, but then an
outlier in one head would coarsen the others, and heads are read one at a time. A scale per
dimension over all tokens cannot be fixed when a row is written: later tokens are not known yet.
-128 cannot occur: |x| <= m, so |x * (127/m)| is at most 127 up to one float32 rounding, and
floor(-127.00001 + 0.5) is -127; the clamp is a guard that never acts.
Rubric: 2 points: the scale leaves the sum over one head (1 of them if only "it saves memory"); 1
point: the bound on |y| with the rounding mentioned.
""",
    "d09.b2": """
Three places round to int8: q on read (quantize_blocks, per 32 values, ties away from zero), and K
and V when they are written (KVCache.append, per head, ties up), long before this query exists. The
integer dot of 32 products rounds nothing: at most 32 * 127 * 127 = 516,128 in magnitude, below
2**24, so even float32 holds every partial sum exactly. What follows (times q_scale, times k_scale,
exp, the accumulator) is float32 rounding, some 10,000 times finer than a q8 step.
Rubric: 1 point: the moment of each rounding (write or read); 1 point: why the dot is exact; 1
point: float32 rounding is of another order.
""",
    "d09.b3": """
0.994-0.998 are ratios of two perplexities: the article quotes a source comment about the engine's
8B model with an INT8 KV cache on its validation paths M4e and M4f. It is not a perplexity, and not
a loss of 0.5 %: if the ratio is q8 over float, a value below 1 says that q8 predicted that text
slightly better, which is noise of a small sample and not an improvement; if it is the other way
round, q8 was 0.2-0.6 % worse. The comment does not say which, nor which text, nor how many tokens,
so no conclusion for another model follows. Our ratio is q8 over f32, over the tokens of the
recorded run; above 1 would be worse.
Rubric: 2 points: it is a ratio from one validation path of one model; 1 point: the side of 1 and
what it would mean; 1 point: what is missing to conclude more.
""",
}
