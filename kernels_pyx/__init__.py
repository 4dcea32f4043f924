"""Compiled kernels: the same operations, with the same bits, for several instruction sets.

`portable` is plain C; `avx2`, `avx512`, `neon` and `dotprod` use the vector instructions of their
name. What was not compiled, or is not for this CPU, is simply absent; course_lib.backend chooses
among those that are there.
"""

import functools
import os
from collections.abc import Callable, Mapping
from importlib.util import find_spec
from pkgutil import extend_path
from typing import Any

# With a read-only checkout the compiled module lies in the environment's site-packages.
__path__ = extend_path(__path__, __name__)

COMPILED = bool(find_spec(f"{__name__}.compiled"))
"""Whether the kernels are compiled at all."""

if COMPILED:
    from kernels_pyx import compiled

    _VARIANTS = {variant.name: variant for variant in compiled.runnable()}
    if hasattr(os, "register_at_fork"):
        os.register_at_fork(after_in_child=compiled.forked)
else:
    _VARIANTS = {}

VARIANTS = tuple(_VARIANTS)
"""The compiled variants that this machine runs, best first."""


def set_num_threads(count: int) -> None:
    """Use up to ``count`` threads in the kernels from now on; ValueError below 1."""
    if _VARIANTS:
        compiled.set_num_threads(count)


@functools.cache
def kernels(variant: str) -> Mapping[str, Callable[..., Any]]:
    """Return the operations of one of VARIANTS by name."""
    bound = _VARIANTS[variant]
    return {name: functools.partial(function, bound)
            for name, function in compiled.OPERATIONS.items()}
