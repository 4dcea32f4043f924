"""Solutions of day 4: one function per A item, one model answer with its rubric per B item."""

from __future__ import annotations

import numpy as np


def q8_0_pack_unpack(w):
    w = np.asarray(w, np.float32)
    if w.shape[1] % 32 or not np.isfinite(w).all():
        raise ValueError("rows must be finite and a multiple of 32 long")
    groups = w.reshape(len(w), -1, 32)
    d = np.abs(groups).max(axis=-1, keepdims=True) / np.float32(127)
    inverse = np.divide(np.float32(1), d, out=np.zeros_like(d), where=d > 0)
    y = groups * inverse
    whole = np.trunc(y)
    codes = (whole + np.copysign(np.abs(y - whole) >= 0.5, y)).astype(np.int8)
    half = d.astype("<f2")
    blocks = np.concatenate((half.view(np.uint8), codes.view(np.uint8)), axis=-1)
    values = codes.astype(np.float32) * half.astype(np.float32)
    return blocks.reshape(len(w), -1), values.reshape(w.shape)


def q4_0_pack_unpack(w):
    w = np.asarray(w, np.float32)
    if w.shape[1] % 32 or not np.isfinite(w).all():
        raise ValueError("rows must be finite and a multiple of 32 long")
    groups = w.reshape(len(w), -1, 32)
    place = np.abs(groups).argmax(axis=-1)[..., None]
    d = np.take_along_axis(groups, place, axis=-1) / np.float32(-8)
    inverse = np.divide(np.float32(1), d, out=np.zeros_like(d), where=d != 0)
    codes = np.trunc(groups * inverse + np.float32(8.5))
    codes = np.minimum(codes, 15).astype(np.uint8)
    half = d.astype("<f2")
    packed = codes[..., :16] | codes[..., 16:] << 4
    blocks = np.concatenate((half.view(np.uint8), packed), axis=-1)
    values = (codes.astype(np.float32) - np.float32(8)) * half.astype(np.float32)
    return blocks.reshape(len(w), -1), values.reshape(w.shape)


def possible_rules(x, codes):
    x = np.asarray(x, np.float32)
    m = np.abs(x).max(axis=-1, keepdims=True)
    m = np.where(m < np.float32(1e-6), np.float32(1), m)
    scale, half = m / np.float32(127), np.float32(0.5)
    ys = [x * (np.float32(127) / m), x / scale, x * (np.float32(1) / scale)]

    def half_away(y):
        whole = np.trunc(y)
        return whole + np.copysign(np.abs(y - whole) >= half, y)

    rules = {"half_up": lambda y: np.floor(y + half), "half_even": np.rint,
             "half_away": half_away, "trunc": lambda y: np.trunc(y + half),
             "toward_zero": np.trunc}
    return [name for name, rule in rules.items()
            if np.any([rule(y) == codes for y in ys], axis=0).all()]


ANSWERS = {
    "d04.b1": """
Three lines state 34: BLOCK_BYTES of weight_blocks.py, the table of GGUF kinds in gguf_types.py,
and the bench's Q8_0_BYTES; everything else takes it from BLOCK_BYTES. The scale becomes float16
in _quantize, after the codes were made with the inverse of the float32 d. 34 bytes are 2 more
than 32: block b starts at 34 b, so codes begin at places that are even but no multiple of 4, 16
or 64, a vector load crosses cache lines often, and the scale stands in the middle of the stream.
Better: all codes in one array and all scales in another, both aligned. (The engine does so when it
loads a matrix, and also puts 16 rows side by side: PackedMatrix in linear.py.)
Rubric: 1 point: 34 breaks alignment, or mixes scales into the stream of codes; 1 point: an order
in which codes lie beside codes, apart from the scales, so that a load brings only codes.
""",
    "d04.b2": """
_q4_0_codes packs code j low and j + 16 high, the C packer does the same in its last loop,
_q4_0_signed takes a byte apart into & 15 and >> 4. Weight 100 is element 4 of
block 3, low half of byte 3 * 18 + 2 + 4 = 60 of the row. The colleague's round trip passes, every
error bound and histogram passes, even the model's answers pass as long as his own unpacker reads
the blocks: both sides are wrong together. A comparison with bytes from elsewhere finds it: the
gguf package, a file of llama.cpp, the C kernel, or one written-out block with known bytes.
Rubric: 1 point: round trip and model pass because both halves agree; 1 point: only foreign bytes
(golden block, other implementation) find it.
""",
    "d04.b3": """
Activations: ties to even, by adding and subtracting 1.5 * 2^23; Q8_0 weights: half_away; rows:
half_up; Q4_0: trunc(y + 8.5), which on y >= -8 is never negative, so that cutting off is floor:
half_up. The biased rule cuts off y + 0.5, which is negative for y below -1/2, and there cutting
off goes up, toward zero. With the 8 behind the conversion Q4_0 would have that rule: every weight
with y below -1/2 comes out one code higher, except ties; even the extreme, -8, becomes -7, code
1, so no block has its largest weight right. That is about half of all weights. The histogram of
errors by sign shows it at once (mean 1 on negative y), and so do possible_rules and the model's
answers at 4 bits.
Rubric: 1 point: the offset keeps the argument positive, so cutting off is floor; 1 point: weights
on the negative side of y move one code up, found by errors by sign (or the classifier).
""",
}
