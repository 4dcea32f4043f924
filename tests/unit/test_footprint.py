"""Bytes of a model's parts and of its KV cache, against what is really allocated."""

import math

import numpy as np
import pytest

from course_lib.engine.safetensors_source import SafetensorsSource
from course_lib.footprint import PARTS, kv_bytes, numbers_by_part, part_of
from course_lib.kvcache import KVCache
from course_lib.paths import MODELS


@pytest.mark.parametrize("dtype", ["f32", "q8"])
@pytest.mark.parametrize("shape", [(1, 1, 2), (3, 2, 64), (2, 5, 7)])
def test_kv_bytes_are_those_of_a_full_cache(dtype, shape):
    layers, kv_heads, head_dim = shape
    cache = KVCache(*shape, dtype=dtype, block_size=4)
    rows = np.ones((kv_heads, 12, head_dim), np.float32)
    for layer in range(layers):
        cache.append(layer, rows, rows)
    assert kv_bytes(*shape, 12, dtype) == cache.nbytes
    assert kv_bytes(*shape, 0, dtype) == 0


@pytest.mark.parametrize("bad", [(0, 1, 1, 1, "f32"), (1, 0, 1, 1, "f32"), (1, 1, 0, 1, "f32"),
                                 (1, 1, 1, -1, "f32"), (1, 1, 1, 1, "f64")])
def test_impossible_counts_are_refused(bad):
    with pytest.raises(ValueError):
        kv_bytes(*bad)


def test_every_number_of_the_shipped_model_belongs_to_one_part():
    stored = SafetensorsSource(MODELS / "needle-qwen3").stored
    shapes = {name: tensor.shape for name, tensor in stored.items()}
    counts = numbers_by_part(shapes)
    assert tuple(counts) == PARTS and min(counts.values()) > 0
    assert sum(counts.values()) == sum(math.prod(shape) for shape in shapes.values())
    assert counts["embedding"] == 1657 * 160 and counts["MLP"] == 3 * 3 * 160 * 448
    assert part_of("model.layers.0.self_attn.q_norm.weight") == "norms"
