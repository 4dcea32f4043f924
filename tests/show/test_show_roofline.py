"""The roofline: operations and bytes counted one by one, and what is stored of a measurement."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from course_lib import backend, sparse
from course_lib.bench.machine import Peaks
from course_lib.kvcache import KVCache
from course_lib.lab import roofline
from course_lib.lab.roofline import Machine, Work
from course_lib.linear import empty_panels
from course_lib.show import RooflineExplorer
from course_lib.show.roofline import BATCHES, KERNELS, LETTERS, TOKENS


@pytest.fixture(scope="module")
def explorer():
    return RooflineExplorer()


@pytest.fixture
def quick(monkeypatch):
    """Measurements of one call each, in little memory."""
    def once(calls, *rest):
        for call in calls.values():
            call()
        return {name: 1e-3 * (i + 1) for i, name in enumerate(calls)}

    monkeypatch.setattr(roofline, "interleaved", once)
    monkeypatch.setattr(roofline, "ARENA", 34 * 2**20)
    monkeypatch.setattr(roofline, "peaks", fixed_peaks)
    roofline.forget()
    yield
    roofline.forget()


def fixed_peaks(kernels, reader, threads):
    reader()
    known = kernels.chosen is not None
    return Peaks(threads, 8.0, 50.0 if known else None, 200.0 if known else None)


def test_operations_of_a_product_counted_one_by_one():
    rows, cols, batch = 3, 5, 2
    count = sum(2 for _ in range(batch) for _ in range(rows) for _ in range(cols))
    scale = roofline.COLS * roofline.ROWS / (rows * cols)
    for form in roofline.BYTES_PER_WEIGHT:
        assert roofline.linear(form, batch).operations == pytest.approx(count * scale)


@pytest.mark.parametrize("form", ["q8_0", "q4_0"])
def test_bytes_of_weights_are_those_of_the_packed_arrays(form):
    arrays = empty_panels((64, 64), form)
    nbytes = sum(a.nbytes for a in arrays)
    assert nbytes / 64**2 == roofline.BYTES_PER_WEIGHT[form]


@pytest.mark.parametrize("kv", ["f32", "q8"])
def test_bytes_of_exact_attention_are_those_of_the_cache(kv):
    cache = KVCache(1, roofline.NUM_KV_HEADS, roofline.HEAD_DIM, dtype=kv)
    rows = np.ones((roofline.NUM_KV_HEADS, 64, roofline.HEAD_DIM), np.float32)
    cache.append(0, rows, rows)
    held = sum(a.nbytes for a in cache.rows(0) if a is not None)
    assert roofline.dense(kv, 64).nbytes == held
    operations = 2 * 2 * roofline.NUM_HEADS * 64 * roofline.HEAD_DIM  # QK and PV
    assert roofline.dense(kv, 64).operations == operations


@pytest.mark.parametrize("tokens", TOKENS)
def test_sparse_attention_reads_no_more_than_is_said(tokens):
    """The blocks of the library's own selection, those of a KV head's query heads once."""
    rng = np.random.default_rng(0)
    probed = sum(len(sparse.probe_positions(b, tokens)) for b in range(tokens // 32))
    sums = rng.random(tokens // 32, dtype=np.float32)
    scores = rng.random((roofline.NUM_HEADS, tokens // 32), dtype=np.float32)
    chosen = sparse.select_heads(scores, sums, roofline.K_BLOCKS)
    group = roofline.NUM_HEADS // roofline.NUM_KV_HEADS
    together = [np.concatenate([s.ids for s in chosen[first : first + group]])
                for first in range(0, roofline.NUM_HEADS, group)]
    rows = sum(32 * len(np.unique(ids)) for ids in together)
    row = roofline.HEAD_DIM + 4
    work = roofline.sparse(tokens)
    assert roofline.probe(tokens).nbytes == probed * roofline.NUM_KV_HEADS * row
    assert probed * roofline.NUM_KV_HEADS * row + 2 * rows * row <= work.nbytes
    assert work.operations == 2 * roofline.NUM_HEADS * roofline.HEAD_DIM * (
        probed + 2 * roofline.K_BLOCKS * 32)


@settings(max_examples=100, deadline=None)
@given(st.floats(0.1, 1e3), st.floats(1, 100), st.floats(1, 1e4),
       st.sampled_from(["float", "int8"]))
def test_the_roof_is_the_lower_of_two_lines_and_bends_at_the_ridge(intensity, gb, peak, kind):
    machine = Machine("m", gb, {"float": peak, "int8": None})
    roof = machine.roof(intensity, kind)
    if kind == "int8":
        assert machine.ridge(kind) is None and roof == gb * intensity
        return
    assert roof == min(gb * intensity, peak)
    assert (intensity < machine.ridge(kind)) == (gb * intensity < peak)


def test_ten_gigabytes_and_a_hundred_billion_in_ones_head():
    assert roofline.TOY.ridge("float") == 10 and roofline.TOY.ridge("int8") == 40
    assert roofline.TOY.roof(0.5, "float") == 5 and roofline.TOY.roof(50, "float") == 100
    assert Work("float", 20.0, 40.0).intensity == 0.5


@pytest.mark.parametrize("batch", BATCHES)
def test_more_rows_at_once_help_products_alone(explorer, batch):
    one, many = explorer.compute(), explorer.compute(batch=batch)
    for name in KERNELS:
        grown = many["works"][name].intensity / one["works"][name].intensity
        if name.startswith("weights"):
            assert batch / 2 < grown * (1 + 4 * batch * (1024 + 2048) / 2**20) and grown <= batch
        else:
            assert grown == 1 and many["limit"][name] == "memory"
    assert many["limit"]["weights q8_0"] == ("arithmetic" if batch > 21 else "memory")


def test_the_twin_prints_every_number_and_why(explorer):
    text = explorer.set(batch=32, kernel="weights q4_0").summary()
    r = explorer.result
    for name in KERNELS:
        start = f"{LETTERS[name]}  {name}"
        line = next(line for line in text.splitlines() if line.startswith(start))
        assert f"{r['works'][name].intensity:.3g}" in line and r["limit"][name] in line
    assert "weights q4_0: 134 M operations, 1.57 MB, so 85.3 per byte; limit: arithmetic" in text
    assert explorer.describe_stored(r) == text


@pytest.mark.parametrize("variant", ["numpy", None])
def test_measured_points_are_shown_live_and_not_stored(quick, variant):
    with backend.using(variant or backend.info().variant):
        explorer = RooflineExplorer(machine="measured", tokens=2048)
        r = explorer.compute(machine="measured", tokens=2048)
        compiled = backend.info().name != "numpy"
        assert set(r["reached"]) == set(KERNELS) and r["measured"]
        assert r["machine"].peaks["float"] == (50.0 if compiled else None)
        assert r["reached"]["weights f32"] == r["works"]["weights f32"].operations / 1e-3 / 1e9
        live, stored = explorer.summary(), explorer.describe_stored(r)
        assert "of the roof" in live and "8 GB/s" in live and "reached" in live
        for word in ("GB/s", "reached", "limit", "ms", backend.info().variant):
            assert word not in stored
        assert explorer._repr_mimebundle_()["text/plain"] == stored
        assert explorer.png() != RooflineExplorer().png()


def test_measuring_is_announced_and_done_once(quick, monkeypatch):
    explorer = RooflineExplorer(tokens=2048)
    explorer.png()
    told = []
    monkeypatch.setattr(explorer, "_busy", told.append)
    explorer.controls["machine"].value = "measured"
    explorer.controls["kernel"].value = "probe q8"
    assert told == ["times on this machine"]
    explorer.controls["batch"].value = 2
    assert len(told) == 2
    button = explorer.children[2].children[0]
    assert button.description == "measure again" and button.tooltip
    button.click()
    assert len(told) == 3 and "alert" not in explorer._status.value


def test_wrong_starts_and_no_new_artists(explorer):
    for wrong in ({"machine": "board"}, {"batch": 3}, {"tokens": 1}, {"kernel": "gemm"}):
        with pytest.raises(ValueError):
            RooflineExplorer(**wrong)
    results = [explorer.compute(batch=b, kernel=k) for b in BATCHES for k in KERNELS]

    def artists() -> int:
        for result in results[::30]:  # ticks are made while drawing, and kept
            explorer._publish(result)
        return len(explorer.figure.findobj())

    count = artists()
    for result in results * 4:
        explorer.draw(result)
    assert artists() == count
    assert all(c.description and c.tooltip for c in explorer.controls.values())
