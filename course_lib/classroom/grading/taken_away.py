"""The course library without the functions that an exercise asks for."""

from __future__ import annotations

import ast
from pathlib import Path

from course_lib.errors import CourseError
from course_lib.paths import ROOT

NOTE = "course_lib.classroom.grading.reached"


def library_files(root: Path = ROOT) -> list[Path]:
    """The library's Python files; not the copies of them that JupyterLab keeps in hidden folders
    when somebody opens one."""
    return [path for path in sorted((root / "course_lib").rglob("*.py"))
            if not any(part.startswith(".") for part in path.relative_to(root).parts)]


def write_library(target: Path, replaced: tuple[str, ...], root: Path = ROOT) -> None:
    """Write a copy of course_lib's Python files into `target` in which the bodies of the functions
    `replaced` ("course_lib.sparse.select_blocks") only note that they were called.

    Their callers fail with them. Docstrings go too: some state the algorithm. CourseError for a
    name that is no function of the library.
    """
    by_module: dict[str, list[list[str]]] = {}
    for name in replaced:
        module, inner = _split(name, root)
        by_module.setdefault(module, []).append(inner)
    for source in library_files(root):
        path = source.relative_to(root)
        text = source.read_text(encoding="utf-8")
        inner_names = by_module.pop(path.with_suffix("").as_posix().replace("/", "."), [])
        if inner_names:
            text = without(text, inner_names, path.as_posix())
        (target / path).parent.mkdir(parents=True, exist_ok=True)
        (target / path).write_text(text, encoding="utf-8")
    if by_module:
        raise CourseError(f"{next(iter(by_module))} is no module of the course.")


def _split(name: str, root: Path) -> tuple[str, list[str]]:
    """A dotted name as its module and what is inside."""
    parts = name.split(".")
    for cut in range(len(parts) - 1, 0, -1):
        if root.joinpath(*parts[:cut]).with_suffix(".py").is_file():
            return ".".join(parts[:cut]), parts[cut:]
    raise CourseError(f"{name} is not in a module of the course.")


def without(text: str, names: list[list[str]], where: str) -> str:
    """Source text in which the functions at these paths (["KVCache", "append"]) only raise."""
    tree = ast.parse(text)
    for path in names:
        scope: ast.AST = tree
        for name in path:
            kinds = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
            found = [node for node in getattr(scope, "body", [])
                     if isinstance(node, kinds) and node.name == name]
            if len(found) != 1:
                raise CourseError(f"{where} has no function {'.'.join(path)} (or several).")
            scope = found[0]
        if not isinstance(scope, ast.FunctionDef):
            raise CourseError(f"{where}: {'.'.join(path)} is not a function.")
        scope.body = ast.parse(f"import {NOTE}\n{NOTE}.note({'.'.join(path)!r})").body
    return ast.unparse(tree) + "\n"
