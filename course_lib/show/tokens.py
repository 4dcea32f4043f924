"""Pictures of tokens: rows of boxes, one a token, as a text is cut or as merges go on."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from matplotlib.patches import Rectangle

from course_lib.show.picture import Picture
from course_lib.show.style import INK, MUTED, TOKEN, WIDTH, course_style, new_figure

_CHAR, _PAD, _GAP = 0.092, 0.11, 0.04  # inches: a letter at 10 points, inside and between boxes
_ROW, _LINE = 0.62, 0.5
_BARE = 0.2  # saved where nothing stands under the boxes
_VISIBLE = str.maketrans({" ": "␣", "\n": "↵", "Ġ": "␣", "Ċ": "↵"})


class Token(NamedTuple):
    """One box: text, what stands under it (an id), and its kind, a key of style.TOKEN."""

    text: str
    below: str = ""
    kind: str = "text"


def visible(text: str) -> str:
    """The text with ␣ for a space and ↵ for a newline, byte-level spellings of them included."""
    return text.translate(_VISIBLE)


def token_rows(rows: Sequence[tuple[str, Sequence[Token]]], *, label: str) -> Picture:
    """One row of boxes for each (name, tokens); a long row goes on below.

    Kinds differ by colour and by hatch or weight of the letters; the legend names those that
    occur. The twin prints every row. Raises ValueError for no row and for an unknown kind.
    """
    kinds = [kind for kind in TOKEN if any(t.kind == kind for _, row in rows for t in row)]
    unknown = {t.kind for _, row in rows for t in row} - set(TOKEN)
    if not rows or unknown:
        raise ValueError(f"give at least one row, of kinds {', '.join(TOKEN)}, not {unknown}.")
    left = 0.25 + 0.085 * max(len(name) for name, _ in rows)
    placed = [(name, _lines(row, WIDTH - left - 0.15)) for name, row in rows]
    save = 0.0 if any(t.below for _, row in rows for t in row) else _BARE
    height = 0.85 + sum(_ROW + _LINE * (len(lines) - 1) - save * len(lines) for _, lines in placed)
    with course_style():
        figure = new_figure(height)
        ax = figure.add_axes((0, 0, 1, 1))
        ax.set(xlim=(0, WIDTH), ylim=(0, height))
        ax.axis("off")
        ax.text(0.11, height - 0.2, label, color=MUTED, va="center")
        _legend(ax, kinds, height - 0.5)
        y = height - 0.75
        for name, lines in placed:
            ax.text(0.11, y - 0.15, name, va="center", fontsize=9)
            for line in lines:
                for x, width, token in line:
                    _box(ax, left + x, y, width, token)
                y -= _LINE - save
            y -= _ROW - _LINE
    return Picture(figure, "\n".join([label, *(_twin(name, row) for name, row in rows)]))


def _lines(row: Sequence[Token], room: float) -> list[list[tuple[float, float, Token]]]:
    """(x, width, token) of every box, in as many lines as the room asks for."""
    lines: list[list[tuple[float, float, Token]]] = [[]]
    x = 0.0
    for token in row:
        width = _PAD + max(_CHAR * len(visible(token.text)), 0.07 * len(token.below))
        if lines[-1] and x + width > room:
            lines.append([])
            x = 0.0
        lines[-1].append((x, width, token))
        x += width + _GAP
    return lines


def _box(ax, x: float, y: float, width: float, token: Token) -> None:
    look = TOKEN[token.kind]
    ax.add_patch(Rectangle((x, y - 0.27), width, 0.25, facecolor=look.color, edgecolor=INK,
                           linewidth=0.8, hatch=look.hatch))
    ax.text(x + width / 2, y - 0.155, visible(token.text), color=look.ink, ha="center",
            va="center", family="DejaVu Sans Mono", fontsize=9,
            bbox={"facecolor": look.color, "edgecolor": "none", "pad": 0.6} if look.hatch else None)
    ax.text(x + width / 2, y - 0.36, token.below, color=MUTED, ha="center", va="center", fontsize=8)


def _legend(ax, kinds: Sequence[str], y: float) -> None:
    x = 0.11
    for kind in kinds:
        look = TOKEN[kind]
        ax.add_patch(Rectangle((x, y - 0.07), 0.22, 0.15, facecolor=look.color, edgecolor=INK,
                               linewidth=0.8, hatch=look.hatch))
        ax.text(x + 0.28, y, look.label, va="center", fontsize=9)
        x += 0.5 + 0.078 * len(look.label)


def _twin(name: str, row: Sequence[Token]) -> str:
    marks = [TOKEN[t.kind].letter for t in row]
    cells = (visible(t.text) + (f":{t.below}" if t.below else "") + (f"[{m}]" if m else "")
             for t, m in zip(row, marks, strict=True))
    return f"{name}: " + " ".join(cells)
