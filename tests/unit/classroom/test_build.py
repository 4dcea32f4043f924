"""From source to notebook: names that last, nothing half-written, no drift unseen."""

from __future__ import annotations

import copy
import json

import nbformat
import pytest

from course_lib.classroom import build
from course_lib.classroom.build import drift
from course_lib.classroom.execute import Run
from course_lib.classroom.normalise import WIDGET_VIEW, dumps, normalise, strip_widget_views
from course_lib.classroom.source import Day, cell_line, find_days, parse
from course_lib.errors import CourseError

IGNORED = "nbval-ignore-output"


def write_day(folder, body, name="day42_small.py"):
    (folder / "src").mkdir(parents=True, exist_ok=True)
    (folder / "src" / name).write_text(body, encoding="utf-8")
    return find_days([int(name[3:5])], folder)[0]


# Sources


def test_cells_ids_and_metadata(example):
    notebook = parse(example)
    ids = [cell.id for cell in notebook.cells]
    assert len(set(ids)) == len(ids)
    named = [i for i in ids if i.startswith("d99-")]
    assert named == ["d99-a1-card", "d99-a1", "d99-a1-check", "d99-b1-card", "d99-b1",
                     "d99-b1-evidence", "d99-b1-check"]
    by_id = {cell.id: cell for cell in notebook.cells}
    assert by_id["d99-a1"].metadata.course["points"] == 4
    assert by_id["d99-a1-check"].metadata["editable"] is False
    assert by_id["d99-a1-check"].metadata["deletable"] is False
    assert "editable" not in by_id["d99-a1"].metadata
    assert notebook.cells[1].metadata.tags == [IGNORED]
    assert r"$(-s_i, i)$" in notebook.cells[-1].source
    assert notebook.metadata.course["day"] == 99
    nbformat.validate(notebook)


def test_ids_follow_the_text_and_equal_cells_get_different_ones(tmp_path):
    day = write_day(tmp_path, "# %%\nx = 1\n\n# %%\nx = 1\n\n# %%\ny = 2\n")
    first, second, third = (cell.id for cell in parse(day).cells)
    assert second == f"{first}-2" and third != first
    day = write_day(tmp_path, "# %%\nz = 0\n\n# %%\nx = 1\n\n# %%\ny = 2\n")
    assert [cell.id for cell in parse(day).cells][1:] == [first, third]


def test_line_ends_do_not_change_the_digest(tmp_path):
    day = write_day(tmp_path, "# %%\nx = 1\n")
    before = parse(day)
    day.source.write_bytes(b"# %%\r\nx = 1\r\n")
    assert parse(day) == before


@pytest.mark.parametrize("body, text", [
    ("# %% [markdown]\n# # Title\n", "raw string"),
    ('# %% [markdown]\n"""\n# Title\n"""\n', "raw string"),
    ("# %% course={\"id\": }\nx = 1\n", "marker line"),
    ("# %% A title\nx = 1\n", "marker line"),
    ("# %% course=5\nx = 1\n", "must be an object"),
    ("# %% [raw]\n# text\n", "raw cell"),
])
def test_a_source_that_cannot_be_read_is_told(tmp_path, body, text):
    with pytest.raises(CourseError, match=text) as caught:
        parse(write_day(tmp_path, body))
    assert "day42_small.py, cell 1" in str(caught.value)


def test_days_are_found_by_number(tmp_path):
    write_day(tmp_path, "", "day03_b.py")
    write_day(tmp_path, "", "day11_a.py")
    assert [d.number for d in find_days(folder=tmp_path)] == [3, 11]
    assert [d.name for d in find_days([11, 3, 11], tmp_path)] == ["day03_b", "day11_a"]
    with pytest.raises(CourseError, match="no day 4; days there are: 3, 11"):
        find_days([4], tmp_path)
    (tmp_path / "src" / "day03_c.py").write_text("")
    with pytest.raises(CourseError, match="two sources"):
        find_days(folder=tmp_path)
    (tmp_path / "src" / "day03_c.py").unlink()
    (tmp_path / "src" / "helper.py").write_text("")
    with pytest.raises(CourseError, match="name it like"):
        find_days(folder=tmp_path)


def test_cell_line(example):
    notebook = parse(example)
    lines = example.source.read_text(encoding="utf-8").splitlines()
    for index in range(len(notebook.cells)):
        assert lines[cell_line(example, index) - 1].startswith("# %%")
    answer = next(i for i, c in enumerate(notebook.cells) if c.id == "d99-a1")
    assert lines[cell_line(example, answer)] == "# EXERCISE d99.a1"


# Runs and their normal form (tests/notebook/test_execution.py has what starts a kernel)


def test_limits_of_a_run():
    assert Run(19.0, 9.0, 3, 599.0).over() == [] == Run(1.0, 1.0, 1, None).over()
    heavy = Run(21.0, 11.0, 3, 700.0).over()
    assert len(heavy) == 3 and "code cell 3" in heavy[1]


def executed(*cell_outputs, source="x", tags=()):
    cell = nbformat.v4.new_code_cell(source, metadata={"tags": list(tags), "execution": {"a": "1"}})
    cell["id"], cell["execution_count"] = "one", 7
    cell["outputs"] = list(cell_outputs)
    notebook = nbformat.v4.new_notebook(cells=[cell])
    notebook.metadata = nbformat.from_dict({
        "kernelspec": {"name": "python3"}, "language_info": {"name": "python"},
        "course": {"day": 42}, "widgets": {"state": 1},
    })
    return notebook


def display(**data):
    made = nbformat.v4.new_output("display_data")
    made["data"] = nbformat.from_dict({k.replace("_", "/", 1): v for k, v in data.items()})
    made["metadata"] = nbformat.from_dict({"image/png": {"width": 3}})
    return made


def test_widgets_timings_and_counts_are_taken_out():
    view = display(image_png="AAAA", text_plain="twin")
    view.data[WIDGET_VIEW] = {"model_id": "random"}
    only = display()
    only.data[WIDGET_VIEW] = {"model_id": "random"}
    result = nbformat.v4.new_output("execute_result", execution_count=7)
    result.data["text/plain"] = "5"
    made = normalise(executed(view, only, result))
    cell = made.cells[0]
    assert "widgets" not in made.metadata and "execution" not in cell.metadata
    assert [dict(o.data) for o in cell.outputs] == [
        {"image/png": "AAAA", "text/plain": "twin"}, {"text/plain": "5"}
    ]
    assert cell.execution_count == 1 == cell.outputs[1].execution_count
    assert cell.outputs[0].metadata == {}
    assert normalise(made) == made, "normalising twice changes nothing"
    raw = executed(view, only)
    strip_widget_views(raw)
    assert [list(o.data) for o in raw.cells[0].outputs] == [["image/png", "text/plain"]]


@pytest.mark.parametrize("change, kept", [
    ({}, True), ({"source": "y"}, False), ({"tags": [IGNORED]}, False), ({"text": "other"}, False),
])
def test_a_stored_picture_is_kept_only_while_all_else_is_the_same(change, kept):
    before = normalise(executed(display(image_png="OLD", text_plain="twin")))
    text = change.pop("text", "twin")
    now = executed(display(image_png="NEW", text_plain=text), **change)
    made = normalise(now, before).cells[0].outputs[0].data["image/png"]
    assert made == ("OLD" if kept else "NEW")


def test_a_changed_kind_of_picture_is_no_twin():
    before = normalise(executed(display(text_plain="twin")))
    made = normalise(executed(display(image_png="NEW", text_plain="twin")), before)
    assert "image/png" in made.cells[0].outputs[0].data


def test_an_ignored_output_is_kept_while_its_source_is_the_same():
    def printed(text, source="x"):
        return executed(nbformat.v4.new_output("stream", text=text), source=source, tags=[IGNORED])

    before = normalise(printed("1.0 s"))
    assert normalise(printed("2.0 s"), before).cells[0].outputs[0].text == "1.0 s"
    assert normalise(printed("2.0 s", "y"), before).cells[0].outputs[0].text == "2.0 s"
    untagged = normalise(executed(nbformat.v4.new_output("stream", text="1")))
    now = executed(nbformat.v4.new_output("stream", text="2"))
    assert normalise(now, untagged).cells[0].outputs[0].text == "2"


# Drift


@pytest.fixture
def stored(example):
    """The example with a notebook as a build writes it, made without executing."""
    example.notebook.write_text(dumps(normalise(parse(example))), encoding="utf-8")
    assert drift(example) is None
    return example


def test_drift_of_the_source(stored, edit):
    edit("Six numbers", "Seven numbers")
    assert "changed since its notebook was built; run ./course build 99" in drift(stored)


def test_a_missing_or_broken_notebook_is_drift(stored):
    stored.notebook.write_text("{}")
    assert "run ./course build 99" in drift(stored)
    stored.notebook.write_text("no json")
    assert "cannot be read" in drift(stored)
    stored.notebook.unlink()
    assert "is missing" in drift(stored)


@pytest.mark.parametrize("text", [
    "[]", "5", '{"cells": 5}', '{"cells": [5], "metadata": {}, "nbformat": 4, "nbformat_minor": 5}',
    '{"cells": [], "metadata": [], "nbformat": 4, "nbformat_minor": 5}', '{"nbformat": 9}',
    '{"cells": 5, "metadata": {}, "nbformat": 4, "nbformat_minor": 5}', "[" * 100_000, "\xff",
], ids=range(9))
def test_json_that_is_no_notebook_is_drift_and_is_built_anew(stored, monkeypatch, text):
    wanted = stored.notebook.read_bytes()
    stored.notebook.write_text(text, encoding="latin-1")
    told = drift(stored)
    assert told == "day99_example.ipynb cannot be read; run ./course build 99."
    monkeypatch.setattr(build, "execute", lambda *args: Run(1.0, 1.0, 1, None))
    assert build.build_day(stored).changed and stored.notebook.read_bytes() == wanted


def test_an_output_against_the_format_is_drift(stored):
    notebook = json.loads(stored.notebook.read_text(encoding="utf-8"))
    notebook["cells"][1]["outputs"] = [{"output_type": "stream"}]
    stored.notebook.write_text(json.dumps(notebook), encoding="utf-8")
    assert "run ./course build 99" in drift(stored)


def test_a_source_that_is_not_utf8_names_file_and_command(stored):
    stored.source.write_bytes(b"# %%\nx = 1  # \xff\n")
    with pytest.raises(CourseError, match="day99_example.py:2 is not UTF-8 text; save it as UTF-8, "
                                          "then run ./course build 99"):
        drift(stored)
    stored.source.unlink()
    with pytest.raises(CourseError, match="cannot be read .*run ./course build 99"):
        drift(stored)


def _set(path, value):
    def change(notebook):
        target = notebook
        for key in path[:-1]:
            target = target[key]
        target[path[-1]] = value

    return change


@pytest.mark.parametrize("change, text", [
    (_set(["cells", 3, "source"], "edited"), "cell 4 has another source"),
    (_set(["cells", 3, "id"], "other"), "cell 4 has another id"),
    (_set(["cells", 1, "metadata", "tags"], []), "cell 2 has another metadata"),
    (_set(["cells", 5, "metadata", "course", "points"], 9), "cell 6 has another metadata"),
    (_set(["cells", 6, "metadata", "editable"], True), "cell 7 has another metadata"),
    (_set(["cells", 3, "metadata", "execution"], {}), "cell 4 has another metadata"),
    (_set(["cells", 3, "execution_count"], 5), "metadata, counts or form"),
    (_set(["metadata", "kernelspec", "name"], "other"), "metadata, counts or form"),
    (_set(["metadata", "widgets"], {}), "metadata, counts or form"),
    (_set(["metadata", "course", "digest"], "0"), "run ./course build 99"),
    (lambda notebook: notebook.cells.pop(), "instead of"),
], ids=lambda value: value if isinstance(value, str) else "")
def test_an_edited_notebook_is_drift(stored, change, text):
    notebook = copy.deepcopy(build.load(stored.notebook))
    change(notebook)
    stored.notebook.write_text(nbformat.writes(notebook) + "\n", encoding="utf-8")
    assert text in drift(stored)


def test_another_form_of_the_same_notebook_is_drift(stored):
    notebook = json.loads(stored.notebook.read_text(encoding="utf-8"))
    stored.notebook.write_text(json.dumps(notebook), encoding="utf-8")
    assert "metadata, counts or form" in drift(stored)


def test_a_day_knows_its_name(example):
    assert example.name == "day99_example" and isinstance(example, Day)
