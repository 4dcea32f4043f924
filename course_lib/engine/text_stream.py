"""Text of tokens as they come, whole characters only."""

from __future__ import annotations

import codecs

from course_lib.engine.tokenizer import Tokenizer


class TextStream:
    """Tokens in, text out, piece by piece: joined, the pieces are `Tokenizer.decode` of all ids.

    What the bytes so far do not finish, such as half an emoji, is held back.
    """

    def __init__(self, tokenizer: Tokenizer):
        self._tokenizer = tokenizer
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, token: int) -> str:
        """The text that `token` completes, maybe none."""
        return self._decoder.decode(self._tokenizer.token_bytes(token))

    def finish(self) -> str:
        """What is left: U+FFFD if a character never became whole. The stream then starts anew."""
        rest = self._decoder.decode(b"", final=True)
        self._decoder.reset()
        return rest
