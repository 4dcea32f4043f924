# %% [markdown]
r"""
# Day 8/30 · KV 缓存 The KV cache

**You need** Python and NumPy indexing. From day 7: a token leaves a key and a value in every layer, and a
query reads them all. From day 2: what a page of memory is. Both are recapped in a line or two.

**You will be able to** say what a conversation weighs in any format, and not mistake traffic for memory
(8-1 每 token 字节) · find a row in memory through a block table, and say what an empty entry means
(8-2 块寻址) · let memory arrive with the tokens, measure that it does, and catch a write that left its block
(8-3 惰性分配与金丝雀).

**Time** 85 minutes with the six exercises. The notebook itself runs in a few seconds, offline.

Labels: **quoted** (from a document, source shown) · **this machine** (measured in the cell) · **derived**
(arithmetic). A number without a label is a toy, a count or a check. Words that you miss are in the
[glossary](../docs/glossary.md). This day is the course's own plan; the one number that it quotes is shown with
its source.
"""

# %% tags=["nbval-ignore-output"]
import inspect
import time

import numpy as np

from course_lib import attention, backend, kvcache, memory, paged_cache
from course_lib.classroom import check, solved_or
from course_lib.engine import Engine, generate_from
from course_lib.lab.needle import NeedleOptions, prompt_of
from course_lib.lab.prompt_study import prompt_study
from course_lib.lab.published import quoted
from course_lib.paged_cache import PAGE, PagedCache
from course_lib.paths import MODELS
from course_lib.show import KVLedgerExplorer
from course_lib.show.memory_picture import memory_curves
from course_lib.show.text import percent, size_text

print(backend.info())

# %% [markdown]
r"""
## The same answer, twice

A model writes one token at a time, and every new token attends to all before it. The keys and values of those
do not change any more: a token never sees what comes after it. So one may keep them. The **KV cache** (KV 缓存)
is just that, the kept rows.

Here is what it saves. The shipped model answers a question about 260 tokens of notes: once without a cache,
reading everything anew for each token, once with it. *Predict:* how many tokens go through the layers in each
case, and do the two answers agree?
"""

# %%
engine = Engine.load(MODELS / "needle-qwen3")
config = engine.config
prompt = prompt_of(engine, NeedleOptions(tokens=260), 0)

start = time.perf_counter()
ids, passed = list(prompt.ids), 0  # prefill reads a whole text into a new cache
while not passed or ids[-1] != config.eos_token_ids[0]:
    ids.append(int(np.argmax(engine.prefill(ids, importance="none").logits)))
    passed += len(ids) - 1
anew = time.perf_counter() - start

start = time.perf_counter()
made = generate_from(engine.prefill(prompt.ids, importance="none"), 16)
cached = time.perf_counter() - start
said = ids[len(prompt.ids) : -1]
print("without a cache:", repr(engine.decode(said)), "· tokens through the layers:", f"{passed:,}")
print("with the cache: ", repr(engine.decode(made.ids)), "· tokens through the layers:",
      f"{len(prompt.ids) + len(made.ids):,}")

# %% tags=["nbval-ignore-output"]
print(f"without {anew:.3f} s, with {cached:.3f} s: × {anew / cached:.1f}   (this machine)")

# %% [markdown]
r"""
The same text for an eighth of the work, and with every further token the gap grows. This is the one optimization
that no engine does without. Its price is what today is about: **bytes**.

## 8-1 每 token 字节 Bytes per token

Count with pencil and paper first. The shipped model has 3 layers, 2 KV heads a layer, 64 values a head; a value in
float32 takes 4 bytes. *How many bytes does one token leave?* Do not forget that there are K **and** V.
"""

# %%
layers, kv_heads, d = config.num_hidden_layers, config.num_key_value_heads, config.head_dim
per_token = 2 * layers * kv_heads * d * 4
print(f"2 · {layers} · {kv_heads} · {d} · 4 = {per_token:,} bytes a token   (derived)")
for tokens in (256, 2061, config.max_position_embeddings):
    print(f"{tokens:5,d} tokens: {size_text(tokens * per_token)}")
print("all its weights, 2 bytes each:",
      size_text((MODELS / "needle-qwen3" / "model.safetensors").stat().st_size))

# %% [markdown]
r"""
At 2,061 tokens the conversation weighs more than the model (in 2 bytes a value, too: 3.2 MB). In general, with $L$
layers, $G$ KV heads, $d$ values a head and $b$ bytes a value:

$$ \text{bytes per token} = 2 \cdot L \cdot G \cdot d \cdot b \qquad (+ \text{ scales}) $$

Smaller formats store small whole numbers and a **scale**, by which they are multiplied when read (day 4 packed weights
in the same way; day 9 does it with these rows). Scales take room, too:

| format | bytes for a row of d values | what it is |
|---|---|---|
| f32 | $4d$ | as computed |
| f16 | $2d$ | half precision |
| q8 | $d + 4$ | one byte a value, and one float32 scale a row |
| q4 | $d/2 + 8 \cdot d/64$ | half a byte a value, and two float32 scales per 64 values |

Now the model of the article series: 8 KV heads of 128 values. *Predict* the four numbers for one token in one
layer; then the cell.
"""

# %%
for dtype in ("f32", "f16", "q8", "q4"):
    size = kvcache.kv_bytes_per_token(8, 128, dtype)
    print(f"{dtype:>4} {size:5,d} bytes, {size / 4096:.3f} of f16, "
          f"{8 * size / (2 * 8 * 128):5.2f} bits a value   (derived)")
row = quoted("q8_bandwidth", "scan_ratio_vs_f16")
print(f"quoted: × {row.value}   ({row.source}; {row.conditions})")

# %% [markdown]
r"""
The scales are why q8 is 8.25 bits and q4 is 5, not 4.

The article says × 0.52 for q8, and 2112/4096 is just that. Is it a statement about **memory** or about
**traffic**? There are two ledgers:

* *scan*: what one **decode step** (解码, the making of one token) **reads**: every cached row. It costs time.
* *memory*: what is **kept**. It decides how long a conversation may be.

They are equal, unless something is kept that a step does not read. By default the article's engine keeps its
float32 rows beside the q8 rows, as a **mirror**.

*Predict before you move anything:* with the mirror, does a q8 cache take more or less memory than f16? By what
factor? Then switch `float32 mirror`, and try the shipped model's shape: why is its q8 × 0.531, not × 0.516? (The stored
picture has 36 layers, as the public configuration of Qwen3-8B.)
"""

# %%
KVLedgerExplorer(engine, shape="article", layers=36, tokens=16384, mirror=True)

# %%
ledger = KVLedgerExplorer(engine)
for shape in ("article", "model"):
    for mirror in (False, True):
        q8 = ledger.compute(shape, mirror=mirror)["rows"]["q8"]
        print(f"{shape:>8}, mirror {'kept' if mirror else 'none'}: a step reads × "
              f"{q8['scan_vs_f16']:.3f} of f16, memory × {q8['memory_vs_f16']:.3f}   (derived)")

# %% [markdown]
r"""
With the mirror, a q8 cache reads half as much as f16 and takes **two and a half times** its memory. "q8 halves the
KV cache" would be false of that engine, and × 0.52 is true of its traffic. (The cache of this course keeps no
mirror. And on rows of 64 values the 4 bytes of scale weigh twice as much as on 128.)
"""

# %% [markdown] course={"id": "d08.a1", "kind": "A", "role": "card"}
r"""
### Exercise 8-1 A: both ledgers

10 minutes · difficulty 1/3 · 4 points · about 10 lines

Write `kv_ledger`. For a context of `tokens` tokens in all layers, return a dictionary from format to the pair
`(scan, memory)` in bytes: `"f32"`, `"f16"`, `"q8"`, `"q4"` and `"q8 + f32 mirror"`. Leave `"q4"` out where 64 does
not divide `head_dim`. Whole numbers. `ValueError` where a count is below 1.

<details><summary>Hint 1: rows</summary>

There are 2 · layers · kv_heads · tokens rows. What remains is the bytes of one row in each format.

</details>

<details><summary>Hint 2: the mirror</summary>

It is kept and not scanned: which of the two numbers does it change?

</details>
"""

# %% course={"id": "d08.a1", "kind": "A", "role": "answer", "points": 4, "minutes": 10, "difficulty": 1}
# EXERCISE d08.a1
def kv_ledger(num_layers, num_kv_heads, head_dim, tokens):
    """Bytes that a decode step scans and bytes kept in memory, for every format of the cache.

    Returns {"f32": (scan, memory), "f16": …, "q8": …, "q4": …, "q8 + f32 mirror": …}; no "q4"
    where 64 does not divide head_dim. ValueError for a count below 1.
    >>> kv_ledger(1, 8, 128, 1)["q8"]
    (2112, 2112)
    """
    raise NotImplementedError("d08.a1")


# %% course={"id": "d08.a1", "kind": "A", "role": "check"}
check("d08.a1", kv_ledger)

# %% [markdown]
r"""
A ledger is a claim. Here yours (or ours, until it passes) is held against the engine's real caches: the prompt
read into each, and the bytes of the arrays that it allocated.
"""

# %%
def ours(*shape):
    return {line.name: (line.scan_bytes, line.memory_bytes) for line in kvcache.kv_ledger(*shape)}


ledger_of = solved_or(kv_ledger, ours)
sessions = {kv: engine.prefill(prompt.ids, kv=kv, importance="none") for kv in ("f32", "q8")}
for kv, session in sessions.items():
    for tokens in (session.cache.length, 288):
        _, expected = ledger_of(layers, kv_heads, d, tokens)[kv]
        print(f"{kv:>4}: {session.cache.nbytes:9,d} bytes allocated; the ledger says {expected:9,d} "
              f"for {tokens} tokens: {'equal' if expected == session.cache.nbytes else 'less'}")

# %% [markdown]
r"""
The cache allocates whole **blocks** of 32 tokens: 260 tokens fill eight and begin a ninth. So memory is hardly ever
*exactly* tokens times bytes. 8-3 comes back to this.
"""

# %% [markdown] course={"id": "d08.b1", "kind": "B", "role": "card"}
r"""
### Exercise 8-1 B: bandwidth or memory?

6 minutes · difficulty 1/3 · 4 points

Open [quoted.csv](../data/published/quoted.csv) and [kvcache.py](../course_lib/kvcache.py). Which published number is
bandwidth, and what would the same engine's number for memory be?

Cite `quoted_row`, the article's ratio in the csv file, and `mirror_line`, the line of `kv_ledger` that tells scan
from memory for a mirrored cache. Give `the_ratio_is`, a word: bandwidth or memory; `memory_with_mirror`, bytes per
token and layer at 8 KV heads of 128 values; and `times_f16`, that number divided by f16's (three digits).

Then explain: somebody with 8 GB of free memory plans a context length from "× 0.52". What goes wrong, by which
factor, and what would you ask the engine's authors?
"""

# %% [markdown] course={"id": "d08.b1", "kind": "B", "role": "answer", "points": 4, "minutes": 6, "difficulty": 1}
r"""
<!-- ANSWER d08.b1 -->
Answer: …

Evidence: path:first-last
"""

# %% course={"id": "d08.b1", "kind": "B", "role": "evidence"}
# EVIDENCE d08.b1
d08_b1 = {
    "quoted_row": "",  # "path:first-last"
    "mirror_line": "",  # "path:first-last"
    "the_ratio_is": "",  # a word
    "memory_with_mirror": None,  # a number
    "times_f16": None,  # a number
}

# %% course={"id": "d08.b1", "kind": "B", "role": "check"}
check("d08.b1", d08_b1)

# %% [markdown]
r"""
## 8-2 块寻址 Block addressing

Every layer keeps K as one array, `[kv_heads, capacity, d]`, and V likewise. Memory has no rows and columns, only
addresses, so somebody multiplies. Six numbers by hand: 2 KV heads, capacity 3 tokens, rows of 2 values, 4 bytes
each. *At which byte does the key of token 1, head 1 begin?*
"""

# %%
k = np.arange(12, dtype=np.float32).reshape(2, 3, 2)
print("as rows:     ", k.tolist())
print("in memory:   ", np.frombuffer(k.tobytes(), np.float32).astype(int).tolist())
print("head 1, token 1:", k[1, 1].astype(int).tolist(), "at byte", (1 * 3 + 1) * 2 * 4)

# %% [markdown]
r"""
$(\text{head} \cdot \text{capacity} + \text{token}) \cdot d \cdot 4 = 32$. All rows of a head lie next to each other;
attention reads a head's keys strictly in order, which is what memory is fast at.

A **block** (块) is 32 consecutive tokens, here: `block, row = divmod(token, 32)`. The engine's cache says where a
row lies, {see course_lib/kvcache.py KVCache.row_address} (it calls the row within a block `slot`; in this lesson a
slot will be something else). Is it true? The cell takes the bytes at that address and compares them with the row.
"""

# %%
cache = sessions["f32"].cache
whole = cache.rows(1).k.base  # the whole array of layer 1, spare room included
raw = whole.reshape(-1).view(np.uint8)
print("K of layer 1:", whole.shape, "= [KV heads, capacity, d]; tokens:", cache.length)
for token, head in ((0, 0), (1, 0), (33, 0), (33, 1)):
    at = cache.row_address(token, head, layer=1)
    same = raw[at.offset : at.offset + 4 * d].tobytes() == cache.rows(1).k[head, token].tobytes()
    print(f"token {token:2d}, head {head}: block {at.block}, row {at.slot:2d} of it, byte {at.offset:6,d}"
          f"   these bytes are the row: {same}")

# %% [markdown]
r"""
One array per layer is simple, and it has a flaw: it must lie in **one piece**. When it is full, a larger piece is
needed, and everything is copied. With many conversations of unknown length one would reserve the longest for
each.

### The block table

Operating systems solved this long ago, with pages. A **block table** (块表) does it for a cache: memory is cut into
**slots** of one block each, and a table says for every block of tokens in which slot it lies. Neighbouring blocks
may lie anywhere.

    token ──► block = token // 32 ──► slot = table[block] ──► slot · slot_bytes + place in the slot

An entry may be **NULL** (`None` in Python): this block has no memory. It was never begun, or it was **evicted**
(驱逐), its memory given to somebody else. Try it by hand: blocks of 2 tokens, table `[2, None, 0]`. In which slot is
token 4? And token 3?
"""

# %%
table = [2, None, 0]
for token in range(6):
    block, row = divmod(token, 2)
    print(f"token {token}: block {block}, row {row}, slot {table[block]}")

# %% [markdown]
r"""
Tokens 2 and 3 are nowhere. A program that asks for them must notice. In C, NULL is address 0: a careless kernel
adds an offset to it and the process dies, if you are lucky. Worse is a table of plain numbers in which 0 means both
"slot 0" and "nothing". Watch that happen to a real key: we put the model's rows into a paged cache, evict a block,
and ask for token 101 with and without the check.
"""

# %%
rows = cache.rows(1)
paged = PagedCache(kv_heads, d, 512)
paged.append(rows.k, rows.v)
print("table:", paged.table, "· rows equal:", bool((paged.gather().k == rows.k).all()))
paged.evict(101 // 32)
print("after evict(3):", paged.table)
try:
    paged.row_address(101, 0)
except paged_cache.BlockNotStoredError as error:
    print("with the check:   ", error)

careless = [slot or 0 for slot in paged.table]  # None becomes 0
at = paged_cache.row_offset(careless, 101, 0, kv_heads, d, guard=paged_cache.GUARD,
                            slot_bytes=paged.slot_bytes)
key = paged.memory[at : at + 4 * d].view(np.float32)
found = int(np.flatnonzero((rows.k[0] == key).all(axis=1))[0])
print(f"without it:        a key comes back, no error; it is that of token {found}")

# %% [markdown]
r"""
Token 5 instead of token 101: a perfectly good key of the wrong token. No NaN, no crash, no warning; only the answer
would be wrong. **The check for NULL is not politeness, it is the only place where this can be seen.**
"""

# %% [markdown] course={"id": "d08.a2", "kind": "A", "role": "card"}
r"""
### Exercise 8-2 A: from token to byte

10 minutes · difficulty 2/3 · 5 points · about 10 lines

Write `row_address(table, token, head, …)`: the byte offset of a **K** row. Slots follow each other without gaps. A
slot holds K and then V of its block, each float32 `[num_kv_heads, block_size, head_dim]`. `table[b]` is the slot of
block b, or `None`. Raise `ValueError` for a block without memory, a token outside the table (also a negative one), and
a head that does not exist.

<details><summary>Hint 1: the size of a slot</summary>

K and V: 2 · num_kv_heads · block_size rows of 4 · head_dim bytes.

</details>

<details><summary>Hint 2: slot 0</summary>

`if not table[block]` is also true of slot 0. Compare with `is None`.

</details>

<details><summary>Hint 3: negative tokens</summary>

`divmod(-1, 32)` is `(-1, 31)`, and `table[-1]` is the last entry. Python will not complain for you.

</details>
"""

# %% course={"id": "d08.a2", "kind": "A", "role": "answer", "points": 5, "minutes": 10, "difficulty": 2}
# EXERCISE d08.a2
def row_address(table, token, head, num_kv_heads=8, head_dim=128, block_size=32):
    """Byte offset of the K row of a token and KV head, found through a block table.

    table: list of slot numbers, None where a block has no memory. ValueError for such a block,
    for a token outside the table and for a head that does not exist.
    >>> row_address([1, 0], 32, 0)  # block 1 lies in slot 0
    0
    """
    raise NotImplementedError("d08.a2")


# %% course={"id": "d08.a2", "kind": "A", "role": "check"}
check("d08.a2", row_address)

# %% [markdown]
r"""
Your function (or ours) reads the model's own keys out of shuffled slots: each block was put somewhere else, and only
the table knows.
"""

# %%
address = solved_or(row_address, paged_cache.row_offset)
n_blocks, rng = paged_cache.blocks_needed(cache.length), np.random.default_rng(0)
slots = rng.permutation(n_blocks)
store = np.zeros((n_blocks, 2, kv_heads, 32, d), np.float32)
for b, slot in enumerate(slots):
    part = rows.k[:, 32 * b : 32 * b + 32]
    store[slot, 0, :, : part.shape[1]] = part
raw, hits = store.reshape(-1).view(np.uint8), 0
for token in range(cache.length):
    for head in range(kv_heads):
        at = address(slots.tolist(), token, head, kv_heads, d, 32)
        hits += raw[at : at + 4 * d].tobytes() == rows.k[head, token].tobytes()
print("table:", slots.tolist(), f"· rows found: {hits} of {cache.length * kv_heads}")

# %% [markdown]
r"""
### Read together: who may find a row

The address of the lesson's paged cache, {see course_lib/paged_cache.py row_offset}. Three refusals stand before the
one line of arithmetic. `guard` and `slot_bytes` are for 8-3.
"""

# %%
print(inspect.getsource(paged_cache.row_offset).split('"""')[2].strip("\n"))

# %% [markdown] course={"id": "d08.b2", "kind": "B", "role": "card"}
r"""
### Exercise 8-2 B: who checks for an evicted block?

8 minutes · difficulty 2/3 · 5 points

Open [paged_cache.py](../course_lib/paged_cache.py) and [kvcache.py](../course_lib/kvcache.py).

Cite `address_check`, where `row_offset` refuses a block without memory; `rows_check`, where `PagedCache` refuses to
hand out the rows of an **evicted** block (follow the calls from `rows` on); and `engine_check`, where the engine's
`KVCache.row_address` refuses a token that is not stored. Give, for a slot of 8 KV heads of 128 values and 32 tokens,
`next_token`, the bytes from a row to the next token's row of the same head, and `next_head`, the bytes from a row to the
same token's row of the next head.

Then explain: the engine's `KVCache` cannot evict. What does it check instead, and why is that enough there? Why would it
not be enough in `PagedCache`?
"""

# %% [markdown] course={"id": "d08.b2", "kind": "B", "role": "answer", "points": 5, "minutes": 8, "difficulty": 2}
r"""
<!-- ANSWER d08.b2 -->
Answer: …

Evidence: path:first-last
"""

# %% course={"id": "d08.b2", "kind": "B", "role": "evidence"}
# EVIDENCE d08.b2
d08_b2 = {
    "address_check": "",  # "path:first-last"
    "rows_check": "",  # "path:first-last"
    "engine_check": "",  # "path:first-last"
    "next_token": None,  # a number
    "next_head": None,  # a number
}

# %% course={"id": "d08.b2", "kind": "B", "role": "check"}
check("d08.b2", d08_b2)

# %% [markdown]
r"""
## 8-3 惰性分配与金丝雀 Lazy allocation and its canaries

How much memory should a cache take when a conversation begins? Nobody knows how long it will be. Three answers:

* **reserve**: take room for the longest conversation at once;
* **grow**: begin small, and move to a larger piece when it is full (the engine's `KVCache`: an eighth more each time);
* **blocks**: take a slot when its first token arrives (the paged cache).

One layer of the article's shape, float32, 8,192 bytes a token, up to 4,096 tokens. *Predict:* which takes least at
100 tokens? At 4,000? And what does "grow" need **in the moment** when it moves?
"""

# %%
longest, shape = 4096, (8, 128)
token_rows = np.ones((2, 8, 1, 128), np.float32)
growing, paged = kvcache.KVCache(1, *shape), PagedCache(*shape, longest)
held, moving, blocks = [], [], []
for _ in range(longest):
    before = growing.nbytes
    growing.append(0, *token_rows)
    paged.append(*token_rows)
    held.append(growing.nbytes)
    moving.append(growing.nbytes + (before if growing.nbytes != before else 0))
    blocks.append(paged.allocated_bytes)
del growing
most = int(np.argmax(moving))
print(f"grow: to hold {size_text(held[most])} it once needs {size_text(moving[most])}, and copies all "
      f"rows so far; it moved {len(set(held)) - 1} times")
curves = {"reserve": [paged.reserved_bytes] * longest, "grow, while moving": moving, "grow": held,
          "blocks": blocks}
memory_curves(curves, label="derived from what was allocated; one layer, 8 KV heads × 128, float32",
              at=(1, 100, 1000, 4000, 4096))

# %% [markdown]
r"""
The spikes are the moves: old and new exist together, so for a moment "grow" needs nearly twice what it holds. A machine
that is nearly full dies there, and not where its average says. Blocks waste at most 31 tokens and never move; their
price is the table, and a page of guards in each slot, to which we come. At 100 tokens that page makes them larger than "grow".

### What "allocated" means

These were bytes that the program asked for. Are they memory? Recap of day 2: a process gets **addresses**; the
system puts a **page** (页, 4 kB) of memory behind an address when it is first **written**. A page that is only read
is one shared page of zeros.

So even "reserve" may be cheap, as long as nobody writes. Let us measure. The page table of this process
(`/proc/self/pagemap`, Linux) says for every page whether it is memory of our own. *Predict* both lines before you
run: a cache with room for 4,096 tokens, at the start, and after all of it was **read** once.
"""

# %%
lazy = PagedCache(*shape, longest)
print(f"reserved {lazy.reserved_bytes:,} bytes = {lazy.reserved_bytes // PAGE:,} pages")
print("own pages at the start:  ", lazy.own_pages())
print("sum of all of its bytes: ", int(lazy.memory.sum()))
print("own pages after reading: ", lazy.own_pages())

# %% [markdown]
r"""
34 MB of addresses, and not one page of memory, also after reading them all.

Now tokens arrive, 512 at a time. Three columns: what the table allocates, what the page table says, and what the
system counts for the **whole process** (`RssAnon`), which is noisier: Python itself takes and returns memory.
"""

# %% tags=["nbval-ignore-output"]
lazy, chunk = PagedCache(*shape, longest), np.ones((2, 8, 512, 128), np.float32)
PagedCache(*shape, 512).append(*chunk)  # whatever Python needs the first time, it has now
at_start, seen = memory.own(), []
print("tokens  allocated    own pages   process has grown by   (this machine)")
for _ in range(longest // 512):
    lazy.append(*chunk)
    pages = lazy.own_pages() or 0  # None where no /proc/self/pagemap tells
    seen.append((lazy.length, lazy.allocated_bytes, pages * PAGE, memory.own() - at_start))
    print(f"{seen[-1][0]:6,d} {size_text(seen[-1][1]):>10} {size_text(seen[-1][2]):>12} "
          f"{size_text(max(0, seen[-1][3])):>16}")

# %%
print("own pages are exactly the allocated blocks, at every step:",
      all(pages == allocated for _, allocated, pages, _ in seen))
print("in the end the process has grown by that, within a quarter:",
      abs(seen[-1][3] / seen[-1][1] - 1) < 0.25)
print("half of the tokens, half of the memory:", 2 * seen[3][2] == seen[7][2])
lazy.evict(5)
print("one block evicted, pages given back:", seen[7][2] // PAGE - lazy.own_pages(), "=",
      lazy.slot_bytes // PAGE)

# %% [markdown]
r"""
Memory follows tokens, to the page, and goes back when a block is evicted. This is what **lazy allocation** (惰性分配)
means, twice: the table takes a slot when a block begins, and the system a page when it is written.

Inside a block it is lazy too. *Predict:* 8 KV heads, K and V, each head's 32 rows side by side (16 kB, four pages).
How many pages does the very **first token** of a block take?
"""

# %%
first = PagedCache(*shape, longest)
for tokens in (1, 6, 1, 1, 23):
    first.append(*np.ones((2, 8, tokens, 128), np.float32))
    print(f"{first.length:2d} tokens: {first.own_pages():2d} of {first.slot_bytes // PAGE} pages of the block")

# %% [markdown]
r"""
A page for each of 8 heads in K and in V: 16, and one more at the end, which holds a *guard* (see below). Eight rows
of 512 bytes are a page; because of the 64 bytes of guard in front, the eighth row already reaches into the next one.
With all heads of a token side by side, the first token's 4 kB of K and 4 kB of V, and the guard, would take 5 pages. But
every head's keys would lie 4 kB apart, and attention reads head by head. Layouts are chosen for the reader, not for the writer.

### What an unwritten row reads as

A fresh page reads as zeros. Is a row of zeros harmless? Its score is $q \cdot 0 = 0$, and a score of 0 is **not**
"no weight". The last block of our prompt has rows that nobody has written. Suppose a kernel reads whole blocks.
*Predict:* which share of the attention goes to rows that do not exist?
"""

# %%
study = prompt_study(engine, prompt)
record, step = study.record, study.value_step
n = record.context(step)
spare = 32 * paged_cache.blocks_needed(n) - n
print(f"{n} tokens, {spare} unwritten rows in the last block   (this machine)")
for layer in range(layers):
    shares = []
    for head in range(config.num_attention_heads):
        scores = attention.head_scores(record.queries[step, layer, head],
                                       attention.widen(record.rows(step, layer, head)))
        weights = attention.softmax(np.append(scores, np.zeros(spare, np.float32)))
        shares.append(weights[n:].sum())
    print(f"layer {layer}: weight on unwritten rows, by head:", "  ".join(percent(s) for s in shares))

# %% [markdown]
r"""
From nothing to 6 %. A sharp head does not notice; a head that looks around gives part of its weight to tokens
that never were, and its output shrinks towards zero. Again no error. (With memory that was used before, the rows would
not even be zeros, but somebody else's old keys.)

Two defences, and the engine has the first: **never read beyond the length** ({see course_lib/kvcache.py KVCache.rows}
hands out views of the first n rows and no more).

### Canaries

The second is for *writes* that go too far. Miners took a canary along: it fell silent before the miners did. A
**canary** (金丝雀) in memory is a known pattern at both ends of a block that nobody may write. Whoever runs over the
end of a block kills it, and a check finds out. In the paged cache: {see course_lib/paged_cache.py PagedCache.damaged}.

Let us run over the end, as a kernel that writes 33 rows instead of 32 would. *Predict* for both: does the canary see
it?
"""

# %%
def one_row_too_far(what):
    """Write 33 rows into block 1: at the end of K's last head, or of V's."""
    cache = PagedCache(kv_heads, d, 128)
    cache.append(rows.k[:, :96], rows.v[:, :96])
    end_of_k = cache.slot_bytes + paged_cache.GUARD + kv_heads * 32 * d * 4
    at = end_of_k if what == "K" else end_of_k + kv_heads * 32 * d * 4
    cache.memory[at : at + 4 * d].view(np.float32)[:] = 7
    changed = int((cache.gather().v != rows.v[:, :96]).any(axis=(0, 2)).sum())
    return cache.damaged(), changed


for what in ("V", "K"):
    damage, changed = one_row_too_far(what)
    print(f"33rd row of {what}: canaries say {[tuple(d) for d in damage]}, "
          f"tokens whose V is wrong: {changed}")

# %% [markdown]
r"""
The row that left the block was caught, and it had damaged no token yet. The row that ran from K into V of the **same**
block was not: there is no guard between them, and one token now has a wrong value. A canary sees what crosses it, and
nothing else. Where to put canaries is a choice of what to be able to notice.

And the cache whose memory we watched arrive? 4,096 tokens were written into it in eight calls, and one block evicted.
"""

# %%
print("blocks with memory:", sum(slot is not None for slot in lazy.table), "of", len(lazy.table),
      "· guards looked at:", 2 * sum(slot is not None for slot in lazy.table),
      "· broken:", len(lazy.damaged()))

# %% [markdown] course={"id": "d08.a3", "kind": "A", "role": "card"}
r"""
### Exercise 8-3 A: audit a cache

13 minutes · difficulty 2/3 · 6 points · about 14 lines

Write `audit_cache`. `memory` is uint8 `[slots, slot_bytes]`; the first and the last 8 bytes of a slot **in use** hold
`CANARY`. `table` has the slot of each block or `None`, `tokens` is how many tokens the cache claims to hold. Return a
dictionary:

* `"needed"`: how many blocks hold so many tokens;
* `"missing"`: those of them that have no slot, ascending (also where the table is too short);
* `"damaged"`: `[block, side]` for each broken canary, `"front"` or `"back"`; blocks ascending, front first. All blocks of
  the table with a slot are looked at, needed or not.

`ValueError` for negative tokens, and where two blocks have the **same** slot.

<details><summary>Hint 1: rounding up</summary>

`-(-tokens // block_size)`, or `(tokens + block_size - 1) // block_size`.

</details>

<details><summary>Hint 2: the table is too short</summary>

`block >= len(table) or table[block] is None`.

</details>

<details><summary>Hint 3: two blocks, one slot</summary>

Collect the slots that are not `None`; a set of them has as many elements only if no slot is there twice.

</details>
"""

# %% course={"id": "d08.a3", "kind": "A", "role": "given"}
CANARY = np.frombuffer(b"CANARY42", np.uint8)

# %% course={"id": "d08.a3", "kind": "A", "role": "answer", "points": 6, "minutes": 13, "difficulty": 2}
# EXERCISE d08.a3
def audit_cache(memory, table, tokens, block_size=32):
    """Say which blocks a cache needs, which it lacks, and whose canaries are broken.

    memory: uint8 [slots, slot_bytes], read only; table: list of slots or None. Returns {"needed":
    int, "missing": [blocks], "damaged": [[block, "front" or "back"]]}. ValueError for tokens
    below 0 and for a slot that two blocks share.
    >>> audit_cache(np.zeros((1, 32), np.uint8), [None], 33)
    {'needed': 2, 'missing': [0, 1], 'damaged': []}
    """
    raise NotImplementedError("d08.a3")


# %% course={"id": "d08.a3", "kind": "A", "role": "check"}
check("d08.a3", audit_cache)

# %% [markdown]
r"""
Your audit (or ours) over caches that were broken on purpose, as the comments say. *Before* you look at the output: which
of these can an audit of the table and the canaries find?
"""

# %%
def reference(memory, table, tokens, block_size=32):
    return paged_cache.audit(memory, table, tokens, CANARY, block_size)


audit = solved_or(audit_cache, reference)
slots_memory = np.zeros((6, 16 + 2 * 32 * 16), np.uint8)
slots_memory[:, :8] = slots_memory[:, -8:] = CANARY
slots_memory[3, -8] = 0  # a write ran over the end of slot 3
slots_memory[1, 500:516] = 9  # a row in the middle of slot 1 was overwritten
slots_memory[5, 0] = 0  # slot 5 is in use by nobody
print(audit(slots_memory, [0, 3, None, 1], 120))  # and block 2 was lost
try:
    audit(slots_memory, [0, 3, 3, 1], 120)  # or was given block 1's slot
except ValueError:
    print("two blocks in one slot: ValueError")

# %% [markdown]
r"""
The run-over, the lost block and the shared slot are found; the guard of a slot that nobody uses is nobody's business. The
row in the middle is **not** found: it was a legal place. (For that one needs a checksum of every block.)
"""

# %% [markdown] course={"id": "d08.b3", "kind": "B", "role": "card"}
r"""
### Exercise 8-3 B: what does an unwritten row read as?

8 minutes · difficulty 2/3 · 5 points

Open [kvcache.py](../course_lib/kvcache.py) and [paged_cache.py](../course_lib/paged_cache.py).

Cite `fresh_rows`, where `KVCache` takes memory for float32 rows without writing it; `read_limit`, the line of
`KVCache.rows` that cuts the views to the tokens that are there; and `given_back`, the line of `PagedCache` that returns a
block's pages to the system. Give `fresh_value`, what a value reads as that
lies in memory fresh from the system and was never written, and `its_weight`: the softmax weight of one such row beside
one real token whose score is 0.

Then explain: `np.empty` promises no value at all. Why does nothing in the engine ever see what is in there? What would
change if the capacity, and not the length, were given to attention? And why is filling new memory with NaN a good idea
in a test, and filling it with zeros a bad one?
"""

# %% [markdown] course={"id": "d08.b3", "kind": "B", "role": "answer", "points": 5, "minutes": 8, "difficulty": 2}
r"""
<!-- ANSWER d08.b3 -->
Answer: …

Evidence: path:first-last
"""

# %% course={"id": "d08.b3", "kind": "B", "role": "evidence"}
# EVIDENCE d08.b3
d08_b3 = {
    "fresh_rows": "",  # "path:first-last"
    "read_limit": "",  # "path:first-last"
    "given_back": "",  # "path:first-last"
    "fresh_value": None,  # a number
    "its_weight": None,  # a number
}

# %% course={"id": "d08.b3", "kind": "B", "role": "check"}
check("d08.b3", d08_b3)

# %% [markdown]
r"""
## Quoted and measured

| what | quoted | here |
|---|---|---|
| q8 against f16, read by a step | × 0.52 (article 9-3) | × 0.516 at 8 × 128, × 0.531 at 2 × 64 (derived) |
| q8 against f16, kept in memory with the mirror | not stated | × 2.52 (derived) |
| memory of a lazy cache at half of its tokens | not stated | half, to the page (this machine) |

## Summary

* A token costs $2 \cdot L \cdot G \cdot d \cdot b$ bytes, for good; what a step *reads* and what is *kept* are two ledgers,
  and a mirror drives them apart.
* A row is found by multiplication, or through a table and then by multiplication; an entry without memory must be
  refused, because a wrong address gives a good-looking row.
* Memory comes with the first write, page by page; unwritten rows are zeros with weight, so the length bounds every read,
  and canaries bound the writes that cross them.

One formula: $\text{address} = \text{table}[t \,//\, 32] \cdot \text{slot} + (\text{head} \cdot 32 + t \bmod 32) \cdot 4d$. One
number: 10,304 bytes per token and layer for a q8 cache with its mirror, where f16 takes 4,096.

What to read next: [day 9, the q8 KV cache](day09_q8_kv.ipynb). It fills the rows of this day with bytes, and asks what
that does to the answer.
"""
