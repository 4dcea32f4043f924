"""Run a notebook in a fresh kernel of this Python, in an empty folder."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from jupyter_client.kernelspec import KernelSpec, KernelSpecManager
from jupyter_client.manager import AsyncKernelManager
from nbclient import NotebookClient
from nbclient.exceptions import CellControlSignal, CellExecutionError, DeadKernelError
from nbformat import NotebookNode

from course_lib.launcher.runner import ONE_THREAD
from course_lib.paths import ROOT

CELL_TIMEOUT = 120  # seconds
MAX_SECONDS, MAX_CELL_SECONDS, MAX_MEGABYTES = 20.0, 10.0, 600.0


class CellFailed(Exception):
    """A cell raised, timed out or killed its kernel; `index` counts all cells from 0."""

    def __init__(self, index: int, reason: str) -> None:
        super().__init__(reason)
        self.index = index
        self.reason = reason


@dataclass(frozen=True)
class Run:
    """What one run cost: seconds in all and of the slowest cell (its number among code cells),
    and the peak resident memory in MB, None where the system does not tell."""

    seconds: float
    slowest_seconds: float
    slowest_cell: int
    peak_mb: float | None

    def over(self) -> list[str]:
        """Return one sentence for each limit of a lesson that this run passed."""
        found = []
        if self.seconds > MAX_SECONDS:
            found.append(f"it took {self.seconds:.0f} s (limit {MAX_SECONDS:.0f} s)")
        if self.slowest_seconds > MAX_CELL_SECONDS:
            found.append(f"code cell {self.slowest_cell} took {self.slowest_seconds:.0f} s "
                         f"(limit {MAX_CELL_SECONDS:.0f} s)")
        if self.peak_mb is not None and self.peak_mb > MAX_MEGABYTES:
            found.append(f"it needed {self.peak_mb:.0f} MB (limit {MAX_MEGABYTES:.0f} MB)")
        return found

    def __str__(self) -> str:
        memory = "" if self.peak_mb is None else f", {self.peak_mb:.0f} MB"
        return (f"{self.seconds:.1f} s (code cell {self.slowest_cell}: "
                f"{self.slowest_seconds:.1f} s){memory}")


class _ThisPython(KernelSpecManager):
    """The python3 kernel of the running interpreter, whatever else is installed for the user."""

    def get_kernel_spec(self, kernel_name: str) -> KernelSpec:
        argv = [sys.executable, "-m", "ipykernel_launcher", "-f", "{connection_file}",
                "--log-level=ERROR"]
        return KernelSpec(argv=argv, display_name="Python 3", language="python")


@contextlib.contextmanager
def clean_exit() -> Iterator[None]:
    """Turn SIGTERM and SIGHUP into SystemExit (128 + number), so that what must be cleaned up is.

    A second signal waits for the end of the clean-up. Signals that somebody handles already, or
    ignores (nohup), are left alone, and so are all in another thread than the main one.
    """

    def stop(number, frame):
        signal.signal(number, signal.SIG_IGN)
        sys.exit(128 + number)

    numbers: list[int] = []
    if threading.current_thread() is threading.main_thread():
        numbers = [n for n in (signal.SIGTERM, signal.SIGHUP)
                   if signal.getsignal(n) is signal.SIG_DFL]
    for number in numbers:
        signal.signal(number, stop)
    try:
        yield
    finally:
        for number in numbers:
            signal.signal(number, signal.SIG_DFL)


def execute(notebook: NotebookNode, on_cell: Callable[[int], None] = lambda index: None) -> Run:
    """Execute `notebook` in place and return what the run cost; `on_cell` follows each cell.

    Raises CellFailed at the first cell that fails. The kernel is always ended and its
    folder removed, also by SIGTERM, which becomes SystemExit.
    """
    with clean_exit(), tempfile.TemporaryDirectory(prefix="course-") as folder:
        work = Path(folder) / "work"
        work.mkdir()
        manager = AsyncKernelManager(
            kernel_name="python3", kernel_spec_manager=_ThisPython(parent=None),
            connection_file=str(Path(folder) / "kernel.json"),
        )
        client = NotebookClient(
            notebook, km=manager, timeout=CELL_TIMEOUT, coalesce_streams=True,
            record_timing=False, store_widget_state=False,
            shutdown_kernel="immediate",
            resources={"metadata": {"path": str(work)}},
        )
        return _execute(client, notebook, _environment(folder), on_cell)


def _environment(folder: str) -> dict[str, str]:
    """The caller's environment, with this checkout's course_lib first, IPython's own files
    (start-up scripts, history) out of the way, and one BLAS thread unless the caller chose."""
    paths = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    return {**ONE_THREAD, **os.environ, "PYTHONPATH": os.pathsep.join(paths),
            "IPYTHONDIR": str(Path(folder) / "ipython"), "PYTHONDONTWRITEBYTECODE": "1"}


def _execute(client, notebook, environment, on_cell) -> Run:
    spent: list[float] = []
    peak = None
    started = time.perf_counter()
    with client.setup_kernel(env=environment, cleanup_kc=True):
        for index, cell in enumerate(notebook.cells):
            began = time.perf_counter()
            try:
                client.execute_cell(cell, index)
            except CellExecutionError as error:
                reason = f"{error.ename}: {error.evalue}".strip()
                raise CellFailed(index, reason) from None
            except DeadKernelError:
                raise CellFailed(index, "the kernel died") from None
            except CellControlSignal:
                raise CellFailed(index, f"it took over {CELL_TIMEOUT} s") from None
            if cell.cell_type == "code":
                spent.append(time.perf_counter() - began)
            on_cell(index)
        peak = _peak_mb(client.km)
    slowest = max(range(len(spent)), key=spent.__getitem__, default=0)
    return Run(time.perf_counter() - started, max(spent, default=0.0), slowest + 1, peak)


def _peak_mb(manager) -> float | None:
    """The kernel's highest resident memory so far, which Linux keeps as VmHWM (in kB)."""
    pid = getattr(manager.provisioner, "pid", None)
    try:
        status = Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return None
    for line in status.splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) / 1024
    return None
