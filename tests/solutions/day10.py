"""Solutions of day 10: one function per A item, one model answer with rubric per B item."""

from __future__ import annotations


def decode_cost(n, k_blocks, head_dim, block_size=32, n_probe=8):
    if min(n, k_blocks, head_dim, block_size, n_probe) < 1:
        raise ValueError("every argument must be at least 1")
    dense = 2 * n * head_dim
    if n <= 2 * block_size or n <= k_blocks * block_size:
        return {"dense": dense, "probe": 0, "attend": dense}
    full, rest = divmod(n, block_size)

    def probes(length):
        return len(range(0, length, max(1, length // n_probe)))

    return {
        "dense": dense,
        "probe": (full * probes(block_size) + probes(rest)) * head_dim,
        "attend": 2 * k_blocks * block_size * head_dim,
    }


def select_blocks(probe, importance, k_blocks):
    if k_blocks < 1:
        raise ValueError("k_blocks must be at least 1")
    last = len(probe) - 1

    def best_first(scores):
        return sorted(range(len(probe)), key=lambda b: (-scores[b], b))

    chosen = []
    if importance is not None:
        chosen = [(b, "I") for b in best_first(importance)[: (k_blocks + 1) // 2]]
    reserved = len(chosen)
    taken = {b for b, _ in chosen}
    free = [b for b in best_first(probe) if b not in taken]
    chosen += [(b, "P") for b in free[: k_blocks - reserved]]
    if reserved < len(chosen) < len(probe) and all(b != last for b, _ in chosen):
        slots = range(reserved, len(chosen))
        chosen[min(slots, key=lambda s: probe[chosen[s][0]])] = (last, "R")
    return chosen


def end_to_end_change(profile, cost):
    total = sum(profile.values())
    if "attention" not in profile or total <= 0 or min(profile.values()) < 0:
        raise ValueError("attention is missing or a time is negative")
    attention = profile["attention"]
    sparse = attention * (cost["probe"] + cost["attend"]) / cost["dense"]
    return {
        "change": 100 * (sparse - attention) / total,
        "ceiling": -100 * attention / total,
    }


ANSWERS = {
    "d10.b1": "sparse_decode_gate opens only for n > 2 * block_size and n > k * block_size; decode "
    "asks it once a token and falls back to every row. Prefill has its own gate, which knows only "
    "the first condition. n counts the token being decoded, so k = 1 starts at n = 65, k = 32 at "
    "1,025. For k = 16 the multiply-adds stay below exact attention from n = 592 on, but the gate "
    "opens at 513: in between the engine is sparse and mostly does more work. "
    "Rubric: 1 point: both conditions, why the second changes no bit, and that a shut gate is "
    "silent, so k = 32 at 1,000 tokens is exact attention under another name; 1 point: "
    "the gate is not the break-even.",
    "d10.b2": "Probe: largest sampled q . k of each block. Importance: (k + 1) // 2 blocks by sum, "
    "1 at k = 1 and 16 at k = 32. Top-k: the best of the remaining blocks. Recency: the last "
    "block replaces the weakest probe block. Ties fall to the lower index because the sort is "
    "stable; the eviction takes the earliest chosen of equals because argmin does. Importance "
    "blocks are never displaced: the search for a victim starts at `reserved`. "
    "Rubric: 1 point: a whole chain for one block, in the order importance, probe, recency; "
    "1 point: why k = 1 leaves no slot to probe or recency, or why equal scores need a rule "
    "(same query and cache must give the same blocks).",
    "d10.b3": "The gate makes short contexts exact without a word and counts all blocks as read. "
    "The first token of an answer comes from prefill. Engine.forward is always exact, so a "
    "perplexity from it says nothing about k. Of the sentences: reproducible selection survives, "
    "and so does the missing probe slot at k = 1; the probe's price, the tail as the most "
    "important block and the always-kept last block do not survive as written. Also excluded in "
    "the public engine: 4-bit KV, batched decode, multimodal prefill, speculation. "
    "Rubric: 1 point: at least three exclusions with what a report about them would wrongly "
    "claim; 1 point: for one sentence that falls, the number that decides it, politely said.",
}
