"""Links to lines of source: the lines are those there now, and a wrong marker is an error."""

import inspect

import pytest

from course_lib import quant
from course_lib.classroom import see
from course_lib.errors import CourseError
from course_lib.paths import ROOT


def lines_of(link):
    """The text of the lines that an expanded link names, and its two forms agree."""
    text, target = link[1:].removesuffix(")").split("](../")
    path, numbers = text.split(":")
    assert target.startswith(path + "#L")
    first, _, last = numbers.partition("-")
    assert target.removeprefix(path) == (f"#L{first}-L{last}" if last else f"#L{first}")
    lines = (ROOT / path).read_text(encoding="utf-8").splitlines(keepends=True)
    return "".join(lines[int(first) - 1 : int(last or first)])


def test_a_function_is_all_of_its_lines():
    link = see.expand("{see course_lib/quant.py quantize_rows}", "here")
    assert lines_of(link) == inspect.getsource(quant.quantize_rows)


def test_a_method_is_found_in_its_class():
    text = lines_of(see.expand("{see course_lib/kvcache.py KVCache.append}", "here"))
    assert text.lstrip().startswith("def append(") and "class " not in text


def test_texts_are_looked_up_inside_a_symbol():
    link = see.expand('{see course_lib/quant.py quantize_rows "def quantize_rows"}', "here")
    assert lines_of(link).startswith("def quantize_rows") and "-" not in link
    whole = lines_of(see.expand('{see course_lib/classroom/see.py "def link" "return f"}', "here"))
    assert whole.splitlines()[0].strip().startswith("def link")
    assert whole.splitlines()[-1].strip().startswith("return f")


def test_a_marker_may_run_over_a_line_s_end():
    broken = see.expand("{see course_lib/quant.py\nquantize_rows}", "here")
    assert broken == see.expand("{see course_lib/quant.py quantize_rows}", "here")


def test_prose_around_markers_stays():
    text = r"a $\frac{1}{2}$ {see course_lib/quant.py quantize_rows}, {seen} `{x}`"
    expanded = see.expand(text, "here")
    assert expanded.startswith(r"a $\frac{1}{2}$ [course_lib/quant.py:")
    assert expanded.endswith(", {seen} `{x}`")


@pytest.mark.parametrize("marker", [
    "{see course_lib/quant.py}", "{see course_lib/no.py f}", "{see course_lib/quant.py no_such}",
    "{see ../outside.py f}", '{see course_lib/quant.py "import"}', "{see course_lib a}",
    '{see course_lib/quant.py "not there"}', '{see course_lib/quant.py "open}',
    "{see course_lib/quant.py quantize_rows dequantize_rows}", "{see README.md x}",
    '{see course_lib/quant.py "a" "b" "c"}',
])
def test_a_marker_that_leads_nowhere_names_its_place(marker):
    with pytest.raises(CourseError, match="day07.py, cell 3"):
        see.expand(f"text {marker}", "day07.py, cell 3")
