"""Values of options: argparse types that say what they want in a few words."""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable

LONGEST_WAIT = 1_000_000  # seconds


def positive(text: str) -> int:
    """An integer of at least 1."""
    try:
        value = int(text)
    except ValueError:
        value = 0
    if value < 1:
        raise argparse.ArgumentTypeError(f"must be an integer of at least 1, not {text!r}")
    return value


def fraction(text: str) -> float:
    """A number from 0 to 1."""
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0.0 <= value <= 1.0:
        raise argparse.ArgumentTypeError(f"must be a number from 0 to 1, not {text!r}")
    return value


def seconds(text: str) -> float:
    """A number of seconds above 0, at most some days: sockets know an end of time."""
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value <= LONGEST_WAIT:
        raise argparse.ArgumentTypeError(
            f"must be a number of seconds above 0, at most {LONGEST_WAIT}, not {text!r}")
    return value


def megabytes(text: str) -> int:
    """A finite number of megabytes above 0, as bytes."""
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not (value > 0 and math.isfinite(value)):
        raise argparse.ArgumentTypeError(f"must be a number of megabytes above 0, not {text!r}")
    return max(1, round(value * 1e6))


def k_value(text: str) -> int | str:
    """A number of blocks, or "auto"."""
    return text if text == "auto" else positive(text)


def k_list(text: str) -> tuple[int | str, ...]:
    """Block counts separated by commas; "auto" is one."""
    return tuple(k_value(part.strip()) for part in text.split(","))


def choices_of(*known: str) -> Callable[[str], tuple[str, ...]]:
    """A type for some of `known`, separated by commas."""
    def choices(text: str) -> tuple[str, ...]:
        given = tuple(dict.fromkeys(part.strip() for part in text.split(",")))
        for value in given:
            if value not in known:
                raise argparse.ArgumentTypeError(
                    f"must be some of {', '.join(known)}, separated by commas, not {value!r}")
        return given

    return choices
