"""The picture of the vote explorer: ballots, votes, and the list that is read."""

from __future__ import annotations

from typing import Any

import numpy as np
from matplotlib.patches import Rectangle
from matplotlib.ticker import FixedLocator, FuncFormatter, MaxNLocator

from course_lib.show.artists import Bars, Segments, caption
from course_lib.show.style import INK, MUTED, PREFILL, Meaning, new_figure
from course_lib.show.text import percent, plural
from course_lib.show.tile_grid import TileGrid

_BALLOT = {
    "kept": Meaning("", "#4a4a4a", INK, "", "kept"),
    "needle": Meaning("N", "#f0a830", INK, "", "kept, and holds what this KV head looks for"),
    "missed": Meaning("N", "#ececec", "#b3261e", "", "not kept, though it holds it"),
    "not_selected": Meaning("·", "#ececec", MUTED, "", "not kept"),
}
_HELD = Meaning("", "#4a4a4a", INK, "", "")
_BELOW = Meaning("", "#cfcfcf", INK, "", "")


class VotePicture:
    """Three strips over the blocks of history, updated by `draw(result)`."""

    def __init__(self) -> None:
        self.figure = new_figure(5.6)
        self._heads = [self.figure.text(0.012, y, "", fontsize=12 - i, va="center",
                                        weight="normal" if i else "bold", parse_math=False)
                       for i, y in enumerate((0.966, 0.918))]
        self._says = self.figure.text(0.012, 0.026, "", fontsize=10.5, va="center")
        self._ballots_ax = self.figure.add_axes((0.1, 0.535, 0.885, 0.285))
        self._votes_ax = self.figure.add_axes((0.1, 0.305, 0.885, 0.135))
        self._lists_ax = self.figure.add_axes((0.1, 0.115, 0.885, 0.115))
        self._titles = [caption(ax) for ax in (self._ballots_ax, self._votes_ax, self._lists_ax)]
        self._ballots = TileGrid(self._ballots_ax, _BALLOT)
        self._borders = Segments(self._ballots_ax, INK, 1.4)
        self._lists = TileGrid(self._lists_ax, PREFILL)
        self._held, self._below = Bars(self._votes_ax, _HELD), Bars(self._votes_ax, _BELOW)
        self._half = Segments(self._votes_ax, "#b3261e", 1.4, "dashed")
        self._votes_ax.yaxis.set_major_locator(MaxNLocator(2, steps=[1, 2, 5, 10]))
        self._votes_ax.yaxis.set_major_formatter(FuncFormatter(lambda v, _: f"{100 * v:.0f} %"))
        for ax in (self._ballots_ax, self._lists_ax):
            ax.tick_params(length=0)
        self._lists_ax.set_xlabel("block of history", labelpad=1)
        self._frames = [Rectangle((0, 0), 1, 1, fill=False, edgecolor=INK, linewidth=2.0, zorder=4,
                                  visible=False) for _ in range(8)]
        for frame in self._frames:
            self._lists_ax.add_patch(frame)

    def draw(self, r: dict[str, Any]) -> None:
        from course_lib.show.vote import where

        blocks, rows = r["n_blocks"], r["kv_heads"] * r["rows"]
        self._heads[0].set_text(f"rule {r['rule']} · τ = {r['threshold']:g}")
        self._heads[1].set_text(where(r))
        self._draw_ballots(r, rows)
        self._draw_votes(r)
        self._draw_lists(r)
        for ax in (self._ballots_ax, self._votes_ax, self._lists_ax):
            ax.set_xlim(-0.5, blocks - 0.5)
            ax.xaxis.set_major_locator(FixedLocator(range(0, blocks, 1 if blocks < 16 else 4)))
            ax.tick_params(labelbottom=ax is self._lists_ax)
        lost = ", ".join(str(h) for h, _ in r["lost"])
        self._says.set_text(
            f"reads {percent(r['read_density'])} of the blocks, {percent(r['kept_mass'])} of the "
            "estimated mass; " + (f"LOST: what KV head{'s' * (len(r['lost']) > 1)} {lost} "
                                  f"look{'s' * (len(r['lost']) == 1)} for" if lost
                                  else "no needle is lost"))

    def _draw_ballots(self, r: dict[str, Any], rows: int) -> None:
        words = np.where(r["ballots"].reshape(rows, -1), "kept", "not_selected").astype(object)
        for head, block in r["sought"]:
            for row in range(head * r["rows"], (head + 1) * r["rows"]):
                words[row, block] = "needle" if words[row, block] == "kept" else "missed"
        self._ballots.draw(words)
        at = np.arange(1, r["kv_heads"]) * r["rows"] - 0.5
        self._borders.move(-0.5, at, r["n_blocks"] - 0.5, at)
        middles = np.arange(r["kv_heads"]) * r["rows"] + (r["rows"] - 1) / 2
        self._ballots_ax.set_yticks(middles, [f"KV head {h}" for h in range(r["kv_heads"])])
        self._titles[0].set_text(f"{plural(rows, 'ballot')}, dark = kept; N = the block that the "
                                 "KV head looks for, red where not kept")

    def _draw_votes(self, r: dict[str, Any]) -> None:
        by_mass = r["rule"] == "mean_score"
        height = r["mass"] if by_mass else r["votes"]
        read = np.zeros(len(height), bool)
        read[np.unique(np.concatenate(r["lists"]))] = True
        blocks = np.arange(len(height))
        self._held.move(blocks[read], height[read])
        self._below.move(blocks[~read], height[~read])
        self._votes_ax.set_ylim(0, 1.1 * height.max() if by_mass else 1.05)
        end = len(height) - 0.5
        self._half.move(-0.5, 0.5, end if r["rule"] == "majority" else -0.5, 0.5)
        self._titles[1].set_text(
            "mean estimated mass (dark: read)" if by_mass else
            "share of the votes (dark: read)"
            + ("; more than half is needed" if r["rule"] == "majority" else ""))

    def _draw_lists(self, r: dict[str, Any]) -> None:
        words = np.array(r["reasons"], object)
        self._lists.draw(words)
        names = ["all"] if len(words) == 1 else [f"KV {h}" for h in range(len(words))]
        self._lists_ax.set_yticks(range(len(words)), names)
        places = sorted({(h if len(words) > 1 else 0, b) for h, b in r["sought"]})
        for i, frame in enumerate(self._frames):
            frame.set_visible(i < len(places))
            if i < len(places):
                frame.set_bounds(places[i][1] - 0.5, places[i][0] - 0.5, 1, 1)
        self._titles[2].set_text("what is read: V vote, T threshold, S sink, F first, L last; "
                                 "framed = looked for")
