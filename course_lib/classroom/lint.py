"""The lint of the notebooks: everything about a lesson that a rule can see without running it.

`lint_day` is the whole of it for one day; the rules about code and prose are here, those about
stored outputs in `lint_outputs`, those about exercise cells in `lint_exercises`.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import unquote

from nbformat import NotebookNode

from course_lib.classroom import build
from course_lib.classroom.lint_exercises import exercise_problems
from course_lib.classroom.lint_outputs import output_problems
from course_lib.classroom.lint_problem import ABSOLUTE, Problem
from course_lib.classroom.source import IGNORE_OUTPUT, Day, cell_line, find_days, parse
from course_lib.paths import NOTEBOOKS, ROOT, relative

MAX_CELL_LINES, MAX_CODE_CELLS, MAX_BYTES = 25, 50, 400_000
NETWORK = {"requests", "httpx", "aiohttp", "urllib3", "huggingface_hub", "ftplib"}
NETWORK_DOTTED = {"urllib.request", "http.client"}
UNTESTABLE = {
    "interact": "use an Explorer", "interactive": "use an Explorer",
    "interact_manual": "use an Explorer", "interactive_output": "use an Explorer",
    "Output": "return what is to be shown", "clear_output": "print once",
    "update_display": "display once",
}


def lint_all(folder: Path = NOTEBOOKS) -> list[Problem]:
    """Return the problems of every day and of stray notebooks; an empty list is a pass."""
    problems = [p for day in find_days(folder=folder) for p in lint_day(day)]
    return problems + stray_notebooks(folder)


def lint_day(day: Day) -> list[Problem]:
    """Return the problems of one day's source and stored notebook."""
    source = parse(day)
    problems = [
        *cell_problems(source, day),
        *prose_problems(source, day),
        *exercise_problems(source, day),
    ]
    stored = build.load(day.notebook)
    if stored is None:
        place = relative(day.notebook)
        return [*problems, Problem("notebook", place, f"run ./course build {day.number}")]
    if day.notebook.stat().st_size >= MAX_BYTES:
        problems.append(Problem("size", relative(day.notebook), f"{MAX_BYTES // 1000} kB or more"))
    return [*problems, *output_problems(stored, relative(day.notebook))]


def stray_notebooks(folder: Path = NOTEBOOKS) -> list[Problem]:
    """Return a problem for every .ipynb of the course that no source builds."""
    built = {day.notebook.resolve() for day in find_days(folder=folder)}
    root = ROOT if folder == NOTEBOOKS else folder
    skipped = {"work", "build", "dist", "__pycache__"}
    found = []
    for path in _files(root, skipped):
        if path.suffix == ".ipynb" and path.resolve() not in built:
            found.append(Problem("stray", relative(path), "no source builds it; delete it, or add "
                                 "its source to notebooks/src"))
    return found


def _files(folder: Path, skipped: set[str]) -> Iterator[Path]:
    for path in sorted(folder.iterdir()):
        if path.is_dir() and not path.is_symlink():
            if path.name not in skipped and not path.name.startswith("."):
                yield from _files(path, skipped)
        elif path.is_file():
            yield path


def cell_problems(notebook: NotebookNode, day: Day) -> list[Problem]:
    """Return the problems of a day's code cells."""
    found: list[Problem] = []
    number = 0
    for index, cell in enumerate(notebook.cells):
        where = f"{relative(day.source)}:{cell_line(day, index)}"
        match = ABSOLUTE.search(cell.source)
        if match:
            found.append(Problem("path", where, f"absolute path {match[0]}…; use course_lib.paths"))
        if cell.cell_type != "code":
            continue
        number += 1
        tags = cell.metadata.get("tags", [])
        if number == 1 and IGNORE_OUTPUT not in tags:
            found.append(Problem("first", where, f"the first code cell prints the backend; tag it "
                                 f"{IGNORE_OUTPUT}"))
        found += [Problem(rule, where, text) for rule, text in _code_problems(cell.source, tags)]
    if number > MAX_CODE_CELLS:
        found.append(Problem("cells", relative(day.source), f"{number} code cells; at most "
                             f"{MAX_CODE_CELLS}"))
    return found


def _code_problems(source: str, tags: list[str]) -> Iterator[tuple[str, str]]:
    lines = source.splitlines()
    if len(lines) > MAX_CELL_LINES:
        yield "lines", f"{len(lines)} lines in a code cell; at most {MAX_CELL_LINES}"
    if source.rstrip().endswith(";"):
        yield "semicolon", "a trailing ; hides the output and breaks its comparison"
    python = []
    for line in lines:
        text = line.strip()
        if text.startswith("!") or re.match(r"%+(sx|system|bash|sh|pip|conda)\b", text):
            yield "shell", "no shell commands or installation in a lesson"
        elif re.match(r"%{1,2}[a-z]", text):
            if IGNORE_OUTPUT not in tags:
                yield "magic", f"tag a cell with {text.split()[0]} as {IGNORE_OUTPUT}"
        else:
            python.append(line)
            continue
        python.append(line[: len(line) - len(line.lstrip())] + "pass")
    try:
        tree = ast.parse("\n".join(python))
    except SyntaxError as error:
        yield "syntax", f"does not parse: {error.msg}"
        return
    for node in ast.walk(tree):
        yield from _node_problems(node)


def _node_problems(node: ast.AST) -> Iterator[tuple[str, str]]:
    names: list[str] = []
    if isinstance(node, ast.Import):
        names = [alias.name for alias in node.names]
    elif isinstance(node, ast.ImportFrom) and node.module:
        names = [node.module, *(f"{node.module}.{alias.name}" for alias in node.names)]
        if any(alias.name == "*" for alias in node.names):
            yield "star", "import modules or names, not *"
    for name in names:
        if name.split(".")[0] in NETWORK or name in NETWORK_DOTTED:
            yield "network", f"no network in a lesson ({name})"
    if isinstance(node, (ast.Name, ast.Attribute, ast.alias)):
        fields = {ast.Name: "id", ast.Attribute: "attr", ast.alias: "name"}
        name = getattr(node, fields[type(node)])
        if name in UNTESTABLE:
            yield "widget", f"{name} cannot be compared by nbval; {UNTESTABLE[name]}"
    if isinstance(node, ast.keyword) and node.arg == "display_id":
        yield "widget", "display_id updates cannot be compared by nbval; display once"


def prose_problems(notebook: NotebookNode, day: Day) -> list[Problem]:
    """Return the problems of a day's headings, images and links."""
    found: list[Problem] = []
    level = 0
    for index, cell in enumerate(notebook.cells):
        where = f"{relative(day.source)}:{cell_line(day, index)}"
        if index == 0 and not _is_title(cell, day.number):
            title = f"# Day {day.number}/30 · 中文 English"
            found.append(Problem("title", where, f"begin with '{title}'"))
        if cell.cell_type != "markdown":
            continue
        prose = _without_code(cell.source)
        for match in re.finditer(r"^(#{1,6}) ", prose, re.MULTILINE):
            depth = len(match[1])
            if depth > level + 1 or (depth == 1 and level > 0):
                found.append(Problem("headings", where, f"a level {depth} heading after level "
                                     f"{level}; one # at the top, then no level skipped"))
            level = depth
        for bang, text, target in re.findall(r"(!?)\[([^\]]*)\]\(([^)\s]+)[^)]*\)", prose):
            if bang and not text.strip():
                found.append(Problem("alt", where, f"the image {target} needs an alt text"))
            found += _link_problems(target, where, day, bool(bang))
        for tag in re.findall(r"<img\b[^>]*>", prose):
            if not re.search(r"\balt\s*=\s*[\"'][^\"']+", tag):
                found.append(Problem("alt", where, "an <img> needs an alt text"))
            for target in re.findall(r"\bsrc\s*=\s*[\"']([^\"']+)", tag):
                found += _link_problems(target, where, day, True)
    return found


def _is_title(cell: NotebookNode, number: int) -> bool:
    first = cell.source.split("\n", 1)[0]
    return bool(
        cell.cell_type == "markdown"
        and re.match(rf"# Day {number}/30 · \S", first)
        and re.search(r"[\u4e00-\u9fff]", first)
    )


def _without_code(text: str) -> str:
    text = re.sub(r"^(```|~~~).*?^\1", "", text, flags=re.MULTILINE | re.DOTALL)
    return re.sub(r"`[^`\n]*`", "``", text)


def _link_problems(target: str, where: str, day: Day, image: bool) -> list[Problem]:
    if re.match(r"https?:", target):
        if image:
            return [Problem("network", where, f"the image {target} is not in the course")]
        return []
    if target.startswith(("#", "mailto:")):
        return []
    path = unquote(target.split("#")[0])
    if re.match(r"[a-z]+:|/", path) or not (day.notebook.parent / path).exists():
        return [Problem("link", where, f"the link {target} leads nowhere")]
    return []
