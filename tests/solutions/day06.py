"""Solutions of day 6: one function per A item, one model answer with rubric per B item."""

from __future__ import annotations

import numpy as np

from course_lib.fused import fused_multiply_add


def rms_norm(x, gain, eps, tree):
    def total(part):
        if isinstance(part, tuple):
            return total(part[0]) + total(part[1])
        s = np.float32(0)
        for i in part:
            s = fused_multiply_add(x[i], x[i], s)
        return s

    mean = total(tree) / np.float32(len(x)) + np.float32(eps)
    return x / np.sqrt(mean) * gain


def qk_norm(q, k, q_gain, k_gain, eps):
    def normed(rows, gain):
        mean = np.mean(np.square(rows), axis=-1, keepdims=True)
        return rows / np.sqrt(mean + np.float32(eps)) * gain

    return normed(q, q_gain), normed(k, k_gain)


def rope(x, positions, theta):
    d = x.shape[-1]
    exponents = np.arange(0, d, 2, dtype=np.float32) / np.float32(d)
    frequencies = np.float32(1) / np.float32(theta) ** exponents
    angles = positions.astype(np.float32)[:, None] * frequencies
    cos, sin = np.cos(angles)[:, None, :], np.sin(angles)[:, None, :]
    a, b = x[..., : d // 2], x[..., d // 2 :]
    return np.concatenate((a * cos - b * sin, b * cos + a * sin), axis=-1)


ANSWERS = {
    "d06.b1": """
mean_square keeps one v16: lane j adds the squares of the numbers j, j + 16, ... by fused
multiply-adds, ten for d = 160; v16_sum then adds lanes i and i + 8, i + 4, i + 2, i + 1: 15
additions. The definition speaks of 16 lanes, not of registers: four NEON registers hold lanes
0-3, 4-7, 8-11, 12-15 and each instruction does to its four lanes what AVX-512 does to all 16, so
the same float operations happen in the same order. The NEON file refuses vaddvq_f32 because it
adds neighbours first. A multiply-add split in two would round each square before it is added:
other bits in most rows, which is why the compiler gets -ffp-contract=off and fma is asked for by
name.
Rubric: 1 point: same lanes and same order of operations, whatever the register's width; 1 point:
two roundings instead of one change bits.
""",
    "d06.b2": """
Without QK-norm the gain is a null pointer: split_row skips the norm and x still points at the row
of the projection, which is turned straight into the output; in NumPy `normed` is then the row
itself. In place is possible because normed_row reads each number before it writes it, and
rope_pairs loads both halves of 16 pairs before it stores them: no number is needed after it was
overwritten. The values are copied as they are. 3 layers times 4 query and 2 key heads are 18
norms.
Rubric: 1 point: what a null gain does; 1 point: both members of a pair are read before either is
written.
""",
    "d06.b3": """
rope_tables is called once per forward pass and serves all layers and heads. The angle is one
float32 product. At 100,000 neighbouring floats are 2**-7 apart, so the product can be off by half
of that, and the frequency, itself rounded to 24 bits, is multiplied by 100,000 together with its
error. cos and sin then see a wrong angle, however exact they are: only its part within one turn
counts, and of 24 bits some 17 were spent on whole turns. The weights were trained with these
rounded angles; a double angle would be closer to the formula and farther from the training.
Rubric: 1 point: the product and the frequency are rounded before cos and sin, with a size at
100K; 1 point: training used the float32 angle, so double is another model.
""",
}
