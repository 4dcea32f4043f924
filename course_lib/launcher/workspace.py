"""The student's folder: copies of the days, git-ignored, never overwritten."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterable
from pathlib import Path

from course_lib.errors import CourseError
from course_lib.launcher.state import CACHE_NAME
from course_lib.paths import NOTEBOOKS, ROOT


def folder() -> Path:
    """Return the folder of the student's copies: `work/` in the checkout, or one in the home
    folder when the checkout is read-only."""
    work = ROOT / "work"
    writable = os.access(work if work.exists() else ROOT, os.W_OK)
    return work if writable else Path.home() / CACHE_NAME


def copy_missing(notebooks: Iterable[Path], work: Path) -> list[Path]:
    """Copy the notebooks that `work` does not hold yet; return the new files.

    An existing file is never touched, and a copy appears whole or not at all. CourseError when
    the folder cannot be written.
    """
    copied = []
    try:
        work.mkdir(parents=True, exist_ok=True)
        for notebook in notebooks:
            target = work / notebook.name
            if not target.exists() and place(notebook, target):
                copied.append(target)
    except OSError as error:
        raise CourseError(f"cannot write to {work} ({error.strerror}); free or unlock it") from None
    return copied


def place(source: Path, target: Path) -> bool:
    """Copy `source` to `target` unless something is there, even if it came this moment."""
    temporary = target.with_name(f".{target.name}.{os.getpid()}")
    try:
        shutil.copyfile(source, temporary)
        try:
            os.link(temporary, target)  # unlike a rename, this never replaces
        except FileExistsError:
            return False
        except OSError:  # a file system without hard links
            if target.exists():
                return False
            os.rename(temporary, target)
        return True
    finally:
        temporary.unlink(missing_ok=True)


def days() -> list[Path]:
    """Return the notebooks of all days, in order."""
    return sorted(NOTEBOOKS.glob("day[0-9][0-9]_*.ipynb"))
