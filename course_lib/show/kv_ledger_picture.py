"""The picture of the KV ledger: what one decode step reads, and what stays in memory."""

from __future__ import annotations

from typing import Any

import numpy as np

from course_lib.show.artists import Bars, caption
from course_lib.show.style import BYTES, INK, new_figure
from course_lib.show.text import fmt, size_text

_COLUMNS = 4


class KVLedgerPicture:
    """Two panels with one stacked column per format, moved by `draw(result)`."""

    def __init__(self) -> None:
        self.figure = new_figure(4.4)
        axes = self.figure.subplots(1, 2)
        self.figure.subplots_adjust(0.02, 0.1, 0.98, 0.74, wspace=0.06)
        self._title = self.figure.text(0.015, 0.955, "", fontsize=12, va="center")
        self._panels = [_Panel(ax, name) for ax, name in
                        zip(axes, ("read by one decode step", "kept in memory"), strict=True)]
        handles, labels = axes[1].get_legend_handles_labels()
        self.figure.legend(handles, labels, ncols=3, loc="upper left", bbox_to_anchor=(0.01, 0.93),
                           handlelength=1.8)

    def draw(self, r: dict[str, Any]) -> None:
        mirror = "float32 mirror kept" if r["mirror"] else "no mirror"
        self._title.set_text(f"{r['heads']} KV heads × {r['d']} values · "
                             f"layers: {r['layers']} · tokens: {r['tokens']:,} · {mirror}")
        rows = r["rows"]
        top = max(row["memory"] for row in rows.values())
        self._panels[0].draw(rows, "scan", ("values", "scales"), top)
        self._panels[1].draw(rows, "memory", tuple(BYTES), top)


class _Panel:
    def __init__(self, ax: Any, name: str) -> None:
        self._ax = ax
        self._bars = {part: Bars(ax, BYTES[part], label=BYTES[part].label) for part in BYTES}
        self._labels = [ax.text(0, 0, "", ha="center", va="bottom", fontsize=9)
                        for _ in range(_COLUMNS)]
        ax.axhline(0, color=INK, lw=0.8)
        ax.set(xlim=(-0.6, _COLUMNS - 0.4), yticks=[])
        ax.spines["left"].set_visible(False)
        ax.tick_params(axis="x", length=0, labelsize=10)
        caption(ax, name)

    def draw(self, rows: dict[str, Any], total: str, parts: tuple[str, ...], top: float) -> None:
        at, bottom = np.arange(len(rows)), np.zeros(len(rows))
        self._ax.set_xticks(at, list(rows))
        self._ax.set_ylim(0, 1.25 * top)
        for part in parts:
            height = np.array([row[part] for row in rows.values()], float)
            there = height > 0
            self._bars[part].move(at[there], (bottom + height)[there], 0.62, bottom[there])
            bottom += height
        for label in self._labels:
            label.set_text("")
        for i, (label, row) in enumerate(zip(self._labels, rows.values(), strict=False)):
            label.set_text(f"{size_text(row[total])}\n× {fmt(row[f'{total}_vs_f16'])} of f16")
            label.set_position((i, row[total] + 0.015 * top))
