"""The picture of the k sweep: recall and perplexity by k, a tile for every prompt, the texts."""

from __future__ import annotations

from typing import Any

import numpy as np
from matplotlib.ticker import FixedLocator, FuncFormatter, LogLocator

from course_lib.show.artists import Bars, Segments, caption
from course_lib.show.style import INK, MUTED, PAPER, Meaning, new_figure
from course_lib.show.text import drawable, fmt, percent

_MINE = "#0b4f8a"
_BAND = "#fff2b0"
_RECALLED = Meaning("", "#4a4a4a", PAPER, "", "recalled")
_LOST = Meaning("x", PAPER, INK, "", "lost")
_MARKS = {"exact prefill": "o", "one flag": "s", "importance off": "^", "last window": "D"}
_SAYS_CHARACTERS = 92


class KSweepPicture:
    """Curves, tiles and words, moved by `draw(result)`."""

    def __init__(self) -> None:
        self.figure = new_figure(5.4)
        self._head = self.figure.text(0.012, 0.968, "", fontsize=12, va="center", weight="bold")
        self._recall = self.figure.add_axes((0.075, 0.5, 0.53, 0.37))
        self._perplexity = self.figure.add_axes((0.7, 0.5, 0.285, 0.37))
        self._titles = [caption(self._recall, "recall, with its 95 % interval"),
                        caption(self._perplexity, "answer perplexity")]
        self._bands = [ax.axvspan(-0.5, 0.5, color=_BAND, zorder=0)
                       for ax in (self._recall, self._perplexity)]
        self._others = {name: self._recall.plot([], [], color=MUTED, ls="dotted", lw=1.2, ms=5,
                                                marker=mark, mfc=PAPER, mec=MUTED)[0]
                        for name, mark in _MARKS.items()}
        self._bars = Segments(self._recall, _MINE, 2.0)
        self._caps = Segments(self._recall, _MINE, 2.0)
        (self._line,) = self._recall.plot([], [], color=_MINE, ms=7, mec=INK, zorder=3)
        (self._cost,) = self._perplexity.plot([], [], color=_MINE, ms=7, mec=INK, zorder=3)
        self._value = self._recall.text(0, 0, "", fontsize=10, weight="bold", va="center",
                                        zorder=4, bbox={"fc": PAPER, "ec": "none", "pad": 1.5})
        self._recall.set_ylim(-0.04, 1.04)
        self._recall.yaxis.set_major_formatter(FuncFormatter(lambda v, _: f"{100 * v:.0f} %"))
        self._recall.grid(axis="y")
        self._perplexity.set_yscale("log")
        self._perplexity.set_ylim(0.8, 3000)
        self._perplexity.yaxis.set_major_locator(LogLocator(numticks=5))
        self._perplexity.yaxis.set_major_formatter(FuncFormatter(lambda v, _: f"{v:g}"))
        self._perplexity.grid(axis="y")
        self._make_tiles()
        self._says = [self.figure.text(0.012, y, "", fontsize=10.5, va="center",
                                       family="DejaVu Sans Mono", parse_math=False)
                      for y in (0.165, 0.12, 0.075, 0.03)]

    def _make_tiles(self) -> None:
        self._tiles = ax = self.figure.add_axes((0.075, 0.255, 0.91, 0.055))
        self._tile_title = caption(ax)
        ax.set(ylim=(-0.04, 1.04), xlim=(-0.6, 59.6))
        ax.axis("off")
        self._hit, self._miss = Bars(ax, _RECALLED), Bars(ax, _LOST)
        (self._cross,) = ax.plot([], [], ls="none", marker="x", ms=5, color=INK)
        (self._here,) = ax.plot([], [], ls="none", marker="^", ms=9, color=INK, clip_on=False)

    def draw(self, r: dict[str, Any]) -> None:
        mine = r["curves"][r["setup"]]
        ks = list(mine)
        at = ks.index(r["k"])
        x = np.arange(len(ks))
        share = np.array([mine[k][0] / mine[k][1] for k in ks])
        low, high = (np.array([mine[k][i] for k in ks]) for i in (2, 3))
        self._head.set_text(f"{r['setup']}: k = {r['k']} · recorded, {mine[r['k']][1]} prompts")
        for name, line in self._others.items():
            other = r["curves"][name]
            line.set_data(x, [other[k][0] / other[k][1] for k in ks])
            line.set_visible(name != r["setup"])
            line.set_label(name if name != r["setup"] else "_")
        self._line.set_data(x, share)
        self._line.set_marker(_MARKS[r["setup"]])
        self._line.set_label(r["setup"])
        self._bars.move(x, low, x, high)
        ends = np.concatenate((low, high))
        twice = np.concatenate((x, x))
        self._caps.move(twice - 0.09, ends, twice + 0.09, ends)
        self._cost.set_data(x, [mine[k][4] for k in ks])
        self._cost.set_marker(_MARKS[r["setup"]])
        hits, n, *_ = mine[r["k"]]
        side = -1 if share[at] > 0.5 else 1
        self._value.set_position((at, share[at] + 0.14 * side))
        inside = 0 < at < len(ks) - 1
        self._value.set_horizontalalignment("center" if inside else "right" if at else "left")
        self._value.set_text(f"{hits}/{n} = {percent(share[at])}")
        for ax, band in zip((self._recall, self._perplexity), self._bands, strict=True):
            ax.set_xlim(-0.4, len(ks) - 0.6)
            ax.xaxis.set_major_locator(FixedLocator(range(len(ks))))
            ax.set_xticklabels([str(k) for k in ks])
            ax.set_xlabel("k, blocks that decode reads")
            band.set_xy((at - 0.4, 0))
            band.set_width(0.8)
        self._recall.legend(loc="lower left", fontsize=9)
        self._titles[1].set_text(f"answer perplexity {fmt(mine[r['k']][4])} (log)")
        self._draw_tiles(r)
        self._draw_words(r)

    def _draw_tiles(self, r: dict[str, Any]) -> None:
        ok = np.array(r["tiles"])
        for bars, chosen in ((self._hit, ok), (self._miss, ~ok)):
            where = np.flatnonzero(chosen)
            bars.move(where, np.ones(len(where)), 0.86)
        self._cross.set_data(np.flatnonzero(~ok), np.full((~ok).sum(), 0.5))
        self._here.set_data([r["prompt"]], [-0.32])
        self._tile_title.set_text(f"the first {len(ok)} prompts at this k: dark = recalled "
                                  f"({ok.sum()}), × = lost; ▲ prompt {r['prompt']}, below")

    def _draw_words(self, r: dict[str, Any]) -> None:
        lines = [f"prompt {r['prompt']}, asked for: {r['value']}",
                 _said("exact", r["exact_text"]), _said("recorded", r["text"]),
                 "" if r["live"] is None else _said("live", r["live"].text)]
        for text, line in zip(self._says, lines, strict=True):
            text.set_text(line if len(line) <= _SAYS_CHARACTERS else
                          line[:_SAYS_CHARACTERS] + " …")


def _said(name: str, text: str) -> str:
    return f"{name:8s} says: " + "⏎ ".join(drawable(part) for part in text.split("\n"))
