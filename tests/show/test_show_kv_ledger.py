"""The KV ledger explorer adds up the library's bytes."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from course_lib.engine import Engine
from course_lib.kvcache import KVCache, kv_ledger
from course_lib.show import KVLedgerExplorer
from course_lib.show.kv_ledger import LAYERS, TOKENS
from course_lib.show.text import size_text
from tests.tiny_checkpoint import write_checkpoint


@pytest.fixture(scope="module")
def explorer(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tiny")
    write_checkpoint(folder, eos_token_id=None)
    return KVLedgerExplorer(Engine.load(folder))


@settings(max_examples=60, deadline=None)
@given(st.sampled_from(["model", "article"]), st.sampled_from(LAYERS), st.sampled_from(TOKENS),
       st.booleans())
def test_the_columns_are_those_of_kv_ledger(explorer, shape, layers, tokens, mirror):
    r = explorer.compute(shape, layers, tokens, mirror)
    lines = {row.name: row for row in kv_ledger(layers, r["heads"], r["d"], tokens)}
    for name, row in r["rows"].items():
        assert row["scan"] == lines[name].scan_bytes == row["values"] + row["scales"]
        assert row["memory"] == row["scan"] + row["mirror"]
        assert row["scan_vs_f16"] == lines[name].scan_vs_f16
    assert set(r["rows"]) == {"f32", "f16", "q8", "q4"} & set(lines)
    want = "q8 + f32 mirror" if mirror else "q8"
    assert r["rows"]["q8"]["memory"] == lines[want].memory_bytes
    assert r["rows"]["f32"]["mirror"] == 0


def test_a_real_cache_weighs_what_the_ledger_says(explorer):
    r = explorer.compute("article", 3, 32)
    rows = np.zeros((8, 32, 128), np.float32)
    for dtype in ("f32", "q8"):
        cache = KVCache(3, 8, 128, dtype=dtype)
        for layer in range(3):
            cache.append(layer, rows, rows)
        assert cache.nbytes == r["rows"][dtype]["memory"]


def test_the_article_and_the_twin(explorer):
    explorer.set(shape="article", layers=1, tokens=1, mirror=True)
    text = explorer.summary()
    for number in ("8,192 B", "4,096 B", "2,112 B", "1,280 B", "10,304 B", "× 0.516", "× 2.52"):
        assert number in text
    assert explorer.png() and "float32 mirror: kept" in text
    for row in explorer.result["rows"].values():
        assert size_text(row["memory"]) in text


def test_sizes_as_text():
    assert [size_text(n) for n in (0, 99_999, 100_000, 999_600, 38_654_705_664, 2e12)] == [
        "0 B", "99,999 B", "100 kB", "1 MB", "38.7 GB", "2,000 GB"]


def test_wrong_arguments(explorer):
    for wrong in ({"shape": "other"}, {"layers": 2}, {"tokens": 0}, {"mirror": "yes"}):
        with pytest.raises(ValueError):
            KVLedgerExplorer(**wrong)
    before = explorer.params
    with pytest.raises(ValueError):
        explorer.set(layers=5)
    assert explorer.params == before


@pytest.mark.parametrize("wrong", [{"shape": "zz"}, {"layers": 0}, {"tokens": -1},
                                   {"mirror": "kept"}], ids=repr)
def test_compute_refuses_what_has_no_bytes(explorer, wrong):
    with pytest.raises(ValueError, match=next(iter(wrong))):
        explorer.compute(**wrong)
