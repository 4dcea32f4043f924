# %% [markdown]
r"""
# Day 6/30 · 层内零件 Parts of a layer

**You need** Python, NumPy, vectors and rotations. Day 5 helps; what it gave you is recapped.

**You will be able to** say why the same sum has several right answers and compute the one that the kernels
compute, bit for bit · put QK-norm and RoPE in their places and prove which part of a layer cares about their
order · write RoPE (旋转位置编码), pair the right numbers, and tell how exact a position of 100,000 still is.

**Time** 90 minutes: about 30 to read and run, 60 for the six exercises. The plan of this day is the course's own.

Numbers carry a label: **this machine** (measured in the cell you run) · **derived** (arithmetic). A
printed number without a label is a toy, a count or a check from the cell above it. Words that you miss are
in the [glossary](../docs/glossary.md).
"""

# %% tags=["nbval-ignore-output"]
import inspect
import math

import numpy as np
from numpy import float32 as f32

import kernels_pyx
from course_lib import backend
from course_lib.classroom import check, solved_or
from course_lib.engine import Engine, layers
from course_lib.engine.rope import RopeScaling
from course_lib.fused import fused_multiply_add
from course_lib.lab import reduction
from course_lib.lab.needle import NeedleOptions, prompt_of
from course_lib.lab.stages import norm_then_turn, run_stages
from course_lib.paths import MODELS
from course_lib.show.c_source import c_function
from course_lib.show.reduction_picture import reduction_tree
from course_lib.show.rope_picture import rope_hands
from course_lib.show.text import fmt, percent

print("backend:", backend.info().name, backend.info().variant, "·", backend.info().reason)

# %% [markdown]
r"""
## Three sums of the same six numbers

A float32 keeps 24 bits of a number. From $2^{24} = 16{,}777{,}216$ on that is not enough for every whole number:
floats are 2 apart there, and 16,777,217 does not exist. What does not fit is rounded away.

Six numbers, whose exact sum is 4. **Predict** what you get when you add them from left to right:
"""

# %%
six = np.array([2**24, 1, 1, 1, 1, -(2**24)], f32)
left = f32(0)
for v in six:
    left = left + v
pairs = (six[0] + six[1]) + (six[2] + six[3]) + (six[4] + six[5])
large_first = (six[0] + six[5]) + ((six[1] + six[2]) + (six[3] + six[4]))
print("left to right:      ", left)
print("neighbours in pairs:", pairs)
print("the two large first:", large_first)

# %% [markdown]
r"""
0, 3 and 4, and no operation was wrong. $a + (b + c)$ and $(a + b) + c$ are different float computations.
**The order of additions is part of the result.**

Six nasty numbers, you may say. Here is a row of the shipped model, its embedding (词嵌入)
of the name " Joan": the 160 numbers that this token starts with. A layer starts by adding up their squares:
"""

# %%
engine = Engine.load(MODELS / "needle-qwen3")
weights, config = engine.model.weights, engine.config
word = engine.encode(" Joan")[0]
row = weights.embedding[word]
squares = [float(v) ** 2 for v in row]
print("exact, rounded once:", f32(math.fsum(squares)))
print("left to right:      ", reduction.sum_of_squares(row, reduction.chain(160)))
print("sixteen at a time:  ", reduction.sum_of_squares(row, reduction.kernel_tree(160)))

# %% [markdown]
r"""
The same 160 numbers, and the seventh digit is a matter of order. One of the two hit the exact sum; that
is no accident, as you will see. Day 5 needed two programs that agree in *every bit*. So today you learn
the order that this engine fixes, and then the parts of a layer that come before attention.

### Recap: a layer in five lines

A row $x$ of 160 numbers per token goes through three layers. In each,

1. a **norm** (归一化) puts it on a common scale;
2. a matrix makes queries, keys and values of it, each in **heads** (注意力头) of 64 numbers: 4 heads of
   queries, 2 of keys, 2 of values (two query heads share a key head);
3. queries and keys are normed again and **turned** by an angle that depends on the token's position;
4. attention (day 7) lets tokens look at each other: a token's query is multiplied with all keys, and the
   larger the dot product, the **score** (分数), the more it sees of that token;
5. a small network follows.

Today: norm, norm, turn.
"""

# %%
prompt = prompt_of(engine, NeedleOptions(tokens=128), 1)
begun = engine.encode(prompt.fact.sentence, allow_special=False)[:-2]
ids = list(prompt.ids) + list(begun)
base = run_stages(engine.model, ids)
stages = dict(base)
print("stages of layer 0:", *(name[8:] for name, _ in base if name.startswith("layer 0")), sep=" · ")
print("q", stages["layer 0 q"].shape, "k", stages["layer 0 k"].shape, "(tokens, heads, numbers)")
print("next token:", repr(engine.decode([int(base[-1][1].argmax())])), "· prompt ends",
      repr(engine.decode(ids)[-21:]))

# %% [markdown]
r"""
## 6-1 RMSNorm 与归约树 · RMSNorm and reduction trees

Every layer *adds* its result to $x$, so $x$ grows on its way, and not all tokens alike:
"""

# %%
def rms(rows):
    return np.sqrt(np.mean(np.square(rows), axis=-1))


print("root mean square of x, smallest to largest token   (this machine)")
for name in ("embedding", "layer 0 sum", "layer 1 sum", "layer 2 sum"):
    size = rms(stages[name])
    print(f"{name:12s} {size.min():6.2g} … {size.max():6.2g}")

# %% [markdown]
r"""
From a tenth to nearly a hundred. A matrix that is tuned to one size would do something else with the other. So
before each matrix a layer divides by the size, the **root mean square** (RMS, 均方根), and multiplies by a
learned **gain** (增益) per column:

$$ y_i = \frac{x_i}{\sqrt{\tfrac1d \sum_j x_j^2 + \varepsilon}}\; g_i $$

$\varepsilon = 10^{-6}$ only saves a row of zeros from a division by zero. By hand, with $d = 2$ and gain 1:
the row [3, 4] has the mean square $(9 + 16)/2 = 12.5$.
"""

# %%
one = np.ones(2, f32)
for toy in ([3, 4], [30, 40], [-3, 4], [0, 0]):
    out = layers.rms_norm(np.array([toy], f32), one, 1e-6)[0]
    print(f"{toy!s:9} → {[fmt(v) for v in out]}")

# %% [markdown]
r"""
Ten times the row, the same result: the size is gone, the direction is left. That is all RMSNorm does. (It does not
subtract the mean, as its ancestor LayerNorm does.)

The only place where an order matters is the sum. What orders are there?

* **One chain** (链): add each square to what is there. 160 steps, and each must wait for the one before.
* **Lanes** (通道): a processor's vector instruction computes with, say, 16 floats at once (day 5), so keep 16 sums. Lane $j$ takes the numbers
  $j, j+16, j+32, \dots$ Ten steps instead of 160. At the end the 16 sums must become one: by **halves** (lane
  $i$ plus lane $i + 8$, then 4, 2, 1) or by **neighbours** (0 + 1, 2 + 3, …).
* **A tree** (归约树) down to the single numbers: every number its own lane.

Each step of a lane is a **fused multiply-add** (融合乘加, fma): $x \cdot x + s$ computed exactly and rounded once.

**Predict**: which is closest to the exact sum, which is farthest, and how far? (In **ulp**: the distance of a
float to the next one.)
"""

# %%
reduction_tree(160)

# %%
rows = weights.embedding  # 1,657 rows, stored as float16: their squares are exact in float64
exact = np.array([math.fsum(float(v) ** 2 for v in r) for r in rows])
ulp = np.spacing(exact.astype(f32)).astype(np.float64)
padded = np.zeros((len(rows), 256), f32)  # zeros change no sum; 256 is a power of two
padded[:, :160] = rows
sums = {name: reduction.sum_of_squares(padded, order(256)) for name, order in
        reduction.ORDERS.items()}
print("1,657 rows of 160 squares   (this machine)")
for name, found in sums.items():
    error = np.abs(found - exact) / ulp
    print(f"{name:22s} mean error {error.mean():.2f} ulp, largest {error.max():.1f}, "
          f"the nearest float in {percent((error <= 0.5).mean())}")
for name in list(sums)[::2] + list(sums)[3:]:
    print(f"not the bits of '16 lanes, halves': {name:21s} "
          f"{percent((sums[name] != sums['16 lanes, halves']).mean())} of the rows")

# %% [markdown]
r"""
The chain is four times worse. It must be: near its end, each square is added to a sum that is already large, and
every addition rounds at the size of the *sum*. In lanes each sum is some sixteen times smaller, until the last four additions.
**The fast order is also the more exact one.**

And among the good ones no order is "right". Halves or neighbours: a third of the rows differ, equally far from the truth.
A program may choose; but then it must always choose the same. How much does it matter as rows grow?
"""

# %%
rng = np.random.default_rng(6)
print("mean error in ulp, 32 rows each   (this machine)")
print(f"{'numbers':>8}" + "".join(f"{name:>23}" for name in reduction.ORDERS))
for d in (64, 256, 1024, 4096):
    values = (rng.integers(2**20, 2**21, (32, d)) * 2.0**-20).astype(f32)  # 1 … 2
    true = np.array([math.fsum(float(v) ** 2 for v in r) for r in values])
    spacing = np.spacing(true.astype(f32))
    off = [np.abs(reduction.sum_of_squares(values, order(d)) - true).mean() / spacing.mean()
           for order in reduction.ORDERS.values()]
    print(f"{d:8d}" + "".join(f"{v:23.1f}" for v in off))

# %% [markdown]
r"""
From line to line the row is four times as long and the chain's error doubles; the lanes keep theirs.

### Read together: the kernel's order

Here it is in C. `v16` is a bundle of 16 floats, whatever the machine's registers hold
({see kernels_pyx/c/v16.h "v16: sixteen floats that" "else is fused"}); `v16_fma(a, a, sum)` is one
step of all 16 lanes.
"""

# %%
print(c_function("layers.c", "mean_square"))
print()
print(c_function("v16_portable.h", "v16_sum"))

# %% [markdown]
r"""
How much is "rounded once" worth? $x = 1 + 2^{-12}$ has the square $1 + 2^{-11} + 2^{-24}$, one bit too long for a
float32. Subtract $1 + 2^{-11}$:
"""

# %%
x, minus = f32(1 + 2**-12), f32(-(1 + 2**-11))
print("two roundings:", x * x + minus)
print("one rounding: ", float(fused_multiply_add(x, x, minus)), "= 2^-24:",
      float(fused_multiply_add(x, x, minus)) == 2.0**-24)

# %% [markdown]
r"""
All or nothing. So "fused" is a part of the definition too, like the order.

The loop of `mean_square` goes through the row 16 numbers at a time; a last piece that is shorter is padded with zeros, which change no
sum. Then `v16_sum`, by halves. Every variant (AVX2, AVX-512, NEON) does the same with its own instructions. One of
them is tempted: ARM has a single instruction that adds up a register. Look for it in exercise B.
"""

# %% [markdown] course={"id": "d06.a1", "kind": "A", "role": "card"}
r"""
### Exercise 6-1 A · RMSNorm by a given tree

15 minutes · difficulty 3/3 · 6 points · about 10 lines

The order comes as data. A **tree** is one of two things:

* a *list* of indexes, a lane: start at 0; for each index `i` in order, `s = fma(x[i], x[i], s)`;
* a *pair* `(left, right)` of trees: the sum of the two sums, one float32 addition.

`([0, 2], [1, 3])` is two lanes; `[0, 1, 2, 3]` one chain; `(([0], [1]), ([2], [3]))` a full tree.

Compute the sum by the tree, then, each operation rounded to float32 in this order: sum / d, + eps, square root,
`x / root`, times `gain`. The result must have the kernels' bits. `fused_multiply_add(a, b, c)` is imported
above.

<details><summary>Hint 1: a tree inside a tree</summary>

A function that calls itself. `isinstance(tree, tuple)` tells a pair from a lane.

</details>

<details><summary>Hint 2: "expected dtype float32, got float64"</summary>

`d` and `eps` are Python numbers. `np.float32(len(x))`, `np.float32(eps)`. Start a lane at `np.float32(0)`.

</details>
"""

# %% course={"id": "d06.a1", "kind": "A", "role": "answer", "points": 6, "minutes": 15, "difficulty": 3}
# EXERCISE d06.a1
def rms_norm(x, gain, eps, tree):
    """RMSNorm of one row, its squares added in the order of a tree.

    x, gain: float32 [d]; eps: a number; tree: a list of indexes (a lane) or a pair of trees.
    Returns float32 [d].
    >>> rms_norm(np.float32([3, 4]), np.float32([1, 2]), 0.0, ([0], [1]))
    array([0.84852815, 2.2627418 ], dtype=float32)
    """
    raise NotImplementedError("d06.a1")


# %% course={"id": "d06.a1", "kind": "A", "role": "check"}
check("d06.a1", rms_norm)

# %% [markdown]
r"""
With the kernels' tree your function must give the kernels' bits: 100 embedding rows, against every variant that this
machine can run.
"""

# %% tags=["nbval-ignore-output"]
norm = solved_or(rms_norm, reduction.rms_norm_by_tree)
gain, some = weights.layers[0].input_norm, weights.embedding[:100]
mine = np.array([norm(r, gain, config.rms_norm_eps, reduction.kernel_tree(160)) for r in some])
equal = {}
for variant in kernels_pyx.VARIANTS:
    with backend.using(variant):
        theirs = layers.rms_norm(some, gain, config.rms_norm_eps)
    equal[variant] = bool((mine.view(np.int32) == theirs.view(np.int32)).all())
print("this machine:", equal or "no kernels are compiled here, so there is nothing to compare with")

# %%
print("a variant with other bits:", [name for name, same in equal.items() if not same])
by_chain = np.array([norm(r, gain, config.rms_norm_eps, reduction.chain(160)) for r in some])
print("rows whose output changes if you use a chain:", int((by_chain != mine).any(axis=1).sum()),
      "of 100")

# %% [markdown] course={"id": "d06.b1", "kind": "B", "role": "card"}
r"""
### Exercise 6-1 B · the order in the kernel

8 minutes · difficulty 2/3 · 4 points

Open [layers.c](../kernels_pyx/c/layers.c), [v16_portable.h](../kernels_pyx/c/v16_portable.h) and
[v16_neon.h](../kernels_pyx/c/v16_neon.h).

* `lane_loop`: the main loop of `mean_square`, one step of all lanes; cite it from its `for` on.
* `halves`: the line in the portable `v16_sum` that adds a lane to the lane half a width away.
* `refused`: the line in the NEON file that says which instruction is *not* used, and why.
* `divides`: the line that divides 16 numbers by the root and multiplies them by the gain. (It does not
  multiply by 1/root, which would be faster.)
* `additions_at_the_end`: how many additions turn 16 lanes into one sum.

Then explain: why does a processor with registers of 4 floats get the same bits as one with 16? And what
would the bits be if the compiler were allowed to split a multiply-add into two roundings?
"""

# %% [markdown] course={"id": "d06.b1", "kind": "B", "role": "answer", "points": 4, "minutes": 8, "difficulty": 2}
r"""
<!-- ANSWER d06.b1 -->
Answer: …

Evidence: path:first-last
"""

# %% course={"id": "d06.b1", "kind": "B", "role": "evidence"}
# EVIDENCE d06.b1
d06_b1 = {
    "lane_loop": "",  # "path:first-last"
    "halves": "",
    "refused": "",
    "divides": "",
    "additions_at_the_end": None,  # a number
}

# %% course={"id": "d06.b1", "kind": "B", "role": "check"}
check("d06.b1", d06_b1)

# %% [markdown]
r"""
## 6-2 先 QK-norm 后 RoPE · QK-norm before RoPE

Attention compares queries with keys by a dot product, the score $q \cdot k / \sqrt{d}$ with $d = 64$. If some query
grows to a hundred times its size, its scores do, and softmax (day 7) then puts all weight on one token. Qwen3 prevents it:
**every query and key row gets an RMSNorm of its own**, over the 64 numbers of its head, before anything else. With
gain 1 its length becomes $\sqrt{64} = 8$, so by Cauchy and Schwarz no score can exceed $8 \cdot 8 / 8 = 8$. With
the learned gains the limit is a number you can compute:
"""

# %%
print("layer   largest |score| without the norm, with it, and the limit   (this machine)")
for n, w in enumerate(weights.layers):
    heads = stages[f"layer {n} qkv"].reshape(len(ids), -1, 64)
    raw_q, raw_k = heads[:, :4], heads[:, 4:6]
    q, k = stages[f"layer {n} q"], stages[f"layer {n} k"]
    kv = [0, 0, 1, 1]  # two query heads share a key head
    raw, normed = (max(np.abs(a[:, h] @ b[:, kv[h]].T).max() / 8 for h in range(4))
                   for a, b in ((raw_q, raw_k), (q, k)))
    limit = 8 * np.abs(w.q_norm).max() * np.abs(w.k_norm).max()
    print(f"{n:5d}   {raw:8.3g} {normed:8.3g} {limit:8.3g}   below the limit: {bool(normed <= limit)}")

# %% [markdown]
r"""
After the norm comes **RoPE**: it turns pairs of numbers by an angle that depends on the token's position. 6-3 shows how.
For now you need one fact about turning a pair $(a, b)$: **its length stays**. $a^2 + b^2$ before, $a^2 + b^2$ after.

So here is a question. First norm, then turn; or first turn, then norm? The RMS is made of squares; turning does not
change it. Take the pair (3, 4) and a turn by 90°, $(a, b) \to (-b, a)$. **Predict** for gain (1, 1), then for
gain (2, ½): same result in both orders, or not?
"""

# %%
def quarter_turn(pair):
    return np.array([-pair[1], pair[0]])


def normed(pair, gain):
    return pair / np.sqrt(np.mean(np.square(pair))) * gain


pair = np.array([3.0, 4.0])
for gain in ([1, 1], [2, 0.5], [1.25, 1.25]):
    one, two = quarter_turn(normed(pair, gain)), normed(quarter_turn(pair), gain)
    print(f"gain {gain!s:12}  norm, turn: {[fmt(v) for v in one]}   turn, norm: "
          f"{[fmt(v) for v in two]}")

# %% [markdown]
r"""
Dividing by the size does not care about the order. **The gain does**: it stretches the first number of a pair otherwise than
the second, and after a turn the numbers are not the same ones. Only where both halves of a pair have the *same* gain may
you swap.

Now the real model. Between its matrix and attention stands {see course_lib/lab/stages.py norm_then_turn}, and today's
cells replace just that. In a head, number $j$ and number $j + 32$ form a pair (6-3), and their gains differ by a
factor of up to 2.9. Swap norm and turn in all layers, change
nothing else. **Predict**: will the answer change? And what happens if you first replace the two gains of every pair by
their mean, and swap *then*?
"""

# %%
def swapped(rows, gain, eps, cos, sin):
    return layers.rms_norm(layers.rope(rows, cos, sin), gain, eps)


def even_gain(gain):
    mean = (gain[:32] + gain[32:]) / 2  # partners: j and j + 32
    return np.concatenate((mean, mean))


def evened(turn):
    return lambda rows, gain, eps, cos, sin: turn(rows, even_gain(gain), eps, cos, sin)


moved, said = {}, []
for index in range(4):
    p = prompt_of(engine, NeedleOptions(tokens=128), index)
    start = list(p.ids) + list(engine.encode(p.fact.sentence, allow_special=False))[:-2]
    logits = [run_stages(engine.model, start, turn=turn)[-1][1] for turn in
              (norm_then_turn, swapped, evened(norm_then_turn), evened(swapped))]
    moved[index] = np.abs(logits[1] - logits[0]).max(), np.abs(logits[3] - logits[2]).max()
    said.append([engine.decode([int(row.argmax())]) for row in logits[:2]])
ratios = [np.abs(np.log(np.abs(gain[:32] / gain[32:]))).max() for w in weights.layers
          for gain in (w.q_norm, w.k_norm)]
print("largest ratio of two gains in a pair:", fmt(np.exp(max(ratios))))
print("in order, swapped:", said)

# %% tags=["nbval-ignore-output"]
for index, (real, even) in moved.items():
    print(f"prompt {index}: swapping moves the logits by {real:.2g} with the real gains, "
          f"by {even:.0e} with equal gains in each pair   (this machine)")

# %%
print("real gains, a logit moves by more than 0.1:", all(real > 0.1 for real, _ in moved.values()))
print("equal gains, none by more than 0.0001:", all(even < 1e-4 for _, even in moved.values()))

# %% [markdown]
r"""
The model still gives every answer. **An engine with the two lines in the wrong order passes the test that asks
questions.** Day 5's rule again: compare numbers, stage by stage. And the second line is a clean experiment: one
variable, the gain inside the pair, turns the effect off completely. (What is left, around $10^{-6}$, is rounding.)
"""

# %% [markdown] course={"id": "d06.a2", "kind": "A", "role": "card"}
r"""
### Exercise 6-2 A · QK-norm

8 minutes · difficulty 1/3 · 4 points · about 6 lines

Write `qk_norm`: RMSNorm of every query and key row on its own. `q` is float32 `[tokens, heads, d]`, `k`
`[tokens, kv_heads, d]`, the gains float32 `[d]`. Return the pair of normed arrays, float32, and leave the arguments
as they are.

A check allows a few last digits: use NumPy's mean, no tree today.

<details><summary>Hint: one mean per head</summary>

`np.mean(np.square(q), axis=-1, keepdims=True)` has one number per token *and* head.

</details>
"""

# %% course={"id": "d06.a2", "kind": "A", "role": "answer", "points": 4, "minutes": 8, "difficulty": 1}
# EXERCISE d06.a2
def qk_norm(q, k, q_gain, k_gain, eps):
    """Norm every row of q by q_gain and every row of k by k_gain.

    q: float32 [tokens, heads, d]; k: float32 [tokens, kv_heads, d]; gains float32 [d].
    Returns (q, k), normed, float32.
    >>> one = np.ones(2, np.float32)
    >>> a, b = qk_norm(np.float32([[[3, 4]]]), np.float32([[[0, 2]]]), one, 2 * one, 0.0)
    >>> b.round(4).tolist()
    [[[0.0, 2.8284]]]
    """
    raise NotImplementedError("d06.a2")


# %% course={"id": "d06.a2", "kind": "A", "role": "check"}
check("d06.a2", qk_norm)

# %%
def by_library(q, k, q_gain, k_gain, eps):
    return layers.rms_norm(q, q_gain, eps), layers.rms_norm(k, k_gain, eps)


heads = stages["layer 0 qkv"].reshape(len(ids), -1, 64)
q, k = solved_or(qk_norm, by_library)(heads[:, :4], heads[:, 4:6], weights.layers[0].q_norm,
                                      weights.layers[0].k_norm, config.rms_norm_eps)
tables = layers.rope_tables(np.arange(len(ids)), 64, config.rope_theta)
print("normed, then turned, they are the model's own q and k to 5 digits:",
      bool(np.allclose(layers.rope(q, *tables), stages["layer 0 q"], rtol=1e-5, atol=1e-5)),
      bool(np.allclose(layers.rope(k, *tables), stages["layer 0 k"], rtol=1e-5, atol=1e-5)))

# %% [markdown] course={"id": "d06.b2", "kind": "B", "role": "card"}
r"""
### Exercise 6-2 B · both call sites

8 minutes · difficulty 2/3 · 4 points

The order norm, turn stands in the engine twice: in NumPy, which defines it, and in C. Find both, in
[engine/layers.py](../course_lib/engine/layers.py) and [split_heads.c](../kernels_pyx/c/split_heads.c).

* `numpy_norm`, `numpy_turn`: the two lines of `split_heads`.
* `c_norm`, `c_turn`: the statement of `split_row` that writes the normed row, and the one that turns it.
* `norms_per_token`: how many rows of 64 the shipped model norms for one token, in all layers.

Explain what happens in `split_row` for a model without QK-norm, and why the C code can norm and turn in place
without a copy of the row.
"""

# %% [markdown] course={"id": "d06.b2", "kind": "B", "role": "answer", "points": 4, "minutes": 8, "difficulty": 2}
r"""
<!-- ANSWER d06.b2 -->
Answer: …

Evidence: path:first-last
"""

# %% course={"id": "d06.b2", "kind": "B", "role": "evidence"}
# EVIDENCE d06.b2
d06_b2 = {
    "numpy_norm": "",  # "path:first-last"
    "numpy_turn": "",
    "c_norm": "",
    "c_turn": "",
    "norms_per_token": None,  # a number
}

# %% course={"id": "d06.b2", "kind": "B", "role": "check"}
check("d06.b2", d06_b2)

# %% [markdown]
r"""
## 6-3 RoPE 配对 · RoPE pairing (and MRoPE)

Nothing so far tells a token *where* it stands. RoPE does it by turning: a row of $d$ numbers is taken as $d/2$ pairs,
and at position $p$ pair $j$ is turned by the angle $p \cdot \theta^{-2j/d}$:

$$ \begin{pmatrix} a' \\ b' \end{pmatrix} =
\begin{pmatrix} \cos\varphi & -\sin\varphi \\ \sin\varphi & \cos\varphi \end{pmatrix}
\begin{pmatrix} a \\ b \end{pmatrix}, \qquad \varphi = p\,\theta^{-2j/d} $$

Why is that a good idea? Turn a query by its position and a key by its own. Their dot product then depends only
on the **difference** of the two angles, that is, on the distance of the tokens. Check it with one pair that turns
by 30° per position: a query at 5 and a key at 3, and then both a hundred places further on.
"""

# %%
def turn(pair, degrees):
    c, s = math.cos(math.radians(degrees)), math.sin(math.radians(degrees))
    return np.array([c * pair[0] - s * pair[1], s * pair[0] + c * pair[1]])


query, key = np.array([1.0, 0.0]), np.array([2.0, 0.0])
for at_q, at_k in ((5, 3), (105, 103), (2, 0), (3, 5), (5, 5)):
    score = turn(query, 30 * at_q) @ turn(key, 30 * at_k)
    print(f"query at {at_q:3d}, key at {at_k:3d}: q · k = {score:.3f}")

# %% [markdown]
r"""
Three times the distance 2, three times $2 \cos 60° = 1$. (For a single pair the sign of the distance does not show
here, because both vectors started in the same direction.)

The pairs turn at different speeds, like the hands of a clock. $\theta$ is 100,000 in our model. **Predict**: after how many
positions has the *slowest* of the 32 pairs made one full turn: hundreds, thousands, or hundreds of thousands?
"""

# %%
rope_hands(64, config.rope_theta, pairs=(0, 2, 6, 12, 31),
           positions=(0, 1, 2, 3, 4, 8, 16, 64, 256, 1024))

# %% [markdown]
r"""
The first pair tells neighbours apart and repeats after six positions. The last one hardly moves within the whole context of 4,096
tokens: it needs 438,460 for one turn. Together they are a clock with 32 hands.

### Which numbers form a pair?

The formula does not say. Two conventions are in use:

* **halves**: number $j$ with number $j + d/2$ (Qwen, Llama as Hugging Face stores it, this engine);
* **neighbours**: number $2j$ with number $2j + 1$ (the original paper, some file formats).

Both are rotations, both keep lengths, both see only distances. So does it matter? **Predict**: our model with
the other pairing. Same answers, nonsense, or something else?
"""

# %%
def rope_neighbours(x, cos, sin):
    out = np.empty_like(x)
    a, b, cos, sin = x[..., 0::2], x[..., 1::2], cos[:, None], sin[:, None]
    out[..., 0::2], out[..., 1::2] = a * cos - b * sin, b * cos + a * sin
    return out


def with_neighbours(rows, gain, eps, cos, sin):
    return rope_neighbours(layers.rms_norm(rows, gain, eps), cos, sin)


for index in range(4):
    p = prompt_of(engine, NeedleOptions(tokens=128), index)
    text = engine.encode(p.fact.sentence, allow_special=False)
    start = list(p.ids) + list(text)[:-2]
    other = run_stages(engine.model, start, turn=with_neighbours)[-1][1]
    print(f"{engine.decode(text)[:-1]!r:34} halves {said[index][0]!r:10} neighbours "
          f"{engine.decode([int(other.argmax())])!r}")

# %% [markdown]
r"""
Three of four are wrong, and look *how*: a food for a food, a digit for a digit, a sport for a sport. No error message, no nonsense, just
another answer. The weights were trained with one pairing; number 5 of a head learned to be the partner of number 37. Hand it another partner
and the clock shows a wrong time.

But the convention itself is arbitrary. Renumber the rows of the matrix that makes queries and keys (and the gains) so that partners become neighbours,
and the *neighbours* code is right. This is what converters between file formats do; where one forgets it, you get the cell above.
"""

# %%
order = np.arange(64).reshape(2, 32).T.reshape(-1)  # 0, 32, 1, 33, 2, 34, …
back = np.argsort(order)


def renumbered(rows, gain, eps, cos, sin):
    # The same as renumbering the weights' rows and the gain once, when the model is loaded.
    return rope_neighbours(layers.rms_norm(rows[..., order], gain[order], eps), cos, sin)


print("partners side by side:", order[:8].tolist(), "…")
for kind in "qk":
    name = f"layer 0 {kind}"
    same = dict(run_stages(engine.model, ids[:20], turn=renumbered))[name][..., back]
    print(f"{name}: neighbours on renumbered rows = halves, to 6 digits:",
          bool(np.allclose(same, stages[name][:20], rtol=1e-6, atol=1e-6)))

# %% [markdown] course={"id": "d06.a3", "kind": "A", "role": "card"}
r"""
### Exercise 6-3 A · RoPE

12 minutes · difficulty 2/3 · 5 points · about 8 lines

Write `rope(x, positions, theta)` for float32 `[n, heads, d]` and integer positions `[n]`, pairing by halves.
Result float32, same shape; `x` stays as it is. The positions need not start at 0 nor ascend.

As the models' training code does, compute frequencies and angles in **float32**; so positions become float32
first, even one that float32 has to round. Checks are made with a tolerance that covers the last bits of `cos`,
`sin` and powers.

<details><summary>Hint 1: the frequencies</summary>

$\theta^{-2j/d}$ for $j = 0 \dots d/2 - 1$: one over `np.float32(theta) ** exponents`.

</details>

<details><summary>Hint 2: shapes</summary>

Angles are `[n, d/2]`, the halves of x `[n, heads, d/2]`. `cos[:, None, :]` fits. Integers times float32 give
float64 in NumPy, so `positions.astype(np.float32)` first.

</details>
"""

# %% course={"id": "d06.a3", "kind": "A", "role": "answer", "points": 5, "minutes": 12, "difficulty": 2}
# EXERCISE d06.a3
def rope(x, positions, theta):
    """Turn each pair (x[j], x[j + d/2]) of every head by positions · theta^(-2j/d).

    x: float32 [n, heads, d], d even; positions: integers [n]; theta: a number above 1.
    Returns float32 [n, heads, d].
    >>> rope(np.float32([[[1, 0]]]), np.array([3]), 10000.0).round(3).tolist()
    [[[-0.99, 0.141]]]
    """
    raise NotImplementedError("d06.a3")


# %% course={"id": "d06.a3", "kind": "A", "role": "check"}
check("d06.a3", rope)

# %% [markdown]
r"""
Your RoPE in the real model, in all layers:
"""

# %%
def by_tables(x, positions, theta):
    return layers.rope(x, *layers.rope_tables(positions, x.shape[-1], theta))


mine = solved_or(rope, by_tables)
logits = run_stages(engine.model, ids, turn=lambda rows, gain, eps, cos, sin: mine(
    layers.rms_norm(rows, gain, eps), np.arange(len(rows)), config.rope_theta))[-1][1]
print("logits within 0.01 of the engine's:", bool(np.abs(logits - base[-1][1]).max() < 0.01))

# %% [markdown]
r"""
### MRoPE: three positions instead of one

A picture is not a line. For vision, Qwen's **MRoPE** (multimodal RoPE, day 17) gives a token *three* positions, time, height, width, and shares the
pairs out among them: Qwen3-VL's `mrope_section` 24, 20, 20 of 64 pairs. Which pair belongs to which axis differs between models of the family:
in blocks, or taking turns.

Our engine does not have MRoPE. It reads such checkpoints for text and *ignores* the sections
({see course_lib/engine/rope.py RopeScaling.from_parameters}). Is that allowed?
Text has $t = h = w$. **Predict**: equal bits, or nearly equal?
"""

# %%
def mrope_angles(positions, axis_of_pair, frequencies):
    """positions [3, n] and an axis for every pair -> angles [n, pairs]."""
    return positions[axis_of_pair].T.astype(f32) * frequencies


frequencies = f32(1) / layers.rope_powers(64, config.rope_theta)
at = np.arange(2000, 2100)
plain = at.astype(f32)[:, None] * frequencies
in_blocks = np.repeat([0, 1, 2], [12, 10, 10])  # 24 : 20 : 20 of our 32 pairs
in_turns = np.r_[np.tile([0, 1, 2], 10), 0, 0]
patch = np.stack((np.full(100, 2000), 2000 + np.arange(100) // 10, 2000 + np.arange(100) % 10))
for name, axes in (("in blocks", in_blocks), ("in turns", in_turns)):
    text, image = (mrope_angles(p, axes, frequencies) for p in (np.stack([at] * 3), patch))
    print(f"{name:9}  text: every bit equal to 1-D {bool((text == plain).all())!s:5}  "
          f"10 × 10 image: {bool((image == plain).all())}")
doc = inspect.getdoc(RopeScaling.from_parameters)
print(next(part for part in doc.split("\n\n") if "multimodal" in part).split(". Raises")[0])

# %% [markdown]
r"""
Equal bits, under either sharing: three equal positions make the same product, one float32 times another. So a text-only engine may
ignore the sections, and it is not an approximation. With an image it would be plainly wrong.

### What is left of an angle at 100,000

Distances are all that counts, says the theory. So move the whole prompt: give its first token position 1,000, or 100,000, instead of 0. Exactly the same
distances. In exact arithmetic **nothing** changes. (This uses positions far beyond the model's context, on purpose.)
"""

# %% tags=["nbval-ignore-output"]
shifted = {}
for shift in (0, 1000, 10_000, 100_000, 1_000_000):
    run = run_stages(engine.model, ids, positions=np.arange(len(ids)) + shift)
    shifted[shift] = float(np.abs(run[-1][1] - base[-1][1]).max())
    print(f"first token at {shift:9,d}: logits move by {shifted[shift]:.1e}   (this machine)")

# %%
print("no shift, no change:", shifted[0] == 0)
print("10,000 → 100,000 → 1,000,000 moves them more each time:",
      shifted[10_000] < shifted[100_000] < shifted[1_000_000])

# %% [markdown]
r"""
Ten times the position, about ten times the error. Where does it come from? Not from cos and sin: from the *product* before them. A float32 has 24 bits; an angle of
100,000 spends 17 of them on the whole turns, which cos throws away, and 7 are left for the fraction. The neighbours of 100,000 in float32
are 0.0078 apart, so the angle is off by up to half of that, and the frequency was rounded before:

$$ |\text{error}| \;\le\; \underbrace{p \cdot f \cdot 2^{-24}}_{f \text{ rounded}} +
\underbrace{p \cdot f \cdot 2^{-24}}_{\text{product rounded}} \;\approx\; p \cdot 2^{-23} \quad (f \le 1) $$
"""

# %%
exact_f = config.rope_theta ** (-np.arange(0, 64, 2) / 64)
print("largest error of an angle in radians, 32 pairs, 64 positions from p on   (this machine)")
print(f"{'p':>9} {'float32':>9} {'bound p/2^23':>13} {'float64':>9}   one float32 step at p")
for p in (100, 1000, 10_000, 100_000, 1_000_000):
    at = np.arange(p, p + 64)
    true = at[:, None] * exact_f
    single = at.astype(f32)[:, None] * exact_f.astype(f32)
    print(f"{p:9,d} {np.abs(single - true).max():9.1e} {(p + 63) / 2**23:13.1e} "
          f"{p * 2.0**-53:9.0e}   {np.spacing(f32(p)):.1e}")

# %% [markdown]
r"""
(The float64 column is derived, not measured: the same arithmetic with 53 bits.)

At 1,000 tokens the angle is off by less than $10^{-4}$ radians and nobody notices. At 100,000 it is 0.0065, a third of a degree; at a million three degrees. The fast
pairs suffer most, and they are the ones that tell neighbours apart. (All but the very first: its frequency is exactly 1, and whole numbers are exact.) So should an engine compute the angle in float64? It would be *more exact than what the weights were trained
with*: training code multiplies in float32 as well. Our engine keeps the float32 product on purpose, then takes a very exact cos and sin of it.
"""

# %%
print(inspect.getsource(layers.rope_tables).split('"""')[1])

# %% [markdown] course={"id": "d06.b3", "kind": "B", "role": "card"}
r"""
### Exercise 6-3 B · where the table is built

9 minutes · difficulty 2/3 · 4 points

Open [engine/model.py](../course_lib/engine/model.py), [engine/layers.py](../course_lib/engine/layers.py) and
[rope_tables.c](../kernels_pyx/c/rope_tables.c).

* `built_once`: the line in `Model.hidden` that builds the table, once for all layers.
* `numpy_angle`: the line in NumPy where a position becomes an angle.
* `c_angle`: the same in C.
* `step_at_100000`: the exact distance between neighbouring float32 numbers at 100,000.
* `exact_cos`: the line in C where the float angle is handed to a double precision cos and sin.

Explain why f32 position · frequency loses bits at 100K although cos and sin are exact, and why computing the angle in
double would be a *change* rather than a repair for a trained model.
"""

# %% [markdown] course={"id": "d06.b3", "kind": "B", "role": "answer", "points": 4, "minutes": 9, "difficulty": 2}
r"""
<!-- ANSWER d06.b3 -->
Answer: …

Evidence: path:first-last
"""

# %% course={"id": "d06.b3", "kind": "B", "role": "evidence"}
# EVIDENCE d06.b3
d06_b3 = {
    "built_once": "",  # "path:first-last"
    "numpy_angle": "",
    "c_angle": "",
    "step_at_100000": None,  # a number
    "exact_cos": "",
}

# %% course={"id": "d06.b3", "kind": "B", "role": "check"}
check("d06.b3", d06_b3)

# %% [markdown]
r"""
## Summary

1. A float sum has an order, and the order is part of the result: 16 lanes added by halves are fast, four times closer to the truth than a
   chain, and the same bits on every processor.
2. QK-norm bounds the scores, and it must come before RoPE because of its gain alone; with equal gains in a pair the order would not matter.
3. RoPE turns pairs $(j, j + d/2)$ so that scores see distances only; the pairing belongs to the weights, three equal positions are one, and float32 angles
   lose a digit with every factor of ten.

The formula: $\varphi = p\,\theta^{-2j/d}$ · The number: **0.0078**, one step of float32 at position 100,000.

**Next**: day 7 lets the queries meet the keys. If you want to see how far "the same bits" is carried in this engine, read
[docs/kernels.md](../docs/kernels.md), *The bits*.
"""
