"""Finding what was handed in: notebooks in folders, flat files and zips. Nothing is guessed."""

from __future__ import annotations

import io
import re
import unicodedata
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from course_lib.errors import CourseError

MAX_NOTEBOOK = 30 * 2**20
MAX_ZIP = 500 * 2**20
MAX_ZIP_ENTRIES = 2000
MAX_NAME = 100
_DAY = re.compile(r"day(\d\d)(?!\d).*\.ipynb", re.IGNORECASE | re.DOTALL)
_FLAT = re.compile(r"(?P<student>.+?)_(?P<name>day\d\d(?!\d).*\.ipynb)", re.IGNORECASE | re.DOTALL)
IGNORED = ("__MACOSX/", ".ipynb_checkpoints/", "manifest.json")


@dataclass(frozen=True)
class Submission:
    """One notebook of one student: `day` by its file name, `origin` as shown to the instructor,
    `content` its bytes, or None with the `problem` that kept them from being read; `shared`: from a
    zip of several students, which any of them may have handed in."""

    student: str
    day: int
    origin: str
    content: bytes | None
    problem: str = ""
    shared: bool = False


@dataclass(frozen=True)
class Found:
    """What a folder holds: submissions in order of student and day, and files of no known form."""

    submissions: list[Submission]
    unrecognised: list[str]


def find_submissions(folder: Path) -> Found:
    """Read `folder`: `<student>/day10*.ipynb`, `<student>_day10*.ipynb`, and zips of the one or the
    other, or `<student>.zip` with `day10*.ipynb` at any depth.

    Of two files of one student and day both are kept, in the order of their names, those of shared
    zips first: the last one counts, and the grader says so. Raises CourseError where there is no
    such folder.
    """
    if not folder.is_dir():
        raise CourseError(f"{folder} is no folder; give the folder that holds the submissions.")
    found: list[Submission] = []
    unrecognised: list[str] = []
    for path in sorted(folder.rglob("*")):
        name = path.relative_to(folder).as_posix()
        if path.is_symlink():
            unrecognised.append(f"{name} (a link)")
        elif not path.is_file() or any(part in f"{name}" for part in IGNORED):
            continue
        elif path.suffix.lower() == ".zip":
            _add(_from_zip(path, name), found, unrecognised)
        else:
            _add([(name, place_of(PurePosixPath(name)), lambda p=path: _bounded(p),  # type: ignore[misc]
                   False)], found, unrecognised)
    found.sort(key=lambda s: (s.student, s.day, not s.shared, s.origin))
    return Found(found, [tidy(name)[:300] for name in unrecognised])


def place_of(path: PurePosixPath, outer: str | None = None) -> tuple[str, int] | None:
    """(student, day) of a file by its name and folders; None where they do not say.

    outer: the student whom a zip file's own name names.
    """
    flat = _FLAT.fullmatch(path.name)
    if flat is not None and _DAY.fullmatch(flat["name"]) and len(path.parts) == 1:
        return tidy(flat["student"]), int(_DAY.fullmatch(flat["name"])[1])  # type: ignore[index]
    match = _DAY.fullmatch(path.name)
    if match is None:
        return None
    if outer is not None:
        return outer, int(match[1])
    return (tidy(path.parts[0]), int(match[1])) if len(path.parts) > 1 else None


def tidy(student: str) -> str:
    """A student's name as the tables carry it: composed letters; what cannot be printed, such as
    the bytes of another encoding, as escapes, so that different names stay different."""
    composed = unicodedata.normalize("NFC", student)
    return "".join(c if c.isprintable() or unicodedata.category(c) == "Zs"
                   else c.encode("unicode_escape").decode() for c in composed).strip() or "?"


def _add(entries, found: list[Submission], unrecognised: list[str]) -> None:
    for name, place, read, shared in entries:
        if place is None:
            unrecognised.append(name)
        elif len(place[0]) > MAX_NAME:
            unrecognised.append(f"(a student's name of {len(place[0])} characters) {name}")
        else:
            content, problem = read()
            found.append(Submission(place[0], place[1], name, content, problem, shared))


def _bounded(path: Path) -> tuple[bytes | None, str]:
    try:
        if path.stat().st_size > MAX_NOTEBOOK:
            return None, f"larger than {MAX_NOTEBOOK // 2**20} MB"
        return path.read_bytes(), ""
    except OSError as error:
        return None, f"cannot be read ({error.strerror})"


def _from_zip(path: Path, name: str) -> Iterator[tuple]:
    """The notebooks of a zip, in memory: nothing is unpacked to disk, so no name can lead out."""
    try:
        size = path.stat().st_size
        archive = zipfile.ZipFile(io.BytesIO(path.read_bytes() if size <= MAX_ZIP else b""))
        infos = archive.infolist()
    except (OSError, zipfile.BadZipFile, ValueError, NotImplementedError):
        yield f"{name} (no readable zip)", None, None, False
        return
    if len(infos) > MAX_ZIP_ENTRIES:
        yield f"{name} (a zip of {len(infos)} entries)", None, None, False
        return
    if sum(info.file_size for info in infos) > MAX_ZIP:
        yield f"{name} (a zip of more than {MAX_ZIP // 2**20} MB)", None, None, False
        return
    whose = re.sub(r"_day\d\d.*$", "", path.stem, flags=re.IGNORECASE)
    inside = [info for info in infos
              if not info.is_dir() and not any(part in info.filename for part in IGNORED)]
    notebooks = [info for info in inside if info.filename.lower().endswith(".ipynb")]
    single = all(len(PurePosixPath(i.filename).parts) == 1 or
                 PurePosixPath(i.filename).parts[0] == PurePosixPath(notebooks[0].filename).parts[0]
                 for i in notebooks)
    for info in inside:
        inner = PurePosixPath(info.filename)
        flat = _FLAT.fullmatch(inner.name) is not None
        outer = tidy(whose) if single and not flat else None
        place = place_of(PurePosixPath(inner.name) if flat else inner, outer)
        yield (f"{name}/{inner}", place, lambda i=info: _member(archive, i),
               place is not None and place[0] != tidy(whose))


def _member(archive: zipfile.ZipFile, info: zipfile.ZipInfo) -> tuple[bytes | None, str]:
    if info.file_size > MAX_NOTEBOOK:
        return None, f"larger than {MAX_NOTEBOOK // 2**20} MB"
    try:
        with archive.open(info) as file:
            content = file.read(MAX_NOTEBOOK + 1)
    except Exception as error:  # encrypted, damaged, of an unknown method: many types
        return None, f"cannot be unpacked ({type(error).__name__})"
    if len(content) > MAX_NOTEBOOK:
        return None, f"larger than {MAX_NOTEBOOK // 2**20} MB"
    return content, ""
