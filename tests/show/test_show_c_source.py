"""C functions are found with their comment, and what is not there is refused."""

import pytest

from course_lib.show import c_source
from course_lib.show.c_source import c_function

TEXT = """\
#include "x.h"

/* Declared here. */
static int twice(int x);

/* Two
 * lines. */
static int twice(int x)
{
    if (x) {
        return 2 * x;
    }
    return 0;
}

static int one(void) { return twice(1) - 1; }

int
other(int x)
{
    return x;
}
"""


@pytest.fixture(autouse=True)
def folder(monkeypatch, tmp_path):
    (tmp_path / "x.c").write_text(TEXT, encoding="utf-8")
    monkeypatch.setattr(c_source, "C_FOLDER", tmp_path)


def test_a_function_comes_with_its_comment_and_ends_at_its_brace():
    text = c_function("x.c", "twice")
    assert text.startswith("/* Two\n * lines. */\nstatic int twice(int x)\n{")
    assert text.endswith("    return 0;\n}")


def test_a_function_on_one_line_and_without_a_comment():
    assert c_function("x.c", "one") == "static int one(void) { return twice(1) - 1; }"


def test_the_definition_behind_a_line_is_taken(tmp_path):
    (tmp_path / "x.c").write_text(TEXT + "#if NEON\nint other(int x) { return 0; }\n#endif\n")
    assert c_function("x.c", "other", after="NEON") == "int other(int x) { return 0; }"
    with pytest.raises(ValueError, match="no function"):
        c_function("x.c", "other", after="AVX")


@pytest.mark.parametrize(("file", "name"), [("x.c", "on"), ("x.c", "thrice"), ("y.c", "twice"),
                                            ("../x.c", "twice"), ("x.c", "")])
def test_what_is_not_there_is_refused(file, name):
    with pytest.raises(ValueError, match="x.c|y.c"):
        c_function(file, name)
