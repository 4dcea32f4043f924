"""Reading the small text files of a checkpoint folder, with errors that a person can act on."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from course_lib.errors import CourseError

# The largest of these files, a tokenizer.json, has some 20 MiB.
LARGEST = 256 << 20


def checkpoint_folder(path: str | Path) -> Path:
    """The checkpoint folder at `path`; CourseError if there is none."""
    try:
        folder = Path(path).expanduser()
        if folder.is_dir():
            return folder
        problem = "is a file, not a folder" if folder.exists() else "does not exist"
    except RuntimeError:  # what expanduser raises
        folder, problem = Path(path), "names the home folder of a user that this machine lacks"
    except OSError as error:
        problem = f"cannot be opened ({error.strerror})"
    raise CourseError(
        f"{folder} {problem}: give the folder that holds config.json, the safetensors files and "
        "tokenizer.json, or a .gguf file"
    )


def require_model(folder: Path) -> None:
    """CourseError unless `folder` holds a config.json; it names a folder within that does."""
    if is_there(folder / "config.json"):
        return
    # The cache of huggingface_hub keeps a model's files under snapshots/<revision>.
    within = [file for pattern in ("snapshots/*/config.json", "*/config.json")
              for file in sorted(folder.glob(pattern))]
    if within:
        remedy = f"give {within[0].parent}, which has one"
    elif is_there(folder / "adapter_config.json"):
        remedy = "this is an adapter: merge it into its model, then give the merged model's folder"
    else:
        remedy = ("give the folder that holds config.json, the safetensors files and "
                  "tokenizer.json, or a .gguf file")
    raise CourseError(f"{folder / 'config.json'} is missing: {remedy}")


def is_there(path: Path) -> bool:
    """Whether something is at `path`, if only a link to nothing (of a cache that lost its blobs);
    yes where that cannot be seen. So reading says why."""
    try:
        path.lstat()
    except (FileNotFoundError, NotADirectoryError):
        return False
    except OSError:
        pass
    return True


def require_file(path: Path, *, remedy: str) -> None:
    """CourseError naming `path` and `remedy` unless a regular file is there.

    Opening anything else can wait for ever (a named pipe) or never end (a device).
    """
    try:
        if path.is_file():
            return
        missing = not path.exists()
    except OSError as error:
        raise CourseError(f"{path} cannot be read ({error.strerror}): {remedy}") from None
    problem = "is missing" if missing else "cannot be read (it is not a regular file)"
    raise CourseError(f"{path} {problem}: {remedy}")


def one_line(error: BaseException, length: int = 200) -> str:
    """What `error` says, on one line of at most `length` printable characters (a file's own words
    may stand in it); its type where it says nothing."""
    line = " ".join("".join(c if c.isprintable() else " " for c in str(error)).split())
    return (line if len(line) <= length else line[: length - 1] + "…") or type(error).__name__


def read_bytes(path: Path, *, remedy: str) -> bytes:
    """The bytes of a small file; CourseError naming the file and `remedy` if it cannot be read."""
    require_file(path, remedy=remedy)
    try:
        with path.open("rb") as file:
            size = os.fstat(file.fileno()).st_size  # as much memory as is asked for is taken
            data = file.read(min(size, LARGEST) + 1)
    except OSError as error:
        raise CourseError(f"{path} cannot be read ({error.strerror}): {remedy}") from None
    if len(data) > LARGEST:
        raise CourseError(
            f"{path} is larger than {LARGEST >> 20} MiB, which no such file is: {remedy}"
        )
    return data


def read_text(path: Path, *, remedy: str) -> str:
    """The UTF-8 text of `path`, newlines as "\\n"; CourseError as `read_bytes`."""
    try:
        text = read_bytes(path, remedy=remedy).decode("utf-8")
    except UnicodeDecodeError:
        raise CourseError(f"{path} is not UTF-8 text: {remedy}") from None
    return text.replace("\r\n", "\n").replace("\r", "\n")


def read_json_object(path: Path, *, remedy: str, unique_keys: bool = False) -> dict[str, Any]:
    """The JSON object in `path`; CourseError naming the file and `remedy` if there is none.

    unique_keys: an object in it that names a key twice is an error too; else the last one counts.
    """
    text = read_text(path, remedy=remedy)
    try:
        value = json.loads(text, object_pairs_hook=_unique if unique_keys else None)
    except (ValueError, RecursionError) as error:  # ValueError: also a number of 5,000 digits
        raise CourseError(f"{path} is not valid JSON ({one_line(error)}): {remedy}") from None
    if not isinstance(value, dict):
        raise CourseError(f"{path} holds a JSON {type(value).__name__}, not an object: {remedy}")
    return value


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, value in pairs:
        if key in found:
            raise ValueError(f"it names {key[:80]!a} twice")
        found[key] = value
    return found
