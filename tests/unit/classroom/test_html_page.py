"""The page of a day: formulas drawn without a network, links that lead somewhere."""

from __future__ import annotations

import os
from pathlib import Path
from xml.etree import ElementTree

import nbformat
import pytest
from bs4 import BeautifulSoup

from course_lib.classroom.formulas import mathml
from course_lib.classroom.html_page import as_html
from course_lib.paths import NOTEBOOKS


def prose_page(text: str, source: Path, page: Path) -> BeautifulSoup:
    """The body of the page made of one markdown cell."""
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_markdown_cell(text)])
    return BeautifulSoup(as_html(notebook, source, page), "html.parser").main


@pytest.mark.parametrize("latex, tags, text", [
    (r"\frac{1}{2}", ["mfrac"], "12"),
    (r"\Big\lfloor \tfrac12 \Big\rfloor", ["mfrac"], "⌊12⌋"),
    (r"\big( x \big)", [], "(x)"),
    (r"\underbrace{n d}_{\text{probe: grows}}", ["munder"], "nd⏟probe:\u00a0grows"),
    (r"\begin{aligned} a &= b \\ c &= d \end{aligned}", ["mtable"], "a=bc=d"),
    (r"m < 10^{-6}", ["msup"], "m<10−6"),
])
def test_a_formula_becomes_mathml(latex, tags, text):
    made = ElementTree.fromstring(mathml(latex))
    assert "".join(made.itertext()) == text
    found = {element.tag.split("}")[1] for element in made.iter()}
    assert {"math", *tags} <= found
    assert 'display="block"' in mathml(latex, "block")


@pytest.mark.parametrize("latex", [r"\frac", r"\nosuchcommand < x", r"\left( x", "x^"])
def test_a_formula_that_is_not_understood_is_shown_as_it_was_written(latex):
    made = ElementTree.fromstring(mathml(latex))
    assert made.tag == "code" and made.text == latex


def test_links_are_written_for_the_place_of_the_page(tmp_path, monkeypatch):
    source = tmp_path / "notebooks" / "day42_x.ipynb"
    for name in ("notebooks/day42_x.ipynb", "docs/a b.md", "pages/x.html"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).touch()
    text = ("[a](../docs/a%20b.md#part) [b](nowhere.md) [c](https://example.org/x?a=1&b=2) [d](#x) "
            "![e](../docs/a%20b.md) <a class='x' href='day42_x.ipynb'>f</a> `[g](no.md)` "
            "<img alt='h' src=\"data:image/png;base64,AA\">")

    def links(page):
        made = prose_page(text, source, page)
        return {a.text: a.get("href") for a in made.find_all("a")}, [
            i["src"] for i in made.find_all("img")]

    monkeypatch.chdir(tmp_path / "pages")
    outside = "../docs/a%20b.md", "../notebooks/day42_x.ipynb"
    for page in (tmp_path / "pages" / "p.html", Path("p.html")):
        found, images = links(page)
        assert found == {"a": f"{outside[0]}#part", "b": None, "c": "https://example.org/x?a=1&b=2",
                         "d": "#x", "f": outside[1]}
        assert images == [outside[0], "data:image/png;base64,AA"]
    found, _ = links(tmp_path / "p.html")
    assert (found["a"], found["f"]) == ("docs/a%20b.md#part", "notebooks/day42_x.ipynb")


def test_code_keeps_its_dollars_and_brackets():
    made = prose_page("`$x$ <a href='no'>` and $y$\n\n    $z$\n", NOTEBOOKS / "x.ipynb",
                      Path(os.devnull))
    assert [code.text.strip() for code in made.find_all("code")] == ["$x$ <a href='no'>", "$z$"]
    assert made.find("math").text == "y"
