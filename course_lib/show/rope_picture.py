"""RoPE as clock hands: one row per pair of numbers, one clock per position."""

from __future__ import annotations

import math
from collections.abc import Sequence

from matplotlib.patches import Circle

from course_lib.show.picture import Picture
from course_lib.show.style import GRID, MUTED, SIDE, course_style, new_figure


def rope_hands(d: int, theta: float, pairs: Sequence[int], positions: Sequence[int]) -> Picture:
    """How far each of some pairs has turned at some positions; the hand starts pointing right.

    Raises ValueError for pairs outside 0 … d/2 - 1.
    """
    if not pairs or not 0 <= min(pairs) <= max(pairs) < d // 2:
        raise ValueError(f"pairs must be numbers from 0 to {d // 2 - 1}.")
    turns = {j: theta ** (-2 * j / d) for j in pairs}
    with course_style():
        figure = new_figure(0.5 + 0.67 * len(pairs))
        ax = figure.add_axes((0.25, 0.01, 0.745, 0.98))
        ax.set(xlim=(-0.6, len(positions) - 0.4), ylim=(-len(pairs) + 0.4, 0.95), aspect="equal")
        ax.axis("off")
        for row, (j, turn) in enumerate(turns.items()):
            length = 2 * math.pi / turn
            ax.text(-0.7, -row, f"pair ({j}, {j + d // 2}): one turn\nin {length:,.3g} positions"
                    if length < 1000 else
                    f"pair ({j}, {j + d // 2}): one turn\nin {length:,.0f} positions",
                    ha="right", va="center", fontsize=9, clip_on=False)
            for column, position in enumerate(positions):
                angle = position * turn
                ax.add_patch(Circle((column, -row), 0.38, facecolor="none", edgecolor=GRID, lw=1.2))
                ax.annotate("", (column + 0.37 * math.cos(angle), -row + 0.37 * math.sin(angle)),
                            (column, -row), arrowprops={"arrowstyle": "-|>", "lw": 1.6,
                                                        "color": SIDE["negative"].color,
                                                        "shrinkA": 0, "shrinkB": 0})
        for column, position in enumerate(positions):
            ax.text(column, 0.68, f"{position:,d}", ha="center", fontsize=9)
        ax.text(-0.7, 0.68, "position", ha="right", fontsize=9, color=MUTED, clip_on=False)
    lines = ["degrees turned, modulo 360; positions " + " ".join(map(str, positions))]
    for j, turn in turns.items():
        degrees = " ".join(f"{round(math.degrees(p * turn)) % 360:4d}" for p in positions)
        lines.append(f"pair ({j:2d}, {j + d // 2:2d}) {degrees}")
    return Picture(figure, "\n".join(lines))
