"""Prefill in chunks: against exact prefill, in a file, under a budget, refused, and twice."""

from __future__ import annotations

import inspect

import numpy as np
import pytest

from course_lib import memory
from course_lib.engine import generate_from
from course_lib.engine.prefill_options import PrefillOptions
from course_lib.engine.prompt_cache import PromptCache
from course_lib.errors import CourseError
from course_lib.lab.ruler_tasks import build_ruler_prompt
from course_lib.prefill import BlockFile, FullAttentionPolicy, QuestPolicy, XAttentionBSAPolicy

CHUNK, BLOCK = 128, 32


@pytest.fixture(scope="module")
def ids(shipped_engine) -> list[int]:
    return list(build_ruler_prompt(shipped_engine, "niah_single", 450, 1).ids)


def xattn(**options) -> XAttentionBSAPolicy:
    return XAttentionBSAPolicy(**{"threshold": 0.8, "block_size": BLOCK, "short_query": CHUNK,
                                  **options})


def rows_of(session) -> list[np.ndarray]:
    return [a for layer in range(session.cache.num_layers) for a in session.cache.rows(layer)
            if a is not None]


@pytest.mark.parametrize("kv", ["f32", "q8"])
def test_full_in_chunks_is_exact_prefill_but_for_roundings(shipped_engine, ids, kv):
    exact = shipped_engine.prefill(ids, kv=kv, importance="none")
    session = shipped_engine.prefill(ids, kv=kv, policy=FullAttentionPolicy(BLOCK), chunk=CHUNK)
    assert len(session) == len(ids) and session.importance is None
    assert session.policy.name == "full" and session.policy.get_density_stats()["num_chunks"] == 3
    np.testing.assert_allclose(session.logits, exact.logits, atol=1e-3 if kv == "f32" else 0.05)
    for mine, theirs in zip(rows_of(session), rows_of(exact), strict=True):
        # A rounding before quantization may move an int8 value by one.
        np.testing.assert_allclose(mine.astype(np.float64), theirs,
                                   atol=1 if mine.dtype == np.int8 else 1e-4)
    assert generate_from(session, 12).ids == generate_from(exact, 12).ids


def test_a_prompt_of_one_chunk_reads_itself_only(shipped_engine, ids):
    exact = shipped_engine.prefill(ids[:100], importance="none")
    session = shipped_engine.prefill(ids[:100], policy="xattn")
    stats = session.policy.get_density_stats()
    assert stats["num_chunks"] == 0 and stats["applied_density"] == 1.0
    np.testing.assert_allclose(session.logits, exact.logits, atol=1e-4)


@pytest.mark.parametrize("make", [
    lambda: FullAttentionPolicy(BLOCK), lambda: QuestPolicy(block_size=BLOCK),
    lambda: xattn(aggregate="per_head"), lambda: xattn(estimate_from="int8"),
], ids=["full", "quest", "per_head", "int8"])
def test_a_file_under_a_budget_gives_the_same_bits_and_is_gone(shipped_engine, ids, tmp_path, make):
    in_memory = shipped_engine.prefill(ids, policy=make(), chunk=CHUNK)
    block = 2 * 4 * 2 * BLOCK * 64
    filed = shipped_engine.prefill(ids, policy=make(), chunk=CHUNK, offload=tmp_path,
                                   ram_budget=2 * block)
    assert np.array_equal(in_memory.logits, filed.logits)
    assert all(map(np.array_equal, rows_of(in_memory), rows_of(filed)))
    assert in_memory.policy.get_density_stats() == filed.policy.get_density_stats()
    assert not list(tmp_path.iterdir())


def test_a_file_goes_also_when_a_run_is_interrupted(shipped_engine, ids, tmp_path):
    def stop(done: int, total: int) -> None:
        assert total == len(ids) and list(tmp_path.iterdir())
        if done > CHUNK:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        shipped_engine.prefill(ids, policy=FullAttentionPolicy(BLOCK), chunk=CHUNK,
                               offload=tmp_path, on_progress=stop)
    assert not list(tmp_path.iterdir())


def test_the_prompt_before_changes_nothing(shipped_engine, ids):
    used, new = xattn(estimate_from="int8"), xattn(estimate_from="int8")
    shipped_engine.prefill(ids[::-1], policy=used, chunk=CHUNK)
    again = shipped_engine.prefill(ids, policy=used, chunk=CHUNK)
    alone = shipped_engine.prefill(ids, policy=new, chunk=CHUNK)
    assert np.array_equal(again.logits, alone.logits)
    assert used.get_density_stats() == new.get_density_stats()


def test_progress_counts_tokens_and_a_fork_knows_the_policy(shipped_engine, ids):
    seen: list[tuple[int, int]] = []
    session = shipped_engine.prefill(
        ids, policy=FullAttentionPolicy(BLOCK), chunk=CHUNK, on_progress=lambda *x: seen.append(x))
    assert seen == [(128, 450), (256, 450), (384, 450), (450, 450)]
    assert session.fork().policy is session.policy
    assert shipped_engine.prefill(ids[:5]).policy is None


@pytest.mark.parametrize("options, words", [
    ({"policy": "best"}, "unknown prefill policy 'best'; there are full, quest, xattn"),
    ({"policy": "full", "chunk": 100}, "the policy's block_size 128, not 100; give 128"),
    ({"policy": "full", "chunk": 0}, "chunk must be an integer of at least 1"),
    ({"policy": "full", "prefill_k": 3}, "prefill_k and policy are two ways"),
    ({"policy": "full", "importance": "last_window"}, "a policy has only parts of it"),
    ({"policy": "full", "importance": "all_queries"}, "a policy has only parts of it"),
    ({"policy": "full", "ram_budget": 10**6}, "ram_budget needs offload"),
    ({"policy": "full", "ram_budget": 0, "offload": True}, "ram_budget must be an integer"),
    ({"offload": True}, "give a policy too"), ({"chunk": 128}, "give a policy too"),
    ({"ram_budget": 10**6}, "give a policy too"), ({"slots": 3}, "give a policy too"),
    ({"policy": "full", "slots": 3}, "slots needs offload"),
    ({"policy": "full", "slots": 0, "offload": True}, "slots must be an integer of at least 1"),
])
def test_wrong_options_are_refused_before_any_work(shipped_engine, options, words):
    with pytest.raises(ValueError, match=words):
        shipped_engine.prefill([5, 6], **options)


def test_slots_change_no_bit_but_how_many_blocks_wait_in_memory(
    shipped_engine, ids, tmp_path, monkeypatch
):
    made, make_slots = [], BlockFile.make_slots
    monkeypatch.setattr(BlockFile, "make_slots", lambda store, count: (
        made.append(count), make_slots(store, count))[1])
    seen = [shipped_engine.prefill(ids, policy=FullAttentionPolicy(BLOCK), chunk=CHUNK,
                                   offload=tmp_path, slots=slots) for slots in (1, 2, 4)]
    assert made == [1, 2, 4]
    assert all(np.array_equal(session.logits, seen[0].logits) for session in seen)
    assert all(map(np.array_equal, rows_of(seen[0]), rows_of(seen[2])))


def test_the_options_show_in_the_signature_and_a_wrong_name_is_refused(shipped_engine):
    shown = inspect.signature(shipped_engine.prefill).parameters
    assert list(shown) == ["ids", *inspect.signature(PrefillOptions).parameters]
    assert shown["kv"].default == "f32" and shown["slots"].kind is inspect.Parameter.KEYWORD_ONLY
    for call in (shipped_engine.prefill, lambda ids, **o: shipped_engine.chat(
            [{"role": "user", "content": "x"}], **o)):
        with pytest.raises(TypeError, match=r"argument 'chunks'; there are kv, .*slots"):
            call([5, 6], chunks=3)


def test_a_policy_that_is_not_for_prefill_is_refused(shipped_engine):
    class DecodeOnly(FullAttentionPolicy):
        name, supports_prefill = "decode_only", False

    with pytest.raises(ValueError, match="'decode_only' is not for prefill"):
        shipped_engine.prefill([5, 6], policy=DecodeOnly())


def test_a_budget_below_a_block_is_one_sentence(shipped_engine, tmp_path):
    with pytest.raises(CourseError, match="RAM budget of 1,000 bytes is smaller than one block"):
        shipped_engine.prefill([5, 6], policy="full", offload=tmp_path, ram_budget=1000)
    assert not list(tmp_path.iterdir())


def test_rows_in_memory_count_in_what_fits_and_offloaded_ones_do_not(
    shipped_engine, ids, monkeypatch, tmp_path
):
    def fits(free: int, **options) -> bool:
        monkeypatch.setattr(memory, "available", lambda: free)
        try:
            shipped_engine.prefill(ids, policy=FullAttentionPolicy(BLOCK), chunk=CHUNK, **options)
        except CourseError:
            return False
        return True

    least = next(n for n in range(0, 2**24, 2**15) if fits(n, offload=tmp_path))
    rows = 3 * 2 * 4 * 2 * 64 * len(ids)
    assert not fits(least) and not fits(least + rows) and fits(least + 2 * rows)


def test_a_conversation_by_policy_is_run_as_a_whole(shipped_engine):
    cache, messages = PromptCache(), [{"role": "user", "content": "What is Zara's home city?"}]
    for _ in range(2):
        answer = shipped_engine.chat(messages, max_new_tokens=3, decode_k=2, cache=cache,
                                     policy=FullAttentionPolicy(BLOCK), chunk=CHUNK)
        list(answer)
        assert answer.reply.reused_tokens == 0
