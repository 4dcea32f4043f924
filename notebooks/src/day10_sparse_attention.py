# %% [markdown]
r"""
# Day 10/30 · 稀疏注意力 Sparse attention

**You need** Python and the dot product. Day 9 helps; six numbers below repeat what it gave you.

**You will be able to** say what block-sparse decode (块稀疏解码) costs and from which length on it
pays · choose by hand, ties included, the blocks (块) of the KV cache that one query reads ·
read a claim such as "attention −74 %" and say what it leaves out.

**Time** 90 minutes, six exercises. Sections follow articles 10-1 to 10-3 of the series
《0.8MB 跑通 Qwen》. Article 10-2 is quoted, and where your numbers differ from it, you will see both.

Numbers about speed, cost and published claims carry a label: **quoted** (from a document, source
shown) · **this machine** (measured in the cell you run) · **derived** (arithmetic) · **recorded** (a
stored run; its command is shown). A printed number without a label is a toy, a rank or a count from
the cell above it. Words that you miss are in the [glossary](../docs/glossary.md).
"""

# %% tags=["nbval-ignore-output"]
import inspect
import os
import re
import time

# One thread unless you chose, so that times compare. NumPy reads its own once, when it is imported.
for name in ("COURSE_THREADS", "OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS", "VECLIB_MAXIMUM_THREADS"):
    os.environ.setdefault(name, "1")

import numpy as np

from course_lib import attention, backend, sparse
from course_lib.classroom import check, solved_or
from course_lib.engine import Engine, generate_from
from course_lib.lab import decode_cost as cost_model
from course_lib.lab.needle import NeedleOptions, holds_value, prompt_of
from course_lib.lab.prompt_study import prompt_study
from course_lib.lab.published import group, quoted
from course_lib.lab.runs import load_run
from course_lib.paths import MODELS
from course_lib.show import BlockSelectionExplorer
from course_lib.show.plots import cost_bars, recall_by_k
from course_lib.show.text import fmt, percent

print("backend:", backend.info().name, "·", backend.info().reason)

# %% [markdown]
r"""
## A fact hidden in 2,061 tokens

The shipped model is a real Qwen3 network, only small. It was trained to look things up in long
notes and to do nothing else: it recalls, it does not chat.

The test is the article's own: many notes, in the middle one **needle** (针), at the end a question
about it.
"""

# %%
engine = Engine.load(MODELS / "needle-qwen3")
config = engine.config
prompt = prompt_of(engine, NeedleOptions(), 0)
n = len(prompt.ids)
needle_block = prompt.value_span[0] // 32
print(f"{n} prompt tokens = {sparse.n_blocks(n)} blocks of 32; the last holds {n % 32}")
print("needle:  ", prompt.fact.sentence, f"(block {needle_block})")
print("question:", prompt.question)
print("two lines before it:", *prompt.lines[prompt.needle_line - 2 : prompt.needle_line], sep="\n  ")
print(f"model: {config.num_hidden_layers} layers, {config.num_attention_heads} query heads, "
      f"{config.num_key_value_heads} KV heads, head_dim {config.head_dim}")

# %% [markdown]
r"""
The last line in words. A **layer** is one round of attention and a small network behind it; the model
runs its layers one after the other. In every layer several **query heads** look into the text side by
side, each for something else. A **KV head** is one set of stored keys and values; here two query heads
share each. `head_dim` is how many numbers a key has.

Read the prompt once, exactly. Then answer three times from the same cache (`fork` copies it):

* **exact**: every new token attends to all blocks;
* **k = 32**: every head, in every layer, picks 32 blocks for every new token;
* **k = 1**: every head picks one.

Before you run it: which of the three will name the food?
"""

# %% tags=["nbval-ignore-output"]
session = engine.prefill(prompt.ids)
arms = {k: generate_from(session.fork(), 32, k, trace=True) for k in (None, 32, 1)}
for k, answer in arms.items():
    name = "exact" if k is None else f"k = {k}"
    print(f"{name:7s} {engine.decode(answer.ids)!r}")
print("this machine, attention ms per token:",
      {str(k or "exact"): round(float(np.median(a.attn_ms)), 2) for k, a in arms.items()})

# %%
exact = arms[None]
for k, answer in arms.items():
    recalled = holds_value(engine.decode(answer.ids[1:]), prompt.fact.value)
    same = answer.ids == exact.ids
    blocks = float(np.mean(answer.blocks_read))
    print(f"{k or 'exact'!s:5}  recalled: {recalled!s:5}  same tokens as exact: {same!s:5}  "
          f"blocks read per head: {blocks:.0f}")

# %% [markdown]
r"""
Exact and $k = 32$ say the same, and $k = 32$ read half of the blocks. At $k = 1$ the sentence falls
apart: scraps of notes, and no food. So far this is the article's result, on a model more than a
thousand times smaller. Compare the attention times, too; they may surprise you, and 10-3 comes back to
them.

The article's own run, for comparison:
"""

# %%
for what in ("recall_k32", "recall_k1", "decode_ms_per_token_k1", "attn_ms_per_token_k1"):
    row = quoted("sparse_k", what)
    print(f"quoted  {what:23s} {row.value:>5} {row.unit:3s} [{row.source}: {row.conditions}]")

# %% [markdown]
r"""
### Recap: attention in six numbers

While the model reads the prompt (**prefill**), every token leaves a key $k_t$ and a value $v_t$ in
the **KV cache**. When it writes (**decode**), one query $q$ asks all of them:

$$ s_t = \frac{q \cdot k_t}{\sqrt d}, \qquad w_t = \frac{e^{s_t}}{\sum_u e^{s_u}}, \qquad
\text{out} = \sum_t w_t\, v_t . $$

Take $d = 1$, $q = 1$, six tokens. Only token 4 has a key that fits.
"""

# %%
q = np.ones((1, 1), np.float32)
k = np.array([0, 0, 0, 0, 3, 0], np.float32).reshape(1, 6, 1)
v = np.array([10, 20, 30, 40, 50, 60], np.float32).reshape(1, 6, 1)
print("weights:", [fmt(w) for w in attention.softmax(k[0, :, 0])])
print("output: ", fmt(attention.two_pass(q, k, v)[0, 0]))

# %% [markdown]
r"""
Check it: $e^3 \approx 20.1$ against five ones, so token 4 holds $20.1/25.1 = 0.80$ of the weight.

**The whole idea of today:** the other five tokens matter little. Cut the cache into blocks, here of
two tokens, and read only some of them.
"""

# %%
def read_blocks(ids):
    tokens = [t for b in ids for t in (2 * b, 2 * b + 1)]
    return float(attention.two_pass(q, k[:, tokens], v[:, tokens])[0, 0])


for ids in ([0, 1, 2], [0, 2], [0, 1]):
    print(f"blocks {ids!s:9}  output {fmt(read_blocks(ids))}")

# %% [markdown]
r"""
Without block 1 the output moves from 46.4 to 47.4. Without block 2 it becomes 25: a plain
average of the wrong values.

Look at what did *not* happen. Nothing failed. Softmax divides by the sum over what it was shown, so
the weights add up to 1 again, and the 80 % that went missing leave no trace. **Sparse attention is
never unsure: it is right, or it is confidently wrong.** All rests on the choice of blocks.
"""

# %% [markdown]
r"""
## 10-1 为什么必须稀疏 · O(n²) against O(n·k)

Count multiply-adds for one head and one new token, with $n$ tokens in the cache.

* **Exact**: $n\,d$ for the scores and $n\,d$ for the weighted sum. Together $2nd$. To write a text
  of $n$ tokens you pay this $n$ times: $O(n^2)$.
* **Sparse**: the same, but for $k$ blocks of $b = 32$ tokens: $2kbd$, whatever $n$ is. Over the
  text: $O(n \cdot k)$.

One thing is missing. Somebody has to choose the blocks, and must look at all of them to do so. The
engine's **probe** (探针) scores a few keys of every block, evenly spaced, and takes the best.

The article says that probing costs about 8×128 multiply-adds a block, in all "几十分之一", one part
in several tens, of a full attention. **Your guess**: which share of the keys is probed?
"""

# %%
print("block 0:", sparse.probe_positions(0, n).tolist())
print("last block:", sparse.probe_positions(sparse.n_blocks(n) - 1, n).tolist())
for length in (n, 4096):
    probed = sum(len(sparse.probe_positions(b, length)) for b in range(sparse.n_blocks(length)))
    print(f"n = {length}: {probed} keys probed = {percent(probed / length)} of the scores (QK), "
          f"{percent(probed / (2 * length))} of QK + PV")

# %% [markdown]
r"""
Eight of 32 keys are a quarter of all scores, and an eighth of the whole attention (derived): 12.5 %,
not a few hundredths. The article's count per block, 8×128, is right. Set it against the block's own
2×32×128 and the share follows.

It sounds like a detail. But a probe of every block makes the choice itself grow with $n$:

$$ \text{sparse}(n) = \underbrace{\tfrac{n_\text{probe}}{b}\, n d}_{\text{probe: grows}} +
\underbrace{2 k b d}_{\text{attend: constant}}, \qquad
\lim_{n \to \infty} \frac{\text{sparse}}{\text{exact}} = \frac{n_\text{probe}}{2b} = \frac18 . $$

Predict: when a text grows from 8K to 16K tokens, by which factor does the work grow? And how many
times faster can attention get at best, at any length?
"""

# %%
print("derived, d = 128, k = 32 blocks; M = million multiply-adds of one head")
print(f"{'n':>7} {'exact/token':>12} {'sparse/token':>13} {'ratio':>6} {'text ×2: exact':>15} {'sparse':>7}")
for length in (2048, 4096, 8192, 16384, 131072, 1048576):
    dense, sparse_cost = 2 * length * 128, length // 4 * 128 + 2 * 32 * 32 * 128
    whole = [m**2 / 8 + 2048 * m for m in (length, 2 * length)]  # the sum over a text of m tokens
    print(f"{length:7d} {dense / 1e6:10.2f} M {sparse_cost / 1e6:11.2f} M {sparse_cost / dense:6.3f} "
          f"{4.0:15.1f} {whole[1] / whole[0]:7.2f}")

# %% [markdown]
r"""
Exact work quadruples when a text doubles. Sparse work starts near 2 and creeps back to 4: with a
probe of every block it is $O(n k + n^2/8)$. Quadratic still, with a small constant. And the ratio
never falls below 1/8: at eight probes a block, attention gets **at most eight times** cheaper.

Multiply-adds are half the story. Decode mostly waits for memory, so count bytes too. The public
engine keeps its int8 cache *and* a float32 mirror of it, and probes the mirror.
"""

# %%
d, length = 128, 4096
rows = {
    "exact, int8 K and V": 2 * length * (d + 4),  # a row: d bytes and a 4-byte scale
    "  of it: all K": length * (d + 4),
    "probe, int8 K": length // 4 * (d + 4),
    "probe, float32 mirror": length // 4 * 4 * d,
    "attend, 32 blocks, int8": 2 * 32 * 32 * (d + 4),
}
print(f"derived: bytes read for one KV head and one token, n = {length}, d = {d}")
for name, size in rows.items():
    print(f"{name:24s} {size:9,d}  {percent(size / rows['exact, int8 K and V'])}")

# %% [markdown]
r"""
A quarter of the rows, four times as wide: probing the mirror reads about as many bytes as a scan of
*all* int8 keys. What was 12.5 % of exact attention's work is 48.5 % of its traffic.
"""

# %% [markdown] course={"id": "d10.a1", "kind": "A", "role": "card"}
r"""
### Exercise 10-1 A · the price of a token

15 minutes · difficulty 2/3 · 5 points · about 10 lines

Count the multiply-adds of one head and one decoded token, exactly, in whole numbers.

* `"dense"`: exact attention, scores and weighted sum.
* `"probe"`: the probes of all blocks. A block of `m` tokens (the last one may be short) is probed at
  offsets 0, step, 2·step, … below `m`, with `step = max(1, m // n_probe)`.
* `"attend"`: attention over `k_blocks` full blocks.
* Where `n <= 2 * block_size` or `n <= k_blocks * block_size` the engine stays exact: `"probe"` is 0 and
  `"attend"` equals `"dense"`.

<details><summary>Hint 1: how many offsets?</summary>

`range(0, m, step)` has a length.

</details>

<details><summary>Hint 2: how many blocks of each kind?</summary>

`divmod(n, block_size)` gives the number of full blocks and the length of the short one, which may
be 0.

</details>
"""

# %% course={"id": "d10.a1", "kind": "A", "role": "answer", "points": 5, "minutes": 15, "difficulty": 2}
# EXERCISE d10.a1
def decode_cost(n, k_blocks, head_dim, block_size=32, n_probe=8):
    """Return the multiply-adds of one head and token: {"dense", "probe", "attend"}, integers.

    n: tokens in the cache. ValueError where an argument is below 1.
    >>> decode_cost(4096, 32, 128)
    {'dense': 1048576, 'probe': 131072, 'attend': 262144}
    """
    raise NotImplementedError("d10.a1")


# %% course={"id": "d10.a1", "kind": "A", "role": "check"}
check("d10.a1", decode_cost)

# %% [markdown]
r"""
**From which length on is sparse always cheaper?** Solve $\tfrac n4 + 2kb = 2n$ on paper first:
$n = \tfrac87 kb$. For $k = 32$ that is 1,170. The cell looks for the exact break-even with your
function, or with ours while yours does not pass.
"""

# %%
cost = solved_or(decode_cost, cost_model.decode_cost)


def break_even(k, lengths):
    costs = [(m, cost(m, k, 1)) for m in lengths]
    return 1 + max(m for m, c in costs if c["probe"] + c["attend"] >= c["dense"])


for k_blocks in (1, 4, 32, 64):
    at = break_even(k_blocks, range(1, 45 * k_blocks + 100))
    print(f"k = {k_blocks:2d}: 8/7·k·b = {8 * k_blocks * 32 / 7:6.1f}, exact break-even n = {at}")

# %% [markdown]
r"""
The same costs as a picture. Exact attention is 100 in every row. Which part shrinks as the context
grows, and which part stays?
"""

# %%
bars = {}
for length in (2048, 4096, 16384, 65536):
    c = cost(length, 32, 128)
    bars[f"n = {length}"] = {part: 100 * c[part] / c["dense"] for part in ("probe", "attend")}
cost_bars(bars, label="derived: k = 32, block 32, 8 probes", unit="percent of exact attention")

# %% [markdown]
r"""
A check against the board. Article 10-2 quotes decode attention at 4K from the table of 10-1: exact
against $k = 32$.
"""

# %%
c = cost(4096, 32, 128)
before, after = quoted("sparse_k", "decode_attn_exact_4k"), quoted("sparse_k", "decode_attn_k32_4k")
print(f"quoted   {before.value} → {after.value} ms: {after.number / before.number:.2f} of exact"
      f"  [{after.conditions}, {after.source}]")
print(f"derived  without the probe: {c['attend'] / c['dense']:.3f} of exact")
print(f"derived  with the probe:    {(c['probe'] + c['attend']) / c['dense']:.3f} of exact")
read = rows["probe, float32 mirror"] + rows["attend, 32 blocks, int8"]
print(f"derived  in bytes, float32 mirror probed: {read / rows['exact, int8 K and V']:.3f} of exact")
c = cost(n, 1, 128)
print(f"derived  at k = 1, n = {n}: {percent(c['probe'] / (c['probe'] + c['attend']))} "
      "of the remaining work are probes")

# %% [markdown]
r"""
Attention went down to half, not to a quarter. Counted in multiply-adds with the probe you would expect
0.375, counted in bytes 0.735; the board's 0.50 lies between. A model that leaves out the probe predicts a speed
that nobody measured.

Keep the last line in mind. At $k = 1$ nearly all of the remaining work is probing. In 10-2 you
will see what those probes decide at $k = 1$: nothing.
"""

# %% [markdown]
r"""
**The gates.** The engine does not always do what its flag says. In `course_lib` the decision is
this function:
"""

# %%
print(inspect.getsource(sparse.sparse_decode_gate))
for tokens in (64, 65, 512, 1024, 1025, n):
    opens = {k: sparse.sparse_decode_gate(tokens, k) for k in (1, 32)}
    print(f"n = {tokens:4d}: k = 1 sparse {opens[1]!s:5}  k = 32 sparse {opens[32]!s:5}")

# %% [markdown]
r"""
The first condition is the public engine's gate. (Later versions of that engine add $n \ge 1024$,
says its documentation.) The second is ours: with $n \le kb$ all blocks would be chosen anyway.
No answer changes, only work is saved.
"""

# %% [markdown] course={"id": "d10.b1", "kind": "B", "role": "card"}
r"""
### Exercise 10-1 B · what switches sparsity on

15 minutes · difficulty 2/3 · 3 points

Open [sparse.py](../course_lib/sparse.py), [engine/decode.py](../course_lib/engine/decode.py) and
[sparse_prefill.py](../course_lib/sparse_prefill.py).

* `decode_gate`: the line that holds the two conditions. `asked_in`: the line in `decode.py` that
  asks it. `prefill_gate`: the line where *prefill* decides for itself.
* `first_n_k1`, `first_n_k32`: the smallest number of cached tokens at which decode really prunes,
  for $k = 1$ and $k = 32$.
* `break_even_k16`: the $n$ from which on $k = 16$ always needs fewer multiply-adds than exact
  (use your function).

Then say in two or three sentences: what does a user of `--sparse-k 32` with a prompt of 900 tokens
get (the public engine's flag; here it is `decode_k=32`), and how would they notice? Is the gate at the
break-even?

<details><summary>Hint</summary>

Write places as `"course_lib/sparse.py:120-121"`. A line too many at either end does no harm.

</details>
"""

# %% [markdown] course={"id": "d10.b1", "kind": "B", "role": "answer", "points": 3, "minutes": 15, "difficulty": 2}
r"""
<!-- ANSWER d10.b1 -->
Answer: …

Evidence: path:first-last
"""

# %% course={"id": "d10.b1", "kind": "B", "role": "evidence"}
# EVIDENCE d10.b1
d10_b1 = {
    "decode_gate": "",  # "path:first-last"
    "asked_in": "",
    "prefill_gate": "",
    "first_n_k1": None,  # a number
    "first_n_k32": None,
    "break_even_k16": None,
}

# %% course={"id": "d10.b1", "kind": "B", "role": "check"}
check("d10.b1", d10_b1)

# %% [markdown]
r"""
## 10-2 选哪些块 · Which blocks

Four steps, for every layer and every query head on its own:

1. **Probe** 探针: score every block by the largest $q \cdot k$ among its probed keys.
2. **Importance** 重要性: $\lfloor (k+1)/2 \rfloor$ places go to the blocks that prefill looked at most.
3. **Top-k**: the other places go to the best probe scores.
4. **Recency** 最近块保险: if the last block is not chosen by now, it replaces the weakest *probe*
   block. Blocks chosen by importance are never displaced.

Ties always go to the lower block number: the same query and the same cache must give the same
blocks, or no run could be repeated.

**Step 1 by eye.** One block of eight keys, $q = 1$, two probes. What does the probe see?
"""

# %%
keys = np.array([1, 0, 2, 0, 3, 9, 0, 1], np.float32)
seen = sparse.probe_positions(0, 8, block_size=8, n_probe=2)
score = sparse.probe_scores([1.0], keys[:, None], block_size=8, n_probe=2)
print("keys  ", keys.astype(int).tolist())
print("probed", seen.tolist(), "→ scores", keys[seen].astype(int).tolist())
print("block score", int(score[0]), "· the true maximum is", int(keys.max()))

# %% [markdown]
r"""
The 9 stands between two probes. A probe can miss exactly what it is looking for. In 10-3 you will
see whether it does.

**Step 2 by eye.** While reading the prompt, every token spread a weight of 1 over itself and the
tokens before it. Importance adds up what each position received. Let four tokens look at everything
equally. Which position wins?
"""

# %%
received = np.zeros(4, np.float32)
nothing = np.zeros((1, 4, 1), np.float32)  # all scores equal: uniform weights
attention.causal_attention(nothing, nothing, nothing, importance=received)
print("importance:", [fmt(x) for x in received])

# %% [markdown]
r"""
Token 0 received $1 + \tfrac12 + \tfrac13 + \tfrac14 = 2.08$, token 3 only its own quarter. **Early
tokens win because more tokens come after them**, whatever they say. The article writes that the
most important block lies at the tail (尾部). Which block is it in the real model?
"""

# %%
def importance_order(session):
    return np.argsort(-sparse.importance_sums(session.importance), kind="stable")


for index in (0, 1):
    study = prompt_study(engine, prompt_of(engine, NeedleOptions(), index))  # prefilled once
    order = importance_order(study.session).tolist()
    block = study.needle_block
    print(f"prompt {index}: first by importance {order[:5]}, last {order[-3:]}; "
          f"needle's block {block} is number {order.index(block) + 1} of {len(order)}")
short = NeedleOptions(tokens=515)
tops = [int(importance_order(engine.prefill(prompt_of(engine, short, index).ids))[0])
        for index in range(12)]
print("12 prompts of 515 tokens, the most important block:", tops)

# %% [markdown]
r"""
Block 0, in every prompt, the long and the short. The tail comes last. And look at the needle's block:
its rank is nearly its place in the text. (The article's own importance array cannot be seen from
outside. The last section shows what is odd about that run.)

How much of this is the model, and how much the arithmetic of "more tokens come after me"?
"""

# %%
sums = sparse.importance_sums(session.importance)
heads = config.num_hidden_layers * config.num_attention_heads
harmonic = np.cumsum(1 / np.arange(n, 0, -1))[::-1]  # position p receives 1/(p+1) + … + 1/n
uniform = sparse.importance_sums((heads * harmonic).astype(np.float32))
print("block   measured   if all attention were uniform")
for block in (0, 1, 8, 16, needle_block, 48, 63, 64):
    print(f"{block:5d} {sums[block]:10.0f} {uniform[block]:10.0f}"
          + ("   ← the needle's block" if block == needle_block else ""))
around = range(needle_block - 3, needle_block + 4)
print("measured, blocks", {b: round(float(sums[b])) for b in around})

# %% [markdown]
r"""
Mostly arithmetic. The model adds its habits: block 0 gets more than its share (networks like to park
attention on the first tokens), and so does the end, where the question stands. The needle's block got
325, more than the 263 of arithmetic. Did the question lift it? Look at the last line: its neighbours,
which nobody asked about, hold between 258 and 349. In this sum the question left **no visible trace**.

Summed over all prompt queries, "importance" is first of all a measure of **how early** a block stands. Day
11 counts only the last queries instead.
"""

# %% [markdown]
r"""
**Steps 2 to 4 by eye.** Six blocks, already scored:

| block | 0 | 1 | 2 | 3 | 4 | 5 (last) |
|---|---|---|---|---|---|---|
| probe | 2 | **7** | **7** | 1 | 5 | 3 |
| importance | 9 | 0 | 1 | **4** | **4** | 0 |

There are two ties. Take $k = 4$ and write down, in order, the blocks chosen by importance, then by
probe, then what recency does. Only then run the cell. (I, P, R: by importance, by probe, by recency.
E: evicted by recency.)
"""

# %%
LETTER = {"importance": "I", "probe": "P", "recency": "R"}
probe = np.array([2, 7, 7, 1, 5, 3], np.float32)
importance = np.array([9, 0, 1, 4, 4, 0], np.float32)


def by_library(probe, importance, k_blocks):
    chosen = sparse.select_from_scores(probe, importance, k_blocks)
    return [(int(b), LETTER[chosen.reason[b]]) for b in chosen.order]


print("k = 4, in order of choice:", by_library(probe, importance, 4))
print("evicted:", sparse.select_from_scores(probe, importance, 4).evicted)
print("ranks by probe:", sparse.select_from_scores(probe, importance, 4).probe_rank.tolist())

# %% [markdown]
r"""
Three ties were decided. Importance: blocks 3 and 4 both have 4, the lower goes in. Probe: 1 before
2. Recency: block 5 must come in, the weakest probe blocks are 1 and 2, equal; the one
chosen *first* leaves, block 1. So the tie that block 1 won in step 3 cost it its place in step 4.

Now every $k$:
"""

# %%
print("        with importance", " " * 27, "importance off")
for k_blocks in range(1, 7):
    row = [" ".join(f"{b}{why}" for b, why in by_library(probe, imp, k_blocks))
           for imp in (importance, None)]
    budget = (k_blocks + 1) // 2
    print(f"k = {k_blocks}   {row[0]:19s} budget {budget}, probe and recency {k_blocks - budget}    {row[1]}")

# %% [markdown]
r"""
Read down the left column; these are facts of the rule, not of this toy:

* **k = 1**: the one place goes to importance. No probe, no recency. *"The last block is always kept"*
  does not hold here.
* **k = 2, 3**: one place for the probe, and recency takes it, unless the last block is in already.
* **k = 4** is the first $k$ at which a block gets in on its probe score for sure.
* **Importance off, k = 1**: recency takes the only place. The last block is always read.
"""

# %% [markdown]
r"""
### Why this block?

The explorer shows one query of the real model: the one that is about to write the needle's value, in
the head that looks at the needle most. Every block carries a letter; below it stand its share of exact
attention, its probe score and its importance; at the bottom, what the model says at this $k$. (A
**margin** is the best next token's score minus the second best's. Where it is nearly 0, rounding decides
which token comes, so the text under the picture stops there.)

It opens at $k = 1$. **Predict first**, from the toy: which block is read, with which letter? Is the last
block read? And what will be said about the needle's block?
"""

# %%
explorer = BlockSelectionExplorer(engine, k=1)
explorer

# %% [markdown]
r"""
Now move the controls (all work from the keyboard) and find out:

* from which $k$ on is the needle's block read, and with which letter?
* at $k = 2$, which letter does the last block get, and at whose cost?
* switch importance off at $k = 1$: which block is read now?
* lower `n_probe` to 1 at $k = 4$: does the needle's block keep its place?
* make the blocks 128 tokens long at $k = 4$: four times the text is read. Is the needle safer?

The next cell answers your prediction, then makes the same moves for those who read on paper.
"""

# %%
r = explorer.compute(k=1)
selection, last = r["selection"], r["n_blocks"] - 1
print("k = 1 reads", {b: r["reason"][b] for b in selection.ids.tolist()},
      f"· the last block, {last}: {r['reason'][last]}")
print(f"the needle's block, {needle_block}: {percent(r['mass'][needle_block])} of exact attention's "
      f"weight, probe rank {selection.probe_rank[needle_block]}, importance rank "
      f"{selection.importance_rank[needle_block]} of {last + 1}: {r['reason'][needle_block]}")
for importance_rule in ("all_queries", "none"):
    print(f"importance {importance_rule}")
    for k_blocks in (1, 2, 4, 8, 16, 32):
        r = explorer.compute(k=k_blocks, importance=importance_rule)
        letters = " ".join(f"{LETTER[why]} {r['reason'].count(why)}" for why in LETTER)
        print(f"  k = {k_blocks:2d}: {letters:16s} needle's block: {r['reason'][needle_block]:18s} "
              f"weight read {percent(r['mass'][r['read']].sum()):>7}  recalled {r['answer'].recalled}")
r = explorer.compute(k=4, n_probe=1)
print(f"k = 4, n_probe 1: needle's block: {r['reason'][needle_block]}, probe rank "
      f"{r['selection'].probe_rank[needle_block]}; with 8 probes rank "
      f"{explorer.compute(k=4)['selection'].probe_rank[needle_block]}")
r = explorer.compute(k=4, block_size=128)
print(f"k = 4 in blocks of 128: needle's block: {r['reason'][r['needle_block']]}, probe rank "
      f"{r['selection'].probe_rank[r['needle_block']]} of {r['n_blocks']}, "
      f"recalled {r['answer'].recalled}")

# %% [markdown]
r"""
Stop at three lines.

**k = 1, importance on.** Exact attention puts nearly all of its weight on the needle's block, and *the probe
found it*: rank 1 of 65. It is not read, because $1 - 1 = 0$ places are left for the probe. That is the article's
explanation of the collapse, and it holds: the search was done, paid for, and thrown away.

**k = 2, importance on.** Now the needle's block wins the only probe place. And recency throws it out: letter E.
With importance off, $k = 2$ has two probe places, recency takes the weaker one, and the
fact is recalled. So at $k \le 2$ it is not the search that fails: the reservation and the insurance take
every place it could have filled.

**k = 4, blocks of 128.** Four times the text, and this head misses the needle: eight probes see one key in
sixteen, and the block's rank falls from 1 to 5. (The answer is right all the same. Other heads choose for
themselves.)
"""

# %% [markdown] course={"id": "d10.a2", "kind": "A", "role": "card"}
r"""
### Exercise 10-2 A · choose the blocks

25 minutes · difficulty 3/3 · 8 points · about 15 lines

Write steps 2 to 4. Input: one probe score per block, one importance sum per block (or `None`), and $k$.
Return the chosen blocks **in order of choice**, each with its letter: `"I"`, `"P"` or `"R"`. A recency
block stands where the block that it replaced stood.

Mind: ties · $k$ above the number of blocks · an importance array of zeros is an array (its ties
reserve the first blocks); only `None` means none · your arguments must stay as they were.

<details><summary>Hint 1: best first, ties to the lower block</summary>

`sorted(range(n), key=lambda b: (-scores[b], b))`

</details>

<details><summary>Hint 2: when does recency act?</summary>

Three conditions: some block was chosen by probe, some block is not chosen, and the last block is not
among the chosen.

</details>

<details><summary>Hint 3: which block leaves?</summary>

`min(..., key=...)` over the places after the reserved ones returns the first of equals.

</details>
"""

# %% course={"id": "d10.a2", "kind": "A", "role": "answer", "points": 8, "minutes": 25, "difficulty": 3}
# EXERCISE d10.a2
def select_blocks(probe, importance, k_blocks):
    """Return [(block, letter), ...] in order of choice; letter "I", "P" or "R".

    probe: float32 [n_blocks]; importance: float32 [n_blocks] or None. ValueError where k_blocks < 1.
    >>> select_blocks([2, 7, 7, 1, 5, 3], [9, 0, 1, 4, 4, 0], 4)
    [(0, 'I'), (3, 'I'), (5, 'R'), (2, 'P')]
    """
    raise NotImplementedError("d10.a2")


# %% course={"id": "d10.a2", "kind": "A", "role": "check"}
check("d10.a2", select_blocks)

# %% [markdown]
r"""
Now on the model. The $k = 32$ answer above left a trace: one selection per token, layer and head. Does
your function (or ours) choose the same blocks, in the same order? Below the numbers stands the rule as
`course_lib` has it, for all heads of a layer at once: importance sums are shared by the heads, probe
scores are not.
"""

# %%
choose = solved_or(select_blocks, by_library)
trace = [s for step in arms[32].selections for layer in step for s in layer]
same = sum([b for b, _ in choose(s.probe, s.importance, 32)] == s.order.tolist() for s in trace)
print(f"{same} of {len(trace)} selections equal")
letters = "".join(why for s in trace for _, why in choose(s.probe, s.importance, 32))
print("chosen by", {name: letters.count(name) for name in "IPR"})
print()
print(inspect.getsource(sparse.select_heads))

# %% [markdown] course={"id": "d10.b2", "kind": "B", "role": "card"}
r"""
### Exercise 10-2 B · four segments

20 minutes · difficulty 2/3 · 4 points

Open [sparse.py](../course_lib/sparse.py) and mark the lines of

* `probe`: sampling the keys, the dot products and their maximum, in one function;
* `importance`: from ranking the sums to the number of reserved places;
* `top_k`: the line (or lines) that fill the rest;
* `recency`: from its conditions to the replacement;
* `ties`: the line that decides them for importance *and* probe;
* `only_probe_blocks`: the line because of which importance blocks cannot be displaced.

`budget_k1`, `budget_k32`: the places reserved for importance at $k = 1$ and $k = 32$.

Then tell the life of one block in three sentences: how it got in, or why it did not. And: why must
recency not displace an importance block, seen from the designer's side?
"""

# %% [markdown] course={"id": "d10.b2", "kind": "B", "role": "answer", "points": 4, "minutes": 20, "difficulty": 2}
r"""
<!-- ANSWER d10.b2 -->
Answer: …

Evidence: path:first-last
"""

# %% course={"id": "d10.b2", "kind": "B", "role": "evidence"}
# EVIDENCE d10.b2
d10_b2 = {
    "probe": "",  # "path:first-last"
    "importance": "",
    "top_k": "",
    "recency": "",
    "ties": "",
    "only_probe_blocks": "",
    "budget_k1": None,  # a number
    "budget_k32": None,
}

# %% course={"id": "d10.b2", "kind": "B", "role": "check"}
check("d10.b2", d10_b2)

# %% [markdown]
r"""
## 10-3 诚实的坑 · Honest pitfalls

When does sparsity gain nothing? When does a true number mislead? Nine cases, each with a number you
can check.

### Short contexts

Choosing costs time: probes, ranking, jumping from block to block. Exact attention skips all that and
reads memory in one sweep. Random int8 rows, one decoded token, one layer, two shapes: the shipped
model's, and that of the article's 2B model. One thread. And two programs that do the same: NumPy, and
the compiled kernels that this machine runs. **Predict**: at which length does `k = 32` win, in which
shape, and with which program first?
"""

# %%
def best_ms(run):
    """The fastest of at least three runs: what else the machine does can only make a run slower."""
    run()  # the first call warms caches
    times = []
    while len(times) < 3 or sum(times) < 0.01:
        start = time.perf_counter()
        run()
        times.append(time.perf_counter() - start)
    return 1e3 * min(times)


def decode_ms(num_heads, num_kv_heads, head_dim, length):
    rng = np.random.default_rng(length)
    q = rng.random((num_heads, head_dim), dtype=np.float32)
    k, v = rng.integers(-127, 128, (2, num_kv_heads, length, head_dim), dtype=np.int8)
    rows = (k, v, *rng.random((2, num_kv_heads, length), dtype=np.float32))
    return (best_ms(lambda: attention.two_pass(q, *rows)),
            best_ms(lambda: sparse.sparse_attention(q, *rows, k_blocks=32)))


# %% tags=["nbval-ignore-output"]
SECONDS = 2.5  # for one program; a busy or slow machine leaves out the longest lengths
for name in dict.fromkeys(("numpy", backend.info().variant)):
    start = time.perf_counter()
    for shape in ((4, 2, 64), (16, 8, 128)):
        print("this machine, {}: {} query heads, {} KV heads, head_dim {}".format(name, *shape))
        took = 0.0
        for length in (512, 1024, 2048, 4096, 8192, 16384):
            began = time.perf_counter()
            if began - start + 2 * took > SECONDS:  # twice the tokens, about twice the time
                print(f"  n = {length:5d}  and longer: left out, {SECONDS} s would not be enough here")
                break
            with backend.using(name):
                exact, chosen = decode_ms(*shape, length)
            took = time.perf_counter() - began
            print(f"  n = {length:5d}  exact {exact:7.3f} ms   k=32 {chosen:7.3f} ms "
                  f"= {chosen / exact:4.2f} of exact")

# %% [markdown]
r"""
Up to 1,024 tokens `k = 32` leaves nothing out: all it can do is cost. (The engine's gate would stay exact;
this cell calls the sparse path directly.) Above that, the small shape needs a long context to win, if
it does, because a small cache is read in no time. At 16K the multiply-adds of 10-1 predict 0.19 of exact;
compare.

If your machine has compiled kernels, look at what they did to the *question*. Both columns fell, but not
alike: NumPy's exact attention first makes a float copy of every int8 row and fetches fresh memory for it,
so there was much to save; a good dense kernel reads the rows once and leaves less. **A crossover length
belongs to a machine and a program, not to an algorithm.** A speed-up measured against a slow baseline is
a fact about the baseline. (Times of a busy machine jump; run the cell twice before you believe one line.)

So an engine that may choose has to measure first. `./course bench` does, with caches that no CPU cache
holds, and remembers where block-sparse decode begins to win on your machine; `decode_k="auto"` reads all
rows below that length and 32 blocks above it; without compiled kernels it always reads all rows. (Without a
bench on this machine it goes by numbers of ours.) What is measured must not be decided that way: an
experiment about blocks asks for its blocks and gets them.

### Many blocks

The engine's changelog gives the time of a whole token at 16K for three $k$ and for exact attention.
Two differences between neighbours are the price of one block. Is a chosen block as cheap as a block of exact
attention?
"""

# %%
at_16k = {row.what: row for row in group("decode_vs_k_16k")}
ms = {int(name[1:]): row.number for name, row in at_16k.items() if name != "dense"}
dense = at_16k["dense"]
print("quoted  ", {name: f"{row.value} {row.unit}" for name, row in at_16k.items()},
      f"[{dense.conditions}; {dense.source}]")
for low, high in ((32, 128), (128, 256)):
    price = (ms[high] - ms[low]) / (high - low)
    print(f"derived  k = {low} → {high}: {price:.3f} ms a block")
print(f"derived  exact: the whole token, {dense.value} ms over 512 blocks, is "
      f"{dense.number / 512:.3f} ms a block")
print(f"derived  sparse stops winning near k = {256 + (dense.number - ms[256]) / price:.0f} of 512; "
      f"multiply-adds alone would say {512 * 7 // 8}")

# %% [markdown]
r"""
A chosen block costs about as much as a block of exact attention *with all the rest of the token* spread
over it: scattered rows are fetched block by block, a full sweep is not. So the sparse path
must leave out far more than one eighth of the blocks before it wins.

### Quality: where is the floor?

Two hundred prompts like the one above, prefill always exact, only the decode $k$ changes. "Answer ppl" is the
**perplexity** of the right answer: $e$ to the mean of $-\log(\text{probability})$ that the model gives its tokens;
1 is certainty. The article's numbers
come from other models (an 8B on x86 at 4,096 tokens; a 2B on the board at 2,061). The
floor of *your* model and *your* task you have to find yourself; that is the article's advice too.
"""

# %%
run = load_run("needle_k_sweep")
print(f"recorded: {run['command']} · version {run['course_version']} · "
      f"backend {run['backend']} · {run['date']}")
floor = {int(row.what.removeprefix("ppl_k")): f"ppl {row.value} [{row.conditions}]"
         for row in group("sparse_quality")}
print(f"{'k':>5} {'recall':>8} {'identical':>10} {'answer ppl':>11}   quoted, article 10-2")
for row in run["summary"]:
    print(f"{row['k']!s:>5} {percent(row['recall']):>8} {percent(row['identical_to_exact']):>10} "
          f"{row['answer_perplexity']:11.3f}   {floor.get(row['k'], '')}")

# %% [markdown]
r"""
Three readings.

* $k = 32$ keeps nearly all that exact attention knows: 198 of 200 texts, token for token. The 8B model of the
  quoted column had lost its needle at 16 already: same $k$, another model, another floor.
* From 16 down to 4 the loss is small. Then comes a cliff, between 4 and 2: exactly where, by the rule of 10-2,
  the last sure place for the probe disappears.
* At $k = 2$ nearly nothing is recalled, yet the perplexity of the right answer is thirty times smaller than at
  $k = 1$. What do such texts look like?
"""

# %%
for k_blocks in (16, 8, 4, 2, 1):
    wrong = [r for r in run["records"] if r["k"] == k_blocks and not r["recalled"]]
    right = sum(r["k"] == k_blocks for r in run["records"]) - len(wrong)
    text = wrong[0]["text"][:70].replace("\n", "⏎") if wrong else ""
    print(f"k = {k_blocks:2d}  right {right:3d}, wrong {len(wrong):3d}"
          + (f"; asked for {wrong[0]['value']!r}: {text!r}" if wrong else ""))

# %% [markdown]
r"""
At $k = 1$ anyone sees that something broke. At $k = 2$ you often get a tidy sentence with a wrong value.
**Count facts, not fluency.**

### A mild test

"Byte-identical with exact at 2K" is a true and welcome result. How hard was the test?
"""

# %%
for length in (1024, n, 4096, 8192, 16384):
    blocks = sparse.n_blocks(length)
    print(f"n = {length:5d}: k = 32 reads {min(32, blocks):2d} of {blocks:3d} blocks = "
          f"{percent(min(32, blocks) / blocks)}; the same share of {sparse.n_blocks(n)} blocks is "
          f"k = {min(65, round(32 / blocks * 65, 1)):g}")

# %% [markdown]
r"""
At 2,061 tokens $k = 32$ reads half of the cache. At 16K the same flag reads 6 %. A test that says
something about 16K uses $k = 4$ here, and at $k = 4$ twelve of 200 needles are lost. Always report
**the share of blocks read** beside a quality number.

### Between the probes

A full block is probed at offsets 0, 4, …, 28. The first token of the needle's value stands at one of 32
places. Does it matter whether that place is probed, that is, whether the position is a multiple of 4?
"""

# %%
records = run["records"]
for k_blocks in (32, 16, 8, 4):
    arm = [(r["value_position"], r["recalled"]) for r in records if r["k"] == k_blocks]
    cells = []
    for rest in range(4):
        hits = [recalled for position, recalled in arm if position % 4 == rest]
        cells.append(f"{rest}: {sum(hits):2d}/{len(hits):2d}")
    last = [recalled for position, recalled in arm if position % 32 == 31]
    print(f"recorded, k = {k_blocks:2d}, recalled by position mod 4   " + "   ".join(cells)
          + f"   of them at offset 31 of a block: {sum(last)}/{len(last)}")

# %% [markdown]
r"""
It does matter. At $k = 32$, 16 and 8 **every** lost needle stands at 3 mod 4, and at $k = 32$ every one
stands at offset 31, the last place of its block. Let us look at the first of them. What does its query find,
and what does the probe see of it?
"""

# %%
lost = next(r for r in records if r["k"] == 32 and not r["recalled"])
study = prompt_study(engine, prompt_of(engine, NeedleOptions(seed=run["options"]["seed"]), lost["index"]))
layer, head = study.retrieval_head
query = study.record.queries[study.value_step, layer, head]
kv = attention.kv_head(head, config.num_attention_heads, config.num_key_value_heads)
raw = study.session.cache.rows(layer).k[kv] @ query  # q·k of every token, as the probe computes it
first, end = study.prompt.needle_span
for t in range(first, end):
    print(f"block {t // 32} offset {t % 32:2d}  {'probed' if t % 4 == 0 else '      '}  "
          f"q·k {fmt(raw[t]):>6}  {engine.decode([study.prompt.ids[t]])!r}")
chosen = study.record.selection(study.value_step, layer, head, k_blocks=32, n_probe=8,
                                importance=study.importance("all_queries"))
mass = study.record.attention_mass(study.value_step, layer, head)
for block in (study.needle_block, study.needle_block + 1):
    left = mass[block] / mass[chosen.ids].sum() if block in chosen.ids else 0
    print(f"block {block}: {percent(mass[block])} of this head's exact attention; k = 32: probe rank "
          f"{chosen.probe_rank[block]}, {chosen.reason[block]}, {percent(left)} of what is left")
print("exact says", repr(study.answer().text), "· k = 32 says", repr(lost["text"]),
      "· k = 32 with 32 probes says", repr(study.answer(32, 32).text))

# %% [markdown]
r"""
A fact matches over several neighbouring keys: the end of the attribute, " is", the value. A probe at every
fourth key usually hits one of them. (This model was even *trained* to match like that; [its
card](../data/models/needle-qwen3/README.md) says how. A model that never met probes may need a larger
$k$.) Here the best keys of block 31 stand at offsets 29, 30 and 31, **behind the last
probe, 28**, and the rest of the fact begins the next block. All that the probe reads in this block are dull keys. It
is left out, its neighbour is taken, and the model answers with pieces of the number.

But block 32 holds all four digits and *is* read. Why is the answer wrong all the same? The token to be written
now is the value's *first*, the space, and 79.4 % of the head's exact attention go to the block that holds it, 31;
only 12.4 % go to block 32. With 31 left out, the softmax divides by what is left, the 12.4 % become 61.3 %, and the
model writes a digit where the space belongs: "is24242".

This is the article's 针可能藏在块中间, the needle inside the block, with a twist: it hides from the probe at the
block's edge. The proof is in the last line. With all 32 keys probed, nothing else changed, the
answer is right. That costs four times as much probing. And *fewer* probes than eight? The explorer's prompts 0 and
1, at $k = 32$:
"""

# %%
for index in (0, 1):
    block = explorer.study(index).needle_block
    for probes in (1, 2, 4, 8, 32):
        r = explorer.compute(prompt=index, n_probe=probes, k=32)
        print(f"prompt {index}, n_probe {probes:2d}: needle's block has probe rank "
              f"{r['selection'].probe_rank[block]:2d} in this head, "
              f"{'read' if r['read'][block] else 'not read':8s}  "
              f"answer {'recalled' if r['answer'].recalled else 'lost'}")

# %% [markdown]
r"""
With eight probes both facts are found. With fewer, prompt 0 is lost at 1, 2 and 4. Prompt 1 is lost at 2,
but recalled at 1 and at 4: at 2 this head reads the needle's block and the answer is wrong, at 1 it does not
and the answer is right. One head's rank is not the answer: the other heads choose for themselves. And two prompts
show no trend in the number of probes; **test on many prompts, not on one**.

### Was importance worth its half?

The reservation takes half of $k$. The same 60 prompts with and without it:
"""

# %%
without = {row["k"]: row for row in load_run("needle_no_importance")["summary"]}
curves: dict = {"with importance": {}, "without": {}}
for row in run["summary"]:
    same = [r["recalled"] for r in records if r["k"] == row["k"] and r["index"] < 60]
    off = without[row["k"]]
    curves["with importance"][row["k"]] = float(np.mean(same))
    curves["without"][row["k"]] = off["recall"]
    print(f"recorded, k = {row['k']!s:>5}: recall with importance {percent(np.mean(same)):>7}, "
          f"without {percent(off['recall']):>7}; answer perplexity without "
          f"{off['answer_perplexity']:.3f}")
ranks = {row.what: row for row in group("needle_rank_16k")}
for what in ("exact_all_queries_pos50", "exact_last_window_pos50"):
    print(f"quoted   {what}: needle's block is number {ranks[what].value} ({ranks[what].unit})  "
          f"[{ranks[what].source}: {ranks[what].conditions}]")
recall_by_k({name: dict(reversed(curve.items())) for name, curve in curves.items()},
            label="recorded: needle_k_sweep and needle_no_importance, 60 prompts, exact prefill")

# %% [markdown]
r"""
On this model the reservation never helps, and at $k = 2$ it is the difference between almost nothing
and almost everything. You know the reason from 10-2: summed over all queries, importance speaks for the beginning
of the text. At $k = 1$ without importance recency takes the only place, so the needle is lost as well,
though less wildly.

This does not condemn importance. In the quoted lines, counting only the last window of queries moved the
needle's block from number 148 to number 6. Day 11 tries that.

### A quarter of the time

The engine's documents report an 8B model, prefill of 8K tokens on x86: attention went from 61.6 s
to 16.0 s, −74 %. Sounds like four times faster. But the whole prefill took 232.5 s. **Predict** the
new total before you look.
"""

# %%
exact_row, sparse_row = quoted("amdahl_8k", "attn_exact_s"), quoted("amdahl_8k", "attn_sparse_s")
total, total_after = (float(re.search(r"total ([\d.]+) s", row.conditions)[1])
                      for row in (exact_row, sparse_row))
for row in (exact_row, sparse_row):
    print(f"quoted   {row.what}: {row.value} s  [{row.conditions}; {row.source}]")
saved = exact_row.number - sparse_row.number
print(f"derived  attention {100 * (sparse_row.number / exact_row.number - 1):.0f} %; "
      f"it was {percent(exact_row.number / total)} of the time")
print(f"derived  total: at best {total - saved:.1f} s = {-100 * saved / total:.1f} %")
print(f"quoted   total: {total_after} s = {100 * (total_after / total - 1):.1f} %; "
      f"{total_after - (total - saved):.1f} s of the saving went elsewhere")

# %% [markdown]
r"""
Minus 74 % of a quarter is minus 20 %: **Amdahl's law**. With $a$ the share of attention and $r$ what
remains of it, a token's time changes by $a\,(r - 1)$, and never by more than $-a$.

The published total fell by 11 %, not by 20. We cannot know from outside where 19.3 s went; the
selection itself, if it is booked outside "attention", is one candidate. Whoever times only the part
that became faster will not see it.

Now the opposite case: a small model, a long prompt and slow memory.
"""

# %%
board = {row.what: row for row in group("board_16k")}
for row in board.values():
    print(f"quoted   {row.what}: {row.value} {row.unit}  [{row.conditions}]")
share = float(re.search(r"attention ([\d.]+)%", board["prefill_exact_s"].conditions)[1])
change = board["prefill_sparse_s"].number / board["prefill_exact_s"].number - 1
print(f"derived  attention was {share} % of the time, so the ceiling is −{share} %; "
      f"the total changed by {100 * change:.1f} %")

# %% [markdown]
r"""
Same idea, same kind of flag: −11 % on one machine, −75 % on the other, above all because attention was 26 % of
the time here and 86 % there. (Machine, model and length differ as well.) And look at the end of the second line: the fast run lost the needle. **Where sparsity pays
most, check quality most.**

### Sparse prefill

The same engine on prefill, 2B model, by prompt length:
"""

# %%
for row in group("sparse_prefill_gain"):
    slower = row.unit == "percent slower"
    print(f"quoted  {row.what[1:]:>5} tokens: {row.value + ' % slower' if slower else row.value + ' %'}"
          f"   [{row.source}]")

# %% [markdown]
r"""
Slower at 1K and 2K, faster from 4K on. The article's own flagship prompt (2,061 tokens) lies
on the losing side for prefill.
"""

# %% [markdown] course={"id": "d10.a3", "kind": "A", "role": "card"}
r"""
### Exercise 10-3 A · predict the end-to-end gain

15 minutes · difficulty 1/3 · 5 points · about 6 lines

`profile` says where a token's time goes with exact attention, part by part; one part is
`"attention"`. `cost` is what `decode_cost` returns. Assume that attention's time scales with its
multiply-adds, **the probes included**, and that nothing else changes.

Return, in percent of the whole token's time: `"change"` (negative is faster) and `"ceiling"`, the
change if attention cost nothing at all.

`ValueError` for a profile without `"attention"`, with a negative time, or with no time in it.

<details><summary>Hint</summary>

$100 \cdot a\,(r - 1)$ with $a$ = attention / sum and $r$ = (probe + attend) / dense.

</details>
"""

# %% course={"id": "d10.a3", "kind": "A", "role": "answer", "points": 5, "minutes": 15, "difficulty": 1}
# EXERCISE d10.a3
def end_to_end_change(profile, cost):
    """Return {"change", "ceiling"} in percent of the whole time, negative for faster.

    profile: {part: time, ...} with exact attention; cost: {"dense", "probe", "attend"}.
    >>> end_to_end_change({"attention": 40.0, "rest": 60.0}, {"dense": 8, "probe": 1, "attend": 1})
    {'change': -30.0, 'ceiling': -40.0}
    """
    raise NotImplementedError("d10.a3")


# %% course={"id": "d10.a3", "kind": "A", "role": "check"}
check("d10.a3", end_to_end_change)

# %% [markdown]
r"""
Quoted, the board at 2,061 tokens and $k = 1$: 56.2 ms a token, of which 12.8 ms are attention, so 43.4 ms are
everything else. At 4K exact attention took 110.7 ms. What should $k = 32$ bring at 4K?
"""

# %%
predict = solved_or(end_to_end_change, cost_model.end_to_end_change)
rest = quoted("sparse_k", "decode_ms_per_token_k1").number
rest -= quoted("sparse_k", "attn_ms_per_token_k1").number
profile = {"attention": before.number, "everything else": rest}
predicted = predict(profile, cost(4096, 32, 128))
print(f"derived  predicted {predicted['change']:.0f} %, ceiling {predicted['ceiling']:.0f} %")
print(f"derived  from the quoted 110.7 → 55.4 ms: "
      f"{100 * (after.number - before.number) / sum(profile.values()):.0f} %")
for share in (0.25, 0.72):
    gains = predict({"attention": share, "rest": 1 - share}, cost(n, 32, 64))
    print(f"derived  n = {n}, attention {share:.0%} of a token: change {gains['change']:+.0f} %")

# %% [markdown]
r"""
The model of 10-1 is too kind: it promises −45 %, the board's numbers give −36 %. It counts
multiply-adds; the board also moves bytes and sorts blocks. A prediction that errs in a known
direction is still useful.

### Two changes at once

The last pitfall is the largest. In the version that the articles measured, one flag drove
prefill *and* decode: at $k = 1$ every mini-batch of 256 prompt tokens reads one block, its own last.
How many prompt tokens then see anything at all?
"""

# %%
blind = 0
for start in range(0, n, 256):
    end = min(start + 256, n)
    last_block = (end - 1) // 32 * 32  # the one block that this mini-batch reads
    blind += max(0, last_block - start)  # tokens before it see nothing
print(f"derived  {blind} of {n} prompt tokens attend to nothing: {percent(blind / n)}")
flagged = sparse.importance_sums(engine.prefill(prompt.ids, prefill_k=1).importance)
print("this model, blocks with any importance:",
      {int(b): round(float(flagged[b])) for b in np.flatnonzero(flagged)})
r = explorer.compute(prefill_k=1, k="all")  # the prompt read so, and then every block at decode
print(f"this model, prefill k = 1, exact decode: weight on the needle's block "
      f"{percent(r['mass'][r['needle_block']])}, recalled {r['answer'].recalled}")
one_flag = load_run("needle_one_flag")["summary"]
for row in one_flag:
    same = [r["recalled"] for r in records if r["k"] == row["k"] and r["index"] < row["prompts"]]
    print(f"recorded k = {row['k']!s:>5}: {row['prompts']} prompts, recall {percent(np.mean(same)):>7} "
          f"with exact prefill, {percent(row['recall']):>7} with one flag for both")

# %% [markdown]
r"""
At $k = 1$ the prompt was never really read. Most positions attended to nothing, and what they left in the cache
says little about the text; no choice of blocks can repair it later, not even reading all of them. So the
published collapse has **two causes on top of each other**, and the article's explanation names one of them: the
one you saw in the explorer. (`prefill k` in the explorer shows the other.)

The importance of that run is odd, too. Eight blocks hold exactly 384 = 32 queries × 12 heads; rounding decides
which of them is "the most important". Neither head nor tail.

And from $k = 32$ down to 4 the right column loses facts that the left one keeps. (The 2B model of the article
kept its needle with one flag at $k = 32$; again, another model.) *Change one variable at a time* is lesson
5-3; day 11 separates the two.
"""

# %% [markdown] course={"id": "d10.b3", "kind": "B", "role": "card"}
r"""
### Exercise 10-3 B · silent exclusions

20 minutes · difficulty 3/3 · 4 points

A report says "k = 32, same perplexity, same first token, all fine". Open the three files below and find
what could make each part empty:

* `reads_all_anyway`: the line in [decode.py](../course_lib/engine/decode.py) that counts every block as
  read because nothing was pruned;
* `first_token`: the line in [generate.py](../course_lib/engine/generate.py) where a token is taken from
  logits. (Whose logits are they in the first round?)
* `evaluation`: the line in [engine.py](../course_lib/engine/engine.py) that makes `forward` exact whatever
  $k$ is.

Which sentences of article 10-2 survive, as written, in what you read and measured today? `True` or
`False`:

* `same_blocks`: the same query and the same KV give the same blocks, ties by index;
* `probe_is_cheap`: probing costs a few hundredths of a full attention;
* `tail_block`: the blocks with the highest importance are at the tail;
* `no_probe_at_k1`: at $k = 1$ the probe has no place at all;
* `always_recent`: the last block is always kept.

Then list at least three situations in which sparsity is silently absent, here or in the public engine
(it names 4-bit KV, batched decode, multimodal prefill and speculation), and for one false sentence give
the number that decides it.
"""

# %% [markdown] course={"id": "d10.b3", "kind": "B", "role": "answer", "points": 4, "minutes": 20, "difficulty": 3}
r"""
<!-- ANSWER d10.b3 -->
Answer: …

Evidence: path:first-last
"""

# %% course={"id": "d10.b3", "kind": "B", "role": "evidence"}
# EVIDENCE d10.b3
d10_b3 = {
    "reads_all_anyway": "",  # "path:first-last"
    "first_token": "",
    "evaluation": "",
    "same_blocks": None,  # True or False
    "probe_is_cheap": None,
    "tail_block": None,
    "no_probe_at_k1": None,
    "always_recent": None,
}

# %% course={"id": "d10.b3", "kind": "B", "role": "check"}
check("d10.b3", d10_b3)

# %% [markdown]
r"""
## Summary

1. Sparse decode replaces $2nd$ by $\tfrac{n_\text{probe}}{b} nd + 2kbd$: it pays above a
   break-even length, and its probes set a ceiling.
2. The blocks come from importance, then probe, then recency, ties to the lower block; at $k = 1$ only
   importance speaks, and it speaks for the beginning of the text.
3. A claim about sparsity needs four numbers beside it: the context length, the share of blocks read,
   the share of attention in the whole, and what prefill did.

The formula: $\dfrac{\text{sparse}}{\text{exact}} = \dfrac{n_\text{probe}}{2b} + \dfrac{kb}{n}$ · The
number: **12.5 %**, the price of looking at every block.

**Next**: day 11 takes the $k = 1$ failure apart: which of two causes broke it, and two repairs.
To read the rule itself, open [sparse.py](../course_lib/sparse.py); its trace of reasons is what the explorer shows.
"""
