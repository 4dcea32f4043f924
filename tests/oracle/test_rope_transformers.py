"""Scaled RoPE against transformers: frequencies and attention factor of every kind."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from course_lib import backend
from course_lib.engine.layers import rope_powers
from course_lib.engine.rope import RopeScaling

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS  # noqa: E402

YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
          "original_max_position_embeddings": 8192}
CASES = {
    "Qwen3's yarn": (YARN, 1e6, 128),
    "yarn, other betas": (YARN | {"beta_fast": 16, "beta_slow": 2}, 1e6, 128),
    "yarn, not truncated": (YARN | {"truncate": False}, 1e6, 128),
    "yarn, attention factor given": (YARN | {"attention_factor": 1.5}, 1e6, 64),
    "yarn, mscale": (YARN | {"mscale": 1.0, "mscale_all_dim": 0.5}, 1e4, 64),
    "yarn, mscale alone": (YARN | {"mscale": 2.0}, 1e4, 64),
    "yarn, factor 1": (YARN | {"factor": 1.0}, 1e6, 128),
    "yarn, odd factor": (YARN | {"factor": 3.7}, 5e5, 96),
    "yarn, original context left out": (
        {"rope_type": "yarn", "factor": 2.0}, 1e6, 128),
    "Llama 3.1": (LLAMA3, 5e5, 128),
    "Llama 3.2": (LLAMA3 | {"factor": 32.0}, 5e5, 64),
    "linear": ({"rope_type": "linear", "factor": 2.5}, 1e4, 128),
    "linear, old key": ({"type": "linear", "factor": 4.0}, 1e4, 64),
}


@pytest.mark.parametrize("name", CASES)
def test_frequencies_are_those_of_transformers(name):
    parameters, theta, head_dim = CASES[name]
    config = transformers.Qwen3Config(
        hidden_size=4 * head_dim, num_attention_heads=4, head_dim=head_dim,
        max_position_embeddings=40960, rope_parameters=parameters | {"rope_theta": theta})
    kind = parameters.get("rope_type", parameters.get("type"))
    expected, factor = ROPE_INIT_FUNCTIONS[kind](config, "cpu")
    scaling = RopeScaling.from_parameters(parameters, Path("config.json"),
                                          max_position_embeddings=40960)
    assert scaling.attention_factor == pytest.approx(factor, rel=1e-15)
    exponents = torch.arange(0, head_dim, 2, dtype=torch.float) / head_dim
    powers = (theta ** exponents).numpy()
    # From torch's own powers on, every step is one operation on float32, as there.
    np.testing.assert_array_max_ulp(scaling.stretched(powers, theta), expected.numpy(), maxulp=1)
    for backend_name in {"numpy", backend.info().variant}:
        with backend.using(backend_name):
            # Either library's float32 power may be off by a last bit.
            np.testing.assert_array_max_ulp(rope_powers(head_dim, theta), powers, maxulp=2)
