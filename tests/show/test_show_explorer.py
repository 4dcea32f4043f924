"""The explorers' base: what a notebook stores, what a reader sees, and that nothing piles up."""

from __future__ import annotations

import base64
import gc
import io
import json

import ipywidgets
import nbformat
import numpy as np
import pytest
from matplotlib._pylab_helpers import Gcf
from matplotlib.figure import Figure
from PIL import Image

from course_lib.classroom.normalise import dumps, normalise
from course_lib.show import Explorer, Picture
from course_lib.show.artists import Bars
from course_lib.show.controls import dropdown, number, steps
from course_lib.show.style import SIDE, course_style, new_figure

VIEW = "application/vnd.jupyter.widget-view+json"


class Squares(Explorer):
    """A bar of height n², for n that it knows."""

    def __init__(self, n: int = 1, unit: str = "cm") -> None:
        super().__init__({"n": number("n", 9, n, "what is squared"),
                          "unit": dropdown("unit", ("cm", "<b>"), unit, "of the bar")})

    def compute(self, n: int = 1, unit: str = "cm") -> dict:
        if n == 3:
            raise ValueError("three is <not> to be squared")
        return {"n": n, "square": n * n, "unit": unit}

    def make_figure(self) -> Figure:
        figure = new_figure(1.0, 2.0)
        self._ax = figure.add_subplot()
        self._bars = Bars(self._ax, SIDE["exact"])
        self._ax.set(xlim=(0, 2), ylim=(0, 100))
        self._ax.axis("off")
        return figure

    def draw(self, result: dict) -> None:
        self._bars.move([1], [result["square"]])

    def describe(self, result: dict) -> str:
        return f"{result['n']} squared is {result['square']} {result['unit']}"


def shown(explorer: Explorer) -> str:
    """All text and pictures that the reader has before the eyes."""
    return "".join(child.value for child in explorer.children if isinstance(child, ipywidgets.HTML))


def test_the_bundle_has_a_picture_the_fixed_text_and_the_live_view():
    explorer = Squares(4)
    bundle = explorer._repr_mimebundle_()
    assert bundle["text/plain"] == "4 squared is 16 cm" == explorer.summary()
    picture = Image.open(io.BytesIO(base64.b64decode(bundle["image/png"])))
    assert picture.size == (200, 100)
    assert bundle[VIEW]["model_id"] == explorer.model_id
    json.dumps(bundle)


def test_equal_parameters_give_equal_bytes_and_text():
    one, two = Squares(4), Squares(1).set(n=7).set(n=4)
    assert one.png() == two.png() and one.summary() == two.summary()
    assert one.png() != Squares(5).png()


def test_what_a_built_notebook_keeps():
    output = nbformat.v4.new_output("execute_result", Squares(4)._repr_mimebundle_(),
                                    execution_count=7)
    cell = nbformat.v4.new_code_cell("Squares(4)", outputs=[output], id="c1")
    kernel = {"name": "python3", "display_name": "Python 3"}
    notebook = nbformat.v4.new_notebook(cells=[cell], metadata={
        "kernelspec": kernel, "language_info": {"name": "python"}, "course": {}})
    stored = normalise(notebook).cells[0].outputs[0].data
    assert set(stored) == {"image/png", "text/plain"}
    assert stored["text/plain"] == "4 squared is 16 cm"
    assert dumps(normalise(notebook)) == dumps(normalise(notebook))


def test_a_moved_control_changes_picture_and_text():
    explorer = Squares(1)
    before = explorer.png()
    explorer.controls["n"].value = 2
    assert "2 squared is 4 cm" in shown(explorer)
    assert explorer.png() != before
    assert base64.b64encode(explorer.png()).decode() in shown(explorer)
    assert explorer.result["square"] == 4


def test_an_error_in_a_callback_is_shown_and_goes_away():
    explorer = Squares(2)
    picture = explorer.png()
    explorer.controls["n"].value = 3
    assert 'role="alert"' in shown(explorer)
    assert "ValueError: three is &lt;not&gt; to be squared" in shown(explorer)
    assert explorer.png() == picture and explorer.summary() == "2 squared is 4 cm"
    explorer.controls["n"].value = 4
    assert "alert" not in shown(explorer) and "4 squared" in shown(explorer)


def test_the_question_stands_before_the_controls():
    class Asking(Squares):
        question = "is 4² < 17?"

    assert "Predict first:</b> is 4² &lt; 17?" in Asking().children[0].value
    assert "Predict" not in shown(Squares())


def test_numbers_that_differ_from_run_to_run_stay_out_of_the_notebook():
    class Timed(Squares):
        def describe_stored(self, result: dict) -> str:
            return "squared"

    explorer = Timed(2)
    assert explorer._repr_mimebundle_()["text/plain"] == "squared"
    assert explorer.summary() == "2 squared is 4 cm"


def test_a_click_that_fails_is_shown_too():
    explorer = Squares(2)
    with explorer._errors_in_view():
        raise RuntimeError("no such block")
    assert "RuntimeError: no such block" in shown(explorer)


def test_an_error_in_a_lesson_is_raised():
    with pytest.raises(ValueError, match="three"):
        Squares(3).summary()
    with pytest.raises(ValueError, match="three"):
        Squares(1).set(n=3)


def test_text_is_escaped_and_the_picture_has_an_alternative():
    explorer = Squares(1).set(unit="<b>")
    assert "<b>" not in shown(explorer) and "&lt;b&gt;" in shown(explorer)
    assert f'alt="{explorer.alt}"' in shown(explorer)


@pytest.mark.parametrize("wrong, words", [
    ({"m": 1}, "no control 'm'"), ({"n": 10}, "between 0 and 9"), ({"unit": "inch"}, "unit"),
    ({"n": 5, "unit": "inch"}, "unit"), ({"n": "many"}, "n cannot be"),
])
def test_set_refuses_what_is_not_there_and_moves_nothing(wrong, words):
    explorer = Squares(1)
    before = explorer.png()
    with pytest.raises(ValueError, match=words):
        explorer.set(**wrong)
    assert explorer.params == {"n": 1, "unit": "cm"}
    assert explorer.png() == before


def test_a_wrong_start_position_is_refused():
    with pytest.raises(ValueError, match="n must be an integer from 0 to 9, not 10"):
        Squares(10)
    with pytest.raises(ValueError, match="unit 'inch' is unknown; use one of cm"):
        Squares(unit="inch")
    with pytest.raises(ValueError, match="k 3 is unknown; use one of 1, 2, all"):
        steps("k", (1, 2, "all"), 3, "")


def test_controls_are_described_and_report_finished_moves_only():
    for control in (dropdown("a", (1, 2), 1, "why a"), steps("b", (1, 2), 1, "why b"),
                    number("c", 3, 1, "why c")):
        assert control.description and control.tooltip
        assert getattr(control, "continuous_update", False) is False


def test_two_hundred_changes_leave_nothing_behind():
    def census() -> tuple[int, int, int]:
        gc.collect()
        figures = sum(isinstance(o, Figure) for o in gc.get_objects())
        return figures, len(explorer.figure.findobj()), len(ipywidgets.widgets.widget._instances)

    explorer = Squares(1)
    explorer.png()
    before = census()
    for i in range(200):
        explorer.controls["n"].value = (1, 2, 4, 5, 6)[i % 5]
    assert census() == before
    assert Gcf.get_num_fig_managers() == 0


def test_a_picture_has_png_and_text():
    with course_style():
        figure = new_figure(1.0, 2.0)
        figure.add_subplot().plot(np.arange(3))
    picture = Picture(figure, "0, 1, 2")
    bundle = picture._repr_mimebundle_()
    assert set(bundle) == {"image/png", "text/plain"}
    assert bundle["text/plain"] == picture.summary() == repr(picture) == "0, 1, 2"
    assert base64.b64decode(bundle["image/png"]) == picture.png()


def test_the_readers_own_matplotlib_settings_do_not_reach_the_pictures():
    import matplotlib

    plain = Squares(2).png()
    with matplotlib.rc_context({"font.size": 20, "axes.facecolor": "black", "figure.dpi": 300,
                                "savefig.dpi": 300, "savefig.bbox": "tight"}):
        assert Squares(2).png() == plain
