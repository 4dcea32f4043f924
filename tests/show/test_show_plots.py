"""Pictures that do not move: the twin prints what they show."""

from __future__ import annotations

import pytest

from course_lib.show.plots import cost_bars, recall_against_cost, recall_by_k
from course_lib.show.text import drawable, fmt, percent, plural


def test_a_sweep_prints_every_point():
    curves = {"exact prefill": {1: 0.017, 32: 1.0, "exact": 1.0},
              "off": {1: 0.25, 32: 0.995, "exact": 1.0}}
    picture = recall_by_k(curves, label="recorded: 60 prompts")
    lines = picture.summary().splitlines()
    assert lines[0] == "recorded: 60 prompts"
    assert lines[1].split() == ["k=1", "k=32", "exact"]
    assert lines[2].split()[-3:] == ["0.017", "1", "1"]
    assert lines[3].split() == ["off", "0.25", "0.995", "1"]
    assert picture.png() == recall_by_k(curves, label="recorded: 60 prompts").png()
    lower = recall_by_k(curves | {"off": {1: 0.2, 32: 0.9, "exact": 1.0}}, label="x")
    assert lower.png() != recall_by_k(curves, label="x").png()


def test_recall_against_cost_prints_every_point():
    curves = {"any": {"τ = 0.5": (0.979, 0.964), "τ = 0.9": (1.0, 1.0)},
              "majority": {"τ = 0.5": (0.5416, 0.5536)}}
    picture = recall_against_cost(curves, label="recorded", cost="attention computed")
    assert picture.summary().splitlines() == [
        "recorded: attention computed → recall",
        "any       τ = 0.5: 0.979 → 0.964  τ = 0.9: 1 → 1", "majority  τ = 0.5: 0.542 → 0.554"]
    drawn = [line.get_xydata().tolist() for line in picture.figure.axes[0].get_lines()]
    assert drawn == [[[0.979, 0.964], [1.0, 1.0]], [[0.5416, 0.5536]]]
    for wrong in ({}, {str(i): {"a": (0.0, 0.0)} for i in range(5)}):
        with pytest.raises(ValueError):
            recall_against_cost(wrong, label="", cost="")


def test_costs_are_stacked_and_summed():
    picture = cost_bars({"exact": {"QK": 1.0, "PV": 1.0}, "k = 32": {"probe": 0.25, "QK": 0.5}},
                        label="derived", unit="million multiply-adds")
    lines = picture.summary().splitlines()
    assert lines[0] == "derived, million multiply-adds"
    assert lines[1].split() == ["QK", "PV", "probe", "total"]
    assert lines[2].split() == ["exact", "1", "1", "0", "2"]
    assert lines[3].split()[-4:] == ["0.5", "0", "0.25", "0.75"]
    ends = [patch.get_x() + patch.get_width() for patch in picture.figure.axes[0].patches]
    assert max(ends) == 2.0 and ends.count(0.75) == 1


@pytest.mark.parametrize("curves", [
    {}, {str(i): {1: 0.0} for i in range(5)}, {"a": {1: 0.0}, "b": {2: 0.0}},
])
def test_sweeps_that_cannot_be_drawn(curves):
    with pytest.raises(ValueError):
        recall_by_k(curves, label="")


@pytest.mark.parametrize("costs", [{}, {"a": {}}, {"a": {str(i): 1.0 for i in range(7)}}])
def test_costs_that_cannot_be_drawn(costs):
    with pytest.raises(ValueError):
        cost_bars(costs, label="", unit="")


def test_numbers_in_words():
    assert [fmt(x) for x in (0.017191, 1, -0.0, 1234.5)] == ["0.0172", "1", "0", "1.23e+03"]
    assert percent(0.12345) == "12.3 %"
    assert (plural(1, "block"), plural(0, "block")) == ("1 block", "0 blocks")
    assert drawable("a\n b\t$é 针\x00") == "a b $é ��"
