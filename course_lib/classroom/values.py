"""Plain values: what an answer may return, and how it is compared.

A student's function can return anything, also an object whose ``__eq__`` always says True.
`plain` therefore first rebuilds the value from exact built-in types and NumPy arrays, using the
base types' own methods, and refuses everything else; `difference` compares only such values.
"""

from __future__ import annotations

import numpy as np

_NUMPY_SCALARS = frozenset(t for t in np.sctypeDict.values() if t is not np.object_)
_MAX_ITEMS = 1_000_000
_MAX_DEPTH = 20
_MAX_BITS = 1000  # a larger int has no float, and one of thousands of digits no text


class ForeignValue(TypeError):
    """The value holds something that is neither a number, text, array nor a container of them."""


def plain(value, _depth: int = 0):
    """Return a deep copy of `value` made of exact built-in types and plain NumPy arrays.

    None, bool, int, float, complex, str, bytes, list, tuple, dict, set and numeric, bool or text
    arrays are accepted, subclasses too (they become the base type); NumPy scalars become 0-d
    arrays' Python values except that their dtype is not kept. Raises ForeignValue for anything
    else, for nesting deeper than 20, containers above a million items and ints above 2**1000.
    """
    if _depth > _MAX_DEPTH:
        raise ForeignValue("a value nested more than 20 deep")
    kind = type(value)
    if value is None or kind is bool:
        return value
    if kind in _NUMPY_SCALARS:
        return plain(np.array(value).item(), _depth + 1)
    if issubclass(kind, int) and int.bit_length(value) > _MAX_BITS:
        raise ForeignValue(f"an integer above 2**{_MAX_BITS}")
    for base, rebuild in _SCALARS:
        if issubclass(kind, base):
            return rebuild(value)
    if issubclass(kind, np.ndarray):
        return _plain_array(np.ndarray.view(value, np.ndarray), _depth)
    for container, items in _SEQUENCES:
        if issubclass(kind, container):
            found = items(value)
            if len(found) > _MAX_ITEMS:
                raise ForeignValue("more than a million items")
            return container([plain(item, _depth + 1) for item in found])
    if issubclass(kind, dict):
        pairs = list(dict.items(value))
        return {plain(k, _depth + 1): plain(v, _depth + 1) for k, v in pairs}
    if isinstance(value, range) and kind is range:
        return list(value)
    raise ForeignValue(f"an object of type {type_name(kind)}")


def type_name(kind: type) -> str:
    """Return the name of a class, whatever its metaclass makes of ``__name__``."""
    return type.__dict__["__name__"].__get__(kind)


_SCALARS = (
    (int, int.__int__),
    (float, float.__float__),
    (complex, complex.__pos__),
    (str, lambda s: str.__getitem__(s, slice(None))),
    (bytes, lambda b: bytes.__getitem__(b, slice(None))),
)
_SEQUENCES = (
    (list, lambda v: list.__getitem__(v, slice(None))),
    (tuple, lambda v: tuple.__getitem__(v, slice(None))),
    (set, lambda v: list(set.__iter__(v))),
    (frozenset, lambda v: list(frozenset.__iter__(v))),
)


def _plain_array(array: np.ndarray, depth: int):
    if array.dtype.kind in "biufcSU":
        return np.array(array, copy=True)
    if array.dtype.kind == "O":
        return plain(array.tolist(), depth + 1)
    raise ForeignValue(f"an array of dtype {array.dtype}")


def difference(
    expect, got, *, rtol: float = 0.0, atol: float = 0.0, dtype: bool = False
) -> str | None:
    """Return None where `got` is `expect`, else ``"expected …, got …"`` in one short line.

    Both must be plain (see `plain`). Numbers are equal exactly, or where
    ``|got - expect| <= atol + rtol * |expect|``; NaN equals only NaN. The expected type decides
    what is accepted: an int wants an integer, a bool a bool, a float any real number, a list or
    tuple any sequence or 1-D array, an array any array or nested list of the same shape
    (and, with `dtype`, of the same dtype).
    """
    if isinstance(expect, np.ndarray):
        return _array_difference(expect, got, rtol, atol, dtype)
    if isinstance(expect, bool) or expect is None or isinstance(expect, (str, bytes)):
        same = type(got) is type(expect) and got == expect
        return None if same else _expected(expect, got)
    if isinstance(expect, int):
        ok = type(got) is int and abs(got - expect) <= atol + rtol * abs(expect)
        return None if ok else _expected(expect, got) + _INTEGER * (type(got) is float)
    if isinstance(expect, float):
        ok = type(got) in (int, float) and _close(np.float64(expect), np.float64(got), rtol, atol)
        return None if ok else _expected(expect, got)
    if isinstance(expect, complex):
        ok = type(got) in (int, float, complex) and _close(
            np.complex128(expect), np.complex128(got), rtol, atol
        )
        return None if ok else _expected(expect, got)
    if isinstance(expect, (list, tuple)):
        return _sequence_difference(expect, got, rtol, atol, dtype)
    if isinstance(expect, (set, frozenset)):
        same = isinstance(got, (set, frozenset)) and got == expect
        return None if same else _expected(expect, got)
    if isinstance(expect, dict):
        return _dict_difference(expect, got, rtol, atol, dtype)
    raise TypeError(f"an expected value may not be of type {type(expect).__name__}")


_INTEGER = " (an integer is wanted)"


def _close(expect, got, rtol: float, atol: float):
    with np.errstate(all="ignore"):
        near = np.abs(got - expect) <= atol + rtol * np.abs(expect)
        near &= np.isfinite(expect) & np.isfinite(got)
        return near | (got == expect) | (np.isnan(expect) & np.isnan(got))


def _expected(expect, got) -> str:
    left, right = short(expect), short(got)
    if left == right:
        left, right = repr(expect)[:60], repr(got)[:60]
    if left == right:
        left, right = f"{left} ({type(expect).__name__})", f"{right} ({type(got).__name__})"
    return f"expected {left}, got {right}"


def _sequence_difference(expect, got, rtol, atol, dtype) -> str | None:
    items = got
    if isinstance(got, np.ndarray) and got.ndim >= 1:
        if len(got) != len(expect):
            return _expected(list(expect), got)
        # One level only: an array of shape (2, 10**9, 0) has no bytes, as lists it fills memory.
        items = got.tolist() if got.ndim == 1 else list(got)
    if not isinstance(items, (list, tuple)):
        return _expected(expect, got)
    if len(items) != len(expect):
        whole = _expected(list(expect), list(items))
        return whole if len(whole) < 100 else f"expected {len(expect)} items, got {len(items)}"
    for index, (want, have) in enumerate(zip(expect, items, strict=True)):
        found = difference(want, have, rtol=rtol, atol=atol, dtype=dtype)
        if found:
            whole = _expected(list(expect), list(items))  # slow for large arrays
            kind = _INTEGER * found.endswith(_INTEGER)
            return whole + kind if len(whole) < 60 else f"at [{index}] {found}"
    return None


def _dict_difference(expect, got, rtol, atol, dtype) -> str | None:
    if not isinstance(got, dict):
        return _expected(expect, got)
    if got.keys() != expect.keys():
        return f"expected keys {short(list(expect))}, got {short(list(got))}"
    for key, want in expect.items():
        found = difference(want, got[key], rtol=rtol, atol=atol, dtype=dtype)
        if found:
            return f"at {key!r} {found}"
    return None


def _array_difference(expect: np.ndarray, got, rtol, atol, dtype: bool) -> str | None:
    if isinstance(got, (list, tuple, int, float, complex)) and not dtype:
        if not _without_long_texts(got, expect.dtype.itemsize):
            return f"expected an array of shape {expect.shape}, got text"
        try:
            got = np.array(got)
        except (ValueError, TypeError):
            return f"expected an array of shape {expect.shape}, got a ragged list"
    if not isinstance(got, np.ndarray):
        return f"expected an array of shape {expect.shape}, got {short(got)}"
    if got.shape != expect.shape:
        return f"expected shape {expect.shape}, got {got.shape}"
    if dtype and got.dtype != expect.dtype:
        return f"expected dtype {expect.dtype}, got {got.dtype}"
    if got.dtype.kind not in _COMPARABLE.get(expect.dtype.kind, ""):
        return f"expected dtype {expect.dtype}, got {got.dtype}"
    if expect.dtype.kind in "SU":
        wrong = got != expect
    else:
        wide = np.complex128 if "c" in (expect.dtype.kind, got.dtype.kind) else None
        if wide is None and expect.dtype.kind in "biu" and rtol == atol == 0:
            wrong = got != expect
        else:
            wrong = ~_close(expect.astype(wide or np.float64), got.astype(wide or np.float64),
                            rtol, atol)
    if not np.any(wrong):
        return None
    if expect.size <= 8:
        return _expected(expect, got)
    where = tuple(int(i) for i in np.argwhere(wrong)[0])
    count = int(np.count_nonzero(wrong))
    text = _expected(expect[where].item(), got[where].item())
    return f"at {list(where)} {text} ({count} of {expect.size} differ)"


def _without_long_texts(value, limit: int) -> bool:
    """Whether no text in a nested list is longer than `limit`: in an array each would take the
    memory of the longest."""
    if isinstance(value, (list, tuple)):
        return all(_without_long_texts(item, limit) for item in value)
    if isinstance(value, np.ndarray):
        return value.dtype.kind not in "SU" or value.dtype.itemsize <= 4 * limit
    return not isinstance(value, (str, bytes)) or len(value) <= limit


_COMPARABLE = {
    "b": "b", "i": "iu", "u": "iu", "f": "fiu", "c": "cfiu", "S": "S", "U": "U",
}


def short(value, limit: int = 60) -> str:
    """Return `value` as text of at most `limit` characters, arrays as nested lists."""
    if isinstance(value, np.ndarray):
        few = value.size <= 16 and max(value.shape, default=0) <= 16
        text = _short(value.tolist()) if few else f"array of shape {value.shape}"
    else:
        text = _short(value)
    return text if len(text) <= limit else text[: limit - 1] + "…"


def _short(value) -> str:
    if isinstance(value, float):
        text = f"{value:.6g}"
        if "e+" in text:  # a large number, shown with the digits that may be wrong
            text = repr(value)
        return text if any(c in text for c in ".en") else text + ".0"
    if isinstance(value, list):
        return "[" + ", ".join(_short(v) for v in value[:32]) + "]"
    if isinstance(value, tuple):
        inner = ", ".join(_short(v) for v in value[:32])
        return f"({inner},)" if len(value) == 1 else f"({inner})"
    if isinstance(value, np.ndarray):
        return short(value)
    if isinstance(value, dict):
        return "{" + ", ".join(f"{k!r}: {_short(v)}" for k, v in value.items()) + "}"
    return repr(value)
