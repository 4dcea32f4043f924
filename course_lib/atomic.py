"""The one way a file of the course is written: whole or not at all. Standard library only."""

from __future__ import annotations

import os
import tempfile


def write_atomically(path: str | os.PathLike[str], content: str | bytes) -> None:
    """Write a file so that a reader sees the old or the new one, never a part.

    Text is UTF-8 with line feeds as they are. On any failure the old file stays as it was and
    nothing else is left behind. The file is readable by all (0644).
    """
    data = content.encode() if isinstance(content, str) else content
    folder, name = os.path.split(os.path.abspath(path))
    handle, temporary = tempfile.mkstemp(prefix=f".{name}.", dir=folder)
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(data)
        os.chmod(temporary, 0o644)
        os.replace(temporary, path)
    except BaseException:
        os.unlink(temporary)
        raise
