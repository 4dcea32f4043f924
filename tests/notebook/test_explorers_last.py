"""Two hundred changes of an explorer leave nothing behind: no artist, no figure, no widget."""

from __future__ import annotations

import gc

import ipywidgets
import pytest
from matplotlib._pylab_helpers import Gcf
from matplotlib.figure import Figure

from course_lib import show
from course_lib.show import Explorer, explorer

NAMES = sorted(name for name in show.__all__ if name.endswith("Explorer") and name != "Explorer")


def positions(shown: Explorer) -> list[dict]:
    """The start, and each control alone at the first and at the last of its values."""
    found = [shown.params]
    for name, control in shown.controls.items():
        ends = ([value for _, value in control._options_full][:: max(1, len(control.options) - 1)]
                if hasattr(control, "options") else [control.min, control.max])
        found += [{**shown.params, name: end} for end in ends]
    return [p for p in found if p.get("machine") != "measured"]


def results(shown: Explorer) -> list[dict]:
    """What is computed where the controls fit together (a step that another prompt lacks fails)."""
    made = []
    for params in positions(shown):
        try:
            made.append(shown.compute(**params))
        except ValueError:
            continue
    assert len(made) >= 4
    return made


@pytest.mark.parametrize("name", NAMES)
def test_two_hundred_changes_leave_nothing_behind(name, monkeypatch):
    shown = getattr(show, name)()
    made = results(shown)

    def census(some: list[dict]) -> tuple[int, int, int]:
        for result in some:  # ticks are made while drawing, and kept
            shown._publish(result)
        gc.collect()
        figures = sum(isinstance(o, Figure) for o in gc.get_objects())
        return figures, len(shown.figure.findobj()), len(ipywidgets.widgets.widget._instances)

    before = census(made)
    with monkeypatch.context() as patch:
        patch.setattr(explorer, "png_bytes", lambda figure: b"")
        for i in range(200):
            shown._publish(made[i % len(made)])
    assert census(made[::4]) == before
    assert Gcf.get_num_fig_managers() == 0
