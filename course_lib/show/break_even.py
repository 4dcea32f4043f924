"""The break-even line of prefill policies: what is read to choose, against what is attended."""

from __future__ import annotations

from collections.abc import Mapping

from course_lib.show.picture import Picture
from course_lib.show.style import GRID, INK, MUTED, PAPER, course_style, new_figure
from course_lib.show.text import fmt

_LETTERS = "ABCDEFGH"


def break_even_plot(points: Mapping[str, tuple[float, float]], *, label: str) -> Picture:
    """Policies as points (kappa, rho), and the line rho = 1 - kappa below which less is read than
    full attention reads.

    points: `{"K alone": (0.5, 0.54), …}`, eight at most. label: where the numbers are from, see
    `plots.recall_by_k`. ValueError for other numbers than 0 to 1.
    """
    if not 1 <= len(points) <= len(_LETTERS):
        raise ValueError(f"give 1 to {len(_LETTERS)} points, not {len(points)}.")
    for name, point in points.items():
        if not all(0 <= x <= 1 for x in point):
            raise ValueError(f"{name!r} must lie between 0 and 1, not at {point}.")
    with course_style():
        figure = new_figure(4.2)
        ax = figure.add_axes((0.08, 0.14, 0.44, 0.72))
        ax.fill([0, 1, 0], [0, 0, 1], color=GRID, zorder=0)
        ax.plot([0, 1], [1, 0], color=INK, lw=1.6)
        ax.text(0.27, 0.18, "reads less\nthan full attention", ha="center", va="center")
        ax.text(0.76, 0.86, "reads more", ha="center", va="center")
        for i, (kappa, rho) in enumerate(points.values()):
            less, left = kappa + rho < 1, i % 2 == 1  # beside each other where points are close
            ax.plot([kappa], [rho], marker="o" if less else "s", ms=9, mec=INK, clip_on=False,
                    mfc=PAPER if less else INK, zorder=3)
            ax.annotate(_LETTERS[i], (kappa, rho), (-9 if left else 9, 0), va="center",
                        textcoords="offset points", ha="right" if left else "left", fontsize=11,
                        weight="bold", annotation_clip=False)
        ax.set(xlim=(0, 1), ylim=(0, 1), xlabel="κ: read to choose", ylabel="ρ: read to attend",
               aspect="equal")
        figure.text(0.012, 0.955, label, color=MUTED, va="center")
        for i, (letter, (name, (kappa, rho))) in enumerate(zip(_LETTERS, points.items(),
                                                               strict=False)):
            figure.text(0.56, 0.82 - 0.085 * i, f"{letter}  {name}: {fmt(kappa)} + {fmt(rho)} = "
                        f"{fmt(kappa + rho)}", va="center")
    width = max(map(len, points))
    lines = [f"{label}; below the line rho = 1 - kappa less is read than full attention reads",
             f"{'':<{width + 3}}{'kappa':>7}{'rho':>7}{'sum':>7}"]
    for letter, (name, (kappa, rho)) in zip(_LETTERS, points.items(), strict=False):
        where = "less" if kappa + rho < 1 else "the same" if kappa + rho == 1 else "more"
        lines.append(f"{letter}  {name:<{width}}{fmt(kappa):>7}{fmt(rho):>7}"
                     f"{fmt(kappa + rho):>7}  {where}")
    return Picture(figure, "\n".join(lines))
