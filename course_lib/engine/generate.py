"""Generation from a session, token by token, with what each step cost."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import numpy as np

from course_lib.engine.checks import check_context, check_count, check_decode_k
from course_lib.engine.sampling import Sampler, greedy, margin
from course_lib.engine.session import Session
from course_lib.engine.text_stream import TextStream
from course_lib.engine.tokenizer import Tokenizer

OnStep = Callable[[int, Session], None]


@dataclass(frozen=True)
class GeneratedToken:
    """One token of a stream and the step whose logits it was chosen from.

    `text`: what this token completes; a character whose bytes are spread over tokens comes with the
    last of them, so joined texts are the decoded ids, but for the end token. Empty without a
    tokenizer. `margin`: best minus second-best logit. `ms`: milliseconds of the step and the
    choice. `attn_ms` (selection + attention over all layers), `blocks_read` (mean per layer and
    query head) and `selections` ([layer][head], when traced) are the step's; None for the first
    token, whose logits come from prefill. `stopped`: "eos" (this is the end token), "length" (the
    last token asked for) or None.
    """

    id: int
    text: str
    margin: float
    ms: float
    attn_ms: float | None = None
    blocks_read: float | None = None
    selections: list[list] | None = None
    stopped: str | None = None


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


def generate_from(
    session: Session,
    max_new_tokens: int,
    decode_k: int | str | None = None,
    *,
    sampler: Sampler | None = None,
    n_probe: int = 8,
    force_blocks: tuple[int, ...] = (),
    trace: bool = False,
    on_step: OnStep | None = None,
) -> Generation:
    """Continuation of `session`, which is left as it is (a fork is fed); greedy without a sampler.

    `on_step(token, session)` is called after every token fed to decode. Raises CourseError if
    prompt and new tokens do not fit the context; other options as `Session.step`.
    """
    # Nothing is copied for a request that is refused.
    _check_request(session, max_new_tokens, decode_k)
    result = Generation(selections=[] if trace else None)
    for token in stream_from(
        session.fork(), max_new_tokens, decode_k, sampler=sampler, n_probe=n_probe,
        force_blocks=force_blocks, trace=trace, on_step=on_step,
    ):
        result.logits_margin.append(token.margin)
        if token.attn_ms is not None and token.blocks_read is not None:
            result.attn_ms.append(token.attn_ms)
            result.blocks_read.append(token.blocks_read)
        if result.selections is not None and token.selections is not None:
            result.selections.append(token.selections)
        if token.stopped == "eos":
            result.stopped = "eos"
        else:
            result.ids.append(token.id)
    return result


def stream_from(
    session: Session,
    max_new_tokens: int,
    decode_k: int | str | None = None,
    *,
    sampler: Sampler | None = None,
    tokenizer: Tokenizer | None = None,
    n_probe: int = 8,
    force_blocks: tuple[int, ...] = (),
    trace: bool = False,
    on_step: OnStep | None = None,
) -> Iterator[GeneratedToken]:
    """Yield the tokens that continue `session`, each as soon as it is chosen; feed them to it.

    At most max_new_tokens, and then the end token if it comes before: then it is the last item.
    A token is fed when the next one is asked for. So wherever the iteration ends, by an interrupt
    too, the session holds whole tokens: all that were yielded, or all but the last. Options and
    errors, which the call itself raises, as `generate_from`.
    """
    _check_request(session, max_new_tokens, decode_k)

    def step(token: int) -> list | None:
        selections: list | None = [] if trace else None
        session.step(token, decode_k=decode_k, n_probe=n_probe, force_blocks=force_blocks,
                     trace=selections)
        return selections[0] if selections else None

    return _stream(session, max_new_tokens, sampler or Sampler(), tokenizer, step, on_step)


def _check_request(session: Session, max_new_tokens: int, decode_k: int | str | None) -> None:
    check_count("max_new_tokens", max_new_tokens)
    check_decode_k(decode_k)
    limit = session.model.config.max_position_embeddings
    check_context(len(session) + max_new_tokens, limit)


def _stream(
    session: Session,
    max_new_tokens: int,
    sampler: Sampler,
    tokenizer: Tokenizer | None,
    step: Callable[[int], list | None],
    on_step: OnStep | None,
) -> Iterator[GeneratedToken]:
    """The loop itself; `step` feeds a token and returns its selections."""
    text = None if tokenizer is None else TextStream(tokenizer)
    token, selections, cost = -1, None, None
    for left in reversed(range(max_new_tokens)):
        begin = time.perf_counter()
        if token >= 0:
            selections, cost = step(token), session.last_step
        next_token, gap = _choose(sampler, session)
        ms = (time.perf_counter() - begin) * 1e3
        if token >= 0 and on_step is not None:
            on_step(token, session)
        token, piece = next_token, ""
        is_end = token in session.model.config.eos_token_ids
        stopped = "eos" if is_end else None if left else "length"
        if text is not None:
            piece = ("" if is_end else text.push(token)) + (text.finish() if stopped else "")
        yield GeneratedToken(
            token, piece, gap, ms,
            None if cost is None else cost.attn_ms,
            None if cost is None else cost.blocks_read,
            selections, stopped,
        )
        if stopped:
            return


def _choose(sampler: Sampler, session: Session) -> tuple[int, float]:
    """The next token and by how much the best logit exceeds the second."""
    if sampler.temperature == 0:
        return greedy(session.logits)
    token = sampler(session.logits, len(session))
    return token, margin(session.logits, int(np.argmax(session.logits)))
