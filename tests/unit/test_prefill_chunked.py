"""Chunked prefill: as attention in one pass, the same bits however it is run, flat in memory."""

from __future__ import annotations

import contextlib
import gc
import logging
import math
import os
import subprocess
import sys
import tracemalloc
from pathlib import Path

import numpy as np
import pytest

import kernels_pyx
from course_lib import backend, log
from course_lib.arrays import NotFiniteError
from course_lib.attention import causal_attention
from course_lib.errors import CourseError
from course_lib.prefill.chunked import ChunkedPrefill
from course_lib.prefill.density import ChunkDensity, DensityStats
from course_lib.prefill.file_store import BlockFile
from course_lib.prefill.lse import merge_attention_outputs, partial_attention
from course_lib.prefill.policies import FullAttentionPolicy
from course_lib.prefill.policy import BlockChoice, PrefillPolicy
from course_lib.prefill.store import BlockStore
from course_lib.prefill.xattn_policy import XAttentionBSAPolicy
from tests.sharing import shared_among

F32 = np.float32
U = 2.0**-24
ROOT = Path(__file__).resolve().parents[2]
BACKENDS = ("numpy", *(v for v in kernels_pyx.VARIANTS if v != "portable-baseline"))
each_backend = pytest.mark.parametrize("name", BACKENDS)
BLOCK = 16


class Given(PrefillPolicy):
    """Reads what a function of the number of blocks says, and notes what it is shown."""

    name = "given"

    def __init__(self, choose):
        super().__init__()
        self.choose, self.shown = choose, []

    def on_block_written(self, layer, block, k):
        self.shown.append((layer, block, k.copy()))

    def select_blocks(self, q_chunk, store, layer):
        return BlockChoice(tuple(np.asarray(ids, np.int64) for ids in self.choose(
            store.n_blocks(layer))))


def made(n=200, heads=4, kv_heads=2, d=24, seed=0, spread=1.0):
    rng = np.random.default_rng(seed)
    q = (rng.standard_normal((heads, n, d)) * spread).astype(F32)
    k, v = rng.standard_normal((2, kv_heads, n, d)).astype(F32)
    return q, k, v


def run(policy, qkv, chunk, store=None, layers=1, **options):
    q, k, v = qkv
    store = store or BlockStore(layers, len(k), k.shape[2], block_size=BLOCK)
    outs = []
    with store, ChunkedPrefill(store, policy, **options) as prefill:
        for first in range(0, q.shape[1], chunk):
            part = slice(first, first + chunk)
            for layer in range(layers):
                out = prefill.attend(layer, q[:, part], k[:, part], v[:, part])
            outs.append(out)
    return np.concatenate(outs, axis=1)


def slack(q, k, parts):
    """As test_prefill_lse's, for both sides; a merge rounds an output three times more."""
    d, n = q.shape[2], k.shape[1]
    e = (d + 6) * U * np.abs(q).max() * np.abs(k).sum(axis=-1).max() / math.sqrt(d)
    return 4 * math.expm1(2 * (e + (n + 12) * U)) + 6 * parts * U


@each_backend
@pytest.mark.parametrize("chunk", [16, 48, 23, 200])
def test_full_attention_in_chunks_is_causal_attention(name, chunk):
    q, k, v = qkv = made(spread=2)
    with backend.using(name):
        out = run(FullAttentionPolicy(), qkv, chunk)
        whole = causal_attention(q, k, v)
    assert np.abs(out - whole).max() <= slack(q, k, 200 / BLOCK) * np.abs(v).max()
    assert np.abs(out - whole).max() < 5e-6  # what it is, to notice when it grows
    if chunk == 200 and name != "numpy":
        assert out.tobytes() == whole.tobytes()


@each_backend
def test_the_same_bits_for_any_number_of_slots_any_store_and_any_number_of_threads(name, tmp_path):
    qkv = made()
    shape, lists = (1, 2, 24), lambda n: (range(0, n, 2), range(n))
    with backend.using(name):
        want = run(Given(lists), qkv, 48)
        for slots in (1, 2, 3, 4, 8):
            for budget in (None, 4 * 2 * 4 * 2 * BLOCK * 24):
                store = BlockFile(*shape, capacity=200, block_size=BLOCK, folder=tmp_path,
                                  ram_budget=budget)
                got = run(Given(lists), qkv, 48, store, slots=slots)
                assert got.tobytes() == want.tobytes()
        if name != "numpy":
            for threads in (2, 3):
                with shared_among(threads):
                    assert run(Given(lists), qkv, 48).tobytes() == want.tobytes()
    assert not list(tmp_path.iterdir())


def test_the_same_bits_on_every_variant():
    results = set()
    for name in BACKENDS[1:]:
        with backend.using(name):
            results.add(run(FullAttentionPolicy(), made(), 48).tobytes())
    assert len(results) <= 1


@each_backend
@pytest.mark.parametrize("aggregate", ["any", "majority", "mean_score", "per_head"])
def test_xattention_at_threshold_1_is_full_attention_to_the_bit(name, aggregate):
    qkv = made()
    policy = XAttentionBSAPolicy(1.0, stride=4, block_size=BLOCK, chunk_size=48, short_query=4,
                                 aggregate=aggregate)
    with backend.using(name):
        full = run(FullAttentionPolicy(), qkv, 48)
        assert run(policy, qkv, 48).tobytes() == full.tobytes()
    assert policy.get_density_stats()["applied_density"] == 1


@each_backend
def test_each_kv_head_computes_only_its_own_blocks(name):
    q, k, v = qkv = made(64)
    lists = ([0, 2], [1])
    with backend.using(name):
        out = run(Given(lambda n: lists if n == 3 else (range(n),)), qkv, 48)
    for h in range(4):
        tokens = [t for b in lists[h // 2] for t in range(16 * b, 16 * b + 16)]
        for i in range(48, 64):
            seen = [*tokens, *range(48, i + 1)]
            scores = k[h // 2, seen].astype(float) @ q[h, i] / math.sqrt(24)
            e = np.exp(scores - scores.max())
            assert np.allclose(out[h, i], e @ v[h // 2, seen] / e.sum(), atol=1e-5)


def test_a_policy_is_shown_every_block_as_it_grows():
    q, k, v = qkv = made(57)
    policy = Given(lambda n: (range(n),))
    run(policy, qkv, 23)
    assert [(layer, block, shown.shape[1]) for layer, block, shown in policy.shown] == [
        (0, 0, 16), (0, 1, 7), (0, 1, 16), (0, 2, 14), (0, 2, 16), (0, 3, 9)]
    for _, block, shown in policy.shown:
        assert np.array_equal(shown, k[:, 16 * block : 16 * block + shown.shape[1]])


def test_three_densities_and_the_seed_s_statistic():
    qkv = made(80)
    policy = Given(lambda n: ([0], range(n)) if n > 1 else (range(n),))
    run(policy, qkv, 32, layers=2)
    stats = policy.get_density_stats()
    # Chunks of 32, 32 and 16 tokens see 0, 2 and 4 blocks; KV head 0 reads only the first.
    assert stats["total_available_blocks"] == stats["total_selected_blocks"] == 6
    assert stats["num_chunks"] == 2 and stats["overall_density"] == 1
    assert stats["mask_density"] == pytest.approx((32 * 3 + 16 * 5) / (32 * 4 + 16 * 8))
    own = 2 * 32 * 33 // 2 + 16 * 17 // 2
    assert stats["applied_density"] == pytest.approx(
        (2 * (32 * 3 + 16 * 5) * 16 + 4 * own) / (2 * (32 * 4 + 16 * 8) * 16 + 4 * own))
    block = 2 * 4 * 16 * 24  # of one KV head
    assert stats["load_bytes"] == 2 * (3 + 5) * block and stats["estimate_bytes"] == 0
    assert stats["full_bytes"] == 2 * (4 + 8) * block
    assert stats["bytes_density"] == pytest.approx(8 / 12)
    policy.reset_stats()
    assert policy.get_density_stats()["num_chunks"] == 0
    assert policy.get_density_stats()["overall_density"] == 1


def test_keys_read_to_choose_are_counted():
    class Looks(Given):
        def select_blocks(self, q_chunk, store, layer):
            for block in range(store.n_blocks(layer)):
                store.keys(layer, block)
            return super().select_blocks(q_chunk, store, layer)

    policy = Looks(lambda n: ([0],))
    run(policy, made(64), 32)
    stats = policy.get_density_stats()
    assert stats["bytes_density"] == pytest.approx(0.5 + 0.5)  # K of both, K and V of one


@pytest.mark.parametrize("kind", ["memory", "file"])
def test_of_a_block_in_part_only_the_tokens_that_are_there_are_counted(kind, tmp_path):
    """Every chunk but the first finds one last, which one KV head of two reads, or both."""
    for lists, share in (([0, 1], 1.0), ([1], 0.5)):
        policy = Given(lambda n, lists=lists: [range(n) if h in lists else [] for h in (0, 1)])
        store = None if kind == "memory" else BlockFile(1, 2, 24, capacity=200, block_size=BLOCK,
                                                        folder=tmp_path)
        run(policy, made(), 23, store)
        assert policy.get_density_stats()["bytes_density"] == share


def chunk_density(**change):
    return ChunkDensity(**(dict(policy="xattn", layer=0, available=30, selected=22, kept=1,
                                keepable=2, applied=3, visible=4, estimate_bytes=5, load_bytes=6,
                                full_bytes=44) | change))


def test_density_lines_are_for_who_asks(caplog, capsys):
    stats = DensityStats()
    with caplog.at_level(logging.DEBUG, logger="course_lib.prefill"):
        stats.record(chunk_density(available=0, selected=0))
        stats.record(chunk_density())
        stats.record(chunk_density(layer=1))
    assert [r.getMessage() for r in caplog.records] == [
        "[xattn] chunk=1, available=30, selected=22, chunk_density=73.3%"]
    stats.print_density_stats()
    printed = capsys.readouterr().out
    for part in ("[xattn] 1 chunks", "22 of 30 blocks read (73.3%)", "mask density       50.0%",
                 "applied density    75.0%", "bytes read         25.0%"):
        assert part in printed


def test_course_log_is_read_from_the_environment():
    program = ("from course_lib.log import logger; logger('prefill').debug('a line');"
               "logger('prefill').warning('louder')")
    said = {}
    for level in ("", "DEBUG", "warning", "loud"):
        done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, text=True,
                              env=os.environ | {log.VARIABLE: level}, capture_output=True)
        said[level] = done.stderr.splitlines()
    assert said[""] == ["louder"] and said["DEBUG"] == ["a line", "louder"]
    assert said["warning"] == ["louder"]
    assert said["loud"][-1].endswith("COURSE_LOG=loud is no level; use one of DEBUG, INFO, "
                                     "WARNING, ERROR.")


@pytest.mark.parametrize("lists", [([5],), ([1, 0],), ([0],) * 3, ([0, 0],)])
def test_a_choice_that_does_not_fit_is_an_error_and_stores_nothing(lists):
    qkv = made(48)
    store = BlockStore(1, 2, 24, block_size=BLOCK)
    with ChunkedPrefill(store, Given(lambda n: lists)) as prefill:
        prefill.attend(0, *(a[:, :32] for a in qkv))
        with pytest.raises(ValueError, match="block list"):
            prefill.attend(0, *(a[:, 32:] for a in qkv))
        assert store.length(0) == 32


@each_backend
@pytest.mark.parametrize("what", [0, 1, 2])
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("token", [32, 40, 47])
@pytest.mark.parametrize("beside", [0.0, 1.0])
def test_numbers_that_are_not_finite_store_nothing(name, what, bad, token, beside, tmp_path):
    """Also where the query's number beside them is 0."""
    qkv = [a.copy() for a in made(48)]
    if what:
        qkv[0][:, :, 3] *= beside
    store = BlockFile(1, 2, 24, capacity=48, block_size=BLOCK, folder=tmp_path)
    with backend.using(name), store, ChunkedPrefill(store, FullAttentionPolicy()) as prefill:
        prefill.attend(0, *(a[:, :32] for a in qkv))
        good = qkv[what][1, token, 3]
        qkv[what][1, token, 3] = bad
        with pytest.raises(NotFiniteError, match=f"{'qkv'[what]} holds NaN"):
            prefill.attend(0, *(a[:, 32:] for a in qkv))
        assert store.length(0) == 32
        qkv[what][1, token, 3] = good
        out = prefill.attend(0, *(a[:, 32:] for a in qkv))
        assert np.allclose(out, causal_attention(*qkv)[:, 32:], atol=1e-5)


def test_scores_beyond_float32_are_an_error_and_the_ring_goes_on(tmp_path):
    q, k, v = made(48)
    store = BlockFile(1, 2, 24, capacity=96, block_size=BLOCK, folder=tmp_path)
    with store, ChunkedPrefill(store, FullAttentionPolicy(), slots=3) as prefill:
        prefill.attend(0, q[:, :32], k[:, :32], v[:, :32])
        with pytest.raises(NotFiniteError, match="score"):
            prefill.attend(0, np.full_like(q[:, 32:], 3e38), k[:, 32:], v[:, 32:])
        out = prefill.attend(0, q[:, 32:], k[:, 32:], v[:, 32:])
        assert np.allclose(out, causal_attention(q, k, v)[:, 32:], atol=1e-5)


@pytest.mark.parametrize("slots", [1, 3])
def test_a_file_that_fails_on_the_way_gives_one_error_and_no_result(tmp_path, slots):
    qkv = made(96)
    store = BlockFile(1, 2, 24, capacity=96, block_size=BLOCK, folder=tmp_path)
    with store, ChunkedPrefill(store, FullAttentionPolicy(), slots=slots) as prefill:
        prefill.attend(0, *(a[:, :80] for a in qkv))
        os.truncate(store.path, 4096 + 5 * 4096)
        with pytest.raises(CourseError, match="cut short"):
            prefill.attend(0, *(a[:, 80:] for a in qkv))
        assert not list(tmp_path.iterdir())
        with pytest.raises(CourseError, match="closed"):
            prefill.attend(0, *(a[:, 80:] for a in qkv))


def test_shapes_that_do_not_fit_the_store():
    q, k, v = made(16)
    with ChunkedPrefill(BlockStore(1, 2, 24), FullAttentionPolicy()) as prefill:
        for wrong in ((q, k[:, :8], v[:, :8]), (q[:2], k[:1], v[:1]),
                      (q[..., :8], k[..., :8], v[..., :8])):
            with pytest.raises(ValueError, match=r"must have shape \(2, 16, 24\)"):
                prefill.attend(0, *wrong)
        with pytest.raises(ValueError, match="layer 1 does not exist"):
            prefill.attend(1, q, k, v)


def test_memory_stays_flat_over_200_chunks(tmp_path):
    qkv = made(16)
    budget = 3 * 2 * 4 * 2 * BLOCK * 24
    store = BlockFile(1, 2, 24, capacity=16 * 200, block_size=BLOCK, folder=tmp_path,
                      ram_budget=budget)
    policy = Given(lambda n: (sorted({0, n // 2, n - 1}),))
    policy.on_block_written = lambda *block: None
    sizes = []
    with store, ChunkedPrefill(store, policy) as prefill:
        with contextlib.ExitStack() as stack:
            tracemalloc.start()
            stack.callback(tracemalloc.stop)
            for i in range(200):
                prefill.attend(0, *qkv)
                if i in (40, 199):
                    gc.collect()
                    sizes.append(tracemalloc.get_traced_memory()[0])
        assert store.peak_resident_bytes <= budget + store.block_bytes
    # In 160 chunks some counters grow by an object or two; a block kept of each would be 50 times
    # more.
    assert sizes[1] - sizes[0] < 160 * store.block_bytes / 50


def test_it_is_its_parts_merged_in_order():
    """chunked = partial_attention of the history's blocks, then of the chunk under its mask."""
    q, k, v = made(48)
    out = run(FullAttentionPolicy(), (q, k, v), 32)
    history = partial_attention(q[:, 32:], k[:, :32], v[:, :32], block_lists=[[0, 1]],
                                block_size=BLOCK)
    own = partial_attention(q[:, 32:], k[:, 32:], v[:, 32:], np.arange(1, 17))
    assert merge_attention_outputs(*history, *own)[0].tobytes() == out[:, 32:].tobytes()
