"""What an attacker's pass over course_lib.prefill found: each a clear error now."""

from __future__ import annotations

import numpy as np
import pytest

from course_lib.arrays import real_number
from course_lib.errors import CourseError
from course_lib.prefill import (
    BlockFile,
    BlockStore,
    ChunkedPrefill,
    FullAttentionPolicy,
    QuestPolicy,
    Slot,
    XAttentionBSAPolicy,
    aggregate,
    make_policy,
    merge_attention_outputs,
    ring_schedule,
    softmax_fuse_block_sum,
)

F32 = np.float32
ROWS = np.ones((2, 8, 4), F32)


def store_of_two() -> BlockStore:
    store = BlockStore(1, 2, 4, block_size=4)
    store.append(0, ROWS, ROWS)
    return store


POLICIES = pytest.mark.parametrize("policy", [
    QuestPolicy(block_size=4),
    XAttentionBSAPolicy(0.5, stride=2, block_size=4, chunk_size=8, short_query=1),
], ids=["quest", "xattn"])


@POLICIES
@pytest.mark.parametrize("q, words", [
    (np.ones((3, 8, 4), F32), "does not fit a store of 2 KV heads with 4 numbers a row"),
    (np.ones((4, 8, 5), F32), "does not fit a store of 2 KV heads"),
    (np.ones((8, 4), F32), "3 dimensions"), (np.ones((4, 0, 4), F32), "at least one query"),
    (np.full((4, 8, 4), np.nan, F32), "NaN or infinity"),
])
def test_queries_that_do_not_fit_are_refused_by_every_policy(policy, q, words):
    with pytest.raises(ValueError, match=words):
        policy.select_blocks(q, store_of_two(), 0)


@POLICIES
def test_queries_that_are_no_numbers_are_refused(policy):
    for q in (None, "q", [["q"]], np.ones((4, 8, 4), complex), np.ones((4, 8, 4), bool)):
        with pytest.raises(TypeError, match="q must hold real numbers"):
            policy.select_blocks(q, store_of_two(), 0)


@pytest.mark.parametrize("layer", [None, 1.5, "0", [0]])
def test_a_layer_is_a_whole_number(layer):
    store = store_of_two()
    for call in (store.length, store.n_blocks, store.span, lambda x: store.keys(x, 0),
                 lambda x: store.append(x, ROWS, ROWS)):
        with pytest.raises(TypeError, match="layer must be an integer"):
            call(layer)


@pytest.mark.parametrize("make", [store_of_two, lambda: file_of_two()], ids=["memory", "file"])
def test_a_slot_of_another_store_is_refused_and_the_store_stays_open(make):
    with make() as store:
        for shape in ((2, 8, 4), (2, 4, 3), (1, 4, 4)):
            with pytest.raises(ValueError, match=r"a slot of this store must have shape \(2, 4, 4"):
                store.load(0, 1, Slot(0, shape))
        for heads in (np.array([1, 0]), np.array([True]), np.array([0.5, 1.0])):
            with pytest.raises(ValueError, match=r"heads must be bool \[2\]"):
                store.load(0, 1, Slot(0, (2, 4, 4)), heads)
        assert store.load(0, 1, Slot(0, (2, 4, 4))) == 4


def file_of_two() -> BlockFile:
    store = BlockFile(1, 2, 4, capacity=8, block_size=4)
    store.append(0, ROWS, ROWS)
    return store


def test_outputs_to_merge_are_real_numbers():
    lse = np.zeros(1, F32)
    for bad in (np.ones((1, 2), complex), np.array([["a", "b"]]), np.ones((1, 2), bool)):
        for args in ((bad, lse, ROWS[0, :1, :2], lse), (ROWS[0, :1, :2], lse, bad, lse)):
            with pytest.raises(TypeError, match="o[12] must hold real numbers"):
                merge_attention_outputs(*args)
    with pytest.raises(ValueError, match="not finite|NaN or infinity"):
        merge_attention_outputs(np.full((1, 2), 1e300), lse, ROWS[0, :1, :2], lse)


NUMBERS = [
    lambda x: softmax_fuse_block_sum(ROWS, 4, scale=x, is_causal=False),
    lambda x: ring_schedule([x], [1], 2), lambda x: ring_schedule([1], [1], 2, x),
    lambda x: QuestPolicy(share=x), lambda x: XAttentionBSAPolicy(estimate_sample=x),
    lambda x: BlockFile(1, 2, 4, capacity=8, throttle=x),
    lambda x: real_number(x, "x"),
]


@pytest.mark.parametrize("call", NUMBERS)
def test_a_number_is_one_finite_number(call):
    for wrong in ("0.9", [0.5, 0.5], np.ones(1), 1j, True, object()):
        with pytest.raises(TypeError, match="must be a number, not"):
            call(wrong)
    for wrong in (float("nan"), float("inf"), 10**400):
        with pytest.raises(ValueError, match="must be finite"):
            call(wrong)


@pytest.mark.parametrize("scale", [0, -0.5])
def test_a_scale_below_zero_is_refused(scale):
    with pytest.raises(ValueError, match="scale must be above 0"):
        softmax_fuse_block_sum(ROWS, 4, scale=scale, is_causal=True)


@pytest.mark.parametrize("name", [[], {}, None, 3, "best"])
def test_an_unknown_name_of_any_kind_lists_the_names(name):
    with pytest.raises(ValueError, match="there are full, quest, xattn"):
        make_policy(name)
    with pytest.raises(ValueError, match="must be one of majority, any"):
        aggregate(np.ones((2, 1, 3), bool), name, num_kv_heads=2)


def test_a_file_under_a_budget_says_what_is_wrong_with_it():
    with pytest.raises(CourseError, match="smaller than one block"):
        BlockFile(1, 2, 4, capacity=8, ram_budget=1)


def test_a_policy_of_ones_own_that_returns_no_choice_is_told():
    class Forgetful(FullAttentionPolicy):
        def select_blocks(self, q_chunk, store, layer):
            return [0]

    with ChunkedPrefill(store_of_two(), Forgetful(4)) as chunked:
        with pytest.raises(TypeError, match="'full' must return a BlockChoice, not list"):
            chunked.attend(0, ROWS, ROWS, ROWS)
