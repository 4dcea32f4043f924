"""The picture of the block-selection explorer: one column per block, four strips, the answer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from matplotlib.font_manager import FontProperties
from matplotlib.path import Path
from matplotlib.textpath import TextPath
from matplotlib.ticker import FixedLocator, FuncFormatter, LogLocator, MaxNLocator

from course_lib.show.artists import Bars, caption
from course_lib.show.style import INK, MUTED, PAPER, REASON, Meaning, new_figure
from course_lib.show.text import drawable, percent

_READ = Meaning("", "#4a4a4a", INK, "", "read")
_LOST = Meaning("", PAPER, INK, "", "not read")
# Bottom and height of tiles, attention, probe, importance, as shares of the figure.
_STRIPS = ((0.77, 0.07), (0.535, 0.12), (0.345, 0.12), (0.155, 0.12))
_SAYS_CHARACTERS = 84  # of a generated text that fit on one line
_ABREAST = 80  # letters that fit side by side; of more blocks each reason has a lane of its own
_LANES = {"importance": 3, "probe": 2, "recency": 1, "evicted_by_recency": 0}


class BlockPicture:
    """Strips whose artists are moved by `draw(result)`."""

    def __init__(self) -> None:
        self.figure = new_figure(5.6)
        axes = [self.figure.add_axes((0.075, bottom, 0.91, height))
                for bottom, height in _STRIPS]
        # parse_math=False: a model may well say "$".
        self._heads = [self.figure.text(0.012, y, "", fontsize=11 if i else 12, va="center",
                                        weight="normal" if i else "bold", parse_math=False)
                       for i, y in enumerate((0.975, 0.937))]
        self._says = [self.figure.text(0.012, y, "", fontsize=10.5, va="center", parse_math=False,
                                       family="DejaVu Sans Mono") for y in (0.058, 0.022)]
        self._bands = [ax.axvspan(0, 1, color="#fff2b0", zorder=0) for ax in axes]
        self._tiles_ax, self._mass_ax, self._probe_ax, self._importance_ax = self._axes = axes
        self._titles = [caption(ax) for ax in axes[1:]]
        self._make_legend()
        self._make_tiles(axes[0])
        self._make_mass(axes[1])
        self._make_probe(axes[2])
        self._make_importance(axes[3])

    def _make_legend(self) -> None:
        ax = self.figure.add_axes((0.075, 0.885, 0.91, 0.028))
        ax.set(xlim=(0, 100), ylim=(0, 1))
        ax.axis("off")
        self._counts = {}
        for (name, meaning), x in zip(REASON.items(), (0.8, 19, 34, 50.5, 77), strict=True):
            tile = _tile(ax, meaning)
            tile.move([x], [1.0], 1.6)
            tile.set_line(_line(name))
            _letter(ax, meaning).set_data([x], [0.5])
            self._counts[name] = ax.text(x + 1.5, 0.45, "", va="center", fontsize=10)

    def _make_tiles(self, ax: Any) -> None:
        ax.set_ylim(0, 1)
        ax.axis("off")
        self._tiles = {name: _tile(ax, REASON[name]) for name in list(REASON)[::-1]}
        self._letters = {name: _letter(ax, m) for name, m in REASON.items()}
        self._lanes = [ax.text(-0.008, 0.06 + 0.22 * (lane + 0.5), REASON[name].letter,
                               transform=ax.transAxes, ha="right", va="center",
                               fontsize=8, weight="bold")
                       for name, lane in _LANES.items()]
        self._needle = Bars(ax, Meaning("", "none", INK, "", ""), edge=INK, line=2.4)
        self._needle_name = ax.text(0, 1.1, "", ha="center", va="bottom", fontsize=9.5,
                                    weight="bold")
        self._block_name = ax.text(0, -0.06, "", ha="center", va="top", fontsize=9.5)

    def _make_mass(self, ax: Any) -> None:
        self._read = Bars(ax, _READ)
        self._lost = Bars(ax, _LOST)
        ax.yaxis.set_major_locator(MaxNLocator(2, steps=[1, 2, 5, 10]))
        ax.yaxis.set_major_formatter(FuncFormatter(lambda v, _: f"{100 * v:.0f} %"))

    def _make_probe(self, ax: Any) -> None:
        self._probe = {name: Bars(ax, REASON[name], edge=_edge(name)) for name in
                       ("not_selected", "probe", "evicted_by_recency")}
        ax.yaxis.set_major_locator(MaxNLocator(3))

    def _make_importance(self, ax: Any) -> None:
        self._sums = {name: Bars(ax, REASON[name]) for name in ("not_selected", "importance")}
        self._off = ax.text(0.5, 0.5, "", transform=ax.transAxes, ha="center", va="center",
                            color=MUTED)
        ax.set_yscale("log")
        ax.yaxis.set_major_locator(LogLocator(numticks=4))
        ax.yaxis.set_minor_locator(FixedLocator([]))
        ax.yaxis.set_major_formatter(FuncFormatter(lambda v, _: f"{v:g}"))
        ax.text(0.5, -0.3, "block", transform=ax.transAxes, ha="center", va="top")

    def draw(self, r: dict[str, Any]) -> None:
        blocks = np.arange(r["n_blocks"])
        ticks = list(range(0, r["n_blocks"], 8 if r["n_blocks"] <= _ABREAST else 32))
        for ax, band in zip(self._axes, self._bands, strict=True):
            ax.set_xlim(-0.6, r["n_blocks"] - 0.4)
            ax.xaxis.set_major_locator(FixedLocator(ticks))
            ax.tick_params(labelbottom=ax is self._importance_ax)
            band.set_bounds(r["block"] - 0.5, 0, 1, 1)
        self._draw_words(r)
        self._draw_tiles(r)
        self._draw_mass(r, blocks)
        self._draw_probe(r)
        self._draw_importance(r)

    def _draw_words(self, r: dict[str, Any]) -> None:
        self._heads[0].set_text(
            f"k = {r['k']} of {r['n_blocks']} blocks of {r['block_size']} · layer {r['layer']} · "
            f"query head {r['head']} · n_probe {r['n_probe']} · prefill k = {r['prefill_k']}")
        self._heads[1].set_text(drawable(f"{r['question']} Step {r['step']}: fed {r['fed']!r}, "
                                         f"exact attention says {r['next']!r}"))
        said = r["answer"].text if r["answer"] else "…"
        names = ("exact", f"k = {r['k']}")
        width = max(map(len, names))
        texts = (r["exact_answer"].text, said)
        for text, name, words in zip(self._says, names, texts, strict=True):
            line = drawable(words)
            cut = line if len(line) <= _SAYS_CHARACTERS else line[:_SAYS_CHARACTERS] + " …"
            text.set_text(f"{name:<{width}} says: {cut}")

    def _draw_tiles(self, r: dict[str, Any]) -> None:
        reason = np.array(r["reason"])
        in_lanes = r["n_blocks"] > _ABREAST
        for text in self._lanes:
            text.set_visible(in_lanes)
        for name in REASON:
            at = np.flatnonzero(reason == name)
            low, high = 0.06, 0.94
            if in_lanes and name in _LANES:
                low, high = 0.06 + 0.22 * _LANES[name], 0.06 + 0.22 * (_LANES[name] + 1)
            self._tiles[name].move(at, np.full(len(at), high), 0.94, low)
            self._tiles[name].set_line(_line(name, thin=in_lanes))
            self._letters[name].set_data(*([], []) if in_lanes else (at, np.full(len(at), 0.5)))
        if in_lanes:  # what no lane covers
            self._tiles["not_selected"].move(np.arange(len(reason)), np.full(len(reason), 0.94),
                                             0.94, 0.06)
        needles = np.array(r["needle_blocks"])
        self._needle.move(needles, np.full(len(needles), 1.0), 1.0)
        self._needle.set_line(1.2 if in_lanes else 2.4)
        self._needle_name.set_x(needles.mean())
        self._needle_name.set_text("needle")
        self._block_name.set_x(r["block"])
        self._block_name.set_text(f"▲\nblock {r['block']}")
        for name, text in self._counts.items():
            text.set_text(f"{REASON[name].label}: {(reason == name).sum()}")

    def _draw_mass(self, r: dict[str, Any], blocks: np.ndarray) -> None:
        mass, read = r["mass"], r["read"]
        self._read.move(blocks[read], mass[read])
        self._lost.move(blocks[~read], mass[~read])
        self._mass_ax.set_ylim(0, 1.08 * mass.max())
        self._titles[0].set_text(f"exact attention's weight: {percent(mass[read].sum())} on blocks "
                                 f"read (dark), {percent(mass[~read].sum())} on others (white)")

    def _draw_probe(self, r: dict[str, Any]) -> None:
        selection, needle = r["selection"], r["needle_block"]
        probe = selection.probe
        low, high = float(probe.min()), float(probe.max())
        floor = low - 0.1 * (high - low or 1.0)
        for name, at in _split(r["reason"], self._probe).items():
            self._probe[name].move(at, probe[at], bottom=floor)
        self._probe_ax.set_ylim(floor, high + 0.08 * (high - floor))
        self._titles[1].set_text(f"probe score: the needle's block ranks "
                                 f"{selection.probe_rank[needle]} of {len(probe)}")

    def _draw_importance(self, r: dict[str, Any]) -> None:
        sums, ranks = r["selection"].importance, r["selection"].importance_rank
        off = sums is None
        self._importance_ax.yaxis.set_visible(not off)
        self._off.set_text("importance is off: the probe fills every place" if off else "")
        self._titles[2].set_text("importance" if off else
                                 "importance, log scale: the needle's block ranks "
                                 f"{ranks[r['needle_block']]} of {len(sums)}")
        positive = np.array([1.0]) if off else sums[sums > 0]
        floor, top = 0.7 * float(positive.min(initial=1e9)), 1.3 * float(positive.max(initial=1e-9))
        base = min(floor, 1.0)  # a sum of 0 has no bar
        self._importance_ax.set_ylim(base, max(top, 1.0))
        for name, at in _split(r["reason"], self._sums).items():
            at = at[:0] if off else at
            heights = np.zeros(0) if off else np.maximum(sums[at], base)
            self._sums[name].move(at, heights, bottom=base)


def _edge(name: str) -> str:
    return REASON[name].ink if REASON[name].hatch else INK


def _split(reason: Sequence[str], bars: Mapping[str, Any]) -> dict[str, np.ndarray]:
    """Blocks by the bars that show them: those of another reason stand with the not selected."""
    shown = np.array([name if name in bars else "not_selected" for name in reason])
    return {name: np.flatnonzero(shown == name) for name in bars}


def _tile(ax: Any, meaning: Meaning) -> Bars:
    """Tiles under letters: a hatch would hide the letter, so a frame stands for it."""
    edge = meaning.ink if meaning.hatch else PAPER
    return Bars(ax, meaning._replace(hatch=""), edge=edge)


def _line(name: str, thin: bool = False) -> float:
    return 1.4 if REASON[name].hatch else 0.25 if thin else 0.6


def _letter(ax: Any, meaning: Meaning) -> Any:
    """A letter as a marker: 65 of them draw like one, where 65 texts would cost 65 layouts."""
    path = TextPath((0, 0), meaning.letter, size=10, prop=FontProperties(
        family="DejaVu Sans Mono", weight="bold"))
    box = path.get_extents()
    centred = Path(path.vertices - [(box.x0 + box.x1) / 2, (box.y0 + box.y1) / 2], path.codes)
    size = 2.5 if meaning.letter == "·" else 8.5
    (line,) = ax.plot([], [], linestyle="none", marker=centred, ms=size, color=meaning.ink,
                      mew=0, zorder=3)
    return line
