# %% [markdown]
r"""
# Day 13/30 · 策略对决 Policies

**You need** Python and softmax. Day 12 helps (scores, masks, the threshold $\tau$); a recap gives you what you need of it.

**You will be able to** run three prefill policies (策略) behind one interface and say what each may read · prove a bound
on attention that needs one eighth of the keys · show how a vote between heads loses a fact that every head could have
kept · read a benchmark's "100 %" and name what it cannot have seen.

**Time** 90 minutes: about 35 to read and run, 55 for the six exercises. This day is the course's own plan. It examines a published policy design,
`XAttentionBSAPolicy`, with its numbers **quoted**, on the shipped model.

Labels: **quoted** (source shown) · **this machine** (measured in the cell) · **derived** (arithmetic) · **recorded** (a stored
run; `data/runs/*.json` holds its command, and a test makes three of its records again). Words that you miss are in the
[glossary](../docs/glossary.md).
"""

# %% tags=["nbval-ignore-output"]
import inspect
from statistics import fmean

import numpy as np

from course_lib import backend
from course_lib.classroom import check, solved_or
from course_lib.engine import Engine, generate_from
from course_lib.lab.block_mass import layer_masses
from course_lib.lab.policy_needle import PolicyArm, answer_begun, place_of, run_arm
from course_lib.lab.prompts import build_needle_prompt
from course_lib.lab.published import group
from course_lib.lab.runs import load_run
from course_lib.paths import MODELS
from course_lib.prefill import POLICIES, BlockStore, PrefillPolicy, aggregate, make_policy
from course_lib.prefill.quest import page_bounds, quest_page_scores
from course_lib.show import PrefillMaskExplorer, VoteExplorer
from course_lib.show.text import fmt, percent

print("backend:", backend.info().name, "·", backend.info().reason)

# %% [markdown]
r"""
## Two tests of one policy

A model reads 2,048 tokens of notes in which one fact is hidden. While it reads (**prefill**), a policy lets every chunk
(块组) of 256 tokens look at only a part of the text before it. Then it writes the answer (**decode**), looking at everything.

Same fact, same policy, two prompts. The first ends with the question. The second ends with the question *and the beginning of
the answer*, so that the next token is the fact itself. **Guess**: does the difference matter?
"""

# %%
engine = Engine.load(MODELS / "needle-qwen3")
CHUNK, BLOCK = 256, 64
asks = build_needle_prompt(engine, "1-0", tokens=2048, position=place_of(0))
begun = answer_begun(engine, "1-0", 2048, place_of(0))  # the same fact at the same place
vote = PolicyArm("xattn", "majority", 0.5)  # XAttention, heads vote, τ = 0.5
for prompt in (asks, begun):
    print("prompt ends:", repr(engine.decode(prompt.ids[-12:])))
    policy = vote.make(CHUNK)
    sessions = {"no policy": engine.prefill(prompt.ids),
                vote.name: engine.prefill(prompt.ids, policy=policy, chunk=CHUNK)}
    for name, session in sessions.items():
        print(f"  {name:13s} says {engine.decode(generate_from(session, 12).ids)!r}")
    print(f"  of all attention, the policy computed {percent(policy.get_density_stats()['applied_density'])}")

# %% [markdown]
r"""
Ask, and the policy is perfect. Begin the answer, and the model names a food that stands *nowhere* in these notes. Nothing warns you: the sentence is
as smooth as the right one.

Not a single unlucky prompt. Recorded, 50 and 56 prompts of this kind (`full` is the policy that reads everything):
"""

# %%
needles = {row["arm"]: row for row in load_run("prefill_policies")["summary"]}
cells = load_run("prefill_ruler")["summary"]


def ruler_cell(task, policy, threshold, length=2048):
    return next(c for c in cells if (c["task"], c["length"], c["policy"], c["threshold"])
                == (task, length, policy, threshold))


for name, policy, threshold in (("full", "full", None), ("majority 0.5", "xattn", 0.5)):
    asked = ruler_cell("niah_single", policy, threshold)
    print(f"recorded  {name:13s} question at the end: {percent(asked['all']):>7} of {asked['prompts']}"
          f"   answer begun: {percent(needles[name]['recall']):>7} of {needles[name]['prompts']}")
row = next(r for r in group("xattn_policy") if r.what == "ruler_niah")
print(f"quoted    {row.value} {row.unit}: {row.conditions}  [{row.source}]")

# %% [markdown]
r"""
100 % or 55 %: same model, same policy, same length. Which would you have published?

Nothing here is a trick, and the quoted "100 %" is honest. The question is what such a number can see. Today: what a policy is
(13-1), how a vote loses what the heads have found (13-2), and why the usual test did not notice (13-3).
"""

# %% [markdown]
r"""
### Recap in six numbers

A **block** (块) is 64 tokens of the text already read, the **history** (历史). For a chunk of queries, a policy chooses blocks of
history; attention reads those and the chunk itself. XAttention estimates, for every query head and every block of queries, the
share of attention that each block of history gets (its **mass**, 12-1 and 12-2), and keeps the shortest list that holds
$\tau$ of it. So there are many lists: one for each head and each block of queries.

Three heads, six blocks; 1 = keep:

| block | 0 | 1 | 2 | 3 | 4 | 5 |
|---|---|---|---|---|---|---|
| head A | 1 | **1** | 0 | 0 | 0 | 1 |
| head B | 1 | 0 | **1** | 0 | 0 | 1 |
| head C | 1 | 0 | 0 | **1** | 0 | 1 |

But blocks are *loaded* once, for all heads. The three lists must become one. Say "keep what more than half of the heads keep": write
down the list. Then say "keep what any head keeps".
"""

# %%
masks = np.array([[1, 1, 0, 0, 0, 1], [1, 0, 1, 0, 0, 1], [1, 0, 0, 1, 0, 1]], bool)[:, None]
for rule in ("majority", "any", "per_head"):
    lists = aggregate(masks, rule, num_kv_heads=3).by_head
    kept = [int(masks[h, 0, lists[h % len(lists)]].sum()) for h in range(3)]
    print(f"{rule:9s} {[ids.tolist() for ids in lists]}  of its 3 blocks each head reads {kept}")

# %% [markdown]
r"""
The majority agrees on blocks 0 and 5, the two that nobody was in doubt about. **What each head needed alone is what goes.**
"""

# %% [markdown]
r"""
## 13-1 同一接口的三种策略 · Full, Quest, XAttention behind one interface

The keys and values of the history lie in a **store**, block by block, layer by layer. A policy answers one question: *for this chunk of
queries, in this layer, which blocks of the store?* It may take notes of each block when it is written, while its keys are near.
"""

# %%
for name in ("on_block_written", "select_blocks"):
    print(inspect.getsource(getattr(PrefillPolicy, name)))
print("known policies:", ", ".join(POLICIES))

# %% [markdown]
r"""
({see course_lib/prefill/policy.py PrefillPolicy}; the attention over the chosen blocks is the same for all: {see
course_lib/prefill/chunked.py ChunkedPrefill._attend}.) Let all three choose for the last chunk of our prompt, in layer 1,
on the model's own queries and keys. 28 blocks of history; the fact is in block 2.
"""

# %%
record = layer_masses(engine, begun)  # queries, keys and values of an exact prefill, written down
needle = begun.value_span[0] // BLOCK
q, k, v = record.layers[1]
made = {"full": make_policy("full", block_size=BLOCK), "quest": make_policy("quest", block_size=BLOCK),
        "xattn": make_policy("xattn", block_size=BLOCK, threshold=0.5, short_query=CHUNK)}
for name, policy in made.items():
    with BlockStore(1, len(k), k.shape[2], block_size=BLOCK) as store:
        for first in range(0, 2048 - CHUNK, BLOCK):
            rows = k[:, first : first + BLOCK]
            store.append(0, rows, v[:, first : first + BLOCK])
            policy.on_block_written(0, first // BLOCK, rows)
        choice = policy.select_blocks(q[:, -CHUNK:], store, 0)
        keys = store.bytes_read / (4 * k[:, : 2048 - CHUNK].size)
    kept = [needle in choice.of_head(h) for h in range(len(k))]
    print(f"{name:6s} lists {len(choice.by_head)}, blocks {[len(ids) for ids in choice.by_head]}, needle's "
          f"block read by KV heads {kept}; to choose, read {percent(keys)} of the stored keys")

# %% [markdown]
r"""
Three answers of one shape. **Full** reads all. **Quest** has one list for each KV head and reads no stored key to choose: it kept
notes. **XAttention** makes one list, and must read *every* key to do so; what that costs is day 14.

### Quest: a bound from two numbers

Group the keys into **pages** (页) of 16 tokens. Keep, for each channel, only the smallest and the largest value in the page. For a query
$q$, no key of the page can have a larger product than

$$ \mathrm{bound} = \sum_c \max(q_c \cdot \mathrm{low}_c,\; q_c \cdot \mathrm{high}_c) . $$

By eye: a page of three keys with $d = 2$, and $q = (2, -1)$. Compute the three products, low and high, then the bound.
"""

# %%
page = np.array([[[1, 4], [3, 0], [2, 2]]], np.float32)
query = np.array([[2, -1]], np.float32)
low, high = page_bounds(page, 3)
print("products:", (page[0] @ query[0]).astype(int).tolist())
print("low", low[0, 0].astype(int).tolist(), "high", high[0, 0].astype(int).tolist(),
      "· bound", int(quest_page_scores(query, page, 3)[0, 0]))
query = np.array([[1, 1]], np.float32)
print("q = (1, 1): products", (page[0] @ query[0]).astype(int).tolist(),
      "· bound", int(quest_page_scores(query, page, 3)[0, 0]),
      "· max(q·low, q·high) =", int(max(query[0] @ low[0, 0], query[0] @ high[0, 0])))

# %% [markdown]
r"""
$q = (2,-1)$: channel 0 takes the high 3, channel 1 the low 0: $6 + 0 = 6$, here met exactly by the second key. $q = (1,1)$: the bound is
$3 + 4 = 7$, though no key has more than 5. A bound may be loose; it may never be too low. The proof is one line: in every
channel the key lies between low and high, so its product is at most the larger of the two ends; add up.

A shortcut seen in a public fork computes $\max(q \cdot \mathrm{low},\, q \cdot \mathrm{high})$ instead: two dot products and one max. Is
that a bound? The largest key of a page takes some channels from low and others from high. Try $q = (1,-1)$ on the page above on
paper. Then on the real keys, 16 queries of each head:
"""

# %%
below = pages = slack = 0
for at in range(1024, 2048, 64):
    true = np.stack([(k[h // 2] @ q[h, at]).reshape(-1, 16).max(axis=1) for h in range(4)])
    bound = quest_page_scores(q[:, at], k)
    lows, highs = page_bounds(k, 16)
    short = np.stack([np.maximum(lows[h // 2] @ q[h, at], highs[h // 2] @ q[h, at]) for h in range(4)])
    assert (bound >= true).all()
    below, pages = below + int((short < true).sum()), pages + true.size
    slack += float((bound - true).mean()) / 8 / 16
print(f"bound below the true maximum: 0 of {pages} pages; the shortcut: {percent(below / pages)}")
print(f"the bound is above the truth by {fmt(slack)} on average, in units of a score q·k/√d")
last = quest_page_scores(q[:, -1], k)
place = begun.value_span[0] // 16
print("rank of the needle's page for the last query, heads 0 to 3:",
      [int((last[h] > last[h, place]).sum()) + 1 for h in range(4)], "of", last.shape[1])

# %% [markdown]
r"""
The shortcut is below the truth on seven pages of ten. The real bound never is, but it is loose: 13 units in an exponent.

And yet, look at the last line. For the **one query** that seeks the fact, the fact's page is number 1 in all three heads that look for
it. Quest was made for decode, one query at a time, and there it finds. Over a chunk the policy takes the *largest* bound of 256
queries, everybody wants something, and the fact's block has to compete with all of it.
"""

# %% [markdown] course={"id": "d13.a1", "kind": "A", "role": "card"}
r"""
### Exercise 13-1 A · page scores with a bound

10 minutes · difficulty 2/3 · 6 points · about 8 lines

`q` is float32 `[H, d]`, `k` is float32 `[Hkv, n, d]`; query head `h` reads KV head `h * Hkv // H`. Return Quest's score of every page of
`page_size` keys, float32 `[H, pages]`; the last page may be short. `ValueError` for a page size below 1.

It must **be** a bound: no key of a page has a larger $q \cdot k$ (but for float32's rounding). The checks test that with thousands of keys.

<details><summary>Hint 1: low and high of each page</summary>

`np.minimum.reduceat(k, np.arange(0, n, page_size), axis=1)`

</details>

<details><summary>Hint 2: the max stands inside the sum</summary>

`np.maximum(q * low, q * high).sum(axis=-1)`: per channel first, then add up.

</details>
"""

# %% course={"id": "d13.a1", "kind": "A", "role": "answer", "points": 6, "minutes": 10, "difficulty": 2}
# EXERCISE d13.a1
def page_scores(q, k, page_size=16):
    """Return an upper bound of q . k in every page, float32 [H, pages].

    >>> page_scores(np.float32([[2, -1]]), np.float32([[[1, 4], [3, 0], [2, 2]]]), 3)
    array([[6.]], dtype=float32)
    """
    raise NotImplementedError("d13.a1")


# %% course={"id": "d13.a1", "kind": "A", "role": "check"}
check("d13.a1", page_scores)

# %% [markdown]
r"""
### The masks side by side

The explorer of day 12 again, one head of layer 1: each row is a block of 64 queries, each column a block of keys. Dark cells left = where
exact attention is. It opens with Quest at half of the blocks. **Predict**: will Quest's mask have a full column 0, as XAttention's
has? Where do you expect its gaps?
"""

# %%
explorer = PrefillMaskExplorer(engine, policy="quest", share=0.5)
explorer

# %% [markdown]
r"""
No sink here: nothing forces column 0, only the block before the diagonal and the diagonal itself are certain. And the gaps are not where
attention is weak: the bound rewards pages with large values in any channel.

The same question to all of them, over the four heads of layer 1 and four prompts:
"""

# %%
print("policy               cells kept   exact mass kept   needle's block kept, of 12 heads that ask")
settings = [{"policy": "quest", "share": s} for s in (0.25, 0.5, 0.75)]
settings += [{"policy": "xattn", "threshold": t} for t in (0.5, 0.7, 0.9)] + [{"policy": "full"}]
for some in settings:
    density, kept, found = [], [], 0
    for index in range(4):
        for head in range(4):
            r = explorer.compute(prompt=index, layer=1, head=head, **some)
            density.append(r["density"])
            kept.append(r["kept"])
            found += head < 3 and r["needle_kept"]
    name = " ".join(str(x) for x in some.values())
    print(f"{name:20s} {percent(fmean(density)):>10} {percent(fmean(kept)):>15} {found:14d}")

# %% [markdown]
r"""
At 54 % of the cells XAttention keeps 73 % of the mass, Quest 68 %: one looks at every key (at one product in eight), the other at two numbers a
channel and page. The last column turns it around: at about 80 % of the cells Quest keeps the needle's block for all 12 heads, XAttention for 9. Quest's block
score is a **maximum** over queries, and a maximum remembers the one that asks; XAttention's is a **sum**, in which it drowns. Two columns, two winners, and a
third one is missing: what did the choice itself read?
"""

# %% [markdown] course={"id": "d13.b1", "kind": "B", "role": "card"}
r"""
### Exercise 13-1 B · what each policy may read

9 minutes · difficulty 2/3 · 4 points

Open [prefill/policies.py](../course_lib/prefill/policies.py), [prefill/xattn_policy.py](../course_lib/prefill/xattn_policy.py) and
[prefill/quest.py](../course_lib/prefill/quest.py).

* `quest_notes`: the line in `QuestPolicy` that keeps a page's bounds when a block is written.
* `quest_late`: the line in which `QuestPolicy` reads stored keys after all. (When?)
* `xattn_reads`: the line in `XAttentionBSAPolicy` that reads the float32 keys of a block from the store.
* `rounded_up`: the line in `quest.py` that keeps the score a bound after rounding to float32.
* `notes_share`: Quest's notes as a share of the **keys and values** of the history, in percent, with pages of 16.
* `not_for_decode`: which of the three policies may not be used for decode? (its name)

Then say in two or three sentences why a policy that must read all keys to choose cannot halve the bytes, whatever it leaves out
afterwards, and what Quest pays instead.
"""

# %% [markdown] course={"id": "d13.b1", "kind": "B", "role": "answer", "points": 4, "minutes": 9, "difficulty": 2}
r"""
<!-- ANSWER d13.b1 -->
Answer: …

Evidence: path:first-last
"""

# %% course={"id": "d13.b1", "kind": "B", "role": "evidence"}
# EVIDENCE d13.b1
d13_b1 = {
    "quest_notes": "",  # "path:first-last"
    "quest_late": "",
    "xattn_reads": "",
    "rounded_up": "",
    "notes_share": None,  # a number, in percent
    "not_for_decode": "",  # a name
}

# %% course={"id": "d13.b1", "kind": "B", "role": "check"}
check("d13.b1", d13_b1)

# %% [markdown]
r"""
## 13-2 投票如何丢针 · any, majority, mean: how a vote loses the needle

XAttention gives a mask for every query head and every block of queries. The published design makes one list of them in two steps: within
a KV head, a block is kept if *any* of its query heads keeps it: that is one **ballot** (选票) for each block of queries. Then all ballots, that
is all (KV head, query block) pairs, **vote** (投票), and a block with more than half of the votes is read. First and last block always. Its
reason, quoted:
"""

# %%
from course_lib.prefill.aggregate import majority

for row in group("xattn_policy"):
    if row.what in ("per_head_density_low", "per_head_density_high", "any_density", "majority_density"):
        print(f"quoted  {row.what:23s} {row.value:>4} {row.unit}  {row.conditions}")
print(inspect.getsource(majority))

# %% [markdown]
r"""
*Any* reads nearly everything, so the sparsity is gone; *majority* reads less than half. The trade looks good in these numbers. What do
they not say?

**Planted data first**, so that you see the mechanism without a model: 4 KV heads, 6 blocks of history of 1,024 tokens, one block of
queries. Each KV head looks for 16 marked keys in a block of its own: head 0 in block 1, head 1 in block 2, and so on.

**Predict** before you run it: which blocks does a majority read at $\tau = 0.9$? And which share of the attention mass do they hold?
"""

# %%
votes = VoteExplorer(engine, source="each KV head its own", rule="majority", threshold=0.9)
votes

# %% [markdown]
r"""
Every KV head found its block; each holds practically all of its head's mass. Each of these blocks gets one vote of four. The majority reads the
sink, on which all agree because the rule forces it, and the last block. **A third of the blocks, 0.0 % of the mass.** Raising $\tau$ does
not help: the ballots are already right.

Three other rules: `any` reads what some ballot keeps; `mean_score` adds the masses of all heads and keeps the largest blocks up to $\tau$;
with `per_head` every KV head reads its own list. Move `rule` through them. Then look at two other cases: *one KV head* seeks something and
three do not; a *padded chunk* whose last 424 queries are zeros. **Which rules will lose something?**
"""

# %%
from course_lib.lab.planted import PLANTED

print(f"{'case':21s} τ     " + "".join(f"{rule:20s}" for rule in ("majority", "any", "mean_score", "per_head")))
for case in PLANTED:
    for tau in (0.5, 0.95):
        line = []
        for rule in ("majority", "any", "mean_score", "per_head"):
            r = votes.compute(source=case, rule=rule, threshold=tau)
            line.append(f"lost {len(r['lost'])}, reads {r['read_density']:4.0%}")
        print(f"{case:21s} {tau:<5} " + "".join(f"{words:20s}" for words in line))
for padding in ("counted", "left out"):
    r = votes.compute(source="padded chunk", threshold=0.95, padding=padding)
    print(f"padded chunk, majority, τ = 0.95, padding {padding}: lost {len(r['lost'])}, reads {r['read_density']:.0%}")

# %% [markdown]
r"""
Read it line by line.

* **Each its own**: majority loses all four at every $\tau$. `mean_score` must keep all four at 0.95; at 0.5 it may stop after two. `per_head` loses
  nothing and reads half.
* **One KV head**: at $\tau = 0.5$ it is outvoted by three that do not care. At 0.95 the other three keep nearly everything, and the block gets in
  *by accident*.
* **Padded chunk**: at 0.95 nothing is lost, and everything is read: a query of zeros gives every key the same weight, needs nearly all blocks to
  reach $\tau$, and votes for all of them. It looks safe for the wrong reason. With the padding left out, the vote loses all four again.
"""

# %% [markdown] course={"id": "d13.a2", "kind": "A", "role": "card"}
r"""
### Exercise 13-2 A · make one list

15 minutes · difficulty 3/3 · 7 points · about 18 lines

`masks` is bool `[H, rows, blocks]`: what each query head keeps for each block of queries. The `H // kv_heads` neighbouring query heads of a KV
head are one group. Return a list of lists of block numbers, ascending: one for all KV heads, or for `"per_head"` one each.

* Within a group and row, a block is kept if **any** of its query heads keeps it. These `kv_heads * rows` are the ballots.
* `"any"`: some ballot keeps it. `"majority"`: **more than half** of all ballots keep it. `"per_head"`: some ballot *of this KV head* keeps it.
* `"mean_score"`: no ballots. `sums` (same shape as `masks`) are the masses: add them up over heads and rows, take blocks from the largest (ties to
  the lower), keep one iff the mass before it is less than `threshold` times the whole; `threshold` 1 keeps all.
* The first and the last block are in every list. `ValueError` for another rule.

<details><summary>Hint 1: ballots</summary>

`masks.reshape(kv_heads, -1, rows, blocks).any(axis=1)`

</details>

<details><summary>Hint 2: more than half in whole numbers</summary>

`2 * votes > kv_heads * rows`

</details>
"""

# %% course={"id": "d13.a2", "kind": "A", "role": "answer", "points": 7, "minutes": 15, "difficulty": 3}
# EXERCISE d13.a2
def one_list(masks, rule, kv_heads, sums=None, threshold=None):
    """Return the blocks that are read: [[...]] for all KV heads, or one list for each.

    >>> one_list(np.array([[[1, 0, 1, 0]], [[1, 1, 1, 0]]], bool), "majority", 2)
    [[0, 2, 3]]
    """
    raise NotImplementedError("d13.a2")


# %% course={"id": "d13.a2", "kind": "A", "role": "check"}
check("d13.a2", one_list)

# %% [markdown]
r"""
### Does it happen on a real model?

Planted data can show anything. So search on the shipped model: its last chunk of 256 queries is four blocks of queries, with two KV heads eight
ballots. The lowest row of each KV head holds the query that seeks the fact.

Prompt 0, layer 1, $\tau = 0.8$. **Predict**: the fact's block needs five votes of eight. From whom?
"""

# %%
model_votes = VoteExplorer(engine, source="the shipped model", threshold=0.8, prompt=0, layer=1)
model_votes

# %% [markdown]
r"""
Four votes of eight: exactly half, and strictly more is needed. Both KV heads keep the block *for the row that asks*. They are outvoted by rows
whose queries have other things to do.

So it happens, but look closely, for it is not the planted pattern. There, KV heads disagreed. Here the **query blocks** do: who asks at the
end of a chunk of four rows has at most a quarter of the votes. (Do KV heads disagree here, too? About the fact, no: both want
the same block. About others, yes, as the next cell counts: in the row that asks, many blocks are kept by one KV head and not by the other.)

What does it do to the text? Recorded, 56 prompts that end with the answer's beginning, facts at eight places. `mask` is what the heads' own
lists hold, `applied` what attention then computed. (`block 256`: blocks as long as the chunk, as in the design, so that only KV heads vote; of our two both
must agree.)
"""

# %%
from course_lib.lab.intervals import wilson

one_sided = []
for index in range(4):
    for layer in range(3):
        r = model_votes.compute(source="the shipped model", prompt=index, layer=layer, chunk=64, threshold=0.5)
        one_sided.append(int((r["ballots"][:, -1].sum(axis=0) == 1).sum()))
print("τ = 0.5, last row, 31 blocks: kept by just one of two KV heads:", min(one_sided), "to", max(one_sided))
run = load_run("prefill_policies")
print("\nrecorded              recall    mask   applied")
for row in run["summary"]:
    print(f"{row['arm']:22s}{percent(row['recall']):>7} {percent(row['mask_density']):>8} "
          f"{percent(row['applied_density']):>8}")
low, high = wilson(round(56 * needles["majority 0.5"]["recall"]), 56)
print(f"majority 0.5: 95 % interval {percent(low)} to {percent(high)}")

# %% [markdown]
r"""
Compare with the quoted shares: a head keeps 39 % (20–35 % there), *any* reads 98 % (~100 %), *majority* 54 % (~45 %). The published picture,
reproduced. And its other half, which was not in the table:
"""

# %%
from course_lib.show.plots import recall_against_cost

curves = {rule: {f"τ = {t}": (needles[f"{rule} {t}"]["applied_density"], needles[f"{rule} {t}"]["recall"])
                 for t in (0.5, 0.8, 0.9)} for rule in ("any", "per_head", "majority", "mean_score")}
recall_against_cost(curves, cost="attention computed, of full", label=(
    "recorded: 56 prompts whose answer prefill must find; from left to right τ = 0.5, 0.8, 0.9"))

# %% [markdown]
r"""
At $\tau = 0.5$ the heads' masks are as good as the same under all four rules (39 %). `any` finds 96 % of the facts, `majority` 55 %: that is the vote. Even at
$\tau = 0.9$, where majority computes 98 % of all attention, two facts of 56 are lost.

But be fair, and read the picture the other way: *at one price*, who finds more? Near 92 % of the attention there are three points, from 86 % to 95 % recall; with 56
prompts their intervals overlap. **No rule here is cheap and right.** `any` is safe because it reads nearly everything. And the price is steep: a little more than half of the attention finds a little more than half of the
facts.

One more look at the records. Layer 1 is where this model looks facts up. Did its last chunk read the fact's block?
"""

# %%
def count(arm, condition):
    return sum(bool(condition(r)) for r in run["records"] if r["arm"] == arm)


print("recorded          block read in layer 1: recalled / lost      not read: recalled / lost")
for arm in ("majority 0.5", "majority 0.8", "majority 0.9", "mean_score 0.8", "quest"):
    four = [count(arm, lambda r, a=a, b=b: (r["readers"][1] > 0) == a and r["recalled"] == b)
            for a in (True, False) for b in (True, False)]
    print(f"{arm:16s} {four[0]:26d} / {four[1]:<2d} {four[2]:25d} / {four[3]}")
by = {(r["index"], r["arm"]): r["recalled"] for r in run["records"]}
rescued = [i for i in range(56) if not by[i, "majority 0.5"] and by[i, "per_head 0.5"]]
lost = [i for i in range(56) if not by[i, "majority 0.5"]]
print(f"lost by majority 0.5: {len(lost)}; found with the same masks when each KV head reads its own list: {len(rescued)}")

# %% [markdown]
r"""
With `majority`, layer 1 read the block in 126 of 168 runs, and **every one of them recalled the fact**. In the other 42 it was mostly lost. (Seven
were found all the same; a neighbouring block or another layer can be enough.) And 17 of the 25 facts that the vote lost at $\tau = 0.5$ come back when
each KV head reads its own list: the heads had them. Quest also loses facts whose block it read: it leaves out so
much elsewhere that the answer comes apart.

The published design proposes the majority as a balance between sparsity and accuracy. On this evidence a vote asks the wrong question: what *most* queries want. A
fact is what *one* query wants.
"""

# %% [markdown] course={"id": "d13.b2", "kind": "B", "role": "card"}
r"""
### Exercise 13-2 B · which published number hides this?

6 minutes · difficulty 3/3 · 4 points

Open [prefill/aggregate.py](../course_lib/prefill/aggregate.py).

* `more_than_half`: the line that decides the vote.
* `group_any`: the line that makes ballots of masks (any query head of a KV head).
* `always`: the line that goes over the first and the last block.
* `asking_share`: a chunk of 1,024 queries in blocks of 128, any number of KV heads: the largest share of the votes, in percent, that the row of
  the last query can give.
* `hides`: which quoted number hides the loss? One of `per_head_density_low`, `any_density`, `majority_density`, `ruler_niah`, `selected_blocks`.

Then say why that number can be right and yet not show it, and what you would report beside it.
"""

# %% [markdown] course={"id": "d13.b2", "kind": "B", "role": "answer", "points": 4, "minutes": 6, "difficulty": 3}
r"""
<!-- ANSWER d13.b2 -->
Answer: …

Evidence: path:first-last
"""

# %% course={"id": "d13.b2", "kind": "B", "role": "evidence"}
# EVIDENCE d13.b2
d13_b2 = {
    "more_than_half": "",  # "path:first-last"
    "group_any": "",
    "always": "",
    "asking_share": None,  # percent
    "hides": "",  # a name
}

# %% course={"id": "d13.b2", "kind": "B", "role": "check"}
check("d13.b2", d13_b2)

# %% [markdown]
r"""
## 13-3 小型 RULER 及其局限 · A small RULER and its limits

**RULER** (Hsieh et al. 2024) is a family of tasks for long contexts, made from templates so that any length is possible. Three of them, in our
model's own small world:

* `niah_single`: one fact among sentences that nobody asks about (*needle in a haystack*, 大海捞针);
* `niah_multikey`: one fact among others of the same kind, one of which is asked;
* `variable_tracking` (变量追踪): a number passed on from variable to variable; all of them are asked for.
"""

# %%
from course_lib.lab import ruler
from course_lib.lab.ruler_tasks import TASKS, build_ruler_prompt

for task in TASKS:
    prompt = build_ruler_prompt(engine, task, 512, "13-0")
    print(f"{task}: {prompt.question}  references {prompt.references}")
    shown = [line for line in prompt.lines if any(r in line for r in prompt.references)]
    print("   ", " … ".join(shown))
    for name, how in (("no policy", {}), (vote.name, {"policy": vote.make(CHUNK), "chunk": CHUNK})):
        session = engine.prefill(prompt.ids, **how)
        text = engine.decode(generate_from(session, 48).ids)
        print(f"    {name:13s} says {text!r}, score {fmt(ruler.match(text, prompt.references))}")

# %% [markdown]
r"""
**The pass rule, stated**: a reference counts if it stands *anywhere* in the answer, in upper or lower case. A sample's **score** is the share of its
references found. That is RULER's own rule for these tasks ({see course_lib/lab/ruler.py match}). `./course ruler` runs it on your machine.

Recorded: 50 prompts of each task, 2,048 tokens, chunks of 256, blocks of 64, decode exact.
"""

# %%
policies = (("full", None), ("quest", None), ("xattn", 0.9), ("xattn", 0.5))
print("recorded            " + "".join(f"{p if t is None else f'majority {t}':>16}" for p, t in policies))
for task in TASKS:
    line = [percent(ruler_cell(task, *arm)["all"]) for arm in policies]
    print(f"{task:20s}" + "".join(f"{x:>16}" for x in line))
print(f"{'attention computed':20s}" + "".join(
    f"{percent(fmean(ruler_cell(t, *arm)['applied_density'] for t in TASKS)):>16}" for arm in policies))
print("recorded, answer begun in the prompt:")
names = ("full", "quest", "majority 0.9", "majority 0.5")
print(f"{'recall':20s}" + "".join(f"{percent(needles[n]['recall']):>16}" for n in names))
low, high = wilson(50, 50)
print(f"\n50 of 50 means: between {percent(low)} and {percent(high)}, with 95 % confidence")

# %% [markdown]
r"""
Two needle tasks, four policies, 100 % everywhere. By this table Quest at half of the blocks and a majority at $\tau = 0.5$ are as good as exact
attention. The last line is the same model under the same policies.

**Why RULER does not see it.** The question stands at the end of the prompt, and *decode* answers it. Decode is exact: it reads the whole cache,
the fact included. Prefill only had to leave the fact's own keys and values in order, and those are made from the fact's own sentence, nearly always inside one
chunk, which every policy reads in full. The policy under test was never asked for the needle.

(The last line counts more strictly: the text must *begin* with the value. Counted by RULER's "anywhere", one answer more would pass, Quest's; the picture stays.)

### Which rule, which number

`variable_tracking` looks like a real difference at last: 64 % with full attention. Before you blame a policy, look at how it answers. The
shipped model **has not learned chains of two hops** ([its card](../data/models/needle-qwen3/README.md)): it names the first variable, often a second
one. This task says nothing about policies here; it is the model that fails. It is a fine example of something else. Score the same 50 answers by
four rules:
"""

# %% [markdown] course={"id": "d13.a3", "kind": "A", "role": "card"}
r"""
### Exercise 13-3 A · score a run

6 minutes · difficulty 1/3 · 5 points · about 8 lines

`texts` are the answers of a run, `references` the strings that each right answer holds (a list of lists). A reference counts if it stands anywhere in the
text, whatever the case. Return a share between 0 and 1:

* `"all"`: the mean over samples of the share of references found (RULER's score);
* `"any"`: the share of samples with at least one reference found;
* `"pass"`: the share of samples with at least half of their references found;
* `"exact"`: the share of samples with all references found.

`ValueError` for another rule, for no sample, for a sample without references, and where the numbers of texts and references differ.

<details><summary>Hint</summary>

First one number a sample, `sum(...) / len(refs)`. All four rules are a mean of something about that number.

</details>
"""

# %% course={"id": "d13.a3", "kind": "A", "role": "answer", "points": 5, "minutes": 6, "difficulty": 1}
# EXERCISE d13.a3
def score_run(texts, references, rule):
    """Return the score of a run under one rule.

    >>> score_run(["VAR zamu, VAR qiro.", "none"], [["zamu", "qiro", "lo"], ["be"]], "pass")
    0.5
    """
    raise NotImplementedError("d13.a3")


# %% course={"id": "d13.a3", "kind": "A", "role": "check"}
check("d13.a3", score_run)

# %%
def reference_score(texts, references, rule):
    shares = [ruler.match(text, tuple(refs)) for text, refs in zip(texts, references, strict=True)]
    limit = {"any": 1e-9, "pass": 0.5, "exact": 1.0}
    return fmean(shares if rule == "all" else [s >= limit[rule] for s in shares])


score = solved_or(score_run, reference_score)
tracks = load_run("prefill_ruler")["records"]
print("recorded texts, variable_tracking, 2048 tokens")
for policy, threshold in policies:
    rows = [r for r in tracks if (r["task"], r["length"], r["policy"], r["threshold"])
            == ("variable_tracking", 2048, policy, threshold)]
    texts, refs = [r["text"] for r in rows], [r["references"] for r in rows]
    print(f"{policy:6s} {threshold or '':4} " + "  ".join(
        f"{rule} {percent(score(texts, refs, rule)):>7}" for rule in ("any", "pass", "all", "exact")))

# %% [markdown]
r"""
One run, full attention, four honest rules: 100 %, 72 %, 64 %, 20 %. The quoted "100 %" of the design was counted by a *pass* rule, "at least 0.5". (With one
reference a sample, as for a single needle, all four rules agree; with several they do not.) Never compare two scores before you know both rules.

### A policy that is not there

A last trap, for your own experiments. Our prompts had 2,048 tokens on purpose: eight chunks of 256. Make the prompt 13 tokens longer and look at the same
fact under the same policy:
"""

# %%
recorded = next(r for r in run["records"] if (r["index"], r["arm"]) == (0, vote.name))  # the prompt that we began with
longer = run_arm(engine, answer_begun(engine, "1-0", 2061, place_of(0)), vote, CHUNK)
for what, tokens, r in (("recorded", 2048, recorded), ("measured", 2061, longer)):
    print(f"{what} {tokens} tokens, last chunk {(tokens - 1) % CHUNK + 1:3d}: says {r['text']!r:10} layers whose last chunk reads "
          f"the fact's block: {sum(x > 0 for x in r['readers'])} of 3; attention computed {percent(r['applied_density'])}")

# %% [markdown]
r"""
Recalled. The last chunk has 13 tokens, "fewer than a chunk reads all blocks" is a rule of the policy (short queries cannot be scored in strides), and the
asking query got full attention. At 2,061 tokens, day 10's favourite length, that happens in every prompt: such a test cannot see the policy at all.
"""

# %% [markdown] course={"id": "d13.b3", "kind": "B", "role": "card"}
r"""
### Exercise 13-3 B · three reasons why "100 %" may mean little

9 minutes · difficulty 3/3 · 4 points

Find the lines that can make a needle test pass whatever a policy leaves out:

* `decode_exact`: in [lab/ruler.py](../course_lib/lab/ruler.py), the line that writes the answer.
* `own_chunk`: in [prefill/chunked.py](../course_lib/prefill/chunked.py), the line that attends to the chunk itself, in full.
* `short_chunk`: in [prefill/xattn_policy.py](../course_lib/prefill/xattn_policy.py), the line that returns everything for a short chunk.
* `anywhere`: in `lab/ruler.py`, the line that decides whether a reference counts.
* `blind_up_to`: with `--chunk 256`, the largest prompt length, in tokens, at which no policy can leave anything out.
* `failures_allowed`: an interval of 92.9 % to 100 % after 50 of 50: of 1,000 further prompts, about how many failures are still plausible?

Then give three different reasons, each with the line or number that carries it, and design one needle test that a prefill policy *can* fail.
"""

# %% [markdown] course={"id": "d13.b3", "kind": "B", "role": "answer", "points": 4, "minutes": 9, "difficulty": 3}
r"""
<!-- ANSWER d13.b3 -->
Answer: …

Evidence: path:first-last
"""

# %% course={"id": "d13.b3", "kind": "B", "role": "evidence"}
# EVIDENCE d13.b3
d13_b3 = {
    "decode_exact": "",  # "path:first-last"
    "own_chunk": "",
    "short_chunk": "",
    "anywhere": "",
    "blind_up_to": None,  # tokens
    "failures_allowed": None,  # a number
}

# %% course={"id": "d13.b3", "kind": "B", "role": "check"}
check("d13.b3", d13_b3)

# %% [markdown]
r"""
## Summary

1. A policy chooses blocks for a chunk; full reads all, Quest keeps two numbers a channel and page and needs a true bound, XAttention reads every key
   to choose.
2. A vote keeps what most (KV head, query block) pairs want. What one query wants is outvoted, on planted data by heads, on the shipped model by
   rows, at masks that held it.
3. A needle test whose answer exact decode writes cannot see what prefill lost; a score without its rule, its lengths and its number of prompts is
   not a result.

What this model cannot tell: its attention is spread, its prompts are short, it has three layers and was trained for one kind of lookup. The *mechanism* carries
over; the percentages are its own.

The formula: $\sum_c \max(q_c\,\mathrm{low}_c,\, q_c\,\mathrm{high}_c) \ge q \cdot k$ · The number: **100 % and 55 %**, one policy under two tests.

**Next**: day 14 puts the bill together: chunks, merges, bytes read, and why a policy that read half was slower. To read more:
[aggregate.py](../course_lib/prefill/aggregate.py), [policy.py](../course_lib/prefill/policy.py), `./course ruler --help`.
"""
