"""A notebook as one HTML page that loads nothing: formulas are MathML, pictures are inside, and
links lead to the course's files from wherever the page is."""

from __future__ import annotations

import html
import os
import re
from pathlib import Path
from typing import Any
from urllib.parse import quote, unquote

from jinja2 import pass_context
from nbconvert import HTMLExporter
from nbconvert.filters.markdown_mistune import IPythonRenderer, MarkdownWithMath
from nbformat import NotebookNode

from course_lib.classroom.formulas import mathml

_LINK = re.compile(r"""(<(?:a|img)\b[^>]*?)\s(href|src)=(["'])(.*?)\3""", re.DOTALL)
_ELSEWHERE = re.compile(r"#|[a-zA-Z][a-zA-Z0-9+.-]*:|//")


def as_html(notebook: NotebookNode, source: Path, page: Path) -> str:
    """Return the text of `page` for the notebook read from `source`.

    A relative link of the notebook is written relative to the page's folder; one to a file that
    is not there keeps its text alone.
    """
    exporter = _Exporter(
        exclude_input_prompt=True, exclude_output_prompt=True,
        mathjax_url="", require_js_url="", jquery_url="", mermaid_js_url="",
    )
    exporter.folders = source.resolve().parent, Path(os.path.abspath(page)).parent
    body, _ = exporter.from_notebook_node(notebook, {"metadata": {"name": source.stem}})
    return body


class _Exporter(HTMLExporter):
    folders: tuple[Path, Path]

    @pass_context
    def markdown2html(self, context: Any, source: str) -> str:
        attachments = context.get("cell", {}).get("attachments", {})
        renderer = _Renderer(escape=False, attachments=attachments)
        made = MarkdownWithMath(renderer=renderer).render(source)
        return _LINK.sub(lambda link: _moved(link, *self.folders), made)


class _Renderer(IPythonRenderer):
    def inline_math(self, body: str) -> str:
        return mathml(body)

    def block_math(self, body: str) -> str:
        return mathml(body, "block")

    def latex_environment(self, name: str, body: str) -> str:
        return mathml(f"\\begin{{{name}}}{body}\\end{{{name}}}", "block")


def _moved(link: re.Match[str], before: Path, after: Path) -> str:
    """The part of a tag up to its link, which led from one folder and now leads from another."""
    tag, attribute, _, target = link.groups()
    target = html.unescape(target)
    if _ELSEWHERE.match(target):
        return link[0]
    path, mark, fragment = target.partition("#")
    file = before / unquote(path)
    if not file.exists():
        return tag
    moved = quote(Path(os.path.relpath(file, after)).as_posix()) + mark + fragment
    return f'{tag} {attribute}="{html.escape(moved)}"'
