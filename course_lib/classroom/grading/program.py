"""The program that is run for one answer: our cells around the student's."""

from __future__ import annotations

import ast
from collections.abc import Sequence

from nbformat import NotebookNode

from course_lib.classroom.exercises import Exercise, Item
from course_lib.classroom.grading.handed_in import HandedIn, defined, parsed


def program_of(item: Exercise, handed: HandedIn, ours: NotebookNode, items: Sequence[Item],
               solutions: str) -> list[str]:
    """The cells to run, in order: what the answer needs of the day's imports, our given cells of
    this item, reference answers of the day's other items that the answer names, the student's
    helpers, the answer.

    An item is graded alone: a wrong answer to another one costs nothing here.
    """
    assert handed.answer is not None
    own = [*handed.helpers, handed.answer]
    given = [cell.source for cell in ours.cells
             if cell.metadata.get("course", {}).get("id") == item.id
             and cell.metadata["course"].get("role") == "given"]
    others = {other.function for other in items
              if isinstance(other, Exercise) and other.id != item.id}
    made = set().union(*(defined(source) for source in own))
    wanted = (others & set().union(*(_names(source) for source in own))) - made
    stand_ins = _functions(solutions, wanted, without=item.function) if wanted else []
    needed = set().union(*(_names(source) for source in (*given, *stand_ins, *own)))
    return [imports_of(ours, needed), *given, *stand_ins, *own]


def imports_of(notebook: NotebookNode, needed: set[str]) -> str:
    """The imports of all code cells that bring needed names; a lesson also imports pictures, which
    take a second."""
    lines: dict[str, None] = {}
    for cell in notebook.cells:
        if cell.cell_type != "code":
            continue
        try:
            body = ast.parse(cell.source).body
        except SyntaxError:  # a cell with a magic
            continue
        for node in body:
            if isinstance(node, (ast.Import, ast.ImportFrom)):
                kept = [name for name in node.names
                        if (name.asname or name.name).split(".")[0] in needed]
                if kept:
                    node.names = kept
                    lines[ast.unparse(node)] = None
    return "\n".join(lines)


def _names(source: str) -> set[str]:
    return {node.id for node in ast.walk(parsed(source)) if isinstance(node, ast.Name)}


def _functions(source: str, wanted: set[str], without: str) -> list[str]:
    """The imports of a file of solutions and of its functions those that are wanted, with what they
    use; never the one that is being graded."""
    body = ast.parse(source).body
    functions = {node.name: node for node in body if isinstance(node, ast.FunctionDef)}
    taken, queue = set(), sorted(wanted & set(functions))
    while queue:
        name = queue.pop()
        if name in taken or name == without:
            continue
        taken.add(name)
        queue += sorted(_names(ast.unparse(functions[name])) & set(functions))
    imports = [ast.unparse(n) for n in body if isinstance(n, (ast.Import, ast.ImportFrom))]
    return ["\n".join(imports), *(ast.unparse(functions[name]) for name in sorted(taken))]
