"""A .safetensors file taken apart and put together, against the safetensors package."""

import numpy as np
import pytest
import safetensors.numpy

from course_lib.engine import Engine
from course_lib.lab.weight_file import (
    Tensor,
    folder_with,
    put_together,
    read_tensor,
    take_apart,
    tensors_of,
)
from course_lib.paths import MODELS

SHIPPED = MODELS / "needle-qwen3"


def test_a_file_put_together_is_one_for_the_package(tmp_path):
    arrays = {"b": np.arange(6, dtype="<f4").reshape(2, 3), "a": np.zeros((0, 4), "<f2"),
              "c": np.array(2.5, "<f2")}
    names = {"<f4": "F32", "<f2": "F16"}
    content = put_together({name: Tensor(names[a.dtype.str], a.shape, a.tobytes())
                            for name, a in arrays.items()})
    assert int.from_bytes(content[:8], "little") % 8 == 0
    loaded = safetensors.numpy.load(content)
    assert loaded.keys() == arrays.keys()
    path = tmp_path / "x.safetensors"
    path.write_bytes(content)
    for name, array in arrays.items():
        assert np.array_equal(loaded[name], array)
        mine = read_tensor(path, name)
        assert mine.dtype == np.float32 and mine.shape == array.shape and (mine == array).all()
    with pytest.raises(KeyError):
        read_tensor(path, "d")


def test_the_shipped_file_comes_apart_and_together(tmp_path):
    raw = (SHIPPED / "model.safetensors").read_bytes()
    tensors = tensors_of(raw)
    again = put_together(tensors)
    assert tensors_of(again) == tensors and take_apart(again)[1] == take_apart(raw)[1]
    assert again == put_together(tensors_of(again))
    folder = folder_with(SHIPPED, tmp_path / "copy", tensors)
    ids = [5, 6, 7]
    assert np.array_equal(Engine.load(folder).forward(ids), Engine.load(SHIPPED).forward(ids))
