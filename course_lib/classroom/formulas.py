"""LaTeX formulas as MathML, which a browser draws by itself, without a script or a network."""

from __future__ import annotations

import html
import re
from typing import Literal
from xml.etree import ElementTree

# What the converter does not know, and what it draws alike: a sized delimiter that is a command
# (\Big\lfloor), which loses its size, and the environment aligned.
_REWRITTEN = (
    (re.compile(r"\\[bB]igg?[lrm]?\s*(?=\\)"), ""),
    (re.compile(r"\\(begin|end)\{aligned\}"), r"\\\1{align*}"),
)


def mathml(latex: str, display: Literal["inline", "block"] = "inline") -> str:
    """Return a formula as a ``<math>`` element, or its LaTeX source as ``<code>`` where it holds
    something that the converter does not know."""
    from latex2mathml.converter import convert

    known = latex
    for pattern, replacement in _REWRITTEN:
        known = pattern.sub(replacement, known)
    try:
        made = convert(known, display=display)
        text = "".join(ElementTree.fromstring(made).itertext())
    except Exception:  # noqa: BLE001 - the converter's own errors, and those it does not foresee
        text = "\\"
    if "\\" in text:  # an unknown command is passed on as it was written
        return f"<code>{html.escape(latex.strip())}</code>"
    return made
