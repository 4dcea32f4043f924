"""Chat templates: rendered in a sandbox, with message contents that cannot forge control tokens."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from jinja2 import TemplateError
from jinja2.sandbox import ImmutableSandboxedEnvironment

from course_lib.engine.files import is_there, one_line, read_json_object, read_text
from course_lib.errors import CourseError

REMEDY = "copy the whole checkpoint folder again"
ROLES = ("system", "user", "assistant", "tool")

# Supplementary Private Use Area-B: 65,534 characters to which Unicode never gives a meaning.
PLACEHOLDERS = range(0x100000, 0x10FFFE)


class ChatTemplate:
    """A checkpoint's Jinja chat template.

    The template never sees a content: it gets one private-use character in its place. Control
    tokens are then searched in what the template wrote, and only after that do the contents take
    their places. So a content that spells "<|im_end|>" stays text. The price: a template that
    looks into contents (to trim them, or to find <think> in them) sees the placeholder. One that
    rewrites contents (`urlencode`) or leaves one out is refused. `name` stands in errors.
    """

    def __init__(
        self,
        source: str,
        special_tokens: Mapping[str, str] | None = None,
        name: str = "the chat template",
    ):
        self._name = name
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
        )
        environment.filters["tojson"] = _tojson
        environment.globals["raise_exception"] = _raise_exception
        self._template = environment.from_string(source)
        self._source = source
        self._special_tokens = dict(special_tokens or {})

    @classmethod
    def from_folder(cls, folder: Path) -> ChatTemplate | None:
        """The template of `chat_template.jinja`, else of `tokenizer_config.json`, else None.

        Raises CourseError naming the file if a template is there but cannot be used.
        """
        config_path, jinja_path = folder / "tokenizer_config.json", folder / "chat_template.jinja"
        config = read_json_object(config_path, remedy=REMEDY) if is_there(config_path) else {}
        path, source = config_path, config.get("chat_template")
        if is_there(jinja_path):
            path, source = jinja_path, read_text(jinja_path, remedy=REMEDY)
        name = f"{path}: the chat template"
        try:
            if isinstance(source, list):  # several named templates
                source = {item["name"]: item["template"] for item in source}.get("default")
            return None if source is None else cls(source, _special_tokens(config), name)
        except Exception as error:  # not TemplateError alone: {% break %} gives a SyntaxError
            raise CourseError(f"{name} is not valid ({one_line(error)}): {REMEDY}") from None

    def pieces(
        self,
        messages: Sequence[Mapping[str, str]],
        control_tokens: Sequence[str],
        add_generation_prompt: bool,
    ) -> Iterator[tuple[str, bool]]:
        """The rendered conversation, cut at the template's control tokens.

        Yields (text, is_control) in order. Raises ValueError for malformed messages, CourseError
        if the template refuses them, fails, or does not write every content as it is.
        """
        _check_messages(messages)
        contents = self._placeholders(messages)
        stand_in = {content: mark for mark, content in contents.items()}
        try:
            rendered = self._template.render(
                messages=[
                    {"role": m["role"], "content": stand_in.get(m["content"], "")} for m in messages
                ],
                add_generation_prompt=add_generation_prompt,
                **self._special_tokens,
            )
            rendered.encode("utf-8")  # refuses what could not be tokenized: a lone surrogate
        except Exception as error:  # a template is a program: it can fail in any way
            raise CourseError(
                f"{self._name} refuses these messages ({one_line(error)}): change them, or choose "
                "another checkpoint"
            ) from None
        for index, message in enumerate(messages):
            if stand_in.get(message["content"], "") not in rendered:
                raise CourseError(
                    f"{self._name} rewrites or leaves out the content of messages[{index}]: "
                    "choose a checkpoint whose template writes contents as they are"
                )
        for text, is_control in _split_at(rendered, control_tokens):
            yield text if is_control else _fill(text, contents), is_control

    def _placeholders(self, messages: Sequence[Mapping[str, str]]) -> dict[str, str]:
        """Placeholder -> content, for every different content that is not empty."""
        contents = list(dict.fromkeys(m["content"] for m in messages if m["content"]))
        used = set(self._source).union(*contents)
        free = (chr(code) for code in PLACEHOLDERS if chr(code) not in used)
        marks = dict(zip(free, contents, strict=False))
        if len(marks) < len(contents):
            raise ValueError(
                "messages use up the private-use characters that stand in for contents: remove "
                "characters U+100000 to U+10FFFD from them"
            )
        return marks


def _check_messages(messages: Sequence[Mapping[str, str]]) -> None:
    if isinstance(messages, (str, Mapping)) or not isinstance(messages, Sequence) or not messages:
        raise ValueError('messages must be a list like [{"role": "user", "content": "Hello"}]')
    for index, message in enumerate(messages):
        if not isinstance(message, Mapping) or set(message) != {"role", "content"}:
            raise ValueError(f'messages[{index}] must have exactly the keys "role" and "content"')
        if message["role"] not in ROLES:
            raise ValueError(
                f"messages[{index}] has role {message['role']!r}, known are {', '.join(ROLES)}"
            )
        if not isinstance(message["content"], str):
            raise ValueError(f"messages[{index}] has a content that is not a str")


def _split_at(text: str, control_tokens: Sequence[str]) -> Iterator[tuple[str, bool]]:
    """Cut `text` at every control token, the longest where several begin at one place."""
    if not control_tokens:
        yield text, False
        return
    longest_first = sorted(control_tokens, key=len, reverse=True)
    pattern = "(" + "|".join(re.escape(token) for token in longest_first) + ")"
    for index, piece in enumerate(re.split(pattern, text)):
        if piece:
            yield piece, index % 2 == 1


def _fill(text: str, contents: Mapping[str, str]) -> str:
    """Put contents where their placeholders stand; one pass, so that none is read as a template."""
    return "".join(contents.get(character, character) for character in text)


def _special_tokens(config: Mapping[str, Any]) -> dict[str, str]:
    """bos_token, eos_token, … as templates see them: plain strings."""
    found = {}
    for key in ("bos_token", "eos_token", "unk_token", "pad_token"):
        value = config.get(key)
        value = value.get("content") if isinstance(value, Mapping) else value
        if isinstance(value, str):
            found[key] = value
    return found


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    # Jinja's own filter escapes <, > and & for HTML; prompts are not HTML.
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _raise_exception(message: str) -> None:
    raise TemplateError(message)
