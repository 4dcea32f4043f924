# %% [markdown]
r"""
# Day 1/30 · 全貌 The whole picture

**You need** Python, a little NumPy, and to know what a matrix times a vector is. Nothing about
language models: every word is explained when it first appears.

**You will be able to** say where the bytes of a language model and of a conversation are, and compute
them · follow one token through every step of a real model, with the shape of each array · tell a
self-test that can fail from one that cannot, by trying.

**Time** 90 minutes, six exercises. The notebook itself runs in a few seconds, offline.

This course takes a small language model apart until nothing in it is magic. It follows the article series
《0.8MB 跑通 Qwen》, an engine in plain C on a small board; the days and their experiments are this course's own,
where nothing else is said. Today is the map of the other days.

Numbers carry one of four labels: **quoted** (printed by a source, which we name), **this machine** (measured
in the cell), **derived** (arithmetic), **recorded** (a long run, stored with its command). A number without a
label is a count or a toy from the cell above it. Words that you miss are in the
[glossary](../docs/glossary.md).
"""

# %% tags=["nbval-ignore-output"]
import inspect
import os
import time

# One thread unless you chose, so that times compare. NumPy reads its own once, when it is imported.
for name in ("COURSE_THREADS", "OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS", "VECLIB_MAXIMUM_THREADS"):
    os.environ.setdefault(name, "1")

import numpy as np

from course_lib import attention, backend, footprint, memory
from course_lib.classroom import check, solved_or
from course_lib.engine import Engine, generate_from
from course_lib.engine.model import Model
from course_lib.engine.safetensors_source import SafetensorsSource
from course_lib.kvcache import KVCache
from course_lib.lab.prompts import ARTICLE_FACT, build_needle_prompt
from course_lib.lab.published import quoted
from course_lib.lab.token_path import answer_with, best_token, ordered_path, token_path
from course_lib.paths import DATA, MODELS, ROOT
from course_lib.show.plots import cost_bars
from course_lib.show.text import fmt, percent
from course_lib.show.token_picture import token_path_picture

print("backend:", backend.info().name, "·", backend.info().reason)

# %% [markdown]
r"""
## A text goes in, a text comes out

A **language model** continues a text. Here is one, in a folder of this course. It was trained for one
thing: to look things up in notes. Read the notes below yourself and answer the question. Then run the cell
after it.
"""

# %%
engine = Engine.load(MODELS / "needle-qwen3")
config = engine.config
prompt = build_needle_prompt(engine, 1, tokens=128, fact=ARTICLE_FACT)
print(prompt.content)

# %%
session = engine.prefill(prompt.ids)  # the engine reads the notes and the question
answer = generate_from(session, 16).ids  # and writes
print(engine.decode(answer))

# %% [markdown]
r"""
The model found one sentence among fifteen. No Python in this notebook searches for a name; the program that ran
knows only numbers. Three kinds of bytes made the answer:

* the **model** (模型): numbers in a file. **Training** (训练) adjusted them, on example texts, until the model continued those texts well;
  afterwards they never change;
* the **KV cache** (KV 缓存): numbers that the engine writes down while it reads your text, so that it
  never has to read it twice;
* the **kernels** (算子): the small compiled routines that multiply and add. The program around them that loads, calls
  and keeps books is the **engine** (推理引擎).

**Your guess, before you go on.** The test of the series hides one sentence in notes of 2,061 words and word
pieces. Which is larger then: the whole model, or what the engine wrote down about that one text?
"""

# %%
model_file = MODELS / "needle-qwen3" / "model.safetensors"
file_bytes = model_file.stat().st_size
cache = KVCache(config.num_hidden_layers, config.num_key_value_heads, config.head_dim)
rows = np.zeros((config.num_key_value_heads, 2061, config.head_dim), np.float32)  # as heavy as real ones
for layer in range(config.num_hidden_layers):
    cache.append(layer, rows, rows)
print(f"model file       {file_bytes:9,d} bytes   (this machine)")
print(f"KV cache at 2061 {cache.nbytes:9,d} bytes   (this machine), × {cache.nbytes / file_bytes:.1f}")

# %% [markdown]
r"""
One long text weighs two and a half times as much as everything that the model knows. (Not quite fair: the file stores a number in
two bytes, the cache in four. In equal bytes it is still more.) This is why so many of the
thirty days are about the cache: it is where the bytes go. Now count them yourself.
"""

# %% [markdown]
r"""
## 1-1 字节在哪里 · Where the bytes are: model, KV cache, kernels

A model does not see letters. A **tokenizer** (分词器, day 3) cuts the text into pieces that it knows, the **tokens**
(词元), and gives each its number. This model knows 1,657 of them, its **vocabulary** (词表); whatever is not in it is spelled in bytes.
"""

# %%
for text in (prompt.question, "Zara met Xqz."):
    ids = engine.encode(text)
    print(f"{text!r}: {len(ids)} tokens")
    print("  ", *(f"{engine.decode([i])!r}={i}" for i in ids))
print("known tokens:", config.vocab_size)

# %% [markdown]
r"""
A word of this small world is one token, with the space in front of it (`'Zara'` and `' Zara'` are two tokens); " Xqz" takes
four. From now on, "a text of $n$ tokens" is a list of $n$ whole numbers.

### The model: 1.28 million numbers

The file begins with a table of contents, the **header**, which says which arrays follow and of which shape.
(Tomorrow you will read it byte by byte.) All numbers in it are **f16**: two bytes each. So:
"""

# %%
source = SafetensorsSource(MODELS / "needle-qwen3")
shapes = {name: stored.shape for name, stored in source.stored.items()}
parts = footprint.numbers_by_part(shapes)
total = sum(parts.values())
print(f"{len(shapes)} arrays, {total:,} numbers, × 2 bytes = {2 * total:,}   (derived)")
print(f"file: {file_bytes:,} bytes; the rest, {file_bytes - 2 * total:,}, is the header")
for name in list(shapes)[:5]:
    print(f"  {name:42} {list(shapes[name])}")

# %% [markdown]
r"""
The arrays belong to four parts. You need only their names for now; section 1-2 walks through them.

* **embedding** (词嵌入): one row of 160 numbers for each of the 1,657 tokens;
* **attention** (注意力): the matrices through which a token looks at other tokens;
* **MLP** (前馈网络): the matrices through which each token goes alone;
* **norms** (归一化): short rows of factors that keep numbers at a sensible size.

Attention and MLP come three times, once per **layer** (层): the model is three equal rounds, one after the other.
**Predict:** which part is the largest? And how large a share have the norms?
"""

# %%
cost_bars({"model": {part: 100 * count / total for part, count in parts.items()}},
          label="derived from the header of the shipped model", unit="percent of all numbers")

# %% [markdown]
r"""
Half of this model is MLP. The norms are so few that the picture cannot show them, and yet nothing works without
them (day 6).

When the engine loads the file, it widens every number to **f32**, four bytes, because processors compute
in f32. So in memory the model is twice its file: about 5.1 MB. Days 4 and 15 make it smaller again.

### The cache: six numbers per token, in a toy

While it reads, every layer computes two rows of numbers for each token: a **key** (键), by which later tokens find it,
and a **value** (值), what they get when they have found it. Keys and values never change once they are written, so
they are kept. That is the whole KV cache.

A toy: one layer, rows of three numbers. The cache of one token is three numbers of key and three of value, six
in all. As f32: 24 bytes. As f16: 12. **q8** stores each number in one byte, and one f32 factor per row, with
which the bytes are multiplied when they are read. How many bytes is that?
"""

# %%
for dtype in ("f32", "f16", "q8"):
    print(f"{dtype}: {footprint.kv_bytes(1, 1, 3, 1, dtype):2d} bytes for one token   (derived)")

# %% [markdown]
r"""
$2 \cdot (3 + 4) = 14$: *more* than f16. The factor costs four bytes whatever the length of the row. On rows of 64
or 128 numbers it pays; always count the small print.

A layer may keep several key rows and value rows per token; each such pair is a **KV head** (KV 头). Their length is
`head_dim`. So a text of $n$ tokens costs

$$ \text{bytes} = 2 \cdot \text{layers} \cdot \text{KV heads} \cdot n \cdot \text{bytes of a row}, \qquad
\text{bytes of a row} = \begin{cases} 4 d & \text{f32} \\ 2 d & \text{f16} \\ d + 4 & \text{q8} \end{cases} $$

with $d$ = `head_dim`. The 2 is for key and value. Nothing else is in it: not the size of the vocabulary, not the width
of the MLP.
"""

# %% [markdown] course={"id": "d01.a1", "kind": "A", "role": "card"}
r"""
### Exercise 1-1 A · the bytes of a conversation

10 minutes · difficulty 1/3 · 4 points · about 8 lines

Write the formula above as a function, in place of the last line of the next cell; then run that cell and the check behind it.
`dtype` is `"f32"`, `"f16"` or `"q8"`; another one, a negative number of tokens, or less than one layer, KV head or number per
row is a `ValueError`. An empty text has 0 bytes.

<details><summary>Hint</summary>

A dictionary from dtype to the bytes of one row; `if dtype not in row: raise ValueError(...)`.

</details>
"""

# %% course={"id": "d01.a1", "kind": "A", "role": "answer", "points": 4, "minutes": 10, "difficulty": 1}
# EXERCISE d01.a1
def kv_bytes(layers, kv_heads, head_dim, tokens, dtype):
    """Return the bytes of keys and values of `tokens` tokens, a whole number.

    dtype: "f32", "f16", or "q8" (one byte a number and one f32 factor per row).
    >>> kv_bytes(3, 2, 64, 1, "f16")
    1536
    """
    raise NotImplementedError("d01.a1")


# %% course={"id": "d01.a1", "kind": "A", "role": "check"}
check("d01.a1", kv_bytes)

# %% [markdown]
r"""
Once its check passes, your function fills this table; until then ours does. The shipped model has 3 layers with 2 KV heads of
64 numbers. **Predict first:** after how many tokens is the f16 cache as large as the f16 file?
"""

# %%
count = solved_or(kv_bytes, footprint.kv_bytes)
shape = (config.num_hidden_layers, config.num_key_value_heads, config.head_dim)
print("layers, KV heads, head_dim:", shape, "  (derived)")
print("tokens         f32         f16          q8")
for tokens in (1, 128, 2048, 4096):
    print(f"{tokens:6d}", *(f"{count(*shape, tokens, dtype):11,d}" for dtype in ("f32", "f16", "q8")))
print("f16 cache as large as the file at", -(-file_bytes // count(*shape, 1, "f16")), "tokens")

# %% [markdown]
r"""
After 1,670 tokens the engine's notes outweigh the model. Does the formula say what the engine
really does? We ask the cache of the prompt above, and the large one from the beginning:
"""

# %%
for name, held in (("prompt", session.cache), ("2,061 tokens", cache)):
    print(f"{name:12}: formula {count(*shape, held.length, 'f32'):9,d}, allocated {held.nbytes:9,d}"
          f" = {held.nbytes // count(*shape, 1, 'f32')} tokens' worth")

# %% [markdown]
r"""
Equal for 128 tokens, a little more for 2,061: the engine reserves memory in **blocks** (块) of 32 tokens, and
$65 \cdot 32 = 2080$. A formula is a lower bound until you have looked at the allocator. (Day 8.)

### The kernels, and the rest

What is left is the code. "0.8MB" in the series' title is the size of a whole engine in C. Here:
"""

# %% tags=["nbval-ignore-output"]
folder = ROOT / "kernels_pyx"
compiled = sum(file.stat().st_size for file in folder.glob("compiled*.so"))
written = sum(file.stat().st_size for file in folder.glob("c/**/*.[ch]"))
print(f"compiled kernels {compiled / 1e6:6.2f} MB, for every instruction set of this processor family"
      "   (this machine)")
print(f"their C source   {written / 1e6:6.2f} MB")
print(f"this notebook    {memory.own() / 1e6:6.0f} MB of memory, nearly all of it Python and NumPy")

# %% [markdown]
r"""
Surprised by the last line? Python, NumPy and a plotting library outweigh model, cache and kernels together, many
times. That is the price of a comfortable classroom, and the reason why an engine for a small board is written in C.
Without a C compiler the course runs on NumPy alone; the first line is then 0.

**Read together:** our answer is {see course_lib/footprint.py kv_bytes}; it asks
{see course_lib/kvcache.py kv_bytes_per_token} for one token in one layer. What it refuses is as long as what it computes.
"""

# %%
print(inspect.getsource(footprint.kv_bytes))

# %% [markdown] course={"id": "d01.b1", "kind": "B", "role": "card"}
r"""
### Exercise 1-1 B · who owns which byte

8 minutes · difficulty 1/3 · 4 points

In half of the exercises you read code and name places. They go into the dict below, where `check` sees them; your sentences
go into the text cell above it, for whoever grades. Open
[conversion.py](../course_lib/engine/conversion.py), [weights.py](../course_lib/engine/weights.py) and
[kvcache.py](../course_lib/kvcache.py); do not try to understand all of it, search for the words.

* `model_memory`: the line in `conversion.py` that reserves the memory of all matrices at once (an `Arena`);
* `cache_memory`: the lines in `kvcache.py`, an `if` and the one under it, that allocate empty f32 rows for keys and values;
* `one_table`: the line in `weights.py` that uses the embedding a second time instead of storing another matrix;
* `q8_token`: bytes of one token in a q8 cache of the shipped model, all layers (a number);
* `stored_twice`: is any number of the model file stored twice, `True` or `False`? (Look at the third place, then
  ask `"lm_head.weight" in shapes`.)

Then say in two or three sentences: which of these bytes grow while the model answers, which do not, and who frees
them.
"""

# %% [markdown] course={"id": "d01.b1", "kind": "B", "role": "answer", "points": 4, "minutes": 8, "difficulty": 1}
r"""
<!-- ANSWER d01.b1 -->
Answer: …

Evidence: path:first-last
"""

# %% course={"id": "d01.b1", "kind": "B", "role": "evidence"}
# EVIDENCE d01.b1
d01_b1 = {
    "model_memory": "",  # "path:first-last", as in "course_lib/kvcache.py:10-20"; one line: "…:10"
    "cache_memory": "",
    "one_table": "",
    "q8_token": None,  # a number
    "stored_twice": None,  # True or False
}

# %% course={"id": "d01.b1", "kind": "B", "role": "check"}
check("d01.b1", d01_b1)

# %% [markdown]
r"""
## 1-2 一个 token 的一生 · The life of one token, traced through the shipped model

The engine writes its answer one token at a time. For each it runs the whole model once, gets a score for each of the
1,657 tokens that could come next, takes the best one, and starts again with that. You will now follow one such run.

### Attention in six numbers

One idea carries everything else, so take it first. Three tokens wait in the cache. Each left a **key** and a **value**,
here one number each, six in all:

| token | 0 | 1 | 2 |
|---|---|---|---|
| key | 0 | 2 | 0 |
| value | 10 | 50 | 30 |

A new token brings a **query** (查询) $q$, what it is looking for; here $q = 1$. It multiplies $q$ with every key: a
**score** (分数), large where query and key fit. The **softmax** turns scores into shares that add up to 1,

$$ w_t = \frac{e^{s_t}}{\sum_u e^{s_u}}, \qquad \text{result} = \sum_t w_t\, v_t , $$

and the result is the mean of the values with these shares. Check it: $e^0 = 1$, $e^2 \approx 7.4$, so token 1 gets
$7.4 / 9.4$. With rows instead of single numbers, the product is a dot product; nothing else changes.
"""

# %%
key, value, query = np.array([0.0, 2.0, 0.0]), np.array([10.0, 50.0, 30.0]), 1.0
score = query * key
share = np.exp(score) / np.exp(score).sum()
print("shares:", [fmt(s) for s in share], "· their sum:", fmt(share.sum()))
print("result:", fmt(share @ value))
print("with a key of 6 instead of 2:", fmt(attention.softmax(np.float32([0, 6, 0])) @ value))

# %% [markdown]
r"""
The larger the score, the more the result is simply the value of the token that fits: a look-up in a table, but a
soft one. That is all of attention that you need today. (Day 7 does it properly.)

### Every step

We stop the engine in the middle of its answer: it has written "Zara's favorite food", and now gets the token
`' is'`. In the cache are 132 tokens. These are its steps. `x` is the row of 160 numbers that stands for the token
on its way:

| stage | in words |
|---|---|
| `embed` | x = the row of the embedding that belongs to the token |
| `norm` | a copy of x, brought to a standard size |
| `qkv` | three matrices make queries, keys and values from it |
| `rotate` | queries and keys are brought to size and turned by an angle that tells the position (day 6) |
| `cache` | key and value are written to the cache of this layer, behind those of all tokens before |
| `scores` | each query times every key in the cache, divided by $\sqrt{64}$ (day 7) |
| `weights` | softmax of the scores: the shares. (Careful, two meanings: numbers of the model are called weights, too) |
| `context` | the mean of the values with these shares |
| `attention` | one more matrix, and **added** to x |
| `inner` | norm, then a wider row of numbers: the inside of the MLP |
| `mlp` | a matrix back to the width of x, and **added** to x |
| `final_norm` | after the last layer: x, brought to size again |
| `logits` | x times every row of the embedding: one score for each token that could come next. Such a score is a **logit** |

The model has four **query heads** (查询头), four queries per token that look for different things, and two KV heads,
each shared by two query heads. All their rows have 64 numbers; the inside of the MLP has 448. **Predict:** for every stage from `embed` to `logits`, the shape of its array. Which shapes
depend on the length of the text?
"""

# %%
for token in answer[:4]:
    session.step(token)  # the session reads what was written
path = token_path(engine.model, session.cache.copy(), answer[4])
is_token, next_token = engine.decode([answer[4]]), engine.decode([best_token(path)])
token_path_picture(path, is_token, next_token)

# %% [markdown]
r"""
Follow the thick line: **x is never replaced, only added to.** Attention and MLP read it, compute something on the
side, and add it. Only `cache`, `scores` and `weights` know how long the text is; everything else has the same shape for
a text of ten tokens and of ten thousand.

Is this really what the engine does? {see course_lib/lab/token_path.py token_path} is written for reading; the engine has compiled code that does several
stages in one call. The same token through both:
"""

# %%
engine_logits = session.fork().step(answer[4])  # a copy takes the step; the session stays here
ours = path[-1].values
print("stages:", len(path), "· largest difference of a logit below 0.0001:",
      bool(np.abs(ours - engine_logits).max() < 1e-4))
print("best token, engine and ours:", repr(engine.decode([int(np.argmax(engine_logits))])),
      repr(next_token))

# %% [markdown]
r"""
### Where the answer comes from

The model must say " ramen" now. Somewhere between `embed` and `logits` the word must enter x. We can look: `logits` can
be computed from x at *any* stage, not only at the end. Which token would the model say if it stopped there, and how
many tokens are ahead of " ramen"?

**Predict:** will " ramen" rise little by little, or in one step? At which of the six additions (`attention` and `mlp` of three layers)?
"""

# %%
ramen = best_token(path)
print("after            best so far    tokens ahead of ' ramen'")
for stage in path:
    if stage.name in ("attention", "mlp"):
        scores = engine.model.logits(stage.values)
        ahead = int((scores > scores[ramen]).sum())
        best = repr(engine.decode([int(np.argmax(scores))]))
        print(f"layer {stage.layer} {stage.name:9} {best:14} {ahead:5d}")

# %% [markdown]
r"""
One step: the attention of layer 1. Before it, more than a thousand tokens seem better than " ramen"; after it, none. What did
the heads of layers 0 and 1 look at?
"""

# %%
texts = [engine.decode([i]) for i in (*prompt.ids, *answer[:5])]
for stage in path:
    if stage.name == "weights" and stage.layer in (0, 1):
        for head, shares in enumerate(stage.values):
            top = int(np.argmax(shares))
            print(f"layer {stage.layer}, head {head}: {percent(shares[top]):>6} of its attention on token "
                  f"{top:3d}, {texts[top]!r}")

# %% [markdown]
r"""
Read it as a story. In layer 0, one head fetched **Zara** and one fetched **food** from what had just been written (tokens 128 to
132 are the answer so far): now x knows what it is about. In layer 1, one head used that as its query, found the note about Zara's
food at token 66, and brought its value: **ramen**. This value was written to the cache when the notes were read, long before the
question was. (`'assistant'` belongs to the few words around notes and question that were not printed: day 3.)

A good story. Is it true? A story about a program can be tested: change the one thing that it names, and nothing else. We let
the engine read notes in which Zara's favorite food is *bread*. From that run we take the value of token 66 in **one** layer, 2 × 64 numbers, and
put it in the place of ours. The other 132 tokens, all keys, and the other two layers stay as they are. **Predict** what the model says, for
each of the three layers.
"""

# %%
from course_lib.lab.token_path import with_value_of

bread = list(prompt.ids)
bread[66] = engine.encode(" bread")[0]
other = engine.prefill([*bread, *answer[:4]])
for layer in range(config.num_hidden_layers):
    changed = with_value_of(session.cache, other.cache, layer, token=66)
    says = best_token(token_path(engine.model, changed, answer[4]))
    print(f"value of token 66 exchanged in layer {layer}: the model says", repr(engine.decode([says])))

# %% [markdown]
r"""
Exactly in the layer that the story names, and in no other. In these 512 bytes, out of 400,000, lies the answer to this question.

It is seldom this clear. This model is tiny, and its training was helped along: heads were told where to look ([its
card](../data/models/needle-qwen3/README.md) says how). In a large model such a path is spread over many heads. But
the mechanism is the same, and so is the lesson: **what is not in the cache cannot be found.**
"""

# %% [markdown] course={"id": "d01.a2", "kind": "A", "role": "card"}
r"""
### Exercise 1-2 A · put the path in order

15 minutes · difficulty 2/3 · 5 points · about 20 lines

Somebody dropped the list of stages. You get some of them, shuffled, as pairs `(name, layer)`; `layer` is None for
`"embed"`, `"final_norm"` and `"logits"`. Return them in the order in which a token meets them, each with the shape of its
array: `[(name, layer, shape), ...]`. For `"cache"` give the shape of the keys, for `"rotate"` that of the queries. A name that is no stage is a
`ValueError`.

The model may be another one: `sizes` holds `"hidden"` (the width of x), `"heads"`, `"kv_heads"`, `"head_dim"`,
`"inner"` and `"vocab"`; `cached` is how many tokens were in the cache before this one.

<details><summary>Hint 1: order</summary>

Sort with a key: `(part, layer, place in the layer)`, with part 0 for `embed`, 1 inside the layers, 2 behind them.
All of layer 0 comes before all of layer 1.

</details>

<details><summary>Hint 2: how many rows does the cache have?</summary>

The token writes its own key *before* it computes its scores: it looks at itself, too.

</details>
"""

# %% course={"id": "d01.a2", "kind": "A", "role": "answer", "points": 5, "minutes": 15, "difficulty": 2}
# EXERCISE d01.a2
def path_in_order(shuffled, sizes, cached):
    """Return [(name, layer, shape), ...] in the order of a token's path.

    shuffled: pairs (name, layer), layer None outside the layers.
    >>> sizes = dict(hidden=160, heads=4, kv_heads=2, head_dim=64, inner=448, vocab=1657)
    >>> path_in_order([("logits", None), ("qkv", 0), ("embed", None)], sizes, cached=10)
    [('embed', None, (160,)), ('qkv', 0, (8, 64)), ('logits', None, (1657,))]
    """
    raise NotImplementedError("d01.a2")


# %% course={"id": "d01.a2", "kind": "A", "role": "check"}
check("d01.a2", path_in_order)

# %% [markdown]
r"""
Your function against the real run, all stages of it:
"""

# %%
in_order = solved_or(path_in_order, ordered_path)
sizes = {"hidden": config.hidden_size, "heads": config.num_attention_heads,
         "kv_heads": config.num_key_value_heads, "head_dim": config.head_dim,
         "inner": config.intermediate_size, "vocab": config.vocab_size}
mixed = [(stage.name, stage.layer) for stage in path]
np.random.default_rng(0).shuffle(mixed)
said = in_order(mixed, sizes, 132)
print("order and shapes as in the run:",
      [tuple(s) for s in said] == [(s.name, s.layer, s.values.shape) for s in path])

# %% [markdown]
r"""
### What one token costs

Every number of every matrix was used once for this token, and every row of the cache. So writing a token means reading all
of it from memory:
"""

# %%
read = {"model as f32": 4 * total, "cache, 133 tokens": count(*shape, 133, "f32"),
        "cache, 2061 tokens": count(*shape, 2061, "f32")}
for name, size in read.items():
    print(f"{name:18} {size:9,d} bytes for each token written   (derived)")

# %% tags=["nbval-ignore-output"]
spent = {128: [], 2061: []}
writers = {}
for tokens in spent:
    long = build_needle_prompt(engine, 1, tokens=tokens, fact=ARTICLE_FACT)
    writers[tokens] = engine.prefill(long.ids, importance="none")  # importance: day 10
for token in 5 * answer:
    for tokens, writer in writers.items():  # in turn, so that what disturbs meets both
        begin = time.perf_counter()
        writer.step(token)
        spent[tokens].append((time.perf_counter() - begin) * 1e3)
times = {tokens: min(each) for tokens, each in spent.items()}  # what disturbs only adds
board = quoted("board_decode", "tpot_2k")
print(f"ms per token written; ours: the fastest of {5 * len(answer)}")
print(f"quoted        2B model, about 2,000 tokens: {board.value:>6} ms  [{board.conditions}; {board.source}]")
for tokens, ms in times.items():
    print(f"this machine  shipped model, {tokens:4d} tokens: {ms:6.2f} ms")

# %%
print("writing after 2,061 tokens took longer than after 128:", times[2061] > times[128])

# %% [markdown]
r"""
(The quoted line in words: the series' board, an RK3588; a model of two billion numbers, stored with four bits each; llama.cpp is
another engine, which took 126 ms there.)

The same model, the same arithmetic per matrix, but a longer text makes every token slower: the cache is read again each time.
What to do about it is the subject of days 8 to 14.

**Read together.** This is the loop that every token of every prompt goes through, in
{see course_lib/engine/model.py Model.hidden}. Find in it: the embedding, the loop over layers, the one call that makes queries,
keys and values, the call that reads the cache, and the two places where something is added to x. (`tiles` cuts the rows of a long
prompt into groups; for one token there is one. What is cut off above the first line only prepares these names.)
"""

# %%
loop = inspect.getsource(Model.hidden)
print(loop[loop.index("        x = rows_of"):])

# %% [markdown]
r"""
Two things are not in it. It never says *how* attention is computed: `attend` is handed in from outside, so days 9 and 10 can replace
it without touching this loop. And it has no special case for one token or many: reading a prompt (**prefill**, 预填充)
and writing an answer (**decode**, 解码) are the same function.
"""

# %% [markdown] course={"id": "d01.b2", "kind": "B", "role": "card"}
r"""
### Exercise 1-2 B · who writes the cache, who reads it

8 minutes · difficulty 2/3 · 4 points

Open [decode.py](../course_lib/engine/decode.py), [prefill.py](../course_lib/engine/prefill.py) and
[session.py](../course_lib/engine/session.py), all in `course_lib/engine`.

* `decode_writes`: the line in `decode.py` in which a decoded token's key and value go into the cache;
* `decode_reads`: the line in `decode.py` that asks the cache for its rows;
* `prefill_writes`: the line in `prefill.py` that writes the rows of the whole prompt;
* `undone`: the line in `session.py` that takes a token's rows out of the cache again when something failed in the
  middle of it;
* `rows_read`: with 132 tokens in the cache, how many key rows does each head read for the next token (a number)?
* `order`: is a token's own key written before or after its scores are computed (a word)?

Then say in two sentences why the cache must hold keys *after* `rotate`, and why values need no rotation. (If you are not sure,
write what you think: day 6 comes back to it.)
"""

# %% [markdown] course={"id": "d01.b2", "kind": "B", "role": "answer", "points": 4, "minutes": 8, "difficulty": 2}
r"""
<!-- ANSWER d01.b2 -->
Answer: …

Evidence: path:first-last
"""

# %% course={"id": "d01.b2", "kind": "B", "role": "evidence"}
# EVIDENCE d01.b2
d01_b2 = {
    "decode_writes": "",  # "path:first-last"
    "decode_reads": "",
    "prefill_writes": "",
    "undone": "",
    "rows_read": None,  # a number
    "order": "",  # before or after
}

# %% course={"id": "d01.b2", "kind": "B", "role": "check"}
check("d01.b2", d01_b2)

# %% [markdown]
r"""
## 1-3 没有模型的验收 · Acceptance without a model: self-tests that can fail

You port the engine to a new board. Does it work? "Load the model and ask it something" sounds like the obvious test. Let us see
what that test is worth. Here are four *wrong* softmaxes, each a mistake that somebody has made:
"""

# %%
def forgets_max(s):  # e to a large score is infinity; a right softmax subtracts the largest first
    e = np.exp(s)
    return e / e.sum()


def divides_by_max(s):
    e = np.exp(s - s.max())
    return e / e.max()


def base_two(s):
    e = np.exp2(s - s.max())
    return e / e.sum()


def winner_takes_all(s):
    w = (s == s.max()).astype(s.dtype)
    return w / w.sum()


wrong = (forgets_max, divides_by_max, base_two, winner_takes_all)
for softmax in (attention.softmax, *wrong):
    print(f"{softmax.__name__:17}", [fmt(w) for w in softmax(np.float32([0, 1, 2]))])

# %% [markdown]
r"""
Two lines show right shares: `forgets_max` goes wrong only where a score is large. Now put each of them into every head of every layer, read the whole prompt with it, and let the model
answer. **Predict:** how many of the four still say "ramen"?
"""

# %%
demo = {}
for softmax in (attention.softmax, *wrong):
    with np.errstate(all="ignore"):
        said = engine.decode(answer_with(engine.model, prompt.ids, softmax))
    demo[softmax.__name__] = "Zara's favorite food is ramen." in said
    print(f"{softmax.__name__:17} answers right: {demo[softmax.__name__]}")

# %% [markdown]
r"""
Three of four. The model is sure enough of this answer to survive a wrong base, a missing subtraction, even a softmax that is none. **A
demonstration is not a test.** It would pass, the board would ship, and some other text would go wrong.

### Three self-tests

So we test the parts, with made-up numbers of which we know the answer. No model is needed; this is how the engine of such a project is
accepted on a machine that holds no weights yet. Three tests of a softmax. An `assert` that fails means "something is wrong".
**One of the three asserts nothing. Which?**
"""

# %%
def test_adds_up_to_one(softmax):
    for n in (1, 2, 7, 100):
        scores = np.linspace(-3, 3, n, dtype=np.float32)
        assert abs(softmax(scores).sum() - 1) < 1e-5


def test_known_answer(softmax):
    weights = softmax(np.float32([0, np.log(3)]))  # e^0 : e^(log 3) = 1 : 3
    assert np.abs(weights - [0.25, 0.75]).max() < 1e-5


def test_recorded_cases(softmax):
    for file in sorted((DATA / "golden").glob("softmax_*.npz")):
        case = np.load(file)
        assert np.array_equal(softmax(case["scores"]), case["weights"])

# %% [markdown]
r"""
All of them look reasonable, and all pass on the right softmax. So passing tells you nothing about a test. The way to find out what a test
is worth is to turn it round: **break the code on purpose and see whether the test notices.** A broken copy is a **mutant** (变异体);
a test that fails on it has killed it.
"""

# %%
def accepts(test, part):
    try:
        with np.errstate(all="ignore"):
            test(part)
    except AssertionError:
        return False
    return True


tests = (test_adds_up_to_one, test_known_answer, test_recorded_cases)
print(f"{'':17}", *(test.__name__.removeprefix("test_").rjust(15) for test in tests), "   the model answers")
for softmax in (attention.softmax, *wrong):
    marks = ["passes" if accepts(test, softmax) else "KILLED" for test in tests]
    marks.append("passes" if demo[softmax.__name__] else "KILLED")
    print(f"{softmax.__name__:17}", *(mark.rjust(15) for mark in marks))

# %% [markdown]
r"""
Look at the third column: `recorded_cases`, the one that looks most serious, lets every mutant through. How little does it need to pass?
"""

# %%
print("accepts a softmax that returns its scores unchanged:",
      accepts(test_recorded_cases, lambda scores: scores))
print("accepts None instead of a function:", accepts(test_recorded_cases, None))
print("files it looked at:", len(list((DATA / "golden").glob("softmax_*.npz"))))

# %% [markdown]
r"""
The folder does not exist. The loop runs zero times, no assert is ever reached, and the test is green, today and for ever. Such a test is called
**vacuous** (空洞). It is not a rare accident: a renamed folder, a filter that matches nothing, a skipped branch, and one of your
tests becomes a decoration. Repair: `assert files` before the loop.

And look at the first row of mutants: `forgets_max` survives *everything*, the model included. No test in our list uses a large score.
The table does not only show which test is empty. It shows which test is **missing**.

The model's own column is no better than `adds_up_to_one`: it kills one mutant of four, and it needed a model, 128 tokens and
1,600 softmaxes for that.
"""

# %% [markdown] course={"id": "d01.a3", "kind": "A", "role": "card"}
r"""
### Exercise 1-3 A · a test that kills

15 minutes · difficulty 2/3 · 6 points · about 10 lines

Write one self-test that kills `forgets_max`, `divides_by_max` and `base_two`, and accepts every right softmax. It gets a function
from scores, a float32 array `[n]`, to weights `[n]`, and raises `AssertionError` where the function is wrong.

Whoever wrote a right softmax may have computed in float32 or in float64 and may round in other places: accept what is within
$10^{-5}$ of the true weights. Your test is also tried on right and wrong functions that you have not seen. Think of what can go wrong:
large scores (up to 10,000 in size, of either sign, also two next to each other), the order of the weights, one score only, equal scores, NaN,
a result of another length.

<details><summary>Hint 1: where do true weights come from?</summary>

Not from another softmax of yours, which may have the same mistake. $e^{\log a} : e^{\log b} = a : b$, so scores
$\log 1, \log 2, \log 5$ must give $\tfrac18, \tfrac28, \tfrac58$. Adding the same number to all scores changes nothing, as long as
float32 holds the sums: 10,000 and 10,001 it does; $10000 + \log 2$ it rounds by up to 0.0005, and the true weights move with it.

</details>

<details><summary>Hint 2: NaN</summary>

Every comparison with NaN is False. `assert difference < 1e-5` fails on NaN, as it should; `if difference > 1e-5: raise …` does not.

</details>
"""

# %% course={"id": "d01.a3", "kind": "A", "role": "answer", "points": 6, "minutes": 15, "difficulty": 2}
# EXERCISE d01.a3
def softmax_test(softmax):
    """Raise AssertionError unless `softmax` (float32 scores [n] -> weights [n]) is right to 1e-5.

    >>> softmax_test(attention.softmax)
    >>> softmax_test(base_two)
    Traceback (most recent call last):
    AssertionError
    """
    raise NotImplementedError("d01.a3")


# %% course={"id": "d01.a3", "kind": "A", "role": "check"}
check("d01.a3", softmax_test)

# %% [markdown]
r"""
Now use it as one would on a new board: on the two softmaxes that this engine really has (NumPy's, which is the definition, and the
compiled one, if there is a compiler), and on all four mutants. (Ours, until yours passes: {see course_lib/lab/softmax_check.py softmax_test}.)
"""

# %%
from course_lib.engine.layers import softmax as engine_softmax
from course_lib.lab.softmax_check import softmax_test as our_softmax_test


def compiled_softmax(s):
    return engine_softmax(s[None])[0]  # it takes several rows at once


kills = solved_or(softmax_test, our_softmax_test)
for part in (attention.softmax, compiled_softmax, *wrong):
    print(f"{part.__name__:17}", "accepted" if accepts(kills, part) else "KILLED")

# %% [markdown] course={"id": "d01.b3", "kind": "B", "role": "card"}
r"""
### Exercise 1-3 B · the weakest assertion

10 minutes · difficulty 3/3 · 5 points

[acceptance.py](../course_lib/lab/acceptance.py) holds nine self-tests for parts of an engine. All pass. Four of them are weak, each in
another way. You need not understand the parts; ask of every test: *what would I have to break so that this fails?*

* `never_reached`: the line of a loop whose body never runs;
* `with_itself`: the line that compares a thing with itself;
* `lets_nan_pass`: the line with a condition that is False for a result full of NaN;
* `too_wide`: the line whose tolerance is so wide that leaving the step out altogether passes;
* `accept_zeros`: how many of the three attention tests accept an attention that returns only zeros (a number)? Try it:
  `from course_lib.lab import acceptance`, then `accepts(acceptance.test_…, lambda q, k, v: np.zeros_like(q))`.

Then say which of the four is the weakest and why, and for one of the others give a mutant that it accepts and an assertion that would
kill it.
"""

# %% [markdown] course={"id": "d01.b3", "kind": "B", "role": "answer", "points": 5, "minutes": 10, "difficulty": 3}
r"""
<!-- ANSWER d01.b3 -->
Answer: …

Evidence: path:first-last
"""

# %% course={"id": "d01.b3", "kind": "B", "role": "evidence"}
# EVIDENCE d01.b3
d01_b3 = {
    "never_reached": "",  # "path:first-last"
    "with_itself": "",
    "lets_nan_pass": "",
    "too_wide": "",
    "accept_zeros": None,  # a number
}

# %% course={"id": "d01.b3", "kind": "B", "role": "check"}
check("d01.b3", d01_b3)

# %% [markdown]
r"""
## Summary

1. Three kinds of bytes: the model is fixed, the KV cache grows with every token and outweighs this model after 1,670 of them (both in f16), the kernels are
   small.
2. A token is a row of numbers that layers add to; attention is the only step that sees other tokens, and it sees them through the cache.
3. A right answer proves little, and a green test proves nothing until a mutant has made it red.

The formula: $\text{bytes} = 2 \cdot \text{layers} \cdot \text{KV heads} \cdot n \cdot \text{bytes of a row}$ · The number: **3 of 4** wrong
softmaxes gave the right answer.

**What to read next**: day 2 opens the model file byte by byte. If you want to see first where all this leads, look at the pictures of
[day 10](day10_sparse_attention.ipynb), and come back.
"""
