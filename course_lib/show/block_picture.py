"""The picture of the block-selection explorer: one column per block, four strips, the answer."""

from __future__ import annotations

import textwrap
from typing import Any

import numpy as np
from matplotlib.font_manager import FontProperties
from matplotlib.path import Path
from matplotlib.textpath import TextPath
from matplotlib.ticker import FixedLocator, FuncFormatter, LogLocator, MaxNLocator

from course_lib.show.artists import Bars
from course_lib.show.style import INK, MUTED, NEEDLE, REASON, SIDE, Meaning, course_style, new_figure
from course_lib.show.text import percent

_READ = Meaning("", "#4a4a4a", INK, "", "read")
_LOST = Meaning("", "#ffffff", INK, "/////", "not read")
_PLAIN = REASON["not_selected"]
_SAYS_CHARACTERS = 92  # of a generated text that fit on one line


class BlockPicture:
    """Strips whose artists are moved by `draw(result)`."""

    def __init__(self) -> None:
        with course_style():
            self.figure = new_figure(6.3)
            grid = self.figure.add_gridspec(4, 1, height_ratios=[0.62, 1, 1, 1], hspace=0.62,
                                            left=0.075, right=0.985, top=0.835, bottom=0.165)
            axes = [self.figure.add_subplot(grid[i]) for i in range(4)]
            self._heads = [self.figure.text(0.012, y, "", fontsize=11 if i else 12, va="center",
                                            weight="normal" if i else "bold")
                           for i, y in enumerate((0.972, 0.932))]
            self._says = [self.figure.text(0.012, y, "", fontsize=10.5, va="center",
                                           family="DejaVu Sans Mono") for y in (0.062, 0.024)]
            self._bands = [ax.axvspan(0, 1, color="#fff2b0", zorder=0) for ax in axes]
            self._tiles_ax, self._mass_ax, self._probe_ax, self._importance_ax = self._axes = axes
            self._make_tiles(axes[0])
            self._make_mass(axes[1])
            self._make_probe(axes[2])
            self._make_importance(axes[3])

    def _make_tiles(self, ax: Any) -> None:
        ax.set_ylim(0, 1)
        ax.axis("off")
        self._tiles = {name: Bars(ax, m, edge=m.ink if m.hatch else "#ffffff")
                       for name, m in REASON.items()}
        self._letters = {name: _letter(ax, m) for name, m in REASON.items()}
        self._needle = Bars(ax, Meaning("", "none", INK, "", ""), edge=INK, line=2.4)
        self._needle_name = ax.text(0, 1.16, "", ha="center", va="bottom", fontsize=9.5,
                                    weight="bold")
        self._block_name = ax.text(0, -0.16, "", ha="center", va="top", fontsize=9.5)
        self._counts = ax.text(0, 1.16, "", va="bottom", fontsize=9.5, transform=ax.transAxes)

    def _make_mass(self, ax: Any) -> None:
        self._read = Bars(ax, _READ)
        self._lost = Bars(ax, _LOST)
        ax.yaxis.set_major_locator(MaxNLocator(2))
        ax.yaxis.set_major_formatter(FuncFormatter(lambda v, _: f"{100 * v:.0f} %"))

    def _make_probe(self, ax: Any) -> None:
        self._probe = {name: Bars(ax, m) for name, m in
                       (("probe", REASON["probe"]), ("other", _PLAIN))}
        ax.yaxis.set_major_locator(MaxNLocator(3))

    def _make_importance(self, ax: Any) -> None:
        self._sums = {name: Bars(ax, m) for name, m in
                      (("importance", REASON["importance"]), ("other", _PLAIN))}
        self._off = ax.text(0.5, 0.5, "", transform=ax.transAxes, ha="center", va="center",
                            color=MUTED)
        ax.set_yscale("log")
        ax.yaxis.set_major_locator(LogLocator(numticks=4))
        ax.yaxis.set_minor_locator(FixedLocator([]))
        ax.yaxis.set_major_formatter(FuncFormatter(lambda v, _: f"{v:g}"))
        ax.set_xlabel("block")

    def draw(self, r: dict[str, Any]) -> None:
        blocks = np.arange(r["n_blocks"])
        ticks = [b for b in range(0, r["n_blocks"], 8)]
        for ax, band in zip(self._axes, self._bands, strict=True):
            ax.set_xlim(-0.6, r["n_blocks"] - 0.4)
            ax.xaxis.set_major_locator(FixedLocator(ticks))
            ax.tick_params(labelbottom=ax is self._importance_ax)
            band.set_bounds(r["block"] - 0.5, 0, 1, 1)
        self._draw_words(r)
        self._draw_tiles(r)
        self._draw_mass(r, blocks)
        self._draw_probe(r, blocks)
        self._draw_importance(r, blocks)

    def _draw_words(self, r: dict[str, Any]) -> None:
        self._heads[0].set_text(f"k = {r['k']} of {r['n_blocks']} blocks · layer {r['layer']} · "
                                f"query head {r['head']} · n_probe {r['n_probe']}")
        self._heads[1].set_text(f"{r['question']}   step {r['step']}: fed {r['fed']!r}, "
                                f"exact attention says {r['next']!r}")
        said = r["answer"].text if r["answer"] else "…"
        names = ("exact", f"k = {r['k']}")
        width = max(map(len, names))
        for text, name, words in zip(self._says, names, (r["exact_answer"].text, said), strict=True):
            shown = textwrap.shorten(" ".join(words.split()), _SAYS_CHARACTERS, placeholder=" …")
            text.set_text(f"{name:<{width}} says: {shown}")

    def _draw_tiles(self, r: dict[str, Any]) -> None:
        reason = np.array(r["reason"])
        for name in REASON:
            at = np.flatnonzero(reason == name)
            self._tiles[name].move(at, np.full(len(at), 0.94), 0.94, 0.06)
            self._letters[name].set_data(at, np.full(len(at), 0.5))
        needles = np.array(r["needle_blocks"])
        self._needle.move(needles, np.full(len(needles), 1.0), 1.0)
        self._needle_name.set_x(needles.mean())
        self._needle_name.set_text("needle")
        self._block_name.set_x(r["block"])
        self._block_name.set_text(f"block {r['block']}")
        self._counts.set_text("    ".join(
            f"{m.letter} {m.label} {(reason == name).sum()}" for name, m in REASON.items()))

    def _draw_mass(self, r: dict[str, Any], blocks: np.ndarray) -> None:
        mass, read = r["mass"], r["read"]
        self._read.move(blocks[read], mass[read])
        self._lost.move(blocks[~read], mass[~read])
        self._mass_ax.set_ylim(0, 1.08 * mass.max())
        self._mass_ax.set_title(f"exact attention's weight: {percent(mass[read].sum())} on blocks "
                                f"read (dark), {percent(mass[~read].sum())} on others (hatched)")

    def _draw_probe(self, r: dict[str, Any], blocks: np.ndarray) -> None:
        selection, needle = r["selection"], r["needle_block"]
        probe = selection.probe
        low, high = float(probe.min()), float(probe.max())
        floor = low - 0.1 * (high - low or 1.0)
        chosen = np.array([name == "probe" for name in r["reason"]])
        self._probe["probe"].move(blocks[chosen], probe[chosen], bottom=floor)
        self._probe["other"].move(blocks[~chosen], probe[~chosen], bottom=floor)
        self._probe_ax.set_ylim(floor, high + 0.08 * (high - floor))
        self._probe_ax.set_title(f"probe score: the needle's block ranks "
                                 f"{selection.probe_rank[needle]} of {len(probe)}")

    def _draw_importance(self, r: dict[str, Any], blocks: np.ndarray) -> None:
        selection, needle = r["selection"], r["needle_block"]
        sums = selection.importance
        off = sums is None
        self._off.set_text("importance is off: the probe fills every place" if off else "")
        if off:
            sums = np.zeros(0)
            self._importance_ax.set_title("importance")
        else:
            self._importance_ax.set_title(
                f"importance, log scale: the needle's block ranks "
                f"{selection.importance_rank[needle]} of {len(sums)}")
        positive = sums[sums > 0]
        floor = float(positive.min()) * 0.7 if positive.size else 0.1
        top = float(positive.max()) * 1.3 if positive.size else 1.0
        chosen = np.array([name == "importance" for name in r["reason"]])[: len(sums)]
        blocks, heights = blocks[: len(sums)], np.maximum(sums, floor)
        self._sums["importance"].move(blocks[chosen], heights[chosen], bottom=floor)
        self._sums["other"].move(blocks[~chosen], heights[~chosen], bottom=floor)
        self._importance_ax.set_ylim(floor, top)


def _letter(ax: Any, meaning: Meaning) -> Any:
    """A letter as a marker: 65 of them draw like one, where 65 texts would cost 65 layouts."""
    path = TextPath((0, 0), meaning.letter, size=10, prop=FontProperties(
        family="DejaVu Sans", weight="bold"))
    box = path.get_extents()
    centred = Path(path.vertices - [(box.x0 + box.x1) / 2, (box.y0 + box.y1) / 2], path.codes)
    size = 2.5 if meaning.letter == "·" else 8.5
    (line,) = ax.plot([], [], linestyle="none", marker=centred, ms=size, color=meaning.ink,
                      mew=0, zorder=3)
    return line
