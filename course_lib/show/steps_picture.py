"""A row of activations beside the steps that int8 would give it: one per 32 values, or one."""

from __future__ import annotations

import numpy as np

from course_lib.show.picture import Picture
from course_lib.show.style import INK, SIDE, course_style, new_figure
from course_lib.show.text import fmt


def block_steps(x: np.ndarray, *, label: str, block: int = 32) -> Picture:
    """|x| of one row on a logarithmic scale; below half a step a value reads back as 0.

    label: where the row is from. Raises ValueError unless the row has whole blocks and no block is
    all zeros.
    """
    x = np.abs(np.asarray(x, np.float32))
    if x.ndim != 1 or not x.size or x.size % block:
        raise ValueError(f"x must be one row of a multiple of {block} values.")
    largest = x.reshape(-1, block).max(axis=1)
    if not largest.all():
        raise ValueError("a block of x is all zeros; its step would be arbitrary.")
    own, shared = largest / np.float32(254), largest.max() / np.float32(254)
    gone = [int((x < np.repeat(own, block)).sum()), int((x < shared).sum())]
    with course_style():
        figure = new_figure(3.6)
        ax = figure.add_axes((0.075, 0.13, 0.915, 0.7))
        at = np.arange(x.size)
        floor = float(own.min()) / 30
        ax.scatter(at, np.maximum(x, floor), s=9, color=SIDE["float"].color, label="|value|")
        for b, step in enumerate(own):
            ax.plot((b * block, (b + 1) * block), (step, step), lw=2.4,
                    color=SIDE["negative"].color,
                    label=f"half a step, one per {block} values" if b == 0 else None)
        ax.axhline(shared, color=SIDE["error"].color, ls="--", lw=2,
                   label="half a step, one for the row")
        for edge in range(block, x.size, block):
            ax.axvline(edge, color="#d9d9d9", lw=0.8, zorder=0)
        ax.set(yscale="log", xlim=(0, x.size), xlabel="index in the row",
               ylabel="magnitude", ylim=(floor * 0.8, x.max() * 2))
        figure.legend(*ax.get_legend_handles_labels(), loc="upper right", ncols=3,
                      bbox_to_anchor=(0.99, 0.93))
        figure.text(0.012, 0.96, label, color=INK, va="center")
    lines = [label, f"values below half a step, read back as 0: {gone[0]} with {len(own)} steps, "
             f"{gone[1]} with one step", "largest of each block: "
             + " ".join(fmt(m) for m in largest)]
    return Picture(figure, "\n".join(lines))
