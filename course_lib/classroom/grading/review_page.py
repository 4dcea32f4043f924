"""The page on which a human reads texts: on this machine only, behind a token, without names."""

from __future__ import annotations

import asyncio
import hmac
import json
import secrets
import socket
import sys
import webbrowser
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tornado.httpserver import HTTPServer
from tornado.web import Application, RequestHandler

from course_lib.classroom.exercises import parse_id
from course_lib.classroom.grading.day import load_day
from course_lib.classroom.grading.human import is_stale
from course_lib.classroom.grading.review import Reviews, Waiting, rubric_of, source_of
from course_lib.classroom.grading.submission_marks import ItemMark
from course_lib.errors import CourseError

PAGE = Path(__file__).with_name("review_page.html")
ADDRESS = "127.0.0.1"
MAX_BODY = 100_000


class Desk:
    """What the page works on: the queue as it was opened, its rubrics, and where marks go. Raises
    CourseError in the students' edition, which has no rubrics."""

    def __init__(self, reviews: Reviews, marks: Sequence[ItemMark], everything: bool):
        self.reviews, self.token = reviews, secrets.token_urlsafe(24)
        self.waiting = reviews.queue(marks, everything)
        self._rubrics = {item: rubric_of(item, load_day(parse_id(item)[0]).solutions)
                         for item in dict.fromkeys(w.item for w in self.waiting)}
        self._mark = {(mark.item, reviews.blind(mark.student, mark.item)): mark
                      for mark in marks if mark.text}

    def queue(self) -> list[dict[str, Any]]:
        """The texts with their sources, rubrics and the marks given so far; no student's name."""
        return [self._shown(w) for w in self.waiting]

    def _shown(self, waiting: Waiting) -> dict[str, Any]:
        mark = self._mark[waiting.item, waiting.id]
        given = self.reviews.human.get((mark.student, mark.item))
        return {"id": waiting.id, "item": waiting.item, "answer": waiting.answer,
                "source": source_of(waiting.places), "rubric": self._rubrics[waiting.item],
                "most": waiting.most,
                "points": given.points if given else None,
                "comment": self.reviews.drafts.get(
                    (mark.student, mark.item), given.comment if given else ""),
                "changed": is_stale(mark, self.reviews.human)}

    def give(self, body: bytes) -> None:
        """Keep the mark of a request; CourseError for one that is malformed."""
        try:
            found = json.loads(body)
            key = str(found["item"]), str(found["id"])
            points = None if found["points"] is None else float(found["points"])
            comment = str(found["comment"])[:5000]
        except (ValueError, TypeError, KeyError, RecursionError):
            raise CourseError("send item, id, points and comment.") from None
        if key not in self._mark:
            raise CourseError("no such text in this queue.")
        self.reviews.give(self._mark[key], points, comment)


class Handler(RequestHandler):
    """What every request must pass: this machine's name, the token, a body of sensible size."""

    desk: Desk

    def initialize(self, desk: Desk) -> None:
        self.desk = desk

    def prepare(self) -> None:
        host = self.request.host.rpartition(":")[0] or self.request.host
        token = self.request.headers.get("X-Token") or self.get_query_argument("token", "")
        # A page elsewhere can send requests here under another host name (DNS rebinding).
        if host not in (ADDRESS, "localhost") or not hmac.compare_digest(
                token.encode(), self.desk.token.encode()):
            self.set_status(403)
            self.finish("open the address that ./course grade queue printed\n")

    def set_default_headers(self) -> None:
        self.set_header("Cache-Control", "no-store")
        self.set_header("Referrer-Policy", "no-referrer")
        self.set_header("X-Content-Type-Options", "nosniff")
        self.set_header("X-Frame-Options", "DENY")
        self.clear_header("Server")


class Page(Handler):
    """The page itself; script and style are inline under a nonce, nothing else is loaded."""

    def get(self) -> None:
        nonce = secrets.token_urlsafe(16)
        self.set_header("Content-Security-Policy", (
            f"default-src 'none'; script-src 'nonce-{nonce}'; style-src 'nonce-{nonce}'; "
            "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"))
        self.write(PAGE.read_text(encoding="utf-8").replace("NONCE", nonce))


class Queue(Handler):
    """The texts."""

    def get(self) -> None:
        self.write({"queue": self.desk.queue()})


class Mark(Handler):
    """A mark, kept at once."""

    def post(self) -> None:
        try:
            self.desk.give(self.request.body)
        except CourseError as error:
            self.set_status(400)
            self.write({"error": str(error)})
        except OSError as error:
            self.set_status(507)
            self.write({"error": f"not saved: {error.strerror}"})
        else:
            self.write({"saved": True})


def application(desk: Desk) -> Application:
    """The page and its two calls."""
    more = {"desk": desk}
    return Application([(r"/", Page, more), (r"/queue", Queue, more), (r"/mark", Mark, more)],
                       log_function=lambda handler: None)


def listen() -> socket.socket:
    """A socket on a free port of this machine alone."""
    sock = socket.socket()
    sock.bind((ADDRESS, 0))
    sock.listen(16)
    sock.setblocking(False)
    return sock


def serve(reviews: Reviews, marks: Sequence[ItemMark], everything: bool,
          open_browser: bool = True) -> int:
    """Serve the page until Ctrl-C; every mark is kept as it is given."""
    desk, sock = Desk(reviews, marks, everything), listen()
    address = f"http://{ADDRESS}:{sock.getsockname()[1]}/?token={desk.token}"
    print(f"{len(desk.waiting)} texts: {address}\nCtrl-C ends; every mark is kept as it is given",
          flush=True)

    async def run() -> None:
        server = HTTPServer(application(desk), max_body_size=MAX_BODY, max_buffer_size=MAX_BODY)
        server.add_socket(sock)
        if open_browser and sys.stdout.isatty():
            webbrowser.open(address)
        await asyncio.Event().wait()

    try:
        asyncio.run(run())
    except KeyboardInterrupt:
        pass
    left = len(reviews.queue(marks))
    print(f"\n{left} texts wait; ./course grade merge {reviews.path.parent} folds the marks in")
    return 0
