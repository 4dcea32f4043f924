"""Histograms of quantization errors, in steps, apart by the sign of the value."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from course_lib.show.artists import caption
from course_lib.show.picture import Picture
from course_lib.show.style import INK, MUTED, SIDE, course_style, new_figure
from course_lib.show.text import fmt

_REACH, _BINS = 1.6, 64


def error_histograms(errors: Mapping[str, tuple[Any, Any]], *, label: str) -> Picture:
    """One panel for each name: errors of values and the values, `{"trunc": (errors, values)}`.

    Errors count in steps, between -1.6 and 1.6; negative values' errors are stacked on those of
    positive ones. A dashed line marks the mean over both. The twin prints means by sign and the
    largest magnitude. Raises ValueError for no panel, more than six, and shapes that differ.
    """
    if not 1 <= len(errors) <= 6 or any(np.shape(e) != np.shape(v) for e, v in errors.values()):
        raise ValueError("give 1 to 6 panels, each with one error for each value.")
    edges = np.linspace(-_REACH, _REACH, _BINS + 1)
    with course_style():
        figure = new_figure(2.9)
        axes = figure.subplots(1, len(errors), sharey=True, squeeze=False)[0]
        figure.subplots_adjust(0.075, 0.17, 0.985, 0.72, wspace=0.08)
        for ax, (name, (error, value)) in zip(axes, errors.items(), strict=True):
            _panel(ax, name, np.ravel(error), np.ravel(value), edges)
        axes[0].set_ylabel("share of values")
        figure.legend(*axes[0].get_legend_handles_labels(), ncols=3, loc="upper right",
                      bbox_to_anchor=(0.99, 0.93))
        figure.text(0.012, 0.95, label, color=MUTED, va="center")
    width = max(map(len, errors))
    lines = [label, f"{'':{width}}  mean error of: {'negatives':>10} {'positives':>10} {'both':>8}"
                    f"   max|error|"]
    lines += [f"{name:{width}}  {'':14} {_mean(e, v < 0):>10} {_mean(e, v > 0):>10} "
              f"{_mean(e, v == v):>8} {fmt(np.abs(e).max()):>12}"
              for name, (e, v) in ((n, (np.ravel(e), np.ravel(v))) for n, (e, v) in errors.items())]
    return Picture(figure, "\n".join(lines))


def _mean(error: np.ndarray, where: np.ndarray) -> str:
    """Two decimals: a mean near 0 has no digits that every machine agrees on."""
    return f"{float(error[where].mean()) + 0.0:.2f}".replace("-0.00", "0.00")


def _panel(ax: Any, name: str, error: np.ndarray, value: np.ndarray, edges: np.ndarray) -> None:
    bottom = np.zeros(_BINS)
    middles, width = (edges[:-1] + edges[1:]) / 2, edges[1] - edges[0]
    for sign, where in (("positive", value > 0), ("negative", value < 0)):
        look = SIDE[sign]
        share = np.histogram(error[where], edges)[0] / error.size
        ax.bar(middles, share, width, bottom=bottom, color=look.color, hatch=look.hatch,
               edgecolor=INK, linewidth=0.3, label=look.label)
        bottom += share
    ax.axvline(float(error.mean()), color=SIDE["error"].color, ls=(0, (4, 2)), lw=1.6,
               label="mean of all")
    ax.set(xlim=(-_REACH, _REACH), xlabel="error, steps")
    ax.set_xticks([-1, 0, 1], ["−1", "0", "1"])
    caption(ax, name)
