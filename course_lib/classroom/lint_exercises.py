"""Rules about exercise cells: what the checks, the grader and a learner rely on."""

from __future__ import annotations

import ast
import re
from collections import defaultdict

from nbformat import NotebookNode

from course_lib.classroom.exercises import ID, Exercise, Item, day_items
from course_lib.classroom.lint_problem import Problem
from course_lib.classroom.source import Day, cell_line
from course_lib.errors import CourseError
from course_lib.paths import relative

ROLES = {"card": 0, "given": 1, "answer": 2, "evidence": 3, "check": 4}
MARKERS = {("A", "answer"): "# EXERCISE {}", ("B", "answer"): "<!-- ANSWER {} -->",
           ("B", "evidence"): "# EVIDENCE {}"}
MARKER = re.compile(r"^\s*(?:# (EXERCISE|EVIDENCE)|<!-- (ANSWER)) (d\d\d\.\w+)", re.MULTILINE)
UNANSWERED = "<!-- ANSWER {} -->\nAnswer: …\n\nEvidence: path:first-last"
NUMBERS = ("points", "minutes", "difficulty")


class _Cells:
    """The cells of one item by role, with what is wrong collected on the way."""

    def __init__(self) -> None:
        self.by_role: dict[str, list[tuple[int, NotebookNode]]] = defaultdict(list)
        self.order: list[str] = []

    def add(self, role: str, index: int, cell: NotebookNode) -> None:
        self.by_role[role].append((index, cell))
        self.order.append(role)

    def one(self, role: str) -> NotebookNode | None:
        cells = self.by_role.get(role, [])
        return cells[0][1] if len(cells) == 1 else None


def exercise_problems(notebook: NotebookNode, day: Day) -> list[Problem]:
    """Return the problems of a day's exercise cells, compared with its registered items."""
    found: list[Problem] = []
    items: dict[str, _Cells] = defaultdict(_Cells)
    for index, cell in enumerate(notebook.cells):
        where = f"{relative(day.source)}:{cell_line(day, index)}"
        found += [Problem("exercise", where, m) for m in _metadata_problems(cell, day.number)]
        course = cell.metadata.get("course", {})
        if isinstance(course.get("id"), str) and course.get("role") in ROLES:
            items[course["id"]].add(course["role"], index, cell)
    try:
        registered = {item.id: item for item in day_items(day.number)}
    except CourseError as error:
        return [*found, Problem("exercise", relative(day.source), str(error))]
    for item_id in sorted(items.keys() | registered.keys()):
        where = f"{relative(day.source)}, {item_id}"
        if item_id not in registered:
            found.append(Problem("exercise", where, "is not in the day's exercises module"))
        elif item_id not in items:
            found.append(Problem("exercise", where, "is in the exercises module, not here"))
        else:
            messages = _item_problems(registered[item_id], items[item_id])
            found += [Problem("exercise", where, message) for message in messages]
    found += _section_problems(notebook, day, set(items))
    found += _direct_uses(notebook, day, registered)
    return found


def _metadata_problems(cell: NotebookNode, day: int) -> list[str]:
    course = cell.metadata.get("course")
    marked = [(m[1] or m[2], m[3]) for m in MARKER.finditer(cell.source)]
    if course is None:
        return [f"has the marker of {i} but no course metadata" for _, i in marked]
    match = ID.fullmatch(str(course.get("id")))
    if match is None or int(match[1]) != day:
        return [f"course id {course.get('id')!r}; write d{day:02d}.a1 … d{day:02d}.b9"]
    kind, role = course.get("kind"), course.get("role")
    if kind != match[2].upper() or role not in ROLES:
        return [f"kind {kind!r} or role {role!r} is wrong for {course['id']}"]
    wants_markdown = role == "card" or (kind, role) == ("B", "answer")
    if (cell.cell_type == "markdown") != wants_markdown:
        return [f"the {role} of {course['id']} must be {'markdown' if wants_markdown else 'code'}"]
    found = []
    marker = MARKERS.get((kind, role))
    if marker and cell.source.split("\n", 1)[0].strip() != marker.format(course["id"]):
        found.append(f"the {role} must begin with the line {marker.format(course['id'])}")
    if any(i != course["id"] for _, i in marked):
        found.append(f"holds the marker of another exercise than {course['id']}")
    extra = set(course) - {"id", "kind", "role"} - (set(NUMBERS) if role == "answer" else set())
    if extra:
        found.append(f"unknown course metadata in a {role} cell: {', '.join(sorted(extra))}")
    if role == "answer":
        for name in NUMBERS:
            value = course.get(name)
            if type(value) is not int or value < 1 or (name == "difficulty" and value > 3):
                found.append(f"{name} must be a whole number"
                             + (" from 1 to 3" if name == "difficulty" else ""))
    return found


def _item_problems(item: Item, cells: _Cells) -> list[str]:
    found = []
    parts = () if isinstance(item, Exercise) else item.parts
    needed = {"card", "answer"}
    needed |= {"check"} if isinstance(item, Exercise) or parts else set()
    needed |= {"evidence"} if parts else set()
    for role in sorted(needed | set(cells.by_role) - {"given"}):
        count = len(cells.by_role.get(role, []))
        if count != (1 if role in needed else 0):
            found.append(f"has {count} {role} cells")
    if cells.order != sorted(cells.order, key=ROLES.__getitem__):
        found.append(f"its cells come in the order {', '.join(cells.order)}")
    answer, card = cells.one("answer"), cells.one("card")
    if answer is not None and card is not None:
        found += _card_problems(card.source, answer.metadata.course)
    checked = None
    if isinstance(item, Exercise):
        checked = item.function
        found += _stub_problems(item, answer.source) if answer is not None else []
    elif answer is not None and answer.source.strip() != UNANSWERED.format(item.id):
        found.append("the answer cell must hold only: " + UNANSWERED.format(item.id)
                     .replace("\n", " / "))
    evidence = cells.one("evidence")
    if evidence is not None:
        checked, messages = _evidence(evidence.source, parts)
        found += messages
    check = cells.one("check")
    if check is not None and not _is_check(check.source, item.id, checked):
        found.append(f'its check cell must hold only check("{item.id}", {checked})')
    return found


def _card_problems(card: str, course: dict) -> list[str]:
    line = (f"{course.get('minutes')} minutes · difficulty {course.get('difficulty')}/3 · "
            f"{course.get('points')} point")
    found = [] if line in card else [f"its card must say '{line}…', as the answer's metadata"]
    if not re.search(r"^### ", card, re.MULTILINE):
        found.append("its card needs a ### heading")
    return found


def _parse(source: str) -> list[ast.stmt]:
    try:
        return ast.parse(source).body
    except SyntaxError:
        return []


def _stub_problems(item: Exercise, source: str) -> list[str]:
    body = _parse(source)
    if len(body) != 1 or not isinstance(body[0], ast.FunctionDef):
        return [f"the answer cell must hold only the function {item.function}"]
    function = body[0]
    found = []
    if function.name != item.function:
        found.append(f"the stub defines {function.name}, its check names {item.function}")
    if ">>> " not in (ast.get_docstring(function) or ""):
        found.append("the stub's docstring needs one worked example (>>>)")
    rest = [ast.unparse(statement) for statement in function.body[1:]]
    if rest != [f"raise NotImplementedError({item.id!r})"]:
        found.append(f'after its docstring the stub holds only NotImplementedError("{item.id}")')
    return found


def _evidence(source: str, parts: tuple[str, ...]) -> tuple[str | None, list[str]]:
    body = _parse(source)
    wrong = ["the evidence cell must hold only name = {part: empty, …}"]
    if len(body) != 1 or not isinstance(body[0], ast.Assign) or len(body[0].targets) != 1:
        return None, wrong
    target = body[0].targets[0]
    try:
        value = ast.literal_eval(body[0].value)
    except ValueError:
        return None, wrong
    if not isinstance(target, ast.Name) or not isinstance(value, dict):
        return None, wrong
    found = []
    if tuple(value) != parts:
        found.append(f"its evidence has the parts {tuple(value)}, its module {parts}")
    if any(v not in ("", None, []) for v in value.values()):
        found.append("its evidence is filled in; ship it empty")
    return target.id, found


def _is_check(source: str, item_id: str, name: str | None) -> bool:
    body = _parse(source)
    return len(body) == 1 and ast.unparse(body[0]) == f"check({item_id!r}, {name})"


def _section_problems(notebook: NotebookNode, day: Day, items: set[str]) -> list[Problem]:
    """Every section N-k has one A and one B, placed inside it."""
    section, found = None, []
    placed: set[str] = set()
    sections: list[str] = []
    for cell in notebook.cells:
        if cell.cell_type == "markdown":
            for match in re.finditer(r"^## (?:(\d+)-(\d)\b)?", cell.source, re.MULTILINE):
                section = match[2] if match[1] == str(day.number) else None
                sections += [section] if section else []
        course = cell.metadata.get("course", {})
        if course.get("role") == "answer" and str(course.get("id"))[-1] == section:
            placed.add(course["id"])
    wanted = {f"d{day.number:02d}.{kind}{s}" for s in sections for kind in "ab"}
    for item_id in sorted((wanted | items) - placed):
        place = f"{relative(day.source)}, {item_id}"
        found.append(Problem("section", place, f"belongs in a section ## {day.number}-"
                             f"{item_id[-1]}; every section has one A and one B"))
    return found


def _direct_uses(notebook: NotebookNode, day: Day, items: dict[str, Item]) -> list[Problem]:
    """The learner's functions are only checked and passed to solved_or."""
    functions = {item.function for item in items.values() if isinstance(item, Exercise)}
    found = []
    for index, cell in enumerate(notebook.cells):
        if cell.cell_type != "code":
            continue
        allowed: set[int] = set()
        nodes = [node for statement in _parse(cell.source) for node in ast.walk(statement)]
        for node in nodes:
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
                if node.func.id in ("check", "solved_or"):
                    allowed |= {id(argument) for argument in node.args}
        for node in nodes:
            if not isinstance(node, ast.Name) or not isinstance(node.ctx, ast.Load):
                continue
            if node.id in functions and id(node) not in allowed:
                where = f"{relative(day.source)}:{cell_line(day, index)}"
                found.append(Problem("solved_or", where, f"use solved_or({node.id}, reference), so "
                                     "that the notebook runs unsolved"))
    return found
