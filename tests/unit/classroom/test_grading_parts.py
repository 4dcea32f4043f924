"""The parts of grading that run nothing: finding, taking apart, marking, writing down."""

from __future__ import annotations

import copy
import csv
import io
import json
import os
import subprocess
import threading
import zipfile
from concurrent.futures import Future
from concurrent.futures.process import BrokenProcessPool
from contextlib import nullcontext
from pathlib import PurePosixPath
from types import SimpleNamespace

import nbformat
import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from course_lib.classroom import sealed
from course_lib.classroom.evidence import read_answer
from course_lib.classroom.exercises import Case, Exercise, Reading
from course_lib.classroom.grading import (
    batch,
    feedback,
    sandbox,
    submission_marks,
    submissions,
    tables,
)
from course_lib.classroom.grading.day import load_day
from course_lib.classroom.grading.handed_in import (
    MAX_SOURCE,
    HandedIn,
    defined,
    read_notebook,
    take_apart,
    without_magics,
)
from course_lib.classroom.grading.human import HumanMark
from course_lib.classroom.grading.marking import (
    evidence_of,
    mark_code,
    mark_reading,
)
from course_lib.classroom.grading.program import program_of
from course_lib.classroom.grading.submission_marks import ItemMark
from course_lib.classroom.grading.submissions import (
    MAX_NOTEBOOK,
    Found,
    Submission,
    find_submissions,
    place_of,
)
from course_lib.classroom.grading.taken_away import without, write_library
from course_lib.classroom.hidden import Group
from course_lib.errors import CourseError

# Finding


def test_every_way_to_hand_in(tmp_path):
    (tmp_path / "ann" / "sub").mkdir(parents=True)
    (tmp_path / "ann" / "day10_x.ipynb").write_bytes(b"1")
    (tmp_path / "ann" / "sub" / "Day09.IPYNB").write_bytes(b"2")
    (tmp_path / "bo_b_day10.ipynb").write_bytes(b"3")
    (tmp_path / "ann" / "notes.md").write_bytes(b"")
    (tmp_path / "day10.ipynb").write_bytes(b"")
    (tmp_path / "ann" / ".ipynb_checkpoints").mkdir()
    (tmp_path / "ann" / ".ipynb_checkpoints" / "day10-checkpoint.ipynb").write_bytes(b"old")
    with zipfile.ZipFile(tmp_path / "cy.zip", "w") as file:
        file.writestr("hand-in/day10.ipynb", b"4")
        file.writestr("__MACOSX/hand-in/._day10.ipynb", b"")
    with zipfile.ZipFile(tmp_path / "all.zip", "w") as file:
        file.writestr("dee/day10.ipynb", b"5")
        file.writestr("eve/day10.ipynb", b"6")
        file.writestr("../../fay_day10.ipynb", b"7")
    with zipfile.ZipFile(tmp_path / "gus_day09.zip", "w") as file:
        file.writestr("day09.ipynb", b"8")
    (tmp_path / "bad.zip").write_bytes(b"PK")
    found = find_submissions(tmp_path)
    assert [(s.student, s.day, s.content) for s in found.submissions] == [
        ("ann", 9, b"2"), ("ann", 10, b"1"), ("bo_b", 10, b"3"), ("cy", 10, b"4"),
        ("dee", 10, b"5"), ("eve", 10, b"6"), ("fay", 10, b"7"), ("gus", 9, b"8")]
    assert found.unrecognised == ["ann/notes.md", "bad.zip (no readable zip)", "day10.ipynb"]


def test_links_and_large_files_are_not_read(tmp_path):
    (tmp_path / "ann").mkdir()
    (tmp_path / "ann" / "day10.ipynb").symlink_to("/etc/passwd")
    with open(tmp_path / "bob_day10.ipynb", "wb") as file:
        file.truncate(MAX_NOTEBOOK + 1)
    found = find_submissions(tmp_path)
    assert found.unrecognised == ["ann/day10.ipynb (a link)"]
    assert [(s.content, s.problem) for s in found.submissions] == [(None, "larger than 30 MB")]


def test_a_zip_that_unpacks_to_too_much(tmp_path):
    with zipfile.ZipFile(tmp_path / "ann.zip", "w", zipfile.ZIP_DEFLATED) as file:
        file.writestr("day10.ipynb", bytes(MAX_NOTEBOOK + 1))
    (submission,) = find_submissions(tmp_path).submissions
    assert (submission.content, submission.problem) == (None, "larger than 30 MB")


def test_a_zip_that_unpacks_to_too_much_in_all(tmp_path, monkeypatch):
    monkeypatch.setattr(submissions, "MAX_ZIP", 2**20)
    with zipfile.ZipFile(tmp_path / "ann.zip", "w", zipfile.ZIP_DEFLATED) as file:
        for number in range(20):
            file.writestr(f"{number}_day10.ipynb", bytes(10**5))
    assert find_submissions(tmp_path) == Found([], ["ann.zip (a zip of more than 1 MB)"])


def test_a_zip_cannot_take_the_place_of_what_another_student_handed_in(tmp_path):
    (tmp_path / "bob").mkdir()
    (tmp_path / "bob" / "day10.ipynb").write_bytes(b"mine")
    with zipfile.ZipFile(tmp_path / "zed.zip", "w") as file:
        for name in ("zed/day10.ipynb", "bob/day10.ipynb", "bob_day10.ipynb"):
            file.writestr(name, b"zed's")
    found = find_submissions(tmp_path).submissions
    assert [(s.student, s.content) for s in found] == [
        ("bob", b"zed's"), ("bob", b"zed's"), ("bob", b"mine"), ("zed", b"zed's")]


def test_names_of_files_do_nothing_to_a_terminal(tmp_path):
    (tmp_path / "\x1b[2J.txt").write_bytes(b"")
    with zipfile.ZipFile(tmp_path / "all.zip", "w") as file:
        file.writestr("x" * 1000 + "_day10.ipynb", b"")
    found = find_submissions(tmp_path)
    assert found.submissions == [] and "\\x1b[2J.txt" in found.unrecognised
    assert all(name.isprintable() and len(name) <= 300 for name in found.unrecognised)
    assert any("a student's name of 1000 characters" in name for name in found.unrecognised)


def test_no_folder(tmp_path):
    with pytest.raises(CourseError, match="is no folder"):
        find_submissions(tmp_path / "nowhere")


@pytest.mark.parametrize("name, place", {
    "a/day10.ipynb": ("a", 10), "a/b/day09_q8 (1).ipynb": ("a", 9), "x_day10_y.ipynb": ("x", 10),
    "day10.ipynb": None, "a/day1.ipynb": None, "a/day100.ipynb": None, "a/mday10.ipynb": None,
    "a/day10.py": None, "a/x_day10.ipynb": None, "e\u0301/day10.ipynb": ("\u00e9", 10),
    "a\nb_day10.ipynb": ("a\\nb", 10), "\udccd\udcf5/day10.ipynb": ("\\udccd\\udcf5", 10),
    "a\u3000b/day10.ipynb": ("a\u3000b", 10), "\x1b[2J/day10.ipynb": ("\\x1b[2J", 10),
}.items())
def test_whose_and_which_day(name, place):
    assert place_of(PurePosixPath(name)) == place


# Taking apart

ITEMS = [Exercise("d99.a1", "f", list), Reading("d99.b1", ("where", "how_many"))]


def code(source, role=None, item="d99.a1"):
    made = nbformat.v4.new_code_cell(source)
    if role:
        made.metadata["course"] = {"id": item, "role": role, "points": 4}
    return made


def text(source, role=None, item="d99.b1"):
    made = nbformat.v4.new_markdown_cell(source)
    if role:
        made.metadata["course"] = {"id": item, "role": role, "points": 3}
    return made


STUB = "# EXERCISE d99.a1\ndef f(x):\n    raise NotImplementedError(\"d99.a1\")"
EMPTY = "# EVIDENCE d99.b1\nd99_b1 = {\"where\": \"\", \"how_many\": None}"
RIGHT = "# EXERCISE d99.a1\ndef f(x):\n    return x + g()"


def ours():
    return nbformat.v4.new_notebook(cells=[
        code("import numpy as np\nfrom math import sqrt, pi"), text("# Day 99"),
        code("def g():\n    return 1", "given"), code(STUB, "answer"),
        code("check(\"d99.a1\", f)", "check"),
        text("<!-- ANSWER d99.b1 -->\nAnswer: …\n\nEvidence: path:first-last", "answer"),
        code(EMPTY, "evidence", "d99.b1"),
    ])


def answered(change):
    book = ours()
    change(book.cells)
    return take_apart(read_notebook(json.dumps(book).encode()), ours(), ITEMS)


def test_the_notebook_as_handed_out():
    found = answered(lambda cells: None)
    assert found["d99.a1"] == HandedIn(STUB)
    assert found["d99.b1"].evidence == EMPTY


def put(cells, source):
    cells[3].source = source


@pytest.mark.parametrize("before, after", {
    "%%time\ndef f(x):\n    return 1": "# %%time\ndef f(x):\n    return 1",
    "def f(x):\n    return 1\n%timeit f(1)\n  !ls":
        "def f(x):\n    return 1\n# %timeit f(1)\n  # !ls",
    "a = (5\n% 3)": "a = (5\n% 3)", "%time\ndef f(:": "%time\ndef f(:", "%x": "%x", "": "",
}.items())
def test_lines_for_ipython_are_left_out(before, after):
    assert without_magics(before) == after
    found = answered(lambda cells: put(cells, "# EXERCISE d99.a1\n" + before))["d99.a1"]
    assert found.answer == "# EXERCISE d99.a1\n" + after and found.flags == ()


def test_helpers_above_the_answer_come_along_and_others_do_not():
    def change(cells):
        put(cells, RIGHT)
        cells[3:3] = [text("my note"), code("h = 2"), code("")]
        cells.append(code("late = 1"))

    assert answered(change)["d99.a1"].helpers == ("h = 2",)


@pytest.mark.parametrize("lose", ["metadata", "marker", "both"])
def test_an_answer_is_found_by_metadata_or_by_its_marker(lose):
    def change(cells):
        put(cells, RIGHT if lose == "metadata" else RIGHT.partition("\n")[2])
        if lose != "marker":
            cells[3].metadata = {}

    found = answered(change)["d99.a1"]
    assert (found.answer is None) == (lose == "both")


def test_the_last_that_defines_the_function_counts():
    def change(cells):
        put(cells, RIGHT)
        for source in ("# EXERCISE d99.a1\nf(3)", STUB):
            copied = copy.deepcopy(cells[3])
            copied.source = source
            cells.insert(4, copied)

    found = answered(change)["d99.a1"]
    assert found.answer == RIGHT and found.flags == ("duplicate_cell",)


def test_a_copied_cell_belongs_to_the_exercise_that_it_names():
    def change(cells):
        cells[3].metadata["course"]["id"] = "d99.a2"

    assert answered(change)["d99.a1"].answer == STUB


@pytest.mark.parametrize("place", [2, 4])
def test_changed_or_removed_given_cells_are_flagged(place):
    def edit(cells):
        cells[place].source += " "  # blank space at the end is no change
        cells[place].source = cells[place].source.replace("g", "G").replace("f)", "F)")

    assert answered(edit)["d99.a1"].flags == ("changed_given_code",)
    assert answered(lambda cells: cells.pop(place))["d99.a1"].flags == ("changed_given_code",)


def as_saved_elsewhere(book):
    raw = json.loads(json.dumps(book))
    for cell in raw["cells"]:
        cell["source"] = cell["source"].splitlines(keepends=True)
        cell.pop("id", None)
    raw["nbformat_minor"] = 2
    return ("\ufeff" + json.dumps(raw, indent=4)).replace("\n", "\r\n").encode()


def test_other_editors_files_are_read():
    book = ours()
    put(book.cells, RIGHT)
    found = take_apart(read_notebook(as_saved_elsewhere(book)), ours(), ITEMS)
    assert found["d99.a1"] == HandedIn(RIGHT)


@pytest.mark.parametrize("content", [
    b"", b"{", b"[]", b"1", b'{"cells": 1}', b'{"nbformat": 4}', b"\xff\xfe", b"[" * 10**5,
    b'{"nbformat": 4, "nbformat_minor": 5, "metadata": {}, "cells": [1]}',
    b'{"nbformat": 4, "nbformat_minor": 5, "metadata": {}, "cells": [{"source": 5}]}',
])
def test_what_is_no_notebook(content):
    with pytest.raises(CourseError, match="notebook"):
        read_notebook(content)


@given(st.binary(max_size=60), st.integers(0, 400), st.integers(0, 40))
def test_damaged_notebooks_are_read_or_refused(noise, at, cut):
    content = json.dumps(ours()).encode()
    content = content[:at] + noise + content[at + cut:]
    try:
        take_apart(read_notebook(content), ours(), ITEMS)
    except CourseError:
        pass


def test_empty_lines_without_end_are_read_once():
    """Searched again from each of them they would take hours."""
    def change(cells):
        cells[5].source = "\n" * 10**6 + "x"

    found = answered(change)["d99.b1"]
    assert read_answer(found.answer or "").text == "x"


def test_what_nobody_writes_as_an_answer_is_not_parsed():
    source = "# EXERCISE d99.a1\ndef f(x):\n    return [" + "1," * MAX_SOURCE + "]"
    found = answered(lambda cells: put(cells, source))["d99.a1"]
    assert found.too_long and defined(source) == set() and evidence_of("d = " + source) is None
    assert not answered(lambda cells: put(cells, RIGHT))["d99.a1"].too_long


def test_defined_names():
    assert defined("import x\nf = g = 1\ndef h(): pass\nclass K: pass") == {"f", "g", "h", "K"}
    assert defined("def f(:") == set()


# The program

SOLUTIONS = '''
import numpy as np
def _help(x): return x
def other(x): return _help(np.abs(x))
def f(x): return secret
'''


def test_the_program_holds_ours_around_the_answer():
    items = [*ITEMS, Exercise("d99.a2", "other", list)]
    handed = HandedIn("def f(x):\n    return other(x) + sqrt(x)", ("h = np.pi",))
    program = program_of(items[0], handed, ours(), items, SOLUTIONS)
    assert program[0] == "import numpy as np\nfrom math import sqrt"
    assert program[1] == "def g():\n    return 1"
    assert program[-2:] == ["h = np.pi", handed.answer]
    assert "def other" in "".join(program) and "def _help" in "".join(program)
    assert "secret" not in "".join(program)


def test_an_own_function_of_that_name_is_not_replaced():
    items = [*ITEMS, Exercise("d99.a2", "other", list)]
    handed = HandedIn("def other(x): return 1\ndef f(x): return other(x)")
    assert "_help" not in "".join(program_of(items[0], handed, ours(), items, SOLUTIONS))


# The library without what is asked for


def test_a_function_is_taken_away_with_its_text(tmp_path):
    names = "course_lib.sparse.select_blocks", "course_lib.kvcache.KVCache.append"
    write_library(tmp_path, names)
    sparse = (tmp_path / "course_lib" / "sparse.py").read_text()
    assert "def select_blocks(q" in sparse and "note('select_blocks')" in sparse
    assert "Choose the blocks that one query head reads" not in sparse
    assert "note('KVCache.append')" in (tmp_path / "course_lib" / "kvcache.py").read_text()
    assert compile(sparse, "sparse.py", "exec")


def test_copies_that_an_editor_keeps_stay_outside(tmp_path):
    for name in ("a.py", ".ipynb_checkpoints/a-checkpoint.py"):
        (tmp_path / "course_lib" / name).parent.mkdir(exist_ok=True, parents=True)
        (tmp_path / "course_lib" / name).write_text("def f():\n    return 1\n")
    write_library(tmp_path / "copy", ("course_lib.a.f",), tmp_path)
    (written,) = [path for path in (tmp_path / "copy").rglob("*") if path.is_file()]
    assert "return 1" not in written.read_text()


@pytest.mark.parametrize("name", ["course_lib.sparse.nothing", "course_lib.nowhere.f", "os.system",
                                  "course_lib.kvcache.KVCache"])
def test_names_that_are_no_function(name, tmp_path):
    with pytest.raises(CourseError):
        write_library(tmp_path, (name,))


def test_only_the_named_function_is_emptied():
    made = without("def a():\n    return 1\ndef b():\n    return 2\n", [["a"]], "x.py")
    scope: dict = {}
    exec(made, scope)
    assert scope["b"]() == 2 and "return 1" not in made


# The sandbox


def test_a_course_that_answers_could_read_is_refused(monkeypatch, tmp_path):
    monkeypatch.setattr(sandbox.shutil, "which", lambda name: f"/usr/bin/{name}")
    monkeypatch.setattr(sandbox, "_trial", lambda program: "")
    monkeypatch.setattr(sandbox.sysconfig, "get_path", lambda name: str(tmp_path))
    assert sandbox.require_bubblewrap() == "/usr/bin/bwrap"
    (tmp_path / "course_lib").mkdir()
    with pytest.raises(CourseError, match="is a whole copy of the library"):
        sandbox.require_bubblewrap()
    monkeypatch.setattr(sandbox, "ROOT", PurePosixPath("/usr/src/app"))
    with pytest.raises(CourseError, match="answers can read /usr.*move the course"):
        sandbox.require_bubblewrap()


@pytest.mark.parametrize("user, release, unsandboxed, others", [
    (0, "4.4.0", False, False), (1000, "5.14.0-arm64", False, False), (1000, "6.1.75+rpt", False,
                                                                       False),
    (1000, "5.10.110-rockchip", False, True), (1000, "6.1.75", True, True), (0, "6.1.75", True,
                                                                             True)])
def test_other_programs_leave_an_answer_its_processes(monkeypatch, user, release, unsandboxed,
                                                      others):
    monkeypatch.setattr(sandbox.os, "geteuid", lambda: user)
    monkeypatch.setattr(sandbox.os, "uname", lambda: SimpleNamespace(release=release))
    monkeypatch.setattr(sandbox, "_threads_of", {user: 1000}.__getitem__)
    assert sandbox.processes(unsandboxed) == 24 + 1000 * others


@pytest.mark.parametrize("user, options, found", [
    (0, "--size --disable-userns", []), (1000, "--size", ["--unshare-user"]),
    (1000, "--size --disable-userns", ["--unshare-user", "--disable-userns"])])
def test_without_root_there_is_one_user_namespace_and_no_other(monkeypatch, user, options, found):
    monkeypatch.setattr(sandbox, "_options", lambda program: options)
    monkeypatch.setattr(sandbox.os, "geteuid", lambda: user)
    words = sandbox.command("bwrap", None)
    assert [word for word in words if word in ("--unshare-user", "--disable-userns")] == found


def test_an_environment_behind_a_link_is_there_by_both_names(monkeypatch, tmp_path):
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to("real")
    monkeypatch.setattr(sandbox.sys, "base_prefix", "/usr")
    monkeypatch.setattr(sandbox.sys, "prefix", str(tmp_path / "link"))
    real = os.path.realpath(tmp_path / "real")
    assert sandbox.python_folders() == [real, str(tmp_path / "link")]


def test_where_memory_runs_out_the_answer_ends_and_not_the_grader():
    done = subprocess.run(["cat", "/proc/self/oom_score_adj"], preexec_fn=sandbox._limit,
                          capture_output=True, text=True)
    assert done.stdout == "1000\n"


def test_threads_are_counted_not_processes():
    done = threading.Event()
    threads = [threading.Thread(target=done.wait) for _ in range(40)]
    for thread in threads:
        thread.start()
    assert sandbox._threads_of(os.geteuid()) > 40
    done.set()


def test_nothing_but_the_working_folder_can_be_written_to(monkeypatch):
    monkeypatch.setattr(sandbox, "_options", lambda program: "--size")
    words = sandbox.command("bwrap", None)
    assert words.index("--tmpfs") < words.index("/dev", words.index("--remount-ro"))
    assert [words[i + 1] for i, word in enumerate(words) if word == "--remount-ro"] == ["/dev", "/"]


# Marking

ITEM = Exercise("d99.a1", "f", list, seconds=1.0)
GROUPS = [Group("one", 3, "Mind the sign.", [Case("a", (1,), expect=2), Case("b", (2,), expect=4)]),
          Group("two", 2, "Refuse what is negative.", [Case("c", (-1,), raises=ValueError)])]


class Fake:
    """A sandbox that answers from a list and counts what it was asked."""

    def __init__(self, *ends):
        self.ends, self.asked = list(ends), 0

    def run(self, args, kwargs, seconds):
        self.asked += 1
        return self.ends.pop(0)


def value(x, **more):
    return {"end": "value", "value": x, "mutated": False, **more}


def error(*kinds, stage="call", text=""):
    return {"end": "error", "kinds": [*kinds, "Exception"], "stage": stage, "text": text}


NO = error("ValueError")
STUBBED = error("NotImplementedError", text="d99.a1")


@pytest.mark.parametrize("ends, status, points, asked", [
    ([value(2), value(4), NO], "ok", 5, 3),
    ([value(2), value(5), NO], "partial", 2, 3),
    ([value(2), value(4), error("KeyError")], "partial", 3, 3),
    ([value(2), value(4), error("MyError", "ValueError")], "ok", 5, 3),
    ([value(2), value(4), value(None)], "partial", 3, 3),
    ([value(2), value(4, mutated=True), NO], "partial", 2, 3),
    ([value(0), value(0), value(0)], "failed", 0, 3),
    ([error("KeyError")] * 3, "error:KeyError", 0, 3),
    ([error("KeyError"), error("TypeError"), value(0)], "failed", 0, 3),
    ([error("SyntaxError", stage="define")], "error:SyntaxError", 0, 1),
    ([error("ValueError", stage="define")], "error:ValueError", 0, 1),
    ([error("<b>=X!")] * 3, "error:bX", 0, 3),
    ([STUBBED] * 3, "not_attempted", 0, 3),
    ([value(2), STUBBED, NO], "partial", 2, 3),
    ([{"end": "timeout"}], "timeout", 0, 1),
    ([value(2), value(4), {"end": "timeout"}], "partial", 3, 3),
    ([{"end": "crash"}] * 3, "crash", 0, 3),
    ([{"end": "foreign"}, value(0), value(0)], "crash", 0, 3),
    ([value(2), value(4), {"end": "uses_reference", "names": ["f"]}], "uses_reference", 0, 3),
    ([{"end": "value", "value": np.array(2), "mutated": False}, value(4), NO], "partial", 2, 3),
])
def test_the_mark_of_a_code_answer(ends, status, points, asked):
    sandbox = Fake(*ends)
    marked = mark_code(ITEM, HandedIn(RIGHT), STUB, GROUPS, lambda: nullcontext(sandbox))
    assert (marked.status, marked.auto, marked.possible) == (status, points, 5)
    assert sandbox.asked == asked
    assert ("Mind the sign." in marked.messages) == (points in (0, 2) and status not in (
        "uses_reference", "not_attempted"))


def never():
    raise AssertionError("this needs no sandbox")


def test_nothing_runs_for_a_stub_or_a_missing_cell():
    stub = mark_code(ITEM, HandedIn(STUB + "  \n"), STUB, GROUPS, never)
    assert stub.status == "not_attempted"
    assert mark_code(ITEM, HandedIn(None), STUB, GROUPS, never).status == "missing_cell"


READING = Reading("d99.b1", ("one", "two", "three", "four"), auto=2)
TRUTH = {"one": 1, "two": 2, "three": 3, "four": "yes"}
ASKED = "<!-- ANSWER d99.b1 -->\nAnswer: {}\n\nEvidence: course_lib/sparse.py:1-2"


@pytest.fixture
def sealed_truth(monkeypatch):
    found = {part: sealed.seal("d99.b1", part, truth) for part, truth in TRUTH.items()}
    monkeypatch.setattr(sealed, "load", {"d99.b1": found}.__getitem__)


@pytest.mark.parametrize("answer, evidence, status, auto", [
    ("…", "d = {'one': ''}", "not_attempted", 0),
    ("…", "d = {'one': None, 'two': []}", "not_attempted", 0),
    ("The gate.", "d = {'one': ''}", "to_review", 0),
    ("…", "d = {'one': 2, 'two': 1}", "failed", 0),
    ("…", "d = {'one': 1, 'two': 1}", "failed", 0),
    ("…", "d = {'one': 1, 'two': 2}", "partial", 1),
    ("…", f"d = {TRUTH}", "partial", 2),
    ("Because.", f"d = {TRUTH}", "to_review", 2),
    ("Because.", "import os", "to_review", 0),
    ("…", "d = __import__('os').environ", "failed", 0),
])
def test_the_mark_of_a_reading(answer, evidence, status, auto, sealed_truth):
    handed = HandedIn(ASKED.format(answer), evidence=evidence)
    marked = mark_reading(READING, handed, "", 3)
    assert (marked.status, marked.auto, marked.possible) == (status, auto, 3)
    assert (marked.auto == 2) == (not marked.messages) or status == "not_attempted"


def test_a_reading_without_cells():
    assert mark_reading(READING, HandedIn(None), "", 3).status == "missing_cell"


@pytest.mark.parametrize("source, expected", {
    "x = {'a': 1}": {"a": 1}, "x = {'a': -1.5}": {"a": -1.5}, "x = {'a': open('f')}": None,
    "x = [1]": None, "": None, None: None, "x = {1: 2}": None, "x = {": None,
    "x = {'a': 1}\ny = {'b': 2}": {"b": 2},
}.items())
def test_evidence_is_a_literal(source, expected):
    assert evidence_of(source) == expected


@pytest.mark.usefixtures("hidden_half")
def test_a_defect_of_the_grader_is_said_in_one_row_only(monkeypatch, tmp_path):
    book = load_day(10).ours
    broken = submission_marks._mark

    def failing(day, item, *rest):
        return {}["no such"] if item.id == "d10.b2" else broken(day, item, *rest)

    monkeypatch.setattr(submission_marks, "_mark", failing)
    submission = Submission("ann", 10, "ann", json.dumps(book).encode())
    found = {m.item: m for m in submission_marks.marks_of(submission, tmp_path, unsandboxed=True)}
    assert (found["d10.b2"].status, found["d10.b2"].auto) == ("not_graded", 0)
    assert found["d10.b2"].messages == ("The grader failed on this answer (KeyError).",)
    assert found["d10.b1"].status == found["d10.a1"].status == "not_attempted"
    assert found["d10.a1"].flags == ("unsandboxed",) and found["d10.b1"].flags == ()
    for error in (OSError, MemoryError, CourseError):
        def full(*_, error=error):
            raise error

        monkeypatch.setattr(submission_marks, "_mark", full)
        with pytest.raises(error):
            submission_marks.marks_of(submission, tmp_path)


class Dying:
    """An executor whose process ends."""

    def submit(self, work, submission):
        future: Future = Future()
        future.set_exception(BrokenProcessPool())
        return future


@pytest.mark.usefixtures("hidden_half")
def test_a_grader_that_the_system_ended_is_said(tmp_path):
    found = Found([Submission("ann", 10, "ann", b"")], [])
    tasks = batch.tasks_of(found, tmp_path, True)
    with pytest.raises(CourseError, match="for want of memory.*fewer --jobs"):
        batch.grade(tasks, 1, True, executor=Dying())


# Writing down


def mark(student="ann", item="d10.a1", status="ok", auto=5, **more):
    return ItemMark(student, 10, item, item[4].upper(), status, auto, 5, more.get("messages", ()),
                    more.get("flags", ()), "ab")


def test_tables_are_sorted_and_harmless():
    marks = [mark("=2+2"), mark("bob", "d10.b1", "to_review", 2), mark("bob", "d10.a1")]
    human = {("bob", "d10.b1"): HumanMark(1.5, "good", "x")}
    text = tables.grades_csv(marks, human)
    assert text.startswith("\ufeff" + ",".join(tables.COLUMNS) + "\n'=2+2")
    rows = list(csv.DictReader(io.StringIO(text.removeprefix("\ufeff"))))
    assert [(r["student"], r["item"], r["manual"]) for r in rows] == [
        ("'=2+2", "d10.a1", ""), ("bob", "d10.a1", ""), ("bob", "d10.b1", "1.5")]
    total = list(csv.DictReader(io.StringIO(tables.totals_csv(marks, human)[1:])))
    assert total[1] == {"student": "bob", "day10": "8.5", "points": "8.5", "max": "10",
                        "to_review": "0"}
    assert tables.totals_csv(marks, {}).splitlines()[2] == "bob,7,7,10,0"


@given(st.text(st.characters()))
@example("\ud800\x1b[31m")
@example("＝1+1")
def test_no_cell_is_a_formula(cell):
    table = tables.table(("a",), [(cell, )])
    (line,) = csv.reader(io.StringIO(table[1:].partition("\n")[2], newline=""))
    assert line == [] or not line[0].startswith(("=", "+", "-", "@", "＝"))
    assert "\x1b" not in table.encode().decode()  # and there is nothing that UTF-8 has not


def test_feedback_escapes_what_others_wrote():
    marks = [mark("<b>&", status="error:Oops", auto=0, messages=("Mind [the] <sign>.",),
                  flags=("duplicate_cell",))]
    page, text = feedback.page(marks, {}), feedback.markdown(marks, {})
    assert "<b>" not in page and "&lt;sign&gt;" in page and "It raised Oops" in page
    assert "\\<b\\>" in text and "0 of 5 points" in text and "more than once" in text


@given(st.lists(st.text(max_size=90), unique=True, max_size=6))
@example(["𠀀" * 100])
def test_folder_names_differ_and_lead_nowhere(students):
    names = batch.folder_names(students)
    assert len({name.casefold() for name in names.values()}) == len(students)
    for name in names.values():
        assert name not in ("", ".", "..") and "/" not in name and "\0" not in name
        assert len(name.encode()) <= 255


def test_plain_names_stay():
    assert batch.folder_names(["ann", "王小明", "a b"]) == {
        "ann": "ann", "王小明": "王小明", "a b": "a b"}


def test_kept_marks_come_back_and_damage_is_no_mark(tmp_path):
    path = tmp_path / "x.json"
    path.write_text(json.dumps([mark(messages=("a",), flags=("b",)).as_json()]))
    assert batch.read_kept(path) == [mark(messages=("a",), flags=("b",))]
    for damage in ("", "[", "{}", "[]", "[1]", '[{"student": "a"}]', "null"):
        path.write_text(damage)
        assert not batch.read_kept(path)
