"""A tiny model for explorers whose pictures do not depend on what a model has learned."""

import pytest

from course_lib.engine import Engine
from tests.tiny_checkpoint import write_checkpoint


@pytest.fixture(scope="module")
def engine(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tiny")
    write_checkpoint(folder, eos_token_id=None)
    return Engine.load(folder)
