"""`check` keeps its promise to print one line and never raise, whatever it is given."""

from __future__ import annotations

import sys

import numpy as np
import pytest

from course_lib.classroom import check, checking, exercises, sealed, solved_or
from course_lib.classroom.exercises import Case, Exercise, Reading
from course_lib.classroom.running import run

HUGE = 10**400


class Stop(BaseException):
    """Not an Exception: a broad ``except Exception`` does not hold it."""


class HostileMeta(type):
    __name__ = property(lambda cls: _stop())
    __hash__ = type.__hash__

    def __eq__(cls, other):
        raise Stop


def _stop(*args, **kwargs):
    raise Stop


class HostileDict(dict):
    get = items = keys = __iter__ = __contains__ = __getitem__ = __len__ = _stop


class HostileList(list):
    __iter__ = __len__ = __getitem__ = __eq__ = _stop


class HostileText(str):
    __repr__ = __str__ = __format__ = __eq__ = __len__ = __iter__ = split = _stop
    __hash__ = str.__hash__


class HostileError(Exception, metaclass=HostileMeta):
    pass


class HostileStrError(Exception):
    def __str__(self):
        return type("Text", (str,), {"strip": _stop, "splitlines": lambda self: [5]})("told")


@pytest.fixture(autouse=True)
def registry(monkeypatch, tmp_path):
    """Two A items and a B item whose truths are a line of code.py, a number and a pair."""
    (tmp_path / "code.py").write_text("first\nsecond\nthird\n", encoding="utf-8")
    (tmp_path / "picture.png").write_bytes(b"\x89PNG\xff\xfe")
    lines = sealed.Lines("code.py", "second"), sealed.Lines("code.py", "third")
    truth = {"place": lines[0], "count": 1, "both": lines}
    parts = {part: sealed.seal("d42.b1", part, value, tmp_path) for part, value in truth.items()}
    complaint = sealed.complaint
    monkeypatch.setattr(sealed, "load", lambda item_id: parts)
    monkeypatch.setattr(sealed, "complaint", lambda *args: complaint(*args, tmp_path))
    cases = [Case("small", (2,), expect=4), Case("dict", ("d",), expect={"a": 1.5})]
    items = [Exercise("d42.a1", "f", lambda: cases, seconds=0.3),
             Exercise("d42.a2", "g", lambda: [Case("big", (9,), expect=10)]),
             Reading("d42.b1", parts=tuple(truth), slack=0)]
    monkeypatch.setattr(exercises, "day_items", lambda day: items if day == 42 else [])
    monkeypatch.setattr(checking, "_latest", {})


@pytest.fixture
def told(capsys):
    """Check and return the one line."""

    def call(item_id, answer):
        check(item_id, answer)
        captured = capsys.readouterr()
        assert captured.err == "" and captured.out.count("\n") == 1 and len(captured.out) <= 161
        return captured.out[:-1]

    return call


def looped():
    value: list = []
    value.append(value)
    return value


def bush():
    """Fifteen small lists, and 1000**15 items for who walks them."""
    value: list = []
    for _ in range(15):
        value = [value] * 1000
    return value


RIGHT = {"place": "code.py:2", "count": 1, "both": ["code.py:3", "code.py:2"]}


def test_a_right_reading(told):
    assert told("d42.b1", RIGHT) == "[ok] d42.b1 3/3 public checks"
    assert told("d42.b1", HostileDict(RIGHT)) == "[ok] d42.b1 3/3 public checks"
    hostile = {**RIGHT, "both": HostileList(RIGHT["both"]), "place": HostileText("code.py:2")}
    assert told("d42.b1", hostile) == "[ok] d42.b1 3/3 public checks"
    assert told("d42.b1", {**RIGHT, "count": np.int64(1)}) == "[ok] d42.b1 3/3 public checks"


FOREIGN = "give a place, a number or a word"


@pytest.mark.parametrize("part, value, text", [
    ("place", "picture.png:1", "picture.png cannot be read as text"),
    ("place", "a" * 300 + ":1", "there is no file aaa"),
    ("place", "a\0b:1", "there is no file a"),
    ("place", "\ud800:1", "there is no file ? in the course"),
    ("place", "code.py:" + "9" * 5000, 'write it as "path:first-last"'),
    ("place", "code.py:" + "9" * 9, "code.py has lines 1 to 3"),
    ("count", HUGE, f"an integer above 2**1000; {FOREIGN}"),
    ("count", 2**1000 - 1, "not this value"),
    ("count", float("inf"), "not this value"),
    ("count", float("nan"), "not this value"),
    ("count", "\ud800", "not this value"),
    ("place", looped(), f"a value nested more than 20 deep; {FOREIGN}"),
    ("both", len, f"an object of type builtin_function_or_method; {FOREIGN}"),
    ("place", HostileError(), f"an object of type HostileError; {FOREIGN}"),
    ("place", {"code.py:2"}, 'write it as "path:first-last"'),
], ids=range(15))
def test_a_wrong_part_is_told(told, part, value, text):
    line = told("d42.b1", {**RIGHT, part: value})
    assert line.startswith(f"[x] d42.b1 2/3: {part} — {text}")


def test_a_part_without_end_takes_no_longer_than_the_limit(told, monkeypatch):
    monkeypatch.setattr(checking, "run", lambda fn, args: run(fn, args, seconds=0.1))
    line = told("d42.b1", {**RIGHT, "place": bush()})
    assert line == "[x] d42.b1 2/3: place — took too long (an endless loop?)"


def test_hostile_keys_of_a_reading(told):
    class Key:
        __hash__ = object.__hash__
        __eq__ = __repr__ = _stop

    line = told("d42.b1", {"place": "code.py:2", Key(): 1, HostileText("count"): 1})
    assert line.startswith("[x] d42.b1 1/3: unknown parts: (Key), (HostileText); missing parts")


def grow(x):
    """Leaves behind an argument without end."""
    x.extend(bush())
    return 4


@pytest.mark.parametrize("answer, text", [
    (lambda x: 10**5000, "returned an integer above 2**1000; return plain numbers"),
    (lambda x: -HUGE, "returned an integer above 2**1000"),
    (lambda x: 2**1000 - 1, "expected 4, got 1071508607186267320948425"),
    (lambda x: [[HUGE]], "returned an integer above 2**1000"),
    (lambda x: looped(), "returned a value nested more than 20 deep"),
    (lambda x: bush(), "took too long"),
    (lambda x: HostileList([4]), "expected 4, got [4]"),
    (lambda x: HostileText("four"), "expected 4, got 'four'"),
    (lambda x: _raise(HostileError), "HostileError"),
    (lambda x: _raise(HostileStrError), "HostileStrError: told"),
    (lambda x: HostileError(), "returned an object of type HostileError"),
])
def test_a_hostile_result_is_told(told, answer, text):
    assert told("d42.a1", answer).startswith(f"[x] d42.a1 0/2: small — {text}")


def _raise(kind):
    raise kind


def test_a_huge_integer_inside_a_dict_is_told(told):
    line = told("d42.a1", lambda x: 4 if x == 2 else {"a": HUGE})
    assert line.startswith("[x] d42.a1 1/2: dict — returned an integer above 2**1000")
    large = told("d42.a1", lambda x: 4 if x == 2 else {"a": 2**999})
    assert large.startswith("[x] d42.a1 1/2: dict — at 'a' expected 1.5, got 535754303593133660")


def test_an_argument_left_without_end_and_an_error_text_without_end_are_held():
    assert run(grow, ([],), seconds=0.1).error.__name__ == "TookTooLong"

    class Slow(Exception):
        def __str__(self):
            while True:
                pass

    result = run(lambda: _raise(Slow), seconds=0.1)
    assert (result.error, result.text) == (Slow, "")


@pytest.mark.parametrize("error", [KeyboardInterrupt, SystemExit, Stop, ValueError])
def test_an_id_that_raises_when_shown(told, error):
    def stop(self, *args):
        raise error

    kind = type("Id", (), {name: stop for name in ("__repr__", "__str__", "__eq__", "__format__")}
                | {"__hash__": stop, "__class__": property(stop)})
    assert told(kind(), len) == '[x] the exercise id must be a text such as "d10.a1", not Id'
    text = type("Text", (str,), {name: stop for name in ("__repr__", "__str__", "__format__")})
    assert told(text("d42.a7"), len).startswith("[x] d42.a7 there is no exercise d42.a7")


@pytest.mark.parametrize("error", [RuntimeError, SystemExit, Stop, MemoryError])
def test_the_last_resort_names_exercise_and_error(told, monkeypatch, error):
    monkeypatch.setattr(checking, "_report", lambda *args: _raise(error))
    assert told("d42.a1", len) == f"[x] d42.a1 could not be checked ({error.__name__})"
    assert solved_or(len, max) is max


def test_a_ctrl_c_outside_the_answer_passes_and_leaves_the_answer_unsolved(monkeypatch):
    def double(x):
        return 2 * x if x == 2 else {"a": 1.5}

    check("d42.a1", double)
    assert solved_or(double, max) is double
    monkeypatch.setattr(checking, "_report", lambda *args: _raise(KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        check("d42.a1", double)
    assert solved_or(double, max) is max


def test_a_stdout_that_lacks_characters(monkeypatch, tmp_path):
    with open(tmp_path / "out", "w", encoding="ascii") as stdout:
        monkeypatch.setattr(sys, "stdout", stdout)
        check("d42.a1", lambda x: "块")
        monkeypatch.undo()
    text = (tmp_path / "out").read_text()
    assert text == "[x] d42.a1 0/2: small \\u2014 expected 4, got '\\u5757'\n"


# solved_or


def both(x):
    return {2: 4, "d": {"a": 1.5}}.get(x)


def test_every_case_of_every_exercise_of_a_function_counts(told):
    assert told("d42.a1", lambda x: 4).startswith("[x] d42.a1 1/2")

    def half(x):
        return 4

    told("d42.a1", half)
    assert solved_or(half, max) is max, "one of two cases is wrong"
    told("d42.a1", both)
    assert solved_or(both, max) is both
    assert told("d42.a2", both).startswith("[x]")
    assert solved_or(both, max) is max, "right for one exercise, wrong for another"


@pytest.mark.parametrize("typo", ["d42.a7", "d99.a1", "42.a1", 7, None])
def test_an_unknown_id_is_not_remembered(told, typo):
    told("d42.a1", both)
    assert told(typo, both).startswith("[x] ")
    assert solved_or(both, max) is both
    assert list(checking._latest) == ["d42.a1"]
