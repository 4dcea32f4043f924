"""A grid of small tiles, each with a fill and a letter for its meaning: masks and ballots."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import to_rgb
from matplotlib.font_manager import FontProperties
from matplotlib.lines import Line2D
from matplotlib.path import Path
from matplotlib.textpath import TextPath

from course_lib.show.style import PAPER, Meaning

_SMALLEST = 8.5  # points of a cell's side below which letters cannot be read


class TileGrid:
    """Tiles of an axes whose row 0 is at the top; `draw(words)` gives every cell its meaning.

    An empty word is an empty cell. Letters are drawn where a cell is large enough for one.
    """

    def __init__(self, ax: Axes, meanings: Mapping[str, Meaning]) -> None:
        self.ax, self._meanings = ax, dict(meanings)
        self._image = ax.imshow(np.zeros((1, 1, 3)), aspect="auto", interpolation="nearest",
                                zorder=1)
        self._letters = {name: letters(ax, m) for name, m in self._meanings.items()
                         if m.letter not in ("", "·")}

    def draw(self, words: np.ndarray) -> None:
        """Show words [rows, columns]."""
        rows, columns = words.shape
        colors = np.full((rows, columns, 3), to_rgb(PAPER))
        for name, meaning in self._meanings.items():
            colors[words == name] = to_rgb(meaning.color)
        self._image.set_data(colors)
        self._image.set_extent((-0.5, columns - 0.5, rows - 0.5, -0.5))
        self.ax.set(xlim=(-0.5, columns - 0.5), ylim=(rows - 0.5, -0.5))
        width, height = self.ax.get_figure().get_size_inches() * 72  # type: ignore[union-attr]
        box = self.ax.get_position()
        side = min(box.width * width / columns, box.height * height / rows)
        for name, line in self._letters.items():
            y, x = np.nonzero(words == name)
            fits = side >= _SMALLEST
            line.set_data(x if fits else [], y if fits else [])
            line.set_markersize(min(0.62 * side, 9.0))


def letters(ax: Axes, meaning: Meaning) -> Line2D:
    """The meaning's letter as a marker: hundreds of them draw like one, without a layout each."""
    path = TextPath((0, 0), meaning.letter, size=10, prop=FontProperties(
        family="DejaVu Sans Mono", weight="bold"))
    box = path.get_extents()
    centred = Path(path.vertices - [(box.x0 + box.x1) / 2, (box.y0 + box.y1) / 2], path.codes)
    (line,) = ax.plot([], [], linestyle="none", marker=centred, color=meaning.ink, mew=0, zorder=3)
    return line
