"""The cost model of lesson 10 against a literal count and against what selection really reads."""

import numpy as np
import pytest

from course_lib.lab.decode_cost import decode_cost, end_to_end_change
from course_lib.sparse import select_from_scores


def literal(n, k, d, bs, n_probe):
    probes = 0
    for start in range(0, n, bs):
        length = min(bs, n - start)
        step = max(1, length // n_probe)
        position = 0
        while position < length:
            probes += 1
            position += step
    if n <= 2 * bs or n <= k * bs:
        return {"dense": 2 * n * d, "probe": 0, "attend": 2 * n * d}
    return {"dense": 2 * n * d, "probe": probes * d, "attend": 2 * k * bs * d}


def test_against_a_literal_count():
    rng = np.random.default_rng(3)
    for _ in range(300):
        n, k, d = (int(rng.integers(1, high)) for high in (700, 20, 130))
        bs, n_probe = int(rng.integers(1, 40)), int(rng.integers(1, 50))
        assert decode_cost(n, k, d, bs, n_probe) == literal(n, k, d, bs, n_probe)


@pytest.mark.parametrize("n, k", [(256, 3), (2061, 32), (2061, 1), (1025, 32)])
def test_attend_is_what_the_selection_reads_or_just_above(n, k):
    probe = np.arange(-(-n // 32), dtype=np.float32)
    read = 2 * 128 * len(select_from_scores(probe, None, k).tokens(n))
    attend = decode_cost(n, k)["attend"]
    assert read <= attend < read + 2 * 128 * 32


def test_amdahl():
    cost = {"dense": 8, "probe": 1, "attend": 1}
    changed = end_to_end_change({"attention": 25.0, "rest": 75.0}, cost)
    assert changed == {"change": -18.75, "ceiling": -25.0}
    slower = end_to_end_change({"attention": 1.0}, {"dense": 8, "probe": 2, "attend": 7})
    assert slower == {"change": 12.5, "ceiling": -100.0}


@pytest.mark.parametrize("profile", [{}, {"mlp": 3.0}, {"attention": 0.0},
                                     {"attention": 3.0, "mlp": -1.0}])
def test_profiles_that_say_nothing(profile):
    with pytest.raises(ValueError, match="attention"):
        end_to_end_change(profile, decode_cost(100, 1))


@pytest.mark.parametrize("bad", [{"n": 0}, {"k_blocks": 0}, {"head_dim": 0}, {"block_size": 0},
                                 {"n_probe": 0}])
def test_arguments_below_1(bad):
    with pytest.raises(ValueError, match=next(iter(bad))):
        decode_cost(**{"n": 100, "k_blocks": 1, **bad})
