"""The picture of the quantization-error explorer: values, the grid near zero, errors."""

from __future__ import annotations

from typing import Any

import numpy as np
from matplotlib.ticker import MaxNLocator

from course_lib.show.artists import Bars, Segments, caption
from course_lib.show.style import GRID, INK, MUTED, SIDE, new_figure
from course_lib.show.text import drawable, fmt

_ZOOM_STEPS = 8  # the close-up shows so many steps of the row without the factor, each way
_LABELLED = 8  # up to so many values carry their q


class QuantizationPicture:
    """Three panels whose artists are moved by `draw(result)`."""

    def __init__(self) -> None:
        self.figure = new_figure(5.6)
        axes = self.figure.subplot_mosaic([["values", "zoom"], ["error", "error"]])
        self.figure.subplots_adjust(0.085, 0.1, 0.98, 0.86, wspace=0.2, hspace=0.55)
        self._title = self.figure.text(0.015, 0.965, "", fontsize=12, va="center",
                                       parse_math=False)
        self._make_values(axes["values"])
        self._make_zoom(axes["zoom"])
        self._make_error(axes["error"])

    def _make_values(self, ax: Any) -> None:
        self._values_ax = ax
        ax.axhline(0, color=INK, lw=0.8)
        self._values = Bars(ax, SIDE["float"])
        self._peak = ax.annotate("", (0, 0), (0, 8), textcoords="offset points", ha="center",
                                 va="bottom", fontsize=9)
        self._q = [ax.text(0, 0, "", ha="center", fontsize=9) for _ in range(_LABELLED)]
        caption(ax, "the row")
        ax.set_ylabel("value")
        ax.set_xlabel("index")

    def _make_zoom(self, ax: Any) -> None:
        self._zoom_ax = ax
        self._grid = Segments(ax, GRID, 1.2)
        self._moves = Segments(ax, SIDE["error"].color, 1.4)
        (self._before,) = ax.plot([], [], "o", color=SIDE["float"].color, ms=6, clip_on=False)
        (self._after,) = ax.plot([], [], "s", color=SIDE["q8"].color, mec=INK, ms=6, clip_on=False)
        self._nothing = ax.text(0.5, 0.5, "", transform=ax.transAxes, ha="center", color=MUTED)
        ax.set_ylim(-0.35, 1.35)
        ax.set_yticks([0, 1], ["q·scale", "x"])
        ax.tick_params(axis="y", length=0)
        caption(ax, "close to zero: grey lines are the steps")
        ax.set_xlabel("value")
        ax.xaxis.set_major_locator(MaxNLocator(6))  # labels such as -0.015 side by side

    def _make_error(self, ax: Any) -> None:
        self._error_ax = ax
        self._band = ax.axhspan(0, 1, color=SIDE["bound"].color, label="bound of the rule")
        self._plain = [ax.axhline(0, color=INK, lw=1.2, ls=(0, (5, 3)), label=label)
                       for label in ("half a step without the factor", None)]
        ax.axhline(0, color=INK, lw=0.8)
        self._errors = Bars(ax, SIDE["error"], edge=SIDE["error"].color, label="error")
        caption(ax, "error of every value: q·scale − x")
        ax.set_xlabel("index")
        ax.set_ylabel("error")
        handles, labels = ax.get_legend_handles_labels()
        ax.legend(handles, labels, ncols=3, loc="lower right", bbox_to_anchor=(1.0, 1.0),
                  borderaxespad=0.2)

    def draw(self, r: dict[str, Any]) -> None:
        self._title.set_text(
            f"{drawable(r['name'])} · rule {r['rule']} · largest value × {r['outlier']} · "
            f"step {fmt(r['scale'])}")
        self._draw_values(r)
        self._draw_zoom(r)
        self._draw_error(r)

    def _draw_values(self, r: dict[str, Any]) -> None:
        x, peak, ax = r["x"], r["peak"], self._values_ax
        index = np.arange(len(x))
        self._values.move(index, x)
        low, high = min(0.0, float(x.min())), max(0.0, float(x.max()))
        room = 0.22 * (high - low) or 1.0
        ax.set_xlim(-0.7, len(x) - 0.3)
        ax.set_ylim(low - room, high + room)
        self._peak.set_text("" if len(x) <= _LABELLED else "largest")
        self._peak.xy = (peak, float(x[peak]))
        self._peak.set_position((0, 4 if x[peak] > 0 else -16))
        for i, label in enumerate(self._q):
            shown = i < len(x) <= _LABELLED
            label.set_text(f"q={r['q'][i]}" if shown else "")
            if shown:
                up = x[i] >= 0
                label.set_position((i, float(x[i]) + (0.02 if up else -0.02) * (high - low)))
                label.set_va("bottom" if up else "top")

    def _draw_zoom(self, r: dict[str, Any]) -> None:
        half = _ZOOM_STEPS * r["scale_plain"]
        self._zoom_ax.set_xlim(-half, half)
        last = int(half / r["scale"])
        levels = np.arange(-last, last + 1) * r["scale"]
        self._grid.move(levels, -0.35, levels, 1.35)
        near = np.abs(r["x"]) <= half
        x, back = r["x"][near], r["read_back"][near]
        self._before.set_data(x, np.ones(len(x)))
        self._after.set_data(back, np.zeros(len(x)))
        self._moves.move(x, 1.0, back, 0.0)
        self._nothing.set_text("" if len(x) else "no value of the row lies here")

    def _draw_error(self, r: dict[str, Any]) -> None:
        ax, bound = self._error_ax, r["bound"]
        ax.set_xlim(-0.7, len(r["x"]) - 0.3)
        ax.set_ylim(-1.15 * bound, 1.15 * bound)
        self._errors.move(np.arange(len(r["x"])), r["error"])
        self._band.set_bounds(0, -bound, 1, 2 * bound)
        for line, sign in zip(self._plain, (1, -1), strict=True):
            line.set_ydata([sign * r["scale_plain"] / 2] * 2)
