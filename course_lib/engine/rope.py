"""Scaled RoPE: how families stretch the angles to contexts longer than those of their training."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from course_lib.errors import CourseError

F32 = np.float32
KINDS = ("default", "linear", "llama3", "yarn")
REMEDY = "copy the checkpoint's config.json again"


@dataclass(frozen=True)
class RopeScaling:
    """A scaling that config.json asks for; the names are Hugging Face's.

    kind: "linear" divides every frequency by `factor`. "yarn" and "llama3" keep those that turn
    often within `original_max_position_embeddings` (the context of the training), divide those
    that turn seldom by `factor`, and blend between: "yarn" by the index of the frequency, between
    where `beta_fast` and `beta_slow` turns lie (with `truncate` at whole indexes), "llama3" by
    the number of turns, between `low_freq_factor` and `high_freq_factor`. cos and sin are
    multiplied by `attention_factor`.
    """

    kind: str
    factor: float
    original_max_position_embeddings: int = 0
    attention_factor: float = 1.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0

    @classmethod
    def from_parameters(
        cls, raw: Mapping[str, Any], path: Path, *, max_position_embeddings: int
    ) -> RopeScaling | None:
        """Read `rope_parameters` or `rope_scaling` of config.json; None where nothing is scaled.

        The sections of multimodal RoPE (`mrope_section`) do not matter for text, whose positions
        are the same in all of them. Raises CourseError naming the file and the key for another
        kind of scaling and for numbers that are missing or make no sense.
        """
        kind = raw.get("rope_type", raw.get("type", "default"))
        if kind not in KINDS:
            raise CourseError(
                f"{path}: RoPE scaling {kind!r} is not supported, only {', '.join(KINDS)}: choose "
                "another checkpoint, or remove the scaling, which contexts within the model's own "
                "length do not need"
            )
        read = _Numbers(raw, path)
        if read.number("partial_rotary_factor", 1.0) != 1.0:
            raise CourseError(f"{path}: partial_rotary_factor {raw['partial_rotary_factor']!r} is "
                              "not supported: choose a checkpoint that turns whole heads")
        if kind == "default":
            return None
        factor = read.number("factor", least=1.0)
        if kind == "linear":
            return cls(kind, factor)
        original = read.count("original_max_position_embeddings", max_position_embeddings)
        if kind == "llama3":
            low, high = read.number("low_freq_factor"), read.number("high_freq_factor")
            read.require_order("low_freq_factor", low, "high_freq_factor", high)
            return cls(kind, factor, original, low_freq_factor=low, high_freq_factor=high)
        slow, fast = read.number("beta_slow", 1.0), read.number("beta_fast", 32.0)
        read.require_order("beta_slow", slow, "beta_fast", fast)
        return cls(kind, factor, original, _yarn_attention_factor(read, factor), fast, slow,
                   read.flag("truncate", True))

    def stretched(self, powers: np.ndarray, theta: float) -> np.ndarray:
        """The scaled frequencies, float32 `[head_dim / 2]`, of the powers theta^(2i/head_dim).

        Every step is one float32 operation, so that the bits are the same everywhere, in the
        order of transformers.
        """
        one, factor, frequencies = F32(1), F32(self.factor), F32(1) / powers
        if self.kind == "linear":
            return frequencies / factor
        if self.kind == "llama3":
            share = self._kept_by_turns(frequencies)
            return (one - share) * frequencies / factor + share * frequencies
        share = self._kept_by_index(len(powers), theta)
        return one / (factor * powers) * (one - share) + frequencies * share

    def _kept_by_index(self, pairs: int, theta: float) -> np.ndarray:
        """How much of each frequency stays as it is: 1 up to one index, 0 from another on."""
        low, high = (self._index_of(turns, pairs, theta)
                     for turns in (self.beta_fast, self.beta_slow))
        if self.truncate:
            low, high = math.floor(low), math.ceil(high)
        low, high = max(low, 0), min(high, 2 * pairs - 1)
        width = high - low or 0.001
        ramp = (np.arange(pairs, dtype=F32) - F32(low)) / F32(width)
        return F32(1) - np.clip(ramp, F32(0), F32(1))

    def _index_of(self, turns: float, pairs: int, theta: float) -> float:
        """The index of a frequency that turns so often within the original context."""
        longest = self.original_max_position_embeddings / (turns * 2 * math.pi)
        return pairs * natural_log(longest) / natural_log(theta)

    def _kept_by_turns(self, frequencies: np.ndarray) -> np.ndarray:
        """How much of each frequency stays as it is, by its turns within the original context."""
        turns = F32(self.original_max_position_embeddings) / (F32(2 * math.pi) / frequencies)
        low, high = F32(self.low_freq_factor), F32(self.high_freq_factor)
        return np.clip((turns - low) / (high - low), F32(0), F32(1))


def _yarn_attention_factor(read: _Numbers, factor: float) -> float:
    """The factor of cos and sin: given, or 0.1 · ln(factor) + 1, or a quotient of two such."""
    def scale(weight: float) -> float:
        return 0.1 * weight * natural_log(factor) + 1.0

    if read.raw.get("attention_factor") is not None:
        return read.number("attention_factor")
    if read.raw.get("mscale") and read.raw.get("mscale_all_dim"):
        return scale(read.number("mscale")) / scale(read.number("mscale_all_dim"))
    return scale(1.0)


def natural_log(x: float) -> float:
    """ln x of a number above 0 by + - * / alone: math.log's last bit depends on the C library.

    x = m · 2^e with m between sqrt(1/2) and sqrt(2); ln m = 2 (s + s³/3 + s⁵/5 + …) in
    s = (m - 1) / (m + 1), |s| < 0.172: ten terms leave 1e-17.
    """
    m, exponent = math.frexp(x)
    if m < math.sqrt(0.5):
        m, exponent = 2 * m, exponent - 1
    s = (m - 1) / (m + 1)
    total = 0.0
    for k in range(19, 0, -2):
        total = total * (s * s) + 1 / k
    return exponent * 0.6931471805599453 + 2 * s * total


@dataclass(frozen=True)
class _Numbers:
    """The values of one JSON object, each checked when it is read."""

    raw: Mapping[str, Any]
    path: Path

    def number(self, key: str, default: float | None = None, least: float = 0.0) -> float:
        value = self._value(key, default)
        real = isinstance(value, (int, float)) and not isinstance(value, bool)
        if not real or not max(least, 1e-30) <= value <= 1e30:
            above = f"of at least {least:g}" if least else "above 0"
            raise CourseError(f"{self.path}: {key} of its RoPE scaling must be a number {above}, "
                              f"got {value!r}: {REMEDY}")
        return float(value)

    def count(self, key: str, default: int) -> int:
        value = self._value(key, default)
        if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= 2**31:
            raise CourseError(f"{self.path}: {key} of its RoPE scaling must be a positive "
                              f"integer, got {value!r}: {REMEDY}")
        return value

    def flag(self, key: str, default: bool) -> bool:
        value = self._value(key, default)
        if not isinstance(value, bool):
            raise CourseError(f"{self.path}: {key} of its RoPE scaling must be true or false, "
                              f"got {value!r}: {REMEDY}")
        return value

    def require_order(self, small: str, low: float, large: str, high: float) -> None:
        if low >= high:
            raise CourseError(f"{self.path}: {small} {low:g} of its RoPE scaling must be below "
                              f"{large} {high:g}: {REMEDY}")

    def _value(self, key: str, default: Any) -> Any:
        value = self.raw.get(key)
        value = default if value is None else value
        if value is None:
            raise CourseError(f"{self.path}: its RoPE scaling lacks {key}: {REMEDY}")
        return value
