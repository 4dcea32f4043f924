"""Typed values of a `config.json`, with errors that name file, key and remedy."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from course_lib.errors import CourseError

REMEDY = "copy the whole checkpoint folder again, or choose another checkpoint"


class ConfigKeys:
    """The keys of one JSON object of a config file; null counts as left out.

    `place` is where the object is nested in the file ("text_config." or nothing), for errors.
    `defaults` hold for keys that are left out.
    """

    def __init__(self, raw: Mapping[str, Any], path: Path, defaults: Mapping[str, Any],
                 place: str = ""):
        self.raw, self.path, self.place = raw, path, place
        self._defaults = defaults

    def get(self, key: str) -> Any:
        """The value of `key`, else its default, else None."""
        value = self.raw.get(key)
        return self._defaults.get(key) if value is None else value

    def refuse(self, key: str, problem: str, remedy: str = REMEDY) -> CourseError:
        """The error that says what is wrong with `key`."""
        return CourseError(f"{self.path}: {self.place}{key} {problem}: {remedy}")

    def count(self, key: str, *aliases: str, default: int | None = None) -> int:
        """A positive integer, under `key` or one of its older names."""
        names = [name for name in (key, *aliases) if self.get(name) is not None]
        key = names[0] if names else key
        value = self.get(key) if names else default
        if value is None:
            raise self.refuse(key, "is missing")
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise self.refuse(key, f"must be a positive integer, got {shown(value)}")
        return value

    def positive(self, key: str) -> float:
        """A positive number that float32, in which the model computes, neither rounds to 0 nor
        takes for infinite."""
        value = self.get(key)
        number = isinstance(value, (int, float)) and not isinstance(value, bool)
        least, most = float(np.finfo(np.float32).tiny), float(np.finfo(np.float32).max)
        if not number or not least <= value <= most:
            raise self.refuse(
                key,
                f"must be a positive number in the range of float32 ({least:.0e} … {most:.0e}), "
                f"got {shown(value)}",
            )
        return float(value)

    def flag(self, key: str) -> bool:
        """true or false; false where it is left out and has no default."""
        value = self.get(key)
        if value is not None and not isinstance(value, bool):
            raise self.refuse(key, f"must be true or false, got {shown(value)}")
        return bool(value)

    def integers(self, key: str, what: str) -> tuple[int, ...]:
        """An integer or a list of integers, none where it is left out; `what` they are."""
        value = self.get(key)
        values = value if isinstance(value, list) else [] if value is None else [value]
        for item in values:
            if isinstance(item, bool) or not isinstance(item, int):
                raise self.refuse(key, f"must be {what}, got {shown(value)}")
        return tuple(values)


def shown(value: object) -> str:
    """A value of a file, short enough for one sentence."""
    text = ascii(value) if isinstance(value, str) else repr(value)
    return text if len(text) <= 100 else text[:97] + "..."
