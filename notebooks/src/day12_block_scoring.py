# %% [markdown]
r"""
# Day 12/30 · 稀疏 prefill Block scoring for prefill

**You need** Python, the dot product and softmax. Day 10 helps (blocks, and what choosing them means); the
recap repeats what you need.

**You will be able to** estimate where attention looks from one eighth of its scores · turn scores into a mask
(掩码) of blocks, exactly, ties included · say what such an estimate cannot see, and prove it · tell a rule
from the accidents of the code that is said to follow it.

**Time** 90 minutes: about 35 to read and run, 55 for the six exercises. This day is the course's own plan. It examines **XAttention** (Xu et al. 2025;
its public code is called *upstream* below) on the shipped model's own queries and keys.

Numbers carry a label: **quoted** (source shown) · **this machine** (measured in the cell) · **derived**
(arithmetic) · **recorded** (a stored run). A printed number without a label is a toy or was computed from the
model in the cell above it. Words that you miss are in the [glossary](../docs/glossary.md).
"""

# %% tags=["nbval-ignore-output"]
import inspect

import numpy as np

from course_lib import backend
from course_lib.attention import two_pass
from course_lib.classroom import check, solved_or
from course_lib.engine import Engine
from course_lib.lab.block_mass import layer_masses
from course_lib.lab.policy_masks import xattn_masks
from course_lib.paths import MODELS
from course_lib.prefill import (
    find_blocks_chunked,
    flat_group_gemm_fuse_reshape,
    softmax_fuse_block_sum,
    xattn_estimate,
)
from course_lib.prefill.find_blocks import REASONS, threshold_blocks
from course_lib.prefill.xattn import base_2_scale
from course_lib.quant import dequantize_rows, quantize_rows
from course_lib.show import PrefillMaskExplorer
from course_lib.show.prefill_mask import asking_prompts
from course_lib.show.text import fmt, percent

print("backend:", backend.info().name, "·", backend.info().reason)

# %% [markdown]
r"""
## One query, one block

Before it can answer, a model has to *read* the prompt. This is **prefill** (预填充): all tokens of the prompt go
through every layer together, and in every layer each token's **query** compares itself with the **keys** of all
tokens before it. For 2,048 tokens that is 2 million comparisons a head, in every layer. Most of them find nothing.
So: look only where something is. Who tells us where?

Here are 2,048 tokens of notes with one fact hidden in them. The prompt ends with the *beginning of the answer*, so
its very last query has to find the fact's value, now, during prefill.
"""

# %%
engine = Engine.load(MODELS / "needle-qwen3")
BLOCK = 64
prompts = asking_prompts(engine, 2048)
prompt = prompts[1]
needle = prompt.value_span[0] // BLOCK
print(f"{len(prompt.ids)} tokens = {len(prompt.ids) // BLOCK} blocks of {BLOCK}")
print("hidden in block", needle, ":", prompt.fact.sentence)
print("the prompt ends with:", repr(engine.decode(prompt.ids[-16:])))
record = layer_masses(engine, prompt)  # an exact prefill, its queries and keys written down
looking = record.last_query_mass(1, BLOCK)[:, needle]
for head, share in enumerate(looking):
    print(f"layer 1, query head {head}: the last query gives block {needle} {percent(share)} of its weight")

# %% [markdown]
r"""
Three of the four heads of layer 1 know exactly where to look. (A **query head** is one of several searches that run
side by side in a layer; two of them share one set of keys here, a **KV head**.) A block that receives 99 % of a
query's weight is surely a block to read. Cut the queries into blocks of 64, too; a **cell** is one block of queries that
looks at one block of keys. Ask XAttention to choose the cells that hold 90 % of the attention of every head:
"""

# %%
masks = xattn_masks(record.layers[1], block_size=BLOCK, threshold=0.9)
for head, made in enumerate(masks):
    print(f"head {head}: {percent(made.density)} of all cells kept; last row keeps block {needle}: "
          f"{bool(made.mask[-1, needle])}")

# %% [markdown]
r"""
Three quarters of everything are kept. The one block that matters is not, in any of the three heads that look for it.

Today you build that estimate yourself, piece by piece: scores (12-1), blocks and threshold (12-2), the rules that
nobody wrote down (12-3). On the way you will find out **why** block 6 was lost. There are two reasons, and each
section owns one.
"""

# %% [markdown]
r"""
### Recap: attention as a square

Six tokens, one head, $d = 1$. Row = query, column = key. A query sees itself and what stands before it (**causal**),
so the upper triangle is empty. Each row's weights are a softmax: they add up to 1. (Attention then mixes the tokens' **values**, a second set of vectors,
with these weights. Today is about the weights alone.)
"""

# %%
q = np.array([1, 1, 1, 2, 1, 2], np.float32).reshape(1, 6, 1)
k = np.array([1, 0, 3, 0, 0, 1], np.float32).reshape(1, 6, 1)
scores = np.where(np.tri(6), q[0] @ k[0].T, -np.inf)
weights = np.exp(scores - scores.max(axis=1, keepdims=True))
weights /= weights.sum(axis=1, keepdims=True)
for row in weights:
    print("  ".join(f"{w:4.2f}" if w else "  . " for w in row))
cells = weights.reshape(3, 2, 3, 2).sum(axis=(1, 3))  # blocks of two tokens
print("mass of 2×2 cells:", *([fmt(m) for m in row] for row in cells), sep="\n  ")

# %% [markdown]
r"""
Check the third row: scores 1, 0, 3, so $e^3/(e^1 + e^0 + e^3) = 20.1/23.8 = 0.84$. Key 2 wins every row that can see it.

Cut both sides into **blocks** of two tokens. A cell's **mass** is the sum of its weights; a row of cells adds up
to its number of queries, 2. In the last row of cells, block 1 (tokens 2, 3) holds most of it. A sparse prefill
would compute that cell and the last one, and skip the first.

But to know the masses we computed everything. An estimate must be much cheaper than that.
"""

# %% [markdown]
r"""
## 12-1 反对角线打分 · Antidiagonal scoring

Cut the square of scores into small squares of $S \times S$, $S$ for **stride** (步长). In each, compute only the
products on the **antidiagonal** (反对角线), from the lower left to the upper right:
"""

# %%
S = 4
for m in range(8):
    print(" ".join("■" if (m % S) + (n % S) == S - 1 else "·" for n in range(8)))

# %% [markdown]
r"""
Four squares, four products in each instead of 16. Look at one square: **every query row is used once and every key
column once**. A key that many queries look at (a *vertical* stripe in the square of scores) is met in every square
that it passes through.

A number per square, the sum of its products:

$$ \mathrm{score}[m, n] = \sum_{i=0}^{S-1} q_{mS + S-1-i} \cdot k_{nS + i} . $$

By eye, with $S = 2$, $d = 1$, queries $1, 2, 3, 4$ and keys $1, 0, 2, 5$: the upper left square is
$q_1 k_0 + q_0 k_1 = 2 \cdot 1 + 1 \cdot 0 = 2$. **Compute the other three before you run the cell.**
"""

# %%
q = np.array([1, 2, 3, 4], np.float32).reshape(1, 4, 1)
k = np.array([1, 0, 2, 5], np.float32).reshape(1, 4, 1)
print(flat_group_gemm_fuse_reshape(q, k, 2)[0].astype(int).tolist())

# %% [markdown]
r"""
$q_1 k_2 + q_0 k_3 = 4 + 5 = 9$; $q_3 k_0 + q_2 k_1 = 4$; $q_3 k_2 + q_2 k_3 = 8 + 15 = 23$.

Now the trick that makes it fast. Lay the $S$ queries of a square behind one another, **in reverse order**, as one
long vector of $S \cdot d$ numbers; lay the $S$ keys behind one another in order. Their dot product *is* the sum above.
So all squares together are one plain matrix product, of $L_q/S$ long queries and $L_k/S$ long keys:
"""

# %%
rng = np.random.default_rng(12)
q, k = (rng.integers(-3, 4, (1, 16, 8)).astype(np.float32) for _ in range(2))
naive = np.zeros((4, 4), np.float32)
for m in range(4):
    for n in range(4):
        for i in range(4):
            naive[m, n] += q[0, 4 * m + 3 - i] @ k[0, 4 * n + i]
long_q = q[0].reshape(4, 4, 8)[:, ::-1].reshape(4, 32)  # reverse inside each square, then flatten
long_k = k[0].reshape(4, 32)
print("loops = one matrix product:", np.array_equal(naive, long_q @ long_k.T))
print("     = the library:        ", np.array_equal(naive, flat_group_gemm_fuse_reshape(q, k, 4)[0]))
tokens, d = 2048, 64
for stride in (1, 8, 16):
    print(f"derived: {tokens} tokens, d = {d}, S = {stride:2d}: {tokens * tokens * d // stride:11,d} multiply-adds")

# %% [markdown]
r"""
One part in $S$ of the scores, and no multiplication with the values at all: with $S = 8$ a sixteenth of a full
attention of that square.

The library's version, the definition that the compiled kernel is tested against:
"""

# %%
from course_lib.prefill import scores as scores_module

print(inspect.getsource(scores_module._antidiagonal_scores))

# %% [markdown]
r"""
({see course_lib/prefill/scores.py flat_group_gemm_fuse_reshape}; the long name is upstream's own.) Two things
besides the idea: the query heads of one KV head stand in one long array, so that keys are not copied for each
of them; and `vecdot` sums every square alone, so the bits of one score do not depend on how many others are computed.
"""

# %% [markdown] course={"id": "d12.a1", "kind": "A", "role": "card"}
r"""
### Exercise 12-1 A · antidiagonal scores

10 minutes · difficulty 2/3 · 6 points · about 8 lines

`q` has shape `[H, Lq, d]`, `k` has `[Hkv, Lk, d]`; query head `h` reads KV head `h * Hkv // H`. Return the scores,
float32 `[H, M, N]`, where `M` and `N` are `Lq / stride` and `Lk / stride` **rounded up**: rows beyond the end count
as zeros. No scaling. Your arguments stay as they were.

<details><summary>Hint 1: padding</summary>

`np.pad(x, ((0, 0), (0, -n % stride), (0, 0)))` adds rows of zeros up to the next multiple of `stride`.

</details>

<details><summary>Hint 2: which axis is reversed</summary>

`q.reshape(H, M, stride, d)[:, :, ::-1]`: inside each square, not the whole sequence, and not the channels.

</details>
"""

# %% course={"id": "d12.a1", "kind": "A", "role": "answer", "points": 6, "minutes": 10, "difficulty": 2}
# EXERCISE d12.a1
def antidiagonal_scores(q, k, stride):
    """Return the sums of products on the antidiagonals of stride × stride squares.

    >>> antidiagonal_scores(np.ones((1, 4, 2), np.float32), np.ones((1, 4, 2), np.float32), 2)
    array([[[4., 4.],
            [4., 4.]]], dtype=float32)
    """
    raise NotImplementedError("d12.a1")


# %% course={"id": "d12.a1", "kind": "A", "role": "check"}
check("d12.a1", antidiagonal_scores)

# %% [markdown]
r"""
### What an antidiagonal cannot see

Two experiments with your function (with ours while yours does not pass). First: a **slash**. Let every query look
at exactly one key, the one that stands $t$ tokens before it. Score 1 there, 0 elsewhere; 64 tokens, $S = 8$. How
much of the slash do the antidiagonals meet, for $t = 0, 1, 2, \dots$? **Guess**: about one eighth each time?
"""

# %%
score = solved_or(antidiagonal_scores, flat_group_gemm_fuse_reshape)


def met(distance, tokens=64, stride=8):
    k = np.eye(tokens, dtype=np.float32)[None]
    q = np.zeros_like(k)
    q[0, np.arange(distance, tokens), np.arange(tokens - distance)] = 1
    return int(score(q, k, stride).sum())


print("distance  ", *(f"{t:3d}" for t in range(12)))
print("looks     ", *(f"{64 - t:3d}" for t in range(12)))
print("of it met ", *(f"{met(t):3d}" for t in range(12)))

# %% [markdown]
r"""
All or nothing: **no even distance is ever met**. On the antidiagonal the query stands at offset $S-1-i$ and the key
at $i$; their distance is $S - 1 - 2i$ plus a multiple of $S$, and for an even $S$ that is odd, always. A head that
looks two tokens back is invisible to this estimate, unless its neighbours look like it. (In real text they often do.
That is the bet.)

Second experiment, the real one. The last query of our prompt stands at offset 7 of its square. Its partner on the
antidiagonal is at offset $7 - 7 = 0$: of every eight keys it meets **the first**. These are its scores, $q \cdot k/\sqrt d$,
with the keys of block 6:
"""

# %%
q, k, _ = record.layers[1]
head = int(np.argmax(looking))
exact = (k[head // 2, needle * BLOCK : (needle + 1) * BLOCK] @ q[head, -1]) / np.sqrt(q.shape[2])
for first in (0, 8, 16):
    line = " ".join(f"{s:5.1f}" for s in exact[first : first + 8])
    print(f"offsets {first:2d}-{first + 7:2d}: {line}")
best = np.flatnonzero(exact > 15)
print("keys with a score above 15 at offsets", best.tolist(),
      "· met by the last query: offsets", list(range(0, BLOCK, 8)))
print(f"largest score {exact.max():.1f}, largest score that is met {exact[::8].max():.1f}")

# %% [markdown]
r"""
The four keys of the fact stand at offsets 12 to 15. The estimate looks at 0, 8, 16, … and finds nothing remarkable.
A weight of 99.9 %, and not one of the products that make it was computed.

**This is the first reason** why block 6 was lost. Antidiagonals meet every key once *in every square*, but each time
with another query. A key that all queries look at cannot hide. A fact that **one** query looks for can.
"""

# %% [markdown] course={"id": "d12.b1", "kind": "B", "role": "card"}
r"""
### Exercise 12-1 B · every row and every column once

7 minutes · difficulty 2/3 · 4 points

Open [prefill/scores.py](../course_lib/prefill/scores.py).

* `reversal`: the line that turns the queries of a square around.
* `group`: the line that puts the query heads of one KV head into one row, so that keys are shared.
* `rows_beyond`: the line where both sides are filled up with zeros to whole squares.
* `pairs`: how many of the 64 products of a square are computed with $S = 8$?
* `other_scores`: would reversing the *keys* of each square instead of the queries give other scores? `True` or `False`.
* `offset_of_5`: the query at offset 5 of its square of $S = 8$: which key offset does it meet?

Then say in two or three sentences why every query row and every key column of a square is used exactly once, and
what that guarantees for a key that all queries look at, and what not for a fact that one query looks for.
"""

# %% [markdown] course={"id": "d12.b1", "kind": "B", "role": "answer", "points": 4, "minutes": 7, "difficulty": 2}
r"""
<!-- ANSWER d12.b1 -->
Answer: …

Evidence: path:first-last
"""

# %% course={"id": "d12.b1", "kind": "B", "role": "evidence"}
# EVIDENCE d12.b1
d12_b1 = {
    "reversal": "",  # "path:first-last"
    "group": "",
    "rows_beyond": "",
    "pairs": None,  # a number
    "other_scores": None,  # True or False
    "offset_of_5": None,
}

# %% course={"id": "d12.b1", "kind": "B", "role": "check"}
check("d12.b1", d12_b1)

# %% [markdown]
r"""
## 12-2 softmax、块和与阈值 · Softmax, block sums, threshold

A score per square is not yet a weight. Three steps lead to a mask:

1. **softmax** over each row of squares, with the causal rule: a row sees squares up to its own;
2. **block sums** (块和): blocks of $b = B/S$ rows by $b$ columns of squares are added up. The result estimates the
   masses of the recap's cells;
3. **threshold** (阈值) $\tau$: per row of blocks keep the largest, until they hold the share $\tau$ of the row.

What scale belongs into the softmax? A square's score is a sum of $S$ products, so it is divided by $S$ and, as usual,
by $\sqrt d$. By eye: one row of four squares with scores $0, 0, 2, 0$, $S = d = 1$, blocks of two:
"""

# %%
row = np.array([[[0, 0, 2, 0]]], np.float32)
weights = np.exp(row[0, 0]) / np.exp(row[0, 0]).sum()
print("weights:", [fmt(w) for w in weights])
sums = softmax_fuse_block_sum(row, 2, scale=base_2_scale(1, 1), is_causal=False)
print("block sums:", [fmt(x) for x in sums[0, 0]])
print("base 2: 2 ** (log2(e) · 2) =", fmt(2 ** (np.log2(np.e) * 2)), "= e² =", fmt(np.exp(2)))

# %% [markdown]
r"""
$e^2 = 7.39$ against three ones: $7.39/10.39 = 0.711$, and the second block holds $0.711 + 0.096 = 0.807$.
(Upstream writes $2^{x \log_2 e}$ for $e^x$, since GPUs have a fast $2^x$. Same function.)

Dividing by $S$ averages the $S$ products of a square. One product of 20 beside seven of about 3 becomes about 5:
$e^5$ instead of $e^{20}$. **An average in the exponent is a geometric mean of weights**, and it flattens a single peak
even where the antidiagonal hits it.

A property that catches most mistakes: a row of blocks adds up to its number of rows of squares. On the real model:
"""

# %%
q, k, _ = record.layers[1]
sums, _ = xattn_estimate(q, k, stride=8, block_size=BLOCK, threshold=0.9)
print("sums:", sums.shape, "· every row adds up to", BLOCK // 8, ":",
      bool(np.allclose(sums.sum(axis=2), BLOCK // 8, atol=1e-4)))
exact = record.block_mass(1, BLOCK)
print(f"\nhead {head}, last row: share of a block   exact   estimated")
for block in (*np.argsort(-exact[head, -1])[:4].tolist(), needle):
    mark = "   ← the needle's block" if block == needle else ""
    print(f"  block {block:2d}                        {percent(exact[head, -1, block] / BLOCK):>7}  "
          f"{percent(sums[head, -1, block] / 8):>7}{mark}")

# %% [markdown]
r"""
The estimate has the right idea about the large blocks. But look at the last line, and at the *exact* column: 3.6 %. The
last query gives block 6 99.9 % of its weight, and it is one of the **64 queries of its row**. Of the row, its whole
attention is $1/64 = 1.6$ %; a few others look there, too.

**This is the second reason.** A row of blocks speaks for 64 queries; the one that asks is a small minority in it, even
in an exact count.
"""

# %% [markdown]
r"""
### The shortest list that reaches τ

Per row: `need` = $\tau$ times the row's sum. Take blocks by mass, the largest first; **keep a block if the mass *before*
it is less than need**. Before that, two blocks are kept whatever they weigh, and their mass counts: the **sink** (汇),
block 0, where networks park attention that they do not need, and the **diagonal**, the row's own block.

By eye: row 4 of a head, masses below, $\tau = 0.75$. The sum is 16, so need is 12. Which blocks are kept?

| block | 0 (sink) | 1 | 2 | 3 | 4 (diagonal) |
|---|---|---|---|---|---|
| mass | 1 | 5 | 3 | 5 | 2 |
"""

# %%
toy = np.zeros((1, 1, 5), np.float32)
toy[0, 0] = [1, 5, 3, 5, 2]
for tau in (0.5, 0.75, 0.8125, 0.82, 1.0):
    t = threshold_blocks(toy, 4, tau, causal=True)
    words = " ".join(f"{b}:{REASONS[r]}" for b, r in enumerate(t.reason[0, 0]))
    print(f"τ = {tau:6g}  need {t.need[0, 0, 0]:5.2f}  before {t.mass_before[0, 0].astype(int).tolist()}  {words}")

# %% [markdown]
r"""
Sink and diagonal first: 3. Then block 1 (it ties with 3; the lower number goes first), before it 3; then block 3, before
it 8 < 12: kept. Block 2: before it 13, not less than 12: not kept. At $\tau = 0.8125$ need is exactly 13, and "less than"
still says no. One grain more, and block 2 is in.

Two facts to remember. The kept list holds *at least* $\tau$, often much more, since blocks come whole. And masks are
**nested** (嵌套): a larger $\tau$ keeps everything that a smaller one kept.
"""

# %% [markdown] course={"id": "d12.a2", "kind": "A", "role": "card"}
r"""
### Exercise 12-2 A · from masses to a mask

14 minutes · difficulty 3/3 · 7 points · about 15 lines

`sums` `[rows, blocks]` are the masses of one head, causal: row `r` stands at block `first + r` and sees blocks up to and
including that one. Return the mask, bool `[rows, blocks]`.

* Sink (block 0) and diagonal (block `first + r`) first; they count as kept mass.
* Then the largest first, ties to the **lower** block; keep a block iff the mass before it is **less than** `threshold`
  times the row's visible mass. Add up in float64.
* A row without mass keeps sink and diagonal only. `threshold` 1 keeps everything visible, blocks without mass too.
* What stands behind the diagonal is never kept and never counted, whatever number stands there.
* `ValueError` for a threshold outside $(0, 1]$.

<details><summary>Hint 1: the order of one row</summary>

`sorted(visible, key=lambda b: (b not in forced, -mass[b], b))` puts forced blocks first.

</details>

<details><summary>Hint 2: threshold 1</summary>

A block without mass stands behind all mass: "before" is then equal to need, not less. Treat 1 by itself.

</details>
"""

# %% course={"id": "d12.a2", "kind": "A", "role": "answer", "points": 7, "minutes": 14, "difficulty": 3}
# EXERCISE d12.a2
def keep_blocks(sums, first, threshold):
    """Return which blocks each row keeps, bool [rows, blocks].

    >>> keep_blocks(np.array([[1, 5, 3, 5, 2]], np.float32), 4, 0.75)
    array([[ True,  True, False,  True,  True]])
    """
    raise NotImplementedError("d12.a2")


# %% course={"id": "d12.a2", "kind": "A", "role": "check"}
check("d12.a2", keep_blocks)

# %% [markdown]
r"""
### The explorer

One layer and head of the real model. Left, exact attention (dark = much); a red × is a cell that holds at least 2 % of
its row and was not kept. Right, the mask, with the reason for every kept block. The frame is the needle's block, from
the moment it exists.

It opens with our prompt, at the head that looks for the needle, $\tau = 0.9$. **Predict first**: which two lines are kept in
every row, whatever the head looks at? Where do you expect the red crosses: near the diagonal, or far from it?
"""

# %%
explorer = PrefillMaskExplorer(engine, prompt=1)
explorer

# %% [markdown]
r"""
The first column and the diagonal are forced. Most crosses lie far from the diagonal: recent blocks have so much mass that
they use up the threshold.

Move $\tau$ from 0.3 to 1 and watch the last row. From which $\tau$ on is the needle's block kept? Does a smaller stride help?
Prompts 0, 2 and 3 hide their fact elsewhere. The next cell makes these moves on all four prompts: 12 heads that look for a
needle (three in layer 1 for each prompt), 48 heads in all.
"""

# %%
def survey(threshold, stride=8):
    density, kept, found = [], [], 0
    for index, asked in enumerate(prompts):
        block = asked.value_span[0] // BLOCK
        for layer in range(3):
            for h in range(4):
                r = explorer.compute(prompt=index, layer=layer, head=h, threshold=threshold, stride=stride)
                density.append(r["density"])
                kept.append(r["kept"])
                found += layer == 1 and h < 3 and bool(r["mask"][-1, block])
    return np.mean(density), np.mean(kept), found


print("          cells kept   exact mass kept   needle's block kept, of 12 heads that ask")
for tau in (0.3, 0.5, 0.7, 0.8, 0.9, 0.95, 1.0):
    density, kept, found = survey(tau)
    print(f"τ = {tau:4g} {percent(density):>11} {percent(kept):>15} {found:14d}")
for stride in (4, 16):
    density, kept, found = survey(0.9, stride)
    print(f"τ =  0.9 {percent(density):>11} {percent(kept):>15} {found:14d}   at stride {stride}")

# %% [markdown]
r"""
Three things to see.

* $\tau$ is a promise about *estimated* mass. The exact mass kept is above it here, since blocks come whole and two are forced:
  on average the estimate is good.
* The average hides the needle. At $\tau = 0.95$ nine tenths of all cells are kept, and two heads of twelve still miss
  the one block that they want.
* The model saves little: to keep 94 % of the mass it needs 82 % of the cells. It is small and its attention is spread.
  On large models and long prompts the shares are kinder. (Quoted: 20–35 % a head in the design that day 13 examines.) Do not
  take 82 % home as a property of XAttention.

Which of the two reasons loses the needle, the antidiagonal or the row? Give the *same* rule the **exact** masses:
"""

# %%
for tau in (0.5, 0.7, 0.8, 0.9):
    found = 0
    for asked in prompts:
        mass = layer_masses(engine, asked).block_mass(1, BLOCK).astype(np.float32)
        made = threshold_blocks(mass, 0, tau, causal=True)
        found += int(made.mask[:3, -1, asked.value_span[0] // BLOCK].sum())
    print(f"τ = {tau}: needle's block kept by {found:2d} of 12 with exact masses, {survey(tau)[2]:2d} with estimated ones")
larger = [explorer.compute(threshold=t)["mask"] for t in (0.3, 0.5, 0.7, 0.8, 0.9, 0.95, 1.0)]
print("masks are nested:", all(bool((b | ~a).all()) for a, b in zip(larger, larger[1:], strict=False)))

# %% [markdown]
r"""
Both. At $\tau = 0.5$ even perfect masses lose it in seven heads of twelve: the row outweighs the asking query. From 0.8 on
perfect masses keep it everywhere, and what is lost then is lost by the antidiagonal.

### Noise is not sparse

A warning before you measure anything yourself. The same code on random queries and keys:
"""

# %%
rng = np.random.default_rng(0)
noise_q, noise_k = (rng.standard_normal((h, 2048, 64), dtype=np.float32) for h in (4, 2))
for tau in (0.5, 0.9):
    _, mask = xattn_estimate(noise_q, noise_k, stride=8, block_size=BLOCK, threshold=tau)
    print(f"τ = {tau}: density of noise {percent(mask.sum() / (4 * 32 * 33 / 2))}, of the model "
          f"{percent(survey(tau)[0])}")

# %% [markdown]
r"""
Noise has no large blocks: every block holds about its fair share, so the share $\tau$ of the mass needs the share $\tau$ of
the blocks, or more. A sparsity "measured" on `randn` says nothing about a method, in either direction. **Use a model's own
queries and keys**, as everything here does.
"""

# %% [markdown]
r"""
The rule in the library, with every number that decides kept in a trace:
"""

# %%
print(inspect.getsource(threshold_blocks))

# %% [markdown]
r"""
({see course_lib/prefill/find_blocks.py threshold_blocks}) The order comes from `descending`, a stable sort of
negated masses, then a second stable sort that pulls the forced blocks to the front ({see course_lib/prefill/find_blocks.py descending}). `mass_before` adds up in that order, in float64. So a row's mask
depends on that row alone: not on the chunk, not on the machine.
"""

# %% [markdown] course={"id": "d12.b2", "kind": "B", "role": "card"}
r"""
### Exercise 12-2 B · strict or not

7 minutes · difficulty 2/3 · 4 points

In [prefill/find_blocks.py](../course_lib/prefill/find_blocks.py) and [prefill/scores.py](../course_lib/prefill/scores.py):

* `strict`: the line that decides between "less than" and "at most".
* `ties`: the line that gives equal masses to the lower block.
* `tau_one`: the line that keeps a block without mass at $\tau = 1$.
* `visible_only`: the line that takes the mass of future blocks out of the count.
* `padding_rows`: in `scores.py`, the line that makes rows of padding count nothing.
* `if_at_most`: with "at most" instead of "less than", how many blocks would the toy row keep at $\tau = 0.8125$?

Then: construct a row (give the numbers) where strict and not strict differ, and say which of the two keeps the promise
"the *shortest* list that reaches $\tau$".
"""

# %% [markdown] course={"id": "d12.b2", "kind": "B", "role": "answer", "points": 4, "minutes": 7, "difficulty": 2}
r"""
<!-- ANSWER d12.b2 -->
Answer: …

Evidence: path:first-last
"""

# %% course={"id": "d12.b2", "kind": "B", "role": "evidence"}
# EVIDENCE d12.b2
d12_b2 = {
    "strict": "",  # "path:first-last"
    "ties": "",
    "tau_one": "",
    "visible_only": "",
    "padding_rows": "",
    "if_at_most": None,  # a number
}

# %% course={"id": "d12.b2", "kind": "B", "role": "check"}
check("d12.b2", d12_b2)

# %% [markdown]
r"""
## 12-3 没写下的规则 · Ties, sinks, padding: the undocumented rules

"Per row, the shortest list that reaches $\tau$, sink and diagonal forced." One sentence; two programs that follow it should
give the same mask. The library can run a second mode, `compat="upstream"`, which does what the original's code does, step
by step, and is compared with stored results of that code.

Our prompt, layer 1, $\tau = 0.9$. **Predict**: how many cells differ?
"""

# %%
ours, mask_ours = xattn_estimate(q, k, stride=8, block_size=BLOCK, threshold=0.9)
_, mask_theirs = xattn_estimate(q, k, stride=8, block_size=BLOCK, threshold=0.9, compat="upstream")
print("cells kept:", int(mask_ours.sum()), "by the rule,", int(mask_theirs.sum()), "by upstream;",
      "kept only by the rule:", int((mask_ours & ~mask_theirs).sum()))
extra = (mask_theirs & ~mask_ours).sum(axis=2)
print("extra blocks in rows 0 to 31, head 0:", *extra[0].tolist())

# %% [markdown]
r"""
Upstream keeps more, never less: once a row has something to leave out, one block more, sometimes two. On head 0 these are
the cells marked x in the legend:
"""

# %%
upstream = PrefillMaskExplorer(engine, prompt=1, head=0, compat="upstream")
upstream

# %% [markdown]
r"""
### Where the extra block comes from

Upstream's code keeps a running list "mass before" per row, in the order of taking: first the forced blocks, then the others
by mass. Two places at its front are reserved for the two forced blocks, with 0 before each:

$$ \text{before} = [\,0,\; 0,\; f,\; f + o_1,\; f + o_1 + o_2, \dots\,], \qquad f = \text{mass of the forced blocks}. $$

That is right for two forced blocks. But after the line that forces column 0, a second line writes the diagonal: a whole square,
ones on its diagonal and *zeros beside it*. If the rows begin at block 0, this square covers column 0 and unforces the sink. So only row 0
keeps its forced sink; every other row has **one** forced block, its diagonal, and the list is one place too long: the heaviest other
block gets a 0 meant for a forced one, and everything behind it is late by one. By eye: a row of six blocks, $\tau = 0.5$.
"""

# %%
row = np.zeros((1, 6, 6), np.float32)
row[0] = np.tri(6)
row[0, 5] = [1, 6, 3, 1, 1, 20]
for compat in ("exact", "upstream"):
    mask = find_blocks_chunked(row, 0, 0.5, causal=True, compat=compat)[0]
    print(f"{compat:9s} row 5 keeps {np.flatnonzero(mask[5]).tolist()}")
print("need:", 0.5 * row[0, 5].sum(), "· the diagonal alone holds", row[0, 5, 5])

# %% [markdown]
r"""
The diagonal, 20 of 32, reaches the need of 16 alone, so the rule keeps sink and diagonal. Upstream keeps block 1 as well.
(Some rows had two extra blocks: a sink that is not forced does not count up front either, so others must make up for its mass.)

It gets stranger. Upstream works in **chunks** of queries (分块), and the accident needs rows that begin at block 0. So only
the *first* chunk has it:
"""

# %%
print("chunk of queries   cells that upstream keeps and the rule does not (3 layers, 4 heads)")
for chunk in (2048, 1024, 512, 256):
    more = 0
    for layer in record.layers:
        options = dict(stride=8, block_size=BLOCK, threshold=0.9, chunk_size=chunk)
        rule = xattn_estimate(layer.q, layer.k, **options)[1]
        theirs = xattn_estimate(layer.q, layer.k, **options, compat="upstream")[1]
        assert np.array_equal(rule, xattn_estimate(layer.q, layer.k, **{**options, "chunk_size": 2048})[1])
        more += int((theirs & ~rule).sum())
    print(f"{chunk:16d}   {more}")

# %% [markdown]
r"""
A size that should only bound memory changes which blocks are read. In our mode it does not (the `assert` in the loop).

Is the extra block bad? It costs a little and keeps a little more. It may well have saved somebody's benchmark. The point is
another one: **a reported density belongs to a program, not to a formula**. Whoever reimplements the paper from its text gets
other masks, and will look for the bug on his own side.

The other rules that nobody wrote down, each in one line:
"""

# %%
flat = np.ones((1, 1, 6), np.float32)
print("six equal masses, τ = 0.5:      ", np.flatnonzero(find_blocks_chunked(flat, 0, 0.5, causal=False)).tolist())
two = np.array([[[4, 5]]], np.float32)
for compat in ("exact", "upstream"):
    kept = find_blocks_chunked(two, 0, 0.4, causal=False, compat=compat)
    print(f"masses 4 and 5, {compat:8s} τ = 0.4:", np.flatnonzero(kept).tolist())
nothing = np.zeros((1, 6, 6), np.float32)
print("row 4, a row of zeros, keeps:   ", np.flatnonzero(find_blocks_chunked(nothing, 0, 0.9, causal=True)[0, 4]).tolist())
padded = np.arange(6)
padded[-0:] = 0  # "zero the last `padding` entries", where padding is 0
print("x[-0:] = 0 leaves of 0 … 5:     ", padded.tolist())

# %% [markdown]
r"""
* **Ties**: upstream's order is whatever its sort gives. Ours is the lower block first, so that a run can be repeated.
* **Sink without causal**: in upstream what is *not* taken is written to index 0, so column 0 is kept in every row, without its
  mass being counted first. In our mode it is forced first and counts: 4 of 9 reach 0.4.
* **Rows of zeros** (padding queries): sink and diagonal only. They must not vote; day 13 shows what happens when they do.
* **Padding**: lengths are filled up with zeros to whole chunks. A key of zeros has score 0, which is *not* a small score: softmax
  gives it $e^0 = 1$. Our mode hides padded keys; upstream hides them by the causal rule, where there is one.
* **`x[-0:]`** is the whole array, not nothing. Upstream's slower path blanks the scores of *all* history with this slice when
  there are several chunks and no padding. Our mode does not copy that one; the stored results of it are kept as a warning.
"""

# %% [markdown] course={"id": "d12.a3", "kind": "A", "role": "card"}
r"""
### Exercise 12-3 A · make the two modes differ

12 minutes · difficulty 3/3 · 6 points · about 8 lines

Return masses, float32 `[1, rows, first + rows]`, for which `compat="upstream"` keeps **at least one visible block more** than
`compat="exact"` (causal, `current_index=first`), or `None` if no such masses exist.

* Visible masses are above 0, everything behind the diagonal is 0.
* Visible: block `b` of row `r` with `b <= first + r`. What upstream leaves in the future of a chunk does not count.

You may search, or think. Thinking is shorter: in which row does the accident happen, and how heavy must its diagonal be?

<details><summary>Hint 1: when is there none?</summary>

The accident needs rows that begin at block 0, a block beside sink and diagonal, and a threshold at which the rule leaves
something out.

</details>

<details><summary>Hint 2: which block gets in?</summary>

The heaviest one beside the diagonal. If that is the sink (or if it ties with the sink), nothing new is kept: both modes keep the sink.

</details>

<details><summary>Hint 3: test your answer</summary>

`find_blocks_chunked(masses, first, threshold, causal=True, compat="upstream")`, and the same with `"exact"`; clear the upper
triangle of the first.

</details>
"""

# %% course={"id": "d12.a3", "kind": "A", "role": "answer", "points": 6, "minutes": 12, "difficulty": 3}
# EXERCISE d12.a3
def masses_with_an_extra_block(rows, first, threshold):
    """Return float32 [1, rows, first + rows], or None where the modes keep the same blocks.

    >>> masses_with_an_extra_block(2, 0, 0.9) is None
    True
    """
    raise NotImplementedError("d12.a3")


# %% course={"id": "d12.a3", "kind": "A", "role": "check"}
check("d12.a3", masses_with_an_extra_block)

# %% [markdown]
r"""
### How exact must the keys be?

An estimate need not read float32. The keys could wait as int8 (one scale a row, day 9), a quarter of the bytes, or in 4 bits.
On the synthetic data of the reference tests int8 keys chose *the same* blocks at every threshold (ties aside). On the model's own keys, four
prompts, all layers and heads:
"""

# %%
def four_bits(k):
    step = np.abs(k).max(axis=2, keepdims=True) / 7
    return (np.round(k / step) * step).astype(np.float32)


coarser = {"int8": lambda k: dequantize_rows(*quantize_rows(k)), "4 bits": four_bits}
for name, coarse in coarser.items():
    for tau in (0.5, 0.9):
        cells = differ = 0
        for asked in prompts:
            for layer in layer_masses(engine, asked).layers:
                options = dict(stride=8, block_size=BLOCK, threshold=tau)
                one = xattn_estimate(layer.q, layer.k, **options)[1]
                other = xattn_estimate(layer.q, coarse(layer.k), **options)[1]
                cells += 4 * 32 * 33 // 2
                differ += int((one != other).sum())
        print(f"{name:6s} τ = {tau}: {differ:3d} of {cells} cells differ = {100 * differ / cells:.2f} %")

# %% [markdown]
r"""
Not identical on a real model: a few cells in ten thousand with int8, one or two in a hundred with 4 bits. Both are small beside
what the estimate itself gets wrong. Day 14 puts the bytes saved on the bill; here the lesson is that "identical in all tests"
was a statement about the tests' data.
"""

# %% [markdown] course={"id": "d12.b3", "kind": "B", "role": "card"}
r"""
### Exercise 12-3 B · what the caller must still do

5 minutes · difficulty 3/3 · 4 points

`find_blocks_chunked(..., compat="upstream")` does not return a finished mask. Open
[prefill/xattn.py](../course_lib/prefill/xattn.py) and [prefill/find_blocks.py](../course_lib/prefill/find_blocks.py).

* `future`: in `xattn.py`, the line that clears the blocks of the future inside a chunk.
* `two_places`: in `find_blocks.py`, the line that builds the list with two places reserved.
* `index_0`: in `find_blocks.py`, the line where what is not taken is sent to block 0.
* `extra_rows`: in a first chunk of 10 rows of blocks, in how many rows can an extra block appear?
* `none_at`: for how many rows at most (`first = 0`) do the modes never differ?

Then name two things that a caller who trusts the returned mask would get wrong, and one check (a property, not an example)
that would have caught the accident of 12-3 in upstream's own tests.
"""

# %% [markdown] course={"id": "d12.b3", "kind": "B", "role": "answer", "points": 4, "minutes": 5, "difficulty": 3}
r"""
<!-- ANSWER d12.b3 -->
Answer: …

Evidence: path:first-last
"""

# %% course={"id": "d12.b3", "kind": "B", "role": "evidence"}
# EVIDENCE d12.b3
d12_b3 = {
    "future": "",  # "path:first-last"
    "two_places": "",
    "index_0": "",
    "extra_rows": None,  # a number
    "none_at": None,
}

# %% course={"id": "d12.b3", "kind": "B", "role": "check"}
check("d12.b3", d12_b3)

# %% [markdown]
r"""
### Does it matter to the answer?

A mask is not a text. Last look: let the model compute its last token's attention in layer 1 from the kept blocks only, head by
head, and compare with the exact result. How far does the output move where the needle's block is missing?
"""

# %%
q, k, v = record.layers[1]
for h, made in enumerate(xattn_masks(record.layers[1], block_size=BLOCK, threshold=0.9)):
    tokens = np.flatnonzero(np.repeat(made.mask[-1], BLOCK))
    keys, values = k[h // 2 : h // 2 + 1], v[h // 2 : h // 2 + 1]
    whole = two_pass(q[h : h + 1, -1], keys, values)[0]
    sparse = two_pass(q[h : h + 1, -1], keys[:, tokens], values[:, tokens])[0]
    moved = np.linalg.norm(sparse - whole) / np.linalg.norm(whole)
    print(f"head {h}: reads {percent(len(tokens) / 2048):>6} of the tokens; looks at the needle "
          f"{percent(looking[h]):>6}; output moves by {percent(moved)} of its length")

# %% [markdown]
r"""
Three heads answer with something entirely different; the fourth, which looks elsewhere, hardly moves. What the *text* does then,
how often, and what a vote between heads adds to it, is day 13.

## Summary

1. An antidiagonal meets every query and every key of a square once: one part in $S$ of the work, blind to even distances, and
   blind to a fact that one query seeks at the wrong offset.
2. A threshold keeps the shortest list of blocks that holds $\tau$ of a *row's estimated* mass; a row speaks for all its queries, so
   a single asking one is a minority.
3. The rule in the paper and the rule in the code differ by an extra block that depends on the chunk size; a density belongs to a
   program.

The formula: $\mathrm{score}[m,n] = \sum_i q_{mS+S-1-i} \cdot k_{nS+i}$ · The number: **99.9 %** of one query's weight, and a
mask of three quarters of all cells without it.

**Next**: day 13 puts three policies behind one interface and lets the heads vote. To read more:
[scores.py](../course_lib/prefill/scores.py), [find_blocks.py](../course_lib/prefill/find_blocks.py), and the stored results of
the original in [tests/oracle/golden/xattn](../tests/oracle/golden/xattn/README.md).
"""
