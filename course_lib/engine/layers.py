"""The layers of Qwen3 around attention: linear, RMSNorm, RoPE, SiLU gate. Float32 throughout.

The NumPy code is the definition. The compiled kernels differ from it by roundings, and give a
token the same bits whether it comes alone or among others, on every machine.
"""

from __future__ import annotations

import numpy as np

from course_lib import backend
from course_lib.arrays import NotFiniteError
from course_lib.linear import linear

__all__ = ["argmax", "linear", "rms_norm", "rope", "rope_tables", "silu_mul"]


def rms_norm(x: np.ndarray, gain: np.ndarray, eps: float) -> np.ndarray:
    """x / sqrt(mean(x²) + eps) · gain over the last axis.

    x float32 `[..., d]`, gain float32 `[d]` -> float32 `[..., d]`. Raises NotFiniteError where the
    mean is not finite: dividing by infinity would make zeros. Source: Zhang and Sennrich 2019.
    """
    if (compiled := backend.kernel("rms_norm")) is not None:
        rows, out = _rows(x), np.empty(x.shape, np.float32)
        _compute(compiled, rows, gain, eps, out.reshape(rows.shape))
        return out
    mean_square = np.mean(np.square(x), axis=-1, keepdims=True)
    if not np.isfinite(mean_square).all():
        raise NotFiniteError("the mean square of a row is not finite; its values are too large.")
    return x / np.sqrt(mean_square + np.float32(eps)) * gain


def rope_tables(
    positions: np.ndarray, head_dim: int, theta: float
) -> tuple[np.ndarray, np.ndarray]:
    """cos and sin of the RoPE angles position · theta^(-2i/head_dim), i = 0 … head_dim/2 - 1.

    positions integer `[n]` -> two float32 `[n, head_dim/2]`. The angle is a float32 product, as
    in the models' training code: near position 2,000 its rounding reaches 1e-4 radians, so a more
    exact angle would not be the angle that the weights were trained with.
    """
    if (compiled := backend.kernel("rope_tables")) is not None:
        cos, sin = np.empty((2, len(positions), head_dim // 2), np.float32)
        compiled(positions.astype(np.int64), theta, cos, sin)
        return cos, sin
    exponent = np.arange(0, head_dim, 2, dtype=np.float32) / np.float32(head_dim)
    frequency = np.float32(1.0) / np.power(np.float32(theta), exponent)
    angle = positions.astype(np.float32)[:, None] * frequency
    return np.cos(angle), np.sin(angle)


def rope(x: np.ndarray, cos: np.ndarray, sin: np.ndarray) -> np.ndarray:
    """Rotate each pair (x[i], x[i + d/2]) by its position's angle ("rotate half" pairing).

    x float32 `[n, heads, d]`, cos and sin float32 `[n, d/2]` -> float32 `[n, heads, d]`.
    Source: Su et al. 2021, with the pairing of Qwen and Llama: halves, not neighbours.
    """
    if (compiled := backend.kernel("rope")) is not None:
        out = np.empty(x.shape, np.float32)
        _compute(compiled, np.ascontiguousarray(x), cos, sin, out)
        return out
    half = x.shape[-1] // 2
    first, second = x[..., :half], x[..., half:]
    cos, sin = cos[:, None, :], sin[:, None, :]
    return np.concatenate((first * cos - second * sin, second * cos + first * sin), axis=-1)


def silu_mul(gate: np.ndarray, up: np.ndarray) -> np.ndarray:
    """SiLU(gate) · up, the SwiGLU gate: gate/(1 + exp(-gate)) · up, float32, same shapes."""
    if (compiled := backend.kernel("silu_mul")) is not None:
        rows, out = _rows(gate), np.empty(gate.shape, np.float32)
        _compute(compiled, rows, _rows(up), out.reshape(rows.shape))
        return out
    # exp(88) is the last power below float32's largest number; beyond it SiLU is 0 to all digits.
    return gate / (np.float32(1.0) + np.exp(np.minimum(-gate, np.float32(88.0)))) * up


def argmax(x: np.ndarray) -> int:
    """Index of the largest of float32 `[n]`, n >= 1, the lowest on ties; none of them is NaN."""
    compiled = backend.kernel("argmax")
    return int(np.argmax(x)) if compiled is None else compiled(x)


def _rows(x: np.ndarray) -> np.ndarray:
    """`[..., d]` -> C-contiguous `[rows, d]`."""
    return np.ascontiguousarray(x).reshape(-1, x.shape[-1])


def _compute(kernel, *arguments) -> None:
    """Run a kernel on arguments that fit, so that what it refuses are the numbers."""
    try:
        kernel(*arguments)
    except ValueError as error:
        raise NotFiniteError(f"{error}.") from None
