"""Byte-level BPE spells each byte as a character; which bytes a vocabulary cannot spell."""

from __future__ import annotations

from collections.abc import Container

# Control characters but tab and newlines; then bytes that UTF-8 never has, and the first bytes of
# planes of Unicode in which nothing is assigned. Published vocabularies lack some of them.
RARE = frozenset(range(0x20)) - {0x09, 0x0A, 0x0D} | {0x7F, 0xC0, 0xC1, 0xF1, 0xF2}
RARE |= frozenset(range(0xF5, 256))


def letters() -> list[str]:
    """The character that stands for each byte 0 … 255: itself where it is printable and no space.

    Source: the encoder of GPT-2.
    """
    plain = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = iter(range(0x100, 0x200))
    return [chr(byte if byte in plain else next(others)) for byte in range(256)]


def missing_bytes(vocab: Container[str]) -> bytes:
    """The bytes for which a vocabulary has no token, ascending."""
    return bytes(byte for byte, letter in enumerate(letters()) if letter not in vocab)


def first_lost(text: str, missing: bytes) -> int | None:
    """Index of the first character of `text` with one of the `missing` bytes; None if there is
    none. Raises UnicodeEncodeError for a lone surrogate."""
    data = text.encode("utf-8")
    if len(data.translate(None, missing)) == len(data):
        return None
    return next(i for i, letter in enumerate(text) if not set(letter.encode()).isdisjoint(missing))
