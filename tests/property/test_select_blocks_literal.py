"""select_blocks against a slow, literal transcription of the rule, on many cases full of ties.

q, K and importance hold small whole numbers, so every dot and sum is exact in float32 and the
transcription, in Python numbers, sees the same scores.
"""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from course_lib.sparse import Selection, select_blocks, select_from_scores

CASES = 10_000


def literal(q, k, k_blocks, block_size, n_probe, importance):
    """Steps 1 to 6 of the rule, one after the other, with lists and loops only."""
    n = len(k)
    # 1. Blocks; the last may be short.
    n_blocks = 0
    while n_blocks * block_size < n:
        n_blocks += 1
    # 2. Probe: the largest raw q . k over the sampled positions.
    probe = []
    for b in range(n_blocks):
        p0 = b * block_size
        p1 = min(p0 + block_size, n)
        step = max(1, (p1 - p0) // n_probe)
        best = None
        p = p0
        while p < p1:
            dot = sum(x * y for x, y in zip(q, k[p], strict=True))
            if best is None or dot > best:
                best = dot
            p += step
        probe.append(best)
    # 3. Importance sums.
    sums = None
    if importance is not None:
        sums = [sum(importance[b * block_size : (b + 1) * block_size]) for b in range(n_blocks)]
    chosen, by = [], []
    # 4. Reservation.
    if sums is not None:
        budget = (k_blocks + 1) // 2
        while len(chosen) < budget and len(chosen) < n_blocks:
            best = None
            for b in range(n_blocks):
                if b not in chosen and (best is None or sums[b] > sums[best]):
                    best = b
            chosen.append(best)
            by.append("importance")
    # 5. Fill by probe.
    while len(chosen) < k_blocks and len(chosen) < n_blocks:
        best = None
        for b in range(n_blocks):
            if b not in chosen and (best is None or probe[b] > probe[best]):
                best = b
        chosen.append(best)
        by.append("probe")
    reason = ["not_selected"] * n_blocks
    for b, why in zip(chosen, by, strict=True):
        reason[b] = why
    # 6. Recency.
    last = n_blocks - 1
    if len(chosen) < n_blocks and last not in chosen and "probe" in by:
        worst = None
        for i in range(len(chosen)):
            if by[i] == "probe" and (worst is None or probe[chosen[i]] < probe[chosen[worst]]):
                worst = i
        reason[chosen[worst]] = "evicted_by_recency"
        reason[last] = "recency"
        chosen[worst] = last
    return chosen, probe, sums, reason


def ranks(scores):
    """Rank 1 for the highest, ties to the lower index, by counting."""
    return [1 + sum(s > score or (s == score and j < i) for j, s in enumerate(scores))
            for i, score in enumerate(scores)]


def agrees(selection: Selection, expected) -> None:
    chosen, probe, sums, reason = expected
    assert selection.order.tolist() == chosen
    assert selection.ids.tolist() == sorted(chosen)
    assert selection.ids.dtype == np.int64
    assert selection.probe.tolist() == probe and selection.probe.dtype == np.float32
    assert selection.reason == tuple(reason)
    assert selection.probe_rank.tolist() == ranks(probe)
    if sums is None:
        assert selection.importance is None and selection.importance_rank is None
    else:
        assert selection.importance.tolist() == sums
        assert selection.importance.dtype == np.float32
        assert selection.importance_rank.tolist() == ranks(sums)


def random_case(rng):
    block_size = int(rng.choice([1, 2, 3, 4, 5, 8, 16, 32], p=[.1, .2, .2, .2, .1, .1, .05, .05]))
    n = int(rng.integers(1, block_size * 13))
    d = int(rng.integers(1, 4))
    reach = int(rng.integers(1, 4))  # few distinct values: many ties
    q = rng.integers(-reach, reach + 1, d)
    k = rng.integers(-reach, reach + 1, (n, d))
    importance = None
    if rng.random() < 0.7:
        importance = rng.integers(0, reach + 1, n) * rng.integers(0, 2)
    return q, k, int(rng.integers(1, 16)), block_size, int(rng.integers(1, 12)), importance


@pytest.mark.parametrize("seed", range(10))
def test_equals_the_literal_rule(seed):
    rng = np.random.default_rng(seed)
    tied = acted = 0
    for _ in range(CASES // 10):
        q, k, k_blocks, block_size, n_probe, importance = random_case(rng)
        expected = literal(q.tolist(), k.tolist(), k_blocks, block_size, n_probe,
                           None if importance is None else importance.tolist())
        selection = select_blocks(
            q.astype(np.float32), k.astype(np.float32), k_blocks=k_blocks, block_size=block_size,
            n_probe=n_probe, importance=None if importance is None else importance.astype("f4"))
        agrees(selection, expected)
        tied += len(set(expected[1])) < len(expected[1])
        acted += "recency" in expected[3]
    assert tied > 600 and acted > 100, "the cases must hold ties and recency"


def test_equals_the_literal_rule_at_the_size_of_the_article():
    rng = np.random.default_rng(99)
    for k_blocks in (1, 2, 3, 4, 16, 32, 64, 65, 100):
        q, k = rng.integers(-2, 3, 16), rng.integers(-2, 3, (2061, 16))
        importance = rng.integers(0, 2, 2061)
        for given_importance in (importance, None):
            expected = literal(q.tolist(), k.tolist(), k_blocks, 32, 8, None
                               if given_importance is None else importance.tolist())
            agrees(select_blocks(q, k, k_blocks=k_blocks, importance=given_importance), expected)


@settings(max_examples=150, deadline=None)
@given(st.data())
def test_int8_rows_choose_as_their_values_do(data):
    """With scales that are powers of two the widened rows have exactly the float rows' scores."""
    seed = data.draw(st.integers(0, 2**32 - 1))
    q, k, k_blocks, block_size, n_probe, importance = random_case(np.random.default_rng(seed))
    rng = np.random.default_rng(seed + 1)
    scale = np.ldexp(np.float32(1), rng.integers(-2, 3, len(k))).astype(np.float32)
    options = {"k_blocks": k_blocks, "block_size": block_size, "n_probe": n_probe,
               "importance": importance}
    from_int8 = select_blocks(q, k.astype(np.int8), k_scale=scale, **options)
    from_float = select_blocks(q, k * scale[:, None], **options)
    assert np.array_equal(from_int8.order, from_float.order)
    assert np.array_equal(from_int8.probe, from_float.probe)


@settings(max_examples=200, deadline=None)
@given(st.lists(st.integers(-3, 3), min_size=1, max_size=40), st.integers(1, 45), st.booleans(),
       st.integers(0, 10**6))
def test_properties_of_any_selection(probe, k_blocks, with_importance, seed):
    n = len(probe)
    sums = np.random.default_rng(seed).integers(0, 3, n) if with_importance else None
    selection = select_from_scores(probe, sums, k_blocks)
    assert len(selection.ids) == min(k_blocks, n)
    assert len(set(selection.ids.tolist())) == len(selection.ids)
    by = selection.reason
    budget = min((k_blocks + 1) // 2, n) if with_importance else 0
    assert by.count("importance") == budget == selection.num_importance
    assert by.count("recency") == by.count("evicted_by_recency") <= 1
    chosen = [i for i, why in enumerate(by) if why in ("importance", "probe", "recency")]
    assert chosen == selection.ids.tolist()
    if len(selection.ids) > budget:
        assert n - 1 in chosen, "with a probe slot the last block is always read"
    if "recency" in by:
        assert by[n - 1] == "recency"
    again = select_from_scores(probe, sums, k_blocks)
    assert np.array_equal(again.order, selection.order)
