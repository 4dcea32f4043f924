"""Numbers as lessons print them."""

from __future__ import annotations


def fmt(x: float) -> str:
    """Three significant digits: what every backend agrees on; a minus sign only on what shows."""
    text = f"{float(x):.3g}"
    return "0" if text == "-0" else text


def percent(share: float) -> str:
    """A share 0 … 1 in percent with one decimal."""
    return f"{100 * float(share):.1f} %"


def plural(count: int, noun: str) -> str:
    """"1 block", "2 blocks"."""
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"


def drawable(text: str) -> str:
    """Generated text on one line, with � for what the pictures' font may lack.

    The font of every picture surely has Latin letters; a missing glyph would be a warning.
    """
    line = " ".join(text.split())
    return "".join(c if c.isprintable() and ord(c) < 0x180 else "�" for c in line)


def size_text(count: float) -> str:
    """Bytes as whole bytes up to 100,000, beyond that in kB, MB, GB (powers of ten)."""
    if count < 100_000:
        return f"{int(count):,} B"
    if count < 999.5e3:
        return f"{count / 1e3:.3g} kB"
    if count < 999.5e6:
        return f"{count / 1e6:.3g} MB"
    return f"{count / 1e9:.3g} GB" if count < 999.5e9 else f"{count / 1e9:,.0f} GB"
