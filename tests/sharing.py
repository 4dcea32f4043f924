"""Kernels that share their work among threads, in tests whose work is too small for that."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import kernels_pyx


@contextmanager
def shared_among(threads: int, *, started: bool | None = None) -> Iterator[None]:
    """In the block kernels use `threads` threads for whatever work, and some call must have started
    them: `started` says whether, None where that depends on the shape."""
    from kernels_pyx import compiled

    before, count = compiled.get_num_threads(), compiled.parallel_regions()
    kernels_pyx.set_num_threads(threads)
    compiled.share_small_work(True)
    try:
        yield
    finally:
        compiled.share_small_work(False)
        kernels_pyx.set_num_threads(before)
    if started is not None:
        assert (compiled.parallel_regions() > count) == (started and compiled.HAS_THREADS)
