"""RMSNorm by a tree has the kernels' bits, and every tree adds every number once."""

from __future__ import annotations

import math

import numpy as np
import pytest

import kernels_pyx
from course_lib import backend
from course_lib.engine import layers
from course_lib.lab import reduction

F32 = np.float32


def leaves(tree):
    return leaves(tree[0]) + leaves(tree[1]) if isinstance(tree, tuple) else tree


@pytest.mark.parametrize("name", reduction.ORDERS)
@pytest.mark.parametrize("d", [16, 64, 256])
def test_every_number_is_added_once(name, d):
    assert sorted(leaves(reduction.ORDERS[name](d))) == list(range(d))


@pytest.mark.parametrize("d", [5, 16, 64, 160, 173])
@pytest.mark.parametrize("variant", kernels_pyx.VARIANTS)
def test_the_kernels_tree_gives_the_kernels_bits(variant, d):
    rng = np.random.default_rng(d)
    x = rng.integers(-2**20, 2**20, (40, d)).astype(F32) * F32(2.0**-18)
    gain = rng.integers(1, 2**10, d).astype(F32) * F32(2.0**-9)
    with backend.using(variant):
        wanted = layers.rms_norm(x, gain, 1e-6)
    found = reduction.rms_norm_by_tree(x, gain, 1e-6, reduction.kernel_tree(d))
    np.testing.assert_array_equal(found.view(np.int32), wanted.view(np.int32))


def test_lanes_are_closer_to_the_sum_than_a_chain():
    rng = np.random.default_rng(1)
    x = (rng.integers(2**20, 2**21, (64, 256)) * 2.0**-20).astype(F32)
    exact = np.array([math.fsum(float(v) ** 2 for v in row) for row in x])
    off = {name: np.abs(reduction.sum_of_squares(x, order(256)) - exact).mean()
           for name, order in reduction.ORDERS.items()}
    assert off["one chain"] > 2 * max(off[name] for name in off if name != "one chain")
