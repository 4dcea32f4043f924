"""A client of any server that speaks OpenAI's /v1/chat/completions, such as an engine on the board.

Source of the route: article 10-2, section 3. Nothing here runs a model of ours.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import httpx

from course_lib.engine.completions import (
    AnswerError,
    ChatResult,
    Gathered,
    Piece,
    json_object,
    part_of,
    shortened,
)
from course_lib.engine.server_faults import CONNECT_TIMEOUT, Faults
from course_lib.engine.server_url import KEY_VARIABLE, ROUTE, base_url, is_loopback
from course_lib.engine.sse import events
from course_lib.errors import CourseError

TIMEOUT = 1800.0  # seconds without text: a board's prefill of a long prompt takes many minutes
BYTES_PER_TOKEN, BYTES_OVERHEAD = 16_384, 1 << 20  # no honest answer is longer
# What experiments need beyond the standard fields; servers that refuse them are asked without.
OPTIONAL = {
    "stream_options": {"include_usage": True},
    "chat_template_kwargs": {"enable_thinking": False},
}


class Client:
    """One server, one model of it.

    url: "http://127.0.0.1:8080", with or without /v1 and a last slash. model: its name there; None
    asks the server, which must serve one. api_key: sent as a bearer token; None takes the
    environment's COURSE_API_KEY. timeout: seconds without text until a request is given up.
    Redirects are not followed, so the key goes nowhere else; a loopback address is never asked
    through a proxy. Raises CourseError for a URL or key that cannot be meant, and for a proxy in
    the environment that cannot be used.
    """

    def __init__(
        self,
        url: str,
        model: str | None = None,
        api_key: str | None = None,
        timeout: float = TIMEOUT,
    ):
        self.base = base_url(url)
        self._key = os.environ.get(KEY_VARIABLE, "") if api_key is None else api_key
        if not (self._key.isascii() and self._key.isprintable()) or " " in self._key:
            raise CourseError(
                f"the API key holds spaces, control or other than ASCII characters: set "
                f"{KEY_VARIABLE} to the key alone"
            )
        self._model = model
        self.timeout = timeout
        self.faults = Faults(self.base + ROUTE, self._key, timeout)
        try:
            self._http = httpx.Client(
                headers={"Authorization": f"Bearer {self._key}"} if self._key else {},
                timeout=httpx.Timeout(timeout, connect=min(CONNECT_TIMEOUT, timeout)),
                trust_env=not is_loopback(httpx.URL(self.base).host),
                verify=self.base.startswith("https:"),  # else there is no certificate to verify
                follow_redirects=False,
            )
        except (ValueError, ImportError, OSError, httpx.InvalidURL) as error:
            raise CourseError(
                "a proxy or certificate file that the environment names cannot be used "
                f"({shortened(str(error))}): look at ALL_PROXY, HTTP_PROXY, HTTPS_PROXY and "
                "SSL_CERT_FILE, or name the server's host in NO_PROXY"
            ) from None

    def __enter__(self) -> Client:
        return self

    def __exit__(self, *exc: object) -> None:
        self._http.close()

    @property
    def model(self) -> str | None:
        """The served model's name; asked from /v1/models if none was given, None if the server
        has no such route. CourseError if it serves several."""
        if self._model is None:
            names = self._served()
            if len(names) > 1:
                raise CourseError(
                    f"{self.base} serves {len(names)} models ({shortened(', '.join(names))}): "
                    "choose one with --served-model"
                )
            self._model = names[0] if names else ""
        return self._model or None

    def chat(
        self,
        messages: Sequence[Mapping[str, str]],
        max_tokens: int,
        temperature: float = 0.0,
        stream: bool = True,
    ) -> Answer:
        """Ask for the next message: an Answer, to be read piece by piece or at once.

        The request is sent when the answer is read, and once more without fields that are not
        standard if the server refuses them. Reading raises CourseError, one sentence that names
        the URL and the remedy.
        """
        request: dict[str, Any] = {
            "messages": [dict(message) for message in messages],
            "max_tokens": max_tokens,
            "temperature": temperature,
            "stream": stream,
        }
        return Answer(self, request)

    def head(self, response: httpx.Response, length: int = 65_536) -> bytes:
        """The first bytes of an answer that is not wanted whole; CourseError where even they do not
        end."""
        head, begin = b"", time.perf_counter()
        for chunk in response.iter_bytes():
            head += chunk
            if len(head) >= length:
                break
            if time.perf_counter() - begin > self.timeout:
                raise self.faults.silence()
        return head

    def _served(self) -> list[str]:
        with self.faults.said_plainly():
            with self._http.stream("GET", self.base + "/models") as response:
                body = self.head(response, 1 << 20)
        if response.status_code in (401, 403):
            raise self.faults.refusal(response.status_code, body)
        try:
            data = json_object(body).get("data")
        except AnswerError:
            return []
        entries = data if isinstance(data, list) else []
        names = [entry.get("id") for entry in entries if isinstance(entry, dict)]
        return [name for name in names if isinstance(name, str)]


class Answer:
    """An answer to come: iterate for Pieces as they arrive; `result()` is the whole.

    After a failure, or when reading was stopped early, `result()` raises the error or reads on.
    """

    def __init__(self, client: Client, request: dict[str, Any]):
        self._client = client
        self._request = request
        self._gathered = Gathered()
        self._result: ChatResult | None = None
        self._pieces = self._read()

    def __iter__(self) -> Iterator[Piece]:
        return self._pieces

    def result(self) -> ChatResult:
        """The finished answer; reads what has not been read."""
        for _ in self._pieces:
            pass
        if self._result is None:
            raise self._client.faults.fault("gave no answer: ask again")
        return self._result

    def _read(self) -> Iterator[Piece]:
        client, extra = self._client, dict(OPTIONAL)
        if not self._request["stream"]:
            del extra["stream_options"]
        with client.faults.said_plainly():
            name = client.model
            standard = {**({"model": name} if name else {}), **self._request}
            for body in ({**standard, **extra}, standard):
                started = time.perf_counter()
                with client._http.stream("POST", client.base + ROUTE, json=body) as response:
                    if response.status_code in (400, 422) and body is not standard:
                        continue
                    if response.status_code != 200:
                        head = client.head(response)
                        location = response.headers.get("location", "")
                        raise client.faults.refusal(response.status_code, head, location)
                    yield from self._parts(response, started)
                    return

    def _parts(self, response: httpx.Response, started: float) -> Iterator[Piece]:
        kind = response.headers.get("content-type", "").partition(";")[0].strip().lower()
        streamed = kind == "text/event-stream" or (not kind and self._request["stream"])
        if not streamed and kind not in ("", "application/json"):
            raise self._client.faults.fault(
                f"answers {shortened(kind)}, neither JSON nor an event stream: check that the URL "
                "is that of an OpenAI-compatible server"
            )
        chunks = self._within_limits(response, started)
        ended = False
        objects = events(chunks) if streamed else iter([b"".join(chunks)])
        for text in objects:
            if text == "[DONE]":
                ended = True
                break
            if streamed and not text.strip():  # an event without data
                continue
            part = part_of(json_object(text))
            seconds = time.perf_counter() - started
            self._gathered.add(part, seconds)
            if part.text:
                yield Piece(part.text, seconds)
        if streamed and not ended and self._gathered.finish_reason is None:
            raise self._client.faults.fault(
                "ended its stream before the answer was whole: look at its log and ask again"
            )
        self._result = self._gathered.result(time.perf_counter() - started, streamed)

    def _within_limits(self, response: httpx.Response, started: float) -> Iterator[bytes]:
        """The bytes of the answer; CourseError where they do not end or bring no text for long."""
        limit = BYTES_OVERHEAD + BYTES_PER_TOKEN * self._request["max_tokens"]
        for chunk in response.iter_bytes():
            limit -= len(chunk)
            if limit < 0:
                raise self._client.faults.fault(
                    f"does not end after {self._request['max_tokens']} tokens: check that it "
                    "obeys max_tokens"
                )
            last = self._gathered.arrivals[-1] if self._gathered.arrivals else 0.0
            if time.perf_counter() - started - last > self._client.timeout:
                raise self._client.faults.silence()
            yield chunk
