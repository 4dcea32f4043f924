"""Fixtures that more than one suite uses."""

from __future__ import annotations

import pytest

from course_lib.engine import Engine
from course_lib.paths import MODELS


@pytest.fixture(scope="session")
def shipped_engine() -> Engine:
    """The shipped model, loaded once."""
    return Engine.load(MODELS / "needle-qwen3")
