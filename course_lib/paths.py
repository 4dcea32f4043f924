"""Where the course's own files are, found from this package's place, never from the
working folder."""

from __future__ import annotations

import os
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
DATA = Path(os.environ.get("COURSE_DATA") or ROOT / "data").resolve()
MODELS = DATA / "models"
RUNS = DATA / "runs"
PUBLISHED = DATA / "published"
FONTS = DATA / "fonts"
NOTEBOOKS = ROOT / "notebooks"
SOURCES = NOTEBOOKS / "src"


def relative(path: str | os.PathLike[str]) -> str:
    """Return `path` as shown to a reader: relative to the course where it lies inside it.

    Messages and outputs must not carry the absolute path of one machine (engine rule: lint).
    """
    resolved = Path(path).resolve()
    try:
        return resolved.relative_to(ROOT).as_posix()
    except ValueError:
        return resolved.name
