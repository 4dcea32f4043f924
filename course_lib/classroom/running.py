"""Call an answer on one case, safely, and judge what came back.

Two halves, because a grader runs the first in a sandbox and the second outside it:
`run` never sees an expected value, `judge` never sees the learner's code.
"""

from __future__ import annotations

import contextlib
import copy
import io
import signal
import threading
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from course_lib.classroom.exercises import NOTHING, Case, Exercise
from course_lib.classroom.values import ForeignValue, difference, plain, type_name


class TookTooLong(BaseException):
    """Raised inside an answer that runs past its limit; not an Exception, so a broad
    ``except Exception`` in the answer does not hold it."""


@dataclass(frozen=True)
class Result:
    """What one call gave: a plain value, or the type and text of what stopped it."""

    value: Any = NOTHING
    error: type[BaseException] | None = None
    text: str = ""
    mutated: bool = False


@contextlib.contextmanager
def time_limit(seconds: float) -> Iterator[None]:
    """Raise TookTooLong in the main thread after `seconds`; no limit in other threads.

    The alarm repeats, so code that swallows the first is stopped by a later one.
    """
    if threading.current_thread() is not threading.main_thread() or not hasattr(signal, "SIGALRM"):
        yield
        return

    def stop(signum, frame):
        raise TookTooLong

    before = signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, seconds, 0.5)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def run(
    fn: Callable,
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    call: Callable | None = None,
    seconds: float = 10.0,
) -> Result:
    """Call `fn` on deep copies of its arguments and return its plain result; never raises.

    All that may run the answer's own code happens under the limit: the call, the rebuilding of
    its result and the text of its error. A Ctrl-C meanwhile is a result too: it cannot be told
    from a KeyboardInterrupt that the answer raises.

    Printed text and warnings are swallowed; overflow, division by zero and invalid operations
    of NumPy raise, so they are reported rather than turned into inf or nan.
    """
    given_args, given_kwargs = copy.deepcopy((list(args), dict(kwargs or {})))
    before = _snapshot(given_args, given_kwargs)
    target = fn if call is None else lambda *a, **k: call(fn, *a, **k)
    sink = io.StringIO()
    try:
        with time_limit(seconds), warnings.catch_warnings(), np.errstate(
            over="raise", divide="raise", invalid="raise"
        ), contextlib.redirect_stdout(sink), contextlib.redirect_stderr(sink):
            warnings.simplefilter("ignore")
            try:
                value = plain(target(*given_args, **given_kwargs))
                mutated = not _same(before, _snapshot(given_args, given_kwargs))
                return Result(value=value, mutated=mutated)
            except BaseException as error:  # noqa: BLE001 - SystemExit and the like too
                return Result(error=type(error), text=_first_line(error))
    except BaseException as error:  # noqa: BLE001 - an alarm or Ctrl-C at the border
        return Result(error=type(error))


def run_all(item: Exercise, fn: Callable, cases: Sequence[Case]) -> list[Result]:
    """Run `fn` on every case; after one that took too long, or was interrupted, the rest are
    not tried and count as it does."""
    results: list[Result] = []
    for case in cases:
        last = results[-1].error if results else None
        if last is TookTooLong or last is KeyboardInterrupt:
            results.append(results[-1])
        else:
            results.append(run(fn, case.args, case.kwargs, call=item.call, seconds=item.seconds))
    return results


def judge(case: Case, result: Result, *, mutates: bool = False) -> str | None:
    """Return None where the case passed, else one short line that says what is wrong."""
    if case.raises is not None:
        wanted = f"expected {case.raises.__name__}"
        if result.error is None:
            return f"{wanted}, got a result"
        if issubclass(result.error, case.raises):
            return None
        return f"{wanted}, got {error_text(result)}"
    if result.error is not None:
        return error_text(result)
    if case.accept is not None:
        try:
            complaint = case.accept(result.value)
        except Exception:  # noqa: BLE001 - a result of an unforeseen shape
            complaint = "a result of another form than asked for"
    else:
        complaint = difference(
            plain(case.expect), result.value, rtol=case.rtol, atol=case.atol, dtype=case.dtype
        )
    if complaint is None and result.mutated and not mutates:
        return "right, but it changed its arguments"
    return complaint


def is_stub(result: Result, item_id: str) -> bool:
    """True where the call met the untouched stub of this exercise."""
    return result.error is NotImplementedError and result.text == item_id


def _snapshot(args, kwargs):
    try:
        return plain([args, kwargs])
    except (ForeignValue, RecursionError):
        return None  # the arguments now hold something foreign: they were changed


def _same(before, after) -> bool:
    return after is not None and difference(before, after, dtype=True) is None


def _first_line(error: BaseException) -> str:
    try:
        text = str.strip(str(error))  # str's own methods: __str__ may return a subclass
        return "".join(str.splitlines(text)[:1])[:100]
    except BaseException:  # noqa: BLE001 - a hostile __str__
        return ""


def error_text(result: Result) -> str:
    """Return in a few words what stopped a call that gave no value."""
    error = result.error
    assert error is not None
    if issubclass(error, TookTooLong):
        return "took too long (an endless loop?)"
    if issubclass(error, KeyboardInterrupt):
        return "interrupted"
    if issubclass(error, ForeignValue):
        return f"returned {result.text}; return plain numbers, lists or arrays"
    if issubclass(error, NotImplementedError):
        return "not implemented for this case"
    name = type_name(error)
    return f"{name}: {result.text}" if result.text else name
