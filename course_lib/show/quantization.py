"""Quantization error of one q8 row: how one outlier coarsens the step of all its neighbours."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import Any

import numpy as np

from course_lib.engine import Engine
from course_lib.lab.needle import NeedleOptions, prompt_of
from course_lib.quant import Q_MAX, ROUNDING_RULES, dequantize_rows, quantize_rows
from course_lib.show.controls import dropdown, number, steps
from course_lib.show.explorer import Explorer
from course_lib.show.models import shipped_engine
from course_lib.show.quantization_picture import QuantizationPicture
from course_lib.show.text import fmt, plural

TOY_ROW = (1.27, -0.5, 0.255, -0.035, 0.014, 0.004)
"""Six numbers to check by eye: the largest is 1.27, so the step is 0.01."""

OUTLIERS = (1, 2, 4, 8, 16, 32)
SOURCES = {"six numbers": "toy", "N(0,1), 128 values": "normal", "a K row of the model": "k",
           "a V row of the model": "v"}
_TOKENS = 256  # of the needle prompt whose K and V rows are shown
_TABLE_ROWS = 8  # up to so many values are listed one by one


def error_bound_steps(rule: str) -> float:
    """The largest error of a rule in steps: half a step, for `trunc` one and a half."""
    return 1.5 if rule == "trunc" else 0.5


def quantize_with_outlier(row: Any, rule: str = "half_up", outlier: float = 1) -> dict[str, Any]:
    """Multiply the largest magnitude of a row by `outlier`, quantize the row, measure the error.

    row: real numbers [d]. Returns x, q, read_back, error (= read_back − x, float64 [d]), scale,
    scale_plain (of the row without the factor), peak (index of the outlier), bound (error_bound
    of the rule times scale). Raises ValueError as quantize_rows does.
    """
    x = np.array(row, dtype=np.float32)
    peak = int(np.abs(x).argmax())
    scale_plain = float(quantize_rows(x, rule)[1])
    x[peak] *= np.float32(outlier)
    q, scale = quantize_rows(x, rule)
    read_back = dequantize_rows(q, scale)
    return {
        "x": x, "q": q, "read_back": read_back,
        "error": read_back.astype(np.float64) - x.astype(np.float64),
        "scale": float(scale), "scale_plain": scale_plain, "peak": peak,
        "bound": error_bound_steps(rule) * float(scale), "rule": rule, "outlier": outlier,
    }


class QuantizationErrorExplorer(Explorer):
    """One row of KV cache in 8 bits: choose the row, the rounding rule and the outlier's size.

    engine: where K and V rows come from (default: the shipped model, loaded when first needed).
    row: your own toy row instead of TOY_ROW. source: "toy", "normal", "k" or "v"; rule: one of
    ROUNDING_RULES; outlier: one of OUTLIERS; layer, head (KV head) and token choose a K or V row.
    """

    question = ("The largest value grows. What happens to the error of the other values, and how "
                "many of them are read back as 0?")
    alt = "values of one row, the same values near zero on the quantizer's grid, and the errors"
    drawing = QuantizationPicture

    def __init__(
        self, engine: Engine | None = None, *, row: Sequence[float] = TOY_ROW,
        source: str = "toy", rule: str = "half_up", outlier: int = 1,
        layer: int = 0, head: int = 0, token: int = 0,
    ) -> None:
        self._engine = engine
        self._toy = np.array(row, dtype=np.float32)
        config = self._model.config
        super().__init__({
            "source": dropdown("row", SOURCES, source, "where the row of numbers comes from"),
            "rule": dropdown("rounding rule", ROUNDING_RULES, rule, "how y is made a whole number"),
            "outlier": steps("outlier ×", OUTLIERS, outlier,
                             "the largest value of the row is multiplied by this"),
            "layer": number("layer", config.num_hidden_layers - 1, layer, "for K and V rows"),
            "head": number("KV head", config.num_key_value_heads - 1, head, "for K and V rows"),
            "token": number("token", _TOKENS - 1, token, "position in the prompt, for K and V"),
        })
        self._enable_row_controls()

    @property
    def _model(self) -> Engine:
        return self._engine or shipped_engine()

    @cached_property
    def _prompt(self):
        return prompt_of(self._model, NeedleOptions(tokens=_TOKENS), 0)

    @cached_property
    def _cache(self):
        return self._model.prefill(self._prompt.ids, importance="none").cache

    def row(self, source: str, layer: int = 0, head: int = 0, token: int = 0) -> np.ndarray:
        """The row before any outlier, float32 [d]."""
        if source == "toy":
            return self._toy
        if source == "normal":
            return np.random.default_rng(0).standard_normal(128, dtype=np.float32)
        rows = self._cache.rows(layer)
        return (rows.k if source == "k" else rows.v)[head, token]

    def compute(self, source: str = "toy", rule: str = "half_up", outlier: int = 1,
                layer: int = 0, head: int = 0, token: int = 0) -> dict[str, Any]:
        """The row of `source` through quantize_with_outlier, with its name."""
        result = quantize_with_outlier(self.row(source, layer, head, token), rule, outlier)
        return {**result, "name": self._name(source, layer, head, token, len(result["x"]))}

    def _name(self, source: str, layer: int, head: int, token: int, size: int) -> str:
        if source == "toy":
            return plural(size, "toy number")
        if source == "normal":
            return f"{size} values from N(0,1), seed 0"
        word = self._model.decode([self._prompt.ids[token]])
        return f"{source.upper()} row of layer {layer}, KV head {head}, token {token} {word!r}"

    def adjust(self, name: str) -> None:
        if name == "source":
            self._enable_row_controls()

    def _enable_row_controls(self) -> None:
        real = self.controls["source"].value in ("k", "v")
        for name in ("layer", "head", "token"):
            self.controls[name].disabled = not real

    def describe(self, result: dict[str, Any]) -> str:
        return describe(result)


def describe(r: dict[str, Any]) -> str:
    """The text twin of one `compute` result."""
    x, error, scale = r["x"], r["error"], r["scale"]
    magnitude = np.abs(error)
    lost = int(((r["q"] == 0) & (x != 0)).sum())
    lines = [
        f"{r['name']}; rule {r['rule']}; largest value × {r['outlier']}",
        f"max|x| = {fmt(np.abs(x).max())}   step = scale = max|x|/{Q_MAX} = {fmt(scale)}"
        f"   ({fmt(scale / r['scale_plain'])} × the step without the factor)",
        f"max|error| = {fmt(magnitude.max())} = {fmt(magnitude.max() / scale)} steps"
        f"   bound = {error_bound_steps(r['rule'])} steps = {fmt(r['bound'])}",
        f"mean|error| = {fmt(magnitude.mean() / scale)} steps"
        f"   mean error = {fmt(round(float(error.mean() / scale), 4))} steps",
        f"read back as 0 though not 0: {lost} of {len(x)}",
    ]
    if len(x) <= _TABLE_ROWS:
        lines.append(f"{'x':>9} {'x·127/max':>10} {'q':>5} {'q·scale':>9} {'error':>10}")
        for value, q, back, e in zip(x, r["q"], r["read_back"], error, strict=True):
            lines.append(f"{fmt(value):>9} {value / scale:>10.2f} {q:>5d} {fmt(back):>9} "
                         f"{fmt(round(float(e), 7)):>10}")
    return "\n".join(lines)
