"""Memory against tokens: curves that grow in steps, as a picture with its twin."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
from matplotlib.ticker import FuncFormatter

from course_lib.show.picture import Picture
from course_lib.show.style import INK, MUTED, course_style, new_figure
from course_lib.show.text import size_text

# Width and dashes too, so that the curves are told apart without colour.
_LOOKS = (("#1a1a1a", 1.4, (0, (1, 1.5))), ("#f0a830", 1.4, "solid"), ("#0b4f8a", 2.6, "solid"),
          ("#b3261e", 1.6, (0, (5, 2))))


def memory_curves(curves: Mapping[str, Sequence[float]], *, label: str, at: Sequence[int] = ()
                  ) -> Picture:
    """One curve per entry: bytes [n] after 1, 2, … n tokens.

    label stands above the picture; `at`: the token counts that the twin lists. Raises ValueError
    for none or more than four curves, other lengths, and a token count outside.
    """
    lengths = {len(values) for values in curves.values()}
    if not 1 <= len(curves) <= len(_LOOKS) or len(lengths) != 1:
        raise ValueError(f"give 1 to {len(_LOOKS)} curves of one length.")
    (n,) = lengths
    if not all(1 <= tokens <= n for tokens in at):
        raise ValueError(f"`at` must hold token counts from 1 to {n}.")
    with course_style():
        figure = new_figure(3.6)
        ax = figure.add_axes((0.085, 0.135, 0.9, 0.73))
        for (name, values), (color, width, dashes) in zip(curves.items(), _LOOKS, strict=False):
            ax.plot(np.arange(1, n + 1), values, color=color, lw=width, ls=dashes, label=name)
        top = max(max(values) for values in curves.values())
        ax.set(xlim=(0, n), ylim=(0, 1.08 * top), xlabel="tokens")
        ax.yaxis.set_major_formatter(FuncFormatter(lambda value, _: size_text(value)))
        ax.grid(axis="y")
        ax.legend(loc="upper left", facecolor="#ffffff", labelcolor=INK)
        figure.text(0.012, 0.94, label, color=MUTED, va="center")
    width = max(map(len, curves))
    lines = [label, " " * width + "".join(f"{tokens:>9,}" for tokens in at) + "  tokens"]
    lines += [f"{name:<{width}}" + "".join(f"{size_text(values[tokens - 1]):>9}" for tokens in at)
              for name, values in curves.items()]
    return Picture(figure, "\n".join(lines))
