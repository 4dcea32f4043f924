"""Online softmax token by token: running maximum, sum and accumulator, and when they shrink."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import Any

import numpy as np

from course_lib.attention import head_scores, widen
from course_lib.engine import Engine
from course_lib.lab.needle import NeedleOptions, prompt_of
from course_lib.lab.online_trace import (
    ORDERS,
    arrange,
    expected_rescales,
    trace_online_softmax,
)
from course_lib.lab.prompt_study import PromptStudy, prompt_study
from course_lib.show.controls import dropdown, number
from course_lib.show.explorer import Explorer
from course_lib.show.models import shipped_engine
from course_lib.show.online_softmax_picture import (
    OnlineSoftmaxPicture,
    last_step,
    order_name,
)
from course_lib.show.text import fmt, plural

TOY_SCORES = tuple(np.log(2) * k for k in (1, 0, 2, 0, 3, 3))
"""Six scores whose exponentials are 2, 1, 4, 1, 8, 8."""
TOY_VALUES = (10.0, 20.0, 30.0, 40.0, 50.0, 60.0)

SOURCES = {"six numbers": "toy", "a head of the model": "model"}
SEEDS = 10
LARGEST = 1_000_000  # of a toy's numbers: the picture's scales and the text end there
_TABLE_ROWS = 8  # up to so many tokens are listed one by one


class OnlineSoftmaxExplorer(Explorer):
    """Step through online softmax: choose the scores, the order in which they come, how many.

    engine: where the model's scores come from (default: the shipped model, loaded when first
    needed). scores and values: your own toy instead of TOY_SCORES and TOY_VALUES. source: "toy" or
    "model"; order: one of ORDERS; read: how many tokens have been read, left out: all; seed 0 … 9
    draws the random order; layer and head (query head) left out: the head that reads the needle's
    value in a prompt of `tokens` tokens.
    """

    alt = ("scores in the order they come with the running maximum; below, the running sum and "
           "the output so far")
    question = ("Each token either leaves S and A as they are or shrinks them. How many of all "
                "tokens shrink them if the scores come sorted, reversed, in random order?")
    drawing = OnlineSoftmaxPicture

    def __init__(
        self, engine: Engine | None = None, *, scores: Sequence[float] = TOY_SCORES,
        values: Sequence[float] = TOY_VALUES, tokens: int = 256, source: str = "toy",
        order: str = "as they come", read: int | None = None, seed: int = 0,
        layer: int | None = None, head: int | None = None,
    ) -> None:
        self._engine, self._tokens = engine, tokens
        self._toy = toy_stream(scores, values)
        config = self._model.config
        choose = dropdown("scores", SOURCES, source, "where the scores and values come from")
        layer, head = self._place(layer, head)
        n = self._length(source)
        super().__init__({
            "source": choose,
            "order": dropdown("order", ORDERS, order, "the order in which the tokens are read"),
            "read": number("tokens read", n, n if read is None else read,
                           "how many tokens have been read"),
            "seed": number("seed", SEEDS - 1, seed, "draws another random order"),
            "layer": number("layer", config.num_hidden_layers - 1, layer, "layer of the model"),
            "head": number("query head", config.num_attention_heads - 1, head,
                           "every query head has its own scores"),
        })
        self._enable_controls()

    @property
    def _model(self) -> Engine:
        return self._engine or shipped_engine()

    @cached_property
    def _study(self) -> PromptStudy:
        return prompt_study(self._model, prompt_of(self._model, NeedleOptions(tokens=self._tokens),
                                                   0))

    def _place(self, layer: int | None, head: int | None) -> tuple[int, int]:
        """Layer and query head; what is left out is that of the head that reads the needle."""
        found = self._study.retrieval_head
        return found[0] if layer is None else layer, found[1] if head is None else head

    def _length(self, source: str) -> int:
        if source == "toy":
            return len(self._toy[0])
        return self._study.record.context(self._study.value_step)

    def stream(self, source: str = "toy", layer: int | None = None,
               head: int | None = None) -> tuple[np.ndarray, np.ndarray]:
        """Scores float32 [n] and values float32 [n, d] as they come, before any ordering."""
        if source == "toy":
            return self._toy
        study = self._study
        layer, head = self._place(layer, head)
        rows = widen(study.record.rows(study.value_step, layer, head))
        return head_scores(study.record.queries[study.value_step, layer, head], rows), rows.v

    def compute(self, source: str = "toy", order: str = "as they come", read: int | None = None,
                seed: int = 0, layer: int | None = None,
                head: int | None = None) -> dict[str, Any]:
        """The trace of a stream in one order, and the state after `read` tokens (left out: all).

        `component` is the output component that is shown, the largest one.
        """
        self.check_choices(source=source)
        if source == "model":
            layer, head = self._place(layer, head)
            self.check_choices(layer=layer, head=head)
        scores, v = self.stream(source, layer, head)
        ids = arrange(scores, order, seed)
        trace = trace_online_softmax(scores[ids], v[ids])
        n = len(scores)
        read = n if read is None else min(read, n)
        if read < 0:
            raise ValueError(f"read must be at least 0, not {read}.")
        component = int(np.abs(trace.out).argmax())
        name = "six numbers" if source == "toy" and n == 6 else plural(n, "toy token")
        if source == "model":
            name = f"layer {layer}, query head {head}, {n} tokens"
        return {
            "name": name, "source": source, "order": order, "seed": seed, "n": n, "read": read,
            "ids": ids, "trace": trace, "component": component, "values": v[ids, component],
            "so_far": trace.so_far[:, component], "out": trace.out,
            "rescales": trace.rescales, "rescales_so_far": int(trace.grew[:read].sum()),
            "expected": expected_rescales(n),
        }

    def adjust(self, name: str) -> None:
        if name == "source":
            source, read = self.controls["source"].value, self.controls["read"]
            n = self._length(source)
            read.max = n
            read.value = n
            self._enable_controls()
        elif name == "order":
            self._enable_controls()

    def _enable_controls(self) -> None:
        real = self.controls["source"].value == "model"
        for name in ("layer", "head"):
            self.controls[name].disabled = not real
        self.controls["seed"].disabled = self.controls["order"].value != "random"

    def describe(self, result: dict[str, Any]) -> str:
        return describe(result)


def toy_stream(scores: Any, values: Any) -> tuple[np.ndarray, np.ndarray]:
    """A reader's own scores [n] and values, float32 [n] and [n, 1], refused before anything shows.

    A score of -inf marks a masked token. Raises ValueError.
    """
    held = {}
    for name, numbers in (("scores", scores), ("values", values)):
        try:
            array = np.array(numbers, np.float64)
        except (TypeError, ValueError):
            array = np.empty((0, 0))
        sizes = np.abs(array[array != -np.inf] if name == "scores" else array)
        if array.ndim != 1 or not (sizes <= LARGEST).all():
            raise ValueError(f"{name} must be a list of numbers from {-LARGEST:,} to {LARGEST:,}"
                             f"{', or -inf for a masked token' if name == 'scores' else ''}.")
        held[name] = array.astype(np.float32)
    trace_online_softmax(held["scores"], held["values"][:, None])  # refuses two lengths
    return held["scores"], held["values"][:, None]


def describe(r: dict[str, Any]) -> str:
    """The text twin of one `compute` result."""
    trace, read, c = r["trace"], r["read"], r["component"]
    lines = [f"{r['name']}; {order_name(r)}; read {read} of {r['n']}"]
    if read:
        t = read - 1
        lines.append(f"M = {fmt(trace.max[t])}   S = {fmt(trace.total[t])}   A[{c}] = "
                     f"{fmt(trace.acc[t, c])}   A[{c}]/S = {fmt(r['so_far'][t])}"
                     f"   in the end {fmt(r['out'][c])}")
    lines.append(f"last token: {last_step(r)}")
    lines.append(f"rescales so far: {r['rescales_so_far']}, in the end {r['rescales']} of {r['n']}"
                 f"   (different scores in random order: {fmt(r['expected'])} on average)")
    if r["n"] <= _TABLE_ROWS:
        lines.append(f"{'score':>7} {'M':>7} {'shrink':>7} {'weight':>7} {'S':>7} {'A':>7} "
                     f"{'A/S':>7}")
        for t in range(read):
            row = (trace.scores[t], trace.max[t], trace.shrink[t], trace.weight[t],
                   trace.total[t], trace.acc[t, c], r["so_far"][t])
            lines.append(" ".join(f"{fmt(x):>7}" for x in row))
    return "\n".join(lines)
