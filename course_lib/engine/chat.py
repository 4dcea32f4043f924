"""Chat templates: rendered in a sandbox, with message contents that cannot forge control tokens."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from course_lib.engine.chat_contents import Marker, Messages, checked
from course_lib.engine.files import is_there, one_line, read_json_object, read_text
from course_lib.engine.template_sandbox import Sandbox
from course_lib.errors import CourseError

__all__ = ["ChatTemplate", "Messages"]

REMEDY = "copy the whole checkpoint folder again"


class ChatTemplate:
    """A checkpoint's Jinja chat template.

    It sees real contents, so it may trim them or look for <think> in them, but each is marked
    (`Marker`): a content that spells "<|im_end|>" stays text. A template that rewrites contents
    (`urlencode`) or leaves one out is refused; an answer's thoughts it may leave out. `name`
    stands in errors. Raises what Jinja raises for a source that is not valid.
    """

    def __init__(
        self,
        source: str,
        special_tokens: Mapping[str, str] | None = None,
        name: str = "the chat template",
    ):
        self._name = name
        self._sandbox = Sandbox()
        self._template = self._sandbox.template(source)
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
            if source is not None and not isinstance(source, str):
                raise TypeError(f"it is of type {type(source).__name__}")
            return None if source is None else cls(source, _special_tokens(config), name)
        except Exception as error:  # not TemplateError alone: {% break %} gives a SyntaxError
            raise CourseError(f"{name} is not valid ({one_line(error)}): {REMEDY}") from None

    @property
    def knows_thinking(self) -> bool:
        """Whether the template has the switch `enable_thinking`."""
        return "enable_thinking" in self._source

    def pieces(
        self,
        messages: Messages,
        control_tokens: Sequence[str],
        add_generation_prompt: bool,
        *,
        enable_thinking: bool = False,
        answer_tokens: Sequence[str] = (),
    ) -> Iterator[tuple[str, bool]]:
        """The rendered conversation, cut at the template's control tokens.

        Yields (text, is_control) in order. `answer_tokens`: control tokens that contents of the
        assistant may hold. Raises ValueError for malformed messages, CourseError if the template
        refuses them, fails, does not end, or does not write every content as it is.
        """
        known = checked(messages)
        texts = [self._source, *control_tokens, *(content for _, content in known)]
        marker = Marker(control_tokens, answer_tokens, texts)
        turns = [marker.turn(role, content) for role, content in known]
        variables = self._special_tokens | {
            "messages": [{"role": turn.role, "content": turn.content} for turn in turns],
            "add_generation_prompt": add_generation_prompt,
            "enable_thinking": enable_thinking,
        }
        try:
            rendered = self._sandbox.run(self._template, variables)
            rendered.encode("utf-8")  # refuses what could not be tokenized: a lone surrogate
        except Exception as error:  # a template is a program: it can fail in any way
            raise CourseError(
                f"{self._name} refuses these messages ({one_line(error)}): change them, or choose "
                "another checkpoint"
            ) from None
        for index, turn in enumerate(turns):
            if turn.core not in rendered:
                raise CourseError(
                    f"{self._name} rewrites or leaves out the content of messages[{index}]: "
                    "choose a checkpoint whose template writes contents as they are"
                )
        yield from marker.split(rendered)


def _special_tokens(config: Mapping[str, Any]) -> dict[str, str]:
    """bos_token, eos_token, … as templates see them: plain strings."""
    found = {}
    for key in ("bos_token", "eos_token", "unk_token", "pad_token"):
        value = config.get(key)
        value = value.get("content") if isinstance(value, Mapping) else value
        if isinstance(value, str):
            found[key] = value
    return found
