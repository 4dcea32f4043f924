"""The needle experiment against a running server: the article's own route, one arm.

How the server reads its cache (exact, or block-sparse with some k) was decided when it was started;
this side sends the prompts and reads what comes back. A text recalls the needle if it holds the
value anywhere, as in article 10-2: unlike a local run the first token counts too, because pieces of
a stream are not tokens and a server's prefill is part of what is measured.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from statistics import fmean, median

from course_lib.engine.client import Client
from course_lib.engine.completions import ChatResult
from course_lib.engine.tokenizer import Tokenizer
from course_lib.lab.needle import NeedleOptions, holds_value, prompt_of

ARM = "server"


@dataclass(frozen=True)
class ServerTrial:
    """One prompt: what the server answered and whether that holds the needle's value."""

    answer: ChatResult
    recalled: bool


@dataclass(frozen=True)
class ServerResult:
    """All prompts: recall 0 … 1; median seconds to the first token and tokens per second, None
    where the server streamed nothing; the server's own counts and the texts, prompt by prompt."""

    k: str
    recall: float
    first_token_s: float | None
    tokens_per_s: float | None
    prompt_tokens: list[int | None]
    completion_tokens: list[int | None]
    finish_reasons: list[str | None]
    texts: list[str]


def run_server_trials(
    client: Client,
    tokenizer: Tokenizer,
    options: NeedleOptions,
    on_piece: Callable[[int, str], None] | None = None,
) -> Iterator[ServerTrial]:
    """Ask the server prompt by prompt; prompts are sized by `tokenizer`, which may not be its own.

    `on_piece(index, text)` is called as text arrives. Raises CourseError for what goes wrong.
    """
    for index in range(options.prompts):
        prompt = prompt_of(tokenizer, options, index)
        answer = client.chat(
            [{"role": "user", "content": prompt.content}], options.max_new_tokens
        )
        for piece in answer:
            if on_piece is not None:
                on_piece(index, piece.text)
        result = answer.result()
        yield ServerTrial(result, holds_value(result.text, prompt.fact.value))


def server_result(trials: list[ServerTrial]) -> ServerResult:
    """The share and medians of the finished prompts."""
    answers = [trial.answer for trial in trials]
    return ServerResult(
        k=ARM,
        recall=fmean(trial.recalled for trial in trials),
        first_token_s=_median([a.first_token_s for a in answers]),
        tokens_per_s=_median([a.tokens_per_s for a in answers]),
        prompt_tokens=[a.prompt_tokens for a in answers],
        completion_tokens=[a.completion_tokens for a in answers],
        finish_reasons=[a.finish_reason for a in answers],
        texts=[a.text for a in answers],
    )


def _median(values: list[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return median(known) if known else None
