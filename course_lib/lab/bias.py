"""Do errors prefer a sign? The exact sign test: signs only, so sizes and scales do not matter."""

from __future__ import annotations

from math import comb
from typing import Any

import numpy as np


def bias_test(errors: Any) -> dict[str, Any]:
    """Test whether errors are as often positive as negative.

    errors: real numbers of any shape; zeros have no sign and do not count. Returns {"n": errors
    counted, "positive": how many of them are above 0, "p": float}. p is the probability that n
    tosses of a fair coin split at least as unevenly, either way: 1.0 for n = 0 or an even split.
    Signs of errors that share a cause are not independent; then p is too small.
    Raises ValueError for NaN. Source: Arbuthnot's sign test; article 9-3 asks for the errors.
    """
    errors = np.asarray(errors)
    if np.isnan(errors).any():
        raise ValueError("errors hold NaN; check the step that produced them.")
    n = int(np.count_nonzero(errors))
    positive = int(np.count_nonzero(errors > 0))
    rarer = min(positive, n - positive)
    # Whole numbers up to the last division: comb(n, i) / 2**n has no overflow and no rounding.
    tail = sum(comb(n, i) for i in range(rarer + 1))
    return {"n": n, "positive": positive, "p": min(1.0, 2 * tail / 2**n)}
