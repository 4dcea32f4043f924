"""Rows of token boxes: the twin prints every box, and long rows stay inside the picture."""

from __future__ import annotations

import pytest

from course_lib.show.style import TOKEN, WIDTH
from course_lib.show.tokens import Token, token_rows, visible


def test_the_twin_prints_every_box_with_its_kind():
    rows = [("chat", [Token("<|im_end|>", "2", "control"), Token("\n", "201")]),
            ("bare", [Token(" is", "1013", "differs")])]
    picture = token_rows(rows, label="this machine")
    assert picture.summary() == "this machine\nchat: <|im_end|>:2[c] ↵:201\nbare: ␣is:1013[d]"
    assert picture.png() == token_rows(rows, label="this machine").png()
    assert visible("Ġa Ċ") == "␣a␣↵"


def test_boxes_stay_inside_the_picture():
    row = [Token("word" * (1 + i % 4), str(i)) for i in range(60)]
    ax = token_rows([("a long row", row)], label="x").figure.axes[0]
    boxes = [p for p in ax.patches if p.get_height() == 0.25]
    assert len(boxes) == 60 and all(b.get_x() + b.get_width() < WIDTH for b in boxes)
    assert min(b.get_y() for b in boxes) > 0.2 and len({b.get_y() for b in boxes}) > 2


@pytest.mark.parametrize("rows", [[], [("a", [Token("x", kind="unknown")])]])
def test_what_cannot_be_drawn(rows):
    with pytest.raises(ValueError, match=", ".join(TOKEN)):
        token_rows(rows, label="x")
