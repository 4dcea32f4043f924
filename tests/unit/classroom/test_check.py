"""`check` prints one line whatever the answer does; `solved_or` prints nothing."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
import warnings

import numpy as np
import pytest

from course_lib.classroom import check, checking, exercises, solved_or
from course_lib.classroom.exercises import Case, Exercise, find_item, parse_id
from course_lib.classroom.running import run, time_limit
from course_lib.errors import CourseError


@pytest.fixture(autouse=True)
def forget_earlier_checks(monkeypatch):
    monkeypatch.setattr(checking, "_latest", {})


@pytest.fixture
def register(monkeypatch):
    """Put one exercise, d42.a1, in the registry."""

    def put(*cases, **options):
        item = Exercise("d42.a1", "f", lambda: list(cases), **options)
        monkeypatch.setattr(exercises, "find_item", lambda item_id: item)
        return item

    return put


def line(capsys, answer, item_id="d42.a1"):
    check(item_id, answer)
    captured = capsys.readouterr()
    assert captured.err == "" and captured.out.endswith("\n")
    assert captured.out.count("\n") == 1 and len(captured.out) <= 161
    return captured.out[:-1]


def stub(x):
    raise NotImplementedError("d42.a1")


DOUBLE = Case("small", (2,), expect=4), Case("ties", ([1, 2],), expect=[1, 2, 1, 2])


def double(x):
    return 2 * x


def test_stub_right_and_wrong(capsys, register):
    register(*DOUBLE)
    assert line(capsys, stub) == "[ ] d42.a1 not attempted"
    assert line(capsys, double) == "[ok] d42.a1 2/2 public checks"
    assert line(capsys, lambda x: x) == "[x] d42.a1 0/2: small — expected 4, got 2"
    wrong = line(capsys, lambda x: x * 2 if x == 2 else x)
    assert wrong == "[x] d42.a1 1/2: ties — expected [1, 2, 1, 2], got [1, 2]"


def test_a_half_stub_is_an_attempt(capsys, register):
    register(*DOUBLE)
    half = line(capsys, lambda x: 4 if x == 2 else stub(x))
    assert half == "[x] d42.a1 1/2: ties — not implemented for this case"
    other = line(capsys, lambda x: (_ for _ in ()).throw(NotImplementedError("d42.a2")))
    assert other.startswith("[x] d42.a1 0/2")


class Hostile(BaseException):
    def __str__(self):
        raise Hostile

    def __repr__(self):
        raise Hostile


def raising(error):
    def f(x):
        raise error

    return f


@pytest.mark.parametrize("answer, text", [
    (raising(ValueError("no\nsecond line")), "ValueError: no"),
    (raising(SystemExit(3)), "SystemExit: 3"),
    (raising(KeyboardInterrupt()), "interrupted"),
    (raising(GeneratorExit()), "GeneratorExit"),
    (raising(Hostile()), "Hostile"),
    (lambda x: sys.exit("bye"), "SystemExit: bye"),
    (lambda: 1, "TypeError:"),
    (lambda x: object(), "returned an object of type object; return plain numbers"),
    (lambda x: np.float32(1) / np.float32(0), "FloatingPointError: divide by zero"),
    (lambda x: np.float32(3e38) * np.float32(10), "FloatingPointError: overflow"),
])
def test_everything_is_caught(capsys, register, answer, text):
    register(Case("small", (2,), expect=4))
    assert line(capsys, answer).startswith(f"[x] d42.a1 0/1: small — {text}")


def test_endless_recursion_is_caught(capsys, register):
    def deeper(x):
        return deeper(x)

    register(Case("small", (2,), expect=4))
    assert "RecursionError" in line(capsys, deeper)


@pytest.mark.parametrize("answer", [5, None, "text", []])
def test_something_else_than_a_function(capsys, register, answer):
    register(*DOUBLE)
    assert line(capsys, answer) == "[x] d42.a1 0/2: give the function itself"


@pytest.mark.parametrize("item_id", ["d42.a9", "nonsense", None, 7, "d99.a1"])
def test_unknown_ids_are_told_in_the_line(capsys, item_id):
    assert line(capsys, double, item_id).startswith("[x] ")


def test_endless_loop_stops_and_the_rest_is_not_tried(capsys, register):
    calls = []

    def endless(x):
        calls.append(x)
        while True:
            try:
                time.sleep(0.01)
            except Exception:
                pass

    register(*DOUBLE, seconds=0.05)
    assert line(capsys, endless) == "[x] d42.a1 0/2: small — took too long (an endless loop?)"
    assert len(calls) == 1


def test_a_loop_that_swallows_the_alarm_stops_too():
    def stubborn():
        swallowed = 0
        while swallowed < 2:
            try:
                while True:
                    time.sleep(0.01)
            except BaseException:
                swallowed += 1
        while True:
            time.sleep(0.01)

    assert run(stubborn, seconds=0.05).error.__name__ == "TookTooLong"


def test_the_alarm_is_given_back():
    before = signal.getsignal(signal.SIGALRM)
    with time_limit(5):
        assert signal.getitimer(signal.ITIMER_REAL)[0] > 0
    assert signal.getitimer(signal.ITIMER_REAL)[0] == 0
    assert signal.getsignal(signal.SIGALRM) is before


def test_a_check_works_outside_the_main_thread(register):
    register(*DOUBLE)
    found = []
    thread = threading.Thread(target=lambda: found.append(checking.report("d42.a1", double)))
    thread.start()
    thread.join()
    assert found == [("[ok] d42.a1 2/2 public checks", True)]


def test_prints_and_warnings_of_the_answer_are_swallowed(capsys, register):
    def noisy(x):
        print("noise", file=sys.stderr)
        print("noise")
        warnings.warn("noise", stacklevel=1)
        return 4

    register(Case("small", (2,), expect=4))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert line(capsys, noisy) == "[ok] d42.a1 1/1 public checks"


def test_a_changed_argument_is_told_and_the_next_case_gets_a_fresh_one(capsys, register):
    data = np.arange(4)

    def shifts(x):
        x += 1
        return int(x.sum())

    cases = Case("sum", (data,), expect=10), Case("again", (data,), expect=10)
    register(*cases)
    assert line(capsys, shifts) == "[x] d42.a1 0/2: sum — right, but it changed its arguments"
    register(*cases, mutates=True)
    assert line(capsys, shifts) == "[ok] d42.a1 2/2 public checks"
    assert data.tolist() == [0, 1, 2, 3]


def test_an_argument_changed_to_another_dtype_or_foreign_value_is_told(capsys, register):
    def foreign(x):
        x.append(object())
        return 1

    register(Case("one", ([1],), expect=1))
    assert "changed its arguments" in line(capsys, foreign)


class AlwaysEqual:
    def __eq__(self, other):
        return True

    def __bool__(self):
        return True


class EqualArray(np.ndarray):
    def __eq__(self, other):
        return np.ones(self.shape, bool)

    __ne__ = __sub__ = lambda self, other: np.zeros(self.shape)


@pytest.mark.parametrize("got", [
    AlwaysEqual(), [AlwaysEqual()] * 3, np.array([AlwaysEqual()] * 3),
    np.array([9, 9, 9]).view(EqualArray),
], ids=["object", "list", "array of objects", "array subclass"])
def test_no_foreign_equality_is_trusted(capsys, register, got):
    register(Case("one", (1,), expect=np.array([1, 2, 3])),
             Case("list", (1,), expect=[1, 2, 3]))
    assert line(capsys, lambda x: got).startswith("[x] d42.a1 0/2")


def test_raises_and_accept(capsys, register):
    register(
        Case("refuses 0", (0,), raises=ValueError),
        Case("even", (3,), accept=lambda got: None if got % 2 == 0 else f"{got} is odd"),
    )

    def good(x):
        if x == 0:
            raise UnicodeError("a kind of ValueError")
        return 6

    assert line(capsys, good) == "[ok] d42.a1 2/2 public checks"
    assert line(capsys, lambda x: 6).endswith("refuses 0 — expected ValueError, got a result")
    bad = line(capsys, lambda x: 5 if x else raising(ValueError())(x))
    assert bad == "[x] d42.a1 1/2: even — 5 is odd"
    odd = line(capsys, lambda x: "text" if x else raising(ValueError())(x))
    assert odd.endswith("even — a result of another form than asked for")
    keyed = line(capsys, lambda x: {}[x])
    assert keyed.startswith("[x] d42.a1 0/2: refuses 0 — expected ValueError, got KeyError")


def test_call_makes_the_call(capsys, register):
    register(Case("twice", (1,), expect=[2, 2]), call=lambda fn, x: [fn(x), fn(x)])
    state = []

    def forgetful(x):
        state.append(x)
        return 2 * len(state)

    assert line(capsys, double) == "[ok] d42.a1 1/1 public checks"
    assert line(capsys, forgetful) == "[x] d42.a1 0/1: twice — expected [2, 2], got [2, 4]"


def test_solved_or(capsys, register):
    def reference(x):
        return x + x

    register(*DOUBLE)
    assert solved_or(double, reference) is reference, "never checked"
    check("d42.a1", stub)
    assert solved_or(stub, reference) is reference
    check("d42.a1", double)
    assert solved_or(double, reference) is double
    assert solved_or(stub, reference) is reference

    def redefined(x):
        return 2 * x

    assert solved_or(redefined, reference) is reference, "an edit must be checked again"
    register(Case("small", (2,), expect=5))
    check("d42.a1", double)
    assert solved_or(double, reference) is reference, "the latest check counts"
    capsys.readouterr()
    solved_or(double, reference)
    assert capsys.readouterr() == ("", "")


@pytest.mark.parametrize("options", [{}, {"expect": 1, "raises": ValueError},
                                     {"expect": None, "accept": len}])
def test_a_case_states_exactly_one_outcome(options):
    with pytest.raises(ValueError, match="exactly one"):
        Case("name", (1,), **options)


@pytest.mark.parametrize("options, text", [
    ({"args": np.zeros(3)}, "tuple of the arguments"), ({"args": (len,)}, "args holds an object"),
    ({"kwargs": {"rng": np.random.default_rng(0)}}, "kwargs holds an object"),
    ({"expect": AlwaysEqual()}, "expect holds an object"),
])
def test_a_case_holds_plain_values_only(options, text):
    with pytest.raises(ValueError, match=text):
        Case("name", **{"expect": 1, **options})


def test_an_interrupted_check_tries_no_more(capsys, register):
    calls = []

    def interrupted(x):
        calls.append(x)
        raise KeyboardInterrupt

    register(*DOUBLE)
    assert line(capsys, interrupted) == "[x] d42.a1 0/2: small — interrupted"
    assert len(calls) == 1


def test_ids():
    assert parse_id("d10.a1") == (10, "A") and parse_id("d09.b3") == (9, "B")
    for wrong in ("d1.a1", "d10.c1", "d10.a0", "d10.a1 ", "D10.a1", None, 5):
        with pytest.raises(CourseError, match="not an exercise id"):
            parse_id(wrong)


def test_example_items_are_found(example):
    assert find_item("d99.a1").function == "best_blocks"
    with pytest.raises(CourseError, match="day 99 has: d99.a1, d99.b1"):
        find_item("d99.a2")


def test_the_environment_is_left_alone(capsys, register):
    register(*DOUBLE)
    before = dict(os.environ), np.geterr(), sys.stdout
    check("d42.a1", double)
    assert (dict(os.environ), np.geterr(), sys.stdout) == before
