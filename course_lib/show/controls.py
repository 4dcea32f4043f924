"""The controls of an explorer: few values that mean something, each with a description.

All work from the keyboard and report only finished moves: Tab to reach one, arrows to move a
slider; the space bar opens a list, where arrows choose and Enter takes. (JupyterLab itself takes
the arrows on a list that is closed.)
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ipywidgets import Dropdown, IntSlider, Layout, SelectionSlider, Widget

_WIDE = {"description_width": "7.5em"}


def _layout() -> Layout:
    return Layout(width="22em")


def _checked(description: str, values: Sequence[Any], value: Any) -> Any:
    if value not in values:
        known = ", ".join(str(v) for v in values)
        raise ValueError(f"{description} {value!r} is unknown; use one of {known}.")
    return value


def dropdown(description: str, options: Mapping[str, Any] | Sequence[Any], value: Any,
             tooltip: str) -> Dropdown:
    """A list to choose from; `options` are values, or labels with their values."""
    pairs = _pairs(options)
    _checked(description, [v for _, v in pairs], value)
    return Dropdown(options=pairs, value=value, description=description, tooltip=tooltip,
                    style=_WIDE, layout=_layout())


def steps(description: str, options: Mapping[str, Any] | Sequence[Any], value: Any,
          tooltip: str) -> SelectionSlider:
    """A slider over a few values in order, such as k = 1, 2, 4, …, all."""
    pairs = _pairs(options)
    _checked(description, [v for _, v in pairs], value)
    return SelectionSlider(options=pairs, value=value, description=description, tooltip=tooltip,
                           continuous_update=False, style=_WIDE, layout=_layout())


def number(description: str, last: int, value: int, tooltip: str) -> IntSlider:
    """A slider over 0 … last."""
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value <= last:
        raise ValueError(f"{description} must be an integer from 0 to {last}, not {value!r}.")
    return IntSlider(min=0, max=last, value=value, description=description, tooltip=tooltip,
                     continuous_update=False, style=_WIDE, layout=_layout())


def replace_options(control: Widget, options: Mapping[str, Any], value: Any) -> None:
    """Give a dropdown or a steps slider other options, with `value` chosen.

    The widget moves to its first option in between: call it where nobody listens.
    """
    control.options = list(options.items())
    control.value = value


def _pairs(options: Mapping[str, Any] | Sequence[Any]) -> list[tuple[str, Any]]:
    if isinstance(options, Mapping):
        return list(options.items())
    return [(str(option), option) for option in options]
