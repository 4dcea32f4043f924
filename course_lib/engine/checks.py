"""Checks of what callers pass to the engine: one clear sentence each."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import numpy as np

from course_lib.arrays import NotFiniteError
from course_lib.errors import CourseError


def check_ids(ids: Sequence[int], vocab_size: int) -> list[int]:
    """`ids` as a list of int; ValueError if empty, not integers, or outside 0 … vocab_size - 1."""
    array = np.asarray(ids)
    if array.ndim != 1 or array.size == 0:
        raise ValueError("ids must be a non-empty list of token ids")
    if not np.issubdtype(array.dtype, np.integer):
        raise ValueError(f"ids must be integers, not {array.dtype}: encode the text first")
    low, high = int(array.min()), int(array.max())
    if low < 0 or high >= vocab_size:
        bad = low if low < 0 else high
        raise ValueError(f"token id {bad} is outside the vocabulary 0 … {vocab_size - 1}")
    return array.tolist()


def check_context(wanted: int, limit: int) -> None:
    """CourseError naming both numbers if `wanted` tokens do not fit the model's context."""
    if wanted > limit:
        raise CourseError(
            f"{wanted} tokens do not fit the model's context of {limit}: shorten the prompt or "
            "ask for fewer new tokens"
        )


def check_count(name: str, value: int | None, *, optional: bool = False) -> None:
    """ValueError unless `value` is an integer >= 1 (or None where that is allowed)."""
    if value is None and optional:
        return
    if isinstance(value, bool) or not isinstance(value, (int, np.integer)) or value < 1:
        allowed = "an integer of at least 1" + (" or None" if optional else "")
        raise ValueError(f"{name} must be {allowed}, not {value!r}")


AUTO = "auto"


def check_decode_k(value: int | str | None) -> None:
    """ValueError unless `value` is an integer >= 1, None (all rows) or "auto"."""
    if isinstance(value, str) and value == AUTO:
        return
    if isinstance(value, str):
        raise ValueError(f'decode_k must be an integer of at least 1, None or "{AUTO}", '
                         f"not {value!r}")
    check_count("decode_k", value, optional=True)


def check_choice(name: str, value: str, choices: tuple[str, ...]) -> None:
    """ValueError unless `value` is one of `choices`."""
    if value not in choices:
        raise ValueError(f"{name} must be one of {', '.join(choices)}, not {value!r}")


def check_blocks(blocks: Sequence[int], count: int) -> np.ndarray:
    """`blocks` ascending without repeats, int64; ValueError unless integers 0 … count - 1."""
    array = np.asarray(blocks)
    integers = array.ndim == 1 and (not array.size or np.issubdtype(array.dtype, np.integer))
    if not integers or (array.size and not 0 <= array.min() <= array.max() < count):
        raise ValueError(f"force_blocks must be block numbers 0 … {count - 1}, not {blocks!r}")
    return np.unique(array.astype(np.int64))


@contextmanager
def finite_arithmetic() -> Iterator[None]:
    """CourseError where the model's numbers become NaN or infinite; no NumPy warning on the way.

    Weights that are finite one by one can still overflow float32 in a sum.
    """
    try:
        with np.errstate(over="ignore", invalid="ignore"):
            yield
    except NotFiniteError as error:
        what = str(error).partition(";")[0]
        raise CourseError(
            f"the model's numbers leave the range of float32 ({what}): copy the checkpoint again "
            "or choose another one"
        ) from None
