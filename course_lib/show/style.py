"""One look for the pictures of all thirty days: the same meaning has the same colour, letter and
hatch everywhere, so that nothing is told by colour alone and a grey print still reads.

A new meaning is placed in tests/show/test_show_style.py beside those that share its pictures; the
tests there hold for a grey print and for readers without one kind of cone.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager
from typing import NamedTuple

from matplotlib import style
from matplotlib.figure import Figure


class Meaning(NamedTuple):
    """How one idea looks: a letter for small tiles, fill and ink colours, a hatch, its name."""

    letter: str
    color: str
    ink: str
    hatch: str
    label: str


INK = "#1a1a1a"
MUTED = "#6b6b6b"
PAPER = "#ffffff"
GRID = "#d9d9d9"

# Why a block is read or not; the keys are course_lib.sparse.REASONS.
REASON: Mapping[str, Meaning] = {
    "importance": Meaning("I", "#0b4f8a", PAPER, "", "importance"),
    "probe": Meaning("P", "#f0a830", INK, "", "probe"),
    "recency": Meaning("R", "#5fc9a8", INK, "", "recency"),
    "evicted_by_recency": Meaning("E", PAPER, "#b3261e", "////", "evicted by recency"),
    "not_selected": Meaning("·", "#ececec", MUTED, "", "not selected"),
}

# The two sides of a comparison, and kinds of numbers.
SIDE: Mapping[str, Meaning] = {
    "exact": Meaning("x", "#4a4a4a", PAPER, "", "exact"),
    "sparse": Meaning("s", "#f0a830", INK, "///", "block-sparse"),
    "float": Meaning("f", "#4a4a4a", PAPER, "", "float32"),
    "q8": Meaning("q", "#56a7dd", INK, "\\\\\\", "q8"),
    "error": Meaning("e", "#b3261e", PAPER, "", "error"),
    "bound": Meaning("b", "#f7d9d5", INK, "", "bound"),
    "negative": Meaning("−", "#0b4f8a", PAPER, "", "negative values"),
    "positive": Meaning("+", "#f0a830", INK, "///", "positive values"),
    "both": Meaning("±", "#9a9a9a", INK, "...", "both signs"),
    "quoted": Meaning("Q", PAPER, INK, "", "quoted"),
    "this machine": Meaning("M", "#4a4a4a", PAPER, "", "this machine"),
    "derived": Meaning("D", "#cfcfcf", INK, "---", "derived"),
    "recorded": Meaning("C", "#9a9a9a", INK, "...", "recorded"),
}

# A stream of scores, as online softmax reads it.
STREAM: Mapping[str, Meaning] = {
    "read": Meaning("r", "#4a4a4a", PAPER, "", "read"),
    "maximum": Meaning("M", "#f0a830", INK, "///", "new maximum: S and A are rescaled"),
    "to come": Meaning("·", "#ececec", MUTED, "", "to come"),
}

# The parts of a cache's bytes.
BYTES: Mapping[str, Meaning] = {
    "values": Meaning("v", "#0b4f8a", PAPER, "", "values"),
    "scales": Meaning("s", "#f0a830", INK, "///", "scales"),
    "mirror": Meaning("m", "#b9c4cc", INK, "\\\\\\", "float32 mirror"),
}

# Tokens of a text; the letters stand in text twins.
TOKEN: Mapping[str, Meaning] = {
    "text": Meaning("", "#ececec", INK, "", "ordinary token"),
    "merged": Meaning("m", "#5fc9a8", INK, "", "just merged"),
    "differs": Meaning("d", "#f0a830", INK, "///", "differs"),
    "control": Meaning("c", "#0b4f8a", PAPER, "", "control token"),
    "template": Meaning("t", "#b9d7ee", INK, "...", "ordinary token written by the template"),
}

# Neighbouring parts of a context, and what a ring's slots are busy with.
MERGE: Mapping[str, Meaning] = {
    "even": Meaning("", "#0b4f8a", PAPER, "", "parts A, C, E"),
    "odd": Meaning("", "#f0a830", INK, "///", "parts B, D, F"),
    "to come": Meaning("", PAPER, MUTED, "", "to come"),
}
RING: Mapping[str, Meaning] = {
    "load": Meaning("L", "#f0a830", INK, "///", "load"),
    "compute": Meaning("C", "#0b4f8a", PAPER, "", "compute"),
    "handoff": Meaning("h", "#f2b8b5", INK, "xxx", "hand over"),
}

# Why a prefill policy keeps a block of one head's mask, or reads it for all.
PREFILL: Mapping[str, Meaning] = {
    "sink": Meaning("S", "#35196b", PAPER, "", "sink"),
    "diagonal": Meaning("D", "#159078", PAPER, "", "diagonal"),
    "threshold": Meaning("T", "#f0a830", INK, "", "threshold"),
    "budget": Meaning("B", "#f0a830", INK, "", "budget"),
    "vote": Meaning("V", "#f0a830", INK, "", "vote"),
    "safety_first": Meaning("F", "#35196b", PAPER, "", "first, always"),
    "safety_last": Meaning("L", "#159078", PAPER, "", "last, always"),
    "all": Meaning("A", "#9a9a9a", INK, "", "everything"),
    "extra": Meaning("x", "#a01f1a", PAPER, "", "extra"),
    "not_selected": Meaning("·", "#ececec", MUTED, "", "not read"),
}

# Bytes of a block of quantized weights.
BYTE: Mapping[str, Meaning] = {
    "scale": Meaning("s", "#0b4f8a", PAPER, "", "scale d, 16 bits"),
    "code": Meaning("c", "#ececec", INK, "", "codes"),
}

# Kernels under a roofline.
ROOF: Mapping[str, Meaning] = {
    "derived": Meaning("", PAPER, INK, "", "at most"),
    "measured": Meaning("", "#4a4a4a", PAPER, "", "measured"),
    "chosen": Meaning("", "#f0a830", INK, "", "explained"),
}

DPI = 100  # a picture's pixels are screen pixels, so the font sizes below are what one sees
WIDTH = 9.2  # inches: fits the output of a notebook beside an open side bar, 1366 pixels wide

_STYLE = {
    "figure.dpi": DPI,
    "figure.facecolor": PAPER,
    "font.family": ["DejaVu Sans"],  # shipped inside matplotlib: the same on every machine
    "font.size": 10,
    "axes.titlesize": 11,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "axes.labelsize": 10,
    "axes.edgecolor": MUTED,
    "axes.labelcolor": INK,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.axisbelow": True,
    "text.color": INK,
    "xtick.color": INK,
    "ytick.color": INK,
    "xtick.labelsize": 9,
    "ytick.labelsize": 9,
    "grid.color": GRID,
    "legend.frameon": False,
    "legend.fontsize": 9,
    "hatch.linewidth": 0.8,
    "lines.linewidth": 1.6,
}


def course_style() -> AbstractContextManager:
    """The course's look for artists made inside the context, whatever the user's own settings."""
    return style.context(_STYLE, after_reset=True)


def new_figure(height: float, width: float = WIDTH) -> Figure:
    """A figure of `width` × `height` inches that belongs to nobody's list of open figures."""
    return Figure(figsize=(width, height), dpi=DPI, layout=None)
