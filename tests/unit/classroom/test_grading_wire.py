"""Messages between grader and sandbox: every plain value comes back, nothing else does harm."""

from __future__ import annotations

import io
import json
import zipfile

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as npst

from course_lib.classroom.grading.sandbox import checked_report
from course_lib.classroom.grading.wire import MAX_ARRAYS, MAX_KEYS, WireError, decode, encode
from course_lib.classroom.values import difference, plain

ARRAYS = npst.arrays(
    st.sampled_from(["<f4", "<f8", "<f2", "i1", "<i8", "u1", "?", "<c8", "<U3", "S2"]),
    npst.array_shapes(min_dims=0, max_dims=3, min_side=0, max_side=3))
SCALARS = st.none() | st.booleans() | st.integers(-2**900, 2**900) | st.floats() | st.text() | \
    st.binary() | st.complex_numbers()
KEYS = st.text() | st.integers() | st.booleans() | st.tuples(st.integers(), st.text())
VALUES = st.recursive(
    SCALARS | ARRAYS,
    lambda inner: st.lists(inner, max_size=3) | st.tuples(inner, inner)
    | st.dictionaries(KEYS, inner, max_size=3) | st.sets(st.integers() | st.text(), max_size=3),
    max_leaves=8)


@settings(max_examples=150, deadline=None)
@given(VALUES)
def test_every_plain_value_comes_back(value):
    value = plain(value)
    back = decode(encode(value))
    assert type(back) is type(value)
    assert difference(value, back, dtype=True) is None
    assert encode(back) == encode(value)


def test_signs_and_types_are_kept():
    value = [-0.0, float("nan"), 2**64, True, (1,), {1, 2}, {(1, "a"): None}, b"\0"]
    back = decode(encode(value))
    assert str(back) == str(value)
    assert [type(a) for a in back] == [type(a) for a in value]


def test_what_is_not_plain_is_refused():
    with pytest.raises(TypeError, match="object is not a plain value"):
        encode([object()])


@settings(max_examples=200, deadline=None)
@given(st.data())
def test_damaged_bytes_give_a_value_or_a_wire_error(data):
    body = bytearray(encode({"a": np.arange(3.0), "b": [1, "x"]}))
    for _ in range(data.draw(st.integers(1, 4))):
        body[data.draw(st.integers(0, len(body) - 1))] = data.draw(st.integers(0, 255))
    del body[data.draw(st.integers(0, len(body))):]
    try:
        decode(bytes(body))
    except WireError:
        pass


def archive(members, compression=zipfile.ZIP_STORED):
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", compression) as file:
        for name, content in members:
            file.writestr(name, content)
    return buffer.getvalue()


def npy(array, **changes):
    buffer = io.BytesIO()
    np.lib.format.write_array(buffer, array, allow_pickle=True)
    return buffer.getvalue()


def tree(value):
    return "tree.npy", npy(np.frombuffer(json.dumps(value).encode(), np.uint8))


HOSTILE = {
    "a pickle": archive([tree({"array": 0}), ("a0.npy", npy(np.array([print], object)))]),
    "a header that claims more": archive([tree({"array": 0}), (
        "a0.npy", npy(np.zeros(4)).replace(b"(4,)", b"(9,)"))]),
    "a negative size": archive([tree({"array": 0}), (
        "a0.npy", npy(np.zeros(40)).replace(b"(40,)", b"(-4,)"))]),
    "a compressed bomb": archive([tree({"list": []}), ("a0.npy", npy(np.zeros(10**6)))],
                                 zipfile.ZIP_DEFLATED),
    "a member twice": archive([tree(None), tree(None)]),
    "no tree": archive([("a0.npy", npy(np.zeros(1)))]),
    "an unknown tag": archive([tree({"eval": "1"})]),
    "two tags": archive([tree({"int": "1", "float": "0x1p0"})]),
    "a bare number": archive([tree(1)]),
    "a long integer": archive([tree({"int": "9" * 10**6})]),
    "an array that is not there": archive([tree({"array": 5})]),
    "texts of no length": archive([tree({"array": 0}), (
        "a0.npy", npy(np.zeros(9, "S1"))[:-9].replace(b"S1", b"S0"))]),
    "more arrays than anybody returns": archive(
        [tree(None), *((f"a{i}.npy", npy(np.zeros(1))) for i in range(MAX_ARRAYS + 1))]),
    "a key too many": archive([tree({"list": [{"set": [{"int": "1"}] * MAX_KEYS}] * 2})]),
    "an unhashable key": archive([tree({"dict": [[{"list": []}, None]]})]),
    "deep nesting": archive([("tree.npy", npy(np.frombuffer(b"[" * 10**5, np.uint8)))]),
    "nothing": b"",
}


@pytest.mark.filterwarnings("ignore:Duplicate name")
@pytest.mark.parametrize("body", HOSTILE.values(), ids=HOSTILE)
def test_hostile_messages_are_refused(body):
    with pytest.raises(WireError):
        decode(body)


@pytest.mark.parametrize("report", [
    {"end": "value", "value": {"a": [1.0]}, "mutated": False},
    {"end": "error", "stage": "call", "kinds": ["KeyError", "Exception"], "text": "'a'"},
    {"end": "timeout"}, {"end": "crash"}, {"end": "too_large"}, {"end": "uses_reference"},
])
def test_reports_pass(report):
    assert checked_report(report) == report


@pytest.mark.parametrize("report", [
    None, {}, [], {"end": ["value"]}, {"end": "all right"}, {"end": np.zeros(2)},
    {"end": "value"}, {"end": "value", "value": 2**1200, "mutated": False},
    {"end": "error"}, {"end": "error", "kinds": 5, "stage": "call", "text": ""},
    {"end": "error", "kinds": {"a": 1}, "stage": "call", "text": ""},
    {"end": "error", "kinds": np.array(1.0), "stage": "call", "text": ""},
])
def test_reports_that_an_answer_wrote_itself_are_foreign(report):
    assert checked_report(report) == {"end": "foreign"}


@given(VALUES, VALUES, VALUES, VALUES)
def test_a_report_of_any_values_has_the_known_form(value, kinds, stage, text):
    for end in ("value", "error"):
        found = checked_report({"end": end, "value": plain(value), "mutated": plain(stage),
                                "kinds": plain(kinds), "stage": plain(stage),
                                "text": plain(text)})
        assert found["end"] in (end, "foreign")
        if found["end"] == "error":
            assert found["stage"] in ("define", "call") and type(found["text"]) is str
            assert found["kinds"] and {type(kind) for kind in found["kinds"]} == {str}
