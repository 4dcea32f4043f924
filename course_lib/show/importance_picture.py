"""The picture of the importance map: the sum above, one row per layer or head below."""

from __future__ import annotations

from typing import Any

import numpy as np
from matplotlib.colors import PowerNorm
from matplotlib.ticker import FixedLocator, FuncFormatter, MaxNLocator

from course_lib.show.artists import Bars, caption
from course_lib.show.style import INK, REASON, Meaning, new_figure
from course_lib.show.text import drawable

_SUM = Meaning("", "#9a9a9a", INK, "", "sum of all rows")
_LEFT, _WIDTH = 0.085, 0.8
_GAMMA = 0.4  # so that one percent can be told from none beside a block that holds half


class ImportancePicture:
    """Bars and a grey map whose artists are moved by `draw(result)`."""

    def __init__(self) -> None:
        self.figure = new_figure(5.0)
        self._head = self.figure.text(0.012, 0.966, "", fontsize=12, va="center", weight="bold",
                                      parse_math=False)
        self._words = self.figure.text(0.012, 0.918, "", fontsize=11, va="center",
                                       parse_math=False)
        self._sum_ax = self.figure.add_axes((_LEFT, 0.665, _WIDTH, 0.15))
        self._map_ax = self.figure.add_axes((_LEFT, 0.17, _WIDTH, 0.42))
        self._title = caption(self._sum_ax)
        self._map_title = caption(self._map_ax)
        self._bars = Bars(self._sum_ax, _SUM)
        self._reserved = Bars(self._sum_ax, REASON["importance"])
        self._sum_ax.yaxis.set_major_locator(MaxNLocator(3))
        self._sum_ax.yaxis.set_major_formatter(FuncFormatter(lambda v, _: f"{100 * v:.3g} %"))
        self._letters: list[Any] = []
        self._image = self._map_ax.imshow(np.zeros((1, 1)), cmap="Greys", aspect="auto",
                                          norm=PowerNorm(_GAMMA, 0, 1), interpolation="nearest")
        scale = self.figure.add_axes((0.942, 0.17, 0.012, 0.42))
        self._scale = self.figure.colorbar(self._image, cax=scale)
        self._frames = [Bars(ax, Meaning("", "none", INK, "", ""), edge="#b3261e", line=2.2)
                        for ax in (self._sum_ax, self._map_ax)]
        self._ranks: list[Any] = []
        self._rank_name = self._map_ax.annotate(
            "needle's\nrank", (1, 1), (22, 4), xycoords="axes fraction",
            textcoords="offset points", ha="center", va="bottom", fontsize=9, color=INK)

    def draw(self, r: dict[str, Any]) -> None:
        columns = np.arange(r["map"].shape[1])
        self._head.set_text(f"who looked where: {r['asked']} · prefill {r['prefill']}")
        self._words.set_text(drawable(f"{r['question']} {r['verdict']}"))
        self._draw_sum(r, columns)
        self._draw_map(r)
        for axes in (self._sum_ax, self._map_ax):
            axes.set_xlim(-0.6, len(columns) - 0.4)
        marked = np.array([min(r["marked"]) + (len(r["marked"]) - 1) / 2])
        for frame, (low, high) in zip(self._frames, ((0, self._sum_ax.get_ylim()[1]),
                                                     (-0.5, len(r["names"]) - 0.5)), strict=True):
            frame.move(marked, np.array([high]), len(r["marked"]), low)
        self._label_columns(r, columns)

    def _draw_sum(self, r: dict[str, Any], columns: np.ndarray) -> None:
        blocks = r["columns"] == "blocks"
        chosen = np.isin(columns, list(r["letters"])) if blocks else np.zeros(len(columns), bool)
        self._bars.move(columns[~chosen], r["total"][~chosen])
        self._reserved.move(columns[chosen], r["total"][chosen])
        top = 1.3 * float(r["total"].max()) or 1.0
        self._sum_ax.set_ylim(0, top)
        self._title.set_text(
            f"share of all weight; I: reserved by importance at k = {r['k']}"
            + (", ?: ties" if "?" in r["letters"].values() else "") if blocks else
            f"share of all weight; the tokens of block {r['needle_block']}")
        for text in self._letters:
            text.remove()
        self._letters = [self._sum_ax.text(b, r["total"][b] + 0.03 * top, letter, ha="center",
                                           va="bottom", fontsize=9, weight="bold", clip_on=False)
                         for b, letter in r["letters"].items()] if blocks else []

    def _draw_map(self, r: dict[str, Any]) -> None:
        rows, count = r["map"].shape
        self._image.set_data(r["map"])
        self._image.set_extent((-0.5, count - 0.5, rows - 0.5, -0.5))
        most = float(r["map"].max()) or 1.0
        self._image.set_norm(PowerNorm(_GAMMA, 0, most))
        ticks = [0, *(s for s in (0.001, 0.01, 0.05, 0.1, 0.25, 0.5, 1.0) if s < 0.8 * most), most]
        self._scale.set_ticks(ticks, labels=[f"{100 * t:.2g} %" for t in ticks])
        self._scale.ax.tick_params(labelsize=8)
        self._map_ax.set_ylim(rows - 0.5, -0.5)
        self._map_ax.yaxis.set_major_locator(FixedLocator(range(rows)))
        self._map_ax.set_yticklabels(r["names"], fontsize=9)
        kind = "layer.head" if r["rows"] == "heads" else "all heads of a layer"
        self._map_title.set_text(f"share of a row's weight, darker = more; rows: {kind}")
        for text in self._ranks:
            text.remove()
        self._ranks = [self._map_ax.annotate(str(place or "–"), (1, row), (22, 0),
                                             xycoords=("axes fraction", "data"),
                                             textcoords="offset points", ha="center", va="center",
                                             fontsize=9, annotation_clip=False)
                       for row, place in enumerate(r["row_ranks"])]

    def _label_columns(self, r: dict[str, Any], columns: np.ndarray) -> None:
        if r["columns"] == "blocks":
            ticks, names, turn = columns[::8].tolist(), [str(b) for b in columns[::8]], 0
            self._map_ax.set_xlabel("block; red frame: the needle's", color=INK)
        else:
            ticks, turn = columns.tolist(), 90
            names = [drawable(label.replace("\n", "⏎")) for label in r["labels"]]
            names = ["⏎" if "⏎" in label else name
                     for label, name in zip((x.replace("\n", "⏎") for x in r["labels"]), names,
                                            strict=True)]
            self._map_ax.set_xlabel("")
        self._sum_ax.xaxis.set_major_locator(FixedLocator(ticks))
        self._sum_ax.tick_params(labelbottom=False)
        self._map_ax.xaxis.set_major_locator(FixedLocator(ticks))
        self._map_ax.set_xticklabels(names, rotation=turn, fontsize=9)


