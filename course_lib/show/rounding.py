"""Rounding bias: four rules over many values, and what each does to an attention output."""

from __future__ import annotations

from functools import cached_property
from typing import Any

import numpy as np

from course_lib.engine import Engine
from course_lib.lab.captured import Layer, capture
from course_lib.lab.kv_precision import PARTS, KVCase, gaussian_case, kv_error
from course_lib.lab.needle import NeedleOptions, prompt_of
from course_lib.quant import ROUNDING_RULES, dequantize_rows, quantize_rows
from course_lib.show.controls import dropdown, number, steps
from course_lib.show.explorer import Explorer
from course_lib.show.models import shipped_engine
from course_lib.show.rounding_picture import RoundingPicture
from course_lib.show.text import fmt, percent

VALUES = (128, 512, 2048, 8192, 32768)
SEEDS = 10
SIGNS = ("negative", "positive", "both")
SOURCES = {"N(0,1)": "normal", "rows of the model": "model"}
TOKENS = 512  # of the prompt whose rows are taken
_ROW = 128  # random values that share a scale


def mean_errors(values: Any, rule: str) -> dict[str, float]:
    """Mean error in steps of q8 rows, over the negative values, the positive ones, and both.

    values: real numbers [rows, d]; error = (q · scale − x) / scale. Raises ValueError as
    quantize_rows does, and where one of the signs has no value.
    """
    x = np.asarray(values, np.float32)
    q, scale = quantize_rows(x, rule)
    error = (dequantize_rows(q, scale).astype(np.float64) - x) / scale[..., None]
    masks = {"negative": x < 0, "positive": x > 0, "both": x != 0}
    for sign, mask in masks.items():
        if not mask.any():
            raise ValueError(f"values hold nothing to average for sign {sign}; give more of them.")
    return {sign: float(error[mask].mean()) for sign, mask in masks.items()}


class RoundingBiasExplorer(Explorer):
    """Mean error of the four rounding rules by the sign of the value, and their effect on 9-3.

    engine: where the model's rows come from (default: the shipped model). source: "normal",
    numbers from N(0,1) in rows of 128 and attention over 256 such tokens, or "model", rows of one
    KV head of a prompt and the query that asks them last. rule: whose attention errors are drawn
    one by one; values: one of VALUES, numbers that are rounded; parts: what is quantized in the
    attention experiment, "v", "k" or "kv", and whose rows are rounded of the model's; seed 0 … 9
    draws other random numbers; layer, head (KV head) choose the model's.
    """

    question = ("What is the mean error of trunc, in steps, over negative values, over positive "
                "ones, over both? And what does it do to the output of attention: K or V, which "
                "is hurt?")
    alt = "mean error by sign for four rounding rules, and the attention errors they cause"
    drawing = RoundingPicture

    def __init__(self, engine: Engine | None = None, *, source: str = "normal",
                 rule: str = "half_up", values: int = 8192, parts: str = "v", seed: int = 0,
                 layer: int = 0, head: int = 0) -> None:
        self.engine = engine or shipped_engine()
        config = self.engine.config
        super().__init__({
            "source": dropdown("numbers", SOURCES, source, "where the numbers come from"),
            "rule": dropdown("rounding rule", ROUNDING_RULES, rule, "drawn in the lower panel"),
            "values": steps("values", VALUES, values, "how many numbers are rounded"),
            "parts": dropdown("quantize", PARTS, parts, "K rows, V rows or both, in attention"),
            "seed": number("seed", SEEDS - 1, seed, "draws other random numbers"),
            "layer": number("layer", config.num_hidden_layers - 1, layer, "of the model's rows"),
            "head": number("KV head", config.num_key_value_heads - 1, head, "of the model's rows"),
        })
        self._enable_controls()

    @cached_property
    def _layers(self) -> tuple[Layer, ...]:
        return capture(self.engine, prompt_of(self.engine, NeedleOptions(tokens=TOKENS), 0).ids)

    def _case(self, source: str, seed: int, layer: int, head: int) -> KVCase:
        if source == "normal":
            return gaussian_case(seed)
        rows = self._layers[layer]
        group = len(rows.q) // len(rows.k)
        return KVCase(rows.q[head * group, -1], rows.k[head], rows.v[head])

    def compute(self, source: str = "normal", rule: str = "half_up", values: int = 8192,
                parts: str = "v", seed: int = 0, layer: int = 0, head: int = 0) -> dict[str, Any]:
        """Errors of every rule, in steps; `delta` (float64 [d]) those of `rule` in attention."""
        case = self._case(source, seed, layer, head)
        if source == "normal":
            rows = np.random.default_rng(seed).standard_normal((values // _ROW, _ROW), np.float32)
            name = f"N(0,1), rows of {_ROW}, seed {seed}"
        else:
            rows = np.stack([getattr(case, part) for part in parts], axis=1)
            rows = rows.reshape(-1, rows.shape[-1])[: max(1, values // rows.shape[-1])]
            name = f"{parts.upper()} rows of {rows.shape[-1]}, layer {layer}, KV head {head}"
        step = float(quantize_rows(case.v)[1].mean())
        attention = {name: kv_error(case, name, parts) for name in ROUNDING_RULES}
        return {
            "source": source, "name": name, "tokens": len(case.k), "rule": rule,
            "values": rows.size, "parts": parts, "seed": seed, "v_step": step,
            "bias": {name: mean_errors(rows, name) for name in ROUNDING_RULES},
            "mean_abs": {name: e.mean_abs / step for name, e in attention.items()},
            "positive_share": {name: e.positive_share for name, e in attention.items()},
            "delta": attention[rule].delta.astype(np.float64) / step,
        }

    def adjust(self, name: str) -> None:
        if name == "source":
            self._enable_controls()

    def _enable_controls(self) -> None:
        real = self.controls["source"].value == "model"
        self.controls["seed"].disabled = real
        self.controls["layer"].disabled = self.controls["head"].disabled = not real

    def describe(self, result: dict[str, Any]) -> str:
        return describe(result)


def describe(r: dict[str, Any]) -> str:
    """The text twin of one `compute` result."""
    lines = [
        f"{r['values']} values from {r['name']}; errors in steps",
        f"attention: {r['tokens']} tokens, {r['parts'].upper()} quantized, output error in V steps "
        f"(1 step = {fmt(r['v_step'])})",
        f"{'rule':<10} {'mean error of':>13} {'':>10} {'':>8} | {'attention output':>20}",
        f"{'':<10} {'negatives':>13} {'positives':>10} {'both':>8} | {'mean|Δ|':>9} "
        f"{'positive':>10}",
    ]
    for name in ROUNDING_RULES:
        bias = [fmt(round(r["bias"][name][sign], 3)) for sign in SIGNS]
        mark = "  ← drawn" if name == r["rule"] else ""
        share = percent(r["positive_share"][name])
        lines.append(f"{name:<10} {bias[0]:>13} {bias[1]:>10} {bias[2]:>8} | "
                     f"{fmt(r['mean_abs'][name]):>9} {share:>10}{mark}")
    return "\n".join(lines)
