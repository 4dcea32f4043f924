"""Which kernels an emulated arm64 CPU runs. `./course test --arm64` runs this with the name of the
best variant that its CPU has; on any other machine there is nothing to test."""

from __future__ import annotations

import os
import platform

import pytest

import kernels_pyx
from course_lib import backend
from course_lib.errors import CourseError

EXPECTED = os.environ.get("COURSE_EXPECT_VARIANT")
pytestmark = pytest.mark.skipif(EXPECTED is None, reason="no emulated CPU")
ALL = ("dotprod", "neon", "portable")


def test_the_best_variant_of_this_cpu_is_chosen(monkeypatch):
    monkeypatch.delenv("COURSE_KERNEL", raising=False)
    assert platform.machine() == "aarch64"
    assert kernels_pyx.VARIANTS == ALL[ALL.index(EXPECTED):]
    assert backend.info().variant == EXPECTED


@pytest.mark.parametrize("variant", ALL)
def test_every_variant_runs_or_is_refused(variant, monkeypatch):
    monkeypatch.setenv("COURSE_KERNEL", variant)
    if variant in ALL[ALL.index(EXPECTED):]:
        assert backend.info().variant == variant and backend.kernel("quantize_rows") is not None
    else:
        with pytest.raises(CourseError, match=f"COURSE_KERNEL={variant} cannot run here"):
            backend.info()
