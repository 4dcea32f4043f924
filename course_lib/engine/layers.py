"""The layers around attention: linear, RMSNorm, RoPE, SiLU gate. Float32 throughout.

The NumPy code is the definition. The compiled kernels differ from it by roundings, and give a
token the same bits whether it comes alone or among others, on every machine.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from course_lib import backend
from course_lib.arrays import NotFiniteError, require_finite
from course_lib.attention_common import softmax as numpy_softmax
from course_lib.engine.rope import RopeScaling
from course_lib.linear import PackedMatrix, linear

__all__ = ["add_linear", "add_swiglu", "argmax", "columns", "linear", "matrix_parts",
           "project_heads", "rms_norm", "rope", "rope_powers", "rope_tables", "silu_mul", "softmax",
           "split_heads", "swiglu"]

Matrix = np.ndarray | PackedMatrix


def rms_norm(x: np.ndarray, gain: np.ndarray, eps: float) -> np.ndarray:
    """x / sqrt(mean(x²) + eps) · gain over the last axis.

    x float32 `[..., d]`, gain float32 `[d]` -> float32 `[..., d]`. Raises NotFiniteError where the
    mean is not finite: dividing by infinity would make zeros. Source: Zhang and Sennrich 2019.
    """
    if (compiled := backend.kernel("rms_norm")) is not None:
        out = np.empty(x.shape, np.float32)
        _compute(compiled, _rows(x), gain, eps, _rows(out))
        return out
    mean_square = np.mean(np.square(x), axis=-1, keepdims=True)
    if not np.isfinite(mean_square).all():
        raise NotFiniteError("the mean square of a row is not finite; its values are too large.")
    return x / np.sqrt(mean_square + np.float32(eps)) * gain


def rope_tables(
    positions: np.ndarray, head_dim: int, theta: float, scaling: RopeScaling | None = None
) -> tuple[np.ndarray, np.ndarray]:
    """cos and sin of the RoPE angles position · theta^(-2i/head_dim), i = 0 … head_dim/2 - 1.

    positions integer `[n]` -> two float32 `[n, head_dim/2]`. The angle is a float32 product, as
    in the models' training code: near position 2,000 its rounding reaches 1e-4 radians, so a more
    exact angle would not be the angle that the weights were trained with. `scaling` stretches the
    frequencies and may multiply both tables by a factor.
    """
    n, pairs = len(positions), head_dim // 2
    if scaling is None and (compiled := backend.kernel("rope_tables")) is not None:
        cos, sin = np.empty((2, n, pairs), np.float32)
        compiled(positions.astype(np.int64), theta, cos, sin)
        return cos, sin
    powers, factor = rope_powers(head_dim, theta), np.float32(1)
    frequencies = np.float32(1) / powers
    if scaling is not None:
        frequencies = scaling.stretched(powers, theta)
        factor = np.float32(scaling.attention_factor)
    if (compiled := backend.kernel("rope_angles")) is not None:
        cos, sin = np.empty((2, n, pairs), np.float32)
        compiled(positions.astype(np.int64), frequencies, factor, cos, sin)
        return cos, sin
    angle = positions.astype(np.float32)[:, None] * frequencies
    return np.cos(angle) * factor, np.sin(angle) * factor


def rope_powers(head_dim: int, theta: float) -> np.ndarray:
    """theta^(2i/head_dim), i = 0 … head_dim/2 - 1: float32 `[head_dim/2]`, exponents too."""
    if (compiled := backend.kernel("rope_powers")) is not None:
        powers = np.empty(head_dim // 2, np.float32)
        compiled(theta, powers)
        return powers
    exponents = np.arange(0, head_dim, 2, dtype=np.float32) / np.float32(head_dim)
    return np.power(np.float32(theta), exponents)


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


def split_heads(
    stacked: np.ndarray,
    q_gain: np.ndarray | None,
    k_gain: np.ndarray | None,
    eps: float,
    cos: np.ndarray,
    sin: np.ndarray,
    q: np.ndarray,
    k: np.ndarray,
    v: np.ndarray,
) -> None:
    """Cut a token's stacked heads into q, k and v; norm (where there is a gain) and turn q and k.

    stacked float32 `[n, heads + 2 · kv_heads, d]`, gains float32 `[d]` or None, cos and sin
    float32 `[n, d/2]`; q float32 `[heads, n, d]`, k and v `[kv_heads, n, d]` receive the rows and
    may be views of some tokens of longer arrays. Raises NotFiniteError as `rms_norm` does.
    """
    if (compiled := backend.kernel("split_heads")) is not None:
        _compute(compiled, stacked, q_gain, k_gain, eps, cos, sin, q, k, v)
        return
    queries, keys, values = np.split(stacked, (len(q), len(q) + len(k)), axis=1)
    for rows, gain, out in ((queries, q_gain, q), (keys, k_gain, k)):
        normed = rows if gain is None else rms_norm(rows, gain, eps)
        out[...] = rope(normed, cos, sin).transpose(1, 0, 2)
    v[...] = values.transpose(1, 0, 2)


def swiglu(h: np.ndarray, gate_up_proj: Matrix, down_proj: Matrix) -> np.ndarray:
    """down(SiLU(gate · h) · (up · h)) of rows `[t, hidden]`; the gate's rows lie above the up's."""
    stacked = linear(h, gate_up_proj)
    inner = stacked.shape[-1] // 2
    return linear(silu_mul(stacked[..., :inner], stacked[..., inner:]), down_proj)


def project_heads(
    x: np.ndarray,
    gain: np.ndarray,
    eps: float,
    qkv_proj: Matrix,
    q_gain: np.ndarray | None,
    k_gain: np.ndarray | None,
    cos: np.ndarray,
    sin: np.ndarray,
    q: np.ndarray,
    k: np.ndarray,
    v: np.ndarray,
) -> None:
    """Write the query, key and value rows of hidden states x `[n, hidden]`: what attention reads.

    The other arguments as those of `split_heads` and `rms_norm`. A single row takes all three
    steps in one call of a kernel, with the same bits: a decoded token waits for every call.
    """
    d = q.shape[-1]
    if (compiled := _one_row("attention_input", x, d % 16, x.shape[-1] % 32)) is not None:
        _compute(compiled, x, gain, eps, *matrix_parts(qkv_proj), q_gain, k_gain, cos, sin, q, k, v)
        return
    stacked = linear(rms_norm(x, gain, eps), qkv_proj)
    split_heads(stacked.reshape(len(x), -1, d), q_gain, k_gain, eps, cos, sin, q, k, v)


def add_linear(x: np.ndarray, h: np.ndarray, w: Matrix) -> None:
    """x += w · h of float32 rows x `[n, rows]` and h `[n, cols]`; one call where n is 1."""
    if (compiled := _one_row("attention_output", x, h.shape[-1] % 32)) is not None:
        _compute(compiled, x, h, *matrix_parts(w))
        return
    x += linear(h, w)


def add_swiglu(x: np.ndarray, gain: np.ndarray, eps: float, gate_up_proj: Matrix,
               down_proj: Matrix) -> None:
    """x += swiglu(rms_norm(x)) of float32 rows x `[n, hidden]`; one call where n is 1."""
    inner = columns(down_proj)
    if (compiled := _one_row("swiglu", x, x.shape[-1] % 32, inner % 32)) is not None:
        _compute(compiled, x, gain, eps, *matrix_parts(gate_up_proj), *matrix_parts(down_proj))
        return
    x += swiglu(rms_norm(x, gain, eps), gate_up_proj, down_proj)


def silu_mul(gate: np.ndarray, up: np.ndarray) -> np.ndarray:
    """SiLU(gate) · up, the SwiGLU gate: gate/(1 + exp(-gate)) · up, float32, same shapes."""
    if (compiled := backend.kernel("silu_mul")) is not None:
        out = np.empty(gate.shape, np.float32)
        _compute(compiled, _columns(gate), _columns(up), _rows(out))
        return out
    # exp(88) is the last power below float32's largest number; beyond it SiLU is 0 to all digits.
    return gate / (np.float32(1.0) + np.exp(np.minimum(-gate, np.float32(88.0)))) * up


def softmax(x: np.ndarray) -> np.ndarray:
    """exp(x - max) over their sum, of every row of float32 `[n, m]`, m >= 1, finite."""
    if (compiled := backend.kernel("softmax")) is not None:
        out = np.empty(x.shape, np.float32)
        _compute(compiled, x, out)
        return out
    require_finite(x, "x")
    return numpy_softmax(x)


def argmax(x: np.ndarray) -> int:
    """Index of the largest of float32 `[n]`, n >= 1, the lowest on ties; none of them is NaN."""
    compiled = backend.kernel("argmax")
    return int(np.argmax(x)) if compiled is None else compiled(x)


def _one_row(name: str, x: np.ndarray, *rest: int) -> Callable[..., Any] | None:
    """The kernel that takes one row through a whole step, if x is one and nothing is left over."""
    return backend.kernel(name) if len(x) == 1 and not any(rest) else None


def columns(w: Matrix) -> int:
    """How many values a row of weights has."""
    return w.cols if isinstance(w, PackedMatrix) else w.shape[1]


def matrix_parts(w: Matrix) -> tuple[np.ndarray, np.ndarray | None]:
    """Weights as such a kernel takes them: float32 and None, or codes and scales."""
    return (w.codes, w.scales) if isinstance(w, PackedMatrix) else (w, None)


def _rows(x: np.ndarray) -> np.ndarray:
    """`[..., d]` -> C-contiguous `[rows, d]`."""
    x = np.ascontiguousarray(x)
    return x if x.ndim == 2 else x.reshape(-1, x.shape[-1])


def _columns(x: np.ndarray) -> np.ndarray:
    """`[..., d]` -> `[rows, d]`; some columns of wider rows stay where they are."""
    d = x.shape[-1]
    in_place = x.ndim == 2 and x.strides[1] == x.itemsize and x.strides[0] >= d * x.itemsize
    return x if in_place else _rows(x)


def _compute(kernel, *arguments) -> None:
    """Run a kernel on arguments that fit, so that what it refuses are the numbers."""
    try:
        kernel(*arguments)
    except ValueError as error:
        raise NotFiniteError(f"{error}.") from None
