"""Pictures of weight blocks and of their errors: the twins hold the numbers."""

from __future__ import annotations

import numpy as np
import pytest

from course_lib.show.block_bytes import block_bytes
from course_lib.show.error_plots import error_histograms
from course_lib.weight_blocks import quantize_q4_0, quantize_q8_0

W = np.random.default_rng(0).standard_normal((1, 32)).astype(np.float32)


def test_a_q8_block_shows_every_code():
    block = quantize_q8_0(W)[0]
    twin = block_bytes(block, "q8_0").summary().splitlines()
    assert twin[0].startswith("Q8_0: 34 bytes for 32 numbers, d = ")
    assert twin[1].startswith(f"bytes 0-1: {block[0]:02x} {block[1]:02x} ")
    assert [int(c) for c in twin[2].split(": ")[1].split()] == block[2:].view(np.int8).tolist()


def test_a_q4_block_shows_both_halves_of_every_byte():
    block = quantize_q4_0(W)[0]
    picture = block_bytes(block, "q4_0")
    low, high = (line.split(": ")[1].split() for line in picture.summary().splitlines()[3:])
    assert [int(a) + 16 * int(b) for a, b in zip(low, high, strict=True)] == block[2:].tolist()
    words = [text.get_text() for text in picture.figure.axes[0].texts]
    assert "16\n0" in words and "31\n15" in words and words.count("d") == 2


def test_a_wrong_block_is_refused():
    with pytest.raises(ValueError, match="multiple of 18"):
        block_bytes(quantize_q8_0(W)[0], "q4_0")


def test_histograms_state_means_by_sign():
    value = np.array([-1.0, -2.0, 3.0, 4.0])
    error = np.array([1.0, 0.5, 0.0, -0.25])
    twin = error_histograms({"rule": (error, value)}, label="toy").summary().splitlines()
    assert twin[0] == "toy" and twin[2].split() == ["rule", "0.75", "-0.12", "0.31", "1"]
    bars = error_histograms({"a": (error, value)}, label="toy").figure.axes[0].patches
    assert sum(bar.get_height() for bar in bars) == pytest.approx(1)


@pytest.mark.parametrize("errors", [{}, {str(i): ([0.0], [1.0]) for i in range(7)},
                                    {"a": ([0.0], [1.0, 2.0])}])
def test_histograms_that_cannot_be_drawn(errors):
    with pytest.raises(ValueError, match="1 to 6 panels"):
        error_histograms(errors, label="x")
