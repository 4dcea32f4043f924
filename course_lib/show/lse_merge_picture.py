"""The picture of the LSE-merge explorer: tokens, weights of the parts, the output as it grows."""

from __future__ import annotations

from typing import Any

import numpy as np
from matplotlib.ticker import FuncFormatter, MaxNLocator

from course_lib.show.artists import Bars, Segments, caption
from course_lib.show.style import INK, MERGE, MUTED, PAPER, new_figure
from course_lib.show.text import fmt, percent

_NAMES = "ABCDEF"
_BARS = 64  # bars of the upper panel at most: tokens, or runs of tokens


class LseMergePicture:
    """Three panels whose artists are moved by `draw(result)`."""

    def __init__(self) -> None:
        self.figure = new_figure(5.4)
        self._title = self.figure.text(0.015, 0.965, "", fontsize=12, va="center")
        axes = [self.figure.add_axes(box) for box in
                ((0.075, 0.64, 0.91, 0.24), (0.075, 0.15, 0.38, 0.32), (0.56, 0.15, 0.425, 0.32))]
        self._tokens_ax, self._weights_ax, self._out_ax = axes
        self._tokens = {name: Bars(axes[0], MERGE[name], line=0.4) for name in ("even", "odd")}
        self._borders = Segments(axes[0], INK, 1.0, "dashed")
        self._letters = [axes[0].text(0, 0, "", ha="center", va="top", fontsize=11, weight="bold")
                         for _ in _NAMES]
        self._tokens_name = caption(axes[0])
        axes[0].yaxis.set_major_locator(MaxNLocator(3))
        axes[0].yaxis.set_major_formatter(FuncFormatter(lambda v, _: f"{100 * v:g} %"))
        self._weights = {name: Bars(axes[1], MERGE[name]) for name in ("even", "odd", "to come")}
        self._numbers = [axes[1].text(0, 0, "", ha="center", va="bottom", fontsize=9)
                         for _ in _NAMES]
        axes[1].set(ylim=(0, 1.22))
        axes[1].set_xlabel("parts, in the order of merging")
        caption(axes[1], "weight of each part, $e^{LSE - M}$, and its share")
        self._exact = Segments(axes[2], INK, 1.4, "dashed")
        self._parts = axes[2].plot([], [], ls="", marker="s", ms=8, mfc=PAPER, mec=INK,
                                   label="the part alone")[0]
        self._running = axes[2].plot([], [], marker="o", ms=8, color=INK, label="merged so far")[0]
        self._ahead = axes[2].plot([], [], ls=":", marker="o", ms=5, color=MUTED, mfc=PAPER)[0]
        self._out_name = caption(axes[2])
        axes[2].yaxis.set_major_locator(MaxNLocator(4))
        axes[2].plot([], [], ls="--", color=INK, lw=1.4, label="in one part")
        axes[2].legend(loc="upper center", bbox_to_anchor=(0.45, -0.16), ncols=3,
                       handlelength=1.6, columnspacing=1.2, borderaxespad=0.0)

    def draw(self, r: dict[str, Any]) -> None:
        whose = "six numbers" if r["source"] == "toy" else \
            f"layer {r['layer']}, query head {r['head']}, last query"
        self._title.set_text(f"{whose} · {r['parts']} part{'s' * (r['parts'] > 1)} · merged "
                             f"{r['order_name']}")
        self._draw_tokens(r)
        self._draw_weights(r)
        self._draw_output(r)

    def _draw_tokens(self, r: dict[str, Any]) -> None:
        ax, shares, edges = self._tokens_ax, r["token_shares"], np.array(r["edges"])
        run = -(-len(shares) // _BARS)
        starts = np.arange(0, len(shares), run)
        heights = np.add.reduceat(shares, starts)
        part = np.searchsorted(edges, starts + run // 2, side="right") - 1
        for name, rest in (("even", 0), ("odd", 1)):
            mine = part % 2 == rest
            self._tokens[name].move(starts[mine] + (run - 1) / 2, heights[mine], 0.86 * run)
        inner = edges[1:-1] - 0.5
        top = 1.25 * float(heights.max())
        self._borders.move(inner, 0 * inner, inner, 0 * inner + top)
        for p, text in enumerate(self._letters):
            text.set_text(_NAMES[p] if p < r["parts"] else "")
            if p < r["parts"]:
                text.set_position(((edges[p] + edges[p + 1] - 1) / 2, top))
        ax.set(xlim=(-0.5, len(shares) - 0.5), ylim=(0, top), xlabel="token")
        each = "one token" if run == 1 else f"{run} tokens"
        self._tokens_name.set_text(f"share of the attention, each bar {each}")

    def _draw_weights(self, r: dict[str, Any]) -> None:
        ax, order = self._weights_ax, np.array(r["order"])
        at, done = np.arange(len(order)), np.arange(len(order)) < r["merged"]
        weights = r["weights"][order]
        for name, mine in (("even", done & (order % 2 == 0)), ("odd", done & (order % 2 == 1)),
                           ("to come", ~done)):
            self._weights[name].move(at[mine], weights[mine], 0.7)
        for i, text in enumerate(self._numbers):
            text.set_text("" if i >= len(order) else
                          f"{fmt(weights[i]) if weights[i] >= 1e-3 else '< 0.001'}\n"
                          f"{percent(r['shares'][order[i]])}")
            if i < len(order):
                text.set_position((i, weights[i] + 0.01))
        ax.set_xticks(at, [_NAMES[p] for p in order])
        ax.set_xlim(-0.6, max(1.6, len(order) - 0.4))

    def _draw_output(self, r: dict[str, Any]) -> None:
        ax, c, order, merged = self._out_ax, r["component"], list(r["order"]), r["merged"]
        alone, running = r["part_outs"][order, c], r["running"][:, c]
        exact = float(r["exact"][c])
        at = np.arange(len(order))
        self._parts.set_data(at, alone)
        self._running.set_data(at[:merged], running[:merged])
        self._ahead.set_data(at[merged:], running[merged:])
        self._exact.move(-0.6, exact, len(order), exact)
        values = np.concatenate([alone, running, [exact]])
        low, high = float(values.min()), float(values.max())
        room = (high - low) or abs(high) or 1.0
        ax.set(xlim=(-0.4, max(1.4, len(order) - 0.6)),
               ylim=(low - 0.12 * room, high + 0.2 * room))
        ax.set_xticks(at, [("+" if i else "") + _NAMES[p] for i, p in enumerate(order)])
        self._out_name.set_text(f"output component {c}; in one part {fmt(exact)}")
