"""The model of the ring: its rules, its closed form, and what a real ring does by them."""

from __future__ import annotations

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from course_lib.prefill import ring_schedule
from course_lib.prefill.schedule import serial_time

TIMES = st.lists(st.tuples(st.integers(0, 9), st.integers(0, 9)), max_size=12)
SLOTS = st.integers(1, 6)


@settings(max_examples=40)
@given(TIMES, SLOTS, st.integers(0, 3))
def test_one_thing_at_a_time_and_no_slot_is_overwritten(times, slots, handoff):
    loads, computes = [a for a, _ in times], [b for _, b in times]
    turns = ring_schedule(loads, computes, slots, handoff)
    assert [t.slot for t in turns] == [i % slots for i in range(len(times))]
    for i, turn in enumerate(turns):
        assert (turn.load_end - turn.load_start, turn.compute_end - turn.compute_start) == times[i]
        assert turn.compute_start >= turn.load_end + handoff
        before = turns[i - 1] if i else None
        again = turns[i - slots] if i >= slots else None
        # and it begins as soon as it may
        assert turn.load_start == max(before.load_end if before else 0,
                                      again.compute_end if again else 0)
        assert turn.compute_start == handoff + max(turn.load_end,
                                                   before.compute_end if before else 0)


@settings(max_examples=40)
@given(TIMES.filter(len))
def test_more_slots_never_cost_and_one_is_serial(times):
    loads, computes = zip(*times, strict=True)
    totals = [ring_schedule(loads, computes, s)[-1].compute_end for s in range(1, 8)]
    assert totals[0] == serial_time(loads, computes) == sum(loads) + sum(computes)
    assert totals == sorted(totals, reverse=True)
    assert totals[-1] >= max(sum(loads), sum(computes))


@settings(max_examples=40)
@given(st.integers(1, 20), st.integers(0, 9), st.integers(0, 9), st.integers(2, 5))
def test_equal_blocks_have_a_closed_form_that_a_third_slot_does_not_change(n, load, compute, slots):
    total = ring_schedule([load] * n, [compute] * n, slots)[-1].compute_end
    assert total == load + (n - 1) * max(load, compute) + compute


@pytest.mark.parametrize("args", [
    ([1], [], 2), ([1], [-1], 2), ([math.nan], [1], 2), ([math.inf], [1], 2), ([1], [1], 0),
    ([1], [1], 2, -1),
])
def test_wrong_times_are_refused(args):
    with pytest.raises(ValueError):
        ring_schedule(*args)


def test_no_block_takes_no_time():
    assert ring_schedule([], [], 3) == []
