"""How a difference spreads through the stages of two runs."""

from __future__ import annotations

import numpy as np

from course_lib.lab.differential import Stages, different_bits
from course_lib.show.picture import Picture
from course_lib.show.style import MUTED, SIDE, course_style, new_figure


def spread_of(stages_a: Stages, stages_b: Stages) -> list[tuple[str, int, int]]:
    """Per stage: its name, how many of its numbers differ in bits, and how many it has."""
    return [(name, int(different_bits(a, b).sum()), a.size)
            for (name, a), (_, b) in zip(stages_a, stages_b, strict=True)]


def stage_differences(stages_a: Stages, stages_b: Stages, *, label: str) -> Picture:
    """One bar per stage: the share of its numbers whose bits differ. label stands above.

    The text names the first stage that differs; how far the difference spreads behind it depends
    on the last bits of a machine's floats.
    """
    rows = spread_of(stages_a, stages_b)
    shares = np.array([100 * wrong / size for _, wrong, size in rows])
    with course_style():
        figure = new_figure(3.9)
        ax = figure.add_axes((0.075, 0.37, 0.915, 0.51))
        ax.bar(range(len(rows)), shares, color=SIDE["error"].color)
        for at, share in enumerate(shares):
            if not share:
                ax.text(at, 2, "0", ha="center", color=MUTED, fontsize=9)
            elif share < 10:
                ax.text(at, share + 3, f"{share:.2g}", ha="center", fontsize=9)
        ax.set(ylabel="% that differ", ylim=(0, 105), xlim=(-0.7, len(rows) - 0.3))
        ax.set_xticks(range(len(rows)), [name for name, *_ in rows], rotation=60, ha="right",
                      rotation_mode="anchor")
        figure.text(0.012, 0.95, label, va="center")
    first = next((i for i, (_, wrong, _) in enumerate(rows) if wrong), len(rows))
    told = [label, f"the first {first} of {len(rows)} stages are equal in every bit"]
    if first < len(rows):
        name, wrong, size = rows[first]
        told.append(f"{name}: {wrong} of {size} numbers differ")
    return Picture(figure, "\n".join(told))
