"""Where sparse decode begins to pay: the arithmetic, and that a measurement runs."""

import pytest

from course_lib.sparse_crossover import crossover_tokens, measure_crossover


def test_the_lines_meet_where_they_should():
    dense = {n: 0.5 + n / 1000 for n in (1000, 2000, 4000)}
    sparse = {n: 2.5 + n / 2000 for n in (4000, 1000, 2000)}
    assert crossover_tokens(dense, sparse) == 4000
    assert crossover_tokens(dense, {n: 0.1 + n / 2000 for n in dense}) == 0  # always faster
    assert crossover_tokens(dense, {n: 2.5 + n / 1000 for n in dense}) is None
    assert crossover_tokens(dense, {n: 2.5 + n / 900 for n in dense}) is None


def test_bad_lengths():
    for dense, sparse in (({1: 1.0}, {1: 1.0}), ({1: 1.0, 2: 1.0}, {1: 1.0, 3: 1.0}), ({}, {})):
        with pytest.raises(ValueError, match="the same lengths"):
            crossover_tokens(dense, sparse)
    with pytest.raises(ValueError, match="unknown"):
        measure_crossover(1, 1, 32, kv="q4")


@pytest.mark.parametrize("kv", ["f32", "q8"])
@pytest.mark.parametrize("packed", [False, True])
def test_a_measurement_runs(kv, packed, monkeypatch):
    monkeypatch.setattr("course_lib.sparse_crossover.COLD_BYTES", 1000)
    found = measure_crossover(2, 1, 32, kv=kv, k_blocks=2, lengths=(100, 200), packed=packed,
                              shared_selection=packed)
    assert found is None or found >= 0
