"""Values of the options that are about prefill policies."""

from __future__ import annotations

import argparse

from course_lib.errors import CourseError
from course_lib.lab.ruler import policy_of
from course_lib.prefill import POLICIES, check_threshold, make_policy


def threshold(text: str) -> float:
    """A share of softmax mass: above 0, at most 1."""
    try:
        value = float(text)
    except ValueError:
        raise argparse.ArgumentTypeError(
            f"must be a number above 0 and at most 1, not {text!r}") from None
    try:
        check_threshold(value)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error).removeprefix("threshold ")) from None
    return value


def policy(text: str) -> str:
    """The name of a prefill policy."""
    if text not in POLICIES:
        try:
            make_policy(text)
        except ValueError as error:
            raise argparse.ArgumentTypeError(str(error)) from None
    return text


def policies(text: str) -> tuple[str, ...]:
    """Names of prefill policies, separated by commas."""
    return tuple(dict.fromkeys(policy(part.strip()) for part in text.split(",")))


def require_policies(names: tuple[str, ...], *, chunk: int, block_size: int, **options) -> None:
    """CourseError unless policies of these names can be made and --chunk is whole blocks."""
    if chunk % block_size:
        raise CourseError(f"--chunk {chunk} is no multiple of the block size {block_size}: "
                          f"give {-(-chunk // block_size) * block_size}")
    for name in names:
        try:
            policy_of(name, chunk=chunk, block_size=block_size, **options)
        except ValueError as error:
            raise CourseError(f"policy {name}: {str(error).removesuffix('.')}") from None
