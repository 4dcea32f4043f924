"""Self-tests for the parts of an engine, without a model: material for reading in day 1-3.

They are of very different strength, some on purpose. Each takes the part that it tests, so that a
wrong part can be handed to it, and raises AssertionError where it notices something.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from course_lib import attention
from course_lib.engine.layers import argmax, rms_norm, rope, rope_tables
from course_lib.kvcache import KVCache
from course_lib.paths import DATA

Part = Callable[..., np.ndarray]


def numbers(seed: int, *shape: int) -> np.ndarray:
    """Made-up float32 numbers, the same on every machine."""
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def test_norm_of_a_known_row(norm: Part = rms_norm) -> None:
    out = norm(np.array([[3.0, 4.0]], np.float32), np.array([1, 10], np.float32), 0.0)
    assert np.allclose(out, [[3 / 12.5**0.5, 40 / 12.5**0.5]], rtol=1e-5)


def test_norm_forgets_the_size_of_a_row(norm: Part = rms_norm) -> None:
    x, gain = numbers(1, 5, 160), numbers(2, 160)
    large, small = norm(np.float32(2) * x, gain, 1e-6), norm(x, gain, 1e-6)
    assert np.allclose(large, small, atol=10)


def test_rotation_keeps_the_length(turn: Part = rope) -> None:
    x, (cos, sin) = numbers(3, 7, 2, 64), rope_tables(np.arange(7), 64, 1e5)
    before, after = np.linalg.norm(x, axis=-1), np.linalg.norm(turn(x, cos, sin), axis=-1)
    assert np.allclose(before, after, rtol=1e-4)


def test_rotation_knows_only_the_distance(turn: Part = rope) -> None:
    q, k = numbers(4, 1, 1, 64), numbers(5, 1, 1, 64)
    scores = []
    for at in (0, 3, 40):
        turned = [turn(x, *rope_tables(np.array([p]), 64, 1e5)) for x, p in ((q, at + 9), (k, at))]
        scores.append(float(np.sum(turned[0] * turned[1])))
    assert np.allclose(scores, scores[0], atol=1e-3)
    assert abs(scores[0] - float(np.sum(q * k))) > 0.1


def test_attention_is_a_mean_of_values(attend: Part = attention.two_pass) -> None:
    q, k, v = numbers(6, 2, 64), numbers(7, 1, 50, 64), numbers(8, 1, 50, 64)
    out = attend(q, k, v)
    if (out > v.max(axis=1)).any() or (out < v.min(axis=1)).any():
        raise AssertionError("a mean lies outside of what it is the mean of")


def test_attention_with_one_token(attend: Part = attention.two_pass) -> None:
    q, k, v = numbers(9, 4, 64), numbers(10, 2, 1, 64), numbers(11, 2, 1, 64)
    assert np.allclose(attend(q, k, v), v[[0, 0, 1, 1], 0], rtol=1e-5)


def test_attention_with_recorded_rows(attend: Part = attention.two_pass) -> None:
    for file in sorted((DATA / "golden").glob("attention_*.npz")):
        case = np.load(file)
        assert np.allclose(attend(case["q"], case["k"], case["v"]), case["out"], rtol=1e-5)


def test_cache_returns_what_was_written(make: Callable[..., KVCache] = KVCache) -> None:
    cache = make(1, 2, 64)
    for seed in (12, 13, 14):
        cache.append(0, numbers(seed, 2, 20, 64), numbers(seed + 50, 2, 20, 64))
    stored = cache.rows(0)
    assert np.array_equal(stored.k, cache.rows(0).k) and np.array_equal(stored.v, cache.rows(0).v)


def test_argmax_takes_the_first_of_equals(best: Callable[[np.ndarray], int] = argmax) -> None:
    assert best(np.array([1, 7, -2, 7, 0], np.float32)) == 1
