"""The layers of Qwen3 around attention: linear, RMSNorm, RoPE, SiLU gate. Float32 throughout."""

from __future__ import annotations

import numpy as np

from course_lib.arrays import NotFiniteError


def linear(x: np.ndarray, weight: np.ndarray) -> np.ndarray:
    """x·weightᵀ: float32 `[..., in]` and `[out, in]` -> `[..., out]`; Qwen3 has no bias."""
    return x @ weight.T


def rms_norm(x: np.ndarray, gain: np.ndarray, eps: float) -> np.ndarray:
    """x / sqrt(mean(x²) + eps) · gain over the last axis.

    x float32 `[..., d]`, gain float32 `[d]` -> float32 `[..., d]`. Raises NotFiniteError where the
    mean is not finite: dividing by infinity would make zeros. Source: Zhang and Sennrich 2019.
    """
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
    exponent = np.arange(0, head_dim, 2, dtype=np.float32) / np.float32(head_dim)
    frequency = np.float32(1.0) / np.power(np.float32(theta), exponent)
    angle = positions.astype(np.float32)[:, None] * frequency
    return np.cos(angle), np.sin(angle)


def rope(x: np.ndarray, cos: np.ndarray, sin: np.ndarray) -> np.ndarray:
    """Rotate each pair (x[i], x[i + d/2]) by its position's angle ("rotate half" pairing).

    x float32 `[n, heads, d]`, cos and sin float32 `[n, d/2]` -> float32 `[n, heads, d]`.
    Source: Su et al. 2021, with the pairing of Qwen and Llama: halves, not neighbours.
    """
    half = x.shape[-1] // 2
    first, second = x[..., :half], x[..., half:]
    cos, sin = cos[:, None, :], sin[:, None, :]
    return np.concatenate((first * cos - second * sin, second * cos + first * sin), axis=-1)


def silu_mul(gate: np.ndarray, up: np.ndarray) -> np.ndarray:
    """SiLU(gate) · up, the SwiGLU gate: gate/(1 + exp(-gate)) · up, float32, same shapes."""
    # exp(88) is the last power below float32's largest number; beyond it SiLU is 0 to all digits.
    return gate / (np.float32(1.0) + np.exp(np.minimum(-gate, np.float32(88.0)))) * up
