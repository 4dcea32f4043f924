"""The kernels' order of additions as a picture: lanes, then halves."""

from __future__ import annotations

from matplotlib.axes import Axes

from course_lib.lab.reduction import lanes
from course_lib.show.picture import Picture
from course_lib.show.style import INK, MUTED, PAPER, course_style, new_figure

_LANE = ("#56a7dd", "#f0a830")


def reduction_tree(d: int, count: int = 16) -> Picture:
    """`count` lanes (a power of two) over d numbers, and the halves that add them up.

    Raises ValueError for a count that is no power of two, or fewer numbers than lanes.
    """
    if count < 2 or count & (count - 1) or d < count:
        raise ValueError("count must be a power of two, with d at least as large.")
    columns = lanes(d, count)
    steps = max(map(len, columns))
    levels = count.bit_length() - 1
    row, gap = 0.6, 1.9
    height = steps * row + levels * gap
    with course_style():
        figure = new_figure(0.9 + 0.3 * height)
        ax = figure.add_axes((0.115, 0.01, 0.88, 0.98))
        ax.set(xlim=(-0.5, count - 0.5), ylim=(-height - 0.4, 0.9))
        ax.axis("off")
        for lane, indexes in enumerate(columns):
            for step, index in enumerate(indexes):
                _node(ax, lane, -row * step, str(index), _LANE[lane // (count // 2)], 7.5)
        at = [(float(lane), -row * (len(c) - 1) - 0.3) for lane, c in enumerate(columns)]
        ax.text(-0.7, -row * (steps - 1) / 2, "lanes: one\nfma a step,\ndownwards", ha="right",
                va="center", fontsize=9, color=INK, clip_on=False)
        y = -row * (steps - 1) - gap
        while len(at) > 1:
            half = len(at) // 2
            for i in range(half):
                for x, top in (at[i], at[i + half]):
                    ax.plot((x, i), (top, y + 0.28), color=MUTED, lw=0.9, zorder=0)
            for i in range(half):
                _node(ax, i, y, "+", PAPER, 9)
            ax.text(-0.7, y, f"{half} + {half}", ha="right", va="center", fontsize=9, clip_on=False)
            at = [(float(i), y - 0.28) for i in range(half)]
            y -= gap
    additions = " + ".join(str(count >> i) for i in range(1, levels + 1))
    text = (f"{d} numbers in {count} lanes: lane 0 takes "
            f"{', '.join(map(str, columns[0][:3]))}, …\n"
            f"{steps} steps in a lane, then {levels} levels of additions: {additions}")
    return Picture(figure, text)


def _node(ax: Axes, x: float, y: float, text: str, color: str, size: float) -> None:
    ax.text(x, y, text, ha="center", va="center", fontsize=size, color=INK,
            bbox={"boxstyle": "round,pad=0.22", "facecolor": color, "edgecolor": INK,
                  "linewidth": 0.6})
