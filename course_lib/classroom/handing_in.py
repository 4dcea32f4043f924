"""Packing a student's work: one zip with a manifest that says what is in it and of which course."""

from __future__ import annotations

import hashlib
import io
import json
import unicodedata
import zipfile
from collections.abc import Iterable
from pathlib import Path

import course_lib
from course_lib.classroom.grading.handed_in import read_notebook
from course_lib.errors import CourseError

MANIFEST = "manifest.json"


def packed(day: int, student: str, notebooks: Iterable[Path]) -> bytes:
    """The bytes of a zip with these notebooks and a manifest of their SHA-256 and the course's
    version; the same bytes for the same notebooks.

    Raises CourseError for a file that cannot be read or is no notebook.
    """
    contents = {path.name: _read(path) for path in notebooks}
    manifest = {
        "course": course_lib.__version__, "day": day, "student": student,
        "files": {name: hashlib.sha256(data).hexdigest() for name, data in contents.items()},
    }
    text = json.dumps(manifest, ensure_ascii=False, indent=1) + "\n"
    text = text.encode("utf-8", "replace").decode()  # a name typed in another encoding
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as file:
        for name, data in {MANIFEST: text.encode(), **contents}.items():
            info = zipfile.ZipInfo(name, (1980, 1, 1, 0, 0, 0))
            info.external_attr, info.compress_type = 0o644 << 16, zipfile.ZIP_DEFLATED
            file.writestr(info, data)
    return buffer.getvalue()


def _read(path: Path) -> bytes:
    try:
        data = path.read_bytes()
        read_notebook(data)
        return data
    except OSError as error:
        raise CourseError(f"{path} cannot be read ({error.strerror}).") from None
    except CourseError as error:
        raise CourseError(f"{path} is {error}; save it again in JupyterLab.") from None


def file_name(student: str, day: int) -> str:
    """The zip's name, which names the student: letters of any script with their marks, digits and
    - only.

    Raises CourseError for a name of which nothing is left.
    """
    composed = unicodedata.normalize("NFC", student).strip()
    name = "".join(c if unicodedata.category(c)[0] in "LNM" else "-" for c in composed).strip("-")
    if not name or len(name.encode()) > 150:
        raise CourseError(f"--name {student[:40]!r} gives no file name; use 1 to 50 letters.")
    return f"{name}_day{day:02d}.zip"
