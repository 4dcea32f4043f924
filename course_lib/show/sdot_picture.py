"""One SDOT instruction as a picture: sixteen products, four sums."""

from __future__ import annotations

from collections.abc import Sequence

from matplotlib.patches import Rectangle

from course_lib.show.picture import Picture
from course_lib.show.style import INK, MUTED, PAPER, course_style, new_figure

_LANES = ("#56a7dd", "#f0a830", "#5fc9a8", "#cfcfcf")
_HATCHES = ("", "///", "...", "\\\\\\")


def sdot_lanes(acc: Sequence[int], a: Sequence[int], b: Sequence[int]) -> Picture:
    """The registers of `vdotq_s32(acc, a, b)`: int8 [16] above, int32 [4] below.

    Raises ValueError for other lengths.
    """
    acc, a, b = ([int(x) for x in row] for row in (acc, a, b))
    if (len(acc), len(a), len(b)) != (4, 16, 16):
        raise ValueError("acc has 4 numbers, a and b have 16 each.")
    products = [x * y for x, y in zip(a, b, strict=True)]
    sums = [acc[i] + sum(products[4 * i : 4 * i + 4]) for i in range(4)]
    with course_style():
        figure = new_figure(3.1)
        ax = figure.add_axes((0.1, 0.02, 0.89, 0.96))
        ax.set(xlim=(0, 16), ylim=(0, 5.4))
        ax.axis("off")
        for y, values in ((4.5, a), (3.6, b), (2.7, products)):
            for i, value in enumerate(values):
                _box(ax, i, y, 1, value, i // 4, 9)
        for y, values in ((1.4, acc), (0.3, sums)):
            for i, value in enumerate(values):
                _box(ax, 4 * i, y, 4, value, i, 11)
        for i in range(4):
            ax.text(4 * i + 2, 2.35, "four products, added", ha="center", va="center", color=MUTED,
                    fontsize=9)
        for y, name in ((4.85, "a  int8"), (3.95, "b  int8"), (3.05, "a · b"),
                        (1.75, "acc  int32"), (0.65, "result")):
            ax.text(-0.15, y, name, ha="right", va="center")
        ax.text(8, 1.17, "+", ha="center", va="center", fontsize=12)
    lines = [f"{name:7}" + "".join(f"{v:7d}" for v in values)
             for name, values in (("a", a), ("b", b), ("a · b", products))]
    lines += [f"{name:7}" + "".join(f"{v:28d}" for v in values)
              for name, values in (("acc", acc), ("result", sums))]
    return Picture(figure, "\n".join(lines))


def _box(ax, x: float, y: float, width: float, value: int, lane: int, size: float) -> None:
    ax.add_patch(Rectangle((x + 0.04, y), width - 0.08, 0.7, facecolor=_LANES[lane], edgecolor=INK,
                           hatch=_HATCHES[lane], linewidth=0.8, alpha=0.9))
    ax.text(x + width / 2, y + 0.35, str(value), ha="center", va="center", fontsize=size,
            bbox={"facecolor": PAPER, "edgecolor": "none", "pad": 1.2})
