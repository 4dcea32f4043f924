"""The pictures of day 5 say in their text what they draw."""

from __future__ import annotations

import numpy as np
import pytest

from course_lib.lab.dot_ladder import sdot
from course_lib.show.sdot_picture import sdot_lanes
from course_lib.show.stages_picture import spread_of, stage_differences
from course_lib.show.steps_picture import block_steps

F32 = np.float32


def test_the_lanes_are_those_of_the_instruction():
    rng = np.random.default_rng(2)
    acc = rng.integers(-999, 999, 4).astype(np.int32)
    a, b = rng.integers(-128, 128, (2, 16)).astype(np.int8)
    picture = sdot_lanes(acc, a, b)
    assert picture.summary().splitlines()[-1].split()[1:] == [str(v) for v in sdot(acc, a, b)]
    assert picture.png().startswith(b"\x89PNG")
    with pytest.raises(ValueError, match="16 each"):
        sdot_lanes([0] * 4, [0] * 15, [0] * 16)


def test_values_below_half_a_step_are_counted():
    x = np.full(64, 0.5, np.float32)
    x[0], x[1], x[40], x[41] = 254, 0.9, 1, 0.003
    text = block_steps(x, label="toy").summary()
    # Half a step is 1 in the first block and for the row, 1/254 in the second.
    assert "as 0: 32 with 2 steps, 62 with one step" in text
    with pytest.raises(ValueError, match="multiple of 32"):
        block_steps(x[:40], label="toy")
    with pytest.raises(ValueError, match="all zeros"):
        block_steps(np.zeros(32), label="toy")


def test_the_picture_names_the_first_stage_and_counts_it():
    a = [("norm", F32([[1, 2]])), ("out", F32([[3, 4]])), ("sum", F32([[5, 6]]))]
    b = [("norm", F32([[1, 2]])), ("out", F32([[3, 5]])), ("sum", F32([[0, 0]]))]
    assert spread_of(a, b) == [("norm", 0, 2), ("out", 1, 2), ("sum", 2, 2)]
    picture = stage_differences(a, b, label="toy")
    assert "the first 1 of 3 stages" in picture.summary()
    assert "out: 1 of 2 numbers differ" in picture.summary()
    assert "the first 3 of 3 stages" in stage_differences(a, a, label="toy").summary()
