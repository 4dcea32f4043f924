"""Packages that only a maintainer's tool needs: the extras of pyproject.toml."""

from __future__ import annotations

import sys
from importlib.util import find_spec


def need(extra: str, *packages: str) -> None:
    """End the program with one line and code 2 where a package of `extra` is not installed."""
    for package in packages:
        if find_spec(package) is None:
            print(f"course: {package} is not installed; in the course's folder: "
                  f"pip install '.[{extra}]'", file=sys.stderr)
            raise SystemExit(2)
