"""Public checks of day 13, prefill policies."""

from __future__ import annotations

import numpy as np

from course_lib.classroom.exercises import Case, Exercise, Reading


def bound_case(name: str, heads: int, kv_heads: int, keys: int, d: int, page_size: int,
               seed: int) -> Case:
    """A case on random keys that accepts what bounds q . k and is Quest's score of each page."""
    rng = np.random.default_rng(seed)
    q = rng.standard_normal((heads, d)).astype(np.float32)
    k = rng.standard_normal((kv_heads, keys, d)).astype(np.float32)
    return Case(name, (q, k, page_size), accept=lambda got: check_bound(got, q, k, page_size))


def check_bound(got: object, q: np.ndarray, k: np.ndarray, page_size: int) -> str | None:
    """What is wrong with page scores: shape, a key above its page's score, or far too large."""
    scores, starts = np.asarray(got), range(0, k.shape[1], page_size)
    if scores.shape != (len(q), len(starts)) or scores.dtype != np.float32:
        return f"the scores must be float32 {(len(q), len(starts))}"
    for h, query in enumerate(q.astype(np.float64)):
        keys = k[h * len(k) // len(q)].astype(np.float64)
        for page, first in enumerate(starts):
            some = keys[first : first + page_size]
            score = float(np.maximum(query * some.min(axis=0), query * some.max(axis=0)).sum())
            # float32 rounds a sum of d products by about d times 6e-8 of their sizes
            near = 1e-6 * len(query) * float(np.abs(query * np.abs(some).max(axis=0)).sum() + 1)
            if scores[h, page] < (some @ query).max() - near:
                return "a page holds a key with a larger q . k than its score"
            if abs(scores[h, page] - score) > near:
                return "a score is not the sum of the larger of two products in each channel"
    return None


def _page_cases() -> list[Case]:
    page = np.array([[[1, 4], [3, 0], [2, 2]]], np.float32)
    return [
        Case("the page of the text", (np.array([[2, -1]], np.float32), page, 3),
             expect=np.array([[6]], np.float32), dtype=True),
        Case("one key a page is the product itself", (np.array([[1, 1]], np.float32), page, 1),
             expect=np.array([[5, 3, 4]], np.float32)),
        Case("the last page is short", (np.array([[1, -1]], np.float32), page, 2),
             expect=np.array([[3, 0]], np.float32)),
        bound_case("four query heads, two KV heads", 4, 2, 100, 8, 16, 1),
        Case("a page of 0 keys", (np.array([[1, 1]], np.float32), page, 0), raises=ValueError),
    ]


def _list_cases() -> list[Case]:
    own = np.zeros((4, 1, 6), bool)
    own[:, :, 0] = own[range(4), 0, range(1, 5)] = True
    mass = np.array([[[0, 6, 0, 1, 1, 0]], [[0, 0, 3, 3, 2, 0]]], np.float32)
    kept = mass > 2
    rows = np.zeros((2, 4, 5), bool)
    rows[:, 3, 2] = rows[0, :2, 3] = rows[1, :3, 3] = True
    return [
        Case("each its own, majority", (own, "majority", 4), expect=[[0, 5]]),
        Case("each its own, per head", (own, "per_head", 4),
             expect=[[0, 1, 5], [0, 2, 5], [0, 3, 5], [0, 4, 5]]),
        Case("any", (rows, "any", 2), expect=[[0, 2, 3, 4]]),
        Case("five votes of eight, and two", (rows, "majority", 2), expect=[[0, 3, 4]]),
        Case("mean score at 0.5", (kept, "mean_score", 2, mass, 0.5), expect=[[0, 1, 3, 5]]),
        Case("another rule", (own, "minority", 4), raises=ValueError),
    ]


def _score_cases() -> list[Case]:
    texts = ["VAR zamu, VAR Qiro.", "VAR lobe.", ""]
    refs = [["zamu", "qiro", "hafe"], ["lobe", "nuri"], ["sati", "moka"]]
    return [
        Case("all", (texts, refs, "all"), expect=(2 / 3 + 1 / 2 + 0) / 3, rtol=1e-12),
        Case("any", (texts, refs, "any"), expect=2 / 3, rtol=1e-12),
        Case("pass", (texts, refs, "pass"), expect=2 / 3, rtol=1e-12),
        Case("exact", (texts, refs, "exact"), expect=0.0, rtol=1e-12),
        Case("no sample", ([], [], "all"), raises=ValueError),
    ]


EXERCISES = [
    Exercise("d13.a1", function="page_scores", cases=_page_cases,
             replaces=("course_lib.prefill.quest.quest_page_scores",
                       "course_lib.prefill.quest.page_scores",
                       "course_lib.prefill.quest.page_bounds"), seconds=5.0),
    Reading("d13.b1", parts=("quest_notes", "quest_late", "xattn_reads", "rounded_up",
                             "notes_share", "not_for_decode"), auto=2),
    Exercise("d13.a2", function="one_list", cases=_list_cases,
             replaces=("course_lib.prefill.aggregate.aggregate",), seconds=3.0),
    Reading("d13.b2", parts=("more_than_half", "group_any", "always",
                             "asking_share", "hides"), auto=2),
    Exercise("d13.a3", function="score_run", cases=_score_cases,
             replaces=("course_lib.lab.ruler.match",), seconds=3.0),
    Reading("d13.b3", parts=("decode_exact", "own_chunk", "short_chunk", "anywhere", "blind_up_to",
                             "failures_allowed"), auto=2),
]
