"""Every compiled operation, each argument spoiled in every way: a TypeError or ValueError that
names the argument and leaves the outputs alone, or the right result. Never a crash.

The good calls that are spoiled are those of tests/oracle/kernel_cases.py.
"""

from __future__ import annotations

import array
import copy
import os
import re
from typing import Any, NamedTuple

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import kernels_pyx
from tests.oracle.kernel_cases import LIMITS, MEASURING, POISON, SIZES, Call, arrays_of, make
from tests.spoiled import misaligned, read_only

REQUIRED = os.environ.get("COURSE_REQUIRE_KERNELS") == "1"
pytestmark = pytest.mark.skipif(not kernels_pyx.VARIANTS and not REQUIRED,
                                reason="the kernels are not compiled here")
OPERATIONS = sorted(SIZES)
each_operation = pytest.mark.parametrize("operation", OPERATIONS)
VARIANT = next(iter(kernels_pyx.VARIANTS), "")
"""The variant that runs here; wrong arguments never reach the C code, so one is enough for them."""
REFUSED, SAME, EITHER = "refused", "same result", "refused or any result"
OPTIONAL = {"importance", "importance_from_row", "reads", "samples", "sample_scale", "q_gain",
            "k_gain", "k_blocks"}
"""What prefill_attention, partial_attention, sparse_attention, split_heads, attention_input and
decoder_layers do without."""
VIEWS = {"split_heads": {"q", "k", "v"}, "attention_input": {"q", "k", "v"}}
"""Outputs that may be views of longer heads."""
TAKEN = "refused or the same result"
NUMBERS = "refused, perhaps after something was written, or any result"
"""What a call comes to may be known only at its end: a score can be infinite."""


class Spoiled(NamedTuple):
    """A changed argument and what must come of it."""

    how: str
    value: Any
    outcome: str


def good(operation: str, case: int = 0) -> Call:
    """A call with the dimensions of a case: the first two are small."""
    return make(operation, **SIZES[operation][case])


def every_other(a, axis):
    """The same values with a gap behind each along one axis."""
    wide = np.repeat(a, 2, axis=axis)
    return wide[tuple(slice(None, None, 2 if i == axis else 1) for i in range(a.ndim))]


def flipped(a, axis):
    """The same values, stored backwards along one axis."""
    return np.flip(np.ascontiguousarray(np.flip(a, axis)), axis)


def with_room_behind(a):
    """The same values as a view of longer heads, as in `cache[:, :n]`."""
    longer = np.zeros((a.shape[0], a.shape[1] + 3, *a.shape[2:]), a.dtype)
    longer[:, :a.shape[1]] = a
    return longer[:, :a.shape[1]]


class OfArray(np.ndarray):
    """A subclass that changes nothing."""


def spoiled_array(a: np.ndarray, output: bool, view: bool):
    """Ways to spoil an array that must be refused, taken as it is, or must at least not crash."""
    for dtype in ("f8", "f4", "f2", "i8", "i4", "u4", "i2", "i1", "u1", "?", "c8", "O", "U3",
                  "M8[s]", "f4,f4", "V4"):
        if np.dtype(dtype) != a.dtype:
            yield Spoiled(f"dtype {dtype}", np.zeros(a.shape, dtype), REFUSED)
    if a.dtype.itemsize > 1:
        yield Spoiled("foreign byte order", a.astype(a.dtype.newbyteorder(">")), REFUSED)
        yield Spoiled("misaligned", misaligned(a), REFUSED)
    if a.ndim > 1 and min(a.shape) > 1:
        yield Spoiled("order F", np.asfortranarray(a), REFUSED)
    for axis in range(a.ndim):
        if a.shape[axis] > 1:
            heads = axis == 0 and a.ndim > 1 and view  # every other head of a cache
            yield Spoiled(f"every other of axis {axis}", every_other(a, axis),
                          TAKEN if heads else REFUSED)
            yield Spoiled(f"negative stride of axis {axis}", flipped(a, axis), REFUSED)
            zero = np.broadcast_to(a[(slice(None),) * axis + (slice(0, 1),)], a.shape)
            yield Spoiled(f"zero stride of axis {axis}", zero, REFUSED)
        for how, part in (("empty", slice(0, 0)), ("short", slice(0, -1)), ("one", slice(0, 1))):
            part = a[(slice(None),) * axis + (part,)].copy(order="C")
            yield Spoiled(f"{how} axis {axis}", part, EITHER)
        yield Spoiled(f"double axis {axis}", np.concatenate([a, a], axis), EITHER)
        yield Spoiled(f"axis {axis} summed away", a.take(0, axis), REFUSED)
    if a.ndim > 1:
        yield Spoiled("flat", a.flatten(), REFUSED)
        if a.shape[0] > 1:
            yield Spoiled("room behind heads", with_room_behind(a), TAKEN if view else REFUSED)
    for axis in range(a.ndim if a.ndim > 1 else 0):  # no element, yet sizes whose products overflow
        shape = [2 ** (40 // (a.ndim - 1))] * a.ndim
        shape[axis] = 0
        yield Spoiled(f"shape {shape}", np.zeros(shape, a.dtype), EITHER)
    yield Spoiled("one axis more", a[None], REFUSED)
    yield Spoiled("one axis more behind", a[..., None], REFUSED)
    yield Spoiled("read-only", read_only(a), REFUSED if output else SAME)
    yield Spoiled("bytes", a.tobytes(), REFUSED if a.dtype != np.uint8 or a.ndim > 1 else EITHER)
    yield Spoiled("None", None, REFUSED if output else EITHER)  # some arrays may be left out
    for value in ("text", 7, 1.5, object(), a.tolist(), (1, 2), {}, range(3), np.float32(1),
                  array.array("d", [1.0])):
        yield Spoiled(f"{type(value).__name__}", value, REFUSED)
    if not output:
        yield Spoiled("memoryview", memoryview(a), SAME)
        yield Spoiled("subclass", a.view(OfArray), SAME)
        yield Spoiled("a copy", a.copy(), SAME)
        values = [-1, 0, 1, 2, 127, -128, 2**31 - 1, -2**31, 2**63 - 1, -2**63]
        if a.dtype.kind == "f":
            values = [np.nan, np.inf, -np.inf, 3.4e38, -3.4e38, 1e-45, -0.0, 0.0, 1e-20, 1e19]
        for value in values:
            if a.dtype.kind == "f" or np.iinfo(a.dtype).min <= value <= np.iinfo(a.dtype).max:
                yield Spoiled(f"full of {value}", np.full_like(a, value), NUMBERS)
                for position in {0, a.size // 2, a.size - 1} if a.size else ():
                    one = a.copy()
                    one.flat[position] = value
                    yield Spoiled(f"{value} at {position}", one, NUMBERS)


def spoiled_none():
    """In place of an optional array that is left out."""
    for wrong in ("text", 7, 1.5, object(), [], b"1", np.zeros(3), np.zeros((2, 3), np.int16)):
        yield Spoiled(f"{type(wrong).__name__} for None", wrong, EITHER)


def spoiled(value, output: bool, view: bool = True):
    if isinstance(value, np.ndarray):
        return spoiled_array(value, output, view)
    if isinstance(value, tuple):
        return spoiled_layers(value, output)
    if isinstance(value, bool):
        return spoiled_flag()
    return spoiled_none() if value is None else spoiled_number(value)


def spoiled_layers(value: tuple, output: bool):
    """One entry for each layer, of arrays: other entries, and one array spoiled. What is not
    spoiled is a copy, since a call may write to it."""
    def with_last(layer):
        return (*copy.deepcopy(value[:-1]), layer)

    for wrong in (None, "text", 7, object(), {}, np.zeros((2, 2))):
        yield Spoiled(f"{type(wrong).__name__} for a tuple", wrong, REFUSED)
        if value:
            yield Spoiled(f"{type(wrong).__name__} for a layer", with_last(wrong), REFUSED)
    yield Spoiled("a layer more", (*copy.deepcopy(value), ()), REFUSED)
    if not value:
        return
    last = value[-1]
    yield Spoiled("a list", [list(layer) for layer in copy.deepcopy(value)], SAME)
    yield Spoiled("a layer less", with_last(last)[:-1], REFUSED if len(value) > 1 else EITHER)
    yield Spoiled("a layer of one array less", with_last(copy.deepcopy(last[:-1])), REFUSED)
    yield Spoiled("a layer of one array more", with_last((*copy.deepcopy(last), None)), REFUSED)
    for place, one in enumerate(last):
        for change in () if one is None else spoiled_array(one, output, view=True):
            changed = list(copy.deepcopy(last))
            changed[place] = change.value
            outcome = EITHER if change.value is None else change.outcome
            yield Spoiled(f"array {place} {change.how}", with_last(tuple(changed)), outcome)


def spoiled_flag():
    for wrong in (None, "yes", [], 1.5, 2, -1, 2**70, object(), np.zeros(3)):
        yield Spoiled(f"{type(wrong).__name__} as a flag", wrong, REFUSED)
    for other in (0, 1, np.True_, np.int8(0)):
        yield Spoiled(repr(other), other, EITHER)


def spoiled_number(value):
    for wrong in (None, "1", b"1", [], object(), 1j, np.zeros(3), np.zeros(3, np.int64)):
        yield Spoiled(f"{type(wrong).__name__}", wrong, REFUSED)
    for power in (31, 32, 62, 63, 64, 100, 5000):
        for other in (2**power - 1, 2**power, -2**power, -2**power - 1):
            outcome = REFUSED if power >= 64 and isinstance(value, int) else EITHER
            yield Spoiled(f"about {'-' * (other < 0)}2**{power}", other, outcome)
    for other in (-2, -1, 0, 1, 2, 3, 15, 16, 17, 33, 127, True, np.int64(3), np.uint8(200)):
        yield Spoiled(repr(other), other, EITHER)
    yield Spoiled("the same as np.int64" if isinstance(value, int) else "the same as np.float64",
                  np.int64(value) if isinstance(value, int) else np.float64(value), SAME)
    if isinstance(value, int):
        yield Spoiled("a float", float(value), REFUSED)
    else:
        for other in (np.nan, np.inf, -np.inf):
            yield Spoiled(repr(other), other, REFUSED)
        for other in (-1e300, 1e300, -1.0, 0.0, 1e-300, 0.5, np.float16(1)):
            yield Spoiled(repr(other), other, EITHER)


def contents(call: Call) -> dict[str, bytes]:
    """The memory of every array argument."""
    return {name: b"".join(a.tobytes() for _, a in arrays_of(name, value) if a.dtype != object)
            for name, value in call.arguments.items()
            if isinstance(value, np.ndarray | tuple | list)}


def check(call: Call, changed: Call, name: str, change: Spoiled, result: dict[str, bytes]) -> None:
    """Run `changed`, a call that differs from `call` in the argument `name`."""
    where = f"{call.operation}: {name}: {change.how}"
    before = contents(changed)
    try:
        changed(VARIANT)
    except (TypeError, ValueError) as error:
        assert change.outcome != SAME, f"{where} is refused: {error}"
        names = [name] if change.outcome in (REFUSED, TAKEN) else call.arguments
        named = [n for n in names if re.search(rf"\b{n}\b", str(error))]
        assert named or change.outcome == NUMBERS, f"{where} is not named: {error}"
        after = contents(changed)
        for other in call.arguments:
            if change.outcome != NUMBERS or other not in call.outputs:
                assert after.get(other) == before.get(other), f"{where}: {other} was written"
        return
    except Exception as error:
        raise AssertionError(f"{where}: {type(error).__name__}: {error}") from error
    assert change.outcome != REFUSED, f"{where} is taken"
    after = contents(changed)
    for other in call.arguments:
        if other not in call.outputs:
            assert after.get(other) == before.get(other), f"{where}: input {other} is overwritten"
    if change.outcome in (SAME, TAKEN):
        assert {n: after[n] for n in call.outputs} == result, f"{where}: another result"


@each_operation
@pytest.mark.parametrize("case", (0, 1))
@pytest.mark.filterwarnings("ignore:overflow encountered in cast")  # of 3.4e38 to float16
def test_every_argument_spoiled_in_every_way(operation, case):
    call = good(operation, case)
    untouched = contents(call)
    done = copy.deepcopy(call)
    done(VARIANT)
    result = {name: contents(done)[name] for name in call.outputs}
    assert all(result[name] != untouched[name] for name in result), "an output is not written"
    count = 0
    for name, value in call.arguments.items():
        output = name in call.outputs
        view = not output or name in VIEWS.get(operation, ())
        for change in spoiled(value, output, view):
            if value is not None and change.value is None and name in OPTIONAL:
                continue
            fresh = copy.deepcopy(call)
            check(call, Call(operation, fresh.arguments | {name: change.value}, call.outputs),
                  name, change, result)
            count += 1
    assert contents(call) == untouched and count > 50


@each_operation
def test_an_output_that_shares_memory(operation):
    """An output on top of an input or of another output is refused, or gives the right result."""
    call = good(operation)
    done = copy.deepcopy(call)
    done(VARIANT)
    result = {name: contents(done)[name] for name in call.outputs}
    for name in call.outputs:
        for other, value in call.arguments.items():
            if other == name or not isinstance(value, np.ndarray):
                continue
            if not isinstance(call.arguments[name], np.ndarray):
                continue
            for offset in (0, 64):
                fresh = copy.deepcopy(call)
                output = fresh.arguments[name]
                memory = np.zeros(max(output.nbytes, value.nbytes) + offset, np.uint8)
                shared = memory[:value.nbytes].view(value.dtype).reshape(value.shape)
                shared[...] = value
                inside = memory[offset:offset + output.nbytes]
                if not np.shares_memory(inside, shared):
                    continue
                changed = fresh.arguments | {
                    other: shared, name: inside.view(output.dtype).reshape(output.shape)}
                before = shared.tobytes()
                try:
                    Call(operation, changed, call.outputs)(VARIANT)
                except ValueError as error:
                    assert name in str(error) and other in str(error), error
                    assert shared.tobytes() == before
                else:
                    assert changed[name].tobytes() == result[name], f"{operation}: {name}, {other}"


@each_operation
def test_missing_and_superfluous_arguments(operation):
    call = good(operation)
    for name in call.arguments.keys() - OPTIONAL:
        fewer = {other: value for other, value in call.arguments.items() if other != name}
        with pytest.raises(TypeError):
            Call(operation, fewer, call.outputs)(VARIANT)
    with pytest.raises(TypeError):
        Call(operation, call.arguments | {"extra": 1}, call.outputs)(VARIANT)


@each_operation
@settings(max_examples=25)
@given(data=st.data())
def test_any_size_gives_the_same_bits_on_every_variant(operation, data):
    """Sizes that nobody thought of, drawn around those of the cases."""
    size = {name: data.draw(st.integers(*limits), label=name)
            for name, limits in LIMITS[operation].items()}
    call = make(operation, data.draw(st.integers(0, 2**32)), **size)
    digests = {variant: call.digest(variant) for variant in kernels_pyx.VARIANTS
               if variant != "portable-baseline"}
    assert len(set(digests.values())) == 1, digests


@each_operation
@settings(max_examples=60)
@given(data=st.data())
def test_any_float_is_refused_or_has_one_meaning(operation, data):
    """Numbers of every size, NaN and infinity anywhere: the same outcome on every variant."""
    call = good(operation)
    fresh = copy.deepcopy(call)
    arrays = [a for name, value in fresh.arguments.items()
              if name not in call.outputs or isinstance(value, tuple)
              for _, a in arrays_of(name, value)]
    if len(arrays) > 12:
        arrays = data.draw(st.lists(st.sampled_from(arrays), max_size=8))
    for value in arrays:
        if value.dtype.kind != "f" or not value.size:
            continue
        for _ in range(data.draw(st.integers(0, 3))):
            position = data.draw(st.integers(0, value.size - 1))
            value.flat[position] = data.draw(st.floats(width=value.dtype.itemsize * 8))
    outcomes = set()
    for variant in kernels_pyx.VARIANTS:
        try:
            outcomes.add(fresh.digest(variant))
        except ValueError as error:
            outcomes.add(f"ValueError: {error}")
    assert len(outcomes) == 1, outcomes


def measuring(operation: str) -> Call:
    arguments = {"read_words": dict(words=np.arange(100, dtype=np.int32)),
                 "read_blocks": dict(words=np.arange(100, dtype=np.int32),
                                     first=np.array([0, 40, 68, 40]), size=32),
                 "compute_float": dict(rounds=3), "compute_int8": dict(rounds=3)}[operation]
    return Call(operation, arguments, ())


@pytest.mark.parametrize("operation", MEASURING)
def test_the_measuring_operations(operation):
    call = measuring(operation)
    for name, value in call.arguments.items():
        for change in spoiled(value, False):
            # So many rounds are no error; they would only take for ever.
            if name == "rounds" and "about 2**" in change.how and change.outcome == EITHER:
                continue
            check(call, Call(operation, call.arguments | {name: change.value}, ()), name, change,
                  {})


def test_poison_is_no_likely_result():
    assert np.full(4, POISON, np.uint8).view(np.float32)[0] > 1e16
