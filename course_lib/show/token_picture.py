"""One token's path through a model as a picture: what is computed, in which shape, and where the
KV cache is written and read."""

from __future__ import annotations

from collections.abc import Sequence

from matplotlib.axes import Axes
from matplotlib.patches import FancyBboxPatch, Rectangle

from course_lib.lab.token_path import Stage
from course_lib.show.picture import Picture
from course_lib.show.style import INK, MUTED, PAPER, course_style, new_figure
from course_lib.show.text import drawable

# Fill and hatch: what is stored for good, what is kept in the cache, what lives for one token.
STORED, KEPT, PASSING = ("#cfcfcf", "---"), ("#f0a830", "///"), (PAPER, "")
_ROAD, _TOP, _CACHE = 0.6, 2.2, 3.75
_HEIGHT, _WIDTH = 0.72, 1.0
# Where each stage stands: column and row.
_PLACES = {
    "norm": (2.35, _TOP), "qkv": (3.5, _TOP), "rotate": (4.65, _TOP), "scores": (5.8, _TOP),
    "weights": (6.95, _TOP), "context": (8.1, _TOP), "inner": (9.9, _TOP),
}


def token_path_picture(stages: Sequence[Stage], token: str, best: str) -> Picture:
    """The path of one token (`stages` of `token_path`), from its text to the best next token.

    One layer is drawn, the first; the others have the same shapes. The twin lists every stage.
    """
    layers = 1 + max(stage.layer for stage in stages if stage.layer is not None)
    shapes = {s.name: list(s.values.shape) for s in stages if not s.layer}
    with course_style():
        figure = new_figure(4.3)
        ax = figure.add_axes((0.0, 0.0, 1.0, 1.0))
        ax.set(xlim=(-0.6, 13.6), ylim=(-0.85, 5.1))
        ax.axis("off")
        ax.add_patch(Rectangle((1.75, -0.02), 9.15, 4.5, fill=False, ec=MUTED, ls=(0, (4, 3))))
        ax.text(1.85, 4.62, f"one of {layers} layers, all alike", color=MUTED, va="bottom")
        ax.text(5.8, 1.62, "attention: looks at other tokens", ha="center", va="top",
                color=MUTED, fontsize=9)
        ax.text(9.9, 2.68, "MLP: this\ntoken alone", ha="center", va="bottom", color=MUTED,
                fontsize=9)
        _road(ax, shapes, token, best)
        for name, (x, y) in _PLACES.items():
            _box(ax, x, y, name, shapes[name], PASSING)
        _cache(ax, shapes["cache"])
        _arrows(ax)
    lines = [f"{_where(stage):9} {stage.name:11} {list(stage.values.shape)}" for stage in stages
             if not stage.layer]
    more = f"layers 1 to {layers - 1}: the same shapes" if layers > 1 else "one layer"
    lines.insert(len(lines) - 2, more)
    return Picture(figure, "\n".join([f"token {token!r}", *lines, f"best next token {best!r}"]))


def _where(stage: Stage) -> str:
    return "" if stage.layer is None else f"layer {stage.layer}"


def _box(ax: Axes, x: float, y: float, name: str, shape: Sequence[int] | str,
         look: tuple[str, str], width: float = _WIDTH) -> None:
    """A box around (x, y) with a name and a shape."""
    color, hatch = look
    ax.add_patch(FancyBboxPatch((x - width / 2, y - _HEIGHT / 2), width, _HEIGHT, fc=color,
                                ec=INK, lw=1.0, boxstyle="round,pad=0,rounding_size=0.08"))
    if hatch:  # a stripe, so that letters stand on plain paper
        ax.add_patch(Rectangle((x - width / 2 + 0.05, y - _HEIGHT / 2 + 0.05), width - 0.1, 0.1,
                               fc=PAPER, ec=INK, hatch=hatch, lw=0.5))
    ax.text(x, y + 0.13, name, ha="center", va="center", weight="bold", fontsize=9)
    text = shape if isinstance(shape, str) else " × ".join(str(n) for n in shape)
    ax.text(x, y - (0.1 if hatch else 0.14), text, ha="center", va="center", fontsize=9)


def _road(ax: Axes, shapes: dict[str, list[int]], token: str, best: str) -> None:
    """The row of numbers x that every stage reads from and adds to, left to right."""
    ax.plot((0.0, 13.0), (_ROAD, _ROAD), color=INK, lw=3, zorder=0, solid_capstyle="butt")
    ax.text(4.7, _ROAD - 0.14, f"x: one row of {shapes['embed'][0]} numbers, passed on from layer "
            "to layer", ha="center", va="top", fontsize=9)
    _box(ax, -0.02, _ROAD, "token", drawable(repr(token)), PASSING)
    _box(ax, 1.15, _ROAD, "embed", shapes["embed"], STORED)
    _box(ax, 11.62, _ROAD, "final_norm", shapes["final_norm"], PASSING, 1.28)
    _box(ax, 12.95, _ROAD, "logits", shapes["logits"], PASSING)
    ax.annotate("", (12.95, 2.0), (12.95, _ROAD + _HEIGHT / 2), arrowprops=_arrow())
    ax.text(12.95, 2.1, f"largest:\n{drawable(repr(best))}", ha="center", va="bottom",
            weight="bold")
    for x, name in ((8.8, "attention"), (10.55, "mlp")):
        ax.plot(x, _ROAD, "o", ms=15, color=PAPER, mec=INK, zorder=3)
        ax.text(x, _ROAD - 0.015, "+", ha="center", va="center", weight="bold", zorder=4)
        ax.text(x, _ROAD - 0.42, name, ha="center", va="center", fontsize=9, weight="bold")
    legend = (("stored in the model file", STORED), ("kept: the KV cache", KEPT),
              ("gone after this token", PASSING))
    for place, (text, (color, hatch)) in enumerate(legend):
        x = 0.1 + 4.3 * place
        ax.add_patch(Rectangle((x, -0.72), 0.32, 0.24, fc=color, ec=INK, hatch=hatch or None,
                               lw=0.8))
        ax.text(x + 0.45, -0.6, text, va="center", fontsize=9)


def _cache(ax: Axes, shape: Sequence[int]) -> None:
    kv_heads, rows, d = shape
    _box(ax, 5.8, _CACHE, "cache: K and V of this layer",
         f"each {kv_heads} × {rows} × {d}; the last row is this token's", KEPT, 4.9)


def _arrow() -> dict[str, object]:
    return {"arrowstyle": "-|>", "color": INK, "lw": 1.2, "shrinkA": 0, "shrinkB": 0}


def _arrows(ax: Axes) -> None:
    half, up, down = _WIDTH / 2, _TOP + _HEIGHT / 2, _TOP - _HEIGHT / 2
    chain = ["norm", "qkv", "rotate", "scores", "weights", "context"]
    lines = [((_PLACES[a][0] + half, _TOP), (_PLACES[b][0] - half, _TOP))
             for a, b in zip(chain, chain[1:], strict=False)]
    lines += [((2.35, _ROAD), (2.35, down)), ((8.8, _TOP), (8.8, _ROAD + 0.2)),
              ((9.6, _ROAD), (9.6, down)), ((10.55, _TOP), (10.55, _ROAD + 0.2))]
    for begin, end in lines:
        ax.annotate("", end, begin, arrowprops=_arrow())
    ax.plot((8.1 + half, 8.8), (_TOP, _TOP), color=INK, lw=1.2)
    ax.plot((9.9 + half, 10.55), (_TOP, _TOP), color=INK, lw=1.2)
    base = _CACHE - _HEIGHT / 2
    for x, low, high, text, side in ((4.65, up, base, "write K, V", "right"),
                                     (5.8, base, up, "read K", "left"),
                                     (8.1, base, up, "read V", "left")):
        ax.annotate("", (x, high), (x, low), arrowprops=_arrow())
        ax.text(x + (0.08 if side == "left" else -0.08), (up + base) / 2, text, va="center",
                ha=side, fontsize=9, weight="bold")
