"""The speed that prefill policies must reach: which prompts it is measured on, and its table."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple, TextIO

import numpy as np

from course_lib.bench.prefill_speed import Speed, SpeedRecord, small, usual
from course_lib.engine import Engine
from course_lib.engine.chunked_prefill import SLOTS
from course_lib.known_models import locate
from course_lib.lab.captured import Layer, captured
from course_lib.lab.planted import topic
from course_lib.lab.ruler_tasks import build_ruler_prompt
from course_lib.prefill_attention import causal_attention

SHIPPED, SMALL, SYNTHETIC = (2048, 4096), (2048, 4096, 8192), 16384
QUICK = (1024,)
SMALL_LAYERS = (2, 8)  # of 30: they differ, and more would take minutes
ROUNDS = 5


class Prompt(NamedTuple):
    """Where queries and keys come from, how many tokens, and how to get them."""

    source: str
    tokens: int
    layers: Callable[[], Sequence[Layer]]


class _Enough(Exception):
    """All layers that were asked for have been seen."""


def some_layers(engine: Engine, tokens: int, wanted: Sequence[int]) -> list[Layer]:
    """The layers `wanted` of a prompt of so many tokens; those behind the last are not computed."""
    found: list[Layer] = []

    def attend(layer: int, q: np.ndarray, k: np.ndarray, v: np.ndarray) -> np.ndarray:
        if layer in wanted:
            found.append(Layer(q.copy(), k.copy(), v.copy()))
        if layer == max(wanted):
            raise _Enough
        return causal_attention(q, k, v)

    try:
        engine.model.hidden(list(build_ruler_prompt(engine, "niah_multikey", tokens, "bench").ids),
                            0, attend)
    except _Enough:
        pass
    return found


def prompts(shipped: Engine, *, quick: bool) -> Iterator[Prompt]:
    """The shipped model's, the small language model's where it is installed, and a synthetic one,
    longer than both can read."""
    for tokens in QUICK if quick else SHIPPED:
        yield Prompt("shipped model", tokens, lambda n=tokens: captured(shipped, n))  # type: ignore[misc]
    file = None if quick else locate("smollm2")
    if file is not None:
        small = Engine.load(file)
        for tokens in SMALL:
            yield Prompt("SmolLM2-135M", tokens,
                         lambda n=tokens: some_layers(small, n, SMALL_LAYERS))  # type: ignore[misc]
    if not quick:
        yield Prompt("synthetic topics", SYNTHETIC,
                     lambda: [Layer(*topic(0, 4, 2, SYNTHETIC, SYNTHETIC, 64))])


def measure(prompt: Prompt, threads: int, rounds: int,
            done: Callable[[], object]) -> list[SpeedRecord]:
    """All ratios of one prompt."""
    return Speed(prompt.layers(), prompt.source, threads).records(rounds, done)


def report(out: TextIO, records: Sequence[SpeedRecord]) -> None:
    """The ratios of every prompt, and a star where one passes its limit."""
    prompt: tuple[str, int, int] | None = None
    for record in records:
        if (record.source, record.tokens, record.threads) != prompt:
            prompt = record.source, record.tokens, record.threads
            (chunk, block), (few, little) = usual(record.tokens), small(record.tokens)
            print(f"\nspeed on {record.source}, {record.tokens} tokens, {record.threads} "
                  f"thread{'s' * (record.threads > 1)}: chunks of {chunk}, blocks of {block}, "
                  f"{SLOTS} slots; estimates and\nper_head: chunks of {few}, blocks of {little}\n"
                  f"{'':>46} {'measured':>8}    {'limit':>8} {'applied':>8}", file=out)
        sign = ">=" if record.at_least else "<="
        share = "" if record.share is None else f"{record.share:8.2f}"
        print(f"{record.what:>46} {record.value:>8.3f} {sign} {record.limit:>8.3f} {share:>8}"
              f"{'' if record.met else ' *'}", file=out)
    print("\nmedians of ratios of one run. merging: merges of a chunk's rows, one for each block, "
          "beside the attention\nto these blocks; full: all blocks in chunks, in memory. * passes "
          "the limit.", file=out)
