"""Parts of a context, each attended alone, and the merge that makes one attention of them."""

from __future__ import annotations

from typing import Any

import numpy as np

from course_lib.arrays import F32
from course_lib.attention_common import kv_head
from course_lib.engine import Engine
from course_lib.lab.captured import captured
from course_lib.lab.merge_study import MergeStudy
from course_lib.show.controls import dropdown, number, steps
from course_lib.show.explorer import Explorer
from course_lib.show.lse_merge_picture import LseMergePicture
from course_lib.show.models import shipped_engine
from course_lib.show.text import fmt, percent

SOURCES = ("toy", "model")
PARTS = (1, 2, 3, 6)
ORDERS = ("ascending", "descending", "shuffled")
TOKENS = 1024
NAMES = "ABCDEF"
TOY = ((0, 0, 0, 0, 3, 0), (10, 20, 30, 40, 50, 60))  # keys and values; the query is 1
LARGEST_DIFFERENCE = 1e-5
"""Scores of about 15 in float32 are off by about 1e-6, and every weight with them; outputs of the
model are below 10, those of the toy below 60."""


class LseMergeExplorer(Explorer):
    """Attention over 1 to 6 parts of a context, each part's weight, and the merge of them.

    engine: default the shipped model. source: "toy" (six tokens, d = 1) or "model" (the last query
    of a real prompt, of layer and query head). parts: into how many the context is cut; order: in
    which they are merged; merged: how many of them by now, at most `parts`, None for all.
    """

    alt = ("above, each token's share of the attention; in the middle, the weight of every part; "
           "below, one output component after every merge, beside that of attention in one part")
    drawing = LseMergePicture
    question = ("One part holds nearly all of the weight. Which weight e^(LSE-M) has it, "
                "and what does merging another part change?")

    def __init__(self, engine: Engine | None = None, *, source: str = "toy", parts: int = 2,
                 order: str = "ascending", merged: int | None = None, layer: int = 0,
                 head: int = 0) -> None:
        self.engine = engine or shipped_engine()
        config = self.engine.config
        super().__init__({
            "source": dropdown("source", {"six numbers": "toy", "a head of the model": "model"},
                               source, "whose query, keys and values"),
            "parts": steps("parts", PARTS, parts, "into how many parts the context is cut"),
            "order": dropdown("order", ORDERS, order, "the order in which parts are merged"),
            "merged": steps("merged", range(1, max(PARTS) + 1), parts if merged is None else merged,
                            "how many parts are merged by now"),
            "layer": number("layer", config.num_hidden_layers - 1, layer, "layer of the model"),
            "head": number("query head", config.num_attention_heads - 1, head, "query head"),
        })
        if merged is not None and merged > parts:
            raise ValueError(f"merged must be at most parts, {parts}, not {merged}.")
        self._fit()

    def adjust(self, name: str) -> None:
        if name == "parts":
            self.controls["merged"].value = self.controls["parts"].value
        self._fit()

    def _fit(self) -> None:
        toy, controls = self.controls["source"].value == "toy", self.controls
        controls["layer"].disabled = controls["head"].disabled = toy
        controls["merged"].value = min(controls["merged"].value, controls["parts"].value)

    def study(self, source: str, parts: int, order: str, layer: int, head: int) -> MergeStudy:
        """The parts of one query's context."""
        if source == "toy":
            k, v = (np.array(x, F32)[:, None] for x in TOY)
            q = np.ones(1, F32)
        else:
            rows = captured(self.engine, TOKENS)[layer]
            kh = kv_head(head, len(rows.q), len(rows.k))
            q, k, v = rows.q[head, -1], rows.k[kh], rows.v[kh]
        edges = tuple(len(k) * p // parts for p in range(parts + 1))
        return MergeStudy(q, k, v, edges, merge_order(parts, order))

    def compute(self, source: str = "toy", parts: int = 2, order: str = "ascending",
                merged: int | None = None, layer: int = 0, head: int = 0) -> dict[str, Any]:
        """The parts' outputs and LSEs, their weights and shares, the running merge, and how far
        its end is from attention in one part; `same_bits`: as in ascending order."""
        self.check_choices(source=source, parts=parts, order=order, layer=layer, head=head,
                           merged=parts if merged is None else merged)
        study = self.study(source, parts, order, layer, head)
        ascending = self.study(source, parts, "ascending", layer, head)
        part_outs, lses = study.parts
        running, running_lse = study.running
        exact, exact_lse = study.exact
        shown = int(np.argmax(part_outs.max(axis=0) - part_outs.min(axis=0)))
        return {
            "source": source, "parts": parts, "order": study.order, "order_name": order,
            "merged": parts if merged is None else min(merged, parts), "layer": layer,
            "head": head, "edges": study.edges, "lse": lses, "weights": study.weights,
            "shares": study.shares, "token_shares": study.token_shares(), "part_outs": part_outs,
            "running": running, "running_lse": running_lse, "exact": exact,
            "exact_lse": exact_lse, "component": shown,
            "difference": float(np.abs(running[-1].astype(np.float64) - exact).max()),
            "same_bits": bool(np.array_equal(running[-1], ascending.running[0][-1])),
        }

    def describe(self, result: dict[str, Any]) -> str:
        return describe(result)


def merge_order(parts: int, order: str) -> tuple[int, ...]:
    """The parts in one of ORDERS; "shuffled" is always the same."""
    numbers = list(range(parts))
    if order == "descending":
        numbers.reverse()
    elif order == "shuffled":
        np.random.default_rng(4).shuffle(numbers)
    return tuple(numbers)


def describe(r: dict[str, Any]) -> str:
    """The text twin of one `compute` result."""
    n, c = r["edges"][-1], r["component"]
    whose = "six numbers, q = 1" if r["source"] == "toy" else \
        f"layer {r['layer']}, query head {r['head']}, the last of {n} queries"
    lines = [f"{whose}; {r['parts']} part{'s' * (r['parts'] > 1)}, merged {r['order_name']}: "
             f"{' '.join(NAMES[p] for p in r['order'])}",
             f"{'part':<6}{'tokens':>11}{'LSE':>8}{'e^(LSE-M)':>11}{'share':>9}"
             f"{f'out[{c}]':>10}{'merged so far':>15}"]
    for step, part in enumerate(r["order"]):
        done = step < r["merged"]
        tokens = f"{r['edges'][part]}-{r['edges'][part + 1] - 1}"
        so_far = fmt(r["running"][step][c]) if done else "to come"
        lines.append(f"{NAMES[part]:<6}{tokens:>11}{fmt(r['lse'][part]):>8}"
                     f"{_weight(r['weights'][part]):>11}{percent(r['shares'][part]):>9}"
                     f"{fmt(r['part_outs'][part][c]):>10}{so_far:>15}")
    lines.append(f"in one part: LSE {fmt(r['exact_lse'])}, out[{c}] {fmt(r['exact'][c])}")
    lines.append(f"all merged: within {LARGEST_DIFFERENCE:g} of it: "
                 f"{r['difference'] <= LARGEST_DIFFERENCE}; the bits of ascending order: "
                 f"{r['same_bits']}")
    return "\n".join(lines)


def _weight(weight: float) -> str:
    return fmt(weight) if weight >= 1e-3 else "< 0.001"
