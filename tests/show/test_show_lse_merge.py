"""The LSE-merge explorer and its study against attention in one part."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from course_lib.lab.captured import captured
from course_lib.lab.merge_study import MergeStudy
from course_lib.prefill import merge_attention_outputs, partial_attention
from course_lib.show import LseMergeExplorer
from course_lib.show import lse_merge as module


@pytest.fixture(scope="module")
def explorer(shipped_engine):
    module.TOKENS, tokens = 256, module.TOKENS
    yield LseMergeExplorer(shipped_engine)
    module.TOKENS = tokens


@settings(max_examples=30, deadline=None)
@given(st.integers(1, 8), st.integers(0, 5), st.randoms(use_true_random=False))
def test_any_parts_in_any_order_are_attention_in_one_part(parts, seed, random):
    rng = np.random.default_rng(seed)
    k, v = rng.standard_normal((2, 24, 4)).astype(np.float32)
    order = list(range(parts))
    random.shuffle(order)
    edges = sorted({0, 24, *rng.integers(1, 24, parts - 1).tolist()})
    order = [p for p in order if p < len(edges) - 1]
    study = MergeStudy(rng.standard_normal(4, np.float32), k, v, tuple(edges), tuple(order))
    out, lse = study.exact
    assert study.running[0][-1] == pytest.approx(out, abs=2e-6)
    assert study.running[1][-1] == pytest.approx(lse, abs=2e-6)
    assert study.shares.sum() == pytest.approx(1) and study.token_shares().sum() == pytest.approx(1)
    for p, share in enumerate(study.shares):
        assert share == pytest.approx(study.token_shares()[edges[p] : edges[p + 1]].sum(), abs=1e-6)


def test_each_step_is_the_public_merge(explorer):
    r = explorer.compute(source="model", parts=6, order="shuffled", layer=1, head=2)
    out, lse = np.zeros_like(r["exact"])[None], np.full(1, -np.inf)
    for step, part in enumerate(r["order"]):
        out, lse = merge_attention_outputs(out, lse, r["part_outs"][[part]], r["lse"][[part]])
        assert np.array_equal(out[0], r["running"][step]) and lse[0] == r["running_lse"][step]


def test_a_head_of_the_model_is_its_attention(shipped_engine, explorer):
    r = explorer.compute(source="model", parts=3, layer=1, head=3)
    rows = captured(shipped_engine, 256)[1]
    out, lse = partial_attention(rows.q[:, -1:], rows.k, rows.v)
    assert np.array_equal(r["exact"], out[3, 0]) and r["exact_lse"] == lse[3, 0]
    assert r["difference"] <= module.LARGEST_DIFFERENCE


def test_six_numbers_can_be_checked_by_eye(explorer):
    r = explorer.compute()
    assert r["part_outs"][:, 0] == pytest.approx([20, (100 + 50 * np.e**3) / (2 + np.e**3)])
    assert r["lse"] == pytest.approx([np.log(3), np.log(2 + np.e**3)])
    assert r["exact"][0] == pytest.approx((160 + 50 * np.e**3) / (5 + np.e**3))
    assert r["same_bits"] and explorer.compute(parts=1)["difference"] == 0


def test_the_twin_prints_what_the_picture_shows(explorer):
    text = explorer.set(source="toy", parts=6, order="shuffled", merged=4).summary()
    assert "merged shuffled: B C A F E D" in text and text.count("to come") == 2
    assert "E             4-4       3          1   80.1 %        50" in text
    assert explorer.set(parts=2).params["merged"] == 2
    assert explorer.png().startswith(b"\x89PNG")
    assert "layer 1, query head 2" in explorer.set(source="model", layer=1, head=2).summary()
    assert not explorer.controls["layer"].disabled


def test_wrong_start_values_are_refused(shipped_engine):
    for wrong in ({"source": "real"}, {"parts": 5}, {"order": "random"}, {"merged": 3},
                  {"layer": 3}, {"head": 4}, {"merged": 0}, {"merged": "2"}, {"merged": []}):
        with pytest.raises(ValueError):
            LseMergeExplorer(shipped_engine, **wrong)


@pytest.mark.parametrize("name", ["source", "parts", "order", "merged", "layer", "head"])
def test_nothing_is_no_setting_and_moves_nothing(explorer, name):
    before = explorer.params
    with pytest.raises(ValueError, match=f"{name} cannot be None"):
        explorer.set(**{name: None})
    assert explorer.params == before and explorer.set(**before).params == before


@pytest.mark.parametrize("wrong", [{"source": "zz"}, {"parts": 0}, {"parts": 9}, {"order": "zz"},
                                   {"source": "model", "layer": 9}, {"head": -1}, {"head": 1.5},
                                   {"merged": 0}], ids=repr)
def test_compute_refuses_what_no_control_offers(explorer, wrong):
    with pytest.raises(ValueError, match="is unknown; use one of"):
        explorer.compute(**wrong)
