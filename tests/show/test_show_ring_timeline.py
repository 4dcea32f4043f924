"""The ring-timeline explorer: planned by the schedule, run by the ring; same numbers, same bits."""

from __future__ import annotations

import numpy as np
import pytest

from course_lib.lab.captured import captured
from course_lib.lab.ring_study import RingStudy
from course_lib.prefill import partial_attention, ring_schedule
from course_lib.prefill.schedule import overlap, serial_time
from course_lib.show import RingTimelineExplorer
from course_lib.show import ring_timeline as module


@pytest.fixture(scope="module")
def study(shipped_engine):
    return RingStudy(captured(shipped_engine, 256)[1], 32, 32)


@pytest.fixture(scope="module")
def explorer(shipped_engine):
    module.TOKENS, module.ROWS, before = 256, 32, (module.TOKENS, module.ROWS)
    yield RingTimelineExplorer(shipped_engine)
    module.TOKENS, module.ROWS = before
    module._study.cache_clear()


@pytest.mark.parametrize("slots", [None, 1, 2, 3, 4])
def test_a_run_attends_the_history_and_keeps_the_rules_of_the_ring(study, slots):
    run = study.run(slots, 2e7, passes=1)
    assert study.blocks == 7 == len(run.turns)
    out, _ = partial_attention(study.q, study.k, study.v, block_lists=[np.arange(7)],
                               block_size=32)
    assert np.array_equal(run.output, out)
    assert run.seconds == run.turns[-1].compute_end
    assert run.load_seconds >= 6.5 * study.block_bytes / 2e7  # a schedule may catch up a little
    for i, turn in enumerate(run.turns):
        assert turn.slot == i % (slots or 1)
        assert turn.load_start < turn.load_end <= turn.compute_start < turn.compute_end
        if i:
            assert turn.load_start >= run.turns[i - 1].load_end
        if i >= (slots or 1):
            assert turn.load_start >= run.turns[i - (slots or 1)].compute_end
    assert (overlap(run.turns) == 0) == (slots in (None, 1))


def test_too_few_tokens_are_refused(shipped_engine):
    for rows in (0, 250):
        with pytest.raises(ValueError, match="leave a block of history"):
            RingStudy(captured(shipped_engine, 256)[1], rows, 32)


def test_what_is_planned_is_the_schedule(explorer):
    r = explorer.compute(slots=3, load=4, compute=2, loads="uneven", handoff=0.5)
    times = [2, 2, 2, 10] * 2
    assert r["turns"] == ring_schedule(times, [2] * 8, 3, 0.5)
    assert r["serial_total"] == serial_time(times, [2] * 8) == 48
    assert r["overlap"] == overlap(r["turns"]) > 0 and r["ratio"] == r["total"] / 48
    assert r["spent"] == {"load": 32, "compute": 16}
    assert explorer.compute(slots=1)["ratio"] == 1
    assert explorer.compute(slots=2, load=2, compute=3)["total"] == 2 + 8 * 3


def test_a_run_is_made_once(explorer):
    for storage in ("fast", "slow"):
        r = explorer.compute(source="run", slots=2, storage=storage)
        assert r["unit"] == "ms" and len(r["turns"]) == 3
        assert explorer.compute(source="run", slots=2, storage=storage)["turns"] == r["turns"]
        assert {t.slot for t in r["turns"]} == {0, 1}


def test_the_twin_prints_what_the_picture_shows(explorer):
    text = explorer.set(source="planned", slots=2, load=2, compute=3).summary()
    assert "the ring takes 26 units, without it 40: 0.65 of that" in text
    assert "    1     2             2-4             5-8" in text
    assert explorer.png().startswith(b"\x89PNG") and explorer.controls["storage"].disabled
    explorer.controls["source"].value = "run"
    assert "run on this machine: 3 blocks, storage slow" in explorer.summary()
    stored = explorer.describe_stored(explorer.result)
    assert "3 blocks, storage slow, 2 slots; loading and computing at once: True" in stored
    assert explorer.controls["load"].disabled and not explorer.controls["storage"].disabled


def test_wrong_start_values_are_refused(shipped_engine):
    for wrong in ({"source": "measured"}, {"slots": 5}, {"load": 5}, {"compute": 0},
                  {"loads": "odd"}, {"handoff": 2}, {"storage": "tape"}):
        with pytest.raises(ValueError):
            RingTimelineExplorer(shipped_engine, **wrong)


@pytest.mark.parametrize("wrong", [{"source": "zz"}, {"loads": "zz"}, {"storage": "zz"},
                                   {"slots": 0}, {"load": 0, "compute": 0}], ids=repr)
def test_compute_refuses_what_has_no_timeline(explorer, wrong):
    with pytest.raises(ValueError, match=next(iter(wrong))):
        explorer.compute(**wrong)
