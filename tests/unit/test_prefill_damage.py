"""Blind positions and work of sparse prefill, against what sparse prefill itself does."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from course_lib.lab.prefill_damage import blind_fraction, prefill_work
from course_lib.sparse_prefill import sparse_prefill_attention


@settings(max_examples=25)
@given(st.integers(65, 330), st.integers(1, 6), st.integers(0, 99), st.sampled_from([64, 96, 128]))
def test_blind_fraction_is_the_share_that_sparse_prefill_leaves_blind(n, k_blocks, seed, batch):
    rng = np.random.default_rng(seed)
    q, k, v = rng.normal(size=(3, 1, n, 4)).astype(np.float32)
    _, trace = sparse_prefill_attention(q, k, v, k_blocks=k_blocks, minibatch=batch)
    chosen = [None if s is None else s.ids.tolist() for s in trace.selections[0]]
    assert blind_fraction(chosen, batch, n) == pytest.approx(trace.blind_fraction, abs=1e-12)


def test_the_published_set_up_at_k_1():
    ends = [min(start + 256, 2061) for start in range(0, 2061, 256)]
    own_last = [[(end - 1) // 32] for end in ends]
    assert blind_fraction(own_last, 256, 2061) == 1792 / 2061
    assert blind_fraction([None] * 9, 256, 2061) == 0
    assert blind_fraction([[0, 63], *own_last[1:]], 256, 2061) == (1792 - 224) / 2061


@pytest.mark.parametrize("args, words", [
    (([[0]], 256, 512), "2 mini-batches"), (([[0]], 0, 10), "batch"), (([], 256, 0), "n "),
    (([[0]], 256, 10, 0), "block_size"),
])
def test_selections_must_fit_the_prompt(args, words):
    with pytest.raises(ValueError, match=words):
        blind_fraction(*args)


def test_work_of_exact_prefill_is_every_pair():
    assert prefill_work(5, head_dim=3) == {"probe": 0, "attend": 2 * 15 * 3}


@settings(max_examples=25)
@given(st.integers(1, 700), st.integers(1, 12), st.sampled_from([256, 64, 32, 8, 5]))
def test_work_of_sparse_prefill(n, k, group):
    work = prefill_work(n, k, group, head_dim=1)
    probe = attend = 0
    for batch in range(0, n, 256):
        stop = min(batch + 256, n)
        for first in range(batch, stop, group):
            end = min(first + group, stop)
            sizes = [min(b + 32, end) - b for b in range(0, end, 32)]
            if end > 64:
                probe += sum(len(range(0, m, max(1, m // 8))) for m in sizes)
            attend += sum(min(p + 1, 32 * k) if end > 64 else p + 1 for p in range(first, end))
    assert work == {"probe": probe, "attend": 2 * attend}
    assert work["attend"] <= prefill_work(n, head_dim=1)["attend"]
