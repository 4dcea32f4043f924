"""A group: kernels that are timed in turn on the same inputs, beside NumPy doing the same."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Set
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from course_lib.bench.memory import Arena

Kernel = Callable[..., Any]

SEED = 20


@dataclass(frozen=True)
class Work:
    """One kernel on one input: a row of the table.

    kernel: its name in the table; operation: its name in kernels_pyx, the same if empty. call gets
    the compiled operation and makes one call of it; with `whole_model` it gets nothing and runs the
    library, which finds its kernels itself. read_bytes: what a call must read from memory.
    operations: multiplications and additions of a call, of `peak` "float" or "int8". numpy: which
    of the group's NumPy calls does the same.
    """

    kernel: str
    call: Callable[..., object]
    operation: str = ""
    whole_model: bool = False
    read_bytes: int | None = None
    operations: float | None = None
    peak: str = "float"
    numpy: str | None = None

    @property
    def name(self) -> str:
        """The operation's name in kernels_pyx."""
        return self.operation or self.kernel


@dataclass(frozen=True)
class Group:
    """Works on inputs of one shape; every call of `numpy` runs with the kernels off."""

    works: list[Work]
    numpy: dict[str, Callable[[], object]]
    kv: str | None = None
    context: int | None = None


@dataclass
class Bench:
    """What groups are built from: cold memory, and numbers that are the same in every run."""

    arena: Arena
    rng: np.random.Generator = field(default_factory=lambda: np.random.default_rng(SEED))

    def fill_floats(self) -> None:
        """Fill the arena with float32 from a normal distribution."""
        self.arena.fill("float32", lambda count: self.rng.standard_normal(count, np.float32))

    def fill_int8(self) -> None:
        """Fill the arena with int8 from -127 to 127."""
        self.arena.fill("int8", lambda count: self.rng.integers(-127, 128, count, np.int8))

    def normal(self, *shape: int) -> np.ndarray:
        """Return float32 from a normal distribution."""
        return self.rng.standard_normal(shape, np.float32)


@dataclass(frozen=True)
class Plan:
    """A group to be built when its turn comes: part of the bench, a title, threads or not."""

    part: str
    title: str
    build: Callable[[Bench], Group]
    all_threads: bool = True  # also measured on more than one thread
    quick: bool = False  # part of --quick


def chosen(plans: Iterable[Plan], parts: Set[str], quick: bool) -> list[Plan]:
    """Return the plans of some parts of the bench, all of them if none is named."""
    return [plan for plan in plans
            if (not parts or plan.part in parts) and (plan.quick or not quick)]
