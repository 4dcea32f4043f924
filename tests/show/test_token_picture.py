"""The picture of a token's path states what the path holds."""

import pytest

from course_lib.lab.token_path import token_path
from course_lib.show.token_picture import token_path_picture


@pytest.fixture(scope="module")
def engine(shipped_engine):
    return shipped_engine


def test_the_picture_states_every_shape(engine):
    session = engine.prefill(engine.encode("Zara met"))
    n = len(session) + 1
    text = token_path_picture(token_path(engine.model, session.cache, 3), " x", " y").summary()
    for shown in (f"[2, {n}, 64]", f"[4, {n}]", "[8, 64]", "[448]", "[1657]", "layers 1 to 2",
                  "' x'", "' y'"):
        assert shown in text
