# %% [markdown]
r"""
# Day 14/30 · 分块与卸载 Chunks and offload

**You need** Python, the dot product, $e^x$ and its logarithm. Six numbers below repeat what attention
(注意力) is. Days 12 and 13 help with the third section; what it needs of them is said there.

**You will be able to** attend to a text in parts and put the parts together exactly · plan a ring of
buffers that loads the next block while the last one is computed on, and say when it gains nothing ·
tell three "densities" of a sparse prefill apart, and say before a run whether it can win.

**Time** 90 minutes, six exercises; the leak before the last of them is extra. This day is the course's own; it takes a published run apart, that
of a sparse attention policy called XAttention BSA in its authors' design document.

Numbers carry a label: **quoted** (from that document) · **this machine** (measured in the cell you
run) · **derived** (arithmetic). A printed number without a label is a toy or a count from the cell
above it. Words that you miss are in the [glossary](../docs/glossary.md).
"""

# %% tags=["nbval-ignore-output"]
import inspect
import os
import time

# One thread unless you chose, so that times compare. NumPy reads its own once, when it is imported.
for name in ("COURSE_THREADS", "OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS", "VECLIB_MAXIMUM_THREADS"):
    os.environ.setdefault(name, "1")

import numpy as np

from course_lib import attention, backend, prefill
from course_lib.bench.policy_cases import Watched
from course_lib.classroom import check, solved_or
from course_lib.engine import Engine
from course_lib.lab import prefill_cost
from course_lib.lab.captured import captured
from course_lib.lab.published import quoted
from course_lib.lab.ring_study import RingStudy
from course_lib.paths import MODELS
from course_lib.prefill_attention import causal_attention
from course_lib.show import LseMergeExplorer, RingTimelineExplorer
from course_lib.show.break_even import break_even_plot
from course_lib.show.text import fmt, percent

print("backend:", backend.info().name, "·", backend.info().reason)

# %% [markdown]
r"""
## Half the work, a quarter slower

Reading a prompt (**prefill**, 预填充), a model makes a key and a value of every token, and every token
looks back at all keys before it. For 128K tokens that is a lot to compute and a lot to keep. The policy of
the design document (策略) looks at a cheap estimate first and then reads only about half of the past:
"density 52 %". Here is what its authors measured.
"""

# %%
full, sparse = quoted("xattn_policy", "full_128k_s"), quoted("xattn_policy", "xattn_128k_s")
for row in (full, sparse):
    print(f"quoted   {row.what:14s} {row.value:>6} {row.unit}   [{row.source}: {row.conditions}]")
print(f"derived  {sparse.number / full.number:.2f} times as long")
cached = 2 * 32 * 8 * 128 * 2 * 128 * 1024  # K and V, layers, KV heads, head_dim, bytes, tokens
print(f"derived  keys and values of 128K tokens of that model: {cached / 1e9:.1f} GB")

# %% [markdown]
r"""
It read half, and it took *longer*. Nothing is wrong with the measurement, and the authors say so openly.
By the end of today you can explain it with one line of arithmetic, make it happen on this machine,
and say which change would turn it around.

The 17 GB are the other half of the story. They do not stay on the graphics card: they are **offloaded** (卸载)
to cheaper memory and come back block by block (块). So three things must work:

1. attention over *parts* of the text, put together exactly (14-1);
2. parts that arrive while the last one is computed on (14-2);
3. a choice of parts that reads less than it costs (14-3).
"""

# %% [markdown]
r"""
### Recap: attention in six numbers

A query $q$ scores every key, the scores become weights that add up to 1, and the output is the weighted
mean of the values:

$$ s_t = \frac{q \cdot k_t}{\sqrt d}, \qquad w_t = \frac{e^{s_t}}{\sum_u e^{s_u}}, \qquad
\text{out} = \sum_t w_t\, v_t . $$

Take $d = 1$, $q = 1$, six tokens, of which number 4 has a key that fits. Now attend to the first three and
to the last three **apart**.
"""

# %%
q = np.ones((1, 1), np.float32)
k = np.array([0, 0, 0, 0, 3, 0], np.float32).reshape(1, 6, 1)
v = np.array([10, 20, 30, 40, 50, 60], np.float32).reshape(1, 6, 1)


def attend(first, end):
    return float(attention.two_pass(q, k[:, first:end], v[:, first:end])[0, 0])


print("all six:      ", fmt(attend(0, 6)))
print("tokens 0 to 2:", fmt(attend(0, 3)))
print("tokens 3 to 5:", fmt(attend(3, 6)))
print("their mean:   ", fmt((attend(0, 3) + attend(3, 6)) / 2))

# %% [markdown]
r"""
20 and 50 should become 46.4, and their mean is 35. The two outputs alone cannot tell: each part divided
by its own sum, and the sums are lost. Which number must a part hand over besides its output?
"""

# %% [markdown]
r"""
## 14-1 分块与合并 · Chunked prefill and the LSE merge

The sum itself: part A has $1 + 1 + 1 = 3$, part B has $1 + e^3 + 1 = 22.1$. Weigh the outputs by them:

$$ \frac{3 \cdot 20 + 22.1 \cdot 50}{3 + 22.1} = 46.4 . $$

Exact, no approximation: it is the same fraction, written in another order. One thing spoils it. A score of
100 is nothing special, and $e^{100}$ does not fit into float32. So a part hands over the *logarithm* of
its sum, the **log-sum-exp** $l = \ln \sum_t e^{s_t}$ (LSE), and the merge subtracts the larger one before it
takes $e$ again. With $M = \max(l_1, l_2)$:

$$ o = \frac{e^{l_1 - M}\, o_1 + e^{l_2 - M}\, o_2}{e^{l_1 - M} + e^{l_2 - M}}, \qquad
l = M + \ln\!\left(e^{l_1 - M} + e^{l_2 - M}\right) . $$

Both exponents are at most 0 now, one of them is 0: nothing overflows. The result is again a pair
$(o, l)$, so it can be merged with the next part, and the next.
"""

# %%
parts = [prefill.partial_attention(q[:, None], k[:, a:b], v[:, a:b]) for a, b in ((0, 3), (3, 6))]
for name, (out, lse) in zip("AB", parts, strict=True):
    print(f"part {name}: out {fmt(out[0, 0, 0])}, LSE {fmt(lse[0, 0])}, e^LSE {fmt(np.exp(lse[0, 0]))}")
out, lse = prefill.merge_attention_outputs(*parts[0], *parts[1])
print(f"merged: out {fmt(out[0, 0, 0])}, LSE {fmt(lse[0, 0])} = ln({fmt(np.exp(lse[0, 0]))})")
out, lse = prefill.merge_attention_outputs(*parts[0], np.float32([[[7]]]), np.float32([[-np.inf]]))
print(f"A merged with a part without tokens: out {fmt(out[0, 0, 0])}, LSE {fmt(lse[0, 0])}")

# %% [markdown]
r"""
The last line is a case of its own. A part in which a query sees *nothing* has $\sum = 0$, so $l = -\infty$, and
its weight is $e^{-\infty} = 0$. Good. But when both parts are empty, $M = -\infty$ and $l - M = -\infty + \infty$: NaN.
An implementation has to say what it does then.

Now look at it. The explorer cuts a context into parts, gives every part its weight, and merges them one
after the other. **Predict first**, for the six numbers in six parts A to F, one token each: which share of the
weight has E, the part of token 4? And what is the output when B, C, A and F are merged, E and D not yet?
"""

# %%
LseMergeExplorer(parts=6, order="shuffled", merged=4)

# %% [markdown]
r"""
E holds 80 %. Without it the output is 30, a plain mean of four values, and nobody could know that it was far off: the
part with the weight had not arrived. So a merge is exact at the *end*, not on the way.

A real head: the last query of a prompt of 1,024 tokens on the shipped model, second layer. (A **layer** is one
round of attention and a small network; in each several **query heads** look back side by side, and two share
a set of keys and values, a **KV head**.) Move `layer` and `query head`: some heads find nearly
everything in one part, others spread.
"""

# %%
engine = Engine.load(MODELS / "needle-qwen3")
explorer = LseMergeExplorer(engine, source="model", layer=1, head=2, parts=6, order="shuffled")
explorer

# %%
results = [[explorer.compute(source="model", parts=6, order="shuffled", layer=layer, head=head)
            for head in range(4)] for layer in range(3)]
for layer, row in enumerate(results):
    print(f"layer {layer}, largest share of a part, heads 0 to 3:", *(f"{percent(max(r['shares'])):>7}" for r in row))
every = [r for row in results for r in row]
print("within 1e-5 of attention in one part:", sum(r["difference"] <= 1e-5 for r in every), "of", len(every))
print("the bits of merging in ascending order:", sum(r["same_bits"] for r in every), "of", len(every))

# %% [markdown]
r"""
**Exact, and yet not the same bits.** Merging in another order gives the same number to five or six digits and
other last bits, in every head. Floating-point sums round after every step, and the steps differ:
$(a + b) + c$ is not $a + (b + c)$. Of *two* parts the order does not matter ($a + b = b + a$ holds); from three
on it does.

A few bits look harmless. But a sampled text can turn on one of them, and a test that compares bits would fail at
random if the order depended on which block came in first. So the library fixes it: ascending blocks, the
chunk itself last. Let us see what a chunk is.
"""

# %% [markdown]
r"""
### Chunks

A prompt is cut into **chunks** (分块), here of 256 tokens. A chunk goes through all layers before the next one
starts, so queries, and whatever else passes between layers, exist for one chunk only, however long the prompt. In each layer it reads

* its **history** (历史), whole blocks of earlier tokens, *without a mask*: they are all in the past;
* **itself**, with the causal mask: token $i$ of the chunk sees tokens 0 to $i$ of it.
"""

# %%
BLOCK, CHUNK = 64, 256
print("one row per chunk, one column per block of 64 tokens: # history, ◣ itself, . future")
for chunk in range(4):
    first, end = chunk * CHUNK // BLOCK, (chunk + 1) * CHUNK // BLOCK
    print(f"chunk {chunk}  {'#' * first}{'◣' * (end - first)}{'.' * (16 - end)}   {first:2d} blocks of history")
print("blocks of history in all:", sum(chunk * CHUNK // BLOCK for chunk in range(4)))

# %% [markdown]
r"""
By hand, for the last chunk of one real layer: 12 blocks of history, one part each, then the chunk itself. `visible`
says how many tokens of a part each query may see.
"""

# %%
layers = captured(engine, 1024)  # what attention was given: q, k, v of every layer of a prompt
q1, k1, v1 = layers[1]
print("q, k, v of one layer:", q1.shape, k1.shape, v1.shape)
chunk, history = slice(768, 1024), range(0, 768, BLOCK)
out, lse = prefill.partial_attention(q1[:, chunk], k1[:, :BLOCK], v1[:, :BLOCK])
for first in history[1:]:
    part = slice(first, first + BLOCK)
    out, lse = prefill.merge_attention_outputs(
        out, lse, *prefill.partial_attention(q1[:, chunk], k1[:, part], v1[:, part]))
own = prefill.partial_attention(q1[:, chunk], k1[:, chunk], v1[:, chunk], np.arange(1, 257))
out, lse = prefill.merge_attention_outputs(out, lse, *own)
exact = causal_attention(q1, k1, v1)[:, chunk]
error = np.abs(out - exact).max()
print("largest of", exact.size, "differences to attention in one pass below 1e-4:", bool(error < 1e-4))

# %% [markdown] course={"id": "d14.a1", "kind": "A", "role": "card"}
r"""
### Exercise 14-1 A · merge two parts

15 minutes · difficulty 2/3 · 5 points · about 10 lines

Write the merge for many query rows at once. `o1`, `o2` are float64 `[n, d]`, `lse1`, `lse2` float64 `[n]`,
natural logarithms. Every row is a query of its own.

* Scores may be large: an LSE may be any finite number, and the two of a row may be far apart.
* `-inf` marks a row whose part has no tokens. Then the other part's row is the result, unchanged, and what stands
  in the absent row's output (it may be anything, NaN included) must not leak.
* Both parts empty: zeros and `-inf`.
* Leave your arguments as they were. A check lets no overflow, no division by zero ($\ln 0$ is one) and no invalid
  operation pass.

<details><summary>Hint 1: one M for each row</summary>

`np.maximum(lse1, lse2)` has shape `[n]`; a column of weights is `w[:, None]`.

</details>

<details><summary>Hint 2: the empty rows</summary>

Decide them before you compute: with boolean masks, compute only the rows in which both parts have tokens,
and copy the others.

</details>
"""

# %% course={"id": "d14.a1", "kind": "A", "role": "answer", "points": 5, "minutes": 15, "difficulty": 2}
# EXERCISE d14.a1
def merge_lse(o1, lse1, o2, lse2):
    """Return (o, lse) of two disjoint parts of a context: float64 [n, d] and [n].

    >>> o, lse = merge_lse(np.array([[20.0]]), np.log([3.0]), np.array([[50.0]]), np.log([1.0]))
    >>> o.tolist(), lse.tolist()  # (3 · 20 + 1 · 50) / 4 and ln 4
    ([[27.5]], [1.3862943611198906])
    """
    raise NotImplementedError("d14.a1")


# %% course={"id": "d14.a1", "kind": "A", "role": "check"}
check("d14.a1", merge_lse)

# %% [markdown]
r"""
Your function (or ours) on the real head: 6, 24 and 1,024 parts, the last of one token each, in random order.
Does a thousand merges add up a thousand errors?
"""

# %%
merge = solved_or(merge_lse, prefill.merge_attention_outputs)
q_last, rows = q1[2:3, -1:], (k1[1:2], v1[1:2])  # query head 2 reads KV head 1
whole, whole_lse = prefill.partial_attention(q_last, *rows)
for count in (6, 24, 1024):
    edges = [1024 * i // count for i in range(count + 1)]
    pieces = [prefill.partial_attention(q_last, *(a[:, s:e] for a in rows))
              for s, e in zip(edges, edges[1:], strict=False)]
    out, lse = np.zeros((1, 64)), np.full(1, -np.inf)
    for i in np.random.default_rng(count).permutation(count):
        out, lse = merge(out, lse, pieces[i][0][0].astype(np.float64), pieces[i][1][0])
    print(f"{count:4d} parts: largest difference below 1e-5: {bool(np.abs(out - whole[0]).max() < 1e-5)}, "
          f"LSE {fmt(lse[0])}, in one part {fmt(whole_lse[0, 0])}")

# %% [markdown]
r"""
**Read together.** The merge of the library, {see course_lib/prefill/lse.py merge_into}. It works in place, for all
heads and queries at once, and it keeps the LSE in float64 (the reason stands at the head of the file). Find the
line that makes weights, the two flags, and the three cases of the last lines. Its `exp` and `ln` are not NumPy's:
polynomials of + − × ÷ alone give the same bits on every machine, and no standard library promises that.
"""

# %%
print(inspect.getsource(prefill.lse.merge_into))

# %% [markdown] course={"id": "d14.b1", "kind": "B", "role": "card"}
r"""
### Exercise 14-1 B · nothing to see

8 minutes · difficulty 2/3 · 3 points

Open [prefill/lse.py](../course_lib/prefill/lse.py) and [prefill/chunked.py](../course_lib/prefill/chunked.py).

* `flags`: the line where `merge_into` finds out which side has no tokens.
* `cases`: the line that writes the merged output, the fresh part or what was there.
* `no_nan_warning`: the line that keeps −∞ − −∞ from raising an alarm.
* `blind_rows`: in the NumPy definition of attention over a part, the line that leaves out queries which see nothing.
* `itself_last`: the line of `chunked.py` that attends the chunk over itself.
* `exp_of_minus_inf`: what the library's `exp` returns for −∞.

Then say in two or three sentences: what would a user see if a row with two empty sides were not set aside? Such a row
never comes up in a prefill of whole chunks, where a query sees all of every block that is read. Name arguments of
`partial_attention` with which it does.

<details><summary>Hint</summary>

Write places as `"course_lib/prefill/lse.py:120-121"`. A line too many at either end does no harm.

</details>
"""

# %% [markdown] course={"id": "d14.b1", "kind": "B", "role": "answer", "points": 3, "minutes": 8, "difficulty": 2}
r"""
<!-- ANSWER d14.b1 -->
Answer: …

Evidence: path:first-last
"""

# %% course={"id": "d14.b1", "kind": "B", "role": "evidence"}
# EVIDENCE d14.b1
d14_b1 = {
    "flags": "",  # "path:first-last"
    "cases": "",
    "no_nan_warning": "",
    "blind_rows": "",
    "itself_last": "",
    "exp_of_minus_inf": None,  # a number
}

# %% course={"id": "d14.b1", "kind": "B", "role": "check"}
check("d14.b1", d14_b1)

# %% [markdown]
r"""
## 14-2 环形槽 · A ring of slots over a file

Where does the history wait? In a file. `BlockFile` keeps K and V of every block side by side, in the order layer,
block, K, V, behind a head of 4,096 bytes; each part begins at a multiple of 4,096, so K can be read without V. In memory there are a few
**slots** (槽), each with room for one block, made once and filled again and again.
"""

# %%
shape = {"num_layers": 3, "num_kv_heads": 2, "head_dim": 64}
budget = 4 * 2 * 4 * 2 * 64 * BLOCK  # four blocks; a block is K and V, 4 bytes, KV heads, head_dim, tokens
with prefill.BlockFile(**shape, capacity=1024, block_size=BLOCK, ram_budget=budget) as store:
    for number, layer in enumerate(layers):
        store.append(number, layer.k, layer.v)
    path = store.path
    print(f"rows of {store.length(0)} tokens, {len(layers)} layers: {3 * 16 * store.block_bytes:,} bytes")
    print(f"file: {path.stat().st_size:,} bytes = 4,096 + 3 · 16 · 2 · {store.block_bytes // 2:,}")
    print(f"in memory: {store.resident_bytes:,} bytes = budget + one slot to write with: "
          f"{store.resident_bytes == budget + store.block_bytes}")
    print("K alone of a block:", store.keys(1, 5).shape, "=", f"{store.keys(1, 5).nbytes:,} bytes")
print("file gone after close:", not path.exists())

# %% [markdown]
r"""
Now 12 blocks must come through a slot or two. In turns, load, compute, load, compute, one of the two workers always
waits: the disk while the processor computes, the processor while the disk reads. A **ring** (环) lets them work at
once. A second thread loads ahead (预取, prefetch) into free slots. A slot goes round in a circle:

**free** → *being loaded* → **ready** → *in use* → **free** …

and the rule that makes it right is one sentence: **a slot is free again only when the computation on it is
over.** Break it, and the next block overwrites keys that are being read; nothing crashes, the answer is
wrong now and then.

By eye: 4 blocks, loading takes 2, computing 3. In turns that is $4 \cdot (2 + 3) = 20$. With two slots the computer
waits only for the first block: $2 + 4 \cdot 3 = 14$. For $n$ equal blocks and at least two slots:

$$ T_\text{turns} = n\,(L + C), \qquad T_\text{ring} = L + (n - 1)\max(L, C) + C . $$

**Predict** before you run: which total has a *third* slot? And where is the ring's gain largest, at $L \ll C$, at
$L = C$, or at $L \gg C$?
"""

# %%
RingTimelineExplorer(engine, slots=2, load=2, compute=3)

# %%
plan = RingTimelineExplorer(engine).compute
print("eight blocks, compute 3: ring / in turns    1 slot       2       3       4")
for loads in ("even", "uneven"):
    for load in (1, 2, 3, 4, 6) if loads == "even" else (3,):
        row = [fmt(plan(slots=slots, load=load, loads=loads)["ratio"]) for slots in (1, 2, 3, 4)]
        print(f"  load {load}, {loads:6}                       " + " ".join(f"{x:>7}" for x in row))
print("two slots, load 1, compute 6, and handing over a block costs")
for handoff in (0, 0.5, 1):
    print(f"  {fmt(handoff):>3}: ring / in turns {fmt(plan(load=1, compute=6, handoff=handoff)['ratio'])}")

# %% [markdown]
r"""
Three facts to keep.

* **One slot is no ring**: the same total as in turns. **Two** do all there is to do for equal blocks. A third helps
  only where loads are *uneven* (that row: every fourth load is slow, 3 on average): spare slots fill while things go
  well, and feed the computer when a load is late. Even so it cannot do better than the slower worker.
* The gain is largest where $L = C$, and never more than half: $T_\text{ring}/T_\text{turns} \to \max(L, C)/(L + C) \geq
  \tfrac12$.
* The ring is not free. Each block changes hands between two threads. All it can hide is $L$ (or $C$, if smaller); when
  loading is quick and handing over costs as much, the ring **loses** (last number: above 1).
"""

# %% [markdown] course={"id": "d14.a2", "kind": "A", "role": "card"}
r"""
### Exercise 14-2 A · plan the ring

15 minutes · difficulty 3/3 · 6 points · about 12 lines

Write the timetable of a ring that never overwrites a slot in use. There is one reader and one computer; each works on one
block at a time, in order, and begins as soon as it may.

* Block `i` is loaded into slot `i % slots`.
* The reader may load it when it is done with block `i - 1` and the slot is free.
* The computer may begin when the block is loaded and block `i - 1` is computed.

Return one tuple per block: `(slot, load_start, load_end, compute_start, compute_end)`. `ValueError` for `slots` below 1
and for lists of different lengths. Times need not be whole numbers.

<details><summary>Hint 1: when is the slot free?</summary>

The last block that used it is `i - slots`. If there was one, the slot is free at its `compute_end`.

</details>

<details><summary>Hint 2</summary>

Each start is a `max` of two times, 0 where there is nothing to wait for.

</details>
"""

# %% course={"id": "d14.a2", "kind": "A", "role": "answer", "points": 6, "minutes": 15, "difficulty": 3}
# EXERCISE d14.a2
def ring_plan(loads, computes, slots):
    """Return [(slot, load_start, load_end, compute_start, compute_end), ...], one for each block.

    loads, computes: how long each block takes to load and to compute.
    >>> ring_plan([2, 2, 2], [3, 3, 3], 2)
    [(0, 0, 2, 2, 5), (1, 2, 4, 5, 8), (0, 5, 7, 8, 11)]
    """
    raise NotImplementedError("d14.a2")


# %% course={"id": "d14.a2", "kind": "A", "role": "check"}
check("d14.a2", ring_plan)

# %% [markdown]
r"""
Your plan (or ours) for loads as a real disk gives them, most quick, a few very late. 40 blocks, computing takes 1;
one load in ten takes 6, the others 0.4, in random places. How many slots are worth their memory?
"""

# %%
planned = solved_or(ring_plan, prefill.ring_schedule)
rng = np.random.default_rng(14)
loads = [6.0 if late else 0.4 for late in rng.permutation([True] * 4 + [False] * 36)]
print(f"in turns {sum(loads) + 40:.1f}; loads alone {sum(loads):.1f}, computing alone 40.0")
for slots in (1, 2, 3, 4, 8, 16):
    print(f"  {slots:2d} slot{'s' * (slots > 1)}: {planned(loads, [1.0] * 40, slots)[-1][4]:.1f}")

# %% [markdown]
r"""
Two slots bring the largest step. From the third on, each slot saves about one unit here: one block more to compute on
while a late load is on its way. With 16 most of the waiting is gone. Each slot costs the memory of a block.

### On this machine

The real ring, on the real chunk from above: 256 queries over 12 blocks. First a file as it is:
just written, so the system holds it in memory (the **page cache**, 页缓存) and reading is a copy. Then the same file slowed down until a block takes as long to load as to compute; slow storage on a
fast machine.

"no ring" is a plain loop without a second thread. The shortest of a few runs counts, since other work on the machine
only adds time. **Predict**: on the fast file, what will the ring bring?
"""

# %% tags=["nbval-ignore-output"]
study = RingStudy(layers[1], rows=256, block_size=BLOCK)
slow = study.speed_as_computing
runs = {}
for storage, speed in (("fast file", None), ("slow file", slow)):
    for slots in (None, 1, 2, 3, 4):
        runs[storage, slots] = run = study.run(slots, speed, seconds=0.12)
        name = "no ring" if slots is None else f"{slots} slot{'s' * (slots > 1)}"
        print(f"this machine, {storage}: {name:8s} {1e3 * run.seconds:7.2f} ms = "
              f"{run.seconds / runs[storage, None].seconds:4.2f} of no ring   (a block: load "
              f"{1e3 * run.load_seconds / 12:5.3f}, compute {1e3 * run.compute_seconds / 12:5.3f} ms)")

# %%
at_once = {slots: prefill.schedule.overlap(runs["slow file", slots].turns) > 0
           for slots in (None, 1, 2, 3, 4)}
print("slow file, loading and computing at once:", at_once)
first = runs["fast file", None].output
print("same bits in all ten runs:", all(np.array_equal(run.output, first) for run in runs.values()))

# %% [markdown]
r"""
On slow storage two slots should take little more than half of the time, three and four hardly less: loads of equal
length, as planned. On the fast file there is hardly anything to win: loading is a small share of the time, and a perfect ring
could save that share, no more. What it costs, you see in the line "1 slot": nothing overlaps there, but every block is handed
over, and it is *slower* than no ring. (On a busy machine all lines jump. Run the cell again.)

To see the ring lose, make the computation small: 8 queries instead of 256. Then a block takes tens of microseconds to
load and, on compiled kernels, as many to compute; and waking a thread takes as long.
"""

# %% tags=["nbval-ignore-output"]
small = RingStudy(layers[1], rows=8, block_size=BLOCK)
for slots in (None, 2):
    run = small.run(slots, seconds=0.1)
    print(f"this machine, 8 queries: {'no ring' if slots is None else '2 slots'}  {1e3 * run.seconds:.2f} ms, "
          f"of which loading {1e3 * run.load_seconds:.2f}, computing {1e3 * run.compute_seconds:.2f}")

# %% [markdown]
r"""
The timeline of the slow run, from the ring's own trace. Move `storage` to the file in memory and look how the loads
shrink to slivers: there a ring has nothing to hide.
"""

# %%
RingTimelineExplorer(engine, source="run", slots=2, storage="slow")

# %% [markdown]
r"""
**Read together.** The reader's side of the ring, {see course_lib/prefill/ring.py Ring._read}. `_requests`, `_free` and `_ready`
are queues, which two threads may use at once; `get` waits until there is something. The reader takes a request (a layer and its
blocks), then for each block a free slot, loads, and puts it into `_ready`; a `None` says that the request is done. (A `None` in `_free` wakes it
when the stream has ended otherwise: the slot that it waits for may never come.) Look for two
things: what happens to the slot if loading fails, and how an error reaches the other thread.
"""

# %%
print(inspect.getsource(prefill.ring.Ring._read))

# %% [markdown]
r"""
The other side, {see course_lib/prefill/ring.py Ring.stream}, hands the rows of a block to its caller by `yield` and goes on
when the caller asks for the next one. (Prefill lets it hand over several as one, if they are ready; here `together` is 1.) That is
yours to read, in the exercise below.

And in the engine: a whole prompt through all layers, its history in a file, one to four slots. (Its **logits** are the
scores of all possible next tokens: what everything above is for.)
"""

# %%
ids = engine.encode("Sarah's code is 4711. The sky was grey and the trains were late. " * 30)[:512]
exact = engine.prefill(ids, importance="none")
offloaded = {slots: engine.prefill(ids, policy=prefill.FullAttentionPolicy(BLOCK), chunk=128,
                                   offload=True, slots=slots) for slots in (1, 2, 3, 4)}
print("same logits to the bit for 1, 2, 3, 4 slots:",
      all(np.array_equal(s.logits, offloaded[1].logits) for s in offloaded.values()))
print("within 1e-3 of prefill in one pass:",
      bool(np.abs(offloaded[2].logits - exact.logits).max() < 1e-3),
      "· next token the same:", int(offloaded[2].logits.argmax()) == int(exact.logits.argmax()))

# %% [markdown]
r"""
More slots change *when* a block is ready, never the order in which blocks are merged. So the bits are the same, and a
bug in the ring would show at once in a test that compares them.
"""

# %% [markdown] course={"id": "d14.b2", "kind": "B", "role": "card"}
r"""
### Exercise 14-2 B · who frees a slot

10 minutes · difficulty 2/3 · 4 points

Open [prefill/ring.py](../course_lib/prefill/ring.py) and find

* `frees`: the line that gives a slot back after the computation on it;
* `takes`: the line where the reader waits for a free slot;
* `announces`: the line where the reader says that a block is ready;
* `waits`: the line where the computing side waits for a block;
* `after_stop`: the loop that collects the slots which were loaded but never used, when the caller stops early.

`ahead_1`, `ahead_4`: how many blocks at most are loaded and not yet begun while one is computed on, with 1 slot and
with 4. `wrong_answer`: `"crash"`, `"wait"` or `"numbers"`: what would happen first if `frees` came before the `yield`.

Then say in two or three sentences why the code frees the slot in a `finally`, and what would go wrong in the *next* layer
if it did not.

<details><summary>Hint</summary>

There are several lines that put a slot back. Only one of them runs for every block of an undisturbed run.

</details>
"""

# %% [markdown] course={"id": "d14.b2", "kind": "B", "role": "answer", "points": 4, "minutes": 10, "difficulty": 2}
r"""
<!-- ANSWER d14.b2 -->
Answer: …

Evidence: path:first-last
"""

# %% course={"id": "d14.b2", "kind": "B", "role": "evidence"}
# EVIDENCE d14.b2
d14_b2 = {
    "frees": "",  # "path:first-last"
    "takes": "",
    "announces": "",
    "waits": "",
    "after_stop": "",
    "ahead_1": None,  # a number
    "ahead_4": None,
    "wrong_answer": "",  # a word
}

# %% course={"id": "d14.b2", "kind": "B", "role": "check"}
check("d14.b2", d14_b2)

# %% [markdown]
r"""
## 14-3 三种密度 · Three densities, and why 52 % was slower than 100 %

A **policy** chooses which blocks of history a chunk reads. The published one works like this (days 12 and 13 take it
apart): a cheap score of every (query, block) pair; each query head keeps the blocks that hold a share τ of its estimated
attention, which is its **mask**; the heads vote, and what more than half of them keep is read, by all of them.

"How sparse was it?" has at least three answers for one run. **Predict**: put them in order, from small to large, before
you run the cell.

* **mask density**: cells that the masks keep, of all cells. What the *estimate* thinks is needed.
* **applied density**: cells that attention really computed, the chunk itself included. What the *processor* did.
* **bytes**: read to choose and to attend, of what full attention reads. What the *disk* did.
"""

# %%
def read_prompt(policy, store):
    """Attention of the whole prompt, chunk by chunk and layer by layer; its seconds, and the reader's."""
    start = time.perf_counter()
    with store, prefill.ChunkedPrefill(store, policy) as chunked:
        for first in range(0, 1024, CHUNK):
            for number, layer in enumerate(layers):
                chunked.attend(number, *(a[:, first : first + CHUNK] for a in layer))
        return time.perf_counter() - start, chunked.ring.load_seconds


def xattn(**options):
    return prefill.XAttentionBSAPolicy(0.5, block_size=BLOCK, short_query=CHUNK, **options)


policy = xattn()
read_prompt(policy, prefill.BlockStore(**shape, block_size=BLOCK))
policy.print_density_stats()
stats = policy.get_density_stats()
print("read to attend, of all blocks in all layers:", percent(stats["load_bytes"] / stats["full_bytes"]))

# %% [markdown]
r"""
One run, five numbers (τ = 0.5, the model's own queries and keys, 1,024 tokens). By the first line, the statistic of the
design document, this run read little more than a third. By the line "bytes read", it read *more than full attention*. None of
them is wrong:

* the document's statistic counts blocks, in **layer 0 only** (all three layers read 54 %, the last line), and only those read
  **to attend**;
* the mask is what single heads wanted. The vote gives them something else: a block goes in for all or for none;
* applied also counts the chunk itself, which is always computed;
* the estimate must look at the keys of *every* block. That alone is half of full attention's bytes.

The document's own 52 % are 4,160 of 8,001 blocks. Which blocks are counted there? And the same prompt under four
policies: the vote of before; `per KV head`, where the query heads of each KV head vote for themselves; `any head`, where one
head's wish is enough; and Quest (day 13), which takes half of the blocks by a bound that it keeps in memory.
"""

# %%
available = quoted("xattn_policy", "available_blocks").number
selected = quoted("xattn_policy", "selected_blocks").number
print(f"quoted   {selected:.0f} of {available:.0f} blocks [{quoted('xattn_policy', 'selected_blocks').conditions}]")
print(f"derived  {percent(selected / available)}; 1 + 2 + … + 126 = {sum(range(127))}: the blocks before each of the "
      "chunks, one block a chunk")
policies = {"majority": policy, "per KV head": xattn(aggregate="per_head"),
            "any head": xattn(aggregate="any"), "quest": prefill.QuestPolicy(block_size=BLOCK)}
print(f"{'':18} {'the document':>13} {'mask':>8} {'applied':>8} {'bytes':>8}")
for name, some in policies.items():
    some.reset()
    read_prompt(some, prefill.BlockStore(**shape, block_size=BLOCK))
    d = some.get_density_stats()
    print(f"{name:18} {percent(d['overall_density']):>13} {percent(d['mask_density']):>8} "
          f"{percent(d['applied_density']):>8} {percent(d['bytes_density']):>8}")

# %% [markdown]
r"""
Rows one to three have *one* mask, and three results of the vote. "44 % dense" says nothing about what is read.

**Whoever prints one density should say of what.**
"""

# %% [markdown]
r"""
### The break-even line

Call κ the share of full attention's bytes that is read to *choose*, and ρ the share that is read to *attend*. Where
reading decides the time,

$$ \frac{T_\text{sparse}}{T_\text{full}} \approx \kappa + \rho, \qquad \text{so it wins only if } \rho < 1 - \kappa . $$

What is κ? The document's own code loads each block, K *and* V, to score its keys:
"""

# %%
for estimate, what in (("kv", "K and V of every block, as published"), ("k", "K alone"),
                       ("pages", "min and max of 16 keys, as Quest"), ("resident", "int8 keys in memory")):
    line = prefill_cost.break_even(estimate)
    print(f"derived  {what:37s} κ = {prefill_cost.estimate_share(estimate):<7g} wins only below ρ = {line:g}")
print(f"derived  published: κ + ρ = 1 + {selected / available:.2f} = {1 + selected / available:.2f}")

# %% [markdown]
r"""
There it is. At κ = 1 the line is at **ρ < 0**: no choice of blocks, however good, could have won. The run
paid once for everything in order to avoid paying for half.

Measured was 1.26 and not 1.52, because not all of the time is reading, and computing *did* become less. Say reading takes a share
$f$ of full attention's time, computing shrinks with ρ, and the two do not overlap:

$$ \frac{T_\text{sparse}}{T_\text{full}} = f\,(\kappa + \rho) + (1 - f)\,\rho = f \kappa + \rho . $$

$1.26 = f + 0.52$ gives $f = 0.74$: three quarters of the time went into reading (derived, with two assumptions in it; nobody has
published the share). And with κ = 0.5 the same run would have taken $0.37 + 0.52 = 0.89$ of full attention's time.

A calculator for the sum (the work of the estimate itself is left out): every way to estimate, for four shares of reading, at the
published ρ. Which column is a phone with a slow flash disk, which a server with everything in memory?
"""

# %%
rho = selected / available
print(f"derived, ρ = {rho:.2f}: time of sparse / full   reading is f =", *(f"{f:>7}" for f in (1, 0.74, 0.25, 0)))
for estimate in ("kv", "k", "pages", "resident"):
    kappa = prefill_cost.estimate_share(estimate)
    print(f"  κ = {kappa:<6g} ({estimate:8s})" + " " * 27 + " ".join(f"{f * kappa + rho:7.2f}" for f in (1, 0.74, 0.25, 0)))

# %% [markdown]
r"""
The phone is the left column, where 1.52 and 0.52 are a question of κ alone; the server the right one, where κ costs nothing.

**On this machine.** The same prompt from a file slowed down to 10 MB/s, so that reading decides. `estimate_from="kv"`
reads as the document does. **Predict** the order of the four times, and the ratio of the second to the first.
"""

# %% tags=["nbval-ignore-output"]
ways = {"full": lambda: prefill.FullAttentionPolicy(BLOCK), "K and V to choose": lambda: xattn(estimate_from="kv"),
        "K alone": lambda: xattn(), "int8 keys in memory": lambda: xattn(estimate_from="int8")}
slow_run, seconds, at_storage = {}, {}, {}
for name, make in ways.items():
    slow_run[name] = some = Watched(make())  # adds up the seconds of choosing
    store = prefill.BlockFile(**shape, capacity=1024, block_size=BLOCK, throttle=1e7)
    seconds[name], loading = read_prompt(some, store)
    at_storage[name] = some.seconds + loading
    d = some.get_density_stats()
    print(f"this machine, 10 MB/s: {name:20s} {seconds[name]:5.2f} s = {seconds[name] / seconds['full']:4.2f} of full; "
          f"κ + ρ = {d['bytes_density']:.2f}")
print(f"quoted                 K and V to choose: {sparse.number / full.number:.2f} of full")

# %%
points = {}
for name, some in slow_run.items():
    d = some.get_density_stats()
    points[name] = (d["estimate_bytes"] / d["full_bytes"], d["load_bytes"] / d["full_bytes"])
points["published run (quoted)"] = (1.0, selected / available)
print("reading as published, longer at the storage than full attention:",
      at_storage["K and V to choose"] > at_storage["full"])
break_even_plot(points, label="bytes of the runs above; the published run: quoted blocks, κ derived")

# %% [markdown]
r"""
The sign is reproduced (in the cell's times; a busy machine blurs them, so the notebook compares the time at the storage), and the
reason with it: point B and the published run lie on the right edge, where nothing wins. K
alone moves the point by a half and still stands just outside the line. Only keys that need not be read at all bring it home (here
a copy in memory of one byte a number, int8, a quarter of K's bytes; Quest's page bounds would be an eighth of K), and then the
time falls with ρ.

Now the same four policies with the history in memory, where nothing is read at all.
"""

# %% tags=["nbval-ignore-output"]
in_memory = {}
for name, make in ways.items():
    in_memory[name], _ = read_prompt(make(), prefill.BlockStore(**shape, block_size=BLOCK))
    print(f"this machine, in memory: {name:20s} {1e3 * in_memory[name]:6.1f} ms = "
          f"{in_memory[name] / in_memory['full']:4.2f} of full")

# %% [markdown]
r"""
Another order: without storage in the way it is the *applied* density and the work of the estimate that count, and the policy that
lost by half a moment ago may well be the faster one. **A density predicts a time only together with what limits the run.** That is
why the course prints three.
"""

# %% [markdown] course={"id": "d14.a3", "kind": "A", "role": "card"}
r"""
### Exercise 14-3 A · what is read

5 minutes · difficulty 1/3 · 4 points · about 8 lines

Return κ + ρ: the bytes that a policy reads, as a share of full attention's (K and V of all history).

* `estimate`: `"none"`, `"kv"` (K and V of every block), `"k"` (K alone), `"pages"` (two rows, the minimum and the maximum,
  for each `page_size` keys), `"resident"` (nothing).
* `rho`: share of the blocks that is attended, 0 to 1.
* `layers`: so many layers use one estimate, which the first of them makes. (The document names this as a cure.)

`ValueError` for an unknown estimate, and for `rho` outside 0 to 1.

<details><summary>Hint: pages</summary>

A page of `page_size` keys has as many values. Full attention reads `2 * page_size` rows, the estimate 2.

</details>
"""

# %% course={"id": "d14.a3", "kind": "A", "role": "answer", "points": 4, "minutes": 5, "difficulty": 1}
# EXERCISE d14.a3
def bytes_read(estimate, rho, page_size=16, layers=1):
    """Return the bytes read, as a share of what full attention reads.

    >>> bytes_read("kv", 0.5), bytes_read("pages", 0.5), bytes_read("k", 0.5, layers=2)
    (1.5, 0.5625, 0.75)
    """
    raise NotImplementedError("d14.a3")


# %% course={"id": "d14.a3", "kind": "A", "role": "check"}
check("d14.a3", bytes_read)

# %% [markdown]
r"""
The document proposes three cures: estimate from a sample of the blocks, share one estimate among layers, keep what it needs
in memory. As bytes, by your function (or ours), for its own ρ of 0.52 and its 32 layers, they are the last three lines:
"""

# %%
read = solved_or(bytes_read, prefill_cost.bytes_read)
for what, args in {"as published": ("kv", 0.52), "K alone": ("k", 0.52),
                   "sample every fourth block, K alone": ("k", 0.52, 16, 4),
                   "one estimate for 32 layers": ("kv", 0.52, 16, 32),
                   "estimate from what is in memory": ("resident", 0.52)}.items():
    print(f"derived  {what:36s} {read(*args):.3f} of full attention's bytes")

# %% [markdown]
r"""
(A sample of a quarter costs a quarter, so `layers=4` stands for it.) K alone misses the line by a hair; each cure
moves the run over it. What a cure does to the *choice* is another question: layer 0 may look for other things than layer 20. `./course bench --prefill` measures
how many of the blocks are found again.

### Extra, 10 minutes: the leak

(If time is short, go on to the exercise; nothing in it needs this.) Memory grew by 64 GB during the document's run, until a
line was removed. The scores of every estimate went into a dictionary, with the layer as the key, and were never read. Plant
it, and look for it with `tracemalloc`, which remembers for every piece of memory the line that asked for it. To have more
chunks they are 64 tokens long now.
"""

# %%
import linecache
import tracemalloc


class Leaky(prefill.XAttentionBSAPolicy):
    """Keeps the scores of each layer; `every`: an entry for every chunk."""

    every = False

    def select_blocks(self, q_chunk, store, layer):
        blocks = store.n_blocks(layer)
        if blocks:
            keys = np.concatenate([store.keys(layer, b) for b in range(blocks)], axis=1)
            scores = prefill.flat_group_gemm_fuse_reshape(q_chunk, keys, 8)
            self.kept[(layer, blocks) if self.every else layer] = scores
        return super().select_blocks(q_chunk, store, layer)


# %%
def traced(policy):
    """Bytes in use after every chunk, beyond those of the second; and a snapshot of the end."""
    used = []
    tracemalloc.start(4)  # four frames of every traceback
    with prefill.BlockFile(**shape, capacity=1024, block_size=BLOCK) as store:
        for first in range(0, 1024, BLOCK):
            for number, layer in enumerate(layers):
                q, k, v = (a[:, first : first + BLOCK] for a in layer)
                policy.select_blocks(q, store, number)  # what a chunk asks; attention is left out
                store.append(number, k, v)
            used.append(tracemalloc.get_traced_memory()[0])
        snapshot = tracemalloc.take_snapshot()
    tracemalloc.stop()
    return [u - used[1] for u in used], snapshot


# %%
def leaky(kind, every=False):
    made = kind(0.5, block_size=BLOCK, short_query=8)
    made.every, made.kept = every, {}
    return made


arms = {"without the line": leaky(prefill.XAttentionBSAPolicy), "with the line": leaky(Leaky),
        "an entry for every chunk": leaky(Leaky, every=True)}
grown = {name: traced(some) for name, some in arms.items()}
for name, (used, _) in grown.items():
    kept = sum(a.nbytes for a in arms[name].kept.values())
    print(f"{name:25s} grown by more than 25 kB after 15 chunks: {used[-1] > 25_000!s:5}  "
          f"kept scores: {kept:7,d} bytes in {len(arms[name].kept):2d} entries")

# %% tags=["nbval-ignore-output"]
for name, (used, _) in grown.items():
    print(f"this machine, {name:25s} kB after chunk 3, 7, 11, 15: "
          f"{[round(used[i] / 1000, 1) for i in (3, 7, 11, 15)]}")
top = grown["an entry for every chunk"][1].statistics("traceback")[0]
print(f"the largest: {top.size:,} bytes in {top.count} pieces, asked for by (innermost last)")
for frame in top.traceback:
    print(f"  {os.path.basename(frame.filename)}: {linecache.getline(frame.filename, frame.lineno).strip()}")

# %%
calls = [linecache.getline(f.filename, f.lineno).strip() for f in top.traceback]
print("the innermost line is the one that keeps the memory:", "self.kept" in calls[-1])
print("a line of this notebook stands among the callers:", any("flat_group_gemm_fuse_reshape(q_chunk" in c for c in calls))

# %% [markdown]
r"""
Mind what `tracemalloc` says. It names the line that *made* the memory, a correct line deep in the library. The line that
*keeps* it stands nowhere in the list: it is the one after the call that does. You get that near only because more than one
frame was asked for; with the default of one you would have searched in the wrong file.

And the published diagnosis? The key, it says, is the layer. Each chunk overwrites the last one's scores: that grows, but
only as the history grows. An entry for every chunk grows with the *square*. At the document's size:
"""

# %%
last_chunk = 32 * 32 * (1024 // 8) * (126 * 1024 // 8) * 2  # layers, heads, rows, columns, bytes
every_chunk = sum(last_chunk * i / 126 for i in range(1, 127))
leak = quoted("xattn_policy", "leak_growth_gb")
print(f"quoted   growth {leak.value} {leak.unit} [{leak.conditions}; {leak.source}]")
peaks = [quoted("xattn_policy", what) for what in ("full_peak_gb", "xattn_peak_gb")]
print(f"quoted   peaks after the fix: full {peaks[0].value}, sparse {peaks[1].value} {peaks[1].unit}")
print(f"derived  one entry a layer, at 2 bytes a score: {last_chunk / 1e9:.1f} GB after 126 chunks")
print(f"derived  one entry a chunk and layer: {every_chunk / 1e9:.0f} GB")

# %% [markdown]
r"""
Neither is 64. One entry a layer explains 4 GB; keeping every chunk's scores would need 268, and the card has 80,
which is where the growth ended. (An allocator that cannot reuse freed pieces for larger ones could also turn the first
into something else.) We cannot tell from outside. But **do the arithmetic of a leak before you believe its cause**: a fix
that makes a symptom go away is not yet an explanation. The peak after the fix was still 3.4 GB above full attention's; the
document suspects a cache, and says that it is a guess.
"""

# %% [markdown] course={"id": "d14.b3", "kind": "B", "role": "card"}
r"""
### Exercise 14-3 B · which number is it?

10 minutes · difficulty 2/3 · 4 points

Open [prefill/density.py](../course_lib/prefill/density.py) and [prefill/chunked.py](../course_lib/prefill/chunked.py).

* `layer0`: the line because of which the document's statistic sees one layer only;
* `document`: the line that makes `overall_density`;
* `bytes`: the line (or lines) that make `bytes_density`;
* `any_head`: the line of `chunked.py` that counts a block as selected if *one* KV head reads it;
* `itself`: the line of `chunked.py` that adds the chunk's own cells to `applied`.

`estimate_counted`: does the 52 % of the document count what was read to choose? `itself_counted`: does it count the
chunk itself? `True` or `False`. `published_bytes`: the run's bytes as a share of full attention's, two decimals.

Then write the sentence that should stand in the document's table instead of "~52 %", so that a reader can predict the time,
and say which of the three densities you would watch on a phone with a slow flash disk, and which on a server with everything
in memory.

<details><summary>Hint</summary>

`record` gets one call per chunk and layer.

</details>
"""

# %% [markdown] course={"id": "d14.b3", "kind": "B", "role": "answer", "points": 4, "minutes": 10, "difficulty": 2}
r"""
<!-- ANSWER d14.b3 -->
Answer: …

Evidence: path:first-last
"""

# %% course={"id": "d14.b3", "kind": "B", "role": "evidence"}
# EVIDENCE d14.b3
d14_b3 = {
    "layer0": "",  # "path:first-last"
    "document": "",
    "bytes": "",
    "any_head": "",
    "itself": "",
    "estimate_counted": None,  # True or False
    "itself_counted": None,
    "published_bytes": None,  # a number
}

# %% course={"id": "d14.b3", "kind": "B", "role": "check"}
check("d14.b3", d14_b3)

# %% [markdown]
r"""
## Summary

1. Attention over parts is exact if every part hands over its output *and* its log-sum-exp; the merge is exact in any order,
   and has the same bits only in a fixed one.
2. A ring of two slots hides the smaller of loading and computing; it gains at most half, nothing where one of the two is
   small, and a slot is free only when the computation on it is over.
3. A sparse prefill has three densities, mask, applied and bytes; it wins from slow storage only if ρ < 1 − κ, and a
   policy that reads everything to choose has κ = 1.

The formula: $\dfrac{T_\text{sparse}}{T_\text{full}} \approx \kappa + \rho$ · The number: **1.26**, what "half the
work" cost (quoted).

**Next**: day 15 turns to the other half of prefill, the weights, and reads them once. To read on:
[prefill/ring.py](../course_lib/prefill/ring.py), with all of 14-2;
`./course bench --prefill` measures every policy on three kinds of storage, and prints the break-even line of each.
"""
