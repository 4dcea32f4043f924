"""What attention is given while a real prompt is read: queries, keys and values of each layer."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

import numpy as np

from course_lib.engine import Engine
from course_lib.lab.ruler_tasks import build_ruler_prompt
from course_lib.prefill_attention import causal_attention


class Layer(NamedTuple):
    """Rotated queries, keys and values of a whole prompt in one layer, head-major float32."""

    q: np.ndarray
    k: np.ndarray
    v: np.ndarray


def capture(engine: Engine, ids: Sequence[int]) -> tuple[Layer, ...]:
    """The layers of one exact prefill of `ids`; not to be written to."""
    layers: list[Layer] = []

    def attend(layer: int, q: np.ndarray, k: np.ndarray, v: np.ndarray) -> np.ndarray:
        layers.append(Layer(q.copy(), k.copy(), v.copy()))
        return causal_attention(q, k, v)

    engine.model.hidden(list(ids), 0, attend)
    return tuple(layers)


@lru_cache(maxsize=4)
def captured(engine: Engine, tokens: int) -> tuple[Layer, ...]:
    """The layers of a prompt of so many tokens that holds many facts."""
    return capture(engine, build_ruler_prompt(engine, "niah_multikey", tokens, "bench").ids)
