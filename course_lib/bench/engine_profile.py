"""Where the time of a token goes: in which kernels, and outside of all of them."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import wraps
from typing import Any
from unittest.mock import patch

from course_lib import backend


@dataclass
class Profile:
    """Seconds of some work, and of each kernel in it."""

    seconds: float = 0.0
    kernels: dict[str, float] = field(default_factory=dict)
    calls: dict[str, int] = field(default_factory=dict)

    @property
    def outside(self) -> float | None:
        """The part of the time outside the kernels, 0 to 1; None where no kernel ran."""
        if not self.kernels or not self.seconds:
            return None
        return 1.0 - sum(self.kernels.values()) / self.seconds

    def shares(self) -> list[tuple[str, float]]:
        """Kernels with their part of the time, the longest first."""
        parts = sorted(self.kernels.items(), key=lambda item: -item[1])
        return [(name, seconds / self.seconds) for name, seconds in parts]


@contextmanager
def profiled() -> Iterator[Profile]:
    """Time what runs inside, and every kernel that `backend.kernel` hands out there.

    A clock around each call costs a microsecond or less, which counts as outside the kernels, and
    so do NumPy and whatever a kernel's caller prepares: the share is rather too large. A kernel's
    own checks of its arguments count as the kernel.
    """
    profile = Profile()
    real = backend.kernel
    clock = time.perf_counter

    def kernel(name: str) -> Callable[..., Any] | None:
        found = real(name)
        if found is None:
            return None

        @wraps(found)
        def timed(*arguments: Any) -> Any:
            start = clock()
            try:
                return found(*arguments)
            finally:
                profile.kernels[name] = profile.kernels.get(name, 0.0) + clock() - start
                profile.calls[name] = profile.calls.get(name, 0) + 1

        return timed

    with patch.object(backend, "kernel", kernel):
        begin = clock()
        try:
            yield profile
        finally:
            profile.seconds = clock() - begin
