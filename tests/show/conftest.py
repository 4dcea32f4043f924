"""A tiny model for explorers whose pictures do not depend on what a model has learned."""

import pytest

from tests.tiny_checkpoint import tiny_engine


@pytest.fixture(scope="module")
def engine(tmp_path_factory):
    return tiny_engine(tmp_path_factory)
