"""A picture with its text twin, as every front end can show it: PNG for eyes, text for nbval."""

from __future__ import annotations

import base64
import io
from typing import Any

import numpy as np
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from PIL import Image

from course_lib.show.style import course_style

PNG, TEXT = "image/png", "text/plain"


def png_bytes(figure: Figure) -> bytes:
    """The figure as PNG; equal figures give equal bytes (no date, no version inside).

    A palette of 128 colours: a third of the bytes in a notebook, no visible difference.
    """
    canvas = figure.canvas
    if not isinstance(canvas, FigureCanvasAgg):
        canvas = FigureCanvasAgg(figure)
    with course_style():  # ticks are made while drawing
        canvas.draw()
    picture = Image.fromarray(np.asarray(canvas.buffer_rgba())).convert("RGB")
    small = picture.quantize(128, Image.Quantize.FASTOCTREE, dither=Image.Dither.NONE)
    buffer = io.BytesIO()
    small.save(buffer, "PNG")
    return buffer.getvalue()


def base64_text(png: bytes) -> str:
    """PNG bytes as the text that notebooks and data URIs hold."""
    return base64.b64encode(png).decode("ascii")


def bundle(png: bytes, text: str) -> dict[str, Any]:
    """The MIME bundle of a picture and its text twin."""
    return {TEXT: text, PNG: base64_text(png)}


class Picture:
    """A finished figure and the numbers it shows; a cell's last expression.

    A notebook stores the PNG and the text; nbval compares the text. `figure` stays open for
    additions until the picture is first shown.
    """

    def __init__(self, figure: Figure, text: str) -> None:
        self.figure = figure
        self._text = text

    def summary(self) -> str:
        """The numbers of the picture, as text."""
        return self._text

    def __repr__(self) -> str:
        return self._text

    def png(self) -> bytes:
        """The picture as PNG."""
        return png_bytes(self.figure)

    def _repr_mimebundle_(self, **kwargs: Any) -> dict[str, Any]:
        return bundle(self.png(), self._text)
