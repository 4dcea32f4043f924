"""The valid word that a mistyped one was probably meant to be."""

from __future__ import annotations


def nearest(word: str, valid: list[str]) -> str:
    """Return "did you mean …?" with the closest of `valid`, or the whole list."""
    import difflib

    close = difflib.get_close_matches(word, valid, n=1, cutoff=0.5)
    return f"did you mean {close[0]}?" if close else f"there are {', '.join(valid)}"
