"""The one way a file of the course is written: whole or not at all. Standard library only."""

from __future__ import annotations

import errno
import os
import stat
import tempfile


def write_atomically(path: str | os.PathLike[str], content: str | bytes) -> None:
    """Write a file so that a reader sees the old or the new one, never a part.

    Text is UTF-8 with line feeds as they are. On any failure the old file stays as it was and
    nothing else is left behind. The file is readable by all (0644). A symbolic link stays one: the
    file that it names is written. OSError for a path that is a folder, a device or a pipe.
    """
    data = content.encode() if isinstance(content, str) else content
    target = _target(path)
    handle, temporary = _beside(target)
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(data)
        os.chmod(temporary, 0o644)
        os.replace(temporary, target)
    except BaseException:
        os.unlink(temporary)
        raise


def check_writable(path: str | os.PathLike[str]) -> None:
    """OSError if write_atomically could not write the path now. Changes no file."""
    handle, temporary = _beside(_target(path))
    os.close(handle)
    os.unlink(temporary)


def _target(path: str | os.PathLike[str]) -> str:
    """The file that a path names, behind its links: one to be made, or a regular one."""
    text = os.fspath(path)
    if not text:
        raise OSError(errno.ENOENT, "an empty name", text)
    if text.endswith(os.sep):
        raise OSError(errno.EISDIR, "names a folder", text)
    target = os.path.realpath(text)
    try:
        mode = os.lstat(target).st_mode
    except FileNotFoundError:
        return target
    if not stat.S_ISREG(mode):
        raise OSError(errno.EINVAL, "not a regular file", text)
    return target


def _beside(target: str) -> tuple[int, str]:
    """A new file in the same folder, so that it can take the target's place in one step."""
    folder, name = os.path.split(target)
    return tempfile.mkstemp(prefix=f".{name[:40]}.", dir=folder)
