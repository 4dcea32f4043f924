"""The model against a literal float64 Qwen3, layer by layer and as a whole."""

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from course_lib import backend, prefill_attention
from course_lib.arrays import NotFiniteError
from course_lib.engine import Engine, ModelConfig, layers
from course_lib.engine.conversion import load_weights
from course_lib.engine.model import Model
from course_lib.engine.prefill import run_prompt
from tests.tiny_checkpoint import (
    BASE_CONFIG,
    ArraySource,
    logit_tolerance,
    random_tensors,
    reference_logits,
    write_checkpoint,
)


def model_of(config, tensors):
    """A Model straight from arrays, without files."""
    known = ModelConfig.__dataclass_fields__
    model_config = ModelConfig(**{key: value for key, value in config.items() if key in known})
    return Model(model_config, load_weights(ArraySource(tensors), model_config))


def all_logits(model, ids):
    _, hidden = run_prompt(model, ids)
    return model.logits(hidden)


CONFIGS = {
    "gqa 4:2": {},
    "mha": {"num_key_value_heads": 4},
    "mqa": {"num_key_value_heads": 1},
    "gqa 6:3, head_dim 16 != hidden/heads": {
        "num_attention_heads": 6,
        "num_key_value_heads": 3,
        "head_dim": 16,
    },
    "untied, large eps, other theta": {
        "tie_word_embeddings": False,
        "rms_norm_eps": 0.1,
        "rope_theta": 50.0,
    },
    "three layers": {"num_hidden_layers": 3},
}


@pytest.mark.parametrize("name", CONFIGS)
def test_logits_equal_the_literal_definition(name):
    config = BASE_CONFIG | CONFIGS[name]
    tensors = random_tensors(config, seed=len(name))
    ids = np.random.default_rng(1).integers(0, config["vocab_size"], 25).tolist()
    expected = reference_logits(config, tensors, ids)
    got = all_logits(model_of(config, tensors), ids)
    assert got.dtype == np.float32 and got.shape == (25, config["vocab_size"])
    np.testing.assert_allclose(got, expected, rtol=0, atol=logit_tolerance(config, expected))


# Each of these slips leaves the model plausible; the literal definition must tell every one.
def rope_neighbours(x, cos, sin):
    first, second = x[..., ::2], x[..., 1::2]
    cos, sin = cos[:, None], sin[:, None]
    out = np.empty_like(x)
    out[..., ::2], out[..., 1::2] = first * cos - second * sin, second * cos + first * sin
    return out


def skip_position_six(positions, *others):
    # RoPE sees position differences only, so the slip that shows is one for some tokens.
    return layers.rope_tables(positions + (positions > 5), *others)


def keys_are_not_turned(*arguments):
    correct["split_heads"](*arguments)
    *_, cos, sin, q, k, v = arguments
    k[...] = layers.rope(k.transpose(1, 0, 2), cos, -sin).transpose(1, 0, 2)


LAYERS, MODEL = "course_lib.engine.layers", "course_lib.engine.model"
correct = {name: getattr(layers, name) for name in ("rms_norm", "silu_mul", "split_heads")}
SLIPS = {
    "RoPE pairs neighbours": (LAYERS, "rope", rope_neighbours),
    "a position is skipped": (MODEL, "rope_tables", skip_position_six),
    "keys are not turned": (LAYERS, "split_heads", keys_are_not_turned),
    "SiLU on the wrong operand": (
        LAYERS, "silu_mul", lambda gate, up: correct["silu_mul"](up, gate),
    ),
    "norm of rows forgets eps": (
        LAYERS, "rms_norm",
        lambda x, gain, eps: correct["rms_norm"](x, gain, eps if x.ndim == 3 else 0.0),
    ),
    "norm of heads forgets eps": (
        LAYERS, "rms_norm",
        lambda x, gain, eps: correct["rms_norm"](x, gain, 0.0 if x.ndim == 3 else eps),
    ),
    "no norm of heads": (LAYERS, "rms_norm", lambda x, gain, eps: x),
}


@pytest.mark.parametrize("name", SLIPS)
def test_the_comparison_tells_slips_of_a_layer(name, monkeypatch):
    config = BASE_CONFIG | {"rms_norm_eps": 0.01}
    tensors = random_tensors(config)
    ids = np.random.default_rng(2).integers(0, 300, 20).tolist()
    expected = reference_logits(config, tensors, ids)
    module, function, slip = SLIPS[name]
    monkeypatch.setattr(f"{module}.{function}", slip)
    with backend.using("numpy"):  # whose steps are the functions that slip
        got = all_logits(model_of(config, tensors), ids)
    assert np.abs(got - expected).max() > 20 * logit_tolerance(config, expected)


def test_the_comparison_tells_a_wrong_head_map():
    config = BASE_CONFIG
    tensors = random_tensors(config)
    expected = reference_logits(config, tensors, [7, 8, 9])
    # Query heads 0, 1, 2, 3 read KV heads 0, 0, 1, 1; interleaving them gives 0, 1, 0, 1.
    swapped = dict(tensors)
    for layer in range(2):
        name = f"model.layers.{layer}.self_attn.q_proj.weight"
        swapped[name] = np.concatenate([tensors[name].reshape(4, 8, 24)[[0, 2, 1, 3]]]).reshape(
            32, 24
        )
    got = all_logits(model_of(config, swapped), [7, 8, 9])
    assert np.abs(got - expected).max() > 20 * logit_tolerance(config, expected)


def test_later_tokens_change_nothing_before_them():
    config = BASE_CONFIG
    tensors = random_tensors(config)
    model = model_of(config, tensors)
    rng = np.random.default_rng(3)
    ids = rng.integers(0, 300, 150).tolist()
    whole = all_logits(model, ids)
    for m in (1, 2, 63, 64, 65, 149):
        part = all_logits(model, ids[:m])
        np.testing.assert_allclose(part, whole[:m], rtol=0, atol=logit_tolerance(config, whole))


@pytest.mark.parametrize("tile", [1, 7, 64, 1000])
def test_tiles_of_prefill_attention_change_nothing(tile, monkeypatch):
    tensors = random_tensors(BASE_CONFIG)
    model = model_of(BASE_CONFIG, tensors)
    ids = np.random.default_rng(4).integers(0, 300, 140).tolist()
    expected = all_logits(model, ids)
    monkeypatch.setattr(prefill_attention, "QUERY_TILE", tile)
    np.testing.assert_allclose(
        all_logits(model, ids), expected, rtol=0, atol=logit_tolerance(BASE_CONFIG, expected)
    )


def test_every_array_inside_is_float32(monkeypatch):
    """Also where inputs tempt NumPy into float64: integer positions, Python floats."""
    seen = set()

    def watch(function):
        def wrapped(*arguments):
            result = function(*arguments)
            for array in result if isinstance(result, tuple) else (result,):
                seen.add((function.__name__, array.dtype.name))
            return result

        return wrapped

    names = {MODEL: ("linear", "rms_norm", "rope_tables"),
             LAYERS: ("linear", "rms_norm", "silu_mul", "rope")}
    for module, functions in names.items():
        for name in functions:
            monkeypatch.setattr(f"{module}.{name}", watch(getattr(layers, name)))
    model = model_of(BASE_CONFIG, random_tensors(BASE_CONFIG))
    with backend.using("numpy"):  # compiled, rope is a part of split_heads
        run_prompt(model, [1, 2, 3])
    session, hidden = run_prompt(model, [1, 2, 3], importance="all_queries")
    assert hidden.dtype == session.importance.dtype == np.float32

    def attend(layer, q, k, v):
        assert q.dtype == k.dtype == v.dtype == np.float32
        assert all(rows.flags.c_contiguous for rows in (q, k, v))
        return q

    assert model.hidden([1, 2, 3], 0, attend).dtype == np.float32
    assert seen == {(name, "float32") for name in itertools.chain(*names.values())}


finite = st.floats(-200, 200, width=32)


@given(st.lists(finite, min_size=2, max_size=16), st.sampled_from([1e-8, 1e-6, 0.01, 1.0]))
def test_rms_norm(values, eps):
    x = np.array(values, dtype=np.float32)
    gain = np.linspace(-2, 2, len(x), dtype=np.float32)
    exact = x.astype(np.float64)
    exact = exact / np.sqrt((exact * exact).mean() + np.float32(eps)) * gain
    got = layers.rms_norm(x, gain, eps)
    # One rounding each of square, sum (up to 16 terms), divide, sqrt, divide, multiply.
    np.testing.assert_allclose(got, exact, rtol=24 * 2**-24, atol=1e-30)


@pytest.mark.filterwarnings("ignore:overflow")
@pytest.mark.parametrize("value", [3e38, -1e20, np.inf, np.nan])
def test_rms_norm_of_values_too_large_is_an_error_not_zeros(value):
    x = np.ones((2, 3, 4), np.float32)
    x[1, 2, 3] = value
    with pytest.raises(NotFiniteError, match="mean square"):
        layers.rms_norm(x, np.ones(4, np.float32), 1e-6)


@given(st.lists(finite, min_size=1, max_size=20))
def test_silu_mul(values):
    gate = np.array(values, dtype=np.float32)
    up = np.linspace(1, 2, len(gate), dtype=np.float32)
    exact = gate.astype(np.float64) / (1 + np.exp(-gate.astype(np.float64))) * up
    with np.errstate(over="raise", invalid="raise", divide="raise"):
        got = layers.silu_mul(gate, up)
    # exp of a float32 power p carries |p|/2 roundings at most (p ≤ 88), then three operations.
    np.testing.assert_allclose(got, exact, rtol=48 * 2**-23, atol=1e-35)


@settings(max_examples=50)
@given(st.integers(0, 4000), st.integers(0, 4000), st.sampled_from([2, 8, 64]))
def test_rope_keeps_lengths_and_depends_on_distance_only(m, n, d):
    rng = np.random.default_rng(m * 4001 + n)
    q, k = rng.standard_normal((2, 1, 1, d)).astype(np.float32)

    def turned(x, position):
        return layers.rope(x, *layers.rope_tables(np.array([position]), d, 1e5)).ravel()

    length = np.linalg.norm(q)
    assert abs(np.linalg.norm(turned(q, m)) - length) <= 8 * 2**-24 * length * d
    far = max(m, n)
    shifted = turned(q, m + 7) @ turned(k, n + 7)
    # The angle itself is rounded to float32: off by up to 2^-24 of the position, per vector.
    bound = np.linalg.norm(q) * np.linalg.norm(k) * (far + 7) * 8 * 2**-24 + 1e-5
    assert abs(turned(q, m) @ turned(k, n) - shifted) <= bound


def test_rope_turns_by_the_textbook_angle():
    x = np.array([[[1.0, 0.0, 0.0, 0.0]]], dtype=np.float32)
    cos, sin = layers.rope_tables(np.array([3]), 4, 100.0)
    np.testing.assert_allclose(cos, [[np.cos(3.0), np.cos(0.3)]], rtol=1e-6)
    np.testing.assert_allclose(
        layers.rope(x, cos, sin), [[[np.cos(3.0), 0, np.sin(3.0), 0]]], rtol=1e-6
    )


def test_forward_of_a_loaded_checkpoint(tmp_path):
    config = write_checkpoint(tmp_path, seed=5)
    engine = Engine.load(tmp_path)
    ids = [3, 200, 41, 41]
    expected = reference_logits(config, random_tensors(config, 5), ids)
    tolerance = logit_tolerance(config, expected)
    np.testing.assert_allclose(engine.forward(ids), expected, rtol=0, atol=tolerance)
    np.testing.assert_allclose(engine.prefill(ids).logits, expected[-1], rtol=0, atol=tolerance)
