"""A pytest plugin for tests under emulation, where everything takes ten to fifty times as long.

Property tests try fewer examples, also those that ask for a number of their own, and a test that
starts a program is skipped: it would test the machine outside, or start another emulator.
"""

import subprocess

import hypothesis
import pytest
from hypothesis import settings

MAX_EXAMPLES = 12

settings.register_profile("emulated", max_examples=MAX_EXAMPLES, deadline=None,
                          suppress_health_check=list(hypothesis.HealthCheck))
settings.load_profile("emulated")


class NoProgram(subprocess.Popen):
    def __init__(self, *args, **kwargs):
        self.returncode = 0  # for __del__
        pytest.skip("starts a program, which is no arm64 program")


def pytest_configure(config):
    subprocess.Popen = NoProgram


def pytest_collection_modifyitems(items):
    for item in items:
        own = getattr(getattr(item, "obj", None), "_hypothesis_internal_use_settings", None)
        if own is not None and own.max_examples > MAX_EXAMPLES:
            function = getattr(item.obj, "__func__", item.obj)
            function._hypothesis_internal_use_settings = settings(
                own, max_examples=MAX_EXAMPLES, deadline=None)
