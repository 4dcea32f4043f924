"""Text to token ids and back, with control tokens that text cannot forge."""

from __future__ import annotations

import json
import operator
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer as HFTokenizer

from course_lib.engine.byte_tokens import RARE, first_lost, letters, missing_bytes
from course_lib.engine.chat import ChatTemplate, Messages
from course_lib.engine.files import one_line, read_json_object
from course_lib.errors import CourseError

REMEDY = "copy the whole checkpoint folder again"
BYTE_OF_LETTER = {letter: byte for byte, letter in enumerate(letters())}
# Both cases, several spaces, one to four bytes a character, in Unicode's composed form (NFC).
PROBE = "Zara's  2nd tästy 拉面\n😀"


class Tokenizer:
    """Byte-level BPE of a checkpoint's `tokenizer.json`, and its chat template.

    Two encoders share one vocabulary: one that recognises the control tokens ("added tokens",
    such as <|im_end|>) in text, and one that has never heard of them and spells them out.
    """

    def __init__(self, definition: Mapping[str, Any], chat_template: ChatTemplate | None = None):
        self.chat_template = chat_template
        self._control = HFTokenizer.from_str(json.dumps(definition))
        self._plain = HFTokenizer.from_str(json.dumps(_without_added_tokens(definition)))
        for encoder in (self._control, self._plain):  # a file may ask for either: neither is wanted
            encoder.no_truncation()
            encoder.no_padding()
        added = self._control.get_added_tokens_decoder()
        self._control_ids = {token.content: id for id, token in added.items()}
        self._answer_tokens = [token.content for token in added.values() if not token.special]
        self._missing = missing_bytes(definition["model"]["vocab"])
        self._bytes: dict[int, bytes] = {}
        self.vocab_size = 1 + max(self._control.get_vocab(with_added_tokens=True).values())

    @classmethod
    def from_folder(cls, folder: Path) -> Tokenizer:
        """Read `tokenizer.json` and the chat template in `folder`; CourseError names the file."""
        path = folder / "tokenizer.json"
        definition = read_json_object(path, remedy=REMEDY)
        return cls.from_definition(definition, ChatTemplate.from_folder(folder), path)

    @classmethod
    def from_definition(
        cls,
        definition: Mapping[str, Any],
        template: ChatTemplate | None,
        path: Path,
        remedy: str = REMEDY,
    ) -> Tokenizer:
        """Check and use what a tokenizer.json says; CourseError names `path` and `remedy`."""
        model = definition.get("model")
        kind = model.get("type") if isinstance(model, dict) else model
        if kind != "BPE":
            raise CourseError(
                f"{path}: tokenizer model {kind!r} is not supported: choose a checkpoint with a "
                "byte-level BPE tokenizer"
            )
        _refuse_unsupported(definition["model"], path)
        unusable = f"{path} is not a usable tokenizer"
        with _failing(unusable, remedy):
            tokenizer = cls(definition, template)
        for token in definition.get("added_tokens") or []:
            if tokenizer.control_tokens.get(token["content"]) != token["id"]:
                raise CourseError(
                    f"{path}: control token {token['content']} claims id {token['id']}, which does "
                    f"not follow the vocabulary: {remedy}"
                )
        if not RARE.issuperset(tokenizer._missing):
            raise CourseError(
                f"{path}: some of the 256 bytes have no token, so some text would be lost: choose "
                "a checkpoint with a byte-level BPE tokenizer"
            )
        for allow_special in (True, False):
            with _failing(unusable, remedy):
                ids = tokenizer._encode(PROBE, allow_special)
                same = tokenizer.decode(ids) == PROBE == tokenizer._control.decode(ids)
            if not same:
                raise CourseError(
                    f"{path}: text does not come back from its tokens as it was (look at "
                    "normalizer, pre_tokenizer and decoder): choose a checkpoint with a "
                    "byte-level BPE tokenizer"
                )
        return tokenizer

    @property
    def control_tokens(self) -> dict[str, int]:
        """Every control token's text and id."""
        return dict(self._control_ids)

    def encode(self, text: str, allow_special: bool = True) -> list[int]:
        """Token ids of `text`; no token is added in front or behind.

        allow_special=True reads "<|im_end|>" in the text as that control token; False spells it
        out in ordinary tokens: use it for text from outside. Raises TypeError if `text` is not a
        str, ValueError if it cannot be written as UTF-8 (a lone surrogate), CourseError for a
        control character that the vocabulary cannot spell, and where the checkpoint's rules fail.
        """
        if not isinstance(text, str):
            raise TypeError(f"text must be a str, not {type(text).__name__}")
        try:
            lost = first_lost(text, self._missing)
        except UnicodeEncodeError as error:
            raise ValueError(
                f"text holds a lone surrogate at character {error.start}: remove it or decode the "
                "text as UTF-8"
            ) from None
        if lost is not None:
            raise CourseError(
                f"the text holds U+{ord(text[lost]):04X} at character {lost}, for which this "
                "checkpoint's tokenizer has no token: remove it"
            )
        with _failing("this checkpoint's tokenizer fails on the text",
                      "change the text, or choose another checkpoint"):
            return self._encode(text, allow_special)

    def _encode(self, text: str, allow_special: bool) -> list[int]:
        encoder = self._control if allow_special else self._plain
        return encoder.encode(text, add_special_tokens=False).ids

    def decode(self, ids: Sequence[int]) -> str:
        """Text of `ids`, control tokens included; the inverse of `encode`.

        Bytes that are not UTF-8 (an emoji cut in two) become U+FFFD. An id that the model has but
        the tokenizer has no text for (padding of the vocabulary) gives no text. Raises TypeError
        for ids that are no integers, ValueError for one below 0 or above 2^32 - 1.
        """
        return b"".join(map(self.token_bytes, ids)).decode("utf-8", "replace")

    def token_bytes(self, token: int) -> bytes:
        """The bytes of text that `token` stands for, maybe of a part of a character.

        Of a control token those of its name; none of an id without text. Errors as `decode`.
        """
        token = operator.index(token)
        if (known := self._bytes.get(token)) is not None:
            return known
        if not 0 <= token < 2**32:
            raise ValueError(f"token id {token} is impossible: ids count from 0")
        text = self._control.id_to_token(token) or ""
        try:
            found = bytes(BYTE_OF_LETTER[letter] for letter in text)
        except KeyError:  # an added token, written as it is
            found = text.encode("utf-8")
        if text:
            self._bytes[token] = found
        return found

    def apply_chat_template(
        self,
        messages: Messages,
        add_generation_prompt: bool = True,
        *,
        enable_thinking: bool = False,
    ) -> list[int]:
        """Token ids of a conversation in the model's own chat format.

        messages: dicts with "role" ("system", "user", "assistant" or "tool") and "content" (str,
        or a list of {"type": "text", "text": str}). add_generation_prompt opens the assistant's
        answer; enable_thinking is for templates that know it (Qwen3). Control tokens come from the
        template alone: a content that spells one is encoded as the letters it is made of. But in
        the assistant's own contents those that the tokenizer does not call special, such as
        <think>, are read: the model wrote them. Raises CourseError if the checkpoint has no chat
        template or one that cannot render these messages, ValueError for malformed messages.
        """
        if self.chat_template is None:
            raise CourseError(
                "this checkpoint has no chat template (neither chat_template.jinja nor "
                "chat_template in tokenizer_config.json): copy these files too, or, for a model "
                "without one, use needle --template bare or perplexity --text FILE"
            )
        ids: list[int] = []
        for text, is_control in self.chat_template.pieces(
            messages,
            list(self._control_ids),
            add_generation_prompt,
            enable_thinking=enable_thinking,
            answer_tokens=self._answer_tokens,
        ):
            ids += [self._control_ids[text]] if is_control else self.encode(text, False)
        return ids


@contextmanager
def _failing(what: str, remedy: str) -> Iterator[None]:
    """CourseError for what the tokenizers package raises inside: bare Exception, or a panic of its
    code, which is no Exception at all."""
    try:
        yield
    except (KeyboardInterrupt, SystemExit, MemoryError):
        raise
    except BaseException as error:
        raise CourseError(f"{what} ({one_line(error)}): {remedy}") from None


def _refuse_unsupported(model: Any, path: Path) -> None:
    """CourseError for settings of a BPE model with which text would not come back as it was."""
    for key in ("dropout", "continuing_subword_prefix", "end_of_word_suffix"):
        if isinstance(model, dict) and model.get(key):
            raise CourseError(
                f"{path}: {key} = {model[key]!r} is not supported: set it to null, or choose a "
                "checkpoint with a byte-level BPE tokenizer"
            )


def _without_added_tokens(definition: Mapping[str, Any]) -> dict[str, Any]:
    """A copy of a tokenizer.json in which no text can become one of its added tokens."""
    added = {token["content"] for token in definition.get("added_tokens") or []}
    model = dict(definition["model"])
    # Trainers also list control tokens in the BPE vocabulary: leave no way to them by merges.
    model["vocab"] = {text: id for text, id in model["vocab"].items() if text not in added}
    merges = []
    for merge in model.get("merges") or []:
        left, right = merge.split(" ") if isinstance(merge, str) else merge
        if added.isdisjoint((left, right, left + right)):
            merges.append(merge)
    model["merges"] = merges
    return {**definition, "model": model, "added_tokens": []}
