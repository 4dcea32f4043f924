"""Greedy generation from a session, with what each step cost."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from course_lib.engine.checks import check_context, check_count, check_decode_k
from course_lib.engine.layers import argmax
from course_lib.engine.session import Session


@dataclass
class Generation:
    """New token ids (no prompt, no end token) and what was measured on the way.

    `logits_margin`: best minus second-best logit of every choice made, the end token's included.
    `attn_ms` (milliseconds, selection + attention over all layers) and `blocks_read` (mean per
    layer and query head): one number per token fed to decode. The first new token comes from
    prefill, so `attn_ms[i]` belongs to feeding `ids[i]`. `selections[i][layer][head]`: the
    Selections of that step when traced. `stopped`: "eos" or "length".
    """

    ids: list[int] = field(default_factory=list)
    logits_margin: list[float] = field(default_factory=list)
    attn_ms: list[float] = field(default_factory=list)
    blocks_read: list[float] = field(default_factory=list)
    selections: list[list[list]] | None = None
    stopped: str = "length"


def greedy(logits: np.ndarray) -> tuple[int, float]:
    """The best token (the lowest id on ties) and its margin over the second best."""
    best = argmax(logits)
    if len(logits) == 1:
        return best, float("inf")
    rest = np.partition(logits, -2)[-2]
    return best, float(logits[best] - rest)


def generate_from(
    session: Session,
    max_new_tokens: int,
    decode_k: int | str | None = None,
    *,
    n_probe: int = 8,
    force_blocks: tuple[int, ...] = (),
    trace: bool = False,
    on_step: Callable[[int, Session], None] | None = None,
) -> Generation:
    """Greedy continuation of `session`, which is left as it is (a fork is fed).

    `on_step(token, session)` is called after every token fed to decode. Raises CourseError if
    prompt and new tokens do not fit the context; other options as `Session.step`.
    """
    check_count("max_new_tokens", max_new_tokens)
    check_decode_k(decode_k)
    config = session.model.config
    check_context(len(session) + max_new_tokens, config.max_position_embeddings)
    session = session.fork()
    result = Generation(selections=[] if trace else None)
    while True:
        token, margin = greedy(session.logits)
        result.logits_margin.append(margin)
        if token in config.eos_token_ids:
            result.stopped = "eos"
            return result
        result.ids.append(token)
        if len(result.ids) == max_new_tokens:
            return result
        session.step(
            token,
            decode_k=decode_k,
            n_probe=n_probe,
            force_blocks=force_blocks,
            trace=result.selections,
        )
        assert session.last_step is not None
        result.attn_ms.append(session.last_step.attn_ms)
        result.blocks_read.append(session.last_step.blocks_read)
        if on_step is not None:
            on_step(token, session)
