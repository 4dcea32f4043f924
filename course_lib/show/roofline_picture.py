"""The picture of the roofline explorer: the machine's roof, and a letter for each kernel."""

from __future__ import annotations

from typing import Any

import numpy as np
from matplotlib.ticker import FuncFormatter

from course_lib.show.artists import Segments, caption
from course_lib.show.style import GRID, INK, MUTED, ROOF, new_figure
from course_lib.show.text import fmt
from course_lib.show.tile_grid import letters

_X = (0.2, 2000.0)  # operations per byte
_NEAR = (0.11, 0.16)  # of a decade: letters that would cover each other
_LIST = 0.735  # where the list of kernels begins, as a share of the figure's width


class RooflinePicture:
    """Roof lines and lettered points, whose artists are moved by `draw(result)`."""

    def __init__(self) -> None:
        from course_lib.show.roofline import KERNELS, LETTERS

        self._letters_of = LETTERS
        self.figure = new_figure(4.6)
        self._title = self.figure.text(0.012, 0.955, "", fontsize=12, va="center")
        ax = self._ax = self.figure.add_axes((0.085, 0.12, 0.635, 0.74))
        ax.set(xscale="log", yscale="log", xlim=_X, xlabel="operations per byte",
               ylabel="10⁹ operations a second")
        for axis in (ax.xaxis, ax.yaxis):
            axis.set_major_formatter(FuncFormatter(lambda v, _: f"{v:g}"))
        ax.grid(which="major", color=GRID)
        self._roofs = {kind: ax.plot([], [], color=INK, lw=2, ls=style)[0]
                       for kind, style in (("float", "solid"), ("int8", (0, (5, 2))))}
        self._ridges = Segments(ax, MUTED, 1.0, "dotted")
        self._gaps = Segments(ax, MUTED, 1.0)
        self._slope = ax.annotate("", (0, 0), (14, 0), textcoords="offset points", fontsize=9,
                                  color=MUTED, va="top")
        self._tops = {kind: ax.annotate("", (_X[1], 1), (-3, 4), textcoords="offset points",
                                        ha="right", va="bottom", fontsize=9, color=MUTED)
                      for kind in self._roofs}
        self._points = {state: ax.plot([], [], "o", ms=13, mfc=m.color, mec=INK, ls="none",
                                       clip_on=False, zorder=4)[0] for state, m in ROOF.items()}
        self._marks = {name: letters(ax, ROOF["derived"]._replace(letter=LETTERS[name]))
                       for name in KERNELS}
        for mark in self._marks.values():
            mark.set(markersize=7, zorder=5, clip_on=False)
        self._names = {name: self.figure.text(_LIST, 0.80 - 0.088 * i, "", fontsize=9.5,
                                              va="center", family="DejaVu Sans Mono")
                       for i, name in enumerate(KERNELS)}
        caption(ax)
        self.figure.text(_LIST, 0.885, "kernel: operations per byte", fontsize=10, weight="bold",
                         va="center")
        self._legend = self.figure.text(_LIST, 0.16, "", fontsize=9, color=MUTED, va="top",
                                        linespacing=1.4)

    def draw(self, r: dict[str, Any]) -> None:
        machine = r["machine"]
        self._title.set_text(f"{machine.name} · {r['batch']} at once · {r['tokens']} tokens in "
                             "the cache")
        self._draw_roof(r)
        place: dict[str, list[tuple[float, float]]] = {state: [] for state in ROOF}
        spots = _apart(r)
        for name, work in r["works"].items():
            chosen = name == r["kernel"]
            state = "chosen" if chosen else "measured" if r["measured"] else "derived"
            point = spots.get(name)
            if point:
                place[state].append(point)
            self._marks[name].set_data(*(([point[0]], [point[1]]) if point else ([], [])))
            self._marks[name].set_color(ROOF[state].ink)
            self._names[name].set_text(f"{self._letters_of[name]} {name:<13}"
                                       f"{fmt(work.intensity):>6}")
            self._names[name].set_fontweight("bold" if chosen else "normal")
        for state, points in place.items():
            self._points[state].set_data(*(np.array(points).T if points else ([], [])))
        self._legend.set_text("dark: measured; line: up to the roof\norange: explained below"
                              if r["measured"] else
                              "white: at most; line: its place\norange: explained below")

    def _draw_roof(self, r: dict[str, Any]) -> None:
        machine, x = r["machine"], np.array(_X)
        tops = [p for p in machine.peaks.values() if p] or [machine.gb_per_s * _X[1]]
        lows = [machine.gb_per_s * _X[0], *r["reached"].values()]
        self._ax.set_ylim(0.6 * min(lows), 2.2 * max(*tops, *r["reached"].values()))
        ridges = []
        for kind, line in self._roofs.items():
            ridge, peak = machine.ridge(kind), machine.peaks[kind]
            corners = np.array([x[0], x[1]] if ridge is None else [x[0], ridge, x[1]])
            line.set_data(corners, [machine.roof(c, kind) for c in corners])
            self._tops[kind].set_text("" if peak is None else f"{fmt(peak)}, {kind}")
            if peak is not None:
                self._tops[kind].xy = (_X[1], peak)
                ridges.append((ridge, peak))
        low = self._ax.get_ylim()[0]
        at = np.array(ridges).reshape(-1, 2)
        self._ridges.move(at[:, 0], low, at[:, 0], at[:, 1])
        self._slope.xy = (_X[0], machine.roof(_X[0], "float"))
        self._slope.set_text(f"{fmt(machine.gb_per_s)} GB/s")
        gaps = np.array([(x, y, machine.roof(x, r["works"][name].kind))
                         for name, (x, y) in _apart(r).items()])
        self._gaps.move(gaps[:, 0], gaps[:, 1], gaps[:, 0], gaps[:, 2])




def _apart(r: dict[str, Any]) -> dict[str, tuple[float, float]]:
    """Where every kernel's letter stands: its place, or below it where another one is too near."""
    spots: dict[str, tuple[float, float]] = {}
    for name, work in r["works"].items():
        if name not in r["reached"]:
            continue
        x, y = work.intensity, r["reached"][name]
        while not r["measured"] and any(abs(np.log10(x / a)) < _NEAR[0] and
                                        abs(np.log10(y / b)) < _NEAR[1]
                                        for a, b in spots.values()):
            y /= 1.1
        spots[name] = x, y
    return spots
