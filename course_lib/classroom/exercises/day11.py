"""Public checks of day 11, anatomy of a failure."""

from __future__ import annotations

import numpy as np

from course_lib.classroom.exercises import Case, Exercise, Reading


def _runs(**counts: tuple[int, int]) -> list[dict]:
    """Records from k8=(hits, trials), the hits first."""
    return [{"k": int(name[1:]) if name[1:].isdigit() else name, "recalled": i < hits}
            for name, (hits, trials) in counts.items() for i in range(trials)]


def _critical_k_cases() -> list[Case]:
    return [
        Case("a clear cliff", (_runs(exact=(60, 60), k32=(60, 60), k4=(60, 60), k2=(3, 60)),),
             expect=4),
        Case("ten of ten", (_runs(k8=(10, 10), k4=(10, 10)),), expect=None),
        Case("a lower floor", (_runs(k8=(10, 10), k4=(8, 10), k2=(1, 10)), 0.6), expect=8),
        Case("a k in between that fails",
             (_runs(k16=(200, 200), k8=(100, 200), k4=(200, 200)),), expect=16),
        Case("another z", (_runs(k4=(4, 4), k2=(3, 4)), 0.5, 2.0), expect=4),
        Case("no k at all", (_runs(exact=(5, 5)),), raises=ValueError),
    ]


def _blind_cases() -> list[Case]:
    return [
        Case("two mini-batches", ([[7], [0, 15]], 256, 512), expect=0.4375, rtol=1e-12),
        Case("the toy of twelve tokens", ([[2], [5]], 6, 12, 2), expect=8 / 12, rtol=1e-12),
        Case("an exact mini-batch and a short one", ([None, [9], [16]], 256, 525),
             expect=32 / 525, rtol=1e-12),
        Case("blocks in any order", ([[5, 1, 3]], 256, 256), expect=32 / 256, rtol=1e-12),
        Case("one selection too few", ([[7]], 256, 512), raises=ValueError),
    ]


def _some_weights(layers: int, heads: int, n: int, seed: int) -> np.ndarray:
    """Causal rows that sum to 1."""
    w = np.tril(np.random.default_rng(seed).random((layers, heads, n, n)))
    return (w / w.sum(axis=-1, keepdims=True)).astype(np.float32)


def _importance_map_cases() -> list[Case]:
    toy = np.array([[[[1, 0], [0.25, 0.75]]]], np.float32)
    two = np.concatenate((toy, toy[..., ::-1, ::-1].swapaxes(-1, -2)), axis=1)
    return [
        Case("two tokens, the last query", (toy, 1, 1), expect=np.array([[0.25, 0.75]], np.float32),
             rtol=1e-6, dtype=True),
        Case("two heads are summed", (two, None, 1), expect=two.sum(axis=(1, 2)), rtol=1e-6),
        Case("a short last block", (_some_weights(1, 1, 5, 0), None, 2),
             accept=lambda got: None if np.shape(got) == (1, 3) else
             f"5 tokens have 3 blocks of 2, the result has shape {np.shape(got)}"),
        Case("a window beyond the prompt", (toy, 5, 1),
             expect=np.array([[1.25, 0.75]], np.float32), rtol=1e-6),
        Case("a window of nothing", (toy, 0), raises=ValueError),
    ]


EXERCISES = [
    Exercise("d11.a1", function="critical_k", cases=_critical_k_cases,
             replaces=("course_lib.lab.intervals.critical_k",), seconds=3.0),
    Reading("d11.b1", parts=("reserved", "no_place", "no_recency", "places_k3", "sure_k"), auto=2),
    Exercise("d11.a2", function="blind_fraction", cases=_blind_cases,
             replaces=("course_lib.lab.prefill_damage.blind_fraction",), seconds=3.0),
    Reading("d11.b2", parts=("last_chooses", "clipped", "zeros", "locked", "tail",
                             "needle_suffices", "one_block_too_few", "decode_alone"), auto=2),
    Exercise("d11.a3", function="importance_map", cases=_importance_map_cases,
             replaces=("course_lib.lab.importance_map.importance_map",), seconds=3.0),
    Reading("d11.b3", parts=("window_rule", "group_splits", "group_pays", "g8_extra",
                             "selections_g8"), auto=2),
]
