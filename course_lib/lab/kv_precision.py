"""Article 9-3's experiment: attention over float KV rows and over the same rows quantized.

One query, `tokens` rows, one head; only "was it quantized" differs between the two sides.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from course_lib.attention import two_pass
from course_lib.quant import dequantize_rows, quantize_rows

PARTS = ("kv", "k", "v")


class KVCase(NamedTuple):
    """A query [head_dim] and rows k, v [tokens, head_dim], float32."""

    q: np.ndarray
    k: np.ndarray
    v: np.ndarray


@dataclass(frozen=True)
class KVError:
    """The error of one comparison: `delta` = quantized − float output, float32 [head_dim]."""

    delta: np.ndarray
    out: np.ndarray
    out_quantized: np.ndarray
    mean_k_scale: float

    @property
    def max_abs(self) -> float:
        return float(np.abs(self.delta).max())

    @property
    def mean_abs(self) -> float:
        return float(np.abs(self.delta).mean())

    @property
    def positive_share(self) -> float:
        """Share of output components that the quantized side raised; 0.5 = no preferred sign."""
        return float((self.delta > 0).mean())

    @property
    def relative(self) -> float:
        """mean |delta| / mean |out|: what article 9-3 expects to stay constant under scaling."""
        return self.mean_abs / float(np.abs(self.out).mean())


def gaussian_case(
    seed: int, tokens: int = 256, head_dim: int = 128, *,
    q_scale: float = 1.0, k_scale: float = 1.0, v_scale: float = 1.0,
) -> KVCase:
    """Rows from N(0, 1) times the given factors; the sizes are article 9-3's."""
    rng = np.random.default_rng(seed)
    shapes = ((head_dim,), (tokens, head_dim), (tokens, head_dim))
    parts = [rng.standard_normal(shape, dtype=np.float32) for shape in shapes]
    factors = (q_scale, k_scale, v_scale)
    return KVCase(*(p * np.float32(f) for p, f in zip(parts, factors, strict=True)))


def quantize_and_read_back(rows: np.ndarray, rule: str = "half_up") -> np.ndarray:
    """The rows as a q8 KV cache returns them: int8 × scale, float32."""
    return dequantize_rows(*quantize_rows(rows, rule))


def kv_error(case: KVCase, rule: str = "half_up", parts: str = "kv") -> KVError:
    """Quantize K, V or both with one rounding rule and compare the attention outputs.

    parts: "kv", "k" or "v". Raises ValueError for another value or an unknown rule.
    """
    if parts not in PARTS:
        raise ValueError(f"parts must be one of {', '.join(PARTS)}, not {parts!r}")
    k8 = quantize_and_read_back(case.k, rule) if "k" in parts else case.k
    v8 = quantize_and_read_back(case.v, rule) if "v" in parts else case.v
    out = two_pass(case.q[None], case.k[None], case.v[None])[0]
    out8 = two_pass(case.q[None], k8[None], v8[None])[0]
    scale = quantize_rows(case.k, rule)[1]
    return KVError(out8 - out, out, out8, float(scale.mean()))


def mean_over_seeds(
    seeds: int = 50, rule: str = "half_up", parts: str = "kv", **case_options
) -> dict[str, float]:
    """The mean over seeds 0 … seeds − 1 of each reading of `kv_error` on Gaussian rows."""
    errors = [kv_error(gaussian_case(seed, **case_options), rule, parts) for seed in range(seeds)]
    names = ("max_abs", "mean_abs", "positive_share", "relative", "mean_k_scale")
    return {name: float(np.mean([getattr(e, name) for e in errors])) for name in names}
