"""Parts of the C kernels as text, for a lesson that reads them."""

from __future__ import annotations

import re

from course_lib.paths import ROOT

C_FOLDER = ROOT / "kernels_pyx" / "c"


def c_function(file: str, name: str, after: str = "") -> str:
    """Return a C function of ``kernels_pyx/c/<file>``, with the comment that stands above it.

    Taken is the first definition of that name behind the line that holds ``after``: where every
    instruction set has its own, that is its macro. Raises ValueError for a file or a function that
    is not there, so that a lesson cannot point at code that has moved.
    """
    path = C_FOLDER / file
    if path.parent != C_FOLDER or not path.is_file():
        raise ValueError(f"{file!r} is not a file of kernels_pyx/c.")
    lines = path.read_text(encoding="utf-8").splitlines() if name.isidentifier() else []
    defines = re.compile(rf"\w[^;]*\b{re.escape(name)}\(")
    begin = next((i for i, line in enumerate(lines) if after in line), len(lines))
    for first in range(begin, len(lines)):
        if not defines.match(lines[first]):
            continue
        end = next((i for i in range(first, len(lines)) if lines[i].endswith(";") or
                    lines[i].rstrip().endswith(("{", "}"))), None)
        if end is None or lines[end].endswith(";"):
            continue  # a declaration
        if not lines[end].endswith("}"):
            end = lines.index("}", end)
        return "\n".join(lines[_above(lines, first) : end + 1])
    raise ValueError(f"{file} defines no function {name!r}.")


def _above(lines: list[str], first: int) -> int:
    """Return where the comment that ends right above line `first` begins; `first` without one."""
    if first == 0 or not lines[first - 1].endswith("*/"):
        return first
    begin = first - 1
    while begin and "/*" not in lines[begin]:
        begin -= 1
    return begin
