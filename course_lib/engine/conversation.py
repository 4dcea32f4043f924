"""Conversations: an answer as a stream that may be stopped anywhere, and the turns around it."""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from course_lib.engine.generate import GeneratedToken, stream_from
from course_lib.engine.prompt_cache import PromptCache
from course_lib.engine.session import Session
from course_lib.engine.tokenizer import Tokenizer
from course_lib.errors import CourseError

if TYPE_CHECKING:
    from course_lib.engine.engine import Engine


@dataclass
class Reply:
    """What has been generated of an answer, true at any moment, and what it cost.

    `ids` are without the end token. `stopped`: "eos", "length", or "interrupted" as long as the
    stream was not read to its end. `reused_tokens` of the prompt's were in the cache already.
    `prefill_s`, `decode_s`: seconds, without what the reader of the stream does in between.
    `attn_ms` and `blocks_read`: one number per token fed to decode, as in `Generation`.
    """

    tokenizer: Tokenizer = field(repr=False)
    prompt_tokens: int
    ids: list[int] = field(default_factory=list)
    stopped: str = "interrupted"
    reused_tokens: int = 0
    prefill_s: float = 0.0
    decode_s: float = 0.0
    attn_ms: list[float] = field(default_factory=list)
    blocks_read: list[float] = field(default_factory=list)

    @property
    def text(self) -> str:
        """The answer so far, control tokens of the model (such as <think>) included."""
        return self.tokenizer.decode(self.ids)

    @property
    def prefill_tokens_per_s(self) -> float | None:
        """Prompt tokens per second, of those that were not in the cache; None before the end."""
        run = self.prompt_tokens - self.reused_tokens
        return run / self.prefill_s if self.prefill_s else None

    @property
    def decode_tokens_per_s(self) -> float | None:
        """Tokens fed to decode per second; None before the second token."""
        return len(self.attn_ms) / self.decode_s if self.decode_s else None


class Answer(Iterator[GeneratedToken]):
    """The tokens of an answer, each as soon as it is chosen; made by `Engine.chat`.

    The first one asked for runs the prompt. `reply` grows with the tokens and keeps them however
    the iteration ends: read to the end, closed, left alone, or by Ctrl-C in the reader or in here.
    """

    def __init__(
        self,
        reply: Reply,
        prefill: Callable[[], tuple[Session, int]],
        max_new_tokens: int,
        **step_options,
    ):
        self.reply = reply
        self._tokens = _run(reply, prefill, max_new_tokens, step_options)

    def __next__(self) -> GeneratedToken:
        return next(self._tokens)

    def close(self) -> None:
        """End the answer here."""
        self._tokens.close()


def _run(
    reply: Reply,
    prefill: Callable[[], tuple[Session, int]],
    max_new_tokens: int,
    step_options: dict,
) -> Generator[GeneratedToken, None, None]:
    """Prefill, then decode, and book everything in `reply`."""
    begin = time.perf_counter()
    session, reply.reused_tokens = prefill()
    reply.prefill_s = time.perf_counter() - begin
    for token in stream_from(session, max_new_tokens, tokenizer=reply.tokenizer, **step_options):
        if token.attn_ms is not None and token.blocks_read is not None:
            reply.decode_s += token.ms / 1e3
            reply.attn_ms.append(token.attn_ms)
            reply.blocks_read.append(token.blocks_read)
        if token.stopped != "eos":
            reply.ids.append(token.id)
        reply.stopped = token.stopped or reply.stopped
        yield token


def room_for_answer(prompt_tokens: int, max_new_tokens: int, limit: int) -> int:
    """How many tokens an answer may have; CourseError if the context has no room for any."""
    if prompt_tokens >= limit:
        raise CourseError(
            f"the conversation of {prompt_tokens} tokens fills the model's context of {limit}: "
            "start a new one or shorten it"
        )
    return min(max_new_tokens, limit - prompt_tokens)


class Conversation:
    """Questions and answers in turn, each prompt going on from the rows of the one before.

    `messages` are the turns that count: a question whose answer has no token yet is not among
    them, an interrupted answer is, as far as it came. Options as `Engine.chat`.
    """

    def __init__(self, engine: Engine, system: str | None = None, **options):
        self.engine = engine
        self._options = options
        self._system = system
        self._settled: list[Mapping[str, str]] = []
        self._question: Mapping[str, str] = {}
        self._answer: Answer | None = None
        self._decode_k: int | str | None = None
        self._cache = PromptCache()
        self.reset()

    @property
    def messages(self) -> list[Mapping[str, str]]:
        if self._answer is None or not self._answer.reply.ids:
            return list(self._settled)
        answer = {"role": "assistant", "content": self._answer.reply.text}
        return [*self._settled, self._question, answer]

    def ask(self, text: str, **options) -> Answer:
        """The answer to `text`; whatever came of the last one is kept.

        `options` of this answer as `Engine.chat`, and its errors.
        """
        messages, question = self.messages, {"role": "user", "content": text}
        if self._answer is not None:
            self._answer.close()  # the session goes on with the new one
            if self._decode_k is None:
                self._cache.fed(self._answer.reply.ids)
        options = self._options | options
        answer = self.engine.chat([*messages, question], cache=self._cache, **options)
        self._settled, self._question, self._answer = messages, question, answer
        self._decode_k = options.get("decode_k")
        return answer

    def reset(self) -> None:
        """Forget all turns but the system message."""
        system = {"role": "system", "content": self._system or ""}
        self._settled = [] if self._system is None else [system]
        self._answer, self._cache = None, PromptCache()
