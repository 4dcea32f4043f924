"""Reading the small text files of a checkpoint folder, with errors that a person can act on."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from course_lib.errors import CourseError


def checkpoint_folder(path: str | Path) -> Path:
    """The checkpoint folder at `path`; CourseError if there is none."""
    folder = Path(path).expanduser()
    if not folder.is_dir():
        kind = "is a file, not a folder" if folder.exists() else "does not exist"
        raise CourseError(
            f"{folder} {kind}: give the folder that holds config.json, model.safetensors and "
            "tokenizer.json"
        )
    return folder


def read_text(path: Path, *, remedy: str) -> str:
    """The UTF-8 text of `path`; CourseError naming the file and `remedy` if it cannot be read."""
    try:
        return path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise CourseError(f"{path} is missing: {remedy}") from None
    except UnicodeDecodeError:
        raise CourseError(f"{path} is not UTF-8 text: {remedy}") from None
    except OSError as error:
        raise CourseError(f"{path} cannot be read ({error.strerror}): {remedy}") from None


def read_json_object(path: Path, *, remedy: str) -> dict[str, Any]:
    """The JSON object in `path`; CourseError naming the file and `remedy` if there is none."""
    text = read_text(path, remedy=remedy)
    try:
        value = json.loads(text)
    except (json.JSONDecodeError, RecursionError) as error:
        raise CourseError(f"{path} is not valid JSON ({error}): {remedy}") from None
    if not isinstance(value, dict):
        raise CourseError(f"{path} holds a JSON {type(value).__name__}, not an object: {remedy}")
    return value
