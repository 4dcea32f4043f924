"""The picture of the online-softmax explorer: scores and maximum, the sum, the output so far."""

from __future__ import annotations

from typing import Any

import numpy as np
from matplotlib.ticker import MaxNLocator

from course_lib.show.artists import Bars, Segments, caption
from course_lib.show.style import INK, MUTED, PAPER, STREAM, new_figure
from course_lib.show.text import fmt

_LABELLED = 8  # up to so many tokens carry their score


def order_name(r: dict[str, Any]) -> str:
    """The order in words, with the seed where it matters."""
    return f"random order, seed {r['seed']}" if r["order"] == "random" else r["order"]


def last_step(r: dict[str, Any]) -> str:
    """What the last token that was read did, as one line of arithmetic."""
    t, trace, c = r["read"] - 1, r["trace"], r["component"]
    if t < 0:
        return "nothing read yet: M = -inf, S = 0, A = 0"
    s, m = trace.scores[t], trace.max[t]
    before = trace.total[t - 1] if t else 0.0
    a_before = trace.acc[t - 1, c] if t else 0.0
    weight = fmt(trace.weight[t])
    if trace.grew[t]:
        start = f"s = {fmt(s)} is a new maximum: × {fmt(trace.shrink[t])} for what was there"
        s_text = f"S = {fmt(before)}·{fmt(trace.shrink[t])} + 1"
        a_text = f"A = {fmt(a_before)}·{fmt(trace.shrink[t])} + 1·{fmt(r['values'][t])}"
    else:
        start = f"s = {fmt(s)}, M stays {fmt(m)}: weight e^(s − M) = {weight}"
        s_text = f"S = {fmt(before)} + {weight}"
        a_text = f"A = {fmt(a_before)} + {weight}·{fmt(r['values'][t])}"
    return (f"{start};  {s_text} = {fmt(trace.total[t])};  "
            f"{a_text} = {fmt(trace.acc[t, c])}")


class OnlineSoftmaxPicture:
    """Three panels whose artists are moved by `draw(result)`."""

    def __init__(self) -> None:
        self.figure = new_figure(5.9)
        axes = self.figure.subplot_mosaic([["scores", "scores"], ["sum", "output"]],
                                          height_ratios=[1.15, 1])
        self.figure.subplots_adjust(0.085, 0.085, 0.98, 0.83, wspace=0.2, hspace=0.5)
        self._title = self.figure.text(0.015, 0.968, "", fontsize=12, va="center")
        self._step = self.figure.text(0.015, 0.922, "", fontsize=9.5, va="center", color=INK)
        self._make_scores(axes["scores"])
        self._make_sum(axes["sum"])
        self._make_output(axes["output"])

    def _make_scores(self, ax: Any) -> None:
        self._scores_ax = ax
        ax.axhline(0, color=MUTED, lw=0.8)
        edges = {"read": STREAM["read"].color, "maximum": INK, "to come": "#b5b5b5"}
        self._scores = {name: Bars(ax, STREAM[name], label=STREAM[name].label, line=0.4,
                                   edge=edges[name]) for name in STREAM}
        (self._maximum,) = ax.plot([], [], color=INK, lw=1.8, drawstyle="steps-mid",
                                   label="running maximum M")
        self._current = Segments(ax, INK, 1.2, "dotted")
        plate = {"fc": PAPER, "ec": "none", "pad": 1}
        self._labels = [ax.text(0, 0, "", ha="center", fontsize=9, bbox=plate)
                        for _ in range(_LABELLED)]
        caption(ax, "scores")
        ax.set_ylabel("score")
        ax.set_xlabel("token read")
        ax.xaxis.set_major_locator(MaxNLocator(10, integer=True))
        ax.yaxis.set_major_locator(MaxNLocator(5))
        ax.legend(ncols=4, loc="lower right", bbox_to_anchor=(1.0, 1.0), borderaxespad=0.2,
                  columnspacing=1.2, handlelength=1.6)

    def _make_sum(self, ax: Any) -> None:
        self._sum_ax = ax
        self._before = Bars(ax, STREAM["maximum"], line=0.4)
        self._sum = Bars(ax, STREAM["read"], line=0.4, edge=STREAM["read"].color)
        caption(ax, "sum S; hatched: taken away by a rescale")
        ax.set_ylabel("S")
        ax.set_xlabel("token read")
        ax.xaxis.set_major_locator(MaxNLocator(6, integer=True))
        ax.yaxis.set_major_locator(MaxNLocator(5))

    def _make_output(self, ax: Any) -> None:
        self._output_ax = ax
        self._final = ax.axhline(0, color=INK, lw=1.2, ls=(0, (5, 3)))
        (self._so_far,) = ax.plot([], [], "o-", color=STREAM["read"].color, ms=3.5, lw=1.2)
        (self._jumps,) = ax.plot([], [], "D", color=STREAM["maximum"].color, mec=INK, ms=6)
        self._output_name = caption(ax)
        ax.set_ylabel("A/S")
        ax.set_xlabel("token read")
        ax.xaxis.set_major_locator(MaxNLocator(6, integer=True))
        ax.yaxis.set_major_locator(MaxNLocator(5))

    def draw(self, r: dict[str, Any]) -> None:
        self._title.set_text(f"{r['name']} · {order_name(r)} · read {r['read']} of {r['n']} · "
                             f"{r['rescales_so_far']} rescales so far")
        self._step.set_text(last_step(r))
        self._draw_scores(r)
        self._draw_sum(r)
        self._draw_output(r)

    def _draw_scores(self, r: dict[str, Any]) -> None:
        trace, read, n, ax = r["trace"], r["read"], r["n"], self._scores_ax
        place = np.arange(1, n + 1)
        scores = np.where(np.isfinite(trace.scores), trace.scores, 0)
        kind = np.where(np.arange(n) >= read, "to come", np.where(trace.grew, "maximum", "read"))
        for name, bars in self._scores.items():
            bars.move(place[kind == name], scores[kind == name], 0.8)
        self._maximum.set_data(place[:read], trace.max[:read])
        low, high = min(0.0, float(scores.min())), max(0.0, float(scores.max()))
        room = 0.16 * (high - low) or 1.0
        ax.set_xlim(0.4, n + 0.6)
        ax.set_ylim(low - (room if low < 0 else 0), high + room)
        self._current.move(read, low - room, read, high + room)
        for t, label in enumerate(self._labels):
            shown = t < n <= _LABELLED
            label.set_text(fmt(trace.scores[t]) if shown else "")
            if shown:
                label.set_position((t + 1, scores[t] + 0.1 * room))
                label.set_va("bottom")

    def _draw_sum(self, r: dict[str, Any]) -> None:
        trace, read, n, ax = r["trace"], r["read"], r["n"], self._sum_ax
        place, total = np.arange(1, read + 1), trace.total[:read].astype(float)
        before = np.concatenate(([0.0], total[:-1])) if read else total
        shrunk = before * trace.shrink[:read]
        self._sum.move(place, total, 0.8)
        # What stood there before the rescale and is gone after it, on top of the new sum.
        self._before.move(place, total + (before - shrunk), 0.8, bottom=total)
        top = float(np.nanmax(trace.total)) if n else 1.0
        if n > 1:
            gone = trace.total[:-1] * (1 - trace.shrink[1:])
            top = max(top, float((trace.total[1:] + gone).max()))
        ax.set_xlim(0.4, n + 0.6)
        ax.set_ylim(0, 1.08 * top or 1.0)

    def _draw_output(self, r: dict[str, Any]) -> None:
        trace, read, n, c = r["trace"], r["read"], r["n"], r["component"]
        place, so_far = np.arange(1, n + 1), r["so_far"]
        self._so_far.set_data(place[:read], so_far[:read])
        jumps = np.flatnonzero(trace.grew[:read])
        self._jumps.set_data(place[jumps], so_far[jumps])
        final = float(r["out"][c])
        self._final.set_ydata([final, final])
        known = so_far[np.isfinite(so_far)]
        low, high = float(known.min(initial=final)), float(known.max(initial=final))
        room = 0.12 * (high - low) or 1.0
        self._output_ax.set_ylabel(f"A/S, component {c}" if r["source"] == "model" else "A/S")
        self._output_ax.set_xlim(0.4, n + 0.6)
        self._output_ax.set_ylim(low - room, high + room)
        self._output_name.set_text(f"output so far; dashed: in the end, {fmt(final)}")
