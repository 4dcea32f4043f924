"""The days' notebooks and the student's folder: copies, git-ignored, never overwritten."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterable
from pathlib import Path

from course_lib.errors import CourseError
from course_lib.launcher.state import CACHE_NAME
from course_lib.paths import NOTEBOOKS, ROOT


def folder() -> Path:
    """Return the folder of the student's copies: `work/` in the checkout, or, when the checkout is
    read-only, in a folder of the home folder."""
    work = ROOT / "work"
    writable = os.access(work if work.exists() else ROOT, os.W_OK)
    return work if writable else Path.home() / CACHE_NAME / "work"


def link_sources(work: Path) -> None:
    """Let `../course_lib/…` and the like of a copy lead somewhere: where `work` is not in the
    checkout, put links to what the checkout holds beside it.

    Links of an earlier checkout are renewed; anything else of that name is left alone.
    """
    if work.parent == ROOT:
        return
    try:
        for source in ROOT.iterdir():
            link = work.parent / source.name
            if source.name.startswith(".") or source.name == work.name:
                continue
            if link.is_symlink() and link.readlink() != source:
                link.unlink()
            if not link.exists():
                link.symlink_to(source)
    except OSError as error:
        raise CourseError(
            f"cannot write to {work.parent} ({error.strerror}); free or unlock it"
        ) from None


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


def reset(notebook: Path, work: Path, now: str) -> Path | None:
    """Put a fresh copy of `notebook` in the place of the student's, which moves to
    `work/backup/`; return where it is now, None where there was none.

    `now` goes into the backup's name. The old copy is never lost: it is moved first, and two resets
    in one second get two names. CourseError when the folder cannot be written.
    """
    target = work / notebook.name
    kept = None
    try:
        if target.exists():
            backup = work / "backup"
            backup.mkdir(exist_ok=True)
            kept = backup / f"{notebook.stem}-{now}.ipynb"
            for number in range(2, 1000):
                if not kept.exists():
                    break
                kept = backup / f"{notebook.stem}-{now}-{number}.ipynb"
            os.rename(target, kept)
        copy_missing([notebook], work)
    except OSError as error:
        raise CourseError(f"cannot write to {work} ({error.strerror}); free or unlock it") from None
    return kept


def trust_unchanged(notebooks: Iterable[Path], work: Path) -> None:
    """Sign the copies that are still as the course ships them, so that Jupyter shows their stored
    outputs; what a student changed is signed by Jupyter when it is saved there."""
    import nbformat
    from nbformat.sign import NotebookNotary

    notary = NotebookNotary()
    for notebook in notebooks:
        content = notebook.read_bytes()
        copy = work / notebook.name
        if copy.is_file() and copy.read_bytes() == content:
            notary.sign(nbformat.reads(content.decode("utf-8"), as_version=4))


def days(folder: Path = NOTEBOOKS) -> list[Path]:
    """Return the notebooks of all days, in order."""
    return sorted(folder.glob("day[0-9][0-9]_*.ipynb"))


def find_notebook(day: int, folder: Path = NOTEBOOKS) -> Path:
    """Return the notebook of a day; CourseError naming the days there are where it is not."""
    there = {int(path.name[3:5]): path for path in days(folder)}
    if day not in there:
        known = ", ".join(map(str, there)) or "none"
        raise CourseError(f"there is no notebook for day {day}; days there are: {known}.")
    return there[day]
