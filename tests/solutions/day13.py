"""Solutions of day 13: one function per A item, one model answer with rubric per B item."""

from __future__ import annotations

import numpy as np


def page_scores(q, k, page_size=16):
    if page_size < 1:
        raise ValueError("page_size must be at least 1")
    starts = np.arange(0, k.shape[1], page_size)
    low = np.minimum.reduceat(k, starts, axis=1)
    high = np.maximum.reduceat(k, starts, axis=1)
    group = len(q) // len(k)
    low, high = np.repeat(low, group, axis=0), np.repeat(high, group, axis=0)
    query = q[:, None, :]
    return np.maximum(query * low, query * high).sum(axis=-1).astype(np.float32)


def one_list(masks, rule, kv_heads, sums=None, threshold=None):
    _, rows, blocks = masks.shape
    ballots = masks.reshape(kv_heads, -1, rows, blocks).any(axis=1)
    if rule == "any":
        kept = ballots.any(axis=(0, 1))[None]
    elif rule == "majority":
        kept = (2 * ballots.sum(axis=(0, 1)) > kv_heads * rows)[None]
    elif rule == "per_head":
        kept = ballots.any(axis=1)
    elif rule == "mean_score":
        mass = sums.sum(axis=(0, 1), dtype=np.float64)
        kept, before = np.zeros((1, blocks), bool), 0.0
        for b in sorted(range(blocks), key=lambda b: (-mass[b], b)):
            kept[0, b] = threshold == 1 or before < threshold * mass.sum()
            before += mass[b]
    else:
        raise ValueError(f"unknown rule {rule!r}")
    kept[:, [0, -1]] = True
    return [np.flatnonzero(row).tolist() for row in kept]


def score_run(texts, references, rule):
    if len(texts) != len(references) or not texts or not all(references):
        raise ValueError("texts and references do not fit")
    shares = [sum(r.lower() in text.lower() for r in refs) / len(refs)
              for text, refs in zip(texts, references, strict=True)]
    if rule == "all":
        return sum(shares) / len(shares)
    least = {"any": 0.0, "pass": 0.5, "exact": 1.0}
    if rule not in least:
        raise ValueError(f"unknown rule {rule!r}")
    good = [s > 0 if rule == "any" else s >= least[rule] for s in shares]
    return sum(good) / len(good)


ANSWERS = {
    "d13.b1": (
        "Quest keeps page_bounds(k, page_size) of a block when it is written; it reads stored "
        "keys only for blocks that were written before the policy came. XAttention reads every "
        "block's float32 keys in _keys. The score is rounded up with nextafter. Notes are two "
        "rows of sixteen, of keys only: 2/16 of the keys, 6.25 % of keys and values. XAttention "
        "may not decode: one query is no stride. Reading all keys is already half of all bytes (K "
        "without V), so with a share rho left to read it pays 0.5 + rho; Quest pays 0.0625 + rho, "
        "and extra memory for its notes, and a looser estimate. Rubric: 1 point: keys are half of "
        "the bytes, read before anything is left out; 1 point: what Quest pays (notes in memory, "
        "or a loose bound)."
    ),
    "d13.b2": (
        "`2 * votes > …` decides; the any over the group's axis makes ballots; "
        "the loop over (0, -1) in _listed forces first and "
        "last. In a chunk of 8 query blocks the last row has at most 1/8 = 12.5 % of the votes. "
        "The number that hides the loss is ruler_niah, 100 % passed: its answers are written by "
        "exact decode, its rule passes from 0.5 on, and its needle is found by decode whatever "
        "prefill dropped. Beside it: recall where prefill itself must find the fact, per rule and "
        "threshold, with intervals. Rubric: 1 point: the number is right, for decode reads "
        "everything (or the pass rule is generous); 1 point: a measurement that prefill can fail."
    ),
    "d13.b3": (
        "The answer is written by generate_from(session, max_new_tokens), exact decode: it finds "
        "what prefill dropped. The chunk itself is attended in full by attend_part(q, own, …): "
        "what lies in the chunk, and every prompt up to the chunk's length, 256, cannot be lost. "
        "everything(blocks, \"short_query\") reads all for a short last chunk, where the question "
        "stands. A reference counts anywhere in the text. 50 of 50 leaves about 71 failures of "
        "1,000 plausible. A test that can fail: put the beginning of the answer into the prompt, "
        "make the last chunk whole, many prompts, several places. Rubric: 1 point: three "
        "different reasons with line or number; 1 point: a test in which prefill's last query "
        "must find the fact in history."
    ),
}
