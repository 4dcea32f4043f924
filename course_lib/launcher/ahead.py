"""What later suites install, installed while earlier ones run: that keeps one core busy, and mostly
waits for the network.

Nobody relies on it: a suite asks for its environment all the same. It finds it, waits for the lock
of who is making it, or tries once more and says itself why that fails.
"""

from __future__ import annotations

import contextlib
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence

from course_lib.errors import CourseError
from course_lib.launcher.setup_log import end
from course_lib.paths import ROOT


@contextlib.contextmanager
def preparing(names: Sequence[str]) -> Iterator[None]:
    """Prepare these suites, in this order, in a process that ends with the `with` block."""
    if not names:
        yield
        return
    # Each environment has a log of its own.
    child = subprocess.Popen([sys.executable, "-m", __name__, *names], cwd=ROOT,
                             stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL,
                             stderr=subprocess.DEVNULL, start_new_session=True)
    try:
        yield
    finally:
        end(child)


def main(names: Sequence[str]) -> None:
    """Prepare suites."""
    from course_lib.launcher.suites import SUITES

    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))  # ends its step too
    prepare = {suite.name: suite.prepare for suite in SUITES if suite.prepare}
    for name in names:
        with contextlib.suppress(CourseError):
            prepare[name]()


if __name__ == "__main__":
    main(sys.argv[1:])
