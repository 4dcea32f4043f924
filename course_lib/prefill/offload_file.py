"""The file that blocks are offloaded to: it lives as long as the process that uses it.

Its name holds the process id, its maker holds a lock on it, and it is removed when it is closed, on
errors, and at the end of the program. A process that is killed leaves it behind: whoever opens the
next one in that folder removes those on which nobody holds the lock. So any number of processes
may use one folder.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import shutil
import stat
import tempfile
import weakref
from pathlib import Path

from course_lib.errors import CourseError

PAGE = HEADER = 4096
MAGIC = b"course offloaded KV blocks, version 1\n"
PREFIX, SUFFIX = "course-kv-", ".blocks"
MOST_BUFFERS = os.sysconf("SC_IOV_MAX")  # of one read


class OffloadFile:
    """A new file of ``size`` bytes in ``folder``, default the system's folder for large temporary
    files. Raises CourseError where it cannot be made, read or written."""

    def __init__(self, folder: str | Path | None, size: int) -> None:
        self.folder = Path(folder).expanduser() if folder is not None else default_folder()
        if not self.folder.is_dir():
            what = "is a file" if self.folder.exists() else "does not exist"
            raise CourseError(f"{self.folder} {what}; the KV cache is offloaded to a folder, name "
                              "one that is there.")
        remove_abandoned(self.folder)
        try:
            self._handle, name = _locked_file(self.folder)
        except OSError as error:
            raise CourseError(f"No file can be made in {self.folder} ({_said(error)}); name "
                              "another folder to offload to.") from None
        self.path = Path(name)
        about = os.fstat(self._handle)
        self._remove = weakref.finalize(self, _remove, self._handle, name, os.getpid(),
                                        (about.st_dev, about.st_ino))
        try:
            _reserve(self._handle, size)
            self.write([memoryview(MAGIC.ljust(HEADER, b"\0"))], 0)
        except BaseException as error:
            free = shutil.disk_usage(self.folder).free
            self.close()
            if isinstance(error, OSError):
                raise CourseError(
                    f"{self.folder} cannot hold {size / 1e9:.2f} GB of KV cache ({_said(error)}, "
                    f"{free / 1e9:.2f} GB are free); free some space or name another folder."
                ) from None
            raise

    def write(self, buffers: list[memoryview], offset: int) -> None:
        """Write the buffers, one behind the other; CourseError if the disk does not take them."""
        left = list(buffers)
        try:
            while left:
                done = os.pwritev(self._handle, left[:MOST_BUFFERS], offset)
                if done == 0:
                    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
                offset += done
                _take_off(left, done)
        except OSError as error:
            raise CourseError(f"{self.path} cannot be written ({_said(error)}); free some space or "
                              "name another folder to offload to.") from None

    def read_into(self, buffers: list[memoryview], offset: int) -> None:
        """Fill the buffers, one after the other, from ``offset`` on; CourseError if the file does
        not hold as much any more."""
        left = list(buffers)
        while left:
            try:
                done = os.preadv(self._handle, left[:MOST_BUFFERS], offset)
            except OSError as error:
                raise CourseError(f"{self.path} cannot be read ({_said(error)}); name another "
                                  "folder to offload to.") from None
            if done == 0:
                raise CourseError(f"{self.path} has been cut short while it was in use; run the "
                                  "prompt again with another offload folder.")
            offset += done
            _take_off(left, done)

    def close(self) -> None:
        """Remove the file; again is no error."""
        self._remove()


def _take_off(left: list[memoryview], done: int) -> None:
    """Take the first ``done`` bytes off the front of the buffers."""
    while left and done >= left[0].nbytes:
        done -= left.pop(0).nbytes
    if done:
        left[0] = left[0][done:]


def default_folder() -> Path:
    """Where large temporary files belong: /tmp may be in memory, /var/tmp is on a disk."""
    large = Path("/var/tmp")
    return large if os.access(large, os.W_OK | os.X_OK) else Path(tempfile.gettempdir())


def remove_abandoned(folder: Path) -> None:
    """Remove offload files of processes that ended without doing so; no other file is touched."""
    for path in folder.glob(f"{PREFIX}*{SUFFIX}"):
        with contextlib.suppress(OSError):
            handle = os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
            try:
                if not stat.S_ISREG(os.fstat(handle).st_mode):
                    continue
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)  # its maker holds it while alive
                if os.pread(handle, len(MAGIC), 0) in (MAGIC, b"", bytes(len(MAGIC))):
                    os.unlink(path)
            finally:
                os.close(handle)


def _locked_file(folder: Path) -> tuple[int, str]:
    while True:
        handle, name = tempfile.mkstemp(prefix=f"{PREFIX}{os.getpid()}-", suffix=SUFFIX,
                                        dir=folder)
        with contextlib.suppress(OSError):  # a file system without locks: nobody cleans up either
            fcntl.flock(handle, fcntl.LOCK_EX)
        if os.path.exists(name):
            return handle, name
        os.close(handle)  # who cleans up was faster than the lock


def _reserve(handle: int, size: int) -> None:
    """Make the file that long and its space its own, where the file system can."""
    if hasattr(os, "posix_fallocate"):
        try:
            os.posix_fallocate(handle, 0, size)
            return
        except OSError as error:
            if error.errno not in (errno.EOPNOTSUPP, errno.EINVAL, errno.ENOSYS):
                raise
    os.ftruncate(handle, size)


def _remove(handle: int, name: str, maker: int, identity: tuple[int, int]) -> None:
    if os.getpid() == maker:  # not in a child made by fork
        with contextlib.suppress(OSError):
            found = os.lstat(name)
            if (found.st_dev, found.st_ino) == identity:  # and not what somebody has put there
                os.unlink(name)
    with contextlib.suppress(OSError):
        os.close(handle)


def _said(error: OSError) -> str:
    return error.strerror or str(error)
