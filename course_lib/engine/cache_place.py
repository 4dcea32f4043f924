"""Where files of packed weights lie, and how one is written: whole or not at all."""

from __future__ import annotations

import errno
import fcntl
import hashlib
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from course_lib.errors import CourseError

VARIABLE = "COURSE_CACHE"
OFF = "off"
UNFINISHED = ".unfinished"
SPARE = 1 << 24  # bytes that stay free on the disk


def places(source: Path, kind: str) -> list[Path]:
    """The files that may hold the weights of the checkpoint at `source`, best first; none if off.

    Beside the checkpoint, so that it is used by all of a machine and goes when the checkpoint
    goes; or, where that folder cannot be written, in the user's cache folder. COURSE_CACHE names
    another folder, or is "off".
    """
    setting = os.environ.get(VARIABLE, "").strip()
    if setting.lower() == OFF:
        return []
    folder, name = source, f"{kind}.safetensors"
    if not source.is_dir():
        folder = source.parent
        if source.suffix == ".gguf":
            name = f"{source.stem}.{name}"
    absolute = folder.resolve()
    digest = hashlib.sha256(str(absolute).encode("utf-8", "surrogateescape")).hexdigest()[:12]
    apart = f"{absolute.name}-{digest}"
    if setting:
        return [_of_user(setting) / apart / name]
    beside = folder / "course-cache" / name
    try:
        user = _of_user(os.environ.get("XDG_CACHE_HOME") or "~/.cache")
    except CourseError:  # a user without a home folder: then beside the checkpoint or nowhere
        return [beside]
    return [beside, user / "rk3588-inference-course" / apart / name]


def _of_user(folder: str) -> Path:
    try:
        return Path(folder).expanduser()
    except RuntimeError:
        raise CourseError(
            f"{VARIABLE}={folder} names the home folder of a user that this machine lacks: give "
            "the folder's whole path"
        ) from None


@contextmanager
def unfinished_file(options: list[Path], size: int) -> Iterator[tuple[int, Path]]:
    """A new file of `size` bytes to be filled, which takes its place when the block ends well.

    Yields its handle and that place: the first of `options` whose folder can be written and has
    room. On any failure, an interruption included, nothing is left behind, not even a new folder.
    Raises CourseError where no place will do, and for a disk that fills up on the way.
    """
    target, handle, temporary, made = _open_somewhere(options, size)
    try:
        yield handle, target
        os.chmod(temporary, 0o644)
        os.replace(temporary, target)
    except BaseException as error:
        with suppress(OSError):
            os.unlink(temporary)
        _remove_folders(made)
        if isinstance(error, OSError):
            raise CourseError(_sentence(target, size, error.strerror or str(error))) from None
        raise
    finally:
        os.close(handle)  # and with it the lock


def clean(options: list[Path]) -> None:
    """Remove the unfinished files of processes that have ended without doing so."""
    for folder in {path.parent for path in options}:
        with suppress(OSError):
            for path in folder.glob(f".*{UNFINISHED}"):
                _remove_if_abandoned(path)


def _remove_if_abandoned(path: Path) -> None:
    with suppress(OSError):
        handle = os.open(path, os.O_RDWR | os.O_NOFOLLOW)
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)  # its writer holds it while alive
            os.unlink(path)
        finally:
            os.close(handle)


def _open_somewhere(options: list[Path], size: int) -> tuple[Path, int, str, list[Path]]:
    problems = []
    for target in options:
        made: list[Path] = []
        try:
            _make_folders(target.parent, made)
            if target.is_dir():  # which no file replaces: before the work, not after it
                raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
            free = shutil.disk_usage(target.parent).free
            if free < size + SPARE:
                raise OSError(f"{free / 1e9:.2f} GB are free there")
            handle, temporary = _locked_file(target)
        except OSError as error:
            _remove_folders(made)
            problems.append((target, error.strerror or str(error)))
        else:
            return target, handle, temporary, made
    raise CourseError(_sentence(problems[0][0], size, problems[0][1]))


def _locked_file(target: Path) -> tuple[int, str]:
    """A new file beside `target`, locked as long as this process lives."""
    while True:
        handle, temporary = tempfile.mkstemp(
            prefix=f".{target.name}.", suffix=UNFINISHED, dir=target.parent)
        with suppress(OSError):  # a file system without locks: then nobody cleans up either
            fcntl.flock(handle, fcntl.LOCK_EX)
        if os.path.exists(temporary):
            return handle, temporary
        os.close(handle)  # who cleans up was faster than the lock


def _make_folders(folder: Path, made: list[Path]) -> None:
    """Make a folder and those above it; `made` tells which, the innermost last."""
    if not folder.is_dir():
        _make_folders(folder.parent, made)
        with suppress(FileExistsError):
            folder.mkdir()
            made.append(folder)


def _remove_folders(made: list[Path]) -> None:
    for folder in reversed(made):
        with suppress(OSError):  # another process has put something there
            folder.rmdir()


def _sentence(target: Path, size: int, problem: str) -> str:
    return (
        f"{target} cannot be written ({problem}), the packed weights need {size / 1e9:.2f} GB: "
        f"free some space, set {VARIABLE} to a folder on another disk, or to {OFF} to pack them "
        "in memory at every start"
    )
