"""Truths of source-reading exercises, kept so that they check an answer without showing it.

The plain truth (`Lines`, numbers, words) stands in ``tests/grading/dayNN.py``.
``tools/seal_readings.py`` turns it into digests in ``exercises/sealed/dayNN.json``: a digest of
a cited line covers its text and its two neighbours, so an answer stays right when code above it
moves, and a test says when the cited code itself has changed and must be sealed again.
"""

from __future__ import annotations

import ast
import hashlib
import importlib.util
import json
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from course_lib.classroom import exercises
from course_lib.errors import CourseError
from course_lib.paths import ROOT

PLACE = re.compile(r"\s*([^\s:]+):(\d{1,9})(?:\s*[-–]\s*(\d{1,9}))?\s*")
LEADING = re.compile(r"\A(?:\.\.?/)+")
MAX_FILE = 2**20
MAX_WIDTH = 300
"""Bytes of a file that is read as source, and characters of its lines that are shown."""
NO_SOURCES = {"work", "build", "dist", "tests", "__pycache__"}


@dataclass(frozen=True)
class Lines:
    """Lines of a source file, from the one holding `first` to the one holding `last`.

    `first` and `last` are pieces of one line each, found in exactly one line of `path` (relative
    to the course), or of the function or class `symbol` ("KVCache.append") where given.
    `last` is `first` where not given. An answer must contain these lines.
    """

    path: str
    first: str
    last: str | None = None
    symbol: str | None = None

    def find(self, root: Path = ROOT) -> tuple[int, int]:
        """Return the 1-based (first, last) line numbers; CourseError where not found once."""
        lines = _lines(root / self.path)
        low, high = 1, len(lines)
        if self.symbol is not None:
            low, high = _range(self.path, self.symbol, lines)
        first = _find_once(self, self.first, lines, low, high)
        last = first if self.last is None else _find_once(self, self.last, lines, first, high)
        return first, last


def _lines(path: Path) -> list[str]:
    return path.read_text(encoding="utf-8").splitlines()


def _find_once(target: Lines, text: str, lines: list[str], low: int, high: int) -> int:
    found = [n for n in range(low, high + 1) if text in lines[n - 1]]
    if len(found) != 1:
        where = f"{target.path}" + (f" ({target.symbol})" if target.symbol else "")
        raise CourseError(f"{text!r} is in {len(found)} lines of {where}; it must be in one.")
    return found[0]


def symbol_lines(path: str, symbol: str, root: Path = ROOT) -> tuple[int, int]:
    """Return the 1-based (first, last) lines of a function, class or ``Class.method`` of `path`.

    Raises CourseError where `path` is no Python or has no such symbol, or several.
    """
    return _range(path, symbol, _lines(root / path))


def _range(path: str, symbol: str, lines: list[str]) -> tuple[int, int]:
    try:
        scope: Any = ast.parse("\n".join(lines))
    except SyntaxError as error:
        raise CourseError(f"{path} is not Python: {error.msg}.") from None
    for name in symbol.split("."):
        kinds = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
        found = [n for n in scope.body if isinstance(n, kinds) and n.name == name]
        if len(found) != 1:
            raise CourseError(f"{path} has no {symbol} (or several).")
        scope = found[0]
    return scope.lineno, scope.end_lineno


def seal(item_id: str, part: str, truth: Any, root: Path = ROOT) -> dict[str, Any]:
    """Return the sealed form of one truth.

    `truth` is a number, a word, a bool, `Lines`, a list of `Lines` of which any one is right,
    or a tuple of `Lines` that must all be given, in any order.
    """
    if isinstance(truth, Lines):
        return {"kind": "any", "lines": [_seal_lines(item_id, part, truth, root)]}
    if isinstance(truth, (list, tuple)) and truth and all(isinstance(t, Lines) for t in truth):
        kind = "any" if isinstance(truth, list) else "all"
        return {"kind": kind, "lines": [_seal_lines(item_id, part, t, root) for t in truth]}
    return {"kind": "value", "digest": _digest(item_id, part, _canonical(truth))}


def _seal_lines(item_id: str, part: str, target: Lines, root: Path) -> dict[str, Any]:
    first, last = target.find(root)
    digests = line_digests(item_id, part, target.path, root)
    for number in (first, last):
        if digests.count(digests[number - 1]) != 1:
            raise CourseError(
                f"{target.path}:{number} looks the same as another line with its neighbours; "
                "choose another line."
            )
    return {"first": digests[first - 1], "last": digests[last - 1], "span": last - first + 1}


def line_digests(item_id: str, part: str, path: str, root: Path = ROOT) -> list[str]:
    """Return one digest for every line of a file, over the line and its two neighbours."""
    lines = ["", *(" ".join(line.split()) for line in _lines(root / path)), ""]
    windows = zip(lines, lines[1:], lines[2:], strict=False)
    return [_digest(item_id, part, path, *window) for window in windows]


def _digest(*texts: str) -> str:
    return hashlib.sha256("\0".join(texts).encode("utf-8", "surrogatepass")).hexdigest()[:16]


def _canonical(value: Any) -> str:
    if isinstance(value, bool) or value is None:
        return str(value)
    if isinstance(value, str):
        return " ".join(value.split()).casefold()
    try:
        number = float(value)
    except (TypeError, ValueError, OverflowError):
        return "?"
    return str(int(number)) if number.is_integer() else f"{number:.3g}"


def seal_day(readings: Mapping[str, Mapping[str, Any]], root: Path = ROOT) -> str:
    """Return the JSON text of one day's sealed file."""
    sealed = {
        item_id: {part: seal(item_id, part, truth, root) for part, truth in parts.items()}
        for item_id, parts in sorted(readings.items())
    }
    return json.dumps(sealed, indent=1, ensure_ascii=False) + "\n"


def sealed_path(day: int) -> Path:
    """Return the path of one day's sealed file: ``sealed/`` beside its exercises module."""
    spec = importlib.util.find_spec(f"{exercises.__name__}.day{day:02d}")
    if spec is None or spec.origin is None:
        raise CourseError(f"day {day} has no exercises module.")
    return Path(spec.origin).parent / "sealed" / f"day{day:02d}.json"


def load(item_id: str) -> dict[str, Any]:
    """Return the sealed parts of one item; CourseError where they were never sealed."""
    path = sealed_path(exercises.parse_id(item_id)[0])
    try:
        return json.loads(path.read_text(encoding="utf-8"))[item_id]
    except (OSError, KeyError):
        raise CourseError(f"{item_id} is not sealed; run tools/seal_readings.py.") from None


def is_blank(value: Any) -> bool:
    """True for a part that the learner has not filled in."""
    if isinstance(value, (list, tuple)):
        return all(is_blank(v) for v in value)
    return value is None or (isinstance(value, str) and not value.strip())


def complaint(item_id: str, part: str, value: Any, truth: Mapping[str, Any], slack: int,
              root: Path = ROOT) -> str | None:
    """Return None where one part of a B item is right, else what is wrong, in a few words."""
    if is_blank(value):
        return "still empty"
    if truth["kind"] == "value":
        same = _digest(item_id, part, _canonical(value)) == truth["digest"]
        return None if same else "not this value"
    places = list(value) if isinstance(value, (list, tuple)) else [value]
    if truth["kind"] == "any" and len(places) != 1:
        return 'give one place, "path:first-last"'
    if truth["kind"] == "all" and len(places) != len(truth["lines"]):
        return f"give a list of {len(truth['lines'])} places"
    hit: set[int] = set()
    for place in places:
        wrong = place_problem(place, root)
        if wrong:
            return wrong
        hit.update(_targets_hit(item_id, part, place, truth["lines"], slack, root))
    if truth["kind"] == "any":
        return None if hit else "not these lines"
    missing = len(truth["lines"]) - len(hit)
    return f"{len(hit)} of {len(truth['lines'])} places found" if missing else None


def place_problem(place: Any, root: Path = ROOT) -> str | None:
    """Return None where ``"path:first-last"`` names existing lines of the course, else why not.

    A path written from ``notebooks/`` (``../course_lib/sparse.py``) is right too.
    """
    taken = _take_apart(place)
    if taken is None:
        return 'write it as "path:first-last", such as "course_lib/sparse.py:10-20"'
    name, first, last = taken
    path = root / name
    if ".." in Path(name).parts or Path(name).is_absolute() or not _is_file(path):
        shown = "".join(c if c.isprintable() else "?" for c in name[:80])
        return f"there is no file {shown} in the course{_full_path(name, root)}"
    try:
        if path.stat().st_size > MAX_FILE:
            return f"{name} is too large to be a source file"
        count = len(_lines(path))
    except (OSError, UnicodeError):
        return f"{name} cannot be read as text"
    if not 1 <= first <= last <= count:
        return f"{name} has lines 1 to {count}"
    return None


def place_lines(place: str, context: int, root: Path = ROOT) -> str:
    """The lines of a place, numbered, with some before and after; else what is wrong with it."""
    problem = place_problem(place, root)
    taken = _take_apart(place)
    if problem or taken is None:
        return f"({problem})"
    name, first, last = taken
    lines = _lines(root / name)
    low, high = max(1, first - context), min(len(lines), last + context, first + 200)
    return "\n".join(f"{n:5}{'>' if first <= n <= last else ' '} {lines[n - 1][:MAX_WIDTH]}"
                     for n in range(low, high + 1))


def _is_file(path: Path) -> bool:
    try:
        return path.is_file()
    except (OSError, ValueError):  # a name too long, or of characters no file can have
        return False


def _take_apart(place: Any) -> tuple[str, int, int] | None:
    """The path from the course's folder and the first and last line of a place."""
    match = PLACE.fullmatch(place) if isinstance(place, str) else None
    if match is None:
        return None
    return LEADING.sub("", match[1]), int(match[2]), int(match[3] or match[2])


def _full_path(name: str, root: Path) -> str:
    """A question for a file name without its folder, where one file of the course has it."""
    found = []
    for folder, folders, files in os.walk(root):
        folders[:] = [f for f in folders if f not in NO_SOURCES and not f.startswith(".")]
        if Path(name).name in files:
            found.append((Path(folder) / Path(name).name).relative_to(root).as_posix())
    return f"; did you mean {found[0]}?" if len(found) == 1 else ""


def _targets_hit(item_id, part, place, targets, slack: int, root: Path) -> set[int]:
    taken = _take_apart(place)
    assert taken is not None
    path, first, last = taken
    digests = line_digests(item_id, part, path, root)[first - 1 : last]
    hit = set()
    for index, target in enumerate(targets):
        if target["first"] not in digests or target["last"] not in digests:
            continue
        start, end = digests.index(target["first"]), digests.index(target["last"])
        if start <= slack and len(digests) - 1 - end <= slack:
            hit.add(index)
    return hit

