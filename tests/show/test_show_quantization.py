"""The two rounding explorers of day 9 against the quantizer they show."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from course_lib.lab.captured import capture
from course_lib.lab.kv_precision import KVCase, gaussian_case, kv_error
from course_lib.lab.needle import NeedleOptions, prompt_of
from course_lib.quant import ROUNDING_RULES, quantize_rows
from course_lib.show import QuantizationErrorExplorer, RoundingBiasExplorer
from course_lib.show.quantization import (
    OUTLIERS,
    TOY_ROW,
    error_bound_steps,
    quantize_with_outlier,
)
from course_lib.show.rounding import SIGNS, VALUES, mean_errors
from tests.tiny_checkpoint import tiny_engine


@pytest.fixture(scope="module")
def engine(tmp_path_factory):
    return tiny_engine(tmp_path_factory, max_position_embeddings=512)


@pytest.fixture(scope="module")
def explorer(engine):
    return QuantizationErrorExplorer(engine)


@pytest.fixture(scope="module")
def bias(engine):
    return RoundingBiasExplorer(engine)


ROWS = arrays(np.float32, st.integers(1, 40), elements=st.floats(-1e4, 1e4, width=32))


@settings(max_examples=200, deadline=None)
@given(ROWS, st.sampled_from(ROUNDING_RULES), st.sampled_from(OUTLIERS))
def test_the_error_stays_inside_the_bound_shown(row, rule, outlier):
    r = quantize_with_outlier(row, rule, outlier)
    # One rounding of x·(127/max), one of q·scale: both below 2⁻²² of the row's largest value.
    slack = 2.0**-22 * max(float(np.abs(r["x"]).max()), r["scale"])
    assert (np.abs(r["error"]) <= r["bound"] + slack).all()
    q, scale = quantize_rows(r["x"], rule)
    assert np.array_equal(r["q"], q) and r["scale"] == float(scale)


@settings(max_examples=100, deadline=None)
@given(ROWS, st.sampled_from(OUTLIERS))
def test_only_the_largest_value_grows_and_every_step_with_it(row, outlier):
    before = row.copy()
    r = quantize_with_outlier(row, "half_up", outlier)
    assert np.array_equal(row, before)
    others = np.delete(np.arange(len(row)), r["peak"])
    assert np.array_equal(r["x"][others], row[others])
    assert abs(row[r["peak"]]) == np.abs(row).max()
    assert r["x"][r["peak"]] == row[r["peak"]] * np.float32(outlier)
    if np.abs(row).max() >= 1e-6:
        assert r["scale"] == pytest.approx(outlier * r["scale_plain"], rel=1e-6)


def test_the_six_numbers_can_be_checked_by_eye(explorer):
    r = explorer.compute()
    assert r["scale"] == pytest.approx(0.01, rel=1e-6)
    assert r["q"].tolist() == [127, -50, 26, -3, 1, 0]
    assert explorer.compute(rule="half_even")["q"].tolist() == [127, -50, 26, -4, 1, 0]
    assert explorer.compute(rule="trunc")["q"].tolist() == [127, -49, 26, -3, 1, 0]
    assert explorer.compute(outlier=32)["q"].tolist() == [127, -2, 1, 0, 0, 0]


def test_rows_of_the_model_are_its_cache(engine, explorer):
    ids = prompt_of(engine, NeedleOptions(tokens=256), 0).ids
    cache = engine.prefill(ids).cache
    for source, part in (("k", "k"), ("v", "v")):
        r = explorer.compute(source=source, layer=1, head=1, token=200)
        assert np.array_equal(r["x"], getattr(cache.rows(1), part)[1, 200])
        assert f"{source.upper()} row of layer 1, KV head 1, token 200" in r["name"]
        assert repr(engine.decode([ids[200]])) in r["name"]


def test_the_twin_prints_what_the_picture_shows(explorer):
    text = explorer.set(source="toy", rule="half_up", outlier=1).summary()
    assert "step = scale = max|x|/127 = 0.01 " in text
    assert "max|error| = 0.005 = 0.5 steps" in text and "bound = 0.5 steps = 0.005" in text
    assert "read back as 0 though not 0: 1 of 6" in text
    assert len(text.splitlines()) == 6 + len(TOY_ROW)
    text = explorer.set(source="normal", outlier=8).summary()
    assert "(8 × the step without the factor)" in text and len(text.splitlines()) == 5


def test_an_own_row_and_wrong_arguments(engine):
    assert QuantizationErrorExplorer(engine, row=[3.0, -1.0]).compute()["q"].tolist() == [127, -42]
    assert QuantizationErrorExplorer(engine, row=[0.0, 0.0]).set(outlier=8).png()
    for wrong in ({"rule": "floor"}, {"source": "q"}, {"outlier": 3}, {"layer": 9}, {"token": 256}):
        with pytest.raises(ValueError):
            QuantizationErrorExplorer(engine, **wrong)


def test_controls_of_a_model_row_are_off_for_other_rows(engine):
    explorer = QuantizationErrorExplorer(engine)
    named = [explorer.controls[name] for name in ("layer", "head", "token")]
    assert all(control.disabled for control in named)
    explorer.controls["source"].value = "v"
    assert not any(control.disabled for control in named)
    explorer.set(source="normal")
    assert all(control.disabled for control in named)


@pytest.mark.parametrize("rule", ROUNDING_RULES)
def test_mean_errors_by_sign(rule):
    rows = np.random.default_rng(3).standard_normal((64, 128), np.float32)
    q, scale = quantize_rows(rows, rule)
    steps = rows.astype(np.float64) / scale[:, None].astype(np.float64)
    found = mean_errors(rows, rule)
    for sign, mask in (("negative", rows < 0), ("positive", rows > 0), ("both", rows != 0)):
        assert found[sign] == pytest.approx((q - steps)[mask].mean(), abs=1e-4)
    # 8192 errors spread evenly over one step: their mean's deviation is 0.289/√4096 = 0.0045.
    wanted = {"negative": 1.0, "positive": 0.0, "both": 0.5} if rule == "trunc" else {}
    for sign in SIGNS:
        assert abs(found[sign] - wanted.get(sign, 0.0)) < 5 * 0.0045
    assert error_bound_steps(rule) == (1.5 if rule == "trunc" else 0.5)


def test_a_missing_sign_is_said():
    with pytest.raises(ValueError, match="sign negative"):
        mean_errors(np.ones((1, 4)), "half_up")


@pytest.mark.parametrize("parts", ["v", "k", "kv"])
def test_the_attention_effect_is_the_labs(bias, parts):
    r = bias.compute(rule="trunc", parts=parts, seed=4)
    step = float(quantize_rows(gaussian_case(4).v)[1].mean())
    for rule in ROUNDING_RULES:
        error = kv_error(gaussian_case(4), rule, parts)
        assert r["mean_abs"][rule] == pytest.approx(error.mean_abs / step)
        assert r["positive_share"][rule] == error.positive_share
    assert np.abs(r["delta"]).mean() == pytest.approx(r["mean_abs"]["trunc"])


@pytest.mark.parametrize("parts", ["v", "k", "kv"])
@pytest.mark.parametrize("layer, head", [(0, 0), (1, 1)])
def test_the_models_own_rows(engine, bias, parts, layer, head):
    """Rows of the cache that a prefill leaves, asked by the last query of the head's group."""
    ids = prompt_of(engine, NeedleOptions(tokens=512), 0).ids
    rows = engine.prefill(ids).cache.rows(layer)
    k, v = rows.k[head], rows.v[head]
    r = bias.compute(source="model", values=512, parts=parts, layer=layer, head=head)
    size = k.shape[1]
    wanted = {"v": v, "k": k, "kv": np.stack((k, v), 1).reshape(-1, size)}[parts][: 512 // size]
    assert r["values"] == wanted.size and r["tokens"] == len(k) == len(ids)
    for rule in ROUNDING_RULES:
        assert r["bias"][rule] == mean_errors(wanted, rule)
    case = KVCase(capture(engine, ids)[layer].q[head * 2, -1], k, v)
    step = float(quantize_rows(v)[1].mean())
    for rule in ROUNDING_RULES:
        assert r["mean_abs"][rule] == pytest.approx(kv_error(case, rule, parts).mean_abs / step)
    assert f"{parts.upper()} rows of {size}, layer {layer}, KV head {head}" in bias.describe(r)


def test_controls_of_the_source_that_is_not_chosen_are_off(engine):
    explorer = RoundingBiasExplorer(engine)
    off = [name for name, control in explorer.controls.items() if control.disabled]
    assert off == ["layer", "head"]
    explorer.controls["source"].value = "model"
    off = [name for name, control in explorer.controls.items() if control.disabled]
    assert off == ["seed"] and "layer 0, KV head 0" in explorer.summary()
    for wrong in ({"source": "toy"}, {"layer": 9}, {"values": 100}, {"parts": "q"}):
        with pytest.raises(ValueError):
            RoundingBiasExplorer(engine, **wrong)


@pytest.mark.parametrize("values", VALUES)
def test_every_number_of_values_has_both_signs(bias, values):
    r = bias.compute(values=values, seed=9)
    assert set(r["bias"]) == set(ROUNDING_RULES)


def test_the_bias_twin_prints_every_rule(bias):
    r = bias.set(rule="trunc", seed=1).result
    text = bias.summary()
    for rule in ROUNDING_RULES:
        line = next(line for line in text.splitlines() if line.startswith(rule + " "))
        assert f"{100 * r['positive_share'][rule]:.1f} %" in line
        assert ("drawn" in line) == (rule == "trunc")


def test_drawing_makes_no_artists_and_equal_settings_equal_bytes(explorer, bias, engine):
    ways = {
        explorer: [{"source": "toy", "outlier": 32}, {"source": "normal"}, {"source": "k"}],
        bias: [{"rule": "trunc", "parts": "v"}, {"rule": "half_up", "parts": "k"}],
    }
    for shown, options in ways.items():
        for option in options:  # ticks are made while drawing, and kept
            shown.set(**option)
        count = len(shown.figure.findobj())
        first = shown.set(**options[0]).png()
        results = [shown.compute(**{**shown.params, **option}) for option in options]
        for result in results * 4:
            shown.draw(result)
        assert len(shown.figure.findobj()) == count
        assert shown.set(**options[0]).png() == first
        assert all(c.description and c.tooltip for c in shown.controls.values())
    again = QuantizationErrorExplorer(engine, **explorer.params)
    assert again.png() == explorer.png() and again.summary() == explorer.summary()
