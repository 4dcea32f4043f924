"""The page on which texts are marked: by keyboard, kept at every change, harmless to look at."""

from __future__ import annotations

import json
import re

import pytest

expect = pytest.importorskip("playwright.sync_api").expect

TEXT = "<!-- ANSWER d10.b2 -->\nAnswer: {}\n\nEvidence: course_lib/sparse.py:1-3"
TEXTS = {"ann": "The probe comes first.", "bob": "<img src=x onerror=alert(1)> **bold**",
         "王小明": "先探测，再选块。"}


@pytest.fixture
def graded(tmp_path):
    lines = [{"student": student, "day": 10, "item": "d10.b2", "kind": "B", "status": "to_review",
              "auto": 1, "max": 4, "messages": [], "flags": [], "sha256": "s",
              "text": TEXT.format(text)} for student, text in TEXTS.items()]
    (tmp_path / ".state").mkdir()
    (tmp_path / ".state" / "last.json").write_text(json.dumps(lines))
    return tmp_path


@pytest.fixture
def review(page, course, graded):
    match, _ = course(["grade", "queue", str(graded), "--no-browser"], r"http://\S+")
    page.goto(match[0])
    expect(page.locator("#where")).to_contain_text("of 3")
    return page


def kept(graded):
    path = graded / "review.json"
    return json.loads(path.read_text()) if path.exists() else {"marks": [], "drafts": []}


def saved(page, word="saved"):
    expect(page.locator("#state")).to_have_text(re.compile(f"^{word}"))


def until(page, holds):
    """Wait for something outside the page."""
    for _ in range(150):
        if holds():
            return
        page.wait_for_timeout(100)
    raise AssertionError("it did not come to hold")


def test_three_texts_by_keyboard_alone(review, graded):
    given = {}
    for points in ("1", "2", "0"):
        given[review.inner_text("#answer")] = float(points)
        review.keyboard.press(points)
        saved(review)
        review.keyboard.press("n")
    assert review.inner_text("#state") == "all are marked"
    assert given.keys() == set(TEXTS.values())
    marks = {TEXTS[m["student"]]: m["points"] for m in kept(graded)["marks"]}
    assert marks == given
    assert "3 marked" in review.inner_text("#where")


def test_comments_are_kept_as_they_are_typed(review, graded):
    review.keyboard.press("c")
    review.keyboard.type("well 1 done")  # the 1 is text here, not a mark
    until(review, lambda: [d["comment"] for d in kept(graded)["drafts"]] == ["well 1 done"])
    saved(review, "comment saved")
    review.keyboard.press("Escape")
    review.keyboard.press("1")
    review.keyboard.press("h")
    saved(review)
    until(review, lambda: [(m["points"], m["comment"]) for m in kept(graded)["marks"]] == [
        (1.5, "well 1 done")])
    review.keyboard.press("j")
    assert review.input_value("#comment") == ""
    review.keyboard.press("k")
    assert review.input_value("#comment") == "well 1 done"


def test_marks_are_there_after_a_reload(review):
    review.keyboard.press("2")
    saved(review)
    review.reload()
    review.wait_for_selector("#points button[aria-pressed=true]")
    assert review.inner_text("#points button[aria-pressed=true]") == "2"


def test_what_a_student_wrote_is_text(review):
    dialogs = []
    review.on("dialog", lambda dialog: (dialogs.append(dialog.message), dialog.dismiss()))
    shown = set()
    for _ in TEXTS:
        shown.add(review.inner_text("#answer"))
        review.keyboard.press("j")
    assert shown == set(TEXTS.values()) and dialogs == []
    assert review.locator("img").count() == 0
    for name in TEXTS:
        assert name not in review.content()


def test_the_cited_lines_and_the_rubric_are_beside_the_answer(review):
    assert "course_lib/sparse.py:1-3" in review.inner_text("#source")
    assert "    1> " in review.inner_text("#source")
    assert len(review.inner_text("#rubric")) > 40


def test_a_server_that_is_gone_is_said(page, course, graded):
    match, process = course(["grade", "queue", str(graded), "--no-browser"], r"http://\S+")
    page.goto(match[0])
    page.wait_for_selector("#points button")
    process.kill()
    process.wait()
    page.keyboard.press("1")
    expect(page.locator("#state")).to_have_text(re.compile("^NOT SAVED"))
    assert kept(graded)["marks"] == []


def test_a_comment_on_a_changed_answer_gives_it_no_points(page, course, graded):
    mark = {"student": "ann", "item": "d10.b2", "points": 2, "comment": "old",
            "answer_sha256": "of another answer"}
    (graded / "review.json").write_text(json.dumps({"marks": [mark], "drafts": []}))
    match, _ = course(["grade", "queue", str(graded), "--no-browser"], r"http://\S+")
    page.goto(match[0])
    expect(page.locator("#where")).to_contain_text("of 3")
    while page.inner_text("#answer") != TEXTS["ann"]:
        page.keyboard.press("j")
    page.fill("#comment", "new")
    saved(page, "comment saved, no points yet")
    assert kept(graded)["marks"] == [mark] and page.is_visible("#changed")
    page.keyboard.press("Escape")
    page.keyboard.press("1")
    saved(page)
    assert [(m["points"], m["comment"]) for m in kept(graded)["marks"]] == [(1, "new")]
    assert not page.is_visible("#changed")


def test_what_was_not_saved_is_saved_when_that_works_again(review, graded):
    review.route("**/mark", lambda route: route.abort())
    review.keyboard.press("1")
    expect(review.locator("#state")).to_have_text(re.compile("^NOT SAVED"))
    review.keyboard.press("j")
    expect(review.locator("#state")).to_have_text(re.compile("^NOT SAVED"))
    review.unroute("**/mark")
    review.keyboard.press("2")
    until(review, lambda: sorted(m["points"] for m in kept(graded)["marks"]) == [1, 2])
    saved(review)


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_it_is_readable_at_twice_the_size(review, scheme):
    review.emulate_media(color_scheme=scheme)
    review.set_viewport_size({"width": 640, "height": 800})  # as 1280 at 200 %
    width = review.evaluate("document.documentElement.scrollWidth")
    assert width <= 640
