"""Which kernels run: the compiled ones of ``kernels_pyx`` where they load, else NumPy.

``COURSE_KERNEL`` overrides the choice: ``numpy``, or the name of a compiled variant. The
environment is read at the first use, not at import, so importing the library cannot fail
because of it.

``COURSE_THREADS`` is the number of threads of the compiled kernels, of which at most four per core
are used; without it, one per performance core. It changes no bit of a result.

A call cannot be interrupted: Ctrl-C takes effect when it returns, at the course's sizes within
about a second.

``kernels_pyx`` provides ``VARIANTS``, the names of the variants that this build can run on this
CPU, best first, ``COMPILED``, whether there is a build at all, and ``kernels(variant)``, a mapping
from operation name to callable.
"""

import functools
import importlib
import os
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from course_lib.errors import CourseError

VARIANTS = ("numpy", "portable", "portable-baseline", "avx2", "avx512", "neon", "dotprod")


@dataclass(frozen=True)
class BackendInfo:
    """What runs: ``name`` is ``numpy`` or ``kernels_pyx``, ``variant`` the instruction set."""

    name: str
    variant: str
    reason: str


class _Held(threading.local):
    """The kernels of a thread that has looked them up for a while; None where it has not."""

    kernels: Mapping[str, Callable[..., Any]] | None = None


_held = _Held()


def info() -> BackendInfo:
    """Return which backend runs and why; CourseError if COURSE_KERNEL asks for one not there."""
    return _resolve(os.environ.get("COURSE_KERNEL", "").strip())[0]


def kernel(name: str) -> Callable[..., Any] | None:
    """Return the compiled kernel for an operation, or None where NumPy is to do it."""
    kernels = _held.kernels
    return (_chosen() if kernels is None else kernels).get(name)


def _chosen() -> Mapping[str, Callable[..., Any]]:
    return _resolve(os.environ.get("COURSE_KERNEL", "").strip())[1]


@contextmanager
def held() -> Iterator[None]:
    """Look the choice up once for a block of code, which then does not read the environment for
    each kernel: a token takes hundreds of them."""
    before, _held.kernels = _held.kernels, _chosen()
    try:
        yield
    finally:
        _held.kernels = before


def variants() -> tuple[str, ...]:
    """Return the names of the compiled variants that run here, best first; () on NumPy alone."""
    module, _ = _load()
    return () if module is None else tuple(module.VARIANTS)


@contextmanager
def using(name: str) -> Iterator[BackendInfo]:
    """Run a block of code on another backend, ``numpy`` or a variant's name; for comparisons.

    Yields its BackendInfo. Not for several threads at once: the choice is the process's. Raises
    CourseError for a backend that is not there.
    """
    before, kernels = os.environ.get("COURSE_KERNEL"), _held.kernels
    os.environ["COURSE_KERNEL"], _held.kernels = name, None
    try:
        yield info()
    finally:
        _held.kernels = kernels
        if before is None:
            del os.environ["COURSE_KERNEL"]
        else:
            os.environ["COURSE_KERNEL"] = before


def threads() -> int:
    """Return COURSE_THREADS, or the number of performance cores this process may use.

    More than four threads per core help nobody: of COURSE_THREADS no more are used. CourseError
    for one that is not a number from 1 to 1024.
    """
    text = os.environ.get("COURSE_THREADS", "").strip()
    if not text:
        return len(performance_cores())
    if not (text.isascii() and text.isdigit() and len(text) <= 20 and 1 <= int(text) <= 1024):
        shown = text if len(text) <= 20 else f"{text[:20]}..."
        raise CourseError(f"COURSE_THREADS={shown} must be a number from 1 to 1024.")
    return min(int(text), 4 * len(usable_cores()))


def usable_cores() -> list[int]:
    """Return the cores that this process may use."""
    usable = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else []
    return usable or list(range(os.cpu_count() or 1))


def performance_cores() -> list[int]:
    """Return the cores of the highest capacity among those that this process may use.

    On a board with fast and slow cores Linux states each core's capacity; elsewhere all are equal.
    """
    usable = usable_cores()
    capacity = {}
    for core in usable:
        try:
            with open(f"/sys/devices/system/cpu/cpu{core}/cpu_capacity", encoding="ascii") as file:
                capacity[core] = int(file.read())
        except (OSError, ValueError):
            capacity[core] = 0
    return [core for core in usable if capacity[core] == max(capacity.values())]


@functools.cache
def _set_threads_once() -> None:
    """Not again for another variant: whoever has set another number since keeps it."""
    importlib.import_module("kernels_pyx").set_num_threads(threads())


@functools.cache
def _resolve(requested: str) -> tuple[BackendInfo, Mapping[str, Callable[..., Any]]]:
    if requested and requested not in VARIANTS:
        raise CourseError(
            f"COURSE_KERNEL={requested} is not a kernel name; use one of {', '.join(VARIANTS)}."
        )
    if requested == "numpy":
        return BackendInfo("numpy", "numpy", "COURSE_KERNEL=numpy"), {}
    module, problem = _load()
    if module is None:
        if requested:
            raise CourseError(
                f"COURSE_KERNEL={requested} needs the compiled kernels, but {problem}; "
                "build them with a C compiler or set COURSE_KERNEL=numpy."
            )
        return BackendInfo("numpy", "numpy", problem), {}
    runnable = tuple(module.VARIANTS)
    if requested and requested not in runnable:
        raise CourseError(
            f"COURSE_KERNEL={requested} cannot run here; "
            f"this build on this CPU has {', '.join(('numpy', *runnable))}."
        )
    if not runnable:
        return BackendInfo("numpy", "numpy", "kernels_pyx has no variant for this CPU"), {}
    _set_threads_once()
    variant = requested or runnable[0]
    reason = f"COURSE_KERNEL={requested}" if requested else "the best variant this CPU runs"
    return BackendInfo("kernels_pyx", variant, reason), module.kernels(variant)


def _load() -> tuple[Any, str]:
    # Between two parallel loops GNU's OpenMP lets a thread spin, for milliseconds if not told
    # otherwise; beside another process that takes the core from the one that has work to do. It
    # reads this when it is loaded. A short spin bridges what lies between two kernels of a token.
    os.environ.setdefault("GOMP_SPINCOUNT", "2000")
    try:
        module = importlib.import_module("kernels_pyx")
    except ModuleNotFoundError as error:
        if error.name == "kernels_pyx":
            return None, "kernels_pyx is not built"
        return None, f"kernels_pyx does not load ({error})"
    except Exception as error:  # a stale build may fail in many ways; NumPy still works
        return None, f"kernels_pyx does not load ({error})"
    if module.__spec__ is None or module.__spec__.origin is None:
        return None, "kernels_pyx is a folder without a package"  # a half-cleaned checkout
    if not all(hasattr(module, name) for name in ("VARIANTS", "kernels", "set_num_threads")):
        return None, "kernels_pyx is another module of that name"
    if not getattr(module, "COMPILED", True):
        return None, "the kernels are not compiled"
    return module, ""
