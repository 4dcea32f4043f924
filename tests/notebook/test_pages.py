"""The page of every day: formulas drawn without a network, links that lead somewhere."""

from __future__ import annotations

import re
from urllib.parse import unquote, urlsplit

import pytest
from bs4 import BeautifulSoup

from course_lib.classroom.html_page import as_html
from course_lib.classroom.source import find_days, parse

DAYS = find_days()


@pytest.mark.parametrize("day", DAYS, ids=lambda day: day.name)
def test_the_page_of_a_day(day, tmp_path):
    page = tmp_path / "a folder" / "page.html"
    page.parent.mkdir()
    notebook = parse(day)
    soup = BeautifulSoup(as_html(notebook, day.notebook, page), "html.parser")
    ids = {tag["id"] for tag in soup.find_all(id=True)}
    links = [a["href"] for a in soup.main.find_all("a", href=True)]
    files = [urlsplit(link) for link in links if not link.startswith(("#", "https:"))]
    assert files
    for link in files:
        assert (page.parent / unquote(link.path)).exists(), link.path
    assert {link[1:] for link in links if link.startswith("#")} <= ids
    prose = "\n".join(c.source for c in notebook.cells if c.cell_type == "markdown")
    for display, marks in (("block", r"\$\$"), ("inline", r"(?<!\$)\$(?!\$)")):
        written = re.findall(f"{marks}[^$]+{marks}", re.sub(r"`[^`\n]*`", "", prose))
        assert len(soup.find_all("math", display=display)) == len(written)
    for tag in soup.find_all(["pre", "code", "script", "style"]):
        assert "\\" not in tag.text or tag.name != "code" or tag.parent.name == "pre", tag
        tag.decompose()
    assert not re.search(r"\$|\\[a-zA-Z]", soup.text)
