"""Artists that are made once and moved: bars, stems and letters of which a picture has many.

One collection draws in a fraction of the time of one patch per bar.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.collections import LineCollection, PolyCollection
from matplotlib.text import Text

from course_lib.show.style import INK, Meaning


def caption(ax: Axes, text: str = "") -> Text:
    """A bold line above an axes' left corner; unlike a title it is never placed anew at a draw."""
    return ax.annotate(text, (0, 1), (0, 5), xycoords="axes fraction", textcoords="offset points",
                       fontsize=11, weight="bold", va="bottom")


class Bars:
    """Bars of one meaning on an axes; `move` gives them positions and heights."""

    def __init__(self, ax: Axes, meaning: Meaning, *, edge: str = INK, line: float = 0.6,
                 label: str | None = None) -> None:
        self._bars = PolyCollection(
            [], facecolors=meaning.color, edgecolors=edge, linewidths=line,
            hatch=meaning.hatch or None, label=label,
        )
        ax.add_collection(self._bars, autolim=False)

    def move(self, x: Any, top: Any, width: float = 0.8, bottom: Any = 0.0) -> None:
        """Stand bars at `x` [n], from `bottom` (a number or [n]) to `top` [n], `width` wide."""
        x, top = np.asarray(x, float), np.asarray(top, float)
        low = np.broadcast_to(np.asarray(bottom, float), x.shape)
        left, right = x - width / 2, x + width / 2
        corners = [(left, low), (right, low), (right, top), (left, top)]
        self._bars.set_verts(list(np.stack([np.stack(c, axis=-1) for c in corners], axis=1)))

    def set_line(self, width: float) -> None:
        """Draw edges `width` points wide."""
        self._bars.set_linewidth(width)


class Segments:
    """Straight lines of one colour; `move` gives them their ends."""

    def __init__(self, ax: Axes, color: str, width: float = 1.0, style: str = "solid",
                 label: str | None = None) -> None:
        self._lines = LineCollection([], colors=color, linewidths=width, linestyles=style,
                                     label=label)
        ax.add_collection(self._lines, autolim=False)

    def move(self, x0: Any, y0: Any, x1: Any, y1: Any) -> None:
        """Draw from (x0, y0) to (x1, y1); each a number or [n]."""
        x0, y0, x1, y1 = np.broadcast_arrays(*(np.atleast_1d(a) for a in (x0, y0, x1, y1)))
        ends = np.stack([np.stack([x0, y0], -1), np.stack([x1, y1], -1)], axis=1)
        self._lines.set_segments(list(ends.astype(float)))
