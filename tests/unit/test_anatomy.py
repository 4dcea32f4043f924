"""Day 11's arms change what they name and nothing else."""

from __future__ import annotations

import numpy as np
import pytest

from course_lib.engine import generate_from
from course_lib.gather import gather_rows
from course_lib.lab import anatomy, importance_ranks, needle_place, probe_only
from course_lib.lab.anatomy import AnatomyOptions, Variant, answer_of, blocks_of_needle
from course_lib.lab.decode_record import record_decode
from course_lib.lab.needle import MAX_NEW_TOKENS, NeedleOptions, prompt_of
from course_lib.selection import ranks
from course_lib.sparse import importance_sums, probe_scores
from tests.tiny_checkpoint import tiny_engine

TOKENS = 330


@pytest.fixture(scope="module")
def engine(tmp_path_factory):
    return tiny_engine(tmp_path_factory, max_position_embeddings=2048)


@pytest.fixture(scope="module")
def prompt(engine):
    return prompt_of(engine, NeedleOptions(tokens=TOKENS, seed=1), 0)


@pytest.fixture(scope="module")
def session(engine, prompt):
    return engine.prefill(prompt.ids)


@pytest.mark.parametrize("k", [None, 1, 3])
def test_an_unforced_answer_is_that_of_generation(engine, prompt, session, k):
    variant = Variant("x", decode_k=k)
    said, nats = answer_of(session, prompt, variant)
    assert said == generate_from(session, MAX_NEW_TOKENS, k).ids
    again, same = answer_of(session, prompt, variant, said)
    assert again == said and same == nats
    assert nats == pytest.approx(-session.score(said, decode_k=k).mean(), rel=1e-5)
    assert len(session) == TOKENS


def test_probe_only_reads_the_best_probe_scores(engine, prompt, session, monkeypatch):
    exact, _ = answer_of(session, prompt, Variant("x"))
    assert answer_of(session, prompt, anatomy.ProbeOnly("x", decode_k=99))[0] == exact
    chosen: list[list[int]] = []

    def watched(rows, ids, block_size):
        chosen.append(ids.tolist())
        return gather_rows(rows, ids, block_size)

    monkeypatch.setattr(probe_only, "gather_rows", watched)
    fed = session.fork()
    fed.model = probe_only.ProbeOnlyModel(engine.model, 2)
    fed.step(exact[0], n_probe=4)
    assert fed.last_step.blocks_read == 2 and len(chosen) == 2 * 4
    # Layer 0 asks the same query, whatever is read.
    asked, keys = record_decode(session, 2).queries[0, 0], fed.cache.rows(0).k
    for head, query in enumerate(asked):
        scores = probe_scores(query, keys[head // 2], n_probe=4)
        assert chosen[head] == sorted(np.argsort(-scores, kind="stable")[:2].tolist())


def test_forced_blocks_are_read_the_last_one_as_it_moves(prompt, session, monkeypatch):
    seen = []
    step = type(session).step

    def watched(self, token, **options):
        seen.append((len(self), options["force_blocks"]))
        return step(self, token, **options)

    monkeypatch.setattr(type(session), "step", watched)
    answer_of(session, prompt, Variant("x", decode_k=1, force=("needle", "last")))
    needle = blocks_of_needle(prompt)
    assert [blocks for _, blocks in seen] == [(*needle, n // 32) for n, _ in seen]
    assert {n // 32 for n, _ in seen} == {10, 11}  # the answer crosses a block's end
    first, end = prompt.needle_span
    assert needle == tuple(sorted({p // 32 for p in range(first, end)}))


def test_one_change_at_a_time(engine):
    options = AnatomyOptions((Variant("exact"), Variant("prefill 1", prefill_k=1),
                              Variant("off", decode_k=1, importance="none")),
                             prompts=3, positions=(0.2, 0.9), tokens=200)
    records = [r for i in range(3) for r in anatomy.variant_records(engine, options, i)]
    assert [r["index"] for r in records] == [i for i in range(3) for _ in options.arms()]
    assert [r["position"] for r in records[:6]] == [0.2] * 3 + [0.9] * 3
    assert all(r["identical"] for r in records[::3])
    assert [r["importance_rank"] is None for r in records[:3]] == [False, False, True]
    value = [r["value"] for r in records]
    assert value[0] == value[3] != value[6]  # the same needle at both places, then another
    summary = anatomy.variant_summary(records)
    assert [(r["position"], r["arm"], r["prompts"]) for r in summary] == [
        (p, a, n) for p, n in ((0.2, 2), (0.9, 1)) for a in ("exact", "prefill 1", "off")]
    assert all(r["low"] <= r["recall"] <= r["high"] for r in summary)


def test_arms_have_names_of_their_own():
    for arms in (anatomy.PHASES, anatomy.GROUPS, anatomy.WINDOWS, importance_ranks.RANK_RULES):
        assert len({(arm.name, getattr(arm, "position", 0)) for arm in arms}) == len(arms)


@pytest.mark.parametrize("offset", [0, 7, 31])
def test_at_offset_moves_whole_lines_only(shipped_engine, offset):
    long = prompt_of(shipped_engine, NeedleOptions(tokens=515, seed=1), 0)
    moved = needle_place.at_offset(shipped_engine, long, offset)
    assert moved.value_span[0] % 32 == offset and len(moved.ids) == 515
    without = [line for line in moved.lines if line != long.fact.sentence]
    assert without == [line for line in long.lines if line != long.fact.sentence]
    assert moved.ids[slice(*moved.value_span)] == long.ids[slice(*long.value_span)]
    with pytest.raises(ValueError, match="offset"):
        needle_place.at_offset(shipped_engine, long, 32)


def test_positions_modulo_four_are_all_tried(shipped_engine):
    options = AnatomyOptions((Variant("k 4", decode_k=4), anatomy.ProbeOnly("p", decode_k=1)),
                             prompts=8, tokens=515)
    rows = [r for i in (5, 6) for r in needle_place.offset_records(shipped_engine, options, i)]
    assert [(r["arm"], r["value_position"] % 4) for r in rows] == [
        ("k 4", 1), ("p", 1), ("k 4", 2), ("p", 2)]
    summary = needle_place.offset_summary(rows)
    assert [(r["arm"], r["position_mod_4"], r["prompts"]) for r in summary] == [
        ("k 4", 1, 1), ("k 4", 2, 1), ("p", 1, 1), ("p", 2, 1)]


def test_who_read_the_needles_own_block(engine):
    options = AnatomyOptions((Variant("prefill 1", prefill_k=1), Variant("all", prefill_k=99)),
                             prompts=1, tokens=700)
    one, every = needle_place.own_block_records(engine, options, 0)
    assert one["own"] == ("1111" if one["place"] == 7 else "0000")
    assert every["own"] == "1111"
    summary = needle_place.own_block_summary([one, every])
    assert {r["arm"] for r in summary} == {"prefill 1", "all"}


def test_ranks_are_those_of_the_engines_importance(engine, session, prompt):
    rules = tuple(importance_ranks.Rule(name, window, name == "answer", position)
                  for position in (0.5, 0.9)
                  for name, window in (("all", None), ("last 13", 13), ("answer", None)))
    options = AnatomyOptions(rules, prompts=1, tokens=TOKENS)
    records = importance_ranks.rank_records(engine, options, 0)
    rows = {(r["arm"], r["position"]): r for r in records}
    block = prompt.value_span[0] // 32
    far = prompt_of(engine, NeedleOptions(tokens=TOKENS, seed=1, position=0.9), 0)
    for arm, how in {"all": {}, "last 13": {"importance": "last_window", "window": 13}}.items():
        here, there = (importance_sums(engine.prefill(p.ids, **how).importance)
                       for p in (prompt, far))
        assert rows[arm, 0.5]["rank"] == ranks(here)[block]
        assert rows[arm, 0.5]["best_block"] == int(np.argmax(here))
        assert rows[arm, 0.5]["above_control"] == bool(here[block] > there[block])
    assert rows["answer", 0.5]["needle_block"] == block
    assert {r["prompts"] for r in importance_ranks.rank_summary(records)} == {1}
