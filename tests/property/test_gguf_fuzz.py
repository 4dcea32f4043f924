"""Damaged GGUF files: a CourseError of one line or a right load, never anything else."""

from __future__ import annotations

import math
import struct
import tracemalloc

import numpy as np
import pytest

gguf = pytest.importorskip("gguf", reason="the gguf package writes the files of these tests")

from hypothesis import given, settings  # noqa: E402
from hypothesis import strategies as st  # noqa: E402

from course_lib.engine.checkpoint import open_checkpoint  # noqa: E402
from course_lib.engine.conversion import load_weights  # noqa: E402
from course_lib.engine.weights import check_tensors  # noqa: E402
from course_lib.errors import CourseError  # noqa: E402
from tests.tiny_gguf import LLAMA, MOE, write_gguf  # noqa: E402

MOST_MEMORY = 64 << 20
"""Bytes: far more than the tiny model takes, far less than a lie asks for."""


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """(a file's bytes, where its tensors begin) of a Llama and of a mixture of experts, and a
    path to write damaged ones to."""
    folder = tmp_path_factory.mktemp("gguf")
    found = []
    for config in (LLAMA, MOE):
        path = folder / "whole.gguf"
        write_gguf(path, config | {"num_hidden_layers": 1}, kind="Q8_0")
        found.append((path.read_bytes(), gguf.GGUFReader(path).data_offset))
    return found, folder / "damaged.gguf"


def load_or_one_sentence(path):
    """Whether the file loads; what it says otherwise is one line, and neither takes much memory."""
    tracemalloc.start()
    try:
        config, source, _ = open_checkpoint(path)
        check_tensors(source, config)
        weights = load_weights(source, config)
        assert np.isfinite(weights.final_norm).all()
        return True
    except CourseError as error:
        message = str(error)
        assert message and "\n" not in message and len(message) < 1500 + len(str(path)), message
        return False
    finally:
        assert tracemalloc.get_traced_memory()[1] < MOST_MEMORY
        tracemalloc.stop()


# Places are shares of the header, so that they shrink.
places = st.floats(0, 1, exclude_max=True)
numbers = st.one_of(
    st.sampled_from([0, 1, 2, 3, 7, 8, 9, 10, 30, 31, 2**16, 2**24, 2**31 - 1, 2**32 - 1]),
    st.sampled_from([2**40, 2**60, 2**63 - 1, 2**63, 2**64 - 1]),
)
damage = st.lists(
    st.tuples(places, st.one_of(
        st.binary(min_size=1, max_size=4),
        numbers.map(lambda n: struct.pack("<Q", n)),
        numbers.filter(lambda n: n < 2**32).map(lambda n: struct.pack("<I", n)),
    )), min_size=1, max_size=3)


@settings(max_examples=150)
@given(st.integers(0, 1), damage)
def test_overwritten_headers(files, which, edits):
    found, path = files
    data, begin = found[which]
    changed = bytearray(data)
    for place, new in edits:
        at = math.floor(place * begin)
        changed[at : at + len(new)] = new
    path.write_bytes(changed)
    load_or_one_sentence(path)


def fields(data):
    """Where numbers lie that say how much follows: lengths, counts, sizes, types."""
    text = data[:4096]
    return [at for at in range(0, len(text) - 8) if 0 < int.from_bytes(text[at:at + 8], "little")
            < 4096]


@settings(max_examples=150)
@given(st.integers(0, 1), st.data(), numbers)
def test_lengths_and_counts_that_lie(files, which, data, number):
    found, path = files
    whole, _ = found[which]
    at = data.draw(st.sampled_from(fields(whole)))
    path.write_bytes(whole[:at] + struct.pack("<Q", number) + whole[at + 8:])
    load_or_one_sentence(path)


@settings(max_examples=60)
@given(st.integers(0, 1), st.floats(0, 1, exclude_max=True))
def test_files_cut_anywhere(files, which, share):
    found, path = files
    whole, _ = found[which]
    path.write_bytes(whole[: math.floor(share * len(whole))])
    assert not load_or_one_sentence(path)


def test_the_whole_files_load(files):
    found, path = files
    for whole, _ in found:
        path.write_bytes(whole)
        assert load_or_one_sentence(path)
