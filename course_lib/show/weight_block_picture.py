"""The picture of the weight-block explorer: weights, errors in steps, and the bytes."""

from __future__ import annotations

from typing import Any

import numpy as np
from matplotlib.patches import Rectangle
from matplotlib.ticker import MaxNLocator

from course_lib.show.artists import Bars, caption
from course_lib.show.style import BYTE, INK, MUTED, SIDE, new_figure
from course_lib.show.text import fmt
from course_lib.weight_blocks import BLOCK, BLOCK_BYTES

_AT = np.arange(BLOCK)
_PER_LINE = 18  # bytes beside each other


class WeightBlockPicture:
    """Two panels and a strip of bytes, whose artists are moved by `draw(result)`."""

    def __init__(self) -> None:
        self.figure = new_figure(6.2)
        self._title = self.figure.text(0.015, 0.968, "", fontsize=12, va="center",
                                       parse_math=False)
        self._make_values(self.figure.add_axes((0.085, 0.685, 0.9, 0.2)))
        self._make_error(self.figure.add_axes((0.085, 0.385, 0.9, 0.2)))
        self._make_bytes(self.figure.add_axes((0.015, 0.0, 0.97, 0.3)))

    def _make_values(self, ax: Any) -> None:
        self._values_ax = ax
        ax.axhline(0, color=INK, lw=0.8)
        self._values = Bars(ax, SIDE["float"], label="weight")
        (self._back,) = ax.plot([], [], "s", color=SIDE["q8"].color, mec=INK, ms=5, ls="",
                                label="read back")
        caption(ax, "the 32 weights")
        ax.set(xlim=(-0.7, BLOCK - 0.3), ylabel="value")
        ax.set_xticks(range(0, BLOCK, 4))
        ax.yaxis.set_major_locator(MaxNLocator(4))
        ax.legend(*ax.get_legend_handles_labels(), ncols=2, loc="lower right",
                  bbox_to_anchor=(1.0, 1.0), borderaxespad=0.2)

    def _make_error(self, ax: Any) -> None:
        self._band = ax.axhspan(-0.5, 0.5, color=SIDE["bound"].color,
                                label="half a step and d's rounding")
        ax.axhline(0, color=INK, lw=0.8)
        self._errors = Bars(ax, SIDE["error"], label="error")
        caption(ax, "errors, in steps |d|")
        ax.set(xlim=(-0.7, BLOCK - 0.3), ylim=(-1.15, 1.15), ylabel="steps")
        ax.set_xticks(range(0, BLOCK, 4))
        ax.set_xlabel("element")
        ax.legend(*ax.get_legend_handles_labels(), ncols=2, loc="lower right",
                  bbox_to_anchor=(1.0, 1.0), borderaxespad=0.2)

    def _make_bytes(self, ax: Any) -> None:
        ax.set(xlim=(0, _PER_LINE), ylim=(0, 4.4))
        ax.axis("off")
        self._bytes_name = ax.text(0.05, 4.05, "", weight="bold", fontsize=11, va="center")
        self._cells: list[tuple[Any, Any, Any]] = []
        for i in range(max(BLOCK_BYTES.values())):
            x, y = i % _PER_LINE + 0.05, 2.5 - 1.9 * (i // _PER_LINE)
            look = BYTE["scale" if i < 2 else "code"]
            cell = Rectangle((x, y), 0.9, 0.8, facecolor=look.color, edgecolor=INK, linewidth=0.8)
            ax.add_patch(cell)
            word = ax.text(x + 0.45, y + 0.4, "", color=look.ink, ha="center", va="center",
                           family="DejaVu Sans Mono", fontsize=10)
            below = ax.text(x + 0.45, y - 0.12, "", color=MUTED, ha="center", va="top",
                            fontsize=8, linespacing=1.05)
            self._cells.append((cell, word, below))

    def draw(self, r: dict[str, Any]) -> None:
        kind = r["kind"]
        self._title.set_text(f"{kind.upper()} · {r['name']} · largest weight × {r['outlier']} · "
                             f"d = {fmt(r['d'])}")
        x, values = r["x"], r["values"]
        self._values.move(_AT, x)
        self._back.set_data(_AT, values)
        low, high = min(0.0, float(x.min())), max(0.0, float(x.max()))
        room = 0.1 * (high - low) or 1.0
        self._values_ax.set_ylim(low - room, high + room)
        bound = 0.5 + (127 if kind == "q8_0" else 8) / 2**11
        self._band.set_bounds(0, -bound, 1, 2 * bound)
        self._errors.move(_AT, np.clip(r["error"], -1.15, 1.15))
        self._draw_bytes(r)

    def _draw_bytes(self, r: dict[str, Any]) -> None:
        q8 = r["kind"] == "q8_0"
        under = "its element" if q8 else "its elements, high half above, low half below"
        self._bytes_name.set_text(f"the {len(r['bytes'])} bytes; under each {under}; element "
                                  f"{r['element']} framed")
        for i, (cell, word, below) in enumerate(self._cells):
            shown, marked = i < len(r["bytes"]), i == r["byte"]
            for artist in (cell, word, below):
                artist.set_visible(shown)
            word.set_text(f"{r['bytes'][i]:02x}" if shown else "")
            below.set_text("d" if i < 2 else str(i - 2) if q8 else f"{i + 14}\n{i - 2}")
            cell.set_edgecolor(SIDE["error"].color if marked else INK)
            cell.set_linewidth(2.5 if marked else 0.8)
            cell.set_zorder(3 if marked else 1)
            word.set_zorder(4)
