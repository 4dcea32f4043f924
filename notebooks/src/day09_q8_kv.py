# %% [markdown]
r"""
# Day 9/30 · q8 KV 缓存 The q8 KV cache

You need: Python, NumPy indexing, the dot product. Attention is recapped below; day 10 is not needed.

After today you can

* quantize a row of the KV cache by hand and bit for bit in NumPy (9-1 写入路径),
* say where an int8 attention kernel rounds, and bound what that does to its output (9-2 单遍扫描),
* tell an error that averages out from one that does not, and check a published experiment for it
  (9-3 精度对照).

About 80 minutes with the six exercises. The notebook itself runs in a few seconds, offline.

Numbers about sizes, errors and published claims carry one of four labels: **quoted** (printed by a
source, which we name), **this machine** (measured in the cell), **derived** (computed from other
numbers), **recorded** (a long run, stored with the command that makes it). A printed number without a
label is a toy, a count or a check from the cell above it. Words that you miss are in the
[glossary](../docs/glossary.md).
"""

# %% tags=["nbval-ignore-output"]
import hashlib
import inspect
import math
import time

import numpy as np

import kernels_pyx
from course_lib import attention, backend, kvcache, quant
from course_lib.classroom import check, solved_or
from course_lib.engine import Engine, Session, generate_from
from course_lib.lab import bias, kv_precision
from course_lib.lab.needle import NeedleOptions, prompt_of
from course_lib.lab.published import quoted
from course_lib.lab.runs import load_run
from course_lib.paths import MODELS
from course_lib.show.c_source import c_function
from course_lib.show.quantization import QuantizationErrorExplorer, quantize_with_outlier
from course_lib.show.rounding import RoundingBiasExplorer
from course_lib.show.text import fmt, percent

print(backend.info())

# %% [markdown]
r"""
## One cache, four sizes

A language model keeps two rows of numbers for every token it has read: a *key* and a *value*, in
every layer, for every KV head. It reads all of them again for every token it writes. So their bytes
are paid twice: once as memory, and once per generated token as traffic.

The article's model has 8 KV heads of 128 values. Bytes of K and V for **one token in one layer**:
"""

# %%
for dtype in ("f32", "f16", "q8", "q4"):
    size = kvcache.kv_bytes_per_token(8, 128, dtype)
    print(f"{dtype:>4} {size:5d} bytes, {size / 4096:.3f} of f16   (derived)")

said = quoted("q8_bandwidth", "scan_ratio_vs_f16")
print(f"quoted: × {said.value}   ({said.source}, {said.conditions})")

# %% [markdown]
r"""
q8 stores each number in one byte instead of two or four, and adds one float32 scale per row:
$2 \cdot 8 \cdot (128 + 4) = 2112$.

The article's "× 0.52" is $2112/4096$. Read it with care: it compares with f16, and it counts what
one decode step **scans**. It is not the memory. By default the article's engine keeps its float32 rows
beside the q8 rows, as a mirror; the cache of this course does not. Here is the same ledger for the model that ships with this course, with a
conversation of 2,061 tokens.
"""

# %%
engine = Engine.load(MODELS / "needle-qwen3")
config = engine.config
prompt = prompt_of(engine, NeedleOptions(tokens=2061), 0)
shape = (config.num_hidden_layers, config.num_key_value_heads, config.head_dim)
print("layers, KV heads, values a head:", shape, "· tokens:", len(prompt.ids), " (derived)")
for row in kvcache.kv_ledger(*shape, len(prompt.ids)):
    print(f"{row.name:>15}: scans {row.scan_bytes:9,d} bytes (× {row.scan_vs_f16:.3f} of f16)"
          f"   keeps {row.memory_bytes:9,d} (× {row.memory_vs_f16:.3f})")

# %% [markdown]
r"""
Two surprises. On 64 values a head the four bytes of scale weigh more, so q8 is × 0.531 here, not
× 0.516. And with the mirror **memory goes up**, to two and a half times f16, while the scan shrinks.
(The line with probe keys: for choosing blocks, day 10, a q8 cache keeps every fourth key a second time.)

Now the question that matters. We hide one sentence in 2,061 tokens of notes and ask for it.
*Predict:* with every key and value squeezed into one byte, does the model still answer?
"""

# %%
print("hidden:  ", prompt.fact.sentence, "\nquestion:", prompt.question)
sessions, made = {}, {}
for kv in ("f32", "q8"):
    sessions[kv] = engine.prefill(prompt.ids, kv=kv, importance="none")
    made[kv] = generate_from(sessions[kv], 16)
    print(f"{kv}: {engine.decode(made[kv].ids)!r}   (this machine)")

moved = np.abs(sessions["q8"].logits - sessions["f32"].logits).max()
print("same tokens:", made["q8"].ids == made["f32"].ids, "· logits moved:", moved > 0)
print("every choice was clear by more than the logits moved:",
      min(made["f32"].logits_margin) > moved)

# %% [markdown]
r"""
The text is the same, token for token, although the numbers behind it are not. q8 moved the logits
(a logit is the score of one possible next token) a little; no choice was close enough to flip. That is
what people mean by "near-lossless", and it is
a weak statement: it says that *this* model was sure about *this* answer.

Today we look under it. How large is the error, where does it come from, and would we notice if a
quantizer had a bug?

## Recap: attention in six numbers

1. Each token leaves a key row and a value row. They never change, so they are cached.
2. The newest token brings a query row $q$.
3. Its score for token $t$ is $s_t = q \cdot k_t / \sqrt d$.
4. Softmax turns scores into weights $w_t = e^{s_t} / \sum_u e^{s_u}$ that add up to 1.
5. The output is the weighted mean of the value rows, $\sum_t w_t v_t$.
6. Several query heads may read one KV head. Today one head is enough.

Three keys of two numbers each, six numbers in all:
"""

# %%
k = np.array([[2, 0], [0, 1], [1, 1]], np.float32)
v = np.array([[1, 0], [0, 1], [1, 1]], np.float32)
q = np.array([1, 0], np.float32)

scores = k @ q / np.sqrt(np.float32(2))
weights = attention.softmax(scores)
print("scores ", scores.round(3), "\nweights", weights.round(3), "\noutput ", (weights @ v).round(3))
print("course_lib says", attention.two_pass(q[None], k[None], v[None])[0].round(3))

# %% [markdown]
r"""
## 9-1 写入路径 The write path

When a token's key is written, it becomes int8. Take six numbers and do it by hand.

1. Largest magnitude: $m = 2$. Every code must fit −127 … 127, so one step is $m/127$.
2. $127/m = 63.5$. Multiply each number by it.
3. Round: add one half, round **down**.

Cover the last three columns and fill in the codes before you run the cell. The second one is a tie.
"""

# %%
six = np.array([2, -1, 0.5, -0.25, 0.1, -0.03], np.float32)
m = np.abs(six).max()
y = six * (np.float32(127) / m)
codes = np.floor(y + np.float32(0.5)).astype(np.int8)
scale = m / np.float32(127)
print("    x        y     code   code·scale   error in steps")
for x_i, y_i, code in zip(six, y, codes):
    print(f"{x_i:5.2f} {y_i:9.3f} {code:6d} {code * scale:11.4f} {(code * scale - x_i) / scale:11.3f}")

# %% [markdown]
r"""
−63.5 lies exactly between −64 and −63. Adding one half gives −63, and rounding down keeps it: ties
go **up**. No error is larger than half a step.

$$ m = \max_i |x_i|, \qquad \text{scale} = \frac{m}{127}, \qquad
   \text{code}_i = \Big\lfloor x_i \cdot \frac{127}{m} + \tfrac12 \Big\rfloor, \qquad
   |x_i - \text{code}_i \cdot \text{scale}| \le \frac{\text{scale}}{2} $$

One row, one scale: K and V each get one scale per token and head. A row of zeros would divide by
zero, so a row with $m < 10^{-6}$ uses $m = 1$: all codes 0, scale $1/127$.

The formula looks harmless. In float32 it is not: $x \cdot (127/m)$ and $x / (m/127)$ are the same
number on paper. *Predict:* can they give different codes? For how many of the 197 rows
$[m, m/2]$ with $m = 3 \dots 199$?
"""

# %%
tops = np.arange(3, 200, dtype=np.float32)
half, f127, one_half = tops / 2, np.float32(127), np.float32(0.5)
multiplied, divided = half * (f127 / tops), half / (tops / f127)  # 63.5 on paper
differ = np.floor(multiplied + one_half) != np.floor(divided + one_half)
print("rows whose codes differ:", int(differ.sum()), "of", len(tops))
for i in np.flatnonzero(differ)[:4]:
    print(f"m = {tops[i]:.0f}: {half[i]} · (127/m) = {multiplied[i]}"
          f"   {half[i]} / (m/127) = {divided[i]}")

# %% [markdown]
r"""
Each operation rounds to 24 bits, and the two orders round differently. The order of operations is
part of a format. Two programs that must agree bit for bit need the same one; ours is
**127/m first**. (All digits are shown because division and multiplication are exact IEEE
operations: your machine prints the same.)

### One large number in the row

One scale serves the whole row, so one large number sets the step for all its neighbours. Our six
numbers again, and once more with 16 instead of 2:
"""

# %%
for factor in (1, 8):
    r = quantize_with_outlier(six, outlier=factor)
    print("row:  ", r["x"], "  step", fmt(r["scale"]))
    print("codes:", r["q"], "\nback: ", r["read_back"].round(3), "\n")

# %% [markdown]
r"""
0.1 came back as 0.126, and −0.03 is gone.

Now a real row of the model. **Write down a prediction first:** raise the largest value of a key,
× 2, × 4 … × 32. (a) Does the error of the *other* values stay, grow in proportion, or grow faster?
(b) How many of the 64 values have vanished, that is, read back as 0, at × 32? (c) Is a value row hit
less, more, or as much?

Then move `outlier ×`. `row` and `rounding rule` are yours to try; the text under the picture states
every number that the picture shows.
"""

# %%
QuantizationErrorExplorer(engine, row=six, source="k", layer=config.num_hidden_layers - 1,
                          token=200, outlier=8)

# %% [markdown]
r"""
The same for a key and a value of the 2,061-token prompt: the rows of the token that we hid.
"""

# %%
layer, token = config.num_hidden_layers - 1, prompt.value_span[0]
rows = sessions["f32"].cache.rows(layer)
print(f"layer {layer}, KV head 0, token {token} {engine.decode([prompt.ids[token]])!r}"
      "   (this machine)")
print("outlier |   K step  mean|error| of the rest  zeros |   V step  mean|error| of the rest  zeros")
for factor in (1, 2, 4, 8, 16, 32):
    line = f"   × {factor:>2} "
    for row in (rows.k[0, token], rows.v[0, token]):
        r = quantize_with_outlier(row, outlier=factor)
        rest = np.delete(np.abs(r["error"]), r["peak"]).mean()
        line += f"| {r['scale']:8.2g} {rest:24.2g} {int((r['q'] == 0).sum()):6d} "
    print(line)

# %% [markdown]
r"""
The step follows the outlier in proportion, and on average so does every other error; then values
begin to vanish. Keys and values fare alike. Nothing warns you: the row still uses 8 bits, but they
are spent on numbers that are not there. This is why a scale belongs to one head of one token and not
to more.
"""

# %% [markdown] course={"id": "d09.a1", "kind": "A", "role": "card"}
r"""
### Exercise 9-1 A: the write path, bit for bit

15 minutes · difficulty 2/3 · 5 points · about 8 lines

Write `kv_quantize_per_head`. It takes the rows of one token, `[heads, d]`, or of several,
`[tokens, heads, d]`, and returns int8 codes of the same shape and one float32 scale per row.
Everything in float32, in the order of the formula above: 127/m, times x, plus one half, floor.

<details><summary>Hint 1: the axis</summary>

`np.abs(x).max(axis=-1, keepdims=True)` has one maximum per row and still broadcasts against `x`.

</details>

<details><summary>Hint 2: "expected dtype float32, got float64"</summary>

A Python float in the middle can be harmless, an array of float64 is not. Write constants as
`np.float32(127)`; `np.where(condition, np.float32(1), m)` keeps float32.

</details>

<details><summary>Hint 3: "divide by zero"</summary>

Replace a tiny m by 1 *before* you divide.

</details>
"""

# %% course={"id": "d09.a1", "kind": "A", "role": "answer", "points": 5, "minutes": 15, "difficulty": 2}
# EXERCISE d09.a1
def kv_quantize_per_head(x):
    """Quantize K or V rows to int8, one scale per token and head.

    x: float32 [heads, d] or [tokens, heads, d]. Returns (codes int8 of x's shape, scale float32
    of x's shape without d). m = max|x| of a row, 1 where that is below 1e-6; scale = m/127;
    codes = floor(x * (127/m) + 0.5) in float32. ValueError where x holds NaN or infinity.
    >>> kv_quantize_per_head(np.array([[1.27, -0.5]], np.float32))
    (array([[127, -50]], dtype=int8), array([0.01], dtype=float32))
    """
    raise NotImplementedError("d09.a1")


# %% course={"id": "d09.a1", "kind": "A", "role": "check"}
check("d09.a1", kv_quantize_per_head)

# %% [markdown]
r"""
Once its checks pass, your function runs on the model's own rows here (until then, ours does): every
key of layer 0, compared with what the q8 cache stored. (Why layer 0? In the q8 run, later layers have
already met rounded rows, so their float keys are a little different.)
"""

# %%
quantize = solved_or(kv_quantize_per_head, quant.quantize_rows)
stored, floats = sessions["q8"].cache.rows(0), sessions["f32"].cache.rows(0)
codes, scales = quantize(np.ascontiguousarray(floats.k.transpose(1, 0, 2)))
print("rows:", scales.size, "· codes equal to the cache:",
      bool((codes.transpose(1, 0, 2) == stored.k).all()),
      "· scales equal:", bool((scales.T == stored.k_scale).all()))
print("codes from", int(codes.min()), "to", int(codes.max()))

# %% [markdown]
r"""
### Read together: where a row enters the cache

This is the method that the engine calls for every layer. Read it for three things: what is checked,
what is still unwritten when a check fails, and how many heads and tokens one call of
`quantize_rows` serves.
"""

# %%
print(inspect.getsource(kvcache.KVCache.append))

# %% [markdown]
r"""
The order is the point. Both arrays are checked, then both are quantized, then memory is reserved,
and only then something is written. A NaN in V leaves K unwritten too; otherwise the cache would hold
a key without its value.

`quantize_rows` gets `[heads, tokens, d]` and takes its maximum over the last axis only. It is there
twice: a compiled kernel does the work, and the NumPy lines below the call are the definition, which is
what the exercise reads. Their loop over heads is inside NumPy.
"""

# %% [markdown] course={"id": "d09.b1", "kind": "B", "role": "card"}
r"""
### Exercise 9-1 B: one head, one scale

12 minutes · difficulty 2/3 · 5 points

Open [quant.py](../course_lib/quant.py) and [kvcache.py](../course_lib/kvcache.py), both in
`course_lib`. Why does one head share one scale: why not one
scale per value, and why not one for all heads? And why can the code −128 never occur, although int8
has it?

Cite, as `"path:first-last"`: `max_of_one_head`, where `quantize_rows` takes the maximum that the
values of one head share; `write_path`, where the cache quantizes new rows; `clamp`, where codes are
limited. Give `lowest_code`, the lowest code there can be, and `scales_per_token`: how many scales
one token needs in one layer with 8 KV heads, K and V together.

<details><summary>Hint</summary>

Write the score $\sum_i q_i \cdot (\text{code}_i \cdot s)$ and see what you can take out of the sum.

</details>
"""

# %% [markdown] course={"id": "d09.b1", "kind": "B", "role": "answer", "points": 5, "minutes": 12, "difficulty": 2}
r"""
<!-- ANSWER d09.b1 -->
Answer: …

Evidence: path:first-last
"""

# %% course={"id": "d09.b1", "kind": "B", "role": "evidence"}
# EVIDENCE d09.b1
d09_b1 = {
    "max_of_one_head": "",  # "path:first-last"
    "write_path": "",  # "path:first-last"
    "clamp": "",  # "path:first-last"
    "lowest_code": None,  # a number
    "scales_per_token": None,  # a number
}

# %% course={"id": "d09.b1", "kind": "B", "role": "check"}
check("d09.b1", d09_b1)

# %% [markdown]
r"""
## 9-2 单遍扫描 One query, one pass

Attention as in the recap walks over the tokens twice: once over K for the scores, once over V with
the finished weights. A decode kernel would like to meet each token once and forget it.

The obstacle is the softmax: weights are divided by a sum that is known only at the end, and the
largest score must be subtracted first, or $e^{s}$ overflows. The way out is to keep three running
things: the maximum so far $M$, the sum $S$ and the accumulator $A$, both **relative to $M$**. When a
larger score arrives, shrink $S$ and $A$ by $e^{M_{\text{old}} - M_{\text{new}}}$ and go on.

Six scores; every value row is just the number 0, 1, … 5:
"""

# %%
scores = np.array([1.0, 0.0, 2.0, -1.0, 2.0, 0.5])
M, S, A = -np.inf, 0.0, 0.0
print("score   M     shrink     S       A")
for t, s in enumerate(scores):
    shrink = np.exp(M - s) if s > M else 1.0
    M, S, A = max(M, s), S * shrink, A * shrink
    S, A = S + np.exp(s - M), A + np.exp(s - M) * t
    print(f"{s:5.1f} {M:5.1f} {shrink:8.3f} {S:8.3f} {A:8.3f}")
print("A / S =", fmt(A / S), "· with softmax:", fmt(attention.softmax(scores) @ np.arange(6)))

# %% [markdown]
r"""
Look at the third line: a new maximum, so everything gathered before shrinks to 0.37 of itself. The
equal score two lines later changes nothing. One pass, same result.

### In int8

The kernel of article 9-2 goes one step further. It rounds the **query** too, to int8, one scale per
32 values. Then a dot product of 32 values is made of integers:

$$ q \cdot k_t \;\approx\; \text{scale}_t \sum_{g} \text{qscale}_g
   \underbrace{\sum_{i \in g} \text{qcode}_i \cdot \text{kcode}_{t,i}}_{\text{exact in int32}} $$

The inner sum is at most $32 \cdot 127 \cdot 127 = 516{,}128$: no rounding there. So numbers are
rounded to int8 at three places, and at two moments:

| place | when | group | ties |
|---|---|---|---|
| K row | on write, once | one head (64 or 128 values) | up |
| V row | on write, once | one head | up |
| query | on read, every step | 32 values | away from zero |

All else is float32 rounding. *Predict* which of the three does the most harm on our model, and how
much finer float32 is. First we need real queries: the cell runs the prompt through the model's
layers once more and keeps what attention is given for the last token.
"""

# %%
seen = []


def keep(layer, q, k, v):
    seen.append((q[:, -1].copy(), k, v))
    return attention.causal_attention(q, k, v)


engine.model.hidden(prompt.ids, 0, keep)
for name, rows in zip("qkv", seen[0]):
    print(name, rows.shape, rows.dtype)

# %%
def q_codes(q):
    codes, scale = quant.quantize_blocks(q)
    return (codes.reshape(*scale.shape, 32) * scale[..., None]).reshape(q.shape)


q8 = kv_precision.quantize_and_read_back
places = {
    "K only": lambda q, k, v: attention.two_pass(q, q8(k), v),
    "V only": lambda q, k, v: attention.two_pass(q, k, q8(v)),
    "query only": lambda q, k, v: attention.two_pass(q_codes(q), k, v),
    "all three, one pass": lambda q, k, v: attention.single_pass_q8(
        q, *quant.quantize_rows(k), *quant.quantize_rows(v)),
    "float32, one pass": attention.online,
}
exact = [attention.two_pass(*rows) for rows in seen]
size = np.mean([np.abs(out).mean() for out in exact])
off = {name: np.mean([np.abs(f(*rows) - out).mean() for rows, out in zip(seen, exact)]) / size
       for name, f in places.items()}
print("mean |error| / mean |output|, all layers and heads   (this machine)")
for name, error in off.items():
    print(f"{name:>20}: " + (f"{error:.2g}" if error > 1e-5 else "below 1e-5"))
three = math.hypot(*list(off.values())[:3])
print(f"{'√(K² + V² + query²)':>20}: {three:.2g}   (derived)")

# %% [markdown]
r"""
V does the most harm here: its errors go straight into the output, while those of K and of the query
only shift weights. And the three together are as large as the root of the sum of their squares. So
they add like independent errors: they neither help nor hurt each other. float32 itself is hundreds of
times finer.

### How far can one rounding push the output?

Measured errors tell what happened. A bound tells what *can* happen, so it is what a test needs. You
will derive one for the query: same q8 rows, and the query once in float, once in int8.
"""

# %% [markdown] course={"id": "d09.a2", "kind": "A", "role": "card"}
r"""
### Exercise 9-2 A: one pass, with a bound

30 minutes · difficulty 3/3 · 8 points · about 25 lines

One query head `q` of d values (a multiple of 32), and the q8 rows of its KV head. Return the pair
`(out, bound)`.

* `out`: attention with the int8 query, in one pass over the tokens with running M, S and A. Round q
  per 32 values: m = max|q| of the group (1 below 1e-6), code = q·(127/m), ties **away from zero**.
* `bound`: one number that no component of `out` can differ by from `two_pass` over the same rows
  with the float query, *whatever* the rounding errors of q are within half a step. Zero error is
  not a bound, and neither is a million: the checks accept up to three times the one in the hints.

<details><summary>Hint 1: rounding away from zero</summary>

`np.sign(y) * np.floor(np.abs(y) + 0.5)` rounds −1.5 to −2.

</details>

<details><summary>Hint 2: how far can one score move?</summary>

In group g, each $q_i$ is off by at most half a step, $s_g/2$. Then the score of token t is off by at
most $e_t = \frac{\text{kscale}_t}{\sqrt d} \sum_g \frac{s_g}{2} \sum_{i \in g} |\text{kcode}_{t,i}|$.
Let ε be the largest $e_t$.

</details>

<details><summary>Hint 3: from scores to weights to the output</summary>

Each $e^{s_t}$ changes by a factor between $e^{-ε}$ and $e^{ε}$, and so does their sum. So each weight
changes by a factor of at most $e^{2ε}$, that is, by at most $(e^{2ε} - 1)\,w_t$. The weights add up
to 1, so no output component moves by more than $(e^{2ε} - 1) \max |v|$. (There are sharper ways.)

</details>

<details><summary>Hint 4: int8 overflows</summary>

`int8 * int8` wraps around at 128. Widen the codes to int32 before you multiply.

</details>
"""

# %% course={"id": "d09.a2", "kind": "A", "role": "answer", "points": 8, "minutes": 30, "difficulty": 3}
# EXERCISE d09.a2
def single_pass_q8_attention(q, kq, k_scale, vq, v_scale):
    """Attention of one query head with an int8 query, one pass over q8 rows, and an error bound.

    q: float32 [d], d a multiple of 32; kq, vq: int8 [n, d], n >= 1; k_scale, v_scale: float32
    [n]. Returns (out float [d], bound float): no component of out differs from two_pass with the
    float query over the same rows by more than bound.
    >>> row, one = np.full((1, 32), 127, np.int8), np.ones(1, np.float32)
    >>> out, bound = single_pass_q8_attention(np.ones(32, np.float32), row, one / 127, row, one)
    >>> float(out[0])  # one token has all the weight
    127.0
    """
    raise NotImplementedError("d09.a2")


# %% course={"id": "d09.a2", "kind": "A", "role": "check"}
check("d09.a2", single_pass_q8_attention)

# %%
def ours(q, *rows):
    return attention.single_pass_q8(q[None], *(r[None] for r in rows))[0], None


single_pass = solved_or(single_pass_q8_attention, ours)
q, k, v = seen[-1]
for h in range(len(q)):
    kh = attention.kv_head(h, len(q), len(k))
    rows = (*quant.quantize_rows(k[kh]), *quant.quantize_rows(v[kh]))
    out, bound = single_pass(q[h], *rows)
    float_query = attention.two_pass(q[h][None], *(rows[i][None] for i in (0, 2, 1, 3)))[0]
    print(f"head {h}: measured {np.abs(out - float_query).max():.2g}   your bound:",
          "not yet" if bound is None else f"{bound:.2g}")

# %% [markdown]
r"""
When your bound appears, it is hundreds of times what you measure. Both are right. The bound lets all
rounding errors conspire, in every group and for every token. Real rounding errors do not know of each
other; they cancel. Keep this in mind: in 9-3 we meet errors that *do* conspire.

### Read together: the kernel

Find the three running things of the table, and where the integer dot is computed. One difference to
your loop: it works in blocks of 32 tokens, one shrink a block, as the fast kernels do. And one
honest note: for speed in NumPy it computes all scores of a head before it starts; the pass over V is
the single one.
"""

# %%
print(inspect.getsource(attention._single_pass_head))

# %% [markdown]
r"""
### The same in C, and what an instruction set is for

NumPy's version says *what* is computed. What runs on your machine is usually C, compiled when the course
was set up: [attention_q8.c](../kernels_pyx/c/attention_q8.c). Here is its dot in plain C, and what ARM
chips do with a group of 32. With `V16_DOTPROD`, as on the board, `vdotq_s32` is **one instruction** for 16
products and 16 additions into four partial sums. The branch below it is for older chips.
"""

# %%
print(c_function("attention_q8.c", "q8_dot"))
print()
print(c_function("attention_q8_neon.h", "group_sums"))

# %% [markdown]
r"""
The whole numbers of a group may be added in any order, the sum is exact. Floats may not, another order
rounds differently. So the C code fixes every order once: here group after group, elsewhere 16 lanes and
then halves; and every instruction set keeps it. *Predict*: the cell sends this layer's queries through
every variant that this machine can run. Same bits, or only close? And NumPy, which adds in an order of
its own?
"""

# %% tags=["nbval-ignore-output"]
q8_rows = (*quant.quantize_rows(k), *quant.quantize_rows(v))
with backend.using("numpy"):
    reference = attention.single_pass_q8(q, *q8_rows)
for name in kernels_pyx.VARIANTS or ["no kernels compiled here"]:
    if name in kernels_pyx.VARIANTS:
        with backend.using(name):
            out = attention.single_pass_q8(q, *q8_rows)
        print(f"{name:>18}  bits {hashlib.sha256(out).hexdigest()[:12]}  "
              f"from NumPy {fmt(np.abs(out - reference).max())}")
    else:
        print(name)


# %% tags=["nbval-ignore-output"]
def median_ms(run, repeats=15):
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        run()
        times.append(1e3 * (time.perf_counter() - start))
    return sorted(times)[repeats // 2]


print(f"this machine: {len(q)} query heads over {k.shape[1]} tokens, one layer, one token")
for name in ("numpy", *kernels_pyx.VARIANTS):
    with backend.using(name):
        print(f"{name:>18} {median_ms(lambda: attention.single_pass_q8(q, *q8_rows)):8.3f} ms")

# %% [markdown]
r"""
`portable` is plain C, translated by the compiler alone. `portable-baseline`, if your list has it, was
translated for the oldest x86 chips: $a \cdot b + c$ with one rounding has no instruction there, so each one
is a call into the C library. Slow, and the same bits. **The bits are the promise; the speed is what the
machine makes of it.** `./course bench` holds every kernel against the memory of your machine.
"""

# %% [markdown] course={"id": "d09.b2", "kind": "B", "role": "card"}
r"""
### Exercise 9-2 B: three places that round

12 minutes · difficulty 2/3 · 5 points

Follow one number of the query, one of K and one of V from float32 to the output. Where does each
become int8, and at which moment: when the row is written, or when it is read? Which step *looks* as
if it rounded but is exact, and why?

Open [attention.py](../course_lib/attention.py) and [kvcache.py](../course_lib/kvcache.py) and cite
`rounds_q`, `rounds_k_and_v`, and `exact_dot`, the integer dot product. Name the rules as
`course_lib.quant.ROUNDING_RULES` does: `rule_for_q`, `rule_for_kv` (the cache's default). Give
`query_scales`, how many scales one query head of 128 values has.
"""

# %% [markdown] course={"id": "d09.b2", "kind": "B", "role": "answer", "points": 5, "minutes": 12, "difficulty": 2}
r"""
<!-- ANSWER d09.b2 -->
Answer: …

Evidence: path:first-last
"""

# %% course={"id": "d09.b2", "kind": "B", "role": "evidence"}
# EVIDENCE d09.b2
d09_b2 = {
    "rounds_q": "",  # "path:first-last"
    "rounds_k_and_v": "",  # "path:first-last"
    "exact_dot": "",  # "path:first-last"
    "rule_for_q": "",  # a word
    "rule_for_kv": "",  # a word
    "query_scales": None,  # a number
}

# %% course={"id": "d09.b2", "kind": "B", "role": "check"}
check("d09.b2", d09_b2)

# %% [markdown]
r"""
## 9-3 精度对照 Where the error comes from

Article 9-3 asks the right question in the right way. One query, 256 tokens, 128 values a head,
numbers like N(0, 1). Attention once over float rows, once over the same rows quantized and read back.
Only one thing differs, so the difference is the quantizer's. It prints this, **quoted**:
"""

# %%
def article(what):
    return quoted("q8_attention", what).number


print("conditions:", quoted("q8_attention", "mean_abs_diff").conditions)
for i in range(4):
    f, q_ = article(f"out_f{i}"), article(f"out_q{i}")
    print(f"out[{i}]: float {f:8.4f}   q8 {q_:8.4f}   difference {q_ - f:+.4f}")
step = article("avg_k_scale")
print(f"mean |difference| {article('mean_abs_diff')}   largest {article('max_abs_diff')}"
      f"   average step {step}")
print(f"mean / step = {fmt(article('mean_abs_diff') / step)}   (derived)")

# %% [markdown]
r"""
The article reads this as: every value is off by at most half a step, the mean is about half a step,
so nothing was amplified, and 误差源是"步长"而非"偏置", the source of the error is the step and not a
bias.

Look again before you agree. What do the four differences have in common? And is half a step what you
would *expect* of an output that is a weighted mean of 256 rows?

*Predict, in steps:* each value of V is off by something between −½ and +½ step, up as often as down.
The output averages 256 of them. Is its error about ½, ¼, or 1/30 of a step?
"""

# %%
spread = []
for seed in range(50):
    case = kv_precision.gaussian_case(seed)
    w = attention.softmax(case.k @ case.q / np.float32(math.sqrt(128)))
    spread.append(math.sqrt(float((w * w).sum())))
# A uniform error has standard deviation step/√12; independent ones add up as √Σw²; and the mean
# magnitude of a normal variable is √(2/π) of its standard deviation.
expected = math.sqrt(2 / math.pi) * np.mean(spread) / math.sqrt(12)
print(f"expected mean |error| from V alone: {fmt(expected)} steps   (derived)")
print(f"printed by the article: {fmt(article('mean_abs_diff') / step)} steps   (quoted)")

# %% [markdown]
r"""
About 1/40 of a step, twenty times less than printed. Errors that are up as often as down cancel. So
let us run the experiment ourselves, with the engine's own KV rule (`half_up`, the one you wrote in
9-1), on 50 seeds.
"""

# %%
mine = kv_precision.mean_over_seeds(50)
print(f"{'':>22} {'quoted':>9} {'this machine':>13}")
for name, theirs, value in (("mean |difference|", "mean_abs_diff", mine["mean_abs"]),
                            ("largest |difference|", "max_abs_diff", mine["max_abs"]),
                            ("average K step", "avg_k_scale", mine["mean_k_scale"])):
    print(f"{name:>22} {article(theirs):>9} {value:13.2g}")
print(f"{'mean / step':>22} {fmt(article('mean_abs_diff') / step):>9} "
      f"{mine['mean_abs'] / mine['mean_k_scale']:13.2g}")
print(f"{'positive differences':>22} {'4 of 4':>9} {percent(mine['positive_share']):>13}")

# %% [markdown]
r"""
Our mean error is eleven times smaller (fifteen times, counted in steps), and balanced: as many
differences up as down. Same formula, same sizes, another result. Something in the two programs
differs. The series' article 5-3 has the method: 只改一个变量, change one variable at a time. We have
two knobs: which rows are quantized, and how a number is rounded.
"""

# %%
print("mean |error| in steps, and the share of positive errors   (this machine, 50 seeds)")
print(f"{'rule':>10}" + "".join(f"{f'{part} quantized':>22}" for part in ("K", "V", "K and V")))
for rule in quant.ROUNDING_RULES:
    line = f"{rule:>10}"
    for parts in ("k", "v", "kv"):
        r = kv_precision.mean_over_seeds(50, rule, parts)
        line += f"{r['mean_abs'] / r['mean_k_scale']:>12.2g} {percent(r['positive_share']):>9}"
    print(line)

# %% [markdown]
r"""
Three rules agree: they round to nearest, and where ties go hardly matters. The fourth,
`trunc(y + 0.5)`, gives half a step and nothing but positive errors, like the printed experiment.
And it does so **through V alone**; with K alone the signs stay balanced.

Why that rule? In C, `(int)(y + 0.5f)` cuts the fraction off, *toward zero*. For positive y that is
rounding. For negative y it is not:
"""

# %%
y = six * (np.float32(127) / m)
for rule in ("half_up", "trunc"):
    print(f"{rule:>8}:", *(f"{c:5d}" for c in quant.round_to_int(y, rule)))
print("       y:", *(f"{value:5.1f}" for value in y))

# %% [markdown]
r"""
−15.9 became −15, −1.9 became −1. Every number below −½ lands one step too high, except those exactly
between two codes. **Predict** for random numbers: the mean error of `trunc` on negatives, on
positives, and over both, in steps. Then switch the rule.
"""

# %%
RoundingBiasExplorer(rule="trunc")

# %% [markdown]
r"""
On average one step on negatives, none on positives, half a step over both.

Now the mechanism. If every value of V is too high by $b$, the output is too high by $b$, because the
weights add up to one: $\sum_t w_t (v_t + b) = \sum_t w_t v_t + b$. Nothing cancels. An offset $b$ in
every value of K adds the same $b \sum_i q_i/\sqrt d$ to *all* scores, and the softmax does not see a
common shift. What is left of K is twice the error of the other rules, because its values are now off
by 0 or by 1 step, depending on their sign; but it goes up and down. That is the whole table above.

### How sure can one be?

Four of four differences are positive. Is that proof? Toss a coin four times. The exact **sign test**
counts: how likely is a split at least as uneven as the one observed, either way, if up and down are
equally likely?
"""

# %% [markdown] course={"id": "d09.a3", "kind": "A", "role": "card"}
r"""
### Exercise 9-3 A: a test for bias

12 minutes · difficulty 2/3 · 4 points · about 8 lines

Write `bias_test(errors)`. Zeros have no sign and do not count. Of the $n$ others, `positive` are
above 0. Let $k$ be the smaller of the two counts:

$$ p = \min\Big(1,\; \frac{2}{2^n} \sum_{i=0}^{k} \binom{n}{i}\Big) $$

Exact, not a normal approximation, for n up to 2,000.

<details><summary>Hint 1</summary>

`math.comb(n, i)` is a whole number of any size. Divide once, at the end.

</details>

<details><summary>Hint 2: "int too large to convert to float"</summary>

`a / b` of two Python integers is fine however large they are; `a * 0.5**n` is not.

</details>
"""

# %% course={"id": "d09.a3", "kind": "A", "role": "answer", "points": 4, "minutes": 12, "difficulty": 2}
# EXERCISE d09.a3
def bias_test(errors):
    """Exact two-sided sign test: are errors as often above zero as below?

    errors: numbers of any shape, zeros are left out. Returns {"n": how many counted, "positive":
    how many of them are above 0, "p": float}; p = 1.0 for n = 0. ValueError for NaN.
    >>> bias_test([0.1, 0.2, -0.1, 0.0])
    {'n': 3, 'positive': 2, 'p': 1.0}
    """
    raise NotImplementedError("d09.a3")


# %% course={"id": "d09.a3", "kind": "A", "role": "check"}
check("d09.a3", bias_test)

# %% [markdown]
r"""
The corrected table. Left, what the article printed. Then the same experiment, once with the biased
rule and once with the engine's KV rule (seed 0, all 128 output components).
"""

# %%
sign_test = solved_or(bias_test, bias.bias_test)
printed = [article(f"out_q{i}") - article(f"out_f{i}") for i in range(4)]
print(f"{'':>24} {'mean|Δ|':>8} {'max|Δ|':>8} {'mean/step':>9} {'positive':>10} {'p':>8}")
found = sign_test(printed)
print(f"{'article 9-3, quoted':>24} {article('mean_abs_diff'):8.2g} {article('max_abs_diff'):8.2g} "
      f"{article('mean_abs_diff') / step:9.2g} {found['positive']:>4} of {found['n']:>2} "
      f"{fmt(found['p']):>8}")
for rule in ("trunc", "half_up"):
    e = kv_precision.kv_error(kv_precision.gaussian_case(0), rule)
    found = sign_test(e.delta)
    print(f"{rule + ', this machine':>24} {e.mean_abs:8.2g} {e.max_abs:8.2g} "
          f"{e.mean_abs / e.mean_k_scale:9.2g} {found['positive']:>3} of {found['n']:>3} "
          f"{fmt(found['p']):>8}")
fair = mine["mean_abs"] / mine["mean_k_scale"] * step
print(f"half_up over 50 seeds, on the article's step: mean|Δ| = {fair:.1g}   (derived)")

# %% [markdown]
r"""
Read the p column with care. Four of four is p = 0.125: **no proof at all**. It was a reason to look.
What convinces is the rest: mean/step ≈ ½ where honest rounding gives 1/30, and one rule, out of four,
that reproduces it.

So our numbers say: *for that experiment*, step and bias are the other way round. What it shows is a
bias of half a step, which comes from a rounding rule. The engine's own KV rule does not have it; there
the error is about 1/30 of a step. The article's conclusion, that q8 rows are a good bargain, becomes
stronger by this, not weaker.

The rule was not made up for this lesson: the engine's public source used `trunc(y + 0.5)` in its
older weight and activation quantizers. We do not have the article's test program, so "it used that
rule" remains an inference, a well-supported one.

### Two checks that cost little

The average step was 0.01719. Multiply by 127, and you have the average maximum of a row:
"""

# %%
rng = np.random.default_rng(0)
normal = np.abs(rng.standard_normal((20_000, 128), np.float32)).max(axis=1).mean()
print(f"average max|x| of the article's rows: {fmt(step * 127)}   (derived from quoted)")
print(f"average max|x| of 128 values from N(0, 1): {fmt(normal)}   (this machine, 20,000 rows)")

# %% [markdown]
r"""
The largest of 128 draws from N(0, 1) is 2.83 on average. An average of 2.18 says that the generator
had thinner tails than N(0, 1), as the sum of two uniform numbers has. It hardly
matters for the result, but a check that costs one division is worth making.

The second check is the article's own task: make K and V three times larger; it expects the
relative error to stay, because each row has its own scale. *Predict* for each of the four lines:
same, larger, smaller?
"""

# %%
for name, factors in (("as it was", {}), ("V × 3", {"v_scale": 3.0}),
                      ("K × 3 and V × 3", {"k_scale": 3.0, "v_scale": 3.0}),
                      ("K × 3 and q × 3", {"k_scale": 3.0, "q_scale": 3.0})):
    r = kv_precision.mean_over_seeds(50, **factors)
    print(f"{name:>16}: mean|Δ| / mean|out| = {r['relative']:.2g}   (this machine, 50 seeds)")

# %% [markdown]
r"""
V alone: constant, as expected; the output is linear in V. With K it is not. The *codes* of K are the
same, but the scores are three times larger, and so are their errors. The softmax is sharper: it puts
its weight on fewer tokens, so fewer errors cancel, and it turns an error of a score into a larger
error of a weight. Scaling per row protects the row. It does not protect what the softmax makes of it.

### Real rows

N(0, 1) is a convenience. The article says so itself: real K and V have longer tails. How much longer
are they in our model? The *crest*, max|x| divided by the root mean square, is what costs codes.
"""

# %%
def crest(rows):
    return float((np.abs(rows).max(-1) / np.sqrt((rows * rows).mean(-1))).mean())


sample = rng.standard_normal((20_000, config.head_dim), np.float32)
print(f"N(0, 1), {config.head_dim} values: crest {crest(sample):.2f}  (this machine)")
for layer, (_, k, v) in enumerate(seen):
    print(f"layer {layer}:  K", *(f"{crest(rows):.2f}" for rows in k),
          "   V", *(f"{crest(rows):.2f}" for rows in v), "  (one number a KV head, this machine)")

# %% [markdown]
r"""
Keys have longer tails than N(0, 1), values hardly. A crest of 3.0 instead of 2.6 means steps that are
15 % coarser: a fifth of a bit. So on this small model the article's caveat holds, mildly. How it is on
an 8B model we cannot measure here.

Does your sign test find the biased rule in real rows too? One test a layer, over the outputs of all
heads for the last token.
"""

# %% tags=["nbval-ignore-output"]
p_values = {}
for layer, (q, k, v) in enumerate(seen):
    kh = [attention.kv_head(h, len(q), len(k)) for h in range(len(q))]
    w = attention.softmax((k[kh] @ q[:, :, None])[..., 0] / np.float32(math.sqrt(config.head_dim)))
    print(f"layer {layer}: its heads look at about",
          (1 / (w * w).sum(axis=1)).round().astype(int).tolist(), "tokens (1 / Σw²)")
    for rule in ("half_up", "trunc"):
        k8, v8 = (kv_precision.quantize_and_read_back(rows, rule) for rows in (k, v))
        found = sign_test(attention.two_pass(q, k8, v8) - attention.two_pass(q, k, v))
        p_values[layer, rule] = found["p"]
        print(f"  {rule:>7}: {found['positive']} of {found['n']} positive, "
              f"p = {found['p']:.1g}   (this machine)")

# %%
for rule in ("half_up", "trunc"):
    print(f"{rule:>7}: p below one in a million in",
          sum(p < 1e-6 for (_, r), p in p_values.items() if r == rule), "of", len(seen), "layers")

# %% [markdown]
r"""
It does, in every layer, though not all signs agree where heads look at one or two tokens only: `trunc`
rounds positive values correctly, so a component whose one token is positive shows no bias. With
hundreds of tokens every component has negative values among them.

### Would the model have told us?

Last, the whole model, with the question that the sign test made urgent. Had the engine used the biased
rule for its KV rows, would anybody have noticed from the answers? We round the prompt's rows to 8 bits
and to fewer, under both rules, and let the model answer. `nats` is the mean of −log(probability) over
the tokens of the right answer: 0 is certainty. *Predict* where each rule breaks.
"""

# %% tags=["nbval-ignore-output"]
def rounded(rows, bits, rule):
    top = np.float32(2 ** (bits - 1) - 1)  # 127, 7, 3, 1
    m = np.abs(rows).max(axis=-1, keepdims=True)
    return quant.round_to_int(rows * (top / m), rule) * (m / top)


right = engine.encode(prompt.fact.sentence, allow_special=False)
nats, text = {}, {}
print(f"float32         {-sessions['f32'].score(right).mean():8.4f} nats",
      repr(engine.decode(made["f32"].ids)), "  (this machine)")
for bits in (8, 4, 3, 2):
    for rule in ("half_up", "trunc"):
        cache = kvcache.KVCache(*shape)
        for layer, (_, k, v) in enumerate(seen):
            cache.append(layer, rounded(k, bits, rule), rounded(v, bits, rule))
        session = Session(engine.model, cache, 32)
        session.logits = sessions["f32"].logits
        nats[bits, rule] = -float(session.score(right).mean())
        text[bits, rule] = engine.decode(generate_from(session, 16).ids)
        print(f"{bits} bits {rule:>8} {nats[bits, rule]:8.4f} nats {text[bits, rule]!r}")

# %%
for rule in ("half_up", "trunc"):
    print(f"{rule:>8}: answers as with float32 at",
          [bits for bits in (8, 4, 3, 2) if text[bits, rule] == engine.decode(made["f32"].ids)], "bits")
print("at 8 bits the rules differ by less than 0.001 nats:",
      abs(nats[8, "trunc"] - nats[8, "half_up"]) < 0.001)
print("at 4 and 3 bits trunc costs more than ten times as much:",
      all(nats[bits, "trunc"] > 10 * nats[bits, "half_up"] for bits in (4, 3)))

# %% [markdown]
r"""
At 8 bits the model answers under both rules, and the right answer costs practically the same. **No reader of its
texts would have found the bias**; a sign test of one query's outputs found it in every layer. With fewer bits
the step grows, half a step grows with it, and the same bug destroys the answer one bit before the
honest rule does, at a hundred times the cost on the way.

(Differences in the fourth decimal are noise: 4 honest bits even look a little better than 8. And only
the prompt's rows were rounded here, not those of the few tokens that the model wrote.)

### One ratio and what it refers to

The article closes with "PPL ≈ 0.994–0.998" for an 8B model, and reads it as a loss of about 0.5 %.
*Perplexity* is $e^{\text{mean nats per token}}$; smaller is better, 1 is the best there is. No
language model has a perplexity of 0.996 on text. So the numbers must be **ratios** of two perplexities.

Ours, over 200 prompts, **recorded**:
"""

# %%
run = load_run("kv_quality")
summary = run["summary"]
print("command:", run["command"], "· version", run["course_version"], "· backend", run["backend"],
      "·", run["date"])
print("prompts:", summary["prompts"], "· same generated tokens:",
      percent(summary["token_agreement"]), "· same texts:", percent(summary["identical_share"]))
print(f"perplexity on {summary['tokens_scored']:,} held-out tokens: f32",
      f"{summary['perplexity_f32']:.4f} · q8 {summary['perplexity_q8']:.4f}")
print(f"ratio q8 / f32, all these tokens: {summary['perplexity_ratio']:.6f}")
print(f"ratio q8 / f32, the answers' tokens only: {summary['answer_perplexity_ratio']:.6f}")
low, high = quoted("q8_quality", "ppl_ratio_low"), quoted("q8_quality", "ppl_ratio_high")
print("quoted:", low.value, "to", high.value, f"({low.conditions}; {low.source})")

# %% [markdown]
r"""
Not one of 200 texts changed, and the ratio is 1 to within a ten-thousandth. Now look at the last two
ratios. Over all tokens q8 is a hair *worse* (above 1); over the answers alone it is a hair *better*
(below 1). Does rounding improve answers? No. Rounding moves probabilities up and down; over a finite
text the balance lands on one side or the other.

So a ratio slightly below 1 is not by itself a loss, nor a gain to rely on. 0.994–0.998 come from **one
validation path** of one 8B model; the article quotes a source comment that names M4e/M4f. "A loss of
0.5 %" is one way to read such a ratio. What the other is, and what follows from each, is the last
exercise.
"""

# %% [markdown] course={"id": "d09.b3", "kind": "B", "role": "card"}
r"""
### Exercise 9-3 B: what 0.994–0.998 refers to

15 minutes · difficulty 3/3 · 6 points

Open [quoted.csv](../data/published/quoted.csv) for the quoted numbers, and
[experiments.py](../course_lib/lab/experiments.py) for how this course computes its own ratio. Then write: what exactly do
0.994–0.998 refer to, what would each reading of the ratio (q8 over float, float over q8) mean, and
what is missing before one could say "q8 costs 0.5 %" of another model?

Cite `quoted_ratio` (both rows) and `our_ratio` (the line that divides, for all scored tokens). Give
`numerator`, the cache whose perplexity stands on top of ours (a word: f32 or q8), `worse_side`, on
which side of 1 our ratio would say that q8 is worse (a word: above or below), and `nats_per_token`,
by how much the mean nats per token differ at a ratio of 0.996 (three digits, with its sign).
"""

# %% [markdown] course={"id": "d09.b3", "kind": "B", "role": "answer", "points": 6, "minutes": 15, "difficulty": 3}
r"""
<!-- ANSWER d09.b3 -->
Answer: …

Evidence: path:first-last
"""

# %% course={"id": "d09.b3", "kind": "B", "role": "evidence"}
# EVIDENCE d09.b3
d09_b3 = {
    "quoted_ratio": "",  # "path:first-last"
    "our_ratio": "",  # "path:first-last"
    "numerator": "",  # a word
    "worse_side": "",  # a word
    "nats_per_token": None,  # a number
}

# %% course={"id": "d09.b3", "kind": "B", "role": "check"}
check("d09.b3", d09_b3)

# %% [markdown]
r"""
## Summary

* A q8 row is int8 codes and one scale per token and head; the largest value of the row sets the step
  of all others, and the order of operations is part of the format.
* An int8 kernel rounds at three places, K and V on write, q on read; the integer dot is exact, and
  the softmax decides what a score's error costs.
* Unbiased rounding errors cancel in the weighted mean, a bias passes through V untouched: look at the
  signs before you look at the size.

One formula: $\text{code} = \lfloor x \cdot (127/m) + \tfrac12 \rfloor$. One number: half a step
became 1/30 of a step, once the rounding was right.

Read next: [day 10, block selection](day10_sparse_attention.ipynb). A q8 scan halves the bytes of
every token; the next question is which tokens need to be read at all.
"""
