"""A folder of submissions to day 10, honest and hostile, made from the notebook as handed out.

SUBMISSIONS maps a file's name to the function that makes its bytes. ``grades.csv`` beside this file
is what the grader must make of them, without the last column: digests of the files.
"""

from __future__ import annotations

import ast
import copy
import io
import json
import re
import zipfile
from collections.abc import Callable
from pathlib import Path

import nbformat

from course_lib.classroom.grading.day import load_day
from course_lib.classroom.sealed import Lines

DAY = 10
NAME = "day10_sparse_attention.ipynb"
GOLDEN = Path(__file__).parent / "grades.csv"


def lasting(row: dict[str, str]) -> dict[str, str]:
    """A row of the table without what changes while what is graded does not: digests, and how many
    lines a cited file has."""
    kept = {name: value for name, value in row.items() if name != "sha256"}
    return kept | {"message": re.sub(r"has lines 1 to \d+", "has lines 1 to N", row["message"])}


def solution(name: str) -> str:
    """The source of one function of the day's solutions."""
    for node in ast.parse(load_day(DAY).solutions).body:
        if isinstance(node, ast.FunctionDef) and node.name == name:
            return ast.unparse(node)
    raise LookupError(name)


def notebook() -> nbformat.NotebookNode:
    """A copy of the notebook as handed out."""
    return copy.deepcopy(load_day(DAY).ours)


def cell(book: nbformat.NotebookNode, item: str, role: str = "answer") -> nbformat.NotebookNode:
    """The cell of an item by its metadata."""
    return next(c for c in book.cells if c.metadata.get("course", {}).get("id") == item
                and c.metadata["course"]["role"] == role)


def saved(book: nbformat.NotebookNode) -> bytes:
    """The notebook's file as JupyterLab saves it."""
    return (json.dumps(book, ensure_ascii=False, indent=1) + "\n").encode()


def answered(**sources: str) -> nbformat.NotebookNode:
    """The notebook with code in the answer cells a1, a2, a3; the marker stays."""
    book = notebook()
    for short, source in sources.items():
        cell(book, f"d10.{short}").source = f"# EXERCISE d10.{short}\n{source}"
    return book


A1, A2, A3 = "decode_cost", "select_blocks", "end_to_end_change"
HEAD = {"a1": "def decode_cost(n, k_blocks, head_dim, block_size=32, n_probe=8):\n",
        "a2": "def select_blocks(probe, importance, k_blocks):\n",
        "a3": "def end_to_end_change(profile, cost):\n"}


def all_right() -> nbformat.NotebookNode:
    """Every code answer right, every reading part filled in rightly, every text written."""
    book = answered(a1=solution(A1), a2=solution(A2), a3=solution(A3))
    from course_lib.classroom.grading.day import TESTS, load_module

    readings = load_module(TESTS / "grading" / "day10.py").READINGS
    for item, parts in readings.items():
        name = cell(book, item, "evidence").source.split("\n")[1].split("=")[0].strip()
        right = {part: written(truth) for part, truth in parts.items()}
        cell(book, item, "evidence").source = f"# EVIDENCE {item}\n{name} = {right!r}"
        cell(book, item).source = (f"<!-- ANSWER {item} -->\nAnswer: what the lines say.\n\n"
                                   "Evidence: course_lib/sparse.py:1-2")
    return book


def written(truth):
    """What a learner writes for a truth."""
    if isinstance(truth, Lines):
        first, last = truth.find()
        return f"{truth.path}:{first}-{last}"
    if isinstance(truth, list):
        return written(truth[0])
    return [written(t) for t in truth] if isinstance(truth, tuple) else truth


def body(short: str, *lines: str) -> Callable[[], bytes]:
    """A submission whose one answer has these lines as its body; the others are right."""
    def make() -> bytes:
        sources = {"a1": solution(A1), "a2": solution(A2), "a3": solution(A3)}
        sources[short] = HEAD[short] + "".join(f"    {line}\n" for line in lines)
        return saved(answered(**sources))

    return make


def before(short: str, *lines: str) -> Callable[[], bytes]:
    """A submission that does something and then answers rightly."""
    def make() -> bytes:
        right = solution({"a1": A1, "a2": A2}[short]).splitlines()[1:]
        return body(short, *lines, *(line[4:] for line in right))()

    return make


def cell_text(short: str, source: str) -> Callable[[], bytes]:
    """A submission whose one answer cell is this text; the others stay stubs."""
    return lambda: saved(answered(**{short: source}))


def changed(change: Callable[[nbformat.NotebookNode], None]) -> Callable[[], bytes]:
    """The all-right submission after a change."""
    def make() -> bytes:
        book = all_right()
        change(book)
        return saved(book)

    return make


def lost_metadata(book):
    for each in book.cells:
        each.metadata = {}
        each.pop("id", None)
    book.nbformat_minor = 4


def other_editor(book):
    for each in book.cells:
        each.metadata = {"vscode": {"languageId": "python"}}
        each.source = each.source.splitlines(keepends=True)


def copied_twice(book):
    """The answer copied below itself; the copy was filled in, the first put back to its stub."""
    place = book.cells.index(cell(book, "d10.a1"))
    book.cells.insert(place + 1, copy.deepcopy(book.cells[place]))
    book.cells[place].source = load_day(DAY).stub("d10.a1")


def copied_as_scratch(book):
    """A copy of the answer cell that holds only a trial call: the definition above it counts."""
    place = book.cells.index(cell(book, "d10.a1"))
    scratch = copy.deepcopy(book.cells[place])
    scratch.source = "# EXERCISE d10.a1\nprint(decode_cost(64, 1, 1))"
    book.cells.insert(place + 1, scratch)


def removed(book):
    for item in ("d10.a2", "d10.b2"):
        book.cells = [c for c in book.cells if c.metadata.get("course", {}).get("id") != item]


def changed_check(book):
    cell(book, "d10.a1", "check").source = "print('[ok] d10.a1 5/5 public checks')"


def helper_above(book):
    place = book.cells.index(cell(book, "d10.a3"))
    book.cells.insert(place, nbformat.v4.new_code_cell("def share(a, b):\n    return 100 * a / b"))
    answer = cell(book, "d10.a3")
    answer.source = answer.source.replace("100 * (sparse - attention) / total",
                                          "share(sparse - attention, total)")


def huge_output(book):
    cell(book, "d10.a1").outputs = [nbformat.v4.new_output("stream", text="x" * 5_000_000)]


def evidence_is_code(book):
    cell(book, "d10.b1", "evidence").source = "# EVIDENCE d10.b1\nimport os\nd10_b1 = os.environ"


def evidence_wrong(book):
    source = cell(book, "d10.b1", "evidence").source
    cell(book, "d10.b1", "evidence").source = source.replace("sparse.py:", "sparse.py:1", 1)


def evidence_not_text(book):
    name = cell(book, "d10.b1", "evidence").source.split("\n")[1].split("=")[0].strip()
    cell(book, "d10.b1", "evidence").source = (
        f"# EVIDENCE d10.b1\n{name} = {{'decode_gate': '\\ud800\\x1b[2J:1-2'}}")


def empty_lines(book):
    cell(book, "d10.b2").source += "\n" * 10**5 + "."


def forged(report: str) -> Callable[[], bytes]:
    """A submission that writes a report of its own where its result goes out."""
    return body("a1", "import os", "from course_lib.classroom.grading.wire import encode",
                f"report = encode({report})", "for number in range(3, 64):",
                "    try: os.write(number, len(report).to_bytes(8, 'little') + report)",
                "    except OSError: pass", "os._exit(0)")


def windows_lines() -> bytes:
    return b"\xef\xbb\xbf" + saved(all_right()).replace(b"\n", b"\r\n")


def zipped(*names: str) -> Callable[[], bytes]:
    def make() -> bytes:
        buffer = io.BytesIO()
        with zipfile.ZipFile(buffer, "w") as file:
            for name in names:
                info = zipfile.ZipInfo(name, (2026, 1, 1, 0, 0, 0))
                file.writestr(info, saved(all_right()))
        return buffer.getvalue()

    return make


ESCAPE = "open('/work/../usr/share/stolen', 'w').write('x')"
SUBMISSIONS: dict[str, Callable[[], bytes]] = {
    f"all-right/{NAME}": lambda: saved(all_right()),
    f"unsolved/{NAME}": lambda: saved(notebook()),
    "flat_student_day10.ipynb": lambda: saved(all_right()),
    f"renamed/{NAME.replace('.ipynb', ' (1) copy.ipynb')}": lambda: saved(all_right()),
    f"王小明/{NAME}": lambda: saved(all_right()),
    "李 雷_day10_sparse_attention.ipynb": lambda: saved(all_right()),
    "=cmd/day10.ipynb": lambda: saved(all_right()),
    f"lost-metadata/{NAME}": changed(lost_metadata),
    f"other-editor/{NAME}": changed(other_editor),
    f"windows/{NAME}": windows_lines,
    f"copied-twice/{NAME}": changed(copied_twice),
    f"copied-scratch/{NAME}": changed(copied_as_scratch),
    f"removed-cells/{NAME}": changed(removed),
    f"changed-check/{NAME}": changed(changed_check),
    f"helper-above/{NAME}": changed(helper_above),
    f"huge-output/{NAME}": changed(huge_output),
    f"evidence-code/{NAME}": changed(evidence_is_code),
    f"evidence-wrong/{NAME}": changed(evidence_wrong),
    "zipped.zip": zipped(f"hand-in/{NAME}"),
    "class.zip": zipped(f"zoe/{NAME}", "yan_day10.ipynb"),
    f"two-files/{NAME}": lambda: saved(notebook()),
    "two-files/day10_z.ipynb": lambda: saved(all_right()),
    "broken/day10.ipynb": lambda: b'{"cells": [',
    "empty/day10.ipynb": lambda: b"",
    "not-a-notebook/day10.ipynb": lambda: b"[1, 2]",
    "not-text/day10.ipynb": lambda: b"\xff\xfe\x00\x01" * 50,
    "deep/day10.ipynb": lambda: b'{"cells": ' + b"[" * 100_000,
    f"syntax/{NAME}": cell_text("a1", HEAD["a1"] + "    return (\n"),
    f"renamed-function/{NAME}": cell_text("a1", "def cost(n):\n    return {}"),
    f"constant/{NAME}": body("a1", "return {'dense': 1048576, 'probe': 131072, 'attend': 262144}"),
    f"wrong-ties/{NAME}": body(
        "a2", "import numpy as np", "if k_blocks < 1: raise ValueError",
        "return [(int(b), 'P') for b in np.argsort(-np.asarray(probe))[:k_blocks]]"),
    f"partial/{NAME}": body("a1", "return {'dense': 2 * n * head_dim, 'probe': 0, "
                            "'attend': 2 * n * head_dim}"),
    f"raises/{NAME}": body("a3", "raise KeyError('attention')"),
    f"none/{NAME}": body("a1", "return None"),
    f"loops/{NAME}": body("a1", "while True: pass"),
    f"loops-deaf/{NAME}": body("a1", "while True:", "    try:", "        while True: pass",
                               "    except BaseException: pass"),
    f"sleeps/{NAME}": body("a3", "import time; time.sleep(1000)"),
    f"loop-in-cell/{NAME}": cell_text("a1", "while True: pass"),
    f"fork-bomb/{NAME}": body("a1", "import os", "while True:", "    try: os.fork()",
                              "    except OSError: pass"),
    f"leaves-a-process/{NAME}": before("a1", "import os, time",
                                       "if os.fork() == 0: time.sleep(600)"),
    # bytes of zeros are reserved, not written: the limit is met before the time is up
    f"memory-bomb/{NAME}": body("a1", "held = []", "while True: held.append(bytes(10**8))"),
    f"huge-result/{NAME}": body("a1", "import numpy as np; return np.zeros(10**7)"),
    f"exits/{NAME}": body("a1", "import os; os._exit(0)"),
    f"system-exit/{NAME}": body("a1", "raise SystemExit(0)"),
    f"segfault/{NAME}": body("a1", "import ctypes; ctypes.string_at(0)"),
    f"always-equal/{NAME}": body(
        "a1", "class Yes(dict):", "    __eq__ = lambda self, other: True", "    __hash__ = None",
        "return Yes()"),
    f"lying-number/{NAME}": body(
        "a3", "class Lie(float):", "    __eq__ = lambda a, b: True",
        "    __sub__ = __rsub__ = __abs__ = lambda *a: 0.0", "return {'change': Lie(), "
        "'ceiling': Lie()}"),
    f"object/{NAME}": body("a1", "return object()"),
    f"patches-numpy/{NAME}": body(
        "a2", "import numpy as np", "np.array_equal = np.allclose = lambda *a, **k: True",
        "np.any = lambda *a, **k: False", "return [(0, 'I')]"),
    f"patches-grader/{NAME}": body(
        "a1", "import course_lib.classroom.running as r, course_lib.classroom.values as v",
        "v.difference = r.difference = r.judge = lambda *a, **k: None", "return {}"),
    f"calls-reference/{NAME}": body(
        "a2", "import course_lib.sparse as s", "import numpy as np",
        "got = s.select_from_scores(np.asarray(probe), importance, k_blocks)",
        "return [(int(b), 'P') for b in got.order]"),
    f"hides-reference/{NAME}": before(
        "a2", "import course_lib.sparse as s", "try: s.select_from_scores(probe, None, 2)",
        "except BaseException: pass"),
    f"reads-tests/{NAME}": body(
        "a1", "import glob", "found = glob.glob('/course/*') + glob.glob('/*/tests')",
        "assert found == ['/course/course_lib'], 'something is here that must not be'",
        "return {}"),
    f"reads-solutions/{NAME}": body(
        "a1", "import tests.solutions.day10 as s", "return s.decode_cost(n, k_blocks, head_dim, "
        "block_size, n_probe)"),
    f"writes-outside/{NAME}": body("a1", ESCAPE, "return {}"),
    f"network/{NAME}": body("a1", "import socket", "s = socket.socket()", "s.settimeout(2)",
                            "s.connect(('127.0.0.1', 22))", "return {}"),
    f"kills-parent/{NAME}": body("a1", "import os, signal", "os.kill(os.getppid(), signal.SIGKILL)",
                                 "return {}"),
    f"stops-parent/{NAME}": body("a1", "import os, signal", "os.kill(os.getppid(), signal.SIGSTOP)",
                                 "return {}"),
    f"forges-a-status/{NAME}": forged("{'end': ['value']}"),
    f"forges-an-error/{NAME}": forged("{'end': 'error', 'kinds': 5}"),
    f"no-bytes/{NAME}": body("a2", "import numpy as np", "return np.zeros((10**12, 0))"),
    f"evidence-not-text/{NAME}": changed(evidence_not_text),
    f"empty-lines/{NAME}": changed(empty_lines),
    f"writes-beside/{NAME}": body("a1", "open('/dev/shm/x', 'a').write('x')", "return {}"),
    f"changes-arguments/{NAME}": body("a2", "probe[:] = 0", "return []"),
    f"prints/{NAME}": before("a1", "print('x' * 10**7)"),
    f"stateful/{NAME}": body(
        "a1", "open('/work/seen', 'a').write('x')",
        "return {'dense': len(open('/work/seen').read()), 'probe': 0, 'attend': 0}"),
    "notes.txt": lambda: b"hello",
    "day10.ipynb": lambda: saved(notebook()),
}


def write_folder(folder: Path) -> None:
    """Write every submission."""
    for name, make in SUBMISSIONS.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(make())
