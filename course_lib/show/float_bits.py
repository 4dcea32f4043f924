"""The bits of a number in f32, bf16 and f16, one under the other."""

from __future__ import annotations

import numpy as np
from matplotlib.patches import Rectangle

from course_lib.half_floats import f32_to_half, half_to_f32
from course_lib.show.picture import Picture
from course_lib.show.style import INK, MUTED, PAPER, course_style, new_figure

# Parts of a number: name, fill, hatch.
SIGN, EXPONENT, FRACTION = (("sign", "#5fc9a8", "xxx"), ("exponent", "#f0a830", "///"),
                            ("fraction", PAPER, ""))
WIDTHS = {"f32": (1, 8, 23), "bf16": (1, 8, 7), "f16": (1, 5, 10)}


def bit_text(value: float, kind: str) -> str:
    """Sign, exponent and fraction of the float32 nearest to `value`, rounded to `kind`."""
    x = np.float32(value)
    if kind == "f32":
        whole = f"{int(x.view(np.uint32)):032b}"
    else:
        whole = f"{int(f32_to_half(x, kind)[0]):016b}"
    sign, exponent, _ = WIDTHS[kind]
    return f"{whole[:sign]} {whole[sign : sign + exponent]} {whole[sign + exponent :]}"


def float_bits(value: float) -> Picture:
    """One number in the three formats, bit for bit, with the value that each really holds."""
    lines = []
    with course_style():
        figure = new_figure(2.5)
        ax = figure.add_axes((0.0, 0.0, 1.0, 1.0))
        ax.set(xlim=(-2.4, 41.5), ylim=(-0.6, 5.0))
        ax.axis("off")
        for row, kind in enumerate(WIDTHS):
            parts = bit_text(value, kind).split()
            x = np.float32(value)
            held = float(x if kind == "f32" else half_to_f32(f32_to_half(x, kind)[0], kind))
            lines.append(f"{kind:>4}  {' '.join(parts):34} = {held!r}")
            y, at = 3.2 - 1.35 * row, 0
            ax.text(-0.4, y + 0.45, kind, ha="right", va="center", weight="bold")
            for bits, (_, color, hatch) in zip(parts, (SIGN, EXPONENT, FRACTION), strict=True):
                for bit in bits:
                    ax.add_patch(Rectangle((at, y), 1, 0.9, fc=color, ec=INK, lw=0.7))
                    ax.add_patch(Rectangle((at, y), 1, 0.14, fc=PAPER, ec=INK, lw=0.4,
                                           hatch=hatch or None))
                    ax.text(at + 0.5, y + 0.5, bit, ha="center", va="center", fontsize=9)
                    at += 1
            ax.text(at + 0.4, y + 0.45, f"= {held:.9g}", va="center", fontsize=9)
        for place, (name, color, hatch) in enumerate((SIGN, EXPONENT, FRACTION)):
            x0 = 18.0 + 5.6 * place
            ax.add_patch(Rectangle((x0, -0.25), 1, 0.45, fc=color, ec=INK, lw=0.7,
                                   hatch=hatch or None))
            ax.text(x0 + 1.3, -0.03, name, va="center", fontsize=9)
        ax.plot((16, 16), (0.3, 4.35), color=MUTED, ls=(0, (4, 3)), lw=1.2)
        ax.text(16, 4.4, "the first 16 bits", ha="center", va="bottom", color=MUTED, fontsize=9)
    return Picture(figure, "\n".join(lines))
