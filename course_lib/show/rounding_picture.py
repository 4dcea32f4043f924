"""The picture of the rounding-bias explorer."""

from __future__ import annotations

from typing import Any

import numpy as np
from matplotlib.ticker import MaxNLocator

from course_lib.quant import ROUNDING_RULES
from course_lib.show.artists import Bars, caption
from course_lib.show.style import INK, SIDE, new_figure
from course_lib.show.text import fmt, percent

_OFFSET = {"negative": -0.27, "positive": 0.0, "both": 0.27}
_AT = np.arange(len(ROUNDING_RULES))


class RoundingPicture:
    """Three panels whose artists are moved by `draw(result)`."""

    def __init__(self) -> None:
        self.figure = new_figure(5.8)
        axes = self.figure.subplot_mosaic([["bias", "effect"], ["delta", "delta"]])
        self.figure.subplots_adjust(0.085, 0.09, 0.98, 0.86, wspace=0.2, hspace=0.5)
        self._title = self.figure.text(0.015, 0.965, "", fontsize=12, va="center")
        self._make_bias(axes["bias"])
        self._make_effect(axes["effect"])
        self._make_delta(axes["delta"])

    def _make_bias(self, ax: Any) -> None:
        self._bias = {sign: Bars(ax, SIDE[sign], label=SIDE[sign].label) for sign in _OFFSET}
        ax.axhline(0, color=INK, lw=0.8)
        ax.set(ylim=(-0.25, 1.25), xlim=(-0.6, len(_AT) - 0.4), ylabel="steps")
        ax.set_xticks(_AT, ROUNDING_RULES)
        ax.legend(loc="upper left", handlelength=1.6, borderaxespad=0.1)
        caption(ax, "mean error, by the sign of the value")

    def _make_effect(self, ax: Any) -> None:
        self._effect_ax = ax
        self._effect = Bars(ax, SIDE["error"])
        self._chosen = Bars(ax, SIDE["error"]._replace(hatch="////"), edge="#ffffff")
        self._share = [ax.text(i, 0, "", ha="center", va="bottom", fontsize=9) for i in _AT]
        ax.set(xlim=(-0.6, len(_AT) - 0.4), ylabel="V steps")
        ax.set_xticks(_AT, ROUNDING_RULES)
        ax.yaxis.set_major_locator(MaxNLocator(4))
        caption(ax, "attention: mean |error|, share above 0")

    def _make_delta(self, ax: Any) -> None:
        self._delta_ax = ax
        self._delta = {sign: Bars(ax, SIDE[sign]) for sign in ("negative", "positive")}
        ax.axhline(0, color=INK, lw=0.8)
        ax.set(xlabel="output component", ylabel="V steps")
        ax.yaxis.set_major_locator(MaxNLocator(5))
        self._delta_name = caption(ax)

    def draw(self, r: dict[str, Any]) -> None:
        self._title.set_text(f"{r['values']} values from {r['name']} · attention with "
                             f"{r['parts'].upper()} quantized")
        for sign, offset in _OFFSET.items():
            self._bias[sign].move(_AT + offset, [r["bias"][n][sign] for n in ROUNDING_RULES], 0.25)
        self._draw_effect(r)
        delta = r["delta"]
        for sign, bars in self._delta.items():
            at = np.flatnonzero(delta > 0 if sign == "positive" else delta < 0)
            bars.move(at, delta[at])
        self._delta_ax.set_xlim(-1, len(delta))
        reach = 1.1 * float(np.abs(delta).max()) or 1.0
        self._delta_ax.set_ylim(min(-0.25 * reach, 1.1 * delta.min()),
                                max(0.25 * reach, 1.1 * delta.max()))
        self._delta_name.set_text(
            f"{r['rule']}: output error of every component, {fmt(np.abs(delta).mean())} steps on "
            f"average, {percent((delta > 0).mean())} above 0")

    def _draw_effect(self, r: dict[str, Any]) -> None:
        heights = np.array([r["mean_abs"][name] for name in ROUNDING_RULES])
        chosen = np.array([name == r["rule"] for name in ROUNDING_RULES])
        self._effect.move(_AT[~chosen], heights[~chosen], 0.6)
        self._chosen.move(_AT[chosen], heights[chosen], 0.6)
        top = float(heights.max()) * 1.3
        self._effect_ax.set_ylim(0, top)
        for text, name, height in zip(self._share, ROUNDING_RULES, heights, strict=True):
            text.set_y(height + 0.01 * top)
            text.set_text(f"{fmt(height)}\n{percent(r['positive_share'][name])} +")
