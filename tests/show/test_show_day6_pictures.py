"""The pictures of day 6 say in their text what they draw."""

from __future__ import annotations

import pytest

from course_lib.show.reduction_picture import reduction_tree
from course_lib.show.rope_picture import rope_hands


def test_pictures_say_what_they_draw():
    text = reduction_tree(40, 8).summary()
    assert "lane 0 takes 0, 8, 16" in text and "5 steps" in text and "4 + 2 + 1" in text
    for d, count in ((40, 6), (4, 8), (40, 1)):
        with pytest.raises(ValueError, match="power of two"):
            reduction_tree(d, count)
    # theta^(-2j/d) radians: 1 at j = 0, 1/10 at j = 1.
    picture = rope_hands(4, 100.0, pairs=(0, 1), positions=(0, 1, 10))
    assert [line.split()[-3:] for line in picture.summary().splitlines()[1:]] == [
        ["0", "57", "213"], ["0", "6", "57"]]
    assert picture.png().startswith(b"\x89PNG")
    with pytest.raises(ValueError, match="from 0 to 1"):
        rope_hands(4, 100.0, pairs=(2,), positions=(0,))
