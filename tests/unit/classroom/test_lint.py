"""Every rule of the lint, each with an example that breaks it."""

from __future__ import annotations

import nbformat
import pytest

from course_lib.classroom import lint
from course_lib.classroom.build import load
from course_lib.classroom.lint import lint_all, lint_day, stray_notebooks
from course_lib.classroom.lint_outputs import output_problems
from course_lib.classroom.normalise import WIDGET_VIEW, dumps, normalise
from course_lib.classroom.source import parse
from course_lib.paths import ROOT


def store(day):
    """Write the notebook as a build does, without executing it."""
    day.notebook.write_text(dumps(normalise(parse(day))), encoding="utf-8")


@pytest.fixture
def problems(example):
    """Return a function that lints the example as it is now."""

    def found() -> list[str]:
        store(example)
        return [str(problem) for problem in lint_day(example)]

    return found


PLAIN_CELL = 'print("scores:"'
HEADING = "## 99-1 Six numbers"
CARD = "10 minutes · difficulty 1/3 · 4 points"
A1 = '"points": 4, "minutes": 10, "difficulty": 1}'
CHECK_A = 'check("d99.a1", best_blocks)'


def code(text):
    """An edit that puts one line before the printing of scores."""
    return PLAIN_CELL, f"{text}\n{PLAIN_CELL}"


def prose(text):
    return HEADING, f"{HEADING}\n\n{text}"


def test_the_example_is_clean(problems):
    assert problems() == []


CODE_RULES = [
    ("lines", code("\n".join(f"a{i} = {i}" for i in range(25)))),
    ("semicolon", ("int(scores.argmax()))", "int(scores.argmax()));")),
    ("shell", code("!ls")),
    ("shell", code("%pip install numpy")),
    ("shell", code("files = 1\n    !ls")),
    ("magic", code("%timeit 1 + 1")),
    ("magic", code("%matplotlib inline")),
    ("syntax", code("for x in")),
    ("network", code("import requests")),
    ("network", code("import urllib.request")),
    ("network", code("from urllib import request")),
    ("network", code("from huggingface_hub import hf_hub_download")),
    ("star", code("from numpy import *")),
    ("widget", code("from ipywidgets import interact")),
    ("widget", code("interact(print)")),
    ("widget", code("import ipywidgets as w\nw.Output()")),
    ("widget", code("clear_output()")),
    ("widget", code("display(1, display_id='x')")),
    ("path", code('open("/home/me/x")')),
    ("path", code('open("C:\\\\data\\\\x")')),
    ("path", code('open("~/x")')),
    ("path", prose("See /usr/share/x.")),
    ("first", ('tags=["nbval-ignore-output"]', "")),
    ("solved_or", code("best_blocks(scores, 1)")),
    ("solved_or", code("mine = best_blocks")),
]
PROSE_RULES = [
    ("title", ("# Day 99/30 · 例子", "# Day 98/30 · 例子")),
    ("title", ("例子 An example day", "An example day")),
    ("headings", (HEADING, f"{HEADING}\n\n#### Deep")),
    ("headings", (HEADING, f"# Another\n\n{HEADING}")),
    ("alt", prose("![](src/day99_example.py)")),
    ("alt", prose('<img src="src/day99_example.py">')),
    ("link", prose("[x](nowhere.md)")),
    ("link", prose("![text](nowhere.png)")),
    ("link", prose('<img src="nowhere.png" alt="text">')),
    ("link", prose("[x](file:///etc)")),
    ("network", prose("![text](https://example.org/x.png)")),
]
EXERCISE_RULES = [
    (CARD, "11 minutes · difficulty 1/3 · 4 points", "its card must say"),
    ("### Exercise 99-1 A", "**Exercise 99-1 A**", "its card needs a ### heading"),
    (A1, '"points": 0, "minutes": 10, "difficulty": 1}', "points must be a whole number"),
    (A1, '"points": 4, "minutes": 2.5, "difficulty": 1}', "minutes must be a whole number"),
    (A1, '"points": 4, "minutes": 10, "difficulty": 4}', "difficulty must be a whole number from"),
    (A1, '"points": 4, "minutes": 10}', "difficulty must be a whole number"),
    (A1, '"points": 4, "minutes": 10, "difficulty": 1, "x": 1}', "unknown course metadata"),
    ('"kind": "A", "role": "card"', '"kind": "A", "role": "card", "points": 4', "unknown course"),
    ('"kind": "A", "role": "answer"', '"kind": "B", "role": "answer"', "kind 'B'"),
    ('"role": "check"', '"role": "test"', "role 'test'"),
    ('"id": "d99.a1", "kind": "A", "role": "card"', '"id": "d98.a1", "kind": "A", "role": "card"',
     "course id 'd98.a1'"),
    ("# EXERCISE d99.a1\n", "", "must begin with the line # EXERCISE d99.a1"),
    ("# EXERCISE d99.a1", "# EXERCISE d99.a2", "holds the marker of another exercise"),
    ("<!-- ANSWER d99.b1 -->\n", "", "must begin with the line <!-- ANSWER"),
    ("# EVIDENCE d99.b1\n", "", "must begin with the line # EVIDENCE"),
    ("# %%\nscores = ", "# %%\n# EXERCISE d99.a1\nscores = ", "has the marker of d99.a1 but no"),
    ('raise NotImplementedError("d99.a1")', "return [1]", "after its docstring the stub holds"),
    ('raise NotImplementedError("d99.a1")', 'raise NotImplementedError("d99.a2")', "after its doc"),
    ('    raise NotImpl', '    x = 1\n    raise NotImpl', "after its docstring the stub holds"),
    (">>> best_blocks", "best_blocks", "needs one worked example"),
    ("def best_blocks(", "def best_block(", "the stub defines best_block"),
    ("def best_blocks(", "X = 1\n\n\ndef best_blocks(", "must hold only the function"),
    (CHECK_A, f"{CHECK_A}\nprint(1)", "its check cell must hold only"),
    (CHECK_A, 'check("d99.a2", best_blocks)', "its check cell must hold only"),
    (CHECK_A, 'check("d99.a1", reference)', "its check cell must hold only"),
    ("Answer: …", "Answer: by the second key", "the answer cell must hold only"),
    ("Evidence: path:first-last", "Evidence: generate.py:6-6", "the answer cell must hold only"),
    ('"ties": ""', '"ties": "generate.py:6-6"', "its evidence is filled in"),
    ('"winner": None', '"winner": 1', "its evidence is filled in"),
    ('"winner": None', '"half": None', "its evidence has the parts"),
    ("d99_b1 = {", "d99_b1 = x = {", "must hold only name"),
    ("d99_b1 = {", "d99_b1 = dict() or {", "must hold only name"),
    ('course={"id": "d99.a1", "kind": "A", "role": "check"}\n', "\n", "has 0 check cells"),
    ('course={"id": "d99.b1", "kind": "B", "role": "evidence"}\n# EVIDENCE d99.b1', "\n",
     "has 0 evidence cells"),
    ('"id": "d99.a1", "kind": "A", "role": "check"', '"id": "d99.a1", "kind": "A", "role": "given"',
     "has 0 check cells"),
    ('[markdown] course={"id": "d99.a1", "kind": "A", "role": "card"}',
     '[markdown] course={"id": "d99.a2", "kind": "A", "role": "card"}', "is not in the day's"),
    (HEADING, "## 99-2 Six numbers", "belongs in a section ## 99-1"),
    (HEADING, "## Six numbers", "belongs in a section ## 99-1"),
    ("### Exercise 99-1 B", "## Another\n\n### Exercise 99-1 B", "belongs in a section ## 99-1"),
]


@pytest.mark.parametrize("rule, change", CODE_RULES + PROSE_RULES)
def test_rule(problems, edit, rule, change):
    edit(*change)
    found = problems()
    assert any(text.endswith(f"[{rule}]") for text in found), found


@pytest.mark.parametrize("old, new, text", EXERCISE_RULES)
def test_exercise_rule(problems, edit, old, new, text):
    edit(old, new)
    found = problems()
    assert any(text in problem for problem in found), found


@pytest.mark.parametrize("change", [
    code("a = 1 / 2; b = 3"),
    code("x = '/proc/self/status' or '../data/usr/x' or 'and/or/usr'"),
    code("ratio = scores[0]/scores[1]"),
    code('print("A:\\n", "k:\\t")'),
    prose("[site](https://example.org/x) [down](#summary) `[no](link)`"),
    prose("[file](src/day99_example.py#L3)"),
    prose("```\n# no heading\n[no](link)\n```"),
    prose('![a picture](src/day99_example.py) <img alt="text" src="src/day99_example.py">'),
    ('# %% tags=["nbval-ignore-output"]\n', '# %% tags=["nbval-ignore-output"]\n%timeit -n1 1\n'),
])
def test_what_no_rule_forbids(problems, edit, change):
    edit(*change)
    assert problems() == []


def test_a_problem_names_the_line(problems, example, edit):
    edit(*code("!ls"))
    (problem,) = problems()
    line = int(problem.split(":")[1])
    assert example.source.read_text(encoding="utf-8").splitlines()[line] .startswith("scores =")
    assert problem.startswith("day99_example.py:")


def test_items_that_are_only_registered(problems, edit, monkeypatch):
    from course_lib.classroom import exercises, lint_exercises

    items = exercises.day_items(99)
    more = [*items, exercises.Reading("d99.b2")]
    monkeypatch.setattr(lint_exercises, "day_items", lambda day: more)
    assert any("is in the exercises module, not here" in problem for problem in problems())


def test_cells_of_an_item_in_another_order(problems, example):
    text = example.source.read_text(encoding="utf-8")
    cells = text.split("\n# %%")
    check = next(i for i, c in enumerate(cells) if '"d99.b1", "kind": "B", "role": "check"' in c)
    cells[check], cells[check - 1] = cells[check - 1], cells[check]
    example.source.write_text("\n# %%".join(cells), encoding="utf-8")
    assert any("its cells come in the order" in problem for problem in problems())


def test_too_many_cells_and_too_large_a_file(problems, example, monkeypatch):
    monkeypatch.setattr(lint, "MAX_CODE_CELLS", 3)
    monkeypatch.setattr(lint, "MAX_BYTES", 1000)
    found = problems()
    assert any("[cells]" in problem for problem in found)
    assert any("[size]" in problem for problem in found)


def test_a_day_that_was_never_built(example):
    assert [p.rule for p in lint_day(example)] == ["notebook"]


# Outputs


def display(**data):
    made = nbformat.v4.new_output("display_data")
    made["data"] = nbformat.from_dict({k.replace("_", "/", 1): v for k, v in data.items()})
    return made


def widget_view():
    made = display(text_plain="5")
    made.data[WIDGET_VIEW] = {}
    return made


def svg():
    made = display(text_plain="5")
    made.data["image/svg+xml"] = "<svg/>"
    return made


STREAM = nbformat.v4.new_output("stream", text="3 blocks\n")


@pytest.mark.parametrize("rule, outputs", [
    ("error", [nbformat.v4.new_output("error", ename="ValueError", evalue="x", traceback=[])]),
    ("stderr", [nbformat.v4.new_output("stream", name="stderr", text="warning")]),
    ("output", [svg()]),
    ("output", [widget_view()]),
    ("output", [display(text_html="<script>1</script>")]),
    ("figure", [display(image_png="A", text_plain="<Figure size 640x480 with 1 Axes>")]),
    ("figure", [nbformat.v4.new_output("stream", text="<Figure size 640x480>")]),
    ("path", [nbformat.v4.new_output("stream", text=f"at {ROOT}/x")]),
    ("path", [nbformat.v4.new_output("stream", text="in /home/me/.cache")]),
    ("path", [display(text_html="<a href='/opt/x/y'>")]),
    ("twin", [display(image_png="A")]),
    ("twin", [display(image_png="A", text_plain="a picture")]),
])
def test_output_rule(example, rule, outputs):
    notebook = normalise(parse(example))
    notebook.cells[3].outputs = outputs
    assert rule in [p.rule for p in output_problems(notebook, "x.ipynb")]


@pytest.mark.parametrize("outputs", [
    [STREAM], [display(image_png="A", text_plain="a picture"), STREAM],
    [display(image_png="A", text_plain="k = 4: 3 blocks")], [display(text_html="<b>5</b>")],
])
def test_outputs_that_no_rule_forbids(example, outputs):
    notebook = normalise(parse(example))
    notebook.cells[3].outputs = outputs
    assert output_problems(notebook, "x.ipynb") == []


def test_counts_kernel_and_widget_state(example):
    notebook = normalise(parse(example))
    notebook.cells[3].execution_count = None
    notebook.metadata["widgets"] = {}
    notebook.metadata.kernelspec["name"] = "xpython"
    rules = sorted(p.rule for p in output_problems(notebook, "x.ipynb"))
    assert rules == ["executed", "kernel", "widget"]


def test_stray_notebooks_and_the_whole_course(example):
    folder = example.notebook.parent
    store(example)
    assert load(example.notebook) is not None and lint_all(folder) == []
    (folder / "deep").mkdir()
    for name in ("Untitled.ipynb", "deep/copy.ipynb"):
        (folder / name).write_text("{}")
    (folder / ".ipynb_checkpoints").mkdir()
    (folder / ".ipynb_checkpoints" / "x.ipynb").write_text("{}")
    assert [p.rule for p in stray_notebooks(folder)] == ["stray", "stray"]
    assert len(lint_all(folder)) == 2
