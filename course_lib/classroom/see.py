"""Links from a lesson to lines of source, written as markers so that no line number is typed.

``{see course_lib/quant.py quantize_rows}`` is a function, class or method; ``{see PATH "text"}``
the one line that holds a text, ``{see PATH "first" "last"}`` the lines from one to another, and a
symbol before the texts says where to look. The builder writes the lines that are there now, so the
drift check of a notebook fails when they moved.
"""

from __future__ import annotations

import re
import shlex

from course_lib.classroom.sealed import Lines, symbol_lines
from course_lib.errors import CourseError
from course_lib.paths import ROOT

_MARKER = re.compile(r"\{see\s+([^{}]*)\}")  # a paragraph may break inside one


def expand(markdown: str, where: str) -> str:
    """Return markdown with every ``{see …}`` marker as a link with its line numbers.

    Raises CourseError, naming `where`, for a marker that cannot be read, a path outside the
    course, and a symbol or text that is not there exactly once.
    """
    def link(match: re.Match[str]) -> str:
        try:
            path, first, last = _find(match[1])
        except (CourseError, OSError, ValueError) as error:
            raise CourseError(f"{where}: {match[0]}: {error}") from None
        lines = f"{first}-{last}" if last > first else f"{first}"
        anchor = f"#L{first}-L{last}" if last > first else f"#L{first}"
        return f"[{path}:{lines}](../{path}{anchor})"

    return _MARKER.sub(link, markdown)


def _find(words: str) -> tuple[str, int, int]:
    path, *rest = shlex.split(words)
    target = (ROOT / path).resolve()
    if not target.is_relative_to(ROOT) or not target.is_file():
        raise CourseError("there is no such file in the course")
    quoted = words.count('"') // 2
    symbols, texts = rest[: len(rest) - quoted], rest[len(rest) - quoted:]
    if len(symbols) > 1 or len(texts) > 2 or not rest:
        raise CourseError('write {see PATH symbol}, {see PATH "first" "last"} or both')
    symbol = symbols[0] if symbols else None
    if not texts:
        return path, *symbol_lines(path, str(symbol))
    return path, *Lines(path, texts[0], texts[-1], symbol).find()
