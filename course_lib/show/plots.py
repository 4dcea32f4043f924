"""Pictures that do not move: a sweep over k, recall against its price, and stacked costs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from course_lib.show.picture import Picture
from course_lib.show.style import INK, MUTED, course_style, new_figure
from course_lib.show.text import fmt

_SHADES = ("#4a4a4a", "#f0a830", "#56a7dd", "#b3261e", "#ececec", "#5fc9a8")
_HATCHES = ("", "///", "\\\\\\", "...", "", "xxx")
# Size and dashes too, so that curves on top of each other are all seen.
_LINES = (("o", 10, "solid"), ("s", 7, "dashed"), ("^", 5, "dotted"), ("D", 3, "dashdot"))


def recall_by_k(curves: Mapping[str, Mapping[int | str, float]], *, label: str,
                y: str = "recall") -> Picture:
    """One line per curve over k: `{"exact prefill": {1: 0.02, …, 32: 1.0, "exact": 1.0}}`.

    label: where the numbers are from, one of "quoted", "this machine", "derived", "recorded",
    with what else a reader must know; it stands above the picture. Keys of all curves: k in
    their order, text such as "exact" last. Raises ValueError for curves over different k, and
    for none or more than four.
    """
    if not 1 <= len(curves) <= len(_LINES):
        raise ValueError(f"give 1 to {len(_LINES)} curves, not {len(curves)}.")
    ks = list(next(iter(curves.values())))
    for name, curve in curves.items():
        if list(curve) != ks:
            raise ValueError(f"curve {name!r} has other k than the first one; give all the same.")
    with course_style():
        figure = new_figure(3.4)
        ax = figure.add_axes((0.075, 0.15, 0.9, 0.68))
        look = zip(curves.items(), _LINES, _SHADES, strict=False)
        for (name, curve), (marker, size, dashes), color in look:
            ax.plot(range(len(ks)), list(curve.values()), marker=marker, ms=size, ls=dashes,
                    color=color, mec=INK, label=name, clip_on=False, zorder=3)
        ax.set(ylim=(0, 1.02), xlabel="blocks read, k", ylabel=y)
        ax.set_xticks(range(len(ks)), [str(k) for k in ks])
        ax.grid(axis="y")
        ax.legend(loc="lower right")
        figure.text(0.012, 0.94, label, color=MUTED, va="center")
    width = max(map(len, curves))
    lines = [label, " " * width + "".join(f"{f'k={k}' if isinstance(k, int) else k:>8}"
                                           for k in ks)]
    lines += [f"{name:<{width}}" + "".join(f"{fmt(v):>8}" for v in curve.values())
              for name, curve in curves.items()]
    return Picture(figure, "\n".join(lines))


def recall_against_cost(curves: Mapping[str, Mapping[str, tuple[float, float]]], *, label: str,
                        cost: str, recall: str = "recall") -> Picture:
    """One line per curve through its points (cost, recall), each a share of 0 … 1:
    `{"any": {"τ = 0.5": (0.98, 0.96), …}}`.

    label as for recall_by_k; it should say what the points are, whose names stand in the twin
    only. cost and recall name the axes. Raises ValueError for none or more than four curves.
    """
    if not 1 <= len(curves) <= len(_LINES):
        raise ValueError(f"give 1 to {len(_LINES)} curves, not {len(curves)}.")
    with course_style():
        figure = new_figure(3.8)
        ax = figure.add_axes((0.085, 0.14, 0.89, 0.72))
        look = zip(curves.items(), _LINES, _SHADES, strict=False)
        for (name, points), (marker, size, dashes), color in look:
            x, y = zip(*points.values(), strict=True)
            ax.plot(x, y, marker=marker, ms=size, ls=dashes, color=color, mec=INK, label=name,
                    clip_on=False, zorder=3)
        ax.set(xlabel=cost, ylabel=recall, ylim=(0, 1.02))
        ax.xaxis.set_major_formatter(lambda v, _: f"{100 * v:.0f} %")
        ax.yaxis.set_major_formatter(lambda v, _: f"{100 * v:.0f} %")
        ax.grid()
        ax.legend(loc="lower right")
        figure.text(0.012, 0.945, label, color=MUTED, va="center")
    width = max(map(len, curves))
    lines = [f"{label}: {cost} → {recall}"]
    lines += [f"{name:<{width}}  " + "  ".join(
        f"{text}: {fmt(x)} → {fmt(y)}" for text, (x, y) in points.items())
        for name, points in curves.items()]
    return Picture(figure, "\n".join(lines))


def cost_bars(costs: Mapping[str, Mapping[str, float]], *, label: str, unit: str) -> Picture:
    """One stacked bar per row: `{"exact": {"QK": 1.0, "PV": 1.0}, "k = 32": {"probe": …}}`.

    The parts are stacked in the order in which they first appear; a part that a row lacks is 0.
    label as for recall_by_k. Raises ValueError for no row and for more than six parts.
    """
    parts = list(dict.fromkeys(part for row in costs.values() for part in row))
    names = list(costs)
    if not names or not 1 <= len(parts) <= len(_SHADES):
        raise ValueError(f"give at least one row and 1 to {len(_SHADES)} parts, not {len(parts)}.")
    with course_style():
        figure = new_figure(1.3 + 0.42 * len(names))
        ax = figure.add_axes((0.16, 0.52 / figure.get_figheight(), 0.82,
                              1 - 1.15 / figure.get_figheight()))
        left = np.zeros(len(names))
        for part, color, hatch in zip(parts, _SHADES, _HATCHES, strict=False):
            width = np.array([costs[name].get(part, 0.0) for name in names])
            ax.barh(range(len(names)), width, left=left, height=0.62, color=color, hatch=hatch,
                    edgecolor=INK, linewidth=0.8, label=part)
            left += width
        for at, total in enumerate(left):
            ax.text(total, at, f" {fmt(total)}", va="center")
        ax.set_yticks(range(len(names)), names)
        ax.set(xlabel=unit, xlim=(0, 1.1 * left.max() or 1.0))
        ax.invert_yaxis()
        ax.legend(ncols=len(parts), loc="lower right", bbox_to_anchor=(1.0, 1.0))
        figure.text(0.012, 1 - 0.2 / figure.get_figheight(), label, color=MUTED, va="center")
    room = max(map(len, names))
    lines = [f"{label}, {unit}", " " * room + "".join(f"{p:>12}" for p in [*parts, "total"])]
    for name, total in zip(names, left, strict=True):
        values: Sequence[float] = [*(costs[name].get(part, 0.0) for part in parts), total]
        lines.append(f"{name:<{room}}" + "".join(f"{fmt(v):>12}" for v in values))
    return Picture(figure, "\n".join(lines))
