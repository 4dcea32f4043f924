"""tools/make_pictures.py gives the same bytes whenever it is run."""

from __future__ import annotations

import importlib.util
import io

from PIL import Image

from course_lib.engine import Engine
from course_lib.paths import ROOT
from tests.tiny_checkpoint import write_checkpoint


def test_pictures_are_deterministic_and_fit_a_page(tmp_path):
    spec = importlib.util.spec_from_file_location("make_pictures", ROOT / "tools/make_pictures.py")
    tool = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(tool)
    write_checkpoint(tmp_path, eos_token_id=None)
    made = tool.pictures(Engine.load(tmp_path), tokens=330)
    assert made == tool.pictures(Engine.load(tmp_path), tokens=330)
    for name, data in made.items():
        picture = Image.open(io.BytesIO(data))
        assert name.endswith(".png") and picture.format == "PNG"
        assert picture.width == 920 and 400 < picture.height < 800
        assert len(data) < 60_000
