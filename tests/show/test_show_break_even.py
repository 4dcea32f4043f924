"""The picture of the break-even line."""

from __future__ import annotations

import pytest

from course_lib.show.break_even import break_even_plot


def test_the_twin_says_on_which_side_a_policy_lies():
    picture = break_even_plot({"full": (0, 1), "K": (0.5, 0.54), "int8": (0, 0.54)}, label="toy")
    lines = picture.summary().splitlines()
    assert [line.rsplit("  ", 1)[1] for line in lines[2:]] == ["the same", "more", "less"]
    assert lines[3].split() == ["B", "K", "0.5", "0.54", "1.04", "more"]
    assert lines[0].startswith("toy")
    assert picture.png().startswith(b"\x89PNG")


@pytest.mark.parametrize("points", [{}, {"a": (0, 1.2)}, {"a": (-0.1, 0)},
                                    {str(i): (0, 0) for i in range(9)}])
def test_wrong_points_are_refused(points):
    with pytest.raises(ValueError):
        break_even_plot(points, label="toy")
