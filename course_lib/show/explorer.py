"""The base of every explorer: controls, a picture, its text twin, and a form that survives paper.

An explorer as a cell's last expression is live in JupyterLab; the stored notebook, GitHub and a
PDF keep its PNG, and nbval compares its text.
"""

from __future__ import annotations

import html
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, Protocol

from ipywidgets import HTML, HBox, IntSlider, Layout, VBox, Widget
from matplotlib.figure import Figure

from course_lib.show.picture import base64_text, bundle, png_bytes
from course_lib.show.style import course_style

# In a narrow cell (a zoomed page) the picture is scrolled rather than shrunk beyond reading.
_IMG = ('<img alt="{}" src="data:image/png;base64,{}" '
        'style="max-width:100%; min-width:640px; height:auto">')
_PRE = ('<pre style="font-size:13px; line-height:1.35; white-space:pre-wrap; '
        'word-break:normal; overflow-wrap:anywhere; margin:0">{}</pre>')
_ERROR = ('<div role="alert" style="border:2px solid #b3261e; padding:4px 8px">'
          "<b>Error.</b> {} <br>The picture below still shows the last setting that worked.</div>")
_BUSY = '<div role="status"><i>computing: {} …</i></div>'
_QUESTION = '<div style="line-height:1.35; max-width:60em"><b>Predict first:</b> {}</div>'


class Drawing(Protocol):
    """A figure and how it follows a result."""

    figure: Figure

    def draw(self, r: dict[str, Any]) -> None: ...


class Explorer(VBox):
    """A pure `compute`, a picture that `draw` updates in place, and `describe`, its text twin.

    A subclass passes its controls to `__init__` by parameter name and defines

    * `compute(**params) -> dict`: the numbers; reads no control's value and changes nothing that
      shows;
    * `drawing`: a class whose objects have a `figure`, made once in the course's style, and
      `draw(result)`, which moves its artists (or `make_figure` and `draw` themselves);
    * `describe(result) -> str`: the text twin; it prints every number that the picture shows;
    * `question`: what a reader should predict before moving anything, shown above the controls.

    `alt` is what a screen reader says for the picture. Where the numbers differ from run to run,
    `describe_stored(result)` is the text without them, which a notebook keeps and nbval compares.
    """

    alt = "picture of this explorer; the text below it states its numbers"
    question = ""

    def __init__(self, controls: Mapping[str, Widget], extras: Sequence[Widget] = ()) -> None:
        self.controls = dict(controls)
        self.result: dict[str, Any] | None = None
        self._figure: Figure | None = None
        self._png = b""
        self._listening = True
        self._status, self._image, self._text = HTML(), HTML(layout={"overflow": "auto"}), HTML()
        for name, control in self.controls.items():
            control.observe(partial(self._on_change, name), names="value")
        rows = [HBox(list(row), layout=Layout(flex_flow="row wrap"))
                for row in (self.controls.values(), extras) if row]
        if self.question:
            rows.insert(0, HTML(_QUESTION.format(html.escape(self.question))))
        super().__init__([*rows, self._status, self._image, self._text])

    # What a lesson uses.

    @property
    def params(self) -> dict[str, Any]:
        """The present value of every control, by parameter name."""
        return {name: control.value for name, control in self.controls.items()}

    def set(self, **params: Any) -> Explorer:
        """Move controls by name and return the explorer, ready to be a cell's last expression.

        Raises ValueError, with the controls as before, for a name or a value that is not there.
        """
        before = self.params
        try:
            self._move_all(params)
        except ValueError:
            self._move_all(before)
            raise
        self._refresh()
        return self

    def summary(self) -> str:
        """The numbers of the picture, as text."""
        return self.describe(self._current())

    def png(self) -> bytes:
        """The picture as PNG."""
        self._current()
        return self._png

    @property
    def figure(self) -> Figure:
        """The matplotlib figure, made at the first use and drawn on ever after."""
        if self._figure is None:
            with course_style():
                self._figure = self.make_figure()
        return self._figure

    # What a subclass defines.

    def compute(self, *args: Any, **params: Any) -> dict[str, Any]:
        raise NotImplementedError

    drawing: Callable[[], Drawing]

    def make_figure(self) -> Figure:
        self._drawing = self.drawing()
        return self._drawing.figure

    def draw(self, result: dict[str, Any]) -> None:
        self._drawing.draw(result)

    def describe(self, result: dict[str, Any]) -> str:
        raise NotImplementedError

    def describe_stored(self, result: dict[str, Any]) -> str:
        return self.describe(result)

    def adjust(self, name: str) -> None:
        """Called after control `name` moved, before `compute`: fit the options of others."""

    def check_choices(self, **params: Any) -> None:
        """For `compute`, which a lesson calls with values of its own: ValueError for one that the
        control of that name does not offer."""
        for name, value in params.items():
            control = self.controls[name]
            if isinstance(control, IntSlider):
                offered: Sequence[Any] = range(control.min, control.max + 1)
                known = f"{control.min} to {control.max}"
            else:
                offered = [choice for _, choice in control.options]
                known = ", ".join(map(str, offered))
            if value not in offered:
                raise ValueError(f"{name} {value!r} is unknown; use one of {known}.")

    def react(self) -> None:
        """Called when the reader moved a control; slow explorers show something early here."""
        self._refresh()

    # The machinery.

    def _refresh(self) -> None:
        self._publish(self.compute(**self.params))

    def _publish(self, result: dict[str, Any]) -> None:
        """Show one result: picture, text, no message."""
        text = self.describe(result)
        figure = self.figure
        with course_style():
            self.draw(result)
        self._png = png_bytes(figure)
        self._image.value = _IMG.format(html.escape(self.alt), base64_text(self._png))
        self._text.value = _PRE.format(html.escape(text))
        self._status.value = ""
        self.result = result

    def _busy(self, what: str) -> None:
        self._status.value = _BUSY.format(html.escape(what))

    def _current(self) -> dict[str, Any]:
        if self.result is None:
            self._refresh()
        assert self.result is not None
        return self.result

    def _on_change(self, name: str, change: Any) -> None:
        if not self._listening:
            return
        with self._errors_in_view():
            with self._quietly():
                self.adjust(name)
            self.react()

    @contextmanager
    def _errors_in_view(self) -> Iterator[None]:
        """For all that a click or a move starts: an error goes to the view, not to a log."""
        try:
            yield
        except Exception as error:  # whatever it is, the learner must see it beside the control
            words = f"{type(error).__name__}: {error}"
            self._status.value = _ERROR.format(html.escape(words))

    @contextmanager
    def _quietly(self) -> Iterator[None]:
        """Move controls inside the block without a refresh for each."""
        before, self._listening = self._listening, False
        try:
            yield
        finally:
            self._listening = before

    def _move_all(self, values: Mapping[str, Any]) -> None:
        for name in values:
            if name not in self.controls:
                known = ", ".join(self.controls)
                raise ValueError(f"There is no control {name!r}; this explorer has {known}.")
        with self._quietly():
            for name in self.controls:  # in their order: the first ones decide what others offer
                if name in values:
                    self._move(name, values[name])
                    self.adjust(name)

    def _move(self, name: str, value: Any) -> None:
        control = self.controls[name]
        if value is None:  # a list would take it for "nothing chosen"
            raise ValueError(f"{name} cannot be None.")
        try:
            control.value = value
        except Exception as error:
            raise ValueError(f"{name} cannot be {value!r}: {error}") from None
        if control.value != value:  # an IntSlider clips silently
            raise ValueError(f"{name} must lie between {control.min} and {control.max}, "
                             f"not {value!r}.")

    def _repr_mimebundle_(self, **kwargs: Any) -> dict[str, Any]:
        self._current()
        view = super()._repr_mimebundle_(**kwargs) or {}
        return {**view, **bundle(self._png, self.describe_stored(self._current()))}
