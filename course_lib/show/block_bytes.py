"""A block of quantized weights, byte by byte: which byte is the scale, which holds which code."""

from __future__ import annotations

from typing import Any

import numpy as np
from matplotlib.patches import Rectangle

from course_lib.show.picture import Picture
from course_lib.show.style import BYTE, INK, MUTED, WIDTH, course_style, new_figure
from course_lib.show.text import fmt
from course_lib.weight_blocks import BLOCK, BLOCK_BYTES, Kind, split_blocks

_PER_LINE, _CELL, _LINE = 18, 0.49, 0.72  # cells beside each other, inches of a cell and of a line


def block_bytes(block: Any, kind: Kind) -> Picture:
    """One block, uint8 [bytes of a block], as a row of bytes.

    Under each byte stands what it holds: a half of the scale d, or the elements whose codes are in
    it (Q4_0: high four bits above low). The twin prints bytes, scale and codes. Raises what
    split_blocks raises.
    """
    block = np.asarray(block)
    scales, codes = split_blocks(block[None], kind)
    labels = _labels(kind)
    lines = -(-len(block) // _PER_LINE)
    height = 0.75 + lines * _LINE
    with course_style():
        figure = new_figure(height)
        ax = figure.add_axes((0, 0, 1, 1))
        ax.set(xlim=(0, WIDTH), ylim=(0, height))
        ax.axis("off")
        ax.text(0.11, height - 0.2, _title(kind, scales), color=MUTED, va="center",
                parse_math=False)
        _legend(ax, kind, height - 0.5)
        for i, byte in enumerate(block):
            x = 0.11 + _CELL * (i % _PER_LINE)
            y = height - 0.98 - _LINE * (i // _PER_LINE)
            _cell(ax, x, y, int(byte), labels[i], "scale" if i < 2 else "code")
    return Picture(figure, _twin(block, kind, scales, codes))


def _labels(kind: Kind) -> list[str]:
    codes = [str(j) for j in range(32)] if kind == "q8_0" else [
        f"{j + 16}\n{j}" for j in range(16)]
    return ["d", "d", *codes]


def _title(kind: Kind, scales: np.ndarray) -> str:
    return (f"{kind.upper()}: {BLOCK_BYTES[kind]} bytes for {BLOCK} numbers, "
            f"d = {fmt(scales[0, 0])}")


def _legend(ax: Any, kind: Kind, y: float) -> None:
    under = "element" if kind == "q8_0" else "elements: high four bits above, low four bits below"
    for name, x in (("scale", 0.11), ("code", 2.4)):
        look = BYTE[name]
        ax.add_patch(Rectangle((x, y - 0.07), 0.22, 0.15, facecolor=look.color, edgecolor=INK,
                               linewidth=0.8, hatch=look.hatch))
        ax.text(x + 0.28, y, look.label, va="center", fontsize=9)
    ax.text(4.1, y, f"under a byte: its {under}", va="center", fontsize=9, color=MUTED)


def _cell(ax: Any, x: float, y: float, byte: int, label: str, kind: str) -> None:
    look = BYTE[kind]
    ax.add_patch(Rectangle((x, y), _CELL - 0.05, 0.27, facecolor=look.color, edgecolor=INK,
                           linewidth=0.8, hatch=look.hatch))
    ax.text(x + (_CELL - 0.05) / 2, y + 0.13, f"{byte:02x}", color=look.ink, ha="center",
            va="center", family="DejaVu Sans Mono", fontsize=10)
    ax.text(x + (_CELL - 0.05) / 2, y - 0.04, label, color=MUTED, ha="center", va="top",
            fontsize=8, linespacing=1.05)


def _twin(block: np.ndarray, kind: Kind, scales: np.ndarray, codes: np.ndarray) -> str:
    lines = [_title(kind, scales),
             f"bytes 0-1: {block[0]:02x} {block[1]:02x} = d as float16, low byte first"]
    if kind == "q8_0":
        lines.append("bytes 2-33, codes 0-31: "
                     + " ".join(str(c) for c in codes[0, 0].view(np.int8)))
    else:
        lines.append("bytes 2-17: " + " ".join(f"{b:02x}" for b in block[2:]))
        lines.append("low four bits, codes 0-15:   " + " ".join(str(b & 15) for b in codes[0, 0]))
        lines.append("high four bits, codes 16-31: " + " ".join(str(b >> 4) for b in codes[0, 0]))
    return "\n".join(lines)
