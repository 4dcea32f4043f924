"""Fixtures that more than one suite uses."""

from __future__ import annotations

import os
import sys

import hypothesis
import pytest

# No test fails because a machine is busy or emulated.
hypothesis.settings.register_profile("course", deadline=None)
hypothesis.settings.load_profile("course")

if os.environ.get("COURSE_TEST_KERNELS"):
    # Tests of kernels that were built in another way, in another folder; see tests/builds.
    sys.path.insert(0, os.environ["COURSE_TEST_KERNELS"])
    import kernels_pyx.compiled

    assert kernels_pyx.compiled.__file__.startswith(os.environ["COURSE_TEST_KERNELS"])

from course_lib.engine import Engine  # noqa: E402
from course_lib.paths import MODELS  # noqa: E402


@pytest.fixture(scope="session")
def shipped_engine() -> Engine:
    """The shipped model, loaded once."""
    return Engine.load(MODELS / "needle-qwen3")
