"""A self-test of softmax that no model is needed for; day 1-3 writes one like it."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

TOLERANCE = 1e-5  # above float32's rounding, far below any mistake worth the name

# Scores and the weights that they must give, in closed form.
KNOWN = (
    ((0.0, np.log(3.0)), (0.25, 0.75)),
    ((np.log(3.0), 0.0), (0.75, 0.25)),
    ((-np.log(4.0), -np.log(2.0), -np.log(4.0)), (0.25, 0.5, 0.25)),
    ((0.0,), (1.0,)),
    ((5.0, 5.0, 5.0, 5.0, 5.0), (0.2, 0.2, 0.2, 0.2, 0.2)),
    ((1e4, 1e4, -1e4), (0.5, 0.5, 0.0)),
    ((-1e4, -1e4), (0.5, 0.5)),
    ((1e4, 9999.0), (np.e / (1 + np.e), 1 / (1 + np.e))),
)


def softmax_test(softmax: Callable[[np.ndarray], np.ndarray]) -> None:
    """AssertionError unless `softmax`, float32 scores `[n]` -> weights `[n]`, gives known answers.

    Every answer must come within 1e-5; NaN is no answer.
    """
    for scores, wanted in KNOWN:
        weights = np.asarray(softmax(np.array(scores, np.float32)))
        assert weights.shape == (len(wanted),), f"{len(scores)} scores gave {weights.shape}"
        # Written so that NaN fails: every comparison with it is false.
        assert (np.abs(weights - wanted) <= TOLERANCE).all(), f"{scores} gave {weights.tolist()}"
