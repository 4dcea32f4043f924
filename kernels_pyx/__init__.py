"""Compiled kernels, one module per variant: `portable` (plain C, any machine).

A variant that was not compiled on this machine is simply absent; course_lib.backend chooses among
those that are there.
"""

from collections.abc import Callable, Mapping
from importlib import import_module
from importlib.util import find_spec
from pkgutil import extend_path
from typing import Any

# With a read-only checkout the compiled modules lie in the environment's site-packages.
__path__ = extend_path(__path__, __name__)

VARIANTS = tuple(name for name in ("portable",) if find_spec(f"{__name__}.{name}"))
"""The compiled variants that this machine runs, best first."""


def kernels(variant: str) -> Mapping[str, Callable[..., Any]]:
    """Return the operations of one of VARIANTS by name."""
    module = import_module(f"{__name__}.{variant}")
    return {name: getattr(module, name) for name in module.OPERATIONS}
