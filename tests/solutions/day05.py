"""Solutions of day 5: one function per A item, one model answer with rubric per B item."""

from __future__ import annotations

import numpy as np


def q8_dot(x_codes, x_scales, w_codes, w_scales):
    acc = np.float32(0)
    for b, x_scale in enumerate(x_scales):
        block = slice(32 * b, 32 * b + 32)
        total = int((x_codes[block].astype(np.int64) * w_codes[block].astype(np.int64)).sum())
        scale = np.float32(w_scales[b]) * x_scale
        acc = np.float32(float(scale) * total + float(acc))
    return acc


def vdotq_s32(acc, a, b):
    products = a.astype(np.int32) * b.astype(np.int32)
    return acc + products.reshape(4, 4).sum(axis=1, dtype=np.int32)


def first_difference(stages_a, stages_b):
    if [name for name, _ in stages_a] != [name for name, _ in stages_b]:
        raise ValueError("the stages differ")
    for (name, a), (_, b) in zip(stages_a, stages_b, strict=True):
        if a.shape != b.shape or a.dtype != b.dtype:
            return name, None
        bytes_a, bytes_b = (np.ascontiguousarray(x).reshape(-1).view(np.uint8)
                            .reshape(-1, x.itemsize) for x in (a, b))
        wrong = np.flatnonzero((bytes_a != bytes_b).any(axis=1))
        if len(wrong):
            return name, tuple(int(i) for i in np.unravel_index(wrong[0], a.shape))
    return None


ANSWERS = {
    "d05.b1": """
x is quantized once per product, before the bands of weight rows start: n values, each with a
maximum, a multiplication and a rounding. Every code then meets all m rows of w, so n * m
multiply-adds share the cost of n roundings: 1 to 896 for gate and up. It would matter for a
matrix with few rows (a router with eight outputs, one head's dot), or if x were quantized again
for every row or every thread.
Rubric: 1 point: n against n * m, with the reuse of the codes by all rows; 1 point: a case with
few rows, or repeated quantization.
""",
    "d05.b2": """
16 bits: a product is at most 128 * 127 = 16,256 in magnitude, two are 32,512 <= 32,767; a third
could pass it, four are 65,024. 32 bits: a group of 32 has at most 32 * 128 * 127 = 520,192 <
2**19; only 4,129 of them could pass 2**31 - 1, and a sum is started anew long before. The trick:
sums run on over at most COUNTED_GROUPS = 8 groups, 8 * 520,192 = 4,161,536 < 4,194,304 = 2**22;
32,768 are left, not enough for a ninth group. Both hold because x never has the code -128
(largest magnitude / 127). With -128 on both sides two products would be exactly 32,768, one too
many.
Rubric: 1 point: 16 bits with numbers; 1 point: 32 bits and the trick with numbers and the room
left; 1 point: uses that one factor is never -128.
""",
    "d05.b3": """
weights="q8_0" rounds the weights and, in every product, the activations: two variables. A run
with dequantized weights and float activations (the step 'q8 weights' of the chain) would change
only the first. COURSE_KERNEL=numpy replaces every operation at once, each with its own order of
additions and its own exp. kv="q8" rounds K and V, and both while the prompt is read and while the
answer is written. Threads and tile change when and where a row is computed, never the order
inside a sum, so they deserve the bit gate.
Rubric: 1 point: the variables of one True, and a run that would separate them; 1 point: bit gate
for a False, with the reason.
""",
}
