# %% [markdown]
r"""
# Day 7/30 · 注意力 Attention

**You need** Python, NumPy indexing, the dot product. Days 1 and 6 help: what a token, a layer and
a head's row of numbers are. What attention is, you learn here.

**You will be able to** write attention with shared KV heads (7-1 分组查询) · compute a softmax in one
pass over numbers that you see only once (7-2 在线 softmax) · write an exponential function that gives the
same bits on every machine, and prove how exact it is (7-3 手写 exp).

**Time** 90 minutes with the six exercises. The notebook itself runs in a few seconds, offline.

Numbers carry a label where you could wonder: **this machine** (measured in the cell) · **derived**
(arithmetic) · **recorded** (a stored run; its command is shown). A number without a label is a toy, a
count or a check from the cell above it. Words that you miss are in the
[glossary](../docs/glossary.md). This day is the course's own plan; it quotes no article.
"""

# %% tags=["nbval-ignore-output"]
import hashlib
import inspect
import math
import time

import numpy as np

import kernels_pyx
from course_lib import attention, backend, exponential, kvcache
from course_lib.classroom import check, solved_or
from course_lib.engine import Engine
from course_lib.engine.session import log_softmax
from course_lib.lab import exp_walk, online_trace
from course_lib.lab.exp_recipes import exp_recipe
from course_lib.lab.needle import NeedleOptions, prompt_of
from course_lib.lab.prompt_study import prompt_study
from course_lib.lab.runs import load_run
from course_lib.paths import MODELS
from course_lib.show import OnlineSoftmaxExplorer
from course_lib.show.c_source import c_function
from course_lib.show.head_map import head_map
from course_lib.show.text import fmt, percent
from course_lib.show.ulp_picture import ulp_errors

print(backend.info())

# %% [markdown]
r"""
## A token looks back

A language model reads left to right. In every layer, each token turns its row of numbers into three
rows: a **query** $q$ ("what am I looking for?"), a **key** $k$ ("what do I offer to be found by?") and
a **value** $v$ ("what do I hand over?"). A **head** is one such set of rows; several look side by side,
each for something else. **Attention** (注意力) is how a query collects values:

1. its **score** for token $t$ is the dot product with that token's key, $s_t = q \cdot k_t / \sqrt d$;
2. **softmax** makes weights of the scores, $w_t = e^{s_t} / \sum_u e^{s_u}$: none negative, together 1;
3. the output is the weighted mean of the values, $\sum_t w_t v_t$.

Here $d$ is the number of values in a row, 64 in the model that ships with this course. That model
reads notes and answers a question about one sentence hidden in them. We stop it just before it says the
answer, and look at what one head looks at.
"""

# %%
engine = Engine.load(MODELS / "needle-qwen3")
config = engine.config
prompt = prompt_of(engine, NeedleOptions(tokens=256), 0)
study = prompt_study(engine, prompt)  # a run that keeps every query, key and value
step, (layer, head) = study.value_step, study.retrieval_head
rows, q = study.record.rows(step, layer, head), study.record.queries[step, layer, head]
ids = [*prompt.ids, *study.record.generation.ids[: step + 1]]
print("hidden:   ", prompt.fact.sentence, "\nquestion: ", prompt.question)
print("the answer so far:", repr(engine.decode(ids[len(prompt.ids):])))
print(f"layer {layer}, query head {head}: q {q.shape}, keys {rows.k.shape}, values {rows.v.shape}")

scores = rows.k @ q / np.sqrt(np.float32(64))
weights = np.exp(scores) / np.exp(scores).sum()
print("\ntoken  score  weight   (this machine)")
for t in np.argsort(-weights)[:5]:
    print(f"{t:5d} {scores[t]:6.1f} {weights[t]:7.3f}  {engine.decode([ids[t]])!r}")

# %% [markdown]
r"""
One line of mathematics, and the model has found its fact: nearly all the weight lies on one token of 261,
the word it is about to say. The value that it collects is that token's.

Now leave out the $\sqrt d$, which looks like a detail. The dot products are eight times larger.
"""

# %%
with np.errstate(over="ignore", invalid="ignore"):
    raw = rows.k @ q
    powers = np.exp(raw)
    weights = powers / powers.sum()
print(f"largest score {raw.max():.0f}, e^score in float32: {powers.max()}"
      f"\nweights that are NaN: {int(np.isnan(weights).sum())} of {len(weights)}; "
      f"their sum: {weights.sum()}")
print("float32 ends at e^x for x =", fmt(np.log(np.finfo(np.float32).max)), "  (derived)")

# %% [markdown]
r"""
$\infty/\infty$ is **NaN**, "not a number". It hits exactly the tokens that matter, all others got weight 0, and
one NaN makes the whole output NaN. The program ran to its end and reported nothing. So a formula is not yet a program. Today makes three programs of this one
formula: which rows a head reads (7-1), in how many passes (7-2), and what $e^x$ is in a machine (7-3).

## Six numbers to check by eye

One query, six tokens, $d = 1$. The scores are multiples of $\ln 2 = 0.693$, so that every $e^s$ is a
power of two. *By hand first:* what are the weights, and what is the output?
"""

# %%
s = np.log(2) * np.array([1, 0, 2, 0, 3, 3], np.float32)
v = np.array([10, 20, 30, 40, 50, 60], np.float32)
e = np.exp(s)
print("scores ", s.round(3), "\ne^score", e.round(3), " sum", fmt(e.sum()))
print("weights", (e / e.sum()).round(3), "\noutput ", fmt(e / e.sum() @ v))
print("course_lib says", fmt(attention.two_pass([[1]], s.reshape(1, 6, 1), v.reshape(1, 6, 1))[0, 0]))

# %% [markdown]
r"""
$(2, 1, 4, 1, 8, 8)/24$, and $(20 + 20 + 120 + 40 + 400 + 480)/24 = 45$. Keep these six; they come back.

Add 100 to every score. $e^{100}$ appears in each numerator and in the sum, and cancels: **softmax only
sees differences**. So a program may subtract any number from all scores, and subtracts the largest one.
Then no exponent is above 0, nothing overflows, and the sum is at least 1.

$$ w_t = \frac{e^{s_t - m}}{\sum_u e^{s_u - m}}, \qquad m = \max_u s_u $$
"""

# %%
shifted = np.exp(raw - raw.max())
weights = shifted / shifted.sum()
print("NaN:", int(np.isnan(weights).sum()), "· sum:", fmt(weights.sum()), "· largest:", fmt(weights.max()))

# %% [markdown]
r"""
So the √d is not there against overflow. A sum of $d$ random products spreads like $\sqrt d$; divided by it,
scores keep their size whatever $d$ is. Without it every score is eight times larger, and this softmax puts
all its weight on one token, which the model never learned.

## 7-1 分组查询 GQA head mapping

Keys and values are kept for all tokens (day 8 is about that memory). To keep fewer, several query heads
share one **KV head**: one set of keys and values. That is **GQA**, grouped-query attention. With $H$
query heads and $G$ KV heads, query head $h$ reads

$$ \text{kh} = \lfloor h \cdot G / H \rfloor . $$

Neighbours share. The shipped model has 4 query heads and 2 KV heads. *Predict* for 16 and 8: which KV
head does query head 11 read? And which one would `h % G` give?
"""

# %%
print([attention.kv_head(h, 4, 2) for h in range(4)], "for 4 query heads, 2 KV heads")
print([attention.kv_head(h, 16, 8) for h in range(16)], "for 16 and 8")
print([h % 8 for h in range(16)], "h % 8")
head_map(16, 8)

# %% [markdown]
r"""
Query head 11 reads KV head 5; `11 % 8` would be 3. Both mappings share fairly, both have the right shape,
and neither raises an error. Only one is what the weights were trained with. Does it matter? Let the
shipped model say its own answer with either mapping. `nats` is the mean of −log(probability) over the
answer's tokens: 0 is certainty, and $\ln 1657 = 7.4$ is a blind guess among its 1,657 tokens.
"""

# %%
def nats(order):
    """Cost of the right answer when query heads come in this order, and go back after attention.

    The kernel gives neighbours one KV head: in the order 0, 2, 1, 3 heads 0 and 2 read KV head 0.
    """
    def attend(layer, q, k, v):
        context = attention.causal_attention(np.ascontiguousarray(q[order]), k, v)
        return context[np.argsort(order)]

    answer = engine.encode(prompt.fact.sentence, allow_special=False)
    hidden = engine.model.hidden([*prompt.ids, *answer[:-1]], 0, attend)
    log_p = log_softmax(engine.model.logits(hidden[len(prompt.ids) - 1 :]))
    return -float(np.mean(log_p[np.arange(len(answer)), answer]))


for name, order in (("h * 2 // 4", [0, 1, 2, 3]), ("h % 2", [0, 2, 1, 3])):
    print(f"kh = {name:10}  {nats(order):.3f} nats a token   (this machine)")

# %% [markdown]
r"""
Every token of the text is still there, every row is read, and the model does worse than a blind guess. No
shape check finds a wrong head map; only a comparison with a right answer does.

What is it worth? Bytes of keys and values for one token in one layer, 16 query heads of 128 values,
float32, **derived**:
"""

# %%
for kv_heads, name in ((16, "one KV head per query head"), (8, "two query heads share one"),
                       (1, "all share one (multi-query)")):
    print(f"{kv_heads:2d} KV heads: {kvcache.kv_bytes_per_token(kv_heads, 128, 'f32'):6,d} bytes   {name}")

# %% [markdown] course={"id": "d07.a1", "kind": "A", "role": "card"}
r"""
### Exercise 7-1 A: attention with shared KV heads

10 minutes · difficulty 2/3 · 5 points · about 8 lines

Write `gqa_attention(q, k, v)`: one new token, all heads of a layer. `q` is `[heads, d]`, `k` and `v`
are `[kv_heads, n, d]`. Return float32 `[heads, d]`. Scores may be in the hundreds. Raise `ValueError`
where the query heads do not divide over the KV heads.

<details><summary>Hint 1: one head first</summary>

Loop over `h`, pick `k[kh]` of shape `[n, d]`; `k[kh] @ q[h]` gives all n scores of that head.

</details>

<details><summary>Hint 2: "overflow encountered in exp"</summary>

Subtract the largest score of **this head** before `np.exp`.

</details>

<details><summary>Hint 3: dtype</summary>

`np.sqrt(64)` is a float64 and makes float64 of what it divides. `np.float32(...)` around it, or
`.astype(np.float32)` at the end.

</details>
"""

# %% course={"id": "d07.a1", "kind": "A", "role": "answer", "points": 5, "minutes": 10, "difficulty": 2}
# EXERCISE d07.a1
def gqa_attention(q, k, v):
    """Attention of one token: every query head over the rows of the KV head it shares.

    q: float32 [heads, d]; k, v: float32 [kv_heads, n, d], n >= 1. Returns float32 [heads, d].
    ValueError where kv_heads does not divide heads.
    >>> one = np.ones((1, 1, 1), np.float32)  # one token: all the weight
    >>> gqa_attention(np.zeros((2, 1), np.float32), one, 7 * one)
    array([[7.],
           [7.]], dtype=float32)
    """
    raise NotImplementedError("d07.a1")


# %% course={"id": "d07.a1", "kind": "A", "role": "check"}
check("d07.a1", gqa_attention)

# %% [markdown]
r"""
Once it passes, your function attends here for the model itself, in all layers, at the moment before the
answer. (Until then ours does.)
"""

# %%
mine = solved_or(gqa_attention, attention.two_pass)
cache = study.record.session.cache
n = study.record.context(step)
for i in range(config.num_hidden_layers):
    k_all, v_all = (a[:, :n] for a in cache.rows(i)[:2])
    asked = study.record.queries[step, i]
    out = mine(asked, k_all, v_all)
    off = np.abs(out - attention.two_pass(asked, k_all, v_all)).max()
    print(f"layer {i}: output {out.shape}, agrees with the engine's kernel:", bool(off < 1e-4))

# %% [markdown]
r"""
### Read together: a group is served at once

The library's loop over heads, {see course_lib/attention.py _all_heads}. Read it for two things: where the
head map is (it is not a division here), and when the rows of a KV head are prepared (`widen` makes float32
of them): once for each query head, or once for all that share it?
"""

# %%
print(inspect.getsource(attention._all_heads))

# %% [markdown]
r"""
The loop runs over **KV heads** and serves their whole group inside. `h * G // H = kh` holds exactly for
the `H / G` heads from `kh * group` on; the formula and this range are the same map. The C kernel does it
likewise ({see kernels_pyx/c/attention.c "static void attend_kv_head" "job->status[list] = single_pass_rows("}), for one reason:
reading a row from memory takes longer than multiplying with it. A group that is served together reads
it once.
"""

# %% [markdown] course={"id": "d07.b1", "kind": "B", "role": "card"}
r"""
### Exercise 7-1 B: the same map, twice

6 minutes · difficulty 1/3 · 5 points

The map from query head to KV head is written in more than one place. Open
[attention_common.py](../course_lib/attention_common.py) and [attention.py](../course_lib/attention.py).

Cite, as `"path:first-last"`: `definition`, the formula itself, and `python_loop`, the loop over the query
heads of one KV head. Give `kv_head_of_21`: what query head 21 reads in a model with 32 query heads and 8 KV
heads; and `right_by_luck`: for how many of the 32 query heads would `h % 8` be right.

Then explain in two or three sentences: why are neighbours grouped, and not every eighth head? Who
decided that, and what happens to a trained model if an engine decides otherwise?

<details><summary>Hint</summary>

For `right_by_luck` let Python count.

</details>
"""

# %% [markdown] course={"id": "d07.b1", "kind": "B", "role": "answer", "points": 5, "minutes": 6, "difficulty": 1}
r"""
<!-- ANSWER d07.b1 -->
Answer: …

Evidence: path:first-last
"""

# %% course={"id": "d07.b1", "kind": "B", "role": "evidence"}
# EVIDENCE d07.b1
d07_b1 = {
    "definition": "",  # "path:first-last"
    "python_loop": "",  # "path:first-last"
    "kv_head_of_21": None,  # a number
    "right_by_luck": None,  # a number
}

# %% course={"id": "d07.b1", "kind": "B", "role": "check"}
check("d07.b1", d07_b1)

# %% [markdown]
r"""
## 7-2 两遍与在线 softmax Two-pass and online softmax

The formula needs the maximum first, then the sum, then the weights. So the obvious program walks over the
tokens more than once: all scores, kept in an array; their maximum; their exponentials and sum; then all
values with the finished weights. This is the **two-pass** kernel: K to its end, then V to its end.

Its price is the array: one number per token and head. For one query that is nothing. But a prompt of $n$
tokens has $n$ queries, and $n^2$ scores of one head are 17 MB at 2,061 tokens and 69 GB at 131,072
(**derived**, float32). Could we meet each token once, and forget it?

The obstacle is $m$, which is known only at the end. **Online softmax** (在线 softmax) works with the
maximum *so far*. It keeps three things: the running maximum $M$, the sum $S$ and the accumulator $A$ of
weighted values, both **relative to $M$**.

* A score $s \le M$ adds $e^{s-M}$ to $S$, and $e^{s-M}\, v$ to $A$.
* A score $s > M$ first **rescales**: $S$ and $A$ shrink by $e^{M-s}$, then $M = s$. Now its own weight is
  $e^0 = 1$.

At the end, the output is $A/S$. Start: $M = -\infty$, $S = 0$, $A = 0$.

Take the six numbers, $e^s = 2, 1, 4, 1, 8, 8$ and values 10 … 60. *On paper:* fill in $S$ and $A$ after
each token. Where does it rescale, and by how much? Then step through it: move `tokens read`.
"""

# %%
OnlineSoftmaxExplorer(engine, read=5)

# %% [markdown]
r"""
The stored picture shows the state after five tokens. Token 5 was a new maximum: what was there shrank to
half, then 1 was added. Token 6 has the same score and shrinks nothing.

Now real scores: the head from the beginning of this page. *Predict, before you move `order`:* 261 tokens;
how many of them rescale if the scores come **sorted** (smallest first), **reversed** (largest first), or in
**random** order?
"""

# %%
OnlineSoftmaxExplorer(engine, source="model", read=130)

# %% [markdown]
r"""
Look at the lower right panel of the stored picture. Until the hidden word came, as the 125th token (number
124 in the first table), the output was something else entirely; one score of 17 made everything before it vanish.
A running output is no preview.
Now count, for all twelve heads of the model:
"""

# %%
def rescales(scores):
    return 1 + int((np.diff(np.maximum.accumulate(scores)) > 0).sum())


explorer = OnlineSoftmaxExplorer(engine, source="model")
print(f"rescales of {n} tokens   (this machine)")
print(f"{'':>16} {'as they come':>12} {'sorted':>7} {'reversed':>9} {'random, mean of 200':>20}")
for i in range(config.num_hidden_layers):
    for h in range(config.num_attention_heads):
        stream, _ = explorer.stream("model", i, h)
        found = [rescales(stream[online_trace.arrange(stream, order)])
                 for order in ("as they come", "sorted", "reversed")]
        mean = np.mean([rescales(stream[online_trace.arrange(stream, "random", seed)])
                        for seed in range(200)])
        print(f"layer {i}, head {h} {found[0]:12d} {found[1]:7d} {found[2]:9d} {mean:20.1f}")
print(f"1 + 1/2 + … + 1/{n} = {online_trace.expected_rescales(n):.2f}   (derived)")

# %% [markdown]
r"""
Sorted: every token rescales. Reversed: only the first. Random: about six. Why six? The $i$-th number of a
random order is the largest so far with probability $1/i$, so the expected count is
$1 + \tfrac12 + \dots + \tfrac1n \approx \ln n + 0.58$. At a million tokens it is still only 14.

A rescale costs $d$ multiplications, about as much as adding one value row. So online softmax is nearly free
on real text (5 to 15 of 261 here), and twice the work in the worst case. Real kernels avoid even that:
they read a tile of 32 tokens, take its maximum, and rescale **at most once a tile**.
"""

# %% [markdown]
r"""
### What is masked?

Sometimes a query may not see a token: one that comes after it, or padding. Its score is set to
$-\infty$, so its weight is $e^{-\infty} = 0$. In two passes that is all, as long as one token is visible.
Online, more can go wrong. *Predict* all four lines:
"""

# %%
with np.errstate(invalid="ignore"):
    inf = np.float32(np.inf)
    print("first token, s = 3:          shrink e^(-inf - 3)      =", np.exp(-inf - 3))
    print("later, masked, M = 3:        weight e^(-inf - 3)      =", np.exp(-inf - 3))
    print("first token is masked:       weight e^(-inf - (-inf)) =", np.exp(-inf - -inf))
    print("S = 0 at the end:            A / S = 0 / 0            =", np.float32(0) / np.float32(0))

# %% [markdown]
r"""
The start is harmless: $e^{-\infty} = 0$ wipes out what is empty anyway. But if the **first** token is
masked, $-\infty - (-\infty)$ is NaN, and it stays. And if **all** are masked, there is no mean to take.
"""

# %% [markdown] course={"id": "d07.a2", "kind": "A", "role": "card"}
r"""
### Exercise 7-2 A: one pass

12 minutes · difficulty 2/3 · 6 points · about 15 lines

Write `online_softmax_attention(tokens)`. `tokens` gives pairs `(score, value_row)`, each **once**: you can
loop over it a single time, and not ask how many there are. All rows come in the same memory: the next token
**overwrites** the last one's, so collecting them is no use. Return a dictionary: `"out"`, the weighted mean
(an array of d numbers); `"max"`, `"sum"`: the final $M$ and $S$; `"rescales"`: how many tokens had a score
**strictly larger** than all before, the first visible one included. A score of `-inf` is masked: it
changes nothing, not even if its row holds NaN. If all are masked, `out` is zeros, `sum` 0, `max` `-inf`.

<details><summary>Hint 1: the accumulator's length</summary>

The first value row tells d, also if its token is masked: `A = np.zeros_like(value)`.

</details>

<details><summary>Hint 2: order of things</summary>

Masked? Go on. Larger than M? Shrink S and A, set M, count. Then, in both cases, add the weight and the
weighted value.

</details>

<details><summary>Hint 3: "the row of a token was changed"</summary>

After `A = value` both names mean the same memory: `A *= shrink` changes the caller's row, and the next token
overwrites `A`.

</details>
"""

# %% course={"id": "d07.a2", "kind": "A", "role": "answer", "points": 6, "minutes": 12, "difficulty": 2}
# EXERCISE d07.a2
def online_softmax_attention(tokens):
    """Softmax-weighted mean of value rows in one pass, with what was held at the end.

    tokens: an iterator of (score float32, value row float32 [d]) pairs, at least one; -inf masks.
    Returns {"out": [d], "max": float, "sum": float, "rescales": int}.
    >>> online_softmax_attention(iter([(np.float32(5), np.array([2.0], np.float32))]))["out"]
    array([2.], dtype=float32)
    """
    raise NotImplementedError("d07.a2")


# %% course={"id": "d07.a2", "kind": "A", "role": "check"}
check("d07.a2", online_softmax_attention)

# %% [markdown]
r"""
Your one pass (or ours, until it passes) against the two-pass kernel, on the model's own scores. Are they
equal to the bit? *Predict.*
"""

# %%
def ours(tokens):
    s, v = (np.array(column) for column in zip(*tokens, strict=True))
    trace = online_trace.trace_online_softmax(s, v)
    return {"out": trace.out, "rescales": trace.rescales}


one_pass = solved_or(online_softmax_attention, ours)
two = attention.two_pass(q[None], rows.k[None], rows.v[None])[0]
for order in online_trace.ORDERS:
    at = online_trace.arrange(scores, order)
    found = one_pass(zip(scores[at], rows.v[at], strict=True))
    off = np.abs(found["out"] - two).max() / np.abs(two).max()
    print(f"{order:>12}: {found['rescales']:3d} rescales, within 1e-5 of two passes: {bool(off < 1e-5)}, "
          f"equal to the bit: {bool((found['out'] == two).all())}")

# %% [markdown]
r"""
Close, and not equal: another order of additions rounds differently. So every experiment of this course uses
**one** kernel on both sides of a comparison ({see course_lib/attention.py two_pass}).

### Read together: the loop, and the tile

First the definition, {see course_lib/attention.py online_softmax}. It also takes `v_scale`, for rows that
are stored in 8 bits (day 9). Find the line for masked tokens.
"""

# %%
print(inspect.getsource(attention.online_softmax))

# %% [markdown]
r"""
Then the same in C, on tiles of 32 tokens: {see kernels_pyx/c/attention_single_pass.c "static float single_pass_tile" "return shrink;"}.
A `v16` is 16 floats that are computed side by side. Look for the only place that can rescale, and for what
the very first tile finds in `state->max`.
"""

# %%
print(c_function("attention_single_pass.c", "single_pass_tile"))

# %% [markdown]
r"""
If 32 scores are read, at most one of them causes a rescale, whatever their order: the tile's maximum. The
last tile may be short; its empty places are filled with a score that is there, so that the maximum is
right, and with zeros before they are summed.
"""

# %% [markdown] course={"id": "d07.b2", "kind": "B", "role": "card"}
r"""
### Exercise 7-2 B: the first token and the masked one

8 minutes · difficulty 2/3 · 5 points

Open [attention.py](../course_lib/attention.py) and
[attention_single_pass.c](../kernels_pyx/c/attention_single_pass.c). What happens at the first token, and what at $-\infty$?

Cite `start`, where `online_softmax` sets M and S before the first token; `masked`, where it recognises a
masked token; `c_start`, where the C kernel starts M for every query; `why_zero`, the line of `v16_exp`
([v16.h](../kernels_pyx/c/v16.h); 7-3 explains the rest of it) that makes $e^{-\infty}$ a 0. Give `first_shrink`, the number that the first tile multiplies the sum by, and
`most_rescales`: how many rescales the C kernel does at most for 2,061 tokens.

Then explain: why is it harmless to shrink at the first token? Why may `online_softmax` not simply compute
the weight of a masked token, and why does a masked *later* token do no harm either way?
"""

# %% [markdown] course={"id": "d07.b2", "kind": "B", "role": "answer", "points": 5, "minutes": 8, "difficulty": 2}
r"""
<!-- ANSWER d07.b2 -->
Answer: …

Evidence: path:first-last
"""

# %% course={"id": "d07.b2", "kind": "B", "role": "evidence"}
# EVIDENCE d07.b2
d07_b2 = {
    "start": "",  # "path:first-last"
    "masked": "",  # "path:first-last"
    "c_start": "",  # "path:first-last"
    "why_zero": "",  # "path:first-last"
    "first_shrink": None,  # a number
    "most_rescales": None,  # a number
}

# %% course={"id": "d07.b2", "kind": "B", "role": "check"}
check("d07.b2", d07_b2)

# %% [markdown]
r"""
## 7-3 手写 exp Writing exp

So far `np.exp` did the work. Why write our own? First reason, **this machine**: two exponential functions,
both good, on 100,000 numbers. How often do they give the same float32?
"""

# %% tags=["nbval-ignore-output"]
x = np.linspace(-87, 0, 100_001, dtype=np.float32)
from_math = np.array([math.exp(value) for value in x], np.float32)
same = np.exp(x) == from_math
print(f"np.exp and math.exp give the same float32: {percent(same.mean())}   (this machine)")

# %% [markdown]
r"""
Your share may differ from the stored one, and that is the point: `exp` belongs to a library that chooses by
processor, and no standard says which bits are right. Addition, multiplication and division are different:
IEEE 754 says that each gives the float nearest to the exact result. **Build exp of those, and every machine
agrees.**

Second reason: speed. A softmax of 2,061 tokens takes 2,061 exponentials per head, and AVX2 and NEON, the vector
instructions of a PC and of an ARM board, have none.

### The school formula fails

$e^x = 1 + x + x^2/2! + x^3/3! + \dots$ Up to $x^7$ it is good near 0. *Predict* what that gives at −20, where
$e^{-20} = 0.000000002$.
"""

# %%
for value in (-0.3, -1, -5, -20):
    got = exp_recipe([value], 7, reduce=False)[0]
    print(f"x = {value:5}: polynomial {got:12.6g}   exact {math.exp(value):12.6g}")

# %% [markdown]
r"""
A negative weight, and a huge one. A polynomial is good only near 0. So bring every x near 0:

$$ x = n \ln 2 + r, \quad n \text{ whole}, \quad |r| \le \tfrac{\ln 2}{2} = 0.347
   \qquad\Longrightarrow\qquad e^x = 2^n \cdot e^r . $$

$2^n$ costs nothing: a float32 keeps its exponent in bits of its own. This **range reduction** on six numbers
(check the first with a calculator: $-1/\ln 2 = -1.44$):
"""

# %%
print("    x     n        r      e^r      2^n       e^r · 2^n       exact")
for value in (-1, 0.3, -0.5, -5, -20, -86):
    n_ = round(value / math.log(2))
    r = value - n_ * math.log(2)
    print(f"{value:5} {n_:5d} {r:8.4f} {math.exp(r):8.5f}   2^{n_:<5d} {math.exp(r) * 2.0**n_:12.6g} "
          f"{math.exp(value):12.6g}")

# %% [markdown]
r"""
### Three steps without exp

**Round to a whole number.** Near $1.5 \cdot 2^{23}$ floats have no fraction bits: they *are* the whole
numbers. Adding that number rounds, subtracting it again gives the result. Ties go to the even one.

**Make $2^n$.** A float32 is 23 bits of fraction, above them 8 bits that hold exponent + 127, then the sign. Write
$n + 127$ into the bits from 23 on, and read them as a float.

**Subtract $n \ln 2$ exactly.** This is where digits get lost. For $x = -80$ the product $n \ln 2$ is near 80, where
neighbouring float32 lie $8 \cdot 10^{-6}$ apart. It is rounded by up to half of that, so $r$ is off by
$4 \cdot 10^{-6}$, and $e^r$ by the same fraction: up to 64 times the distance of floats near it. The trick is old:
split $\ln 2$ into a part with few bits, so that $n$ times it needs no rounding, and a small rest.
"""

# %%
magic = np.float32(1.5 * 2**23)
halves = np.array([0.4, 0.5, 0.6, 1.5, 2.5, -0.5, -1.5], np.float32)
print("whole:", (halves + magic) - magic)
n_ = np.array([0, 1, -1, -3, -125], np.int32)
print("2^n:  ", ((n_ + 127) << 23).view(np.float32))
high, low = exponential.LN2_HIGH, exponential.LN2_LOW
print(f"ln 2 = {math.log(2):.12f} = {high} + {low:.9g};  {high} = {int(high * 512)}/512, so it has "
      f"{int(high * 512).bit_length()} bits")
print("n · high is exact for all n up to 127:",
      all(float(np.float32(i) * high) == i * float(high) for i in range(128)))

# %% [markdown]
r"""
### How wrong, in which unit?

An error of $10^{-9}$ is nothing beside 1 and everything beside $10^{-30}$. The unit is the **ulp** (unit in
the last place): the distance of two neighbouring float32 there. The nearest float is at most 0.5 ulp off;
nobody can do better.

*Predict* before you run: (a) up to which power must the polynomial go for an error below 3 ulp? (The first term left
out is the largest error: compare $0.347^n/n!$ with an ulp near 1, $6 \cdot 10^{-8}$.) (b) What do
you lose with one ln 2 instead of two parts? (c) With the whole number *below* instead of the *nearest*?
"""

# %%
x = np.linspace(-87, 0, 100_001, dtype=np.float32)


def worst(**choice):
    return np.abs(exponential.ulp_error(exp_recipe(x, **choice), x)).max()


print("largest error in ulp on 100,001 numbers from -87 to 0   (this machine)")
for degree in range(3, 9):
    print(f"  degree {degree}: {fmt(worst(degree=degree))}")
print("  degree 7, ln 2 in one part:", fmt(worst(parts=1)))
print("  degree 7, whole number below:", fmt(worst(nearest=False)))

# %% [markdown]
r"""
Every degree gains a factor of about fourteen, until rounding is all that is left: degree 8 buys nothing. Degree 6
seems to pass; we come back to it. The other two choices look like details and cost 66 and 12 ulp.

Where are these errors? *Predict* the shape of the first two panels: does the error grow with $|x|$? Smoothly?
"""

# %%
few = np.linspace(-87, 0, 3001, dtype=np.float32)
ways = {"ln 2 in one part": {"parts": 1}, "whole number below": {"nearest": False},
        "two parts, nearest": {}}
ulp_errors(few, {name: exponential.ulp_error(exp_recipe(few, **choice), few)
                 for name, choice in ways.items()}, label="this machine, 3,001 numbers")

# %% [markdown]
r"""
With one part the error grows with $|x|$, and by doubling: at 8, 16, 32 and 64, where the floats around $n \ln 2$ move
apart. For each $n$ it is another short stretch, up or down, as that one product happens to be rounded. With the whole
number below, $r$ reaches 0.69 instead of 0.35; there the polynomial is too low, at every $n$ alike. The third panel is
what is left when both are right: noise of one ulp, from rounding alone.
"""

# %% [markdown] course={"id": "d07.a3", "kind": "A", "role": "card"}
r"""
### Exercise 7-3 A: exp within 3 ulp

18 minutes · difficulty 3/3 · 7 points · about 12 lines

Write `exp_poly(x)`: $e^x$ for a float32 array, numbers from −87 to 0. Results are float32, at most 3 ulp
off for **every** float of the range. Below −87 return 0. No exponential function of any library: the checks
take `np.exp`, `np.exp2`, `np.power`, `math.exp` and their like away while they call you, and notice `e ** x`.
Everything else of NumPy is there.

<details><summary>Hint 1: the plan</summary>

n = whole number nearest to x/ln 2 (`np.rint`, or the number $1.5 \cdot 2^{23}$); r = x − n·high − n·low; polynomial in r; times 2^n; `np.where` for what
lies below −87.

</details>

<details><summary>Hint 2: the polynomial</summary>

Horner's rule: start with the highest coefficient and go down, `p = p * r + c`. The coefficients are
1/7!, 1/6!, …, 1/1!, 1. Make them `np.float32`.

</details>

<details><summary>Hint 3: numbers far below -87</summary>

$2^{n}$ by bits has no place for $n < -126$. `np.maximum(x, np.float32(-87))` first, and the zeros last.

</details>

<details><summary>Hint 4: "off by 70 ulp near -86"</summary>

ln 2 in one part. 0.693359375 is 355/512; the rest is ln 2 minus that.

</details>
"""

# %% course={"id": "d07.a3", "kind": "A", "role": "answer", "points": 7, "minutes": 18, "difficulty": 3}
# EXERCISE d07.a3
def exp_poly(x):
    """e^x of float32 numbers up to 0, within 3 ulp; 0 below -87.

    x: float32 [n]. Returns float32 [n].
    >>> exp_poly(np.array([0, -1e5], np.float32))
    array([1., 0.], dtype=float32)
    """
    raise NotImplementedError("d07.a3")


# %% course={"id": "d07.a3", "kind": "A", "role": "check"}
check("d07.a3", exp_poly)

# %%
my_exp = solved_or(exp_poly, exponential.exp_poly)
picked = exp_walk.floats(0, exp_walk.bits(-87.0) + 1, True, every=4001)
error = np.abs(exponential.ulp_error(my_exp(picked), picked))
print(f"{len(picked):,} floats from {picked[-1]:g} to 0, evenly over their bits")
print("all within 3 ulp:", bool(error.max() <= 3), "· the nearest float, or one beside it:",
      bool(error.max() <= 1.5))

# %% [markdown]
r"""
### Read together: the kernel's exp

All kernels of this course use this one: {see kernels_pyx/c/v16.h "static inline v16 v16_exp" "-87.0f);"}.
You know every line of it. `v16_fma(a, b, c)` is a **fused multiply-add** (融合乘加): $a \cdot b + c$, rounded
once and not twice.
"""

# %%
print(c_function("v16.h", "v16_exp"))

# %% [markdown]
r"""
The comment promises two things: within 3 ulp, and the same bits everywhere. Neither should be believed. The
second first: every **variant** (the same C, compiled for other instructions) that this machine can run, and the
definition in NumPy ({see course_lib/exponential.py exp_poly}), which is no C at all.
"""

# %% tags=["nbval-ignore-output"]
wanted = exponential.exp_poly(picked)
results = {name: exp_walk.compute(name, picked) for name in kernels_pyx.VARIANTS}
for name, got in {"NumPy definition": wanted, **results}.items():
    print(f"{name:>18}  bits {hashlib.sha256(got).hexdigest()[:12]}")

# %%
print("every variant here gives the bits of the definition:",
      all(got.tobytes() == wanted.tobytes() for got in results.values()))

# %% [markdown]
r"""
Now the bound. A sample is not a proof: between two samples lie thousands of floats. Remember degree 6, at most 2.9
ulp on 100,001 numbers. Here are two that the sample missed:
"""

# %%
missed = np.array([-26.6860046, -48.8668213], np.float32)
for degree in (6, 7):
    print(f"degree {degree}:", "  ".join(
        f"{e:.2f} ulp" for e in np.abs(exponential.ulp_error(exp_recipe(missed, degree), missed))))

# %% [markdown]
r"""
But there are only so many float32: **every one** of them can be tried. It takes minutes, so the walk of our kernel is
**recorded**; a test walks three stretches of it again.
"""

# %%
run = load_run("exp_all_floats")
print("command:", run["command"], "· version", run["course_version"], "· date", run["date"])
print("variants walked, equal in every bit:", ", ".join(run["summary"]["variants"]))
for name in ("up_to_0", "all"):
    row = run["summary"][name]
    print(f"{row['floats']:13,d} floats from {row['from']:g} to {row['to'] + 0.0:g}: largest error "
          f"{row['max_ulp']:.3f} ulp at x = {row['worst_x']:.9g}; "
          f"{percent(row['correct_share'])} are the nearest float")

# %%
record = run["records"][exp_walk.stretch_of(exp_walk.ExpWalk(), -1.5)]
again = exp_walk.exp_records(None, exp_walk.ExpWalk(), record["index"], every=257)[0]
print(f"record {record['index']}: {record['floats']:,} floats from {record['from']:g} to "
      f"{record['to']:g}, largest error {record['max_ulp']} ulp   (recorded)")
print("every 257th of them again: largest error not above the recorded one:",
      again["max_ulp"] <= record["max_ulp"], "  (this machine)")

# %% [markdown]
r"""
So the bound of 3 ulp is generous; all floats stay below 1. And this is a *proof*, by trying all cases, for
every variant in the list. For NEON, the instruction set of ARM boards,
[tools/arm64/exp_walk.py](../tools/arm64/exp_walk.py) walks the same floats on an emulated Cortex-A76: all 268
stretches gave the recorded digest (**recorded**; it takes half an hour). A library function such as `np.exp` has an
accuracy too, but promises no bits.
"""

# %% [markdown] course={"id": "d07.b3", "kind": "B", "role": "card"}
r"""
### Exercise 7-3 B: why AVX2 and NEON agree

8 minutes · difficulty 3/3 · 5 points

AVX2 (x86) computes 8 floats an instruction, NEON (ARM) 4. Why do both give the same bits? Open
[v16_avx2.h](../kernels_pyx/c/v16_avx2.h), [v16_neon.h](../kernels_pyx/c/v16_neon.h) and [setup.py](../setup.py).

Cite the fused multiply-add in each: `avx2`, `neon`; and `no_other_fusing`, the line that forbids the compiler
to fuse on its own. Give `multiply_adds`, how many `v16_fma` one `v16_exp` (printed above) executes.

Then explain: which property of each operation makes the bits equal? `-ffast-math` lets a compiler treat floats as
if they were real numbers: why would it break this? And why may the *sum* of a softmax differ between two correct
programs although every exponential is equal?
"""

# %% [markdown] course={"id": "d07.b3", "kind": "B", "role": "answer", "points": 5, "minutes": 8, "difficulty": 3}
r"""
<!-- ANSWER d07.b3 -->
Answer: …

Evidence: path:first-last
"""

# %% course={"id": "d07.b3", "kind": "B", "role": "evidence"}
# EVIDENCE d07.b3
d07_b3 = {
    "avx2": "",  # "path:first-last"
    "neon": "",  # "path:first-last"
    "no_other_fusing": "",  # "path:first-last"
    "multiply_adds": None,  # a number
}

# %% course={"id": "d07.b3", "kind": "B", "role": "check"}
check("d07.b3", d07_b3)

# %% [markdown]
r"""
## What it costs here

The three programs of today as the kernels run them, **this machine**: one layer, one token, 2,061 tokens in
the cache. *Predict:* is one pass faster than two?
"""

# %% tags=["nbval-ignore-output"]
long = np.random.default_rng(0)
k_long, v_long = long.standard_normal((2, 2, 2061, 64)).astype(np.float32)
q_long = long.standard_normal((4, 64)).astype(np.float32)


def median_ms(run, repeats=9):
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        run()
        times.append(1e3 * (time.perf_counter() - start))
    return sorted(times)[repeats // 2]


print(f"{'':>20} {'two passes':>11} {'one pass':>9}   ms, this machine")
for name in ("numpy", *kernels_pyx.VARIANTS[:2]):  # the best two of this machine
    with backend.using(name):
        print(f"{name:>20} {median_ms(lambda: attention.two_pass(q_long, k_long, v_long)):11.3f} "
              f"{median_ms(lambda: attention.online(q_long, k_long, v_long), 3):9.3f}")

# %% [markdown]
r"""
For a *single* query the pass that is saved is one over the scores, 8 kB a head; K and V are read once either
way. So in C the two are close, and in Python a loop over tokens is a disaster. The one-pass form wins where the
scores would not fit: a long prompt's $n^2$ (day 14), and 8-bit rows that are widened as they are read (day 9).

## Summary

* Attention is a weighted mean of values; query heads share KV heads by $\lfloor h G / H \rfloor$, and a wrong
  map is silent.
* Softmax sees differences only, so the maximum is subtracted; kept as a *running* maximum with a rescaled sum
  and accumulator, one pass is enough.
* exp is a whole number, a rest and a polynomial; made of additions and multiplications alone it gives the same
  bits everywhere, and all floats of its range can be tried.

One formula: $(M, S, A) \to (s,\; S e^{M-s} + 1,\; A e^{M-s} + v)$ for a new maximum $s$. One number: 1,118,699,521
floats from −87 to 0, none more than 1 ulp off.

What to read next: day 8, the KV cache: what all these keys and values weigh, and where they lie.
[Day 9](day09_q8_kv.ipynb) makes them four times smaller.
"""
