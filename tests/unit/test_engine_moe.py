"""A mixture of experts against its literal definition."""

from __future__ import annotations

import math
import os
from dataclasses import replace

import numpy as np
import pytest

import kernels_pyx
from course_lib import backend
from course_lib.arrays import NotFiniteError
from course_lib.engine.config import MoEConfig
from course_lib.engine.moe import mixture, route
from course_lib.engine.weights import DenseMLP, MoELayer
from course_lib.linear import PackedMatrix
from tests.sharing import shared_among

F32 = np.float32
MOE = MoEConfig(num_experts=6, experts_per_token=3, intermediate_size=32, norm_topk_prob=True)
HIDDEN = 32
needs_kernels = pytest.mark.skipif(
    not kernels_pyx.VARIANTS and os.environ.get("COURSE_REQUIRE_KERNELS") != "1",
    reason="the kernels are not compiled here",
)


def layer_of(moe=MOE, kind="f32", seed=0):
    rng = np.random.default_rng(seed)

    def matrix(rows, columns):
        values = (rng.standard_normal((rows, columns)) / math.sqrt(columns) * 2).astype(F32)
        return values if kind == "f32" else PackedMatrix.quantize(values, kind)

    router = rng.standard_normal((moe.num_experts, HIDDEN)).astype(F32) / F32(3)
    experts = tuple(DenseMLP(matrix(2 * moe.intermediate_size, HIDDEN),
                             matrix(HIDDEN, moe.intermediate_size))
                    for _ in range(moe.num_experts))
    return MoELayer(router, experts)


def rows(t, seed=1):
    return np.random.default_rng(seed).standard_normal((t, HIDDEN)).astype(F32)


def literal(x, layer, moe):
    """One token, in float64, as the model's paper says it."""
    x = x.astype(float)
    logits = [float(x @ row) for row in layer.router.astype(float)]
    weights = [math.exp(logit - max(logits)) for logit in logits]
    weights = [weight / sum(weights) for weight in weights]
    best = sorted(range(len(weights)), key=lambda e: -weights[e])[: moe.experts_per_token]
    total = sum(weights[e] for e in best) if moe.norm_topk_prob else 1.0
    result = np.zeros(len(x))
    for expert in best:
        gate_up = layer.experts[expert].gate_up_proj.astype(float) @ x
        gate, up = gate_up[: moe.intermediate_size], gate_up[moe.intermediate_size :]
        inner = gate / (1 + np.exp(-gate)) * up
        result += weights[expert] / total * (layer.experts[expert].down_proj.astype(float) @ inner)
    return result


@pytest.mark.parametrize("name", ["numpy", *kernels_pyx.VARIANTS[:1]])
@pytest.mark.parametrize("norm", [True, False])
@pytest.mark.parametrize("chosen", [1, 3, 6])
def test_a_mixture_is_its_definition(name, norm, chosen):
    moe = replace(MOE, norm_topk_prob=norm, experts_per_token=chosen)
    layer, h = layer_of(moe), rows(20)
    with backend.using(name):
        got = mixture(h, layer, moe)
    assert got.dtype == F32
    expected = np.array([literal(x, layer, moe) for x in h])
    # Sums of 32 products thrice, one inside the other, of numbers of about the result's size.
    np.testing.assert_allclose(got, expected, rtol=0, atol=100 * 2.0**-24 * np.abs(expected).max())


def test_ties_go_to_the_lower_expert():
    h = rows(4)
    h[:, 0] = 2
    router = np.zeros((6, HIDDEN), F32)
    chosen, weights = route(h, router, MOE)
    assert chosen.tolist() == [[0, 1, 2]] * 4
    np.testing.assert_array_equal(weights, np.full((4, 3), weights[0, 0]))
    router[4, 0] = 1
    assert route(h, router, MOE)[0].tolist() == [[4, 0, 1]] * 4


def test_weights_are_those_of_all_experts_unless_normed():
    h, layer = rows(50), layer_of()
    _, weights = route(h, layer.router, MOE)
    np.testing.assert_allclose(weights.sum(axis=1), 1, rtol=4 * 2.0**-24)
    _, raw = route(h, layer.router, replace(MOE, norm_topk_prob=False))
    assert (raw.sum(axis=1) < 1 - 1e-3).all()
    np.testing.assert_allclose(raw / raw.sum(axis=1, keepdims=True), weights, rtol=1e-6)
    assert (np.diff(raw, axis=1) <= 0).all()


@needs_kernels
@pytest.mark.parametrize("kind", ["f32", "q8_0", "q4_0"])
@pytest.mark.parametrize("variant", kernels_pyx.VARIANTS[:2])
def test_a_token_has_the_same_bits_alone_and_among_others(variant, kind):
    layer, h = layer_of(kind=kind), rows(33)
    with backend.using(variant):
        whole = mixture(h, layer, MOE)
        with shared_among(3):
            assert np.array_equal(mixture(h, layer, MOE), whole)
        for i in range(len(h)):
            assert np.array_equal(mixture(h[i : i + 1], layer, MOE)[0], whole[i])
        assert np.array_equal(mixture(h[::-1], layer, MOE), whole[::-1])


def test_contributions_add_up_in_ascending_order_of_experts():
    """Seen where the order matters: 1e8 - 1e8 + 1 is 1, 1e8 + 1 - 1e8 is 0."""
    moe = replace(MOE, num_experts=3, norm_topk_prob=False)
    sizes = {0: 1.0, 1: 1e8, 2: -1e8}
    experts = []
    for size in sizes.values():
        gate_up = np.zeros((2 * moe.intermediate_size, HIDDEN), F32)
        gate_up[0, 0], gate_up[moe.intermediate_size, 0] = 40, 1 / 40
        down = np.zeros((HIDDEN, moe.intermediate_size), F32)
        down[0, 0] = size
        experts.append(DenseMLP(gate_up, down))
    h = np.zeros((1, HIDDEN), F32)
    h[0, 0] = 1
    router = np.zeros((3, HIDDEN), F32)
    assert mixture(h, MoELayer(router, tuple(experts)), moe)[0, 0] == 0
    assert mixture(h, MoELayer(router, tuple(experts[::-1])), moe)[0, 0] == F32(1 / 3)


@pytest.mark.filterwarnings("ignore:(overflow|invalid)")
def test_router_logits_that_overflow_are_an_error():
    router = np.full((6, HIDDEN), 3e38, F32)
    with pytest.raises(NotFiniteError):
        route(np.full((1, HIDDEN), 2, F32), router, MOE)
