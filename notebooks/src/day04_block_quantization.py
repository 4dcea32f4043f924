# %% [markdown]
r"""
# Day 4/30 · 块量化 Block quantization

**You need** NumPy indexing, and what a byte and a bit are. Day 2's float16 helps; what you need of it is
repeated.

**You will be able to** pack 32 weights into 34 bytes, or into 18, bit for bit as GGUF files do (块量化) · say
where the error of such a block comes from, and bound it · tell five rounding rules (舍入规则) apart, by
their errors and by their ties, and name the rule of a quantizer that you cannot look into.

**Time** 90 minutes, six exercises. These three sections are the course's own plan, not the article
series'. Formats: GGUF of llama.cpp.

Labels: **this machine** (measured in the cell you run) or **derived** (arithmetic). A number without a
label is a toy or a count. Words that you miss are in the [glossary](../docs/glossary.md).
"""

# %% tags=["nbval-ignore-output"]
import dataclasses
import inspect

import numpy as np

from course_lib import backend, quant, weight_blocks
from course_lib.classroom import check, solved_or
from course_lib.engine import Engine, generate_from
from course_lib.engine.checkpoint import open_checkpoint
from course_lib.engine.conversion import load_weights
from course_lib.lab import rounding_rules
from course_lib.lab.needle import NeedleOptions, holds_value, prompt_of
from course_lib.paths import MODELS
from course_lib.show import WeightBlockExplorer
from course_lib.show.block_bytes import block_bytes
from course_lib.show.c_source import c_function
from course_lib.show.error_plots import error_histograms
from course_lib.show.text import fmt, percent

print("backend:", backend.info().name)

# %% [markdown]
r"""
## A quarter of the bytes

A model is mostly matrices of **weights** (权重), and for every token that it writes, it reads them all. So the
bytes of a weight are paid twice: once as memory, and once per token as traffic. Fewer bytes, faster tokens.

The shipped model keeps 16 bits a weight. Here it is three times: as it is, in about 8 bits, and in about 4. *Predict*: which of
the three still answers a question about its notes?
"""

# %%
config, source, tokenizer = open_checkpoint(MODELS / "needle-qwen3")
engines = {kind: Engine(config, load_weights(source, config, kind), tokenizer)
           for kind in ("f32", "q8_0", "q4_0")}
prompt = prompt_of(engines["f32"], NeedleOptions(tokens=200), 0)
names = [n for n in source.stored if len(source.stored[n].shape) == 2]
count = sum(int(np.prod(source.stored[n].shape)) for n in names)
print(f"{count:,d} weights in {len(names)} matrices\nquestion: {prompt.question}")
for kind, bits in (("f32", 16), ("q8_0", 8.5), ("q4_0", 4.5)):
    answer = generate_from(engines[kind].prefill(prompt.ids), 16)
    stored = "f16" if kind == "f32" else kind
    print(f"{stored:>5}: {int(count * bits / 8):9,d} bytes (derived)   "
          f"{engines[kind].decode(answer.ids)!r}")

# %% [markdown]
r"""
(The file holds float16. The engine computes with them in float32, which loses nothing.)

All three answer, the last one from 28 % of the bytes. 4 bits are only 16 different values! How can
that be enough? By a scale of their own for every 32 weights. And by rounding correctly: at the end
of the day you will see the same 4 bits with a careless rounding rule, and the model will not get one answer right.

## 4-1 34 字节装 32 个数 · Q8_0: 34 bytes for 32 numbers

Take 32 neighbours in a row of a matrix: one **block** (块). Find the largest magnitude, and let it be 127. Everything
else becomes a whole number between −127 and 127, its **code**, which fits one byte.

Six numbers instead of 32, to do by hand: 254, −100, 51, −7, 3, 0.8. The largest is 254, so the **scale** is
$d = 254/127 = 2$. Divide each by 2 and round; halves go *away from zero*. *Cover the output and write down the
six codes.* Three of the quotients lie exactly between two codes.
"""

# %%
six = np.array([254, -100, 51, -7, 3, 0.8], np.float32)
d = np.abs(six).max() / np.float32(127)
y = six * (np.float32(1) / d)
codes = quant.round_to_int(y, "half_away")
print(f"d = {d}")
print("     x       y   code   code·d   error in steps")
for x_i, y_i, code in zip(six, y, codes):
    print(f"{x_i:6.1f} {y_i:7.1f} {code:6d} {code * d:8.1f} {(code * d - x_i) / d:8.2f}")

# %% [markdown]
r"""
25.5 became 26, 1.5 became 2 and −3.5 became −4: away from zero, all three. 0.8 is gone. No error is above half a step.

$$ d = \frac{\max_i |x_i|}{127}, \qquad \text{code}_i = \text{round}\Big(x_i \cdot \frac1d\Big), \qquad
\hat x_i = \text{code}_i \cdot d . $$

### The bytes

In the file a **Q8_0** block is $d$ as a float16, 2 bytes, and then 32 codes, a byte each. That makes 34.
**Predict**: how many bits does one weight cost? And which code stands where a byte is `81`?

Below is the first block of a real matrix, one of 22. Which one does not matter today.
"""

# %%
name = "model.layers.0.mlp.gate_proj.weight"
w = source.read(name)
blocks = weight_blocks.quantize_q8_0(w)
print(name, w.shape, "→ bytes", blocks.shape, "· bits a weight:", 8 * blocks.size / w.size)
block_bytes(blocks[0, :34], "q8_0")

# %% [markdown]
r"""
8.5 bits: 8 for the code and 16/32 for a share of the scale. A negative code is stored as 256 + code (two's
complement), so `81` is 129 − 256 = −127: element 5 is the largest of the block, and negative.

Files write the low byte first: `51 19` is the float16 with the bits `1951`.

### Two errors, not one

A float16 has 11 significant bits. So $d$ is rounded, too. **The codes are made with the exact $d$, and read back
with the rounded one.** Look at the largest weight, which should come back best of all:
"""

# %%
x = w[0, :32]
d = np.abs(x).max() / np.float32(127)
d16 = np.float32(np.float16(d))
at = int(np.abs(x).argmax())
back = weight_blocks.dequantize_q8_0(blocks)[0, :32]
print(f"d = {d:.8f}   as float16 {d16:.8f}   relative error {abs(d16 / d - 1):.1e}")
print(f"element {at}: {x[at]:.6f} read back as {back[at]:.6f}, "
      f"{abs(back[at] - x[at]) / d:.4f} of a step off")
print("error of the block's other values, largest:",
      fmt(np.delete(np.abs(back - x), at).max() / d), "steps")

# %% [markdown]
r"""
The rounding of $d$ shifts each value by up to 127 steps times $2^{-11}$ (half of a float16's last bit):

$$ |\hat x_i - x_i| \;\le\; \underbrace{\tfrac12 d}_{\text{code}} + \underbrace{127 \cdot 2^{-11} d}_{\text{scale}}
\;=\; 0.562\, d . $$

(This holds for $d$ above $6 \cdot 10^{-5}$. Smaller float16 have fewer bits. Our model has no block with so small a $d$, as
the cell shows.)

**Predict the picture**: 71,680 weights, their errors in steps. A bell, a triangle, or a box? And is there anything
special at zero?
"""

# %%
groups = w.reshape(-1, 32)
steps = np.abs(groups).max(axis=1, keepdims=True) / np.float32(127)
back = weight_blocks.dequantize_q8_0(blocks).reshape(-1, 32)
error = (back - groups) / steps
print(f"smallest d of all matrices: "
      f"{min(np.abs(source.read(n).reshape(-1, 32)).max(1).min() for n in names) / 127:.1e}")
print(f"largest error {fmt(np.abs(error).max())} steps; bound {0.5 + 127 / 2**11:.3f} (derived)")
print(f"root mean square {error.std():.3f} steps; 1/√12 = {12**-0.5:.3f} (derived)")
exact = (groups == 0) | (np.abs(groups) == np.abs(groups).max(axis=1, keepdims=True))
print(f"largest of their block, or 0: {percent(exact.mean())} = about 1 of 32")
error_histograms({"Q8_0": (error, groups)}, label=f"this machine: {w.size:,d} weights of {name}")

# %% [markdown]
r"""
A box: within a step, a weight may lie anywhere, so every error is about as likely as any other. A box of width 1 has the root mean
square $1/\sqrt{12} = 0.289$. Keep this number; day 9 uses it.

The spike near zero is one weight in 32: the largest of each block has code ±127 *exactly*. Only the
scale's rounding moves it.

### What an outlier does

One scale serves 32 weights, so one large weight sets the step for its 31 neighbours. **Write down a prediction:** when the
largest weight of this block is raised, ×2, ×4, … ×32, does the error of the others stay, grow in proportion, or grow
faster? How many of the 32 have become 0 at ×32?

Then move `outlier ×`. The errors are drawn in steps, so watch $d$, too: a step is eight times as long here. `block` and `matrix` lead to other
weights of the model.
"""

# %%
explorer = WeightBlockExplorer(outlier=8)
explorer

# %%
for factor in (1, 2, 4, 8, 16, 32):
    r = explorer.compute(outlier=factor)
    rest = np.delete(np.abs(r["error"]), np.abs(x).argmax()).mean()
    print(f"× {factor:>2}: step {r['d']:.2g}, mean |error| of the others {rest:.2f} steps = "
          f"{rest * r['d']:.2g}, codes 0: {int((r['codes'] == 0).sum())} of 32")

# %% [markdown]
r"""
In steps it stays about ¼; the step grows, and the error with it, in proportion. And then values vanish. So blocks should be small? Each block pays 16 bits for its scale. **Why 32?** The
cell quantizes the matrix with one scale for 8, 32, 160 (a row) and all weights; then once more with a single
weight of the matrix raised ×32.
"""

# %%
def relative_error(matrix, group):
    """Root mean square error over that of the weights, outlier left out; 8 bits, float16 scale."""
    g = matrix.reshape(-1, group)
    scale = np.abs(g).max(axis=1, keepdims=True) / np.float32(127)
    made = quant.round_to_int(g / scale, "half_away") * scale.astype(np.float16)
    off = (made - g).reshape(-1)[1:]
    return float(np.sqrt((off**2).mean() / (g.reshape(-1)[1:] ** 2).mean()))


raised = w.copy()
raised[0, 0] = 32 * np.abs(w).max()
print("one scale for    bits a weight   error   error with one outlier   (this machine)")
for group in (8, 32, 160, w.size):
    print(f"{group:7d} weights {8 + 16 / group:12.4f} {100 * relative_error(w, group):9.2f} % "
          f"{100 * relative_error(raised, group):14.2f} %")

# %% [markdown]
r"""
Larger blocks save almost nothing: a whole row takes 0.4 bits less of 8.5, and the error grows by a fifth, or doubles with the
outlier. Smaller blocks are dear: 8 weights a block cost 1.5 bits more for a quarter less error, and *one* bit more in every code would
halve it. So 32 is a compromise. It also fits the processor: its **vector registers** hold 16 or 32 bytes, on which one
instruction works at once (day 5).
"""

# %% [markdown] course={"id": "d04.a1", "kind": "A", "role": "card"}
r"""
### Exercise 4-1 A · 34 bytes, bit for bit

15 minutes · difficulty 2/3 · 5 points · about 16 lines

Write `q8_0_pack_unpack(w)`. `w` is float32 `[rows, cols]`, `cols` a multiple of 32. Return the pair:

* the blocks, uint8 `[rows, cols / 32 · 34]`: per block $d$ as float16, low byte first, then 32 int8 codes;
* what a reader gets from *these bytes*, float32 `[rows, cols]`: code · (float16 $d$).

In float32: $d = m/127$, code = $x \cdot (1/d)$ rounded, **halves away from zero**. A block of zeros has $d = 0$ and codes
0. `ValueError` where cols is not a multiple of 32, and where w holds NaN or infinity.

<details><summary>Hint 1: from numbers to bytes</summary>

`d.astype("<f2").view(np.uint8)` has two bytes for each d, `codes.astype(np.int8).view(np.uint8)` one for each code, and
`np.concatenate(..., axis=-1)` puts them side by side. A view needs the last axis to be contiguous:
`[rows, blocks, 1]` becomes `[rows, blocks, 2]`.

</details>

<details><summary>Hint 2: halves away from zero</summary>

`np.trunc(y) + np.copysign(np.abs(y - np.trunc(y)) >= 0.5, y)`. The tempting `np.trunc(np.abs(y) + 0.5)` is wrong for
the float just below one half: adding rounds it up to 1.

</details>

<details><summary>Hint 3: "divide by zero"</summary>

`np.divide(1, d, out=np.zeros_like(d), where=d > 0)` leaves 0 where d is 0.

</details>
"""

# %% course={"id": "d04.a1", "kind": "A", "role": "answer", "points": 5, "minutes": 15, "difficulty": 2}
# EXERCISE d04.a1
def q8_0_pack_unpack(w):
    """Return (blocks uint8 [rows, cols / 32 * 34], values float32 [rows, cols]) of w as Q8_0.

    w: float32 [rows, cols]. ValueError where cols is no multiple of 32, for NaN and infinity.
    >>> blocks, values = q8_0_pack_unpack(np.full((1, 32), -254, np.float32))
    >>> blocks[0, :4].tolist(), float(values[0, 0])  # 2.0 is 00 40; -127 is 81, 129
    ([0, 64, 129, 129], -254.0)
    """
    raise NotImplementedError("d04.a1")


# %% course={"id": "d04.a1", "kind": "A", "role": "check"}
check("d04.a1", q8_0_pack_unpack)

# %% [markdown]
r"""
Your function, or ours until yours passes, on every matrix of the model, against the library's blocks:
"""

# %%
def ours_q8(matrix):
    made = weight_blocks.quantize_q8_0(matrix)
    return made, weight_blocks.dequantize_q8_0(made)


pack_q8 = solved_or(q8_0_pack_unpack, ours_q8)
same = [bool((pack_q8(source.read(n))[0] == weight_blocks.quantize_q8_0(source.read(n))).all())
        for n in names]
print(f"matrices packed as the library packs them: {sum(same)} of {len(same)}")

# %% [markdown]
r"""
### Read together: the same in C

This is what packs the weights when the engine loads a model into blocks. Compare it with your lines: the maximum is found
on the *bits* of the floats (without their sign, bits are ordered like magnitudes), and `inverse_of` is the guard for a
block of zeros. The rest you know. Where is $d$ made a float16?
"""

# %%
print(c_function("pack.c", "pack_block_q8_0"))
print()
print(c_function("quantize.c", "round_half_away"))

# %% [markdown]
r"""
Not here: it returns the float32 $d$, and the caller stores it as a half. Codes first, scale later. The Python
definition keeps the same order: {see course_lib/weight_blocks.py _q8_0_codes} makes the codes, and
{see course_lib/weight_blocks.py _quantize "stored = d.astype"} the stored scale.
"""

# %% [markdown] course={"id": "d04.b1", "kind": "B", "role": "card"}
r"""
### Exercise 4-1 B · who knows the number 34?

8 minutes · difficulty 2/3 · 4 points

A format number that is written down in many places cannot be changed, and can be wrong in one of them. Search
the `.py` files of `course_lib` for 34 as a whole word (an editor's search over the folder will do).

* `knows_34`: all lines of *code* in `course_lib`, comments and docstrings aside, that state the number for Q8_0. There are three; give
  a list of three `"path:line-line"`.

In [weight_blocks.py](../course_lib/weight_blocks.py), as `"path:first-last"`:

* `stores_scale`: the line that makes the scale a float16;
* `codes_from`: the line of the Q8_0 quantizer that scales the weights before rounding. (Which $d$ does it use?)

Give `row_bytes`, the bytes of a row of 160 weights in Q8_0, and `scale_share`, the percent of a block's bytes that the scale takes (three
digits).

In two or three sentences: why is 34 an awkward size for a processor that likes to load 16, 32 or 64 bytes from places that are
multiples of that? In which order would you lay the same numbers out in memory for it?
"""

# %% [markdown] course={"id": "d04.b1", "kind": "B", "role": "answer", "points": 4, "minutes": 8, "difficulty": 2}
r"""
<!-- ANSWER d04.b1 -->
Answer: …

Evidence: path:first-last
"""

# %% course={"id": "d04.b1", "kind": "B", "role": "evidence"}
# EVIDENCE d04.b1
d04_b1 = {
    "knows_34": [],  # three times "path:first-last"
    "stores_scale": "",  # "path:first-last"
    "codes_from": "",
    "row_bytes": None,  # a number
    "scale_share": None,  # a number
}

# %% course={"id": "d04.b1", "kind": "B", "role": "check"}
check("d04.b1", d04_b1)

# %% [markdown]
r"""
## 4-2 半字节与带符号极值 · Q4_0: 18 bytes and nibbles

With 4 bits there are 16 codes. Half a byte is a **nibble** (半字节), so two codes share a byte: 2 bytes of scale and 16
bytes of codes, 18 for 32 weights. 4.5 bits each.

Sixteen values around zero cannot be symmetric: −8 … 7 has one more below than above. **Q4_0** puts
that extra value to use. It takes the weight of largest magnitude *with its sign*, the signed extreme (带符号极值), and
gives it the value −8, whatever its sign is:

$$ d = \frac{\text{extreme}}{-8}, \qquad \text{code} = \min\big(\lfloor x / d + 8.5 \rfloor,\; 15\big), \qquad
\hat x = (\text{code} - 8) \cdot d . $$

So the extreme always has code 0, and if it is positive, **$d$ is negative**. That looks like a bug in a hex dump, and is none.

Six numbers by hand: −0.8, 0.4, 0.15, 0.77, −0.05, 0. The extreme is −0.8, so $d = 0.1$. *Write down six codes.* Which one meets the limit
15? What does it come back as?
"""

# %%
for sign in (1, -1):
    six = sign * np.array([-0.8, 0.4, 0.15, 0.77, -0.05, 0.0]) + 0.0
    d = six[np.abs(six).argmax()] / -8
    plus = six / d + 8.5
    codes = np.minimum(np.floor(plus + 1e-9), 15).astype(int)  # 1e-9: 0.15 / 0.1 is no exact 1.5
    print(f"d = {d:+.1f}\n   x    ", *(f"{v:6.2f}" for v in six))
    print("x/d+8.5 ", *(f"{v:6.1f}" for v in plus))
    print("code    ", *(f"{c:6d}" for c in codes))
    print("back    ", *(f"{(c - 8) * d + 0.0:6.2f}" for c in codes), "\n")

# %% [markdown]
r"""
With all signs turned, the codes are the same, and $d$ has turned its sign. 0.77 would need 7.7 steps, and there are only
7: it comes back as 0.7. **Values on the far side of the extreme are cut off between 7.5 and 8 steps.** Their error can be as large as one whole
step, while all others stay within half a step.

Is that a good bargain? The honest way to find out is to try the alternatives on real weights: a
symmetric scale $m/7$ with codes −7 … 7, which never cuts off; and $m/8$ with the extreme always at +8, cut to 7.
*Predict the order of the three.*
"""

# %%
def four_bits(g, d, low, high):
    return np.clip(np.floor(g / d + 0.5), low, high) * d


everything = np.concatenate([source.read(n).reshape(-1, 32) for n in names])
m = np.abs(everything).max(axis=1, keepdims=True)
place = np.abs(everything).argmax(axis=1)[:, None]
extreme = np.take_along_axis(everything, place, 1)
choices = {"extreme / -8 (Q4_0)": four_bits(everything, extreme / -8, -8, 7),
           "m / 7, symmetric": four_bits(everything, m / 7, -7, 7),
           "m / 8, largest cut to 7": four_bits(everything, m / 8 * np.sign(extreme), -7, 7)}
size = np.sqrt((everything**2).mean())
print(f"{len(everything):,d} blocks, all matrices   (this machine)")
for what, made in choices.items():
    off = np.abs(made - everything)
    print(f"{what:24s} error {percent(np.sqrt((off**2).mean()) / size)}"
          f"   extremes kept: {percent((np.take_along_axis(off, place, 1) < 1e-6 * m).mean())}")
cut = (everything / (extreme / -8) > 7.5).mean()
print(f"weights that Q4_0 cuts off: {percent(cut)}")

# %% [markdown]
r"""
The signed extreme wins. Its step is finer than $m/7$, and unlike the third it keeps the largest weight, whose error would be a
whole step. It cuts off less than one weight in a hundred. And 8 bits against 4:
"""

# %%
for kind in ("q8_0", "q4_0"):
    made = getattr(weight_blocks, f"quantize_{kind}")(everything)
    off = getattr(weight_blocks, f"dequantize_{kind}")(made) - everything
    print(f"{kind}: {made.shape[1]} bytes a block, error "
          f"{percent(np.sqrt((off**2).mean()) / size)} of the weights   (this machine)")
print(f"ratio of the steps: 127/8 = {127 / 8:.1f}   (derived)")

# %% [markdown]
r"""
Sixteen times the error for about half the bytes. 8.7 % sounds terrible, and the model answered all the same: a product adds
hundreds of such errors, as many up as down, and they cancel. 4-3 shows what happens when they do not.

### The bytes

One byte holds two codes. Which two? Neighbours would be natural. The format says otherwise: **byte $j$ holds element $j$ in its low four
bits and element $j + 16$ in its high four.** Find element 20 in the picture before you read on.
"""

# %%
blocks = weight_blocks.quantize_q4_0(w)
block_bytes(blocks[0, :18], "q4_0")

# %% [markdown]
r"""
Element 20 is the high half of the byte over "4": `98`, so its code is 9, its value one step. (In hexadecimal a nibble is one digit, the left one
high.) The order is made for vector registers: one load of 16 bytes, `& 15` gives elements 0 to 15 in order, `>> 4` gives 16 to 31 in
order, and nothing has to be shuffled.

Here is the same block live. *Predict*: which byte and half holds element 5, the extreme, and what stands there? Move `element`. Then look for a
block with a negative $d$, and for one where an error leaves the band: a weight that was cut off.
"""

# %%
WeightBlockExplorer(kind="q4_0", element=5)

# %% [markdown] course={"id": "d04.a2", "kind": "A", "role": "card"}
r"""
### Exercise 4-2 A · 18 bytes, bit for bit

12 minutes · difficulty 2/3 · 5 points · about 18 lines

Write `q4_0_pack_unpack(w)`: as in 4-1, `(blocks, values)`, now Q4_0, 18 bytes a block. In float32:

* the extreme is the value of largest magnitude, with its sign; **of equal magnitudes the first**;
* $d$ = extreme / −8; code = min(trunc($x \cdot (1/d)$ + 8.5), 15); a block of zeros has $d = 0$ (and codes 8);
* 2 bytes of float16 $d$, low byte first, then 16 bytes: code $j$ low, code $j + 16$ high;
* values: (code − 8) · (float16 $d$), from the bytes.

`ValueError` as before.

<details><summary>Hint 1: the signed extreme</summary>

`np.abs(g).argmax(axis=-1)` gives the place of the first largest; `np.take_along_axis(g, place[..., None], -1)` the value there.

</details>

<details><summary>Hint 2: two codes in one byte</summary>

`codes[..., :16] | codes[..., 16:] << 4` for uint8 codes; back with `& 15` and `>> 4`.

</details>

<details><summary>Hint 3: minus 8 in uint8</summary>

`np.uint8(3) - np.uint8(8)` is 251. Make the codes float32 or int8 first.

</details>
"""

# %% course={"id": "d04.a2", "kind": "A", "role": "answer", "points": 5, "minutes": 12, "difficulty": 2}
# EXERCISE d04.a2
def q4_0_pack_unpack(w):
    """Return (blocks uint8 [rows, cols / 32 * 18], values float32 [rows, cols]) of w as Q4_0.

    w: float32 [rows, cols]. ValueError where cols is no multiple of 32, for NaN and infinity.
    >>> blocks, values = q4_0_pack_unpack(np.full((1, 32), 16, np.float32))
    >>> blocks[0, :3].tolist(), float(values[0, 0])  # d = -2.0 is 00 c0; all codes are 0
    ([0, 192, 0], 16.0)
    """
    raise NotImplementedError("d04.a2")


# %% course={"id": "d04.a2", "kind": "A", "role": "check"}
check("d04.a2", q4_0_pack_unpack)

# %%
def ours_q4(matrix):
    made = weight_blocks.quantize_q4_0(matrix)
    return made, weight_blocks.dequantize_q4_0(made)


pack_q4 = solved_or(q4_0_pack_unpack, ours_q4)
made, values = pack_q4(everything)
print("all blocks as the library's:", bool((made == weight_blocks.quantize_q4_0(everything)).all()),
      "· negative d:", percent((extreme > 0).mean()), "of", f"{len(made):,d} blocks")

# %% [markdown]
r"""
### Read together: pack and unpack

Four lines each way. Look for three things: the limit 15, the line that pairs $j$ with $j + 16$, and where 8 is taken off.
"""

# %%
print(inspect.getsource(weight_blocks._q4_0_codes))
print(inspect.getsource(weight_blocks._q4_0_signed))
print(c_function("pack.c", "pack_block_q4_0"))

# %% [markdown] course={"id": "d04.b2", "kind": "B", "role": "card"}
r"""
### Exercise 4-2 B · which nibble is element j?

6 minutes · difficulty 1/3 · 4 points

Open [weight_blocks.py](../course_lib/weight_blocks.py) and [pack.c](../kernels_pyx/c/pack.c).

Cite, as `"path:first-last"`: `packs`, the line of `_q4_0_codes` that puts two codes into a byte; `packs_in_c`, the line of C that does; `unpacks`, the line
of `_q4_0_signed` that takes a byte apart again.

Give, for weight number 100 of a *row* of 160 weights, counted from 0: `byte_of_100`, at which byte of the row's Q4_0 bytes its code is, and `half_of_100`, `low` or `high`.
And `code_of_extreme`.

In two or three sentences: a colleague pairs neighbours (element $2j$ low, $2j + 1$ high) in both his packer and his unpacker. Which tests pass,
and which one finds it?
"""

# %% [markdown] course={"id": "d04.b2", "kind": "B", "role": "answer", "points": 4, "minutes": 6, "difficulty": 1}
r"""
<!-- ANSWER d04.b2 -->
Answer: …

Evidence: path:first-last
"""

# %% course={"id": "d04.b2", "kind": "B", "role": "evidence"}
# EVIDENCE d04.b2
d04_b2 = {
    "packs": "",  # "path:first-last"
    "packs_in_c": "",
    "unpacks": "",
    "byte_of_100": None,  # a number
    "half_of_100": "",  # a word: low or high
    "code_of_extreme": None,  # a number
}

# %% course={"id": "d04.b2", "kind": "B", "role": "check"}
check("d04.b2", d04_b2)

# %% [markdown]
r"""
## 4-3 舍入的方向 · Which way you round: truncation, floor, half-even, half-away

Until now rounding was a detail. Here are five ways to make $y$ a whole number, each a short line of C:

| name | rule | what it is |
|---|---|---|
| `half_up` | $\lfloor y + ½ \rfloor$ | to nearest, halves up |
| `half_even` | to nearest | halves to the even neighbour |
| `half_away` | to nearest | halves away from zero |
| `trunc` | cut off($y + ½$) | C's `(int)(y + 0.5f)`; looks like `half_up` |
| `toward_zero` | cut off($y$) | C's `(int)y` |

"Cut off" drops what stands behind the point: −1.2 becomes −1. *Fill in the table for six numbers before you run it.* In
which columns do the first three differ?
"""

# %%
y = np.array([-1.5, -1.2, -0.5, 0.5, 1.2, 2.5], np.float32)
print(f"{'y':>12}", *(f"{v:5.1f}" for v in y))
for rule in rounding_rules.RULES:
    print(f"{rule:>12}", *(f"{v:5d}" for v in rounding_rules.rounded(y, rule)))

# %% [markdown]
r"""
Two lessons in one table. The first three differ **on ties only**, in the columns −1.5, −0.5, 0.5 and 2.5. And `trunc` is right on positive
numbers but wrong on negative ones: −1.2 + 0.5 = −0.7, cut off 0.

**Predict**, for weights that are spread evenly within their steps, the *mean* error of each rule in steps: on negative
weights, on positive ones, and over both.
"""

# %%
ratio = rounding_rules.scaled_in_each_order(w.reshape(-1, 32))[0]  # 127 · w / max, of every block
error_histograms({rule: (rounding_rules.rounded(ratio, rule) - ratio, ratio)
                  for rule in rounding_rules.RULES},
                 label=f"this machine: {w.size:,d} weights of {name}")

# %% [markdown]
r"""
`trunc` moves each negative weight up by one step on average and leaves the positive ones right: **half a step over both, and
always in the same direction**. (In the picture: the box of the negative weights begins at +½, where that of the positive ones ends.)
`toward_zero` errs by half a step on both sides, toward zero: the two cancel in the mean, but every weight has shrunk.

A bias is not just a larger error. In a product, $\sum_i \hat w_i x_i$, hundreds of errors meet. Those of random sign cancel. A shift of $b$ in
every weight does not: it adds $b \sum_i x_i$.

Try it: 448 rows of our matrix times the 160 numbers with which the token " ramen" enters the model, and then times the *magnitudes* of these numbers. The
second $x$ is as large, but has one sign. *Predict*: in which of the two does `trunc` do more harm, and which way do the errors point?
"""

# %%
token = tokenizer.encode(" ramen")[0]
signed = source.read("model.embed_tokens.weight")[token]
step = np.abs(w.reshape(-1, 32)).max(axis=1, keepdims=True) / np.float32(127)
print("448 products   (this machine; b · Σx derived, with b = half an average step)")
for what, x_in in (("x as it is", signed), ("magnitudes", np.abs(signed))):
    shift = float(step.mean() / 2 * x_in.sum())
    print(f"{what}: Σx = {x_in.sum():.1f}, mean |w · x| = {np.abs(w @ x_in).mean():.2g}, "
          f"b · Σx = {shift:.4f}")
    for rule in ("half_up", "toward_zero", "trunc"):
        rounded_w = (rounding_rules.rounded(ratio, rule).astype(np.float32) * step).reshape(w.shape)
        off = rounded_w @ x_in - w @ x_in
        mean = round(float(off.mean()), 4) + 0.0
        print(f"  {rule:12s} mean |error| {np.abs(off).mean():.4f}   mean error {mean:7.4f}"
              f"   positive {percent((off > 0).mean())}")

# %% [markdown]
r"""
With the signed $x$ the bias nearly cancels in $\sum_i x_i$, and `trunc` looks merely sloppy. With one sign all 448 errors point the same way, at the size that
$b \sum_i x_i$ foretells, and the error is more than twenty times that of `half_up`. Numbers inside a model are of both kinds. So a bias may hide for a long time, and
then not.

### Would anybody notice?

Make all matrices of the model whole numbers of 8, 5 and 4 bits, with one scale for 32, under three rules, and ask four questions. `nats` is
the mean of −log(probability) of the right answer's tokens; 0 is certainty. *Predict where each rule breaks.*
"""

# %%
def with_rule(bits, rule):
    """The engine with every matrix rounded to `bits` bits by `rule`, and read back.

    Only the lines from g to codes matter; the rest finds the matrices among the engine's weights.
    """
    top = np.float32(2 ** (bits - 1) - 1)  # 127, 15, 7

    def change(part):
        if isinstance(part, np.ndarray) and part.ndim == 2:
            g = part.reshape(-1, 32)
            m = np.abs(g).max(axis=1, keepdims=True)
            codes = rounding_rules.rounded(g * (top / m), rule).astype(np.float32)
            return (codes * (m / top)).reshape(part.shape)
        if isinstance(part, tuple):
            return tuple(change(p) for p in part)
        if dataclasses.is_dataclass(part):
            names = [f.name for f in dataclasses.fields(part)]
            return dataclasses.replace(part, **{n: change(getattr(part, n)) for n in names})
        return part

    return Engine(config, change(load_weights(source, config)), tokenizer)


# %% tags=["nbval-ignore-output"]
def questions(engine, prompts):
    right, nats = 0, []
    for p in prompts:
        session = engine.prefill(p.ids)
        nats.append(-float(session.score(engine.encode(p.fact.sentence)).mean()))
        right += holds_value(engine.decode(generate_from(session, 12).ids), p.fact.value)
    return right, float(np.mean(nats))


prompts = [prompt_of(engines["f32"], NeedleOptions(tokens=120), i) for i in range(4)]
found = {("f32", ""): questions(engines["f32"], prompts)}
for bits in (8, 5, 4):
    for rule in ("half_up", "toward_zero", "trunc"):
        found[bits, rule] = questions(with_rule(bits, rule), prompts)
print("this machine")
for (bits, rule), (right, nats) in found.items():
    print(f"{bits!s:>4} {rule:12s} {right} of 4 right, {nats:8.4f} nats")

# %%
for rule in ("half_up", "toward_zero", "trunc"):
    print(f"{rule:12s} right answers at 8, 5, 4 bits:", [found[b, rule][0] for b in (8, 5, 4)])
print("at 8 bits the three rules differ by less than 0.001 nats:",
      max(found[8, r][1] for r in ("trunc", "toward_zero")) - found[8, "half_up"][1] < 0.001)
print("at 4 bits trunc costs over a thousand times as much as half_up:",
      found[4, "trunc"][1] > 1000 * found[4, "half_up"][1])

# %% [markdown]
r"""
At 8 bits nobody would have noticed. At 4 bits the honest rule is as good as ever, `toward_zero` still answers, and `trunc` gets **nothing** right.
Same bits, same bytes, same speed. This is what a wrong `+ 0.5` costs.

So how does Q4_0 dare to cut off? Its rule *is* trunc($y$ + 8.5). The 8 makes all the difference: $y \ge -8$, so $y + 8.5 \ge 0.5$ is never negative, and
cutting off a positive number is rounding down. **The same instruction, on shifted numbers, is `half_up`.**
"""

# %%
eighths = np.arange(-64, 57, dtype=np.float32) / 8  # -8 … 7 in eighths
print("trunc(y + 8.5) - 8 equals half_up:  ",
      bool((np.trunc(eighths + 8.5) - 8 == rounding_rules.rounded(eighths, "half_up")).all()))

# %% [markdown]
r"""
### A black box

Somebody gives you weights and the codes that a converter made of them, but not the converter. Which rule is in it?

* **Most numbers tell the first three rules from the other two**: one code that is more than half a step off is enough.
* **Only ties tell the first three apart.** Real weights are no ties... or are they? A weight is a tie if $127\,w/m$ ends in
  exactly ½, for instance $w = \pm m/2$: 63.5.

And ties have a catch. In float32, $w \cdot (127/m)$, $w / (m/127)$ and $w \cdot (1/(m/127))$ are three different computations. One gives 63.5 and
another 63.499996, which is no tie. **You do not know which one the converter used.**
"""

# %%
orders = rounding_rules.scaled_in_each_order(everything)
near = np.abs(np.abs(orders[0] - np.trunc(orders[0])) - 0.5) < 1e-4
ties = [np.abs(y - np.trunc(y)) == 0.5 for y in orders]
print(f"{everything.size:,d} weights; within 1/10,000 of a tie: {int(near.sum()):,d}")
print("exact ties by order:", [int(t.sum()) for t in ties],
      "· ties in all three:", int(np.logical_and.reduce(ties).sum()))
row = np.array([[3, 1.5], [9, 4.5], [15, 7.5]], np.float32)
for y in rounding_rules.scaled_in_each_order(row):
    print("127 · (m/2) / m for m = 3, 9, 15:", *(f"{v:.8g}" for v in y[:, 1]))

# %% [markdown]
r"""
A few hundred in 1.28 million are ties whatever the order. They are enough, if the others are not allowed to mislead. The safe way:

> A rule is **possible** as long as every code is what it makes of $y$ in *at least one* of the three orders.

A true rule can never be thrown out by this: its own order explains every code. A wrong one is thrown out by the first tie on which all orders agree.
What is left is what the samples can tell, and if nothing is left, the box holds something else.
"""

# %% [markdown] course={"id": "d04.a3", "kind": "A", "role": "card"}
r"""
### Exercise 4-3 A · name the rule

15 minutes · difficulty 3/3 · 6 points · about 16 lines

Write `possible_rules(x, codes)`. `x` is float32 `[rows, d]`, `codes` integers of the same shape: each row was quantized with $m = \max|x|$ of the row (1 where that is
below $10^{-6}$) to $y = 127x/m$ and rounded. Return the list of rules, in the order of the table (`half_up`, `half_even`, `half_away`, `trunc`, `toward_zero`), that are possible
in the sense above, with the three orders of operations in float32: $x \cdot (127/m)$, $x / (m/127)$, $x \cdot (1/(m/127))$. The sum
$y + ½$ is float32, too. Two codes of one row may need different orders.

The hidden checks hold quantizers of all five rules and all orders, over many random samples, the library's own kernels, and boxes that use none of the five.

<details><summary>Hint 1: the skeleton</summary>

Three arrays `ys`; five functions. For a rule: `np.any([rule(y) == codes for y in ys], axis=0).all()`.

</details>

<details><summary>Hint 2: the rules</summary>

`np.floor`, `np.rint` (halves to even), `np.trunc`. `half_away` as in 4-1. Add `np.float32(0.5)`, not a float64 array.

</details>

<details><summary>Hint 3: the order of operations</summary>

Every step must stay float32, or the three orders are no longer those of a converter: `np.float32(127) / m` with m float32 is.

</details>
"""

# %% course={"id": "d04.a3", "kind": "A", "role": "answer", "points": 6, "minutes": 15, "difficulty": 3}
# EXERCISE d04.a3
def possible_rules(x, codes):
    """Return the names of the rounding rules that can have made codes of the rows of x.

    x: float32 [rows, d]; codes: integers [rows, d]. A rule is possible if each code is what it
    makes of 127 * x / max|x| in at least one of three orders of operations.
    >>> possible_rules(np.array([[127, -1.2]], np.float32), np.array([[127, 0]]))
    ['trunc']
    """
    raise NotImplementedError("d04.a3")


# %% course={"id": "d04.a3", "kind": "A", "role": "check"}
check("d04.a3", possible_rules)

# %% [markdown]
r"""
Four boxes from the library, fed with the model's own weights, 32 at a time: the packer of Q8_0; the kernel that quantizes *activations*, which are the other
factor of a product with weights (day 5); the one that quantizes rows of a cache (day 9); and that one again with an older rule. Your classifier (ours,
until yours passes) sees only weights and codes. How many blocks does it need? *Predict*: 10, 1,000 or 30,000?
"""

# %%
classify = solved_or(possible_rules, rounding_rules.possible_rules)
boxes = {
    "weights, Q8_0": weight_blocks.split_blocks(
        weight_blocks.quantize_q8_0(everything), "q8_0")[1].view(np.int8)[:, 0],
    "activations": weight_blocks.quantize_activations(everything)[0],
    "rows": quant.quantize_rows(everything)[0],
    "an older row quantizer": quant.quantize_rows(everything, "trunc")[0],
}
for box, codes in boxes.items():
    print(box)
    for n in (10, 1000, len(everything)):
        print(f"  {n:6d} blocks: {', '.join(classify(everything[:n], codes[:n]))}")

# %% [markdown]
r"""
Ten blocks leave three rules, a thousand leave one. Weights decide it by chance ties; nobody had to construct them. (Could you choose the input, one row would do:
127 beside 0.5, 1.5, −0.5.)

Three kernels, three rules, in one engine. No harm is done: they are three *unbiased* rules, and each format states its own. Harm is done where two programs should
agree bit for bit, and one of them rounds ties the other way. Then the classifier is the fastest witness.

### Read together: a rounding without a rounding instruction

How does C round half to even, fast, on every machine? `+ 12582912 − 12582912`. Predict what this prints for 2.5:
"""

# %%
print(c_function("quantize.c", "round_half_even"))
big = np.float32(12582912)
print("1.5 · 2^23 =", int(1.5 * 2**23), "· the next float32 after it:", int(np.nextafter(big, 2 * big)))
for v in np.array([0.5, 1.5, 2.5, -0.5, -1.2], np.float32):
    print(f"{v:5.1f} → {(v + big) - big:4.0f}")

# %% [markdown]
r"""
At $1.5 \cdot 2^{23}$ neighbouring float32 are exactly 1 apart, so the *addition* must round to a whole number, and float additions round ties to even (the standard IEEE 754 says so). The subtraction is
exact. A compiler that is allowed to "simplify" $(y + c) - c$ to $y$ breaks it; that is one reason why this course never builds its kernels with fast-math.
"""

# %% [markdown] course={"id": "d04.b3", "kind": "B", "role": "card"}
r"""
### Exercise 4-3 B · which rule each kernel uses

10 minutes · difficulty 2/3 · 4 points

Open [linear_blocks.c](../kernels_pyx/c/linear_blocks.c), [pack.c](../kernels_pyx/c/pack.c), [quantize.c](../kernels_pyx/c/quantize.c) and
[quant.py](../course_lib/quant.py).

Cite, as `"path:first-last"`: `activations`, the lines of linear_blocks.c that round the activations; `weights_q8`, the line of pack.c that rounds a Q8_0 code;
`weights_q4`, the line of pack.c that rounds a Q4_0 code; `biased`, the line of quantize.c that defines the biased rule.

Name the rule, as in the table: `rule_activations`; `rule_weights_q8`; `rule_rows`, the default of `quantize_rows` in quant.py; and `rule_weights_q4`, the one that trunc(y + 8.5) amounts to.

In two or three sentences: `weights_q4` and `biased` both convert to an integer by cutting off. Why is one harmless? A colleague moves the 8 of Q4_0 behind the
conversion, `(int32_t)(x[i] * inverse + 0.5f) + 8`. Which weights change, and which cell of today would tell?
"""

# %% [markdown] course={"id": "d04.b3", "kind": "B", "role": "answer", "points": 4, "minutes": 10, "difficulty": 2}
r"""
<!-- ANSWER d04.b3 -->
Answer: …

Evidence: path:first-last
"""

# %% course={"id": "d04.b3", "kind": "B", "role": "evidence"}
# EVIDENCE d04.b3
d04_b3 = {
    "activations": "",  # "path:first-last"
    "weights_q8": "",
    "weights_q4": "",
    "biased": "",
    "rule_activations": "",  # a word
    "rule_weights_q8": "",
    "rule_rows": "",
    "rule_weights_q4": "",
}

# %% course={"id": "d04.b3", "kind": "B", "role": "check"}
check("d04.b3", d04_b3)

# %% [markdown]
r"""
## Summary

1. A Q8_0 block is a float16 scale and 32 bytes of codes; its error is half a step from the code and up to 0.062 of a step from the scale.
2. Q4_0 gives its code 0 to the signed extreme, so its scale may be negative, and byte $j$ holds elements $j$ and $j + 16$.
3. Rules that round to nearest differ on ties only, and errors of random sign cancel; `trunc` leans by half a step, and a model in 4 bits does not survive it.

The formula: $\text{code} = \text{round}\big(x \cdot \tfrac1d\big)$, $d = \tfrac{m}{127}$ or $\tfrac{\text{extreme}}{-8}$ · The number: **4 → 0** right answers of 4, by a careless + 0.5.

**Read next**: [day 5, dot products](day05_dot_products.ipynb): what a processor does with two rows of codes, and how to find
the one bit that differs. The formats are in [weight_blocks.py](../course_lib/weight_blocks.py), the classifier in
[rounding_rules.py](../course_lib/lab/rounding_rules.py).
"""
