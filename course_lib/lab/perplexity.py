"""Perplexity of a held-out text under packed weights, quantized KV rows and sparse decode.

Every arm is measured in one way: the first half of a window is prefilled, the second half is fed
token by token (teacher forcing) through decode steps over the KV cache, and each token's
log-probability is taken before it is fed. So weights, KV rows and block selection act as they do in
generation; a measure by prefill would see packed weights and q8 rows too, but no selection.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from course_lib.engine import Engine
from course_lib.engine.tokenizer import Tokenizer
from course_lib.lab.held_out import Cost, Window, cost_of, total, world_window

WEIGHTS, KVS = ("f32", "q8_0", "q4_0"), ("f32", "q8")


@dataclass(frozen=True)
class Arm:
    """One way to run the model: weights, rows of the KV cache, decode k (None = exact)."""

    weights: str
    kv: str
    k: int | str | None

    @property
    def name(self) -> str:
        k = "" if self.k is None else f", k {self.k}"
        return f"{self.weights} weights, {self.kv} KV{k}"


@dataclass(frozen=True)
class PerplexityOptions:
    """What is measured: `windows` windows of `window` tokens, each under every arm.

    The first arm is what the others are compared with.
    """

    weights: tuple[str, ...] = WEIGHTS
    kvs: tuple[str, ...] = KVS
    ks: tuple[int | str | None, ...] = (None,)
    window: int = 512
    windows: int = 4
    seed: int = 0

    def arms(self) -> list[Arm]:
        """Every combination, weights outermost, so that one engine at a time is enough."""
        return [Arm(w, kv, k) for w in self.weights for kv in self.kvs for k in self.ks]

    @property
    def prompts(self) -> int:
        """Windows, as `Experiment` counts its records."""
        return self.windows


@dataclass(frozen=True)
class ArmPerplexity:
    """One arm over `windows` windows: perplexity of all that was predicted, and of its answers
    (None without answers); each ratio divides by the first arm's on the same windows."""

    arm: Arm
    windows: int
    cost: Cost
    perplexity: float
    ratio: float
    answer_perplexity: float | None
    answer_ratio: float | None


def windows_of(tokenizer: Engine | Tokenizer, options: PerplexityOptions) -> list[Window]:
    """The options' windows of the course's own world."""
    return [
        world_window(tokenizer, f"{options.seed}-{index}", options.window)
        for index in range(options.windows)
    ]


def window_costs(
    engine: Engine, window: Window, kvs: Sequence[str], ks: Sequence[int | str | None]
) -> Iterator[Cost]:
    """What a window's second half costs: for every kv, for every k."""
    # Selection reserves blocks for what prefill found important, as in the needle experiment.
    importance = "all_queries" if any(k is not None for k in ks) else "none"
    for kv in kvs:
        session = engine.prefill(window.ids[: window.cut], kv=kv, importance=importance)
        for k in ks:
            yield cost_of(window, session.score(window.ids[window.cut :], decode_k=k).tolist())


def measure(
    engine_of: Callable[[str], Engine],
    options: PerplexityOptions,
    windows: Sequence[Window],
    on_cost: Callable[[Arm, Cost], None],
) -> None:
    """Run all arms; `on_cost(arm, cost)` gets each arm's windows in order, as they are done.

    `engine_of(weights)` is called once for each kind of weights; the engine before is dropped
    first, so a machine needs memory for one.
    """
    for weights in options.weights:
        engine = engine_of(weights)
        arms = [arm for arm in options.arms() if arm.weights == weights]
        for window in windows:
            costs = window_costs(engine, window, options.kvs, options.ks)
            for arm, cost in zip(arms, costs, strict=True):
                on_cost(arm, cost)
        del engine


def results_of(found: Mapping[Arm, Sequence[Cost]]) -> list[ArmPerplexity]:
    """One result per arm that has a window; the first arm comes first. One that was interrupted
    is compared with the first arm on the windows that it has."""
    arms = [(arm, costs) for arm, costs in found.items() if costs]
    results = []
    for arm, costs in arms:
        cost, base = total(costs), total(arms[0][1][: len(costs)])
        own, first = _perplexity(cost.nll, cost.tokens), _perplexity(base.nll, base.tokens)
        answer = answer_ratio = None
        if cost.answer_tokens:
            answer = _perplexity(cost.answer_nll, cost.answer_tokens)
            answer_ratio = answer / _perplexity(base.answer_nll, base.answer_tokens)
        results.append(
            ArmPerplexity(arm, len(costs), cost, own, own / first, answer, answer_ratio)
        )
    return results


def _perplexity(nats: float, tokens: int) -> float:
    """exp of the mean; infinite where a text is that improbable."""
    mean = nats / tokens
    return math.exp(mean) if mean < 700 else math.inf
