"""Scaled RoPE: how families stretch the angles to longer contexts."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class RopeScaling:
    """A scaling that config.json asks for: its kind and numbers, under Hugging Face's names."""

    kind: str
    factor: float
