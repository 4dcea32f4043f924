"""A server of /v1/chat/completions on this machine that answers as a test tells it to."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

EVENT_STREAM, JSON = "text/event-stream", "application/json"


def chunk(text: str | None = None, reason: str | None = None, **more) -> dict:
    """One object of a stream."""
    delta = {} if text is None else {"content": text}
    return {"choices": [{"index": 0, "delta": delta, "finish_reason": reason}], **more}


def usage(prompt: int, completion: int) -> dict:
    """The object of a stream that holds the counts."""
    return {"choices": [], "usage": {"prompt_tokens": prompt, "completion_tokens": completion}}


def event(value: dict | str) -> bytes:
    """One server-sent event."""
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    return f"data: {text}\n\n".encode()


def stream(*texts: str, reason: str = "stop", counts: tuple[int, int] | None = None) -> bytes:
    """A whole stream that says `texts`."""
    objects = [*map(chunk, texts), chunk(reason=reason)]
    objects += [usage(*counts)] if counts else []
    return b"".join(map(event, [*objects, "[DONE]"]))


class ChatServer:
    """`url`; `requests`, the bodies received; `headers` of each. `answer(handler, body)` answers a
    POST, by `send` as a rule; `models`, the names that GET /v1/models lists (None: 404)."""

    def __init__(self) -> None:
        self.requests: list[dict] = []
        self.headers: list[dict[str, str]] = []
        self.models: list[str] | None = None
        self.answer: Callable[[BaseHTTPRequestHandler, dict], None]
        self.answers(stream("hello"))

    def answers(self, *parts: bytes, kind: str | None = EVENT_STREAM, status: int = 200,
                **headers: str) -> None:
        """Answer every POST with this."""
        self.answer = lambda handler, body: send(handler, *parts, kind=kind, status=status,
                                                 **headers)


def send(handler: BaseHTTPRequestHandler, *parts: bytes, kind: str | None = EVENT_STREAM,
         status: int = 200, **headers: str) -> None:
    """One answer, its parts in writes of their own; the connection's end ends it."""
    handler.send_response(status)
    if kind is not None:
        handler.send_header("Content-Type", kind)
    for name, value in headers.items():
        handler.send_header(name, value)
    handler.end_headers()
    for part in parts:
        handler.wfile.write(part)
        handler.wfile.flush()


@contextmanager
def chat_server():
    """A running ChatServer."""
    made = ChatServer()

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            made.headers.append(dict(self.headers))
            if made.models is None or self.path != "/v1/models":
                send(self, b"{}", kind=JSON, status=404)
            else:
                names = {"data": [{"id": name} for name in made.models]}
                send(self, json.dumps(names).encode(), kind=JSON)

        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            made.requests.append({**json.loads(body), "path": self.path})
            made.headers.append(dict(self.headers))
            try:
                made.answer(self, made.requests[-1])
            except (BrokenPipeError, ConnectionResetError):
                pass  # the client has had enough

        def log_message(self, *args) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    made.url = f"http://127.0.0.1:{server.server_address[1]}"
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    try:
        yield made
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
