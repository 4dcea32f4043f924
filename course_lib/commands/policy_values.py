"""Values of the options that are about prefill policies."""

from __future__ import annotations

import argparse

from course_lib.errors import CourseError
from course_lib.lab.policy_options import PolicyOptions
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


def require_policy(options: PolicyOptions) -> None:
    """CourseError unless the policy can be made and --chunk is whole blocks."""
    chunk, block = options.chunk, options.block_size
    if chunk % block:
        raise CourseError(f"--chunk {chunk} is no multiple of the block size {block}: "
                          f"give {-(-chunk // block) * block}")
    try:
        options.make()
    except ValueError as error:
        raise CourseError(f"policy {options.name}: {str(error).removesuffix('.')}") from None
