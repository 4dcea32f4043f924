"""Texts that humans mark: blind, question by question, never lost, never overwritten."""

from __future__ import annotations

import asyncio
import csv
import io
import json
import threading
import urllib.error
import urllib.request
from dataclasses import replace

import pytest
from tornado.httpserver import HTTPServer

from course_lib.classroom.grading import batch, review_page
from course_lib.classroom.grading.canvas import canvas_csv
from course_lib.classroom.grading.human import HumanMark, most_of
from course_lib.classroom.grading.review import (
    Reviews,
    merge_csv,
    queue_csv,
    rubric_of,
    source_of,
)
from course_lib.classroom.grading.submission_marks import ItemMark
from course_lib.commands import grade
from course_lib.commands.parser import Parser
from course_lib.errors import CourseError

TEXT = "<!-- ANSWER {} -->\nAnswer: {}\n\nEvidence: course_lib/sparse.py:1-2, nowhere.py:3"


def mark(student, item="d10.b2", text="Because.", status="to_review", most=4):
    return ItemMark(student, 10, item, "B", status, 1, most, (), (), "sha",
                    TEXT.format(item, text) if text else "")


MARKS = [mark("ann"), mark("bob", text="=1+1"), mark("王小明", text="拉面"),
         mark("ann", "d10.b1", most=3), mark("cy", text="", status="not_attempted")]


def rows(text):
    return list(csv.DictReader(io.StringIO(text.removeprefix("\ufeff"), newline="")))


def filled(text, **points):
    """The queue's table with points and comments by the answers' first word."""
    found = rows(text)
    for row in found:
        for word, (given, comment) in points.items():
            if word in row["answer"] and row["item"] == "d10.b2":
                row["points"], row["comment"] = given, comment
    out = io.StringIO()
    writer = csv.DictWriter(out, found[0].keys())
    writer.writeheader()
    writer.writerows(found)
    return out.getvalue()


def test_the_queue_is_blind_and_by_question(tmp_path):
    reviews = Reviews(tmp_path)
    waiting = reviews.queue(MARKS)
    assert [w.item for w in waiting] == ["d10.b1", "d10.b2", "d10.b2", "d10.b2"]
    assert [w.id for w in waiting[1:]] == sorted(w.id for w in waiting[1:])
    table = queue_csv(waiting)
    assert not any(name in table for name in ("ann", "bob", "王小明"))
    assert reviews.blind("ann", "d10.b1") != reviews.blind("ann", "d10.b2")
    assert Reviews(tmp_path).blind("ann", "d10.b1") == reviews.blind("ann", "d10.b1")
    other = tmp_path / "other"
    other.mkdir()
    assert Reviews(other).blind("ann", "d10.b1") != reviews.blind("ann", "d10.b1")
    assert "'=1+1" in table and "    1> " in table and "there is no file nowhere.py" in table


def test_points_that_parts_do_not_earn_are_a_humans():
    assert [most_of(m) for m in MARKS] == [2, 2, 2, 2, 2]


def test_marks_are_kept_at_once_and_leave_the_queue(tmp_path):
    reviews = Reviews(tmp_path)
    reviews.give(MARKS[0], 1.5, "nice")
    again = Reviews(tmp_path)
    assert again.human == reviews.human
    assert len(again.queue(MARKS)) == 3 and len(again.queue(MARKS, everything=True)) == 4
    for points in (-0.5, 2.5, float("nan"), float("inf")):
        with pytest.raises(CourseError, match="takes 0 to 2 points"):
            again.give(MARKS[0], points, "")
    assert Reviews(tmp_path).human["ann", "d10.b2"].points == 1.5


def test_two_who_mark_in_one_folder_keep_each_others_marks(tmp_path):
    one, two = Reviews(tmp_path), Reviews(tmp_path)
    one.give(MARKS[0], 1, "one")
    two.give(MARKS[1], 2, "two")
    one.give(MARKS[2], None, "draft")
    again = Reviews(tmp_path)
    assert {key: m.points for key, m in again.human.items()} == {
        ("ann", "d10.b2"): 1, ("bob", "d10.b2"): 2}
    assert again.drafts == {("王小明", "d10.b2"): "draft"}


def test_half_an_emoji_in_a_comment_is_kept_as_a_question_mark(tmp_path):
    reviews = Reviews(tmp_path)
    reviews.give(MARKS[0], 1, "fine \ud83d")
    assert Reviews(tmp_path).human["ann", "d10.b2"].comment == "fine ?"


def test_a_comment_without_points_is_a_draft(tmp_path):
    reviews = Reviews(tmp_path)
    reviews.give(MARKS[0], None, "hm")
    assert Reviews(tmp_path).drafts == {("ann", "d10.b2"): "hm"}
    assert Reviews(tmp_path).human == {} and len(reviews.queue(MARKS)) == 4
    reviews.give(MARKS[0], 1, "hm!")
    assert Reviews(tmp_path).drafts == {}


def test_a_changed_answer_is_looked_at_again(tmp_path):
    reviews = Reviews(tmp_path)
    reviews.give(MARKS[0], 2, "fine")
    new = replace(MARKS[0], text=MARKS[0].text.replace("Because", "Since"))
    (waiting,) = [w for w in reviews.queue([new]) if w.item == "d10.b2"]
    assert waiting.changed and waiting.given.points == 2
    assert reviews.flagged([new])[0].flags == ("resubmitted",)
    assert reviews.flagged(MARKS)[0].flags == ()
    reviews.give(new, 1, "less clear")
    assert reviews.queue([new]) == [] and reviews.flagged([new])[0].flags == ()


def test_a_damaged_file_of_marks_is_never_overwritten(tmp_path):
    Reviews(tmp_path)
    (tmp_path / "review.json").write_text("{")
    with pytest.raises(CourseError, match="put back a copy"):
        Reviews(tmp_path)
    assert (tmp_path / "review.json").read_text() == "{"


def test_a_mark_that_cannot_be_written_is_not_pretended(tmp_path, monkeypatch):
    reviews = Reviews(tmp_path)

    def full(*args):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("course_lib.classroom.grading.review.write_atomically", full)
    with pytest.raises(OSError):
        reviews.give(MARKS[0], 1, "")
    assert reviews.human == {}


@pytest.mark.parametrize("delimiter", [",", ";", "\t"])
def test_a_filled_table_is_merged(tmp_path, delimiter):
    reviews = Reviews(tmp_path)
    table = filled(queue_csv(reviews.queue(MARKS)), Because=("1,5", "ok"), 拉面=("2", ""))
    out = io.StringIO()
    csv.writer(out, delimiter=delimiter).writerows(csv.reader(io.StringIO(table, newline="")))
    merged = merge_csv(reviews, MARKS, "\ufeff" + out.getvalue())
    assert (merged.taken, merged.kept) == (2, [])
    assert {key: m.points for key, m in reviews.human.items()} == {
        ("ann", "d10.b2"): 1.5, ("王小明", "d10.b2"): 2}


def test_a_table_with_a_very_long_answer_is_merged(tmp_path):
    reviews = Reviews(tmp_path)
    table = filled(queue_csv(reviews.queue(MARKS)), Because=("1", ""))
    before = csv.field_size_limit(131_072)
    assert merge_csv(reviews, MARKS, table + f"d10.b2,q,{'x' * 200_000},,,,,\n").taken == 1
    csv.field_size_limit(before)


def test_a_humans_mark_is_not_overwritten_by_a_table(tmp_path):
    reviews = Reviews(tmp_path)
    table = filled(queue_csv(reviews.queue(MARKS)), Because=("1", "table"))
    reviews.give(MARKS[0], 2, "page")
    merged = merge_csv(reviews, MARKS, table)
    assert merged.taken == 0 and "2 stays, the table says 1" in merged.kept[0]
    assert reviews.human["ann", "d10.b2"].comment == "page"
    assert merge_csv(reviews, MARKS, filled(table, Because=("2", "page"))).kept == []


@pytest.mark.parametrize("change, message", [
    (lambda t: t.replace("points", "score", 1), "no column points"),
    (lambda t: "", "no column item"),
    (lambda t: filled(t, Because=("9", "")), "takes 0 to 2 points, not 9"),
    (lambda t: filled(t, Because=("two", "")), "must be a number, not 'two'"),
    (lambda t: filled(t, Because=("nan", "")), "takes 0 to 2 points, not nan"),
    (lambda t: filled(t, Because=("1", "")).replace("d10.b2,q", "d10.b2,z"), "is in no queue"),
])
def test_a_wrong_table_changes_nothing(tmp_path, change, message):
    reviews = Reviews(tmp_path)
    with pytest.raises(CourseError, match=message):
        merge_csv(reviews, MARKS, change(queue_csv(reviews.queue(MARKS))))
    assert reviews.human == {}


def test_rubrics_and_cited_lines():
    assert rubric_of("d1.b1", 'ANSWERS = {"d1.b1": "one " "two"}\n') == "one two"
    assert rubric_of("d1.b2", 'ANSWERS = {"d1.b1": "one"}\n') == ""
    shown = source_of([("", place) for place in (
        "course_lib/paths.py:3-3", "/etc/passwd:1-2", "../../etc/passwd:1-1")])
    assert "    3> " in shown and "    1  " in shown and "root:" not in shown
    assert shown.count("there is no file") == 2
    assert source_of([("", "x:1-1")] * 50).endswith("(and 30 more places)")


# The commands


def call(*words):
    parser = Parser(prog="./course grade")
    grade.add_arguments(parser)
    return grade.run(parser.parse_args(list(words)))


def test_queue_and_merge_by_table(tmp_path, capsys):
    with pytest.raises(CourseError, match="holds no graded submissions"):
        call("queue", str(tmp_path), "--csv")
    (tmp_path / ".state").mkdir()
    batch.keep_marks(tmp_path, MARKS)
    assert call("queue", str(tmp_path), "--csv", "--item", "d10.b2") == 0
    table = tmp_path / "review.csv"
    with pytest.raises(CourseError, match="is there already"):
        call("queue", str(tmp_path), "--csv")
    table.write_text(filled(table.read_text("utf-8-sig"), Because=("2", "good")), "utf-8")
    capsys.readouterr()
    assert call("merge", str(tmp_path)) == 0
    assert "1 marks taken" in capsys.readouterr().out
    found = {(r["student"], r["item"]): r for r in rows((tmp_path / "grades.csv").read_text())}
    assert found["ann", "d10.b2"]["manual"] == "2" and found["bob", "d10.b2"]["manual"] == ""
    assert "Comment: good" in (tmp_path / "feedback" / "ann" / "day10.md").read_text()
    with pytest.raises(CourseError, match="d10.b9 is no item"):
        call("queue", str(tmp_path), "--csv", "--item", "d10.b9")


# The page


@pytest.fixture
def page(tmp_path, hidden_half):
    """(address, desk) of a running page."""
    desk = review_page.Desk(Reviews(tmp_path), MARKS, everything=False)
    sock = review_page.listen()
    loop, started = asyncio.new_event_loop(), threading.Event()

    async def run():
        HTTPServer(review_page.application(desk)).add_socket(sock)
        started.set()

    def work():
        asyncio.set_event_loop(loop)
        loop.run_until_complete(run())
        loop.run_forever()

    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    assert started.wait(10)
    yield f"http://127.0.0.1:{sock.getsockname()[1]}", desk
    loop.call_soon_threadsafe(loop.stop)
    thread.join(10)
    sock.close()


def ask(address, path, token=None, body=None, host=None):
    headers = {} if token is None else {"X-Token": token}
    headers |= {} if host is None else {"Host": host}
    request = urllib.request.Request(address + path, body, headers)
    try:
        with urllib.request.urlopen(request, timeout=10) as found:
            return found.status, found.read().decode(), found.headers
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode(), error.headers


def test_the_page_wants_its_token_and_its_own_name(page):
    address, desk = page
    for path in ("/", "/queue", "/?token=wrong", "/?token=\u00e9".replace("é", "%C3%A9")):
        assert ask(address, path)[0] == 403
    assert ask(address, "/queue", desk.token)[0] == 200
    assert ask(address, "/queue", desk.token, host="evil.example:80")[0] == 403
    status, text, headers = ask(address, f"/?token={desk.token}")
    assert status == 200 and "NONCE" not in text
    assert "default-src 'none'" in headers["Content-Security-Policy"]
    assert "http:" not in text and "https:" not in text


def test_the_page_shows_no_names_and_keeps_marks(page):
    address, desk = page
    text = ask(address, "/queue", desk.token)[1]
    queue = json.loads(text)["queue"]
    assert len(queue) == 4 and not any(name in text for name in ("ann", "bob", "王小明", "\\u738b"))
    assert queue[1]["rubric"] and queue[1]["most"] == 2
    body = json.dumps({"id": queue[1]["id"], "item": "d10.b2", "points": 1.5, "comment": "<b>"})
    assert ask(address, "/mark", desk.token, body.encode())[0] == 200
    assert [m.points for m in Reviews(desk.reviews.path.parent).human.values()] == [1.5]
    assert json.loads(ask(address, "/queue", desk.token)[1])["queue"][1]["comment"] == "<b>"


@pytest.mark.parametrize("body", [
    b"", b"[]", b"{}", b'{"id": "x", "item": "d10.b2", "points": 1, "comment": ""}',
    b'{"id": 1, "item": 2, "points": "x", "comment": ""}', b"[" * 10**5,
])
def test_malformed_marks_are_refused(page, body):
    address, desk = page
    status, text, _ = ask(address, "/mark", desk.token, body)
    assert status == 400 and json.loads(text)["error"]
    assert desk.reviews.human == {}


def test_too_many_points_are_refused(page):
    address, desk = page
    queue = json.loads(ask(address, "/queue", desk.token)[1])["queue"]
    for points in (3, -1, float("nan")):
        body = json.dumps({"id": queue[1]["id"], "item": "d10.b2", "points": points,
                           "comment": ""}).encode()
        assert ask(address, "/mark", desk.token, body)[0] == 400


def test_a_course_without_rubrics_opens_no_page(tmp_path, monkeypatch):
    def absent(day):
        raise CourseError("tests/grading/day10.py is not here")

    monkeypatch.setattr(review_page, "load_day", absent)
    with pytest.raises(CourseError, match="is not here"):
        review_page.serve(Reviews(tmp_path), MARKS, everything=False, open_browser=False)


# Canvas

EXPORT = ("Student,ID,SIS User ID,SIS Login ID,Section,Old task (1)\n"
          "    Points Possible,,,,,10\n"
          '"Lee, Ann",1,s1,ann,A,5\n"Bo",2,s2,b2,A,\n"Twin",3,s3,x3,A,\n"Twin",4,s4,x4,A,\n')


def test_points_join_the_students_of_an_export():
    marks = [mark("ANN"), mark("ann2"), mark("s2", "d10.b1")]
    found = canvas_csv("\ufeff" + EXPORT, marks, {("ANN", "d10.b2"): HumanMark(1.5, "", "")})
    lines = list(csv.reader(io.StringIO(found.text.removeprefix("\ufeff"))))
    assert lines[0] == ["Student", "ID", "SIS User ID", "SIS Login ID", "Section", "Day 10"]
    assert lines[1] == ["    Points Possible", "", "", "", "", "4"]
    assert [line[-1] for line in lines[2:]] == ["2.5", "1", "", ""]
    assert lines[2][0] == "Lee, Ann" and found.unknown == ["ann2"]


@pytest.mark.parametrize("export, message", [
    ("", "no gradebook"), ("a,b\n1,2\n", "no gradebook"), (EXPORT, "the name of 2 students")])
def test_exports_that_do_not_fit(export, message):
    with pytest.raises(CourseError, match=message):
        canvas_csv(export, [mark("twin")], {})
