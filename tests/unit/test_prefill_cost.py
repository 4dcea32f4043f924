"""The cost model of prefill policies against bytes that policies really read."""

from __future__ import annotations

import numpy as np
import pytest

from course_lib.lab.prefill_cost import ESTIMATES, break_even, bytes_read, estimate_share
from course_lib.prefill import BlockStore, ChunkedPrefill, FullAttentionPolicy, XAttentionBSAPolicy

BLOCK, D = 16, 8
MAKE = {
    "none": lambda: FullAttentionPolicy(BLOCK),
    "kv": lambda: xattn(estimate_from="kv"),
    "k": lambda: xattn(),
    "resident": lambda: xattn(estimate_from="int8"),
}


def xattn(**options):
    return XAttentionBSAPolicy(0.4, block_size=BLOCK, short_query=8, **options)


@pytest.mark.parametrize("estimate", MAKE)
def test_it_is_what_a_policy_reads(estimate):
    q, k, v = np.random.default_rng(1).standard_normal((3, 2, 8 * BLOCK, D)).astype(np.float32)
    policy = MAKE[estimate]()
    with BlockStore(1, 2, D, block_size=BLOCK) as store, ChunkedPrefill(store, policy) as chunked:
        for first in range(0, 8 * BLOCK, 2 * BLOCK):
            part = slice(first, first + 2 * BLOCK)
            chunked.attend(0, q[:, part], k[:, part], v[:, part])
    stats = policy.get_density_stats()
    rho = stats["load_bytes"] / stats["full_bytes"]
    assert estimate == "none" or rho < 1
    assert stats["bytes_density"] == pytest.approx(bytes_read(estimate, rho), rel=1e-12)


@pytest.mark.parametrize("estimate", ESTIMATES)
def test_at_break_even_it_reads_what_full_attention_reads(estimate):
    for layers in (1, 4):
        rho = break_even(estimate, layers=layers)
        assert bytes_read(estimate, rho, layers=layers) == 1
        assert bytes_read(estimate, 0.5, layers=layers) == \
            0.5 + bytes_read(estimate, 0.0) / layers
    assert (break_even(estimate) == 0) == (estimate == "kv")


def test_pages_hold_a_minimum_and_a_maximum():
    # of 16 keys two rows, and as many bytes of V again are not read
    assert estimate_share("pages", 16) == 2 / 16 / 2 and estimate_share("pages", 1) == 1.0


@pytest.mark.parametrize("args", [("v", 0.5), ("k", -0.1), ("k", 1.1), ("k", 0.5, 0),
                                  ("k", 0.5, 16, 0), ("k", float("nan"))])
def test_wrong_arguments_are_refused(args):
    with pytest.raises(ValueError):
        bytes_read(*args)
