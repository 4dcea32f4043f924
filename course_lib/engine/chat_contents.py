"""Messages as a template sees them: their contents marked, so that none forges a control token."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

Messages = Sequence[Mapping[str, Any]]

ROLES = ("system", "user", "assistant", "tool")

# Supplementary Private Use Area-B: characters to which Unicode never gives a meaning.
MARKS = range(0x100000, 0x10FFFE)


class Turn(NamedTuple):
    """One message: `content` with its marks, and the part of it that a template has to write."""

    role: str
    content: str
    core: str


class Marker:
    """Marks contents, and finds what the template wrote in what came out.

    The mark, a character that occurs nowhere else, stands behind every character of a content
    with which a control token can begin, and behind its first one that is no white space. So in
    what the template made of it, a control token that lies in a content, or reaches out of or
    into one, is interrupted or followed by a mark, and only one that the template wrote is not.
    White space at the ends stays free of marks: templates trim contents. So a control token that
    begins with white space could not be guarded; it is text here.

    `answer_tokens` are control tokens that an answer may hold, such as <think>: a model wrote
    them. In contents of the assistant they stay what they are, and templates find them there.
    """

    def __init__(
        self,
        control_tokens: Sequence[str],
        answer_tokens: Sequence[str],
        texts: Sequence[str],
    ):
        used = set().union(*texts)
        mark = next((chr(code) for code in MARKS if chr(code) not in used), None)
        if mark is None:
            raise ValueError(
                "messages use up the private-use characters, of which one must stay free to guard "
                "contents: remove characters U+100000 to U+10FFFD from them"
            )
        self._mark = mark
        control_tokens = [token for token in control_tokens if token[:1].strip()]
        self._control = re.compile(f"({_any_of(control_tokens)})(?!{mark})")
        self._answer = re.compile(f"({_any_of(answer_tokens)})")
        begins = "".join(sorted({token[0] for token in control_tokens}))
        self._begin = re.compile(f"[{re.escape(begins)}]" if begins else _NOTHING)

    def turn(self, role: str, content: str) -> Turn:
        """The message with its content marked."""
        if role != "assistant":
            marked = self._marked(content)
            return Turn(role, marked, marked.strip())
        # Templates cut answers at such tokens, so that each piece may come to stand first.
        pieces = self._answer.split(content)
        pieces[::2] = map(self._marked, pieces[::2])  # the others are the tokens
        # Earlier thoughts and calls of tools are the template's to show or leave out.
        return Turn(role, "".join(pieces), pieces[-1].strip())

    def _marked(self, text: str) -> str:
        marked = self._begin.sub(lambda match: match[0] + self._mark, text)
        rest = marked.lstrip()
        if not rest:
            return marked
        at = len(marked) - len(rest) + 1
        return marked[:at] + self._mark + marked[at:]

    def split(self, rendered: str) -> Iterator[tuple[str, bool]]:
        """(text, is a control token) in order, without marks; of tokens that begin at one place
        the longest."""
        for index, piece in enumerate(self._control.split(rendered)):
            piece = piece.replace(self._mark, "")
            if piece:
                yield piece, index % 2 == 1


_NOTHING = r"(?!)"


def _any_of(tokens: Sequence[str]) -> str:
    longest_first = sorted(tokens, key=len, reverse=True)
    return "|".join(map(re.escape, longest_first)) or _NOTHING


def checked(messages: Messages) -> list[tuple[str, str]]:
    """(role, content) of every message; parts of text are joined. ValueError says what is wrong."""
    if isinstance(messages, (str, Mapping)) or not isinstance(messages, Sequence) or not messages:
        raise ValueError('messages must be a list like [{"role": "user", "content": "Hello"}]')
    found = []
    for index, message in enumerate(messages):
        if not isinstance(message, Mapping) or set(message) != {"role", "content"}:
            raise ValueError(f'messages[{index}] must have exactly the keys "role" and "content"')
        if message["role"] not in ROLES:
            raise ValueError(
                f"messages[{index}] has role {message['role']!r}, known are {', '.join(ROLES)}"
            )
        content = _text(message["content"])
        if content is None:
            raise ValueError(
                f"messages[{index}] has a content that is not a str, and no list of parts like "
                '{"type": "text", "text": "Hello"}'
            )
        try:
            content.encode("utf-8")
        except UnicodeEncodeError as error:
            raise ValueError(
                f"messages[{index}] holds a lone surrogate at character {error.start}: remove it "
                "or decode the text as UTF-8"
            ) from None
        found.append((message["role"], content))
    return found


def _text(content: Any) -> str | None:
    """A content's text; None if it is something else, or holds something else (an image)."""
    if isinstance(content, str):
        return content
    if not isinstance(content, (list, tuple)):
        return None
    texts = []
    for part in content:
        if not isinstance(part, Mapping) or part.get("type") != "text":
            return None
        if set(part) != {"type", "text"} or not isinstance(part["text"], str):
            return None
        texts.append(part["text"])
    return "".join(texts)
