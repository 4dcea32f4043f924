"""Does importance see the needle? Its block's rank, and its sum with and without the needle in it.

A rank alone misleads: sums depend on how old a block is and how far from those who ask. The control
is the same block of the same notes while the needle stands elsewhere.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from statistics import median

import numpy as np

from course_lib.attention import head_scores, softmax, widen
from course_lib.engine import Engine
from course_lib.lab.anatomy import AnatomyOptions, Record
from course_lib.lab.decode_record import DecodeRecord, record_decode
from course_lib.lab.intervals import wilson
from course_lib.lab.needle import MAX_NEW_TOKENS, NeedleOptions, prompt_of
from course_lib.lab.prefill_record import record_prefill
from course_lib.selection import ranks
from course_lib.sparse import importance_sums

ANSWER = "answer"


@dataclass(frozen=True)
class Rule:
    """Whose attention counts: the last `window` prompt queries, all (None), or with answer=True
    the queries of the exact answer's decode. position: where the needle stands, 0 … 1."""

    name: str
    window: int | None = None
    answer: bool = False
    position: float = 0.5


def rank_records(engine: Engine, options: AnatomyOptions, index: int) -> list[Record]:
    """One record per rule, on the notes of prompt `index` with the needle at the rule's position:
    the rank of the needle's block, the best block, whether the needle's block received more than
    it does in every prompt of the same notes whose needle stands elsewhere, and how many times
    the mean of those. The rules need at least two positions."""
    positions = dict.fromkeys(rule.position for rule in options.variants)
    prompts, prefills, answers = {}, {}, {}
    for position in positions:
        asked = NeedleOptions(tokens=options.tokens, seed=options.seed, position=position)
        prompts[position] = prompt_of(engine, asked, index)
        prefills[position] = record_prefill(engine, prompts[position].ids)

    def sums_of(rule: Rule, position: float) -> np.ndarray:
        if not rule.answer:
            received = prefills[position].received(rule.window)
        else:
            if position not in answers:
                answers[position] = answer_received(
                    record_decode(prefills[position].session, MAX_NEW_TOKENS))
            received = answers[position]
        return importance_sums(received.sum(axis=(0, 1)))

    rows = []
    for rule in options.variants:
        sums = sums_of(rule, rule.position)
        block = prompts[rule.position].value_span[0] // 32
        others = [sums_of(rule, p)[block] for p in positions if p != rule.position]
        rows.append({
            "index": index, "arm": rule.name, "position": rule.position, "needle_block": block,
            "rank": int(ranks(sums)[block]), "best_block": int(np.argmax(sums)),
            "above_control": bool(sums[block] > max(others)),
            "lift": round(float(sums[block] / np.mean(others)), 4),
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
        above = sum(bool(r["above_control"]) for r in group)
        low, high = wilson(above, len(group))
        rows.append({
            "arm": arm, "position": position, "prompts": len(group),
            "median_rank": median(r["rank"] for r in group),
            "best_rank": min(r["rank"] for r in group),
            "worst_rank": max(r["rank"] for r in group),
            "median_lift": round(median(r["lift"] for r in group), 4),
            "above_control": above, "low": round(low, 4), "high": round(high, 4),
        })
    return rows


RANK_RULES = tuple(
    Rule(name, window, name == ANSWER, position)
    for position in (0.25, 0.5, 0.75)
    for name, window in (("all queries", None), ("last 256", 256), ("last 64", 64),
                         ("last 13", 13), ("last 1", 1), (ANSWER, None))
)
