"""A model with random weights in the shape of a published one: what a speed is measured on."""

from __future__ import annotations

import zlib
from pathlib import Path

import numpy as np

from course_lib.engine.config import ModelConfig
from course_lib.engine.conversion import weight_bytes
from course_lib.engine.tensor_source import Stored
from course_lib.engine.weights import expected_tensors
from course_lib.weight_blocks import BLOCK, BLOCK_BYTES, Kind, dequantize_q8_0

QWEN3_0_6B = ModelConfig(
    vocab_size=151_936,
    hidden_size=1024,
    intermediate_size=3072,
    num_hidden_layers=28,
    num_attention_heads=16,
    num_key_value_heads=8,
    head_dim=128,
    max_position_embeddings=40_960,
    rms_norm_eps=1e-6,
    rope_theta=1e6,
    tie_word_embeddings=True,
)
"""The config.json of Qwen3-0.6B."""

KIND: Kind = "q8_0"
STD_OF_CODES = float(np.sqrt((127**2 + 127) / 3))  # of the integers -127 … 127, all as likely


class RandomSource:
    """A checkpoint of random numbers: nothing is stored, a tensor is made when it is asked for.

    Every reading of a tensor gives the same numbers. Norm gains are 1; matrices are Q8_0 blocks of
    codes from -127 to 127, scaled to a standard deviation of 1 / sqrt(columns), so that a product
    keeps the size of what goes in and no activation overflows.
    """

    def __init__(self, config: ModelConfig, seed: int = 20) -> None:
        self.path = Path("random weights")
        self.stored = {name: Stored("F32" if len(shape) == 1 else "Q8_0", shape)
                       for name, shape in expected_tensors(config).items()}
        self._seed = seed

    def read(self, name: str) -> np.ndarray:
        """A norm's gains; matrices are read as blocks."""
        return np.ones(self.stored[name].shape, np.float32)

    def read_rows(self, name: str, first: int, last: int) -> np.ndarray:
        """Rows of a matrix as float32."""
        blocks = self.blocks(name, KIND)
        assert blocks is not None
        return dequantize_q8_0(blocks[first:last])

    def blocks(self, name: str, kind: Kind) -> np.ndarray | None:
        """The matrix `name` in Q8_0 blocks."""
        if kind != KIND:
            return None
        rows, columns = self.stored[name].shape
        rng = np.random.default_rng([self._seed, zlib.crc32(name.encode())])
        made = np.empty((rows, columns // BLOCK, BLOCK_BYTES[KIND]), np.uint8)
        scale = rng.uniform(0.9, 1.1, (*made.shape[:2], 1)) / (STD_OF_CODES * np.sqrt(columns))
        made[..., :2] = scale.astype("<f2").view(np.uint8)
        made[..., 2:] = rng.integers(-127, 128, (*made.shape[:2], BLOCK), np.int8).view(np.uint8)
        return made.reshape(rows, -1)

    def fingerprint(self) -> str:
        """The seed: it decides all numbers."""
        return f"{self._seed:x}"


def token_bytes(config: ModelConfig) -> int:
    """Bytes of weights that a token reads: all but the embedding, of which it reads one row, unless
    it is the output matrix too."""
    total = weight_bytes(config, KIND)
    if config.tie_word_embeddings:
        return total
    return total - config.vocab_size * config.hidden_size // BLOCK * BLOCK_BYTES[KIND]
