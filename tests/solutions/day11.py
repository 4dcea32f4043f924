"""Solutions of day 11: one function per A item, one model answer with rubric per B item."""

from __future__ import annotations

import numpy as np


def critical_k(records, floor=0.9, z=1.96):
    def low(hits, n):
        share, s = hits / n, z * z / n
        spread = s * share * (1 - share) + s * s / 4
        return (share + s / 2 - spread**0.5) / (1 + s)

    counts = {}
    for record in records:
        if record["k"] != "exact":
            hits, n = counts.get(record["k"], (0, 0))
            counts[record["k"]] = hits + bool(record["recalled"]), n + 1
    if not counts:
        raise ValueError("no record has a k")
    found = None
    for k in sorted(counts, reverse=True):
        if low(*counts[k]) < floor:
            break
        found = k
    return found


def blind_fraction(selections, batch, n, block_size=32):
    if batch < 1 or n < 1 or len(selections) != -(-n // batch):
        raise ValueError("selections do not fit the prompt")
    blind = 0
    for first, blocks in zip(range(0, n, batch), selections, strict=True):
        end = min(first + batch, n)
        if blocks is not None:
            seen_from = min(blocks) * block_size if len(blocks) else end
            blind += min(max(seen_from, first), end) - first
    return blind / n


def importance_map(weights, window=None, block_size=32):
    if block_size < 1 or (window is not None and window < 1):
        raise ValueError("window and block_size must be at least 1")
    n = weights.shape[-1]
    first = 0 if window is None else max(0, n - window)
    received = weights[:, :, first:].sum(axis=(1, 2))
    return np.add.reduceat(received, range(0, n, block_size), axis=1)


ANSWERS = {
    "d11.b1": "Importance reserves (k + 1) // 2 blocks, at k = 1 the only one; the probe fills "
    "k - reserved = 0 places although the needle's block had rank 1, and recency's condition "
    "reserved < chosen is false, so the last block stays out. At k = 2 the "
    "one probe place goes to the last block: the value is lost; at k = 1 the last block is lost "
    "too, and with it the language. k = 4 is the first with a probe place that recency does not "
    "take. "
    "Rubric: 1 point: the chain from the reservation to the lost block, in order, with what "
    "the probe had found; 1 point: two losses told apart, the needle's block at k = 2 and the last "
    "block at k = 1, and a line to question (budget rounded up, or recency that needs a probe "
    "block).",
    "d11.b2": "What stands: at k = 1 importance locks the only place and the probe has none. What "
    "does not: the most important block is the first, not the tail; reading the needle as well "
    "recalls only a few of 100, since the last block is missing; one block per head chosen by "
    "probe alone recalls most, so the rule and not the number fails; and prefill under the same "
    "flag left 86.9 % of the positions blind, which alone loses three needles of four. This is one "
    "small model trained to look facts up; the 2B model may spread its weight, and its prompt "
    "stood at the border of a mini-batch as ours did. "
    "Rubric: 1 point: what stands and what falls, each with a measured number; 1 point: prefill "
    "and decode kept apart, with the test that separates them; 1 point: polite, with a stated "
    "limit of the own measurement.",
    "d11.b3": "Exact prefill: the whole attention of the prompt (quoted 1,815.7 s against 455.2 s "
    "at 16K), repairs the cache completely. Windowed importance: nothing, even less adding up; "
    "here it rescues k = 2 only where its window reserves the last block, as importance off does, "
    "and the window is n mod 256. Groups: 13.8 % more prefill time for groups of 8 (quoted), "
    "because every group probes all blocks before it; repairs the needle here from groups of one "
    "block on. To measure on another model: the rank of the needle's block against its "
    "neighbours, recall at several positions, the length. "
    "Rubric: 1 point: three costs, one number each, labelled quoted, derived or measured; 1 point: "
    "what each repairs here and why, and a control that would have to be run elsewhere.",
}
