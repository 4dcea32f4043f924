"""Text from a model or server, as one line of a table."""

from __future__ import annotations


def shown(text: str) -> str:
    """`text` on one line: a line end as ⏎, what a terminal would obey as a dot."""
    return "".join("⏎" if c == "\n" else c if c.isprintable() else "·" for c in text)
