"""Errors in ulp over x, one panel per way to compute, as a picture with its twin."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from course_lib.show.artists import caption
from course_lib.show.picture import Picture
from course_lib.show.style import INK, MUTED, SIDE, course_style, new_figure
from course_lib.show.text import fmt


def ulp_errors(x: np.ndarray, errors: Mapping[str, np.ndarray], *, label: str,
               bound: float = 3.0, edges: Sequence[float] = (-87, -30, -10, -1, 0)) -> Picture:
    """One panel of dots per entry: errors [n] in ulp over x [n]; a band marks ± bound.

    label stands above the picture; the twin gives the largest error between each two `edges`.
    Raises ValueError for none or more than four entries and for other lengths.
    """
    if not 1 <= len(errors) <= 4 or any(len(e) != len(x) for e in errors.values()):
        raise ValueError("give 1 to 4 arrays of errors, each as long as x.")
    with course_style():
        figure = new_figure(0.7 + 1.45 * len(errors))
        axes = figure.subplots(len(errors), 1, sharex=True, squeeze=False)[:, 0]
        figure.subplots_adjust(0.085, 0.5 / figure.get_figheight(), 0.98,
                               1 - 0.6 / figure.get_figheight(), hspace=0.55)
        for ax, (name, error) in zip(axes, errors.items(), strict=True):
            ax.axhspan(-bound, bound, color=SIDE["bound"].color, lw=0)
            ax.axhline(0, color=MUTED, lw=0.8)
            ax.plot(x, error, ".", ms=2, color=SIDE["error"].color)
            reach = 1.12 * max(bound, float(np.abs(error).max()))
            ax.set(xlim=(edges[0], edges[-1]), ylim=(-reach, reach), ylabel="ulp")
            caption(ax, f"{name}: up to {fmt(np.abs(error).max())} ulp")
        axes[-1].set_xlabel("x")
        figure.text(0.012, 1 - 0.2 / figure.get_figheight(),
                    f"{label}; band: ± {fmt(bound)} ulp", color=INK, va="center")
    width = max(map(len, errors))
    ranges = list(zip(edges, edges[1:], strict=False))
    lines = [f"{label}; largest |error| in ulp for x from … to …",
             " " * width + "".join(f"{f'{a:g} … {b:g}':>12}" for a, b in ranges)]
    for name, error in errors.items():
        found = [np.abs(error[(x >= a) & (x <= b)]) for a, b in ranges]
        lines.append(f"{name:<{width}}" + "".join(f"{fmt(e.max()) if e.size else '-':>12}"
                                                  for e in found))
    return Picture(figure, "\n".join(lines))
