"""Pictures of days 7 and 8: who reads which KV head, and memory against tokens."""

from __future__ import annotations

import numpy as np
import pytest

from course_lib.attention import kv_head
from course_lib.show.head_map import head_map
from course_lib.show.memory_picture import memory_curves
from course_lib.show.ulp_picture import ulp_errors


@pytest.mark.parametrize(("heads", "shared"), [(1, 1), (4, 2), (16, 8), (32, 1)])
def test_the_head_map_says_what_the_library_maps(heads, shared):
    picture = head_map(heads, shared)
    for kh in range(shared):
        mine = [str(h) for h in range(heads) if kv_head(h, heads, shared) == kh]
        assert f"KV head {kh} is read by query heads {', '.join(mine)}\n" in str(picture) + "\n"
    assert picture.png().startswith(b"\x89PNG")


@pytest.mark.parametrize(("heads", "shared"), [(3, 2), (33, 1), (0, 1), (4, 0)])
def test_heads_that_cannot_be_drawn(heads, shared):
    with pytest.raises(ValueError):
        head_map(heads, shared)


def test_memory_curves_list_what_they_draw():
    picture = memory_curves({"reserve": [300_000] * 3, "blocks": [100, 200, 300]}, label="derived",
                            at=(1, 3))
    lines = picture.summary().splitlines()
    assert lines[0] == "derived" and lines[1].split() == ["1", "3", "tokens"]
    assert lines[2].split() == ["reserve", "300", "kB", "300", "kB"]
    assert lines[3].split() == ["blocks", "100", "B", "300", "B"]
    assert picture.png().startswith(b"\x89PNG")
    for wrong in ({}, {"a": [1], "b": [1, 2]}, dict.fromkeys("abcde", [1])):
        with pytest.raises(ValueError):
            memory_curves(wrong, label="derived")
    for at in ((0,), (4,)):
        with pytest.raises(ValueError, match="from 1 to 3"):
            memory_curves({"a": [1, 2, 3]}, label="derived", at=at)


def test_ulp_errors_give_the_largest_of_each_range():
    x = np.array([-50, -20, -5, -0.5], np.float32)
    picture = ulp_errors(x, {"good": x / 100, "bad": np.array([9.0, -40, 2, 0])}, label="toy")
    lines = picture.summary().splitlines()
    assert lines[2].split() == ["good", "0.5", "0.2", "0.05", "0.005"]
    assert lines[3].split() == ["bad", "9", "40", "2", "0"]
    assert picture.png().startswith(b"\x89PNG")
    for wrong in ({}, {"a": x[:2]}, dict.fromkeys("abcde", x)):
        with pytest.raises(ValueError):
            ulp_errors(x, wrong, label="toy")
