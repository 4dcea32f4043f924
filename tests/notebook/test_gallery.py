"""docs/gallery.md shows what the explorers show: every number of the page, and its pictures."""

from __future__ import annotations

import importlib.util
import io
import re

import numpy as np
import pytest
from PIL import Image

from course_lib import show
from course_lib.paths import ROOT, SOURCES

PAGE = ROOT / "docs" / "gallery.md"
AGAIN = "run tools/make_pictures.py"


@pytest.fixture(scope="module")
def tool():
    spec = importlib.util.spec_from_file_location("make_pictures", ROOT / "tools/make_pictures.py")
    tool = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(tool)
    return tool


@pytest.fixture(scope="module")
def explorers(tool):
    return {exhibit.explorer: tool.made(exhibit) for exhibit in tool.EXHIBITS}


def test_every_explorer_is_shown_once_and_asks(tool):
    classes = {name for name in show.__all__ if name.endswith("Explorer") and name != "Explorer"}
    assert [e.explorer for e in tool.EXHIBITS] and classes == {e.explorer for e in tool.EXHIBITS}
    assert len(tool.EXHIBITS) == len(classes)
    for name in classes:
        kind = getattr(show, name)
        assert kind.question.rstrip().endswith(("?", ".")) and "?" in kind.question
        assert not kind.question.startswith("Predict")
        assert kind.alt != show.Explorer.alt


def test_the_day_named_uses_the_explorer(tool):
    for exhibit in tool.EXHIBITS:
        for source in [] if exhibit.day is None else SOURCES.glob(f"day{exhibit.day:02d}_*.py"):
            assert exhibit.explorer in source.read_text(), (exhibit.explorer, source.name)


def test_the_page_states_the_explorers_numbers(tool, explorers):
    assert PAGE.read_text() == tool.gallery(explorers), AGAIN


def test_the_pictures_are_the_explorers(tool, explorers):
    """Another version of matplotlib may place a pixel differently: on average by less than a
    hundredth of the way from black to white."""
    for exhibit in tool.EXHIBITS:
        stored = (PAGE.parent / "pictures" / f"{exhibit.file}.png").read_bytes()
        fresh = explorers[exhibit.explorer].png()
        old, new = (np.asarray(Image.open(io.BytesIO(data)).convert("L"), float)
                    for data in (stored, fresh))
        assert old.shape == new.shape and old.shape[1] == 920 and 300 < len(old) < 800
        assert np.abs(old - new).mean() < 2.5, f"{exhibit.file}: {AGAIN}"
        assert len(stored) < 60_000


def test_links_and_pictures_of_the_page_are_there(tool):
    targets = re.findall(r"\]\(([^)#]+)\)", PAGE.read_text())
    assert len(targets) > len(tool.EXHIBITS)
    for target in targets:
        assert (PAGE.parent / target).exists(), target
    named = {f"{e.file}.png" for e in tool.EXHIBITS}
    assert named == {path.name for path in (PAGE.parent / "pictures").glob("*.png")}
