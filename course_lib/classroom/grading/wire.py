"""Plain values as bytes: what passes between the grader and the sandbox.

A message is an uncompressed .npz file whose member ``tree`` describes the value in JSON and whose
other members are its arrays. It is read without pickle and without np.load, which would believe a
header's claim of any size.
"""

from __future__ import annotations

import io
import json
import zipfile
from collections.abc import Callable
from typing import Any

import numpy as np

MAX_BYTES = 16 * 2**20
MAX_ARRAYS = 4000
MAX_KEYS = 4000
"""Of all dicts and sets of a message: whoever chooses the keys can make each meet all others."""


class WireError(ValueError):
    """The bytes are no message of this grader."""


def encode(value: Any) -> bytes:
    """Return a plain value (see ``values.plain``) as bytes."""
    arrays: list[np.ndarray] = []
    text = json.dumps(_tree(value, arrays))
    members = {f"a{i}": array for i, array in enumerate(arrays)}
    buffer = io.BytesIO()
    np.savez(buffer, tree=np.frombuffer(text.encode(), np.uint8), **members)  # type: ignore[arg-type]
    return buffer.getvalue()


def decode(data: bytes) -> Any:
    """Return the value of `encode`'s bytes; WireError for anything else, whatever wrote it."""
    if len(data) > MAX_BYTES:
        raise WireError(f"a message of {len(data)} bytes; at most {MAX_BYTES} are read")
    try:
        members = _members(data)
        tree = json.loads(members["tree"].tobytes(), object_hook=_counting_keys())
        return _value(tree, members)
    except WireError:
        raise
    except Exception as error:  # zipfile, json and numpy raise many types on hostile bytes
        raise WireError(f"not a message ({type(error).__name__})") from None


def _members(data: bytes) -> dict[str, np.ndarray]:
    members: dict[str, np.ndarray] = {}
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        infos = archive.infolist()
        if len(infos) > MAX_ARRAYS + 1:
            raise WireError(f"a message of {len(infos)} arrays; at most {MAX_ARRAYS} are read")
        for info in infos:
            if info.compress_type != zipfile.ZIP_STORED or info.file_size > len(data):
                raise WireError("a compressed member")
            name = info.filename.removesuffix(".npy")
            if name in members:
                raise WireError("a member twice")
            members[name] = _array(archive.read(info))
    return members


def _array(data: bytes) -> np.ndarray:
    file = io.BytesIO(data)
    version = np.lib.format.read_magic(file)
    read = {(1, 0): np.lib.format.read_array_header_1_0,
            (2, 0): np.lib.format.read_array_header_2_0}[version]
    shape, fortran, dtype = read(file)
    if dtype.kind not in "biufcSU" or dtype.itemsize == 0 or min(shape, default=1) < 0:
        raise WireError(f"an array of {dtype}")
    count = 1
    for size in shape:
        count *= size
    body = data[file.tell():]
    if count * dtype.itemsize != len(body):
        raise WireError("an array of another size than its header says")
    flat = np.frombuffer(body, dtype) if body else np.empty(count, dtype)
    return flat.reshape(shape, order="F" if fortran else "C").copy()


def _tree(value: Any, arrays: list[np.ndarray]) -> Any:
    """JSON keeps no int above 2**53 for every reader, no NaN and no tuples: all but text, bool and
    None is tagged."""
    kind = type(value)
    if value is None or kind in (bool, str):
        return value
    if kind is int:
        return {"int": str(value)}
    if kind is float:
        return {"float": value.hex()}
    if kind is complex:
        return {"complex": [value.real.hex(), value.imag.hex()]}
    if kind is bytes:
        return {"bytes": value.hex()}
    if kind is np.ndarray:
        arrays.append(value)
        return {"array": len(arrays) - 1}
    if kind is dict:
        return {"dict": [[_tree(k, arrays), _tree(v, arrays)] for k, v in value.items()]}
    if kind in (set, frozenset):
        value = sorted(value, key=repr)
    elif kind not in (list, tuple):
        raise TypeError(f"{kind.__name__} is not a plain value")
    return {kind.__name__: [_tree(item, arrays) for item in value]}


def _counting_keys() -> Callable[[dict[str, Any]], dict[str, Any]]:
    """A hook for each object of a message's JSON, which refuses the one with a key too many."""
    keys = 0

    def count(tree: dict[str, Any]) -> dict[str, Any]:
        nonlocal keys
        keys += sum(len(tree.get(tag, ())) for tag in ("dict", "set", "frozenset"))
        if keys > MAX_KEYS:
            raise WireError(f"a message of more than {MAX_KEYS} keys")
        return tree

    return count


def _value(tree: Any, members: dict[str, np.ndarray]) -> Any:
    if not isinstance(tree, dict):
        if tree is None or isinstance(tree, (bool, str)):
            return tree
        raise WireError("an untagged value")
    (tag, held), = tree.items()
    if tag == "int":
        if len(held) > 400:  # int() of a long text takes quadratic time
            raise WireError("a long integer")
        return int(held)
    if tag == "float":
        return float.fromhex(held)
    if tag == "complex":
        return complex(float.fromhex(held[0]), float.fromhex(held[1]))
    if tag == "bytes":
        return bytes.fromhex(held)
    if tag == "array":
        return members[f"a{int(held)}"]
    if tag == "dict":
        return {_value(k, members): _value(v, members) for k, v in held}
    make = {"list": list, "tuple": tuple, "set": set, "frozenset": frozenset}[tag]
    return make([_value(item, members) for item in held])
