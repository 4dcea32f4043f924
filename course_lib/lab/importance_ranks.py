"""Does importance see the needle? Its block's rank, and its lead over its neighbours, by who asks.

A rank alone misleads: importance of all queries ranks blocks by their age. The neighbours of the
needle's block are as old as it is, and nobody asked about them.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from statistics import fmean, median

import numpy as np

from course_lib.engine import Engine
from course_lib.lab.anatomy import AnatomyOptions, Record
from course_lib.lab.decode_record import record_decode
from course_lib.lab.intervals import wilson
from course_lib.lab.needle import MAX_NEW_TOKENS
from course_lib.lab.prefill_record import record_prefill
from course_lib.selection import ranks
from course_lib.sparse import importance_sums

NEIGHBOURS = (-3, -2, -1, 1, 2, 3)
ANSWER = "answer"


@dataclass(frozen=True)
class Rule:
    """Whose attention counts: the last `window` prompt queries, all (None), or with answer=True
    the queries of the exact answer's decode."""

    name: str
    window: int | None = None
    answer: bool = False


def rank_records(engine: Engine, options: AnatomyOptions, index: int) -> list[Record]:
    """One record per rule: the rank of the needle's block, whether it beats the mean of its six
    neighbours, and the best block."""
    position, prompt = options.placed(engine, index)
    record = record_prefill(engine, prompt.ids)
    block = prompt.value_span[0] // 32
    rows = []
    for rule in options.variants:
        if rule.answer:
            answer = record_decode(record.session, MAX_NEW_TOKENS)
            sums = answer_mass(answer)
        else:
            sums = importance_sums(record.received(rule.window).sum(axis=(0, 1)))
        near = [sums[block + step] for step in NEIGHBOURS if 0 <= block + step < len(sums)]
        rows.append({
            "index": index, "arm": rule.name, "position": position, "needle_block": block,
            "rank": int(ranks(sums)[block]), "best_block": int(np.argmax(sums)),
            "above_neighbours": bool(sums[block] > fmean(map(float, near))),
        })
    return rows


def answer_mass(answer) -> np.ndarray:
    """The weight that an exact answer's queries gave to the blocks of the prompt, all steps, layers
    and heads, float64 [blocks of the prompt]."""
    _, layers, heads, _ = answer.queries.shape
    blocks = -(-answer.prompt_tokens // answer.session.block_size)
    total = np.zeros(blocks)
    for step in range(answer.steps):
        for layer in range(layers):
            for head in range(heads):
                total += answer.attention_mass(step, layer, head)[:blocks]
    return total


def rank_summary(records: Iterable[Record]) -> list[Record]:
    """One row per rule and position."""
    groups: dict[tuple, list[Record]] = {}
    for r in records:
        groups.setdefault((r["position"], r["arm"]), []).append(r)
    rows = []
    for (position, arm), group in groups.items():
        above = sum(r["above_neighbours"] for r in group)
        low, high = wilson(above, len(group))
        rows.append({
            "arm": arm, "position": position, "prompts": len(group),
            "median_rank": median(r["rank"] for r in group),
            "best_rank": min(r["rank"] for r in group),
            "worst_rank": max(r["rank"] for r in group),
            "above_neighbours": above, "low": round(low, 4), "high": round(high, 4),
        })
    return rows


RANK_RULES = (Rule("all queries"), *(Rule(f"last {w}", w) for w in (256, 64, 13, 1)),
              Rule(ANSWER, answer=True))
