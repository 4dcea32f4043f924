"""What a function that was taken away does when an answer calls it."""

from __future__ import annotations

from typing import NoReturn

names: list[str] = []


class UsesReference(BaseException):
    """An answer called the function that it was to write; no Exception, so that an answer's
    ``except Exception`` does not hold it."""


def note(name: str) -> NoReturn:
    """Remember the call, also for one who catches everything."""
    names.append(name)
    raise UsesReference(name)
