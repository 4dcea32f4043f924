"""What a /v1/chat/completions server answers: JSON objects, checked, as text and counts."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Any

REPORTS = "reports an error: "


class AnswerError(ValueError):
    """An answer that is none: the message says what was wrong with it, in a few words."""


@dataclass(frozen=True)
class Part:
    """What one object adds: text of the answer, text of the model's thinking, why it ended."""

    text: str = ""
    thinking: str = ""
    finish_reason: str | None = None
    usage: tuple[int | None, int | None] = (None, None)  # tokens of prompt, of completion


@dataclass(frozen=True)
class Piece:
    """A piece of text and the seconds from the request to its arrival."""

    text: str
    seconds: float


@dataclass(frozen=True)
class ChatResult:
    """A finished answer.

    `text` (without `thinking`, which some servers send apart) · `finish_reason`: "stop", "length",
    … as the server said it · `prompt_tokens`, `completion_tokens`: the server's own counts, None
    where it gave none · `first_token_s`: seconds from the request to the first piece, thinking
    included; None without streaming · `tokens_per_s`: (completion_tokens - 1) / (last piece -
    first piece), so prefill does not count; None unless most tokens came as pieces of their own ·
    `seconds`: the whole request.
    """

    text: str
    thinking: str
    finish_reason: str | None
    prompt_tokens: int | None
    completion_tokens: int | None
    first_token_s: float | None
    tokens_per_s: float | None
    seconds: float


@dataclass
class Gathered:
    """The parts of one answer, added up as they arrive."""

    texts: list[str] = field(default_factory=list)
    thinking: list[str] = field(default_factory=list)
    arrivals: list[float] = field(default_factory=list)
    finish_reason: str | None = None
    prompt_tokens: int | None = None
    completion_tokens: int | None = None

    def add(self, part: Part, seconds: float) -> None:
        if part.text or part.thinking:
            self.arrivals.append(seconds)
        self.texts.append(part.text)
        self.thinking.append(part.thinking)
        self.finish_reason = part.finish_reason or self.finish_reason
        prompt, completion = part.usage
        self.prompt_tokens = self.prompt_tokens if prompt is None else prompt
        self.completion_tokens = self.completion_tokens if completion is None else completion

    def result(self, seconds: float, streamed: bool) -> ChatResult:
        return ChatResult(
            text=joined(self.texts),
            thinking=joined(self.thinking),
            finish_reason=self.finish_reason,
            prompt_tokens=self.prompt_tokens,
            completion_tokens=self.completion_tokens,
            first_token_s=self.arrivals[0] if streamed and self.arrivals else None,
            tokens_per_s=self._rate() if streamed else None,
            seconds=seconds,
        )

    def _rate(self) -> float | None:
        pieces, tokens = len(self.arrivals), self.completion_tokens or len(self.arrivals)
        # A server that sends its text in a few lumps has told us nothing about its tokens' times.
        if pieces < 2 or 2 * pieces < tokens:
            return None
        span = self.arrivals[-1] - self.arrivals[0]
        return (tokens - 1) / span if span > 0 else None


def joined(texts: list[str]) -> str:
    """The texts as one, in which halves of a surrogate pair meet and lone ones become U+FFFD."""
    return "".join(texts).encode("utf-16", "surrogatepass").decode("utf-16", "replace")


def json_object(text: str | bytes) -> dict[str, Any]:
    """The JSON object in `text`; AnswerError if it is none or the server's own error."""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        raise AnswerError(f"sends what is no JSON ({shortened(text)})") from None
    if not isinstance(value, dict):
        raise AnswerError(f"sends JSON that is no object ({shortened(text)})")
    if value.get("error"):
        raise AnswerError(REPORTS + error_text(value))
    return value


def error_text(value: Any) -> str:
    """What an error object says, on one short line."""
    for key in ("error", "message", "detail"):
        if isinstance(value, dict) and value.get(key):
            return error_text(value[key])
    return shortened(value if isinstance(value, str) else json.dumps(value, ensure_ascii=False))


def shortened(text: str | bytes, length: int = 200) -> str:
    """`text` on one line of printable characters, at most `length` of them."""
    if isinstance(text, bytes):
        text = text[: 4 * length].decode("utf-8", "replace")
    line = "".join(c if c.isprintable() else " " for c in text[: 4 * length])
    line = " ".join(line.split())
    return line if len(line) <= length else line[: length - 1] + "…"


def part_of(value: dict[str, Any]) -> Part:
    """The part in one object: a chunk of a stream (`delta`) or a whole answer (`message`)."""
    choices = value.get("choices")
    usage = _usage(value.get("usage"))
    if isinstance(choices, list) and not choices:  # the chunk that carries the usage alone
        return Part(usage=usage)
    choice = choices[0] if isinstance(choices, list) else None
    said = None
    if isinstance(choice, dict):
        said = choice.get("delta", choice.get("message"))
        said = {} if said is None and "finish_reason" in choice else said
    if not isinstance(choice, dict) or not isinstance(said, dict):
        raise AnswerError(f"sends no choices with a message ({shortened(json.dumps(value))})")
    reason = choice.get("finish_reason")
    return Part(
        text=_string(said, "content"),
        thinking=_string(said, "reasoning_content") or _string(said, "reasoning"),
        finish_reason=reason if isinstance(reason, str) else None,
        usage=usage,
    )


def _string(said: dict[str, Any], key: str) -> str:
    value = said.get(key)
    if value is None:
        return ""
    if not isinstance(value, str):
        raise AnswerError(f"sends a {key} that is no text ({shortened(json.dumps(value))})")
    return value


def _usage(usage: Any) -> tuple[int | None, int | None]:
    if not isinstance(usage, dict):
        return None, None
    prompt, completion = (_count(usage.get(k)) for k in ("prompt_tokens", "completion_tokens"))
    return prompt, completion


def _count(value: Any) -> int | None:
    whole = isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 2**53
    return value if whole else None
