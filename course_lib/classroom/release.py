"""The student's edition: the course without solutions, hidden cases and the tests of grading."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

from course_lib.errors import CourseError
from course_lib.paths import ROOT

KEPT_BACK = ("tests/solutions", "tests/grading", "tests/submissions", "docs/instructors.md")
"""What only the instructor's edition has: paths from the course's folder."""

PRODUCT = {"notebooks", "course_lib", "kernels_pyx", "data", "tests", "tools", "docs", "course",
           "README.md", "CONTRIBUTING.md", "LICENSE", "LICENSE-lessons", "environment.yml",
           "constraints.txt", "pyproject.toml", "setup.py", ".ci", ".gitignore"}
"""What the course has at its top. Whatever else lies there, such as submissions and their marks, is
somebody's own."""

NEVER = {".git", ".venv", "work", "build", "dist", "__pycache__", ".ipynb_checkpoints"}


def course_files(root: Path = ROOT) -> list[Path]:
    """Every file of the course, relative to its folder: those that git knows, or, without git,
    those in no folder that a run makes."""
    try:
        listed = subprocess.run(["git", "-C", str(root), "ls-files", "-z"], capture_output=True,
                                check=True).stdout
        names = [os.fsdecode(name) for name in listed.split(b"\0") if name]
        files = [Path(name) for name in names if (root / name).is_file()]
    except (OSError, subprocess.CalledProcessError):
        files = []
    if files:
        return sorted(path for path in files if path.parts[0] in PRODUCT)
    found: list[Path] = []
    for folder, folders, names in os.walk(root):
        folders[:] = [f for f in folders if f not in NEVER and not f.startswith(".venv")]
        found += [Path(folder, name).relative_to(root) for name in names
                  if not name.endswith((".so", ".pyc"))]
    return sorted(path for path in found if path.parts[0] in PRODUCT)


def release(target: Path, root: Path = ROOT) -> int:
    """Copy the student's edition to `target`, a new or empty folder; return the number of files.

    It appears whole or not at all. Raises CourseError for a folder that holds something or lies
    inside the course, and where it cannot be written.
    """
    target = Path(os.path.abspath(target))
    if target.resolve().is_relative_to(root):
        raise CourseError(f"release: {target} lies inside the course; name a folder outside it.")
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise CourseError(f"release: {target} is not empty; name a new folder.")
    begun = target.with_name(f".{target.name}.{os.getpid()}")
    files = [path for path in course_files(root) if not kept_back(path)]
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        for path in files:
            (begun / path).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(root / path, begun / path, follow_symlinks=False)
        readme = begun / "README.md"
        if readme.is_file():
            readme.write_text(for_students(readme.read_text(encoding="utf-8")), encoding="utf-8")
        if target.exists():
            target.rmdir()
        begun.rename(target)
    except OSError as error:
        raise CourseError(f"release: cannot write {target} ({error.strerror}).") from None
    finally:
        shutil.rmtree(begun, ignore_errors=True)
    return len(files)


def for_students(readme: str) -> str:
    """The README without the rows of its tables that link to what is kept back."""
    return "".join(line for line in readme.splitlines(keepends=True)
                   if not (line.startswith("|") and any(f"]({kept}" in line for kept in KEPT_BACK)))


def kept_back(path: Path) -> bool:
    """Whether a file is the instructor's only."""
    return any(path.as_posix() == kept or path.as_posix().startswith(kept + "/")
               for kept in KEPT_BACK)
