"""What the course says about its inner working to whoever asks: COURSE_LOG=DEBUG."""

from __future__ import annotations

import functools
import logging
import os

from course_lib.errors import CourseError

VARIABLE = "COURSE_LOG"
LEVELS = ("DEBUG", "INFO", "WARNING", "ERROR")


def logger(name: str) -> logging.Logger:
    """The logger ``course_lib.<name>``; where COURSE_LOG names a level, it also writes to stderr.

    The environment is read at the first call of a process. CourseError for an unknown level.
    """
    _set_up()
    return logging.getLogger(f"course_lib.{name}")


@functools.cache
def _set_up() -> None:
    setting = os.environ.get(VARIABLE, "").strip()
    if not setting:
        return
    level = setting.upper()
    if level not in LEVELS:
        raise CourseError(f"{VARIABLE}={setting} is no level; use one of {', '.join(LEVELS)}.")
    handler = logging.StreamHandler()
    handler.setFormatter(logging.Formatter("%(message)s"))
    course = logging.getLogger("course_lib")
    course.addHandler(handler)
    course.setLevel(level)
    course.propagate = False
