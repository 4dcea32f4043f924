"""The picture of the prefill-mask explorer: exact attention beside the mask of a policy."""

from __future__ import annotations

from typing import Any

import numpy as np
from matplotlib.patches import Rectangle
from matplotlib.ticker import MaxNLocator

from course_lib.show.artists import caption
from course_lib.show.style import INK, PREFILL, new_figure
from course_lib.show.text import drawable, percent
from course_lib.show.tile_grid import TileGrid, letters

_LOST_FROM = 0.02  # share of a row from which on a lost cell is marked


class PrefillMaskPicture:
    """Two squares whose artists are updated by `draw(result)`."""

    def __init__(self) -> None:
        self.figure = new_figure(5.7)
        self._heads = [self.figure.text(0.012, y, "", fontsize=12 - i, va="center",
                                        weight="normal" if i else "bold", parse_math=False)
                       for i, y in enumerate((0.968, 0.922))]
        self._says = [self.figure.text(0.012, y, "", fontsize=10.5, va="center")
                      for y in (0.066, 0.024)]
        left, right = (self.figure.add_axes((x, 0.165, 0.43, 0.615)) for x in (0.06, 0.555))
        self._axes = left, right
        self._titles = [caption(ax) for ax in self._axes]
        self._grey = left.imshow(np.zeros((1, 1)), cmap="gray_r", vmin=0, vmax=1, aspect="auto",
                                 interpolation="nearest")
        lost = PREFILL["extra"]._replace(letter="×", ink=PREFILL["extra"].color)
        self._lost = letters(left, lost)
        self._tiles = TileGrid(right, PREFILL)
        self._boxes = []
        for ax in self._axes:
            ax.xaxis.set_major_locator(MaxNLocator(8, integer=True))
            ax.yaxis.set_major_locator(MaxNLocator(8, integer=True))
            ax.set_xlabel("block of keys", labelpad=1)
            box = Rectangle((0, 0), 1, 1, fill=False, edgecolor=INK, linewidth=1.6, zorder=4)
            ax.add_patch(box)
            self._boxes.append((box, ax.text(
                0, 0, "needle", ha="left", va="center", fontsize=9.5, weight="bold", zorder=5)))
        left.set_ylabel("block of queries", labelpad=1)
        self._make_legend()

    def _make_legend(self) -> None:
        ax = self.figure.add_axes((0.06, 0.855, 0.92, 0.032))
        ax.set(xlim=(0, 92), ylim=(0, 1))
        ax.axis("off")
        self._legend_ax = ax
        self._legend = []
        for i in range(5):
            x = 1 + 18.5 * i
            patch = ax.add_patch(Rectangle((x - 0.9, 0.02), 1.8, 0.96, linewidth=0))
            self._legend.append((patch, ax.text(x, 0.47, "", ha="center", va="center", fontsize=9,
                                                weight="bold"),
                                 ax.text(x + 1.6, 0.47, "", va="center", fontsize=10)))

    def draw(self, r: dict[str, Any]) -> None:
        from course_lib.show.prefill_mask import counts, policy_words

        self._heads[0].set_text(f"{policy_words(r)} · layer {r['layer']} · query head {r['head']} "
                                f"· blocks of {r['block_size']}")
        self._heads[1].set_text(drawable(r['question']))
        found = list(counts(r).items())
        for i, (patch, letter, words) in enumerate(self._legend):
            shown = i < len(found)
            for artist in (patch, letter, words):
                artist.set_visible(shown)
            if shown:
                meaning = PREFILL[found[i][0]]
                patch.set_facecolor(meaning.color)
                letter.set_text(meaning.letter)
                letter.set_color(meaning.ink)
                words.set_text(f"{meaning.label}: {found[i][1]}")
        n, mass = r["n_blocks"], r["mass"]
        self._grey.set_data(np.sqrt(mass))
        self._grey.set_extent((-0.5, n - 0.5, n - 0.5, -0.5))
        self._axes[0].set(xlim=(-0.5, n - 0.5), ylim=(n - 0.5, -0.5))
        rows, columns = np.nonzero(~r["mask"] & (mass >= _LOST_FROM))
        self._lost.set_data(columns, rows)
        self._lost.set_markersize(min(8.0, 200.0 / n))
        self._tiles.draw(r["reason"])
        first, last = r["needle_blocks"][0], r["needle_blocks"][-1]
        for box, name in self._boxes:
            box.set_bounds(first - 0.5, first - 0.5, last - first + 1, n - first)
            name.set_position((last + 1 + 0.01 * n, first))
        self._titles[0].set_text(f"exact attention; × lost, {_LOST_FROM:.0%} of a row or more: "
                                 f"{len(rows)}")
        self._titles[1].set_text(f"the mask: {percent(r['density'])} of the cells")
        self._says[0].set_text(f"exact attention's weight: {percent(r['kept'])} kept, "
                               f"{percent(1 - r['kept'])} lost")
        kept = "kept" if r["needle_kept"] else "LOST"
        self._says[1].set_text(
            f"the last query gives {percent(r['asking'])} to the needle's block, the last row of "
            f"{r['weight'][-1]:.0f} queries {percent(r['needle_mass'])}: {kept}")
