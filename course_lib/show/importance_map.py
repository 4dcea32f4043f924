"""Who looked where: importance as a map, layers or heads down, blocks or tokens across."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from course_lib.engine import Engine
from course_lib.lab.importance_ranks import answer_received
from course_lib.lab.needle import NeedleOptions, prompt_of
from course_lib.lab.prefill_record import prefill_record
from course_lib.lab.prompt_study import prompt_study
from course_lib.lab.prompts import NeedlePrompt
from course_lib.selection import ranks
from course_lib.show.controls import dropdown, steps
from course_lib.show.explorer import Explorer
from course_lib.show.importance_picture import ImportancePicture
from course_lib.show.models import shipped_engine
from course_lib.show.text import percent, plural
from course_lib.sparse import importance_sums

PROMPTS = 4
WINDOWS: dict[str, int | None] = {
    "all queries": None, "last 256": 256, "last 64": 64, "last 13": 13, "last 1": 1}
QUERIES = (*WINDOWS, "the answer's")
PREFILLS: dict[str, int | None] = {"exact": None, "sparse, k = 32": 32, "sparse, k = 1": 1}
KS = (1, 2, 4, 8, 16, 32)
# Sums closer than this share of each other are called equal: rounding, which differs between
# machines, orders them.
TIE = 1e-4


class ImportanceMapExplorer(Explorer):
    """The attention that chosen queries gave to each block of a prompt, layer by layer.

    engine: default the shipped model. prompts: default the first four of `./course needle --tokens
    TOKENS`. prompt, queries, prefill, rows, columns, k: where the controls start. queries: of
    QUERIES, "the answer's" are those that exact attention asks while it answers. prefill: of
    PREFILLS. rows "layers" or "heads"; columns "blocks" or "tokens", those of the needle's block.
    k: for the letters I, the (k + 1) // 2 blocks that importance would reserve.
    """

    alt = ("a map of the weight that each layer or head gave to each block of the prompt; above it "
           "the sum, with the needle's block framed and the reserved blocks marked I")
    question = ("which blocks are darkest when all queries count, and when only the last 13 do? "
                "Is the needle's block among them?")
    drawing = ImportancePicture

    def __init__(
        self, engine: Engine | None = None, *, prompts: Sequence[NeedlePrompt] | None = None,
        tokens: int = 2061, prompt: int = 0, queries: str = "all queries",
        prefill: str = "exact", rows: str = "heads", columns: str = "blocks", k: int = 8,
    ) -> None:
        self.engine = engine or shipped_engine()
        self.prompts = tuple(prompts) if prompts is not None else tuple(
            prompt_of(self.engine, NeedleOptions(tokens=tokens), i) for i in range(PROMPTS))
        names = {f"{i}: {p.fact.name}'s {p.fact.attribute}": i
                 for i, p in enumerate(self.prompts)}
        super().__init__({
            "prompt": dropdown("prompt", names, prompt, "which needle is hidden in the notes"),
            "queries": dropdown("whose queries", QUERIES, queries, "whose attention is summed"),
            "prefill": dropdown("prefill", tuple(PREFILLS), prefill, "how the prompt was read"),
            "rows": dropdown("rows", ("layers", "heads"), rows, "one row per layer or per head"),
            "columns": dropdown("columns", ("blocks", "tokens"), columns,
                                "all blocks, or the tokens of the needle's block"),
            "k": steps("k", KS, k, "importance reserves (k + 1) // 2 blocks"),
        })

    def received(self, prompt: int, queries: str, prefill: str) -> np.ndarray:
        """float32 [layers, heads, prompt tokens]; kept with the prompt's records."""
        ids, prefill_k = self.prompts[prompt].ids, PREFILLS[prefill]
        if queries in WINDOWS:
            return prefill_record(self.engine, ids, prefill_k).received(WINDOWS[queries])
        key = prompt, prefill
        if key not in self._answers:
            study = prompt_study(self.engine, self.prompts[prompt], prefill_k=prefill_k)
            self._answers[key] = answer_received(study.record)
        return self._answers[key]

    @property
    def _answers(self) -> dict[tuple[int, str], np.ndarray]:
        return self.__dict__.setdefault("_answer_maps", {})

    def compute(
        self, prompt: int = 0, queries: str = "all queries", prefill: str = "exact",
        rows: str = "heads", columns: str = "blocks", k: int = 8,
    ) -> dict[str, Any]:
        """The map and what is said about it; defaults as the class's.

        map: float64 [rows, columns], the share of a row's weight. total: the same for the sum of
        all rows. sums: the engine's importance sums, float32 [blocks]. reserved: the blocks that
        importance reserves at k, "?" in letters where a tie leaves the choice to rounding.
        """
        needle = self.prompts[prompt]
        received = self.received(prompt, queries, prefill)
        layers, heads, n = received.shape
        by_row = received.sum(axis=1) if rows == "layers" else received.reshape(-1, n)
        names = [f"layer {layer}" if rows == "layers" else f"{layer}.{h}"
                 for layer in range(layers) for h in range(1 if rows == "layers" else heads)]
        sums = importance_sums(received.sum(axis=(0, 1)))
        blocks = np.add.reduceat(by_row.astype(np.float64), np.arange(0, n, 32), axis=1)
        block = needle.value_span[0] // 32
        share = blocks / np.maximum(blocks.sum(axis=1, keepdims=True), 1e-30)
        whole = by_row.sum(axis=1, keepdims=True, dtype=np.float64)
        tokens = slice(32 * block, min(32 * block + 32, n))
        if columns == "tokens":
            table = by_row[:, tokens] / np.maximum(whole, 1e-30)
            total = by_row[:, tokens].sum(axis=0, dtype=np.float64) / whole.sum()
        else:
            table, total = share, blocks.sum(axis=0) / blocks.sum()
        place = rank(sums, block)
        asked = queries if queries == "all queries" else (
            f"the {queries} queries" if queries in WINDOWS else "the answer's queries")
        verdict = f"The needle's block, {block}, " + (
            f"is number {place} of {len(sums)} by importance." if place else "received nothing.")
        first, end = needle.needle_span
        marked = range(first // 32, (end - 1) // 32 + 1) if columns == "blocks" else range(
            max(first - tokens.start, 0), min(end, tokens.stop) - tokens.start)
        return {
            "prompt": prompt, "question": needle.question, "needle": needle.fact.sentence, "n": n,
            "needle_block": block, "queries": queries, "prefill": prefill, "rows": rows,
            "columns": columns, "k": k, "names": names, "map": table, "total": total,
            "sums": sums, "marked": list(marked), "letters": letters(sums, (k + 1) // 2),
            "rank": place, "asked": asked, "verdict": verdict,
            "row_ranks": [rank(row, block) for row in share],
            "needle_share": share[:, block],
            "labels": ([self.engine.decode([t]) for t in needle.ids[tokens]]
                       if columns == "tokens" else None),
            "first_position": tokens.start,
        }

    def react(self) -> None:
        self._busy("what this prefill's queries looked at")
        self._refresh()

    def describe(self, result: dict[str, Any]) -> str:
        return describe(result)


def rounded(sums: np.ndarray) -> np.ndarray:
    """Sums without what rounding decides: those within TIE of each other are equal."""
    sums = np.asarray(sums, np.float64)
    top = sums.max(initial=0.0)
    return np.zeros_like(sums) if top <= 0 else np.round(sums / (top * TIE))


def rank(sums: np.ndarray, block: int) -> int | None:
    """Rank of a block, 1 = highest, ties to the lower index, whatever the machine; None where it
    holds nothing."""
    return int(ranks(rounded(sums))[block]) if sums[block] > 0 else None


def letters(sums: np.ndarray, places: int) -> dict[int, str]:
    """The blocks that importance reserves: "I", or "?" for each of several that tie for a place."""
    levels = rounded(sums)
    places = min(places, len(levels))
    limit = np.sort(levels)[::-1][places - 1]
    sure = np.flatnonzero(levels > limit).tolist()
    tied = np.flatnonzero(levels == limit).tolist()
    decided = len(sure) + len(tied) == places or not np.any(sums[tied])
    rest = dict.fromkeys(tied[: places - len(sure)] if decided else tied, "I" if decided else "?")
    return dict.fromkeys(sure, "I") | rest


def describe(r: dict[str, Any]) -> str:
    """The text twin of one `compute` result."""
    block, places = r["needle_block"], (r["k"] + 1) // 2
    lines = [
        f"{r['question']}  {r['n']} tokens in {len(r['sums'])} blocks; needle {r['needle']!r} in "
        f"block {block}",
        f"who looked: {r['asked']}; prefill {r['prefill']}. {r['verdict']}",
        _reserved(r, places),
        "",
        f"{'row':8s} {'needle: share':>13} {'rank':>5}   most weight",
    ]
    for name, row, share, place in zip(r["names"], _block_rows(r), r["needle_share"],
                                       r["row_ranks"], strict=True):
        lines.append(f"{name:8s} {percent(share):>13} {place or '–':>5}   {row}")
    if r["columns"] == "tokens":
        top = np.argsort(-np.round(r["total"], 6), kind="stable")[:5]
        said = ", ".join(f"{r['labels'][t]!r} at {r['first_position'] + t} {percent(r['total'][t])}"
                         for t in top)
        lines += ["", f"of all weight, the tokens of block {block}: {said}"]
    return "\n".join(lines)


def _reserved(r: dict[str, Any], places: int) -> str:
    sure = [b for b, letter in r["letters"].items() if letter == "I"]
    tied = [b for b, letter in r["letters"].items() if letter == "?"]
    text = f"k = {r['k']} reserves {plural(places, 'block')}: {', '.join(map(str, sure))}"
    if tied:
        left = places - len(sure)
        text += (", and " if sure else "") + (
            f"{left} of the {len(tied)} that tie, as rounding will have it: "
            f"{', '.join(map(str, tied))}")
    return text


def _block_rows(r: dict[str, Any]) -> list[str]:
    if r["columns"] == "tokens":
        return [", ".join(f"{r['labels'][t]!r} {percent(row[t])}" for t in
                          np.argsort(-np.round(row, 6), kind="stable")[:3]) for row in r["map"]]
    return [", ".join(f"block {b} {percent(row[b])}" for b in
                      np.argsort(-rounded(row), kind="stable")[:3]) for row in r["map"]]
