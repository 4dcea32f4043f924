"""Server-sent events: the same events however the bytes were cut."""

from __future__ import annotations

import pytest

from course_lib.engine.sse import events

STREAM = (
    "\ufeff: a comment\r\nevent: x\r\ndata: 拉面 😀\r\n\r\n"
    "data:two\ndata:  lines\nid: 4\n\n: ping\n\ndata\n\rdata: last\r\rdatas: other\n\n"
).encode()
EVENTS = ["拉面 😀", "two\n lines", "", "last"]


@pytest.mark.parametrize("size", range(1, 12))
def test_events_do_not_depend_on_the_cuts(size):
    cuts = [STREAM[i : i + size] for i in range(0, len(STREAM), size)]
    assert list(events(cuts)) == EVENTS


def test_every_single_cut():
    for at in range(len(STREAM) + 1):
        assert list(events([STREAM[:at], b"", STREAM[at:]])) == EVENTS


def test_an_event_comes_as_soon_as_its_empty_line_does():
    def bytes_():
        yield b"data: one\r\n\r"
        raise AssertionError("waited for more")

    assert next(events(bytes_())) == "one"


def test_the_last_event_needs_no_empty_line_and_bad_bytes_are_marked():
    assert list(events([b"data: a\n\ndata: [DONE]"])) == ["a", "[DONE]"]
    assert list(events([b"data: \xff!\n\n"])) == ["\ufffd!"]
    assert list(events([])) == [] and list(events([b"\n\n: only\n"])) == []
