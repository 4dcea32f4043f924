"""The shipped model, loaded once for every explorer that is not given an engine."""

from __future__ import annotations

from functools import cache

from course_lib.engine import Engine
from course_lib.paths import MODELS


@cache
def shipped_engine() -> Engine:
    """The engine of data/models/needle-qwen3; CourseError, as Engine.load, if it is damaged."""
    return Engine.load(MODELS / "needle-qwen3")
