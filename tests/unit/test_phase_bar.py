"""The bar of a phase: tokens whatever the unit, one phase at a time, nothing off a terminal."""

from __future__ import annotations

import io
import sys

from course_lib.commands import phase_bar
from course_lib.commands.phase_bar import PhaseBar
from course_lib.commands.shown import shown


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_prefill_counts_tokens_of_the_prompt_whatever_its_unit(monkeypatch):
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    monkeypatch.setattr(phase_bar, "DELAY", 0.0)
    bar = PhaseBar(2000)
    bar("prefill", 7, 28)
    assert bar._bar is not None and (bar._bar.n, bar._bar.total) == (500, 2000)
    bar("prefill", 28, 28)
    assert bar._bar is None and "token/s" in terminal.getvalue()
    bar("decode", 3, 32)
    assert bar._bar is not None and (bar._bar.n, bar._bar.total) == (3, 32)
    bar("decode", 1, 32)  # the next arm; the last one ended early
    assert bar._bar.n == 1
    bar("prefill", 1, 28)
    assert bar._bar.total == 2000 and bar._bar.desc == "prefill"
    same = bar._bar
    bar("prefill", 2, 28)
    assert bar._bar is same
    bar.close()
    bar.close()
    assert bar._bar is None


def test_nothing_is_drawn_off_a_terminal(monkeypatch):
    monkeypatch.setattr(sys, "stderr", io.StringIO())
    monkeypatch.setattr(phase_bar, "DELAY", 0.0)
    bar = PhaseBar(10)
    bar("prefill", 1, 2)
    bar.close()
    assert sys.stderr.getvalue() == ""


def test_text_is_shown_on_one_line_and_obeys_nothing():
    assert shown("ramen\n\x1b[2J拉面\t") == "ramen⏎·[2J拉面·"
