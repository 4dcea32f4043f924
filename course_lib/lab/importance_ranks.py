"""Does importance see the needle? Its block's rank, and its lead over its neighbours, by who asks.

A rank alone misleads: importance of all queries ranks blocks by their age. The neighbours of the
needle's block are as old as it is, and nobody asked about them.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from statistics import fmean, median

import numpy as np

from course_lib.attention import head_scores, softmax, widen
from course_lib.engine import Engine
from course_lib.lab.anatomy import AnatomyOptions, Record
from course_lib.lab.decode_record import DecodeRecord, record_decode
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
            received = answer_received(record_decode(record.session, MAX_NEW_TOKENS))
        else:
            received = record.received(rule.window)
        sums = importance_sums(received.sum(axis=(0, 1)))
        near = [sums[block + step] for step in NEIGHBOURS if 0 <= block + step < len(sums)]
        rows.append({
            "index": index, "arm": rule.name, "position": position, "needle_block": block,
            "rank": int(ranks(sums)[block]), "best_block": int(np.argmax(sums)),
            "above_neighbours": bool(sums[block] > fmean(map(float, near))),
        })
    return rows


def answer_received(answer: DecodeRecord) -> np.ndarray:
    """The weight that an exact answer's queries, of all steps, gave to each position of the
    prompt, float32 [layers, num_heads, prompt tokens]."""
    steps, layers, heads, _ = answer.queries.shape
    received = np.zeros((layers, heads, answer.prompt_tokens), np.float32)
    for step in range(steps):
        for layer in range(layers):
            for head in range(heads):
                rows = widen(answer.rows(step, layer, head))
                weights = softmax(head_scores(answer.queries[step, layer, head], rows))
                received[layer, head] += weights[: answer.prompt_tokens]
    return received


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
