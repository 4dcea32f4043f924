"""Which query head reads which KV head, as a picture."""

from __future__ import annotations

from course_lib.arrays import positive_int
from course_lib.attention_common import kv_head
from course_lib.show.picture import Picture
from course_lib.show.style import INK, PAPER, course_style, new_figure

_FILLS = ("#0b4f8a", "#f0a830", "#5fc9a8", "#b9c4cc")
_INKS = (PAPER, INK, INK, INK)


def head_map(num_heads: int, num_kv_heads: int) -> Picture:
    """Query heads above, KV heads below, a line from each query head to what it reads.

    Raises ValueError for more than 32 query heads and where they do not divide over the KV heads.
    """
    heads, shared = positive_int(num_heads, "num_heads"), positive_int(num_kv_heads, "num_kv_heads")
    if heads > 32 or heads % shared:
        raise ValueError(f"{heads} query heads over {shared} KV heads cannot be drawn; up to 32 "
                         "query heads, a whole number for each KV head.")
    reads = [kv_head(h, heads, shared) for h in range(heads)]
    group = heads // shared
    with course_style():
        figure = new_figure(2.3)
        ax = figure.add_axes((0.01, 0.02, 0.98, 0.96))
        ax.set(xlim=(-2.4, heads - 0.4), ylim=(-0.45, 1.45))
        ax.axis("off")
        for y, name in ((1, "query heads"), (0, "KV heads")):
            ax.text(-2.3 if heads > 8 else -1.2, y, name, va="center", ha="left", weight="bold")
        if heads <= 8:
            ax.set_xlim(-1.25, heads - 0.4)
        for kh in range(shared):
            middle, look = group * kh + (group - 1) / 2, kh % len(_FILLS)
            box = {"boxstyle": "round,pad=0.4", "fc": _FILLS[look], "ec": INK}
            ax.text(middle, 0, str(kh), ha="center", va="center", color=_INKS[look], bbox=box,
                    fontsize=11, weight="bold", zorder=3)
            for h in range(group * kh, group * (kh + 1)):
                ax.plot((h, middle), (1, 0), color=INK, lw=1.2, zorder=1)
                ax.text(h, 1, str(h), ha="center", va="center", color=_INKS[look], bbox=box,
                        fontsize=11, zorder=3)
    lines = [f"{heads} query heads, {shared} KV heads, {group} query heads share each"]
    lines += [f"KV head {kh} is read by query heads "
              + ", ".join(str(h) for h in range(heads) if reads[h] == kh) for kh in range(shared)]
    return Picture(figure, "\n".join(lines))
