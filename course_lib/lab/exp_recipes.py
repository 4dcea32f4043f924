"""Ways to write exp in plain float32, good and bad, to see what each choice is worth."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from course_lib.arrays import F32, as_float32
from course_lib.exponential import LN2_HIGH, LN2_LOW


def exp_recipe(x: Any, degree: int = 7, *, reduce: bool = True, nearest: bool = True,
               parts: int = 2) -> np.ndarray:
    """exp of float32 x from -87 to 88 by a Taylor polynomial, each operation rounded to float32.

    degree: of the polynomial; reduce=False puts x itself into it; nearest=False takes the whole
    number below x / ln 2 instead of the nearest; parts: 1 subtracts n · ln 2 as one float32
    product, 2 as two. Raises ValueError for other parts and a degree below 1.
    """
    if parts not in (1, 2) or degree < 1:
        raise ValueError(f"parts must be 1 or 2 and degree at least 1, not {parts} and {degree}.")
    x = as_float32(x, "x")
    n = np.zeros_like(x)
    if reduce:
        n = (np.rint if nearest else np.floor)(x * F32(1 / math.log(2)))
    high, low = (LN2_HIGH, LN2_LOW) if parts == 2 else (F32(math.log(2)), F32(0))
    r = x - n * high - n * low
    with np.errstate(over="ignore", under="ignore", invalid="ignore"):
        p = np.full_like(r, F32(1 / math.factorial(degree)))
        for i in range(degree - 1, -1, -1):
            p = p * r + F32(1 / math.factorial(i))
        return np.ldexp(p, n.astype(np.int32))
