"""The requirement lists agree with each other and promise nothing that rots."""

from __future__ import annotations

import re
import sys

import pytest
from packaging.requirements import Requirement
from packaging.version import Version

import course_lib
from course_lib.launcher import environment
from course_lib.launcher.side_environment import GROUND_FLOOR, requirements_of
from course_lib.paths import ROOT

EXTRAS = ("test", "train", "oracle", "browser", "real", "peer")


def bounds(*extras: str) -> dict[str, Requirement]:
    lines = environment.requirements(str(ROOT), extras)
    return {Requirement(line).name: Requirement(line) for line in lines}


def pins(name: str) -> dict[str, Version]:
    lines = (ROOT / name).read_text(encoding="utf-8").splitlines()
    found = dict(line.split("==") for line in lines if line and not line.startswith("#"))
    return {key.lower().replace("_", "-"): Version(value) for key, value in found.items()}


def test_reader_agrees_with_a_toml_parser():
    tomllib = pytest.importorskip("tomllib")
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    assert environment.requirements(str(ROOT), ()) == project["dependencies"]
    for extra in EXTRAS:
        expected = project["dependencies"] + project["optional-dependencies"][extra]
        assert environment.requirements(str(ROOT), (extra,)) == expected
    assert set(project["optional-dependencies"]) == set(EXTRAS)
    assert project["requires-python"] == ">=3.10"


def test_every_requirement_is_one_lower_bound():
    for requirement in bounds(*EXTRAS).values():
        assert [s.operator for s in requirement.specifier] == [">="], requirement
        assert requirement.marker is None and not requirement.extras, requirement


def test_environment_yml_says_the_same_as_pyproject():
    yaml = pytest.importorskip("yaml")
    conda = yaml.safe_load((ROOT / "environment.yml").read_text(encoding="utf-8"))
    assert set(conda) == {"name", "channels", "dependencies"}
    assert conda["channels"] == ["conda-forge"]
    expected = {"python>=3.10", "pip", *environment.requirements(str(ROOT), ("test",))}
    assert set(conda["dependencies"]) == expected
    assert len(conda["dependencies"]) == len(expected)


def test_constraints_name_every_requirement_at_or_above_its_bound():
    text = (ROOT / "constraints.txt").read_text(encoding="utf-8")
    assert re.match(r"# Python 3\.\d+ ", text)
    exact = pins("constraints.txt")
    for name, requirement in bounds("test").items():
        assert exact[name] in requirement.specifier
    assert not {"torch", "transformers"} & set(exact)


def test_constraints_are_used_by_the_python_of_their_header_only(monkeypatch):
    header = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()[0]
    minor = int(re.search(r"3\.(\d+) ", header)[1])
    for version in range(10, 15):
        monkeypatch.setattr(sys, "version_info", (3, version, 0))
        assert bool(environment.constraints(str(ROOT))) == (version == minor)


def test_oracle_pins_fit_the_extra():
    exact = pins("tools/oracle-constraints.txt")
    for name in ("accelerate", "torch", "transformers"):
        assert exact[name] in bounds("oracle")[name].specifier


def test_ground_floor_packages_are_requirements():
    assert len(requirements_of(*GROUND_FLOOR)) == len(GROUND_FLOOR)


def test_version_is_the_package_s():
    text = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    assert 'version = { attr = "course_lib.__version__" }' in text
    assert Version(course_lib.__version__) >= Version("0.1")


def test_licences():
    code = (ROOT / "LICENSE").read_text(encoding="utf-8")
    assert "Apache License" in code and "END OF TERMS AND CONDITIONS" in code
    lessons = (ROOT / "LICENSE-lessons").read_text(encoding="utf-8")
    assert "Creative Commons Attribution 4.0" in lessons and "Section 8" in lessons


def test_what_the_course_makes_is_ignored_by_git():
    lines = (ROOT / ".gitignore").read_text(encoding="utf-8").splitlines()
    assert {"/.venv*", "/work/", "*.so"} <= set(lines)
