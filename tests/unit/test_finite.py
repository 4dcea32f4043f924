"""What is not finite is found in an array of any kind, with kernels and without."""

from __future__ import annotations

import numpy as np
import pytest

import kernels_pyx
from course_lib import backend
from course_lib.arrays import NotFiniteError, all_finite, require_finite
from tests.spoiled import misaligned

BACKENDS = ("numpy", *kernels_pyx.VARIANTS[:1])
F32 = np.float32
ARRAYS = {
    "rows": np.ones((2, 3, 16), F32),
    "every other column": np.ones((2, 3, 32), F32)[:, :, ::2],
    "turned": np.ones((16, 3, 2), F32).T,
    "misaligned": misaligned(np.ones((2, 3, 16), F32)),
    "float64": np.ones((2, 3, 16)),
    "another byte order": np.ones((2, 3, 16), ">f4"),
}


@pytest.mark.parametrize("name", BACKENDS)
@pytest.mark.parametrize("kind", ARRAYS)
@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_one_value_that_is_not_finite_is_found(name, kind, value):
    x = ARRAYS[kind]
    with backend.using(name):
        assert all_finite(x) is True
        require_finite(x, "x")
        x[1, 2, 15] = value
        try:
            assert all_finite(x) is False
            with pytest.raises(NotFiniteError, match="x holds NaN or infinity at head 1, token 7"):
                require_finite(x, "x", first_token=5)
        finally:
            x[1, 2, 15] = 1


@pytest.mark.parametrize("name", BACKENDS)
def test_the_largest_and_no_numbers_are_finite(name):
    with backend.using(name):
        assert all_finite(np.full(5, np.finfo(F32).max))
        assert all_finite(np.empty((0, 4), F32))
        assert all_finite(np.array(2, F32)) and not all_finite(np.array(np.nan, F32))
