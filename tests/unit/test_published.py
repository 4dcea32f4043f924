"""Quoted numbers keep their sources."""

from __future__ import annotations

import pytest

from course_lib.errors import CourseError
from course_lib.lab.published import group, quoted


def test_a_quoted_number_carries_value_and_source():
    row = quoted("q8_attention", "mean_abs_diff")
    assert row.number == 0.00856 and row.source == "article 9-3"


def test_same_is_spelled_out():
    assert "2061 tokens" in quoted("sparse_k", "recall_k32").conditions
    assert "byte-identical" in quoted("sparse_k", "recall_k32").conditions
    assert quoted("q8_attention", "out_q3").conditions.startswith("L=256")
    assert not any(r.conditions.startswith("same") for r in group("xattn_policy"))


def test_every_row_has_a_source_and_a_distinct_name():
    rows = [*group("sparse_quality"), *group("board_16k"), *group("sparse_prefill_gain")]
    assert all(row.source for row in rows)
    assert len({(row.group, row.what) for row in rows}) == len(rows)


def test_unknown_names_point_to_the_file():
    with pytest.raises(CourseError, match=r"data/published/quoted\.csv"):
        quoted("q8_attention", "median")
    with pytest.raises(CourseError, match="no quoted group"):
        group("nothing")
