"""The weight-block explorer against the formats it shows."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from course_lib.show import WeightBlockExplorer
from course_lib.show.weight_block import MATRICES, measure, place_of, shipped_blocks
from course_lib.weight_blocks import BLOCK_BYTES, dequantize_q4_0, dequantize_q8_0

UNPACK = {"q8_0": dequantize_q8_0, "q4_0": dequantize_q4_0}
BLOCKS = arrays(np.float32, 32, elements=st.floats(-1000, 1000, width=32).map(
    lambda v: 0.0 if abs(v) < 1e-2 else v))
KINDS = st.sampled_from(("q8_0", "q4_0"))


@pytest.fixture(scope="module")
def explorer():
    return WeightBlockExplorer()


@settings(max_examples=60, deadline=None)
@given(BLOCKS, KINDS)
def test_errors_stay_inside_the_bound_of_the_lesson(x, kind):
    r = measure(x, kind)
    assert np.array_equal(r["values"], UNPACK[kind](r["bytes"][None])[0])
    scale = 127 / 2**11 if kind == "q8_0" else 8 / 2**11
    cut = (r["codes"] == 7) & (kind == "q4_0")  # Q4_0 cuts off up to half a step more
    assert (np.abs(r["error"]) <= np.where(cut, 1.0, 0.5) + scale + 1e-4).all()
    assert np.allclose(r["values"], r["codes"] * np.float32(r["d16"]), rtol=1e-6)


@settings(max_examples=25, deadline=None)
@given(BLOCKS, KINDS, st.integers(0, 31))
def test_the_marked_byte_holds_the_code(x, kind, element):
    r = measure(x, kind)
    byte, half = place_of(kind, element)
    held = int(r["bytes"][byte])
    code = {"the whole byte": (held + 128) % 256 - 128, "the low half": held % 16 - 8,
            "the high half": held // 16 - 8}[half]
    assert code == r["codes"][element]


def test_compute_is_pure_and_knows_every_matrix(explorer):
    before = explorer.summary()
    for matrix in MATRICES:
        r = explorer.compute(kind="q4_0", matrix=matrix, layer=2, block=255, outlier=32)
        assert len(r["bytes"]) == BLOCK_BYTES["q4_0"] and matrix in r["name"]
    assert np.abs(r["x"]).max() == 32 * np.abs(shipped_blocks("down_proj", 2)[255]).max()
    assert explorer.summary() == before


def test_the_twin_states_bytes_codes_and_the_element(explorer):
    r = explorer.set(kind="q4_0", element=20, block=3).result
    twin = explorer.summary()
    assert " ".join(f"{b:02x}" for b in r["bytes"]) in twin
    assert "codes: " + " ".join(map(str, r["codes"] + 8)) in twin
    assert f"is code {r['codes'][20] + 8} in byte 6, the high half" in twin
    png = explorer.png()
    assert png != explorer.set(element=4).png() and explorer.png() == explorer.png()


def test_the_layer_has_no_say_for_the_embedding(explorer):
    explorer.set(matrix="embedding")
    assert explorer.controls["layer"].disabled
    assert not WeightBlockExplorer(matrix="q_proj").controls["layer"].disabled
    same = [explorer.compute(matrix="embedding", layer=n)["bytes"].tolist() for n in (0, 2)]
    assert same[0] == same[1]


@pytest.mark.parametrize("wrong", [{"kind": "q5"}, {"matrix": "x"}, {"layer": 3}, {"block": -1},
                                   {"outlier": 3}, {"element": 32}])
def test_a_wrong_start_value_is_refused(wrong):
    with pytest.raises(ValueError, match="use one of|must be an integer"):
        WeightBlockExplorer(**wrong)
