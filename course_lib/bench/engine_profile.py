"""Where the time of a token goes: in which kernels, and outside of all of them."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any
from unittest.mock import patch

from course_lib import backend


@dataclass
class Timed:
    """A kernel with a clock around it: the seconds in it, and how often it was called."""

    found: Callable[..., Any]
    seconds: float = 0.0
    calls: int = 0

    def __call__(self, *arguments: Any) -> Any:
        start = time.perf_counter()
        try:
            return self.found(*arguments)
        finally:
            self.seconds += time.perf_counter() - start
            self.calls += 1


@dataclass
class Profile:
    """Seconds of some work, and the kernels in it by name."""

    seconds: float = 0.0
    kernels: dict[str, Timed] = field(default_factory=dict)

    @property
    def outside(self) -> float | None:
        """The part of the time outside the kernels, 0 to 1; None where no kernel ran."""
        if not self.kernels or not self.seconds:
            return None
        return 1.0 - sum(kernel.seconds for kernel in self.kernels.values()) / self.seconds

    def shares(self) -> list[tuple[str, float]]:
        """Kernels with their part of the time, the longest first."""
        parts = sorted(self.kernels.items(), key=lambda item: -item[1].seconds)
        return [(name, kernel.seconds / self.seconds) for name, kernel in parts]


WHOLE = "decoder_layers"
"""The kernel that takes a token through all layers, in which the others are not seen."""


@contextmanager
def profiled(*, layer_by_layer: bool = False) -> Iterator[Profile]:
    """Time what runs inside, and every kernel that `backend.kernel` hands out there.

    Outside the kernels is all else: Python, NumPy, and what a kernel's caller prepares; a kernel's
    own checks of its arguments count as the kernel. What the clocks themselves cost, half a
    microsecond a call, is measured and taken off. `layer_by_layer` hides the kernel of all layers,
    so that those of one layer run, and are seen.
    """
    profile = Profile()
    real = backend.kernel

    def kernel(name: str) -> Timed | None:
        if layer_by_layer and name == WHOLE:
            return None
        timed = profile.kernels.get(name)
        if timed is None and (found := real(name)) is not None:
            timed = profile.kernels[name] = Timed(found)
        return timed

    with patch.object(backend, "kernel", kernel):
        begin = time.perf_counter()
        try:
            yield profile
        finally:
            calls = sum(timed.calls for timed in profile.kernels.values())
            profile.seconds = time.perf_counter() - begin - calls * cost_of_a_clock()


def cost_of_a_clock(calls: int = 1000) -> float:
    """Seconds that a Timed adds to a call outside of what it counts."""
    timed = Timed(lambda: None)
    begin = time.perf_counter()
    for _ in range(calls):
        timed()
    return (time.perf_counter() - begin - timed.seconds) / calls
